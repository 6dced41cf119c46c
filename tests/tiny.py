"""Tiny random targets in Hugging Face's form, made on the spot: the same code paths as an 8B model,
in milliseconds.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from eyas.model.weights import read_arrays
from eyas.operators.tensors import tensors_of

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
FAMILIES = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TEXT = [
    "user",
    "assistant",
    "system",
    "I would like a table for two in San Jose.",
    "The address is 71 North Street.",
    "0123456789",
]


@cache
def _tokenizer(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def tiny_tokenizer(
    folder: Path, vocab_size: int = 320, chat_template: str | None = TEMPLATE
) -> None:
    """Save a byte-level BPE with ChatML specials (0, 1, 2) and, unless None, the chat template."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(vocab_size),
        eos_token=SPECIALS[2],
        pad_token=SPECIALS[0],
        clean_up_tokenization_spaces=False,
    )
    if chat_template is not None:
        fast.chat_template = chat_template
    fast.save_pretrained(folder)


def tiny_target(
    folder: Path, family: str = "llama", seed: int = 0, dtype: str = "float32", **overrides: Any
) -> Path:
    """Write a random target of 8 layers, hidden 32, vocabulary 320 to `folder` and return it."""
    shape: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,  # large, so that logits differ and an argmax is no coin toss
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    if family == "mistral":
        shape["sliding_window"] = None
    config = FAMILIES[family](**{**shape, **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    for name, weight in model.named_parameters():
        # ones and zeros would hide a forgotten norm or bias
        if "norm" in name or name.endswith("bias"):
            weight.data.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder)
    tiny_tokenizer(folder, max(320, config.vocab_size))
    return Path(folder)


def children_of(pid: int) -> list[int]:
    """The processes that a process has started: of the first of grammars, one for each grammar."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def read_tensors(folder: str | Path, pickled: bool = False) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return tensors_of(read_arrays(folder, None, pickled))
