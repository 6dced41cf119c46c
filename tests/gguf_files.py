"""GGUF files of tiny targets, written by the format's own package as llama.cpp's converter lays
them out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer

from eyas.gguf.folder import BY_LAYER, GLOBAL
from eyas.model.weights import read_tensors

F32 = gguf.GGMLQuantizationType.F32
STEMS = {theirs: ours for ours, theirs in (GLOBAL | BY_LAYER).items()}


def interleaved(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of q or k as ggml's rotary embedding wants them: row i of the first half of a head
    beside row i of its second.
    """
    D = values.shape[0] // heads
    order = [
        head * D + half * (D // 2) + i
        for head in range(heads)
        for i in range(D // 2)
        for half in range(2)
    ]
    return np.ascontiguousarray(values[order])


def ggml_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in STEMS:
        return f"{STEMS[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{STEMS[part]}.{kind}"


def gguf_file(
    folder: Path,
    file: Path,
    kind: gguf.GGMLQuantizationType = F32,
    changes: dict[str, Any] | None = None,
    add: dict[str, NDArray[np.float32]] | None = None,
) -> Path:
    """Write a tiny target as a GGUF file, its matrices in a type of ggml's.

    changes: metadata to set otherwise; None leaves a key out. add: tensors by ggml's name.
    """
    config = AutoConfig.from_pretrained(folder)
    architecture = {"mistral": "llama"}.get(config.model_type, config.model_type)
    metadata = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    settings = {f"{architecture}.{key}": value for key, value in metadata.items()}
    settings |= {"general.architecture": architecture, **tokenizer_metadata(folder)}
    settings |= changes or {}
    writer = gguf.GGUFWriter(file, settings.pop("general.architecture"))
    for key, value in settings.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            put = {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32}
            put.get(type(value), writer.add_uint32)(key, value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in read_tensors(folder).items():
        values = tensor.float().numpy()
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            values = interleaved(values, heads[part])
        stored = kind if values.ndim == 2 else F32
        writer.add_tensor(ggml_name(name), gguf.quantize(values, stored), raw_dtype=stored)
    for name, values in (add or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def tokenizer_metadata(folder: Path) -> dict[str, Any]:
    """The vocabulary of a tiny target: byte-level BPE without a rule of its own, so GPT-2's."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = {
        number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special
    }
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [text for text, _ in vocabulary],
        "tokenizer.ggml.token_type": [3 if number in special else 1 for _, number in vocabulary],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": AutoTokenizer.from_pretrained(folder).chat_template,
    }
