"""config.json from a GGUF file's metadata, for the architectures of eyas/families.py.

Keys that a file lacks are constants of the architecture, as in llama.cpp's src/models/*.cpp.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from eyas.errors import CorruptError, MismatchError
from eyas.families import ALL_SLIDING, FAMILIES, Family
from eyas.gguf.file import GgufFile, dequantised_rows

SOURCE = "gguf"  # key in config.json: the file's name and the types of its matrices
READ = ", ".join(sorted({family.gguf for family in FAMILIES.values() if family.gguf}))
OTHER_ARCHITECTURE = (
    f"eyas reads GGUF files of {READ}; of another model take its folder in Hugging Face's form, "
    "and let a server of it (SGLang, vLLM) answer: eyas generate --server URL"
)
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1's scaling, as one factor by frequency
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
# By ggml's names: config.json's, of what some architectures have.
NUMBERS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
COUNTS = {
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "shortconv.l_cache": "conv_L_cache",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
}
UNNORMED_EXPERTS = 128  # of Llama 4 Maverick, which alone does not norm heads

NO_MODELS = {  # by `general.type` or architecture
    "adapter": "a LoRA adapter: merge it into its model",
    "imatrix": "an importance matrix for quantising a model",
    "mmproj": "the projector of images beside a model",
    "clip": "the projector of images beside a model",
}


def unread(file: GgufFile, what: str) -> MismatchError:
    """The error for a file that holds something eyas does not read."""
    return MismatchError(f"{file.path} {what}", OTHER_ARCHITECTURE)


def family_of(file: GgufFile) -> tuple[str, Family]:
    """The model type of transformers and its family. Raises MismatchError."""
    kind, pooling = file.metadata.get("general.type"), file.of_model("pooling_type", 0)
    what = NO_MODELS.get(str(kind)) or NO_MODELS.get(file.architecture)
    if what is None and (pooling or not file.of_model("attention.causal", True)):
        what = "a model of embeddings: it answers no prompts"
    if what is not None:
        raise MismatchError(f"{file.path} holds {what}", "give the GGUF file of the model itself")
    of_name = {
        model_type: family
        for model_type, family in FAMILIES.items()
        if family.gguf == file.architecture
        and (family.gguf_mark is None or file.of_model(family.gguf_mark, 0))
    }
    if not of_name:
        raise unread(file, f"holds {file.architecture!r}")
    model_type = max(of_name, key=lambda name: of_name[name].gguf_mark is not None)
    family = of_name[model_type]
    if file.of_model("expert_count", 0) and "ffn_gate_exps" not in family.gguf_names:
        raise unread(file, "holds a mixture of experts")
    if not file.of_model("rope.scaling.finetuned", True):
        raise unread(file, f"holds a {file.architecture} without positions")
    return model_type, family


def configuration(file: GgufFile) -> dict[str, Any]:
    """config.json. Raises MismatchError, CorruptError."""
    model_type, family = family_of(file)
    hidden, heads = file.count("embedding_length"), file.count("attention.head_count")
    head_dim = file.count("attention.key_length", hidden // heads)
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [f"{family.name}ForCausalLM"],
        "dtype": stored_dtype(file),
        "hidden_size": hidden,
        "intermediate_size": file.count("feed_forward_length"),
        "num_hidden_layers": file.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads(file),
        "head_dim": head_dim,
        "vocab_size": len(file.of_tokenizer("tokens") or []),
        "max_position_embeddings": file.count("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in file.tensors,
        SOURCE: {"file": file.path.name, "types": quantisation(file)},
    }
    epsilon = "norm_eps" if "norm_eps" in family.defaults else "rms_norm_eps"
    config[epsilon] = file.number("attention.layer_norm_rms_epsilon")
    activation = "hidden_activation" if "hidden_activation" in family.defaults else "hidden_act"
    config[activation] = family.defaults.get(activation, "silu")
    if "query_pre_attn_scalar" in family.defaults:
        is_wide = config["num_hidden_layers"] == family.gguf_wide_queries
        config["query_pre_attn_scalar"] = hidden // heads if is_wide else head_dim
    config |= {name: file.number(key) for key, name in NUMBERS.items() if file.of_model(key, 0)}
    config |= {name: file.count(key) for key, name in COUNTS.items() if file.of_model(key, 0)}
    if "intermediate_size_mlp" in family.defaults:  # Llama 4's experts have the other width
        if not (file.of_model("expert_count", 0) and file.of_model("attention.sliding_window", 1)):
            raise unread(file, "holds a dense Llama 4")
        config["intermediate_size_mlp"] = config["intermediate_size"]
        config["intermediate_size"] = file.count("expert_feed_forward_length")
        config["use_qk_norm"] = file.count("expert_count") != UNNORMED_EXPERTS
    if "attention_multiplier" in family.defaults:
        config.setdefault("attention_multiplier", head_dim**-0.5)
    if file.of_model("expert_count", 0):
        name = "num_experts" if "num_experts" in family.defaults else "num_local_experts"
        config[name] = file.count("expert_count")
    config |= rotations(file, family, head_dim) | layer_kinds(file, family)
    return config | dict(family.gguf_constants)


def key_value_heads(file: GgufFile) -> int:
    """The number of heads, the same in every layer that has any. Raises CorruptError."""
    heads = file.of_model("attention.head_count_kv", 0)
    if isinstance(heads, list) and file.of_model("shortconv.l_cache", 0):
        if len({*heads, 0}) != 2 or not all(type(count) is int and count >= 0 for count in heads):
            raise CorruptError(
                f"{file.path} has {heads!r:.40} as {file.architecture}.attention.head_count_kv",
                "a whole number is needed for every layer, 0 or one and the same",
            )
        return int(max(heads))
    return file.count("attention.head_count_kv", file.count("attention.head_count"))


def layer_kinds(file: GgufFile, family: Family) -> dict[str, Any]:
    """`sliding_window` and `layer_types`, for families with such layers."""
    key = "attention.sliding_window"
    count, window = file.count("block_count"), file.of_model(key, family.gguf_defaults.get(key, 0))
    heads = file.of_model("attention.head_count_kv", 0)
    if file.of_model("shortconv.l_cache", 0) and isinstance(heads, list):
        return {"layer_types": ["full_attention" if kept else "conv" for kept in heads]}
    if family.window_period == ALL_SLIDING:
        return {"sliding_window": window or None}
    if family.window_period is None:
        return {}
    pattern = file.of_model("attention.sliding_window_pattern", family.window_period)
    if isinstance(pattern, int):
        pattern = [(layer + 1) % pattern != 0 if pattern else True for layer in range(count)]
    slides = [bool(window) and slide for slide in pattern]
    types = ["sliding_attention" if slide else "full_attention" for slide in slides]
    return {"layer_types": types, "sliding_window": window or None}


def stored_dtype(file: GgufFile) -> str:
    """The checkpoint's dtype: float32 if all matrices are, else bfloat16."""
    return "float32" if set(quantisation(file)) == {"F32"} else "bfloat16"


def quantisation(file: GgufFile) -> dict[str, int]:
    """The number of matrices by ggml's type."""
    kinds = [tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def rotations(file: GgufFile, family: Family, head_dim: int) -> dict[str, Any]:
    """config.json's keys of the rotary embedding. Raises MismatchError for an unknown one."""
    base, scaling = file.number("rope.freq_base", 10000.0), rope_scaling(file, family, head_dim)
    dims = file.count("rope.dimension_count", head_dim)
    if "rope_scaling" in family.defaults:  # else null would stand for it
        scaling = scaling or {"rope_type": "default"}
    found: dict[str, Any] = {"rope_theta": base, "rope_scaling": scaling}
    if "partial_rotary_factor" in family.defaults:
        found["partial_rotary_factor"] = dims / head_dim
    elif dims != head_dim:
        raise unread(file, f"turns {dims} of {head_dim} channels of a head")
    if scaling and scaling["rope_type"] == "longrope":
        found["original_max_position_embeddings"] = file.count(
            "rope.scaling.original_context_length"
        )
    if not family.local_rope:
        return found
    key = "rope.freq_base_swa"
    local = file.number(key, family.gguf_defaults.get(key, base))
    return {
        "rope_parameters": {
            "full_attention": {"rope_theta": base, **(scaling or {"rope_type": "default"})},
            "sliding_attention": {"rope_theta": local, "rope_type": "default"},
        }
    }


def rope_scaling(file: GgufFile, family: Family, head_dim: int) -> dict[str, Any] | None:
    """`rope_scaling` of config.json. Raises MismatchError for an unknown scaling."""
    # as in llama.cpp, a factor without a type (the older key too) is linear
    old = file.number("rope.scale_linear", 0.0)
    factor = file.number("rope.scaling.factor", old) or 1.0
    kind = file.of_model("rope.scaling.type", "none" if factor == 1.0 else "linear")
    if file.of_model("rope.dimension_sections", 0):
        kind = "sections of positions"
    elif family.long_rope and {LONG_FACTORS, SHORT_FACTORS} <= file.tensors.keys():
        return {
            "rope_type": "longrope",
            "long_factor": _decimals(file, LONG_FACTORS),
            "short_factor": _decimals(file, SHORT_FACTORS),
        }
    elif not file.tensors.keys().isdisjoint((LONG_FACTORS, SHORT_FACTORS)):
        kind = "long and short factors"
    elif ROPE_FACTORS in file.tensors:
        if (scaling := llama3_scaling(file, head_dim)) is not None:
            return scaling
        kind = f"{ROPE_FACTORS} of an unknown kind"
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return yarn(file, family)
    if kind != "none":
        raise MismatchError(
            f"{file.path} scales its rotary embedding by {kind}",
            "eyas reads files without scaling, with linear scaling, yarn, Llama 3.1's or Phi's",
        )
    return None


def _decimals(file: GgufFile, name: str) -> list[float]:
    stored = file.tensors[name]
    return [float(str(value)) for value in dequantised_rows(stored.data, stored.kind)]


def yarn(file: GgufFile, family: Family) -> dict[str, Any]:
    """Yarn's parameters (arXiv 2309.00071). Raises CorruptError."""
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": file.number("rope.scaling.factor"),
        "original_max_position_embeddings": file.count("rope.scaling.original_context_length"),
    }
    names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    names |= {"yarn_attn_factor": "attention_factor", "yarn_log_multiplier": "mscale_all_dim"}
    for key, name in names.items():
        if file.of_model(f"rope.scaling.{key}", 0):
            scaling[name] = file.number(f"rope.scaling.{key}")
    if "mscale_all_dim" in scaling:
        scaling["mscale"] = 1.0
    if beta := file.of_model("attention.temperature_scale", 0):
        scaling["llama_4_scaling_beta"] = float(str(np.float32(beta)))
    of_family = family.defaults.get("rope_scaling", {})
    return scaling | {key: of_family[key] for key in of_family.keys() & {"truncate"}}


def llama3_scaling(file: GgufFile, head_dim: int) -> dict[str, Any] | None:
    """The parameters of one of Llama 3.1's models that give the file's factors; None if none do."""
    stored = file.tensors[ROPE_FACTORS]
    found = dequantised_rows(stored.data, stored.kind)
    base, low, length = float(file.of_model("rope.freq_base", 10000.0)), 1.0, 8192
    waves = 2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    for factor, high in ((8.0, 4.0), (16.0, 4.0), (32.0, 4.0), (16.0, 1.0)):
        # Llama 3.1's reference code: 1 for short waves, `factor` for long ones
        smooth = np.clip((length / waves - low) / (high - low or 1e-30), 0.0, 1.0)
        expected = 1.0 / ((1.0 - smooth) / factor + smooth)
        if len(found) == len(expected) and np.allclose(found, expected, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": length,
            }
    return None
