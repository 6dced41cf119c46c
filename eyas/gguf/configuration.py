"""config.json from a GGUF file's metadata, for the architectures that our own decoder runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.errors import MismatchError
from eyas.gguf.file import GgufFile, dequantised

SOURCE = "gguf"  # in config.json: name of the file, and in what types its matrices are stored


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a model of one of ggml's architectures is called by transformers, and whether its rows
    of q and k are interleaved (see folder.py).
    """

    model_type: str
    class_name: str
    interleaves_heads: bool = False


# By `general.architecture`. Another one is an entry here, and one in model/config.py (FAMILIES).
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", interleaves_heads=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
}
OTHER_ARCHITECTURE = (
    "eyas reads GGUF files of Llama, Mistral, Qwen2 and Qwen3; of another model take its folder in "
    "Hugging Face's form, and let a server of it (SGLang, vLLM) answer: eyas generate --server URL"
)
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1's scaling, as one factor by frequency


def configuration(file: GgufFile) -> dict[str, Any]:
    """config.json. Raises MismatchError, CorruptError."""
    architecture = ARCHITECTURES.get(file.architecture)
    if architecture is None or file.of_model("expert_count", 0):
        kind = "a mixture of experts" if architecture else repr(file.architecture)
        raise MismatchError(f"{file.path} holds {kind}", OTHER_ARCHITECTURE)
    hidden, heads = file.count("embedding_length"), file.count("attention.head_count")
    head_dim = file.count("attention.key_length", hidden // heads)
    tokens = file.of_tokenizer("tokens") or []
    config = {
        "model_type": architecture.model_type,
        "architectures": [architecture.class_name],
        "dtype": stored_dtype(file),
        "hidden_size": hidden,
        "intermediate_size": file.count("feed_forward_length"),
        "num_hidden_layers": file.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": len(tokens),
        "rms_norm_eps": float(str(np.float32(file.of_model("attention.layer_norm_rms_epsilon")))),
        "max_position_embeddings": file.count("context_length"),
        "rope_theta": float(file.of_model("rope.freq_base", 10000.0)),
        "rope_scaling": rope_scaling(file, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "hidden_act": "silu",
        SOURCE: {"file": file.path.name, "types": quantisation(file)},
    }
    window = file.of_model("attention.sliding_window", 0)
    return config | ({"sliding_window": window} if window else {})


def stored_dtype(file: GgufFile) -> str:
    """What its matrices become: float32 where all are stored so, else bfloat16."""
    kinds = set(quantisation(file))
    return "float32" if kinds == {"F32"} else "bfloat16"


def quantisation(file: GgufFile) -> dict[str, int]:
    """How many matrices are stored in each of ggml's types."""
    kinds = [tensor.tensor_type.name for tensor in file.tensors.values() if len(tensor.shape) > 1]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def rope_scaling(file: GgufFile, head_dim: int) -> dict[str, Any] | None:
    """`rope_scaling` of config.json. Raises MismatchError for a scaling that we do not read.

    Of Llama 3.1's the file holds only what came out, a factor by frequency: the parameters are
    found among those that Llama's models have, by the same factors.
    """
    kind = file.of_model("rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        factors = dequantised(file.tensors[ROPE_FACTORS])
        base = float(file.of_model("rope.freq_base", 10000.0))
        for factor in (8.0, 32.0):
            scaling = {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
            if np.allclose(factors, llama3_factors(scaling, base, head_dim), rtol=1e-3):
                return scaling
        kind = f"{ROPE_FACTORS} of an unknown kind"
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(file.of_model("rope.scaling.factor"))}
    if kind != "none":
        raise MismatchError(
            f"{file.path} scales its rotary embedding by {kind}",
            "eyas reads files without scaling, with linear scaling or Llama 3.1's",
        )
    return None


def llama3_factors(scaling: Mapping[str, Any], base: float, head_dim: int) -> NDArray[np.float64]:
    """What each frequency is divided by [head_dim / 2]: 1 where a wave is short, `factor` where it
    is long, smoothly between (Llama 3.1's reference code).
    """
    length = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves = 2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((length / waves - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - smooth) / scaling["factor"] + smooth))
