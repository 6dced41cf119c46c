"""GGUF files of tiny targets, written by the `gguf` package as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer

from tests.tiny import read_tensors

F32 = gguf.GGMLQuantizationType.F32
NAMES = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
# ggml's names that differ, by model type
ARCHITECTURES = {
    "llama4_text": "llama4",
    "mistral": "llama",
    "mixtral": "llama",
    "ministral3": "mistral3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "granitemoehybrid": "granite",
    "olmo3": "olmo2",
}
INTERLEAVED = ("llama", "mistral3", "granite", "smollm3")


def interleaved(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """ggml's rows of q or k: row i of the first half of a head beside row i of its second."""
    order = np.arange(len(values)).reshape(heads, 2, -1).swapaxes(1, 2)
    return np.ascontiguousarray(values[order.reshape(-1)])


def converted(
    folder: Path, config: Any, architecture: str
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """A checkpoint's tensors under names that the package maps, in ggml's order."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    experts: dict[str, list[NDArray[np.float32]]] = {}
    for name, tensor in sorted(read_tensors(folder).items(), key=_by_expert):
        values = tensor.float().numpy()
        part = name.split(".")[-2]
        if architecture in INTERLEAVED and part in heads:
            values = interleaved(values, heads[part])
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if name.endswith("conv.conv.weight"):
            values = values.squeeze(1)
        if name.endswith("sinks"):
            name += ".weight"
        if "shared_mlp.input_linear" in name:
            for half, rows in zip(("gate", "up"), np.split(values, 2), strict=True):
                yield name.replace("shared_mlp.input_linear", f"mlp.{half}_proj"), rows
        elif ".experts." not in name:
            yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), values
        elif architecture in ("gpt-oss", "llama4"):
            yield from _unstacked(name, values, architecture == "gpt-oss")
        else:
            stem, _, rest = name.partition(".experts.")
            if "block_sparse_moe" in stem:
                stem = stem.removeprefix("model.").replace("block_sparse_moe", "feed_forward")
            experts.setdefault(f"{stem}.experts.{rest.partition('.')[2]}", []).append(values)
    for name, found in experts.items():
        yield name, np.stack(found)


def _by_expert(item: tuple[str, Any]) -> tuple[str, int]:
    stem, _, rest = item[0].partition(".experts.")
    expert = rest.partition(".")[0]
    return (stem, int(expert)) if expert.isdigit() else (item[0], 0)


def _unstacked(
    name: str, values: NDArray[np.float32], by_turns: bool
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """All experts of a layer, inputs first: gate and up alternate, or up follows gate."""
    is_bias = name.endswith("_bias")
    stem, kind = name.removesuffix("_bias"), "bias" if is_bias else "weight"
    values = values if is_bias else values.swapaxes(1, 2)
    if "gate_up" not in name:
        yield f"{stem}.{kind}", np.ascontiguousarray(values)
        return
    halves = (values[:, 0::2], values[:, 1::2]) if by_turns else np.split(values, 2, axis=1)
    for half, rows in zip(("gate", "up"), halves, strict=True):
        part = np.ascontiguousarray(rows)
        yield f"{stem.replace('gate_up', half)}.{kind}", part


def model_metadata(config: Any, architecture: str) -> dict[str, Any]:
    """As `set_gguf_parameters` of the converter's base.py and of the model."""
    settings = config.to_dict()
    rope = settings["rope_parameters"]
    rope = rope.get("full_attention", rope)
    head_dim = settings.get("head_dim") or config.hidden_size // config.num_attention_heads
    found = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": settings.get("intermediate_size_mlp", config.intermediate_size),
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": settings.get("rms_norm_eps", settings.get("norm_eps")),
        "expert_count": settings.get("num_local_experts", settings.get("num_experts")) or None,
        "expert_used_count": settings.get("num_experts_per_tok") or None,
    }
    if architecture != "gemma2":
        found["rope.freq_base"] = float(rope["rope_theta"])
    if "head_dim" in settings and architecture not in ("granite", "phi3"):
        found["attention.key_length"] = found["attention.value_length"] = head_dim
    if architecture in ("llama", "llama4", "mistral3", "granite", "smollm3", "glm4", "phi3"):
        found["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if rope["rope_type"] in ("linear", "yarn"):
        found["rope.scaling.type"] = rope["rope_type"]
        found["rope.scaling.factor"] = rope["factor"]
    if rope["rope_type"] == "yarn" or architecture == "phi3":
        original = rope.get("original_max_position_embeddings", config.max_position_embeddings)
        found["rope.scaling.original_context_length"] = original
    for key in ("beta_fast", "beta_slow"):
        found[f"rope.scaling.yarn_{key}"] = rope.get(key)
    if architecture in ("gemma2", "gemma3", "gpt-oss", "olmo2", "exaone4"):
        found["attention.sliding_window"] = settings.get("sliding_window")
    if architecture == "phi3":
        found["attention.sliding_window"] = settings.get("sliding_window") or 0
    found |= _own(settings, rope, architecture)
    return {f"{architecture}.{key}": value for key, value in found.items()}


def _own(settings: dict[str, Any], rope: dict[str, Any], architecture: str) -> dict[str, Any]:
    kinds = settings.get("layer_types") or []
    if architecture == "gemma2":
        names = ("attn_logit_softcapping", "final_logit_softcapping")
        return {name: settings[name] for name in names}
    if architecture == "granite":
        return {
            "attention.scale": settings["attention_multiplier"],
            "embedding_scale": settings["embedding_multiplier"],
            "residual_scale": settings["residual_multiplier"],
            "logit_scale": settings["logits_scaling"],
        }
    if architecture == "mistral3":
        return {
            "rope.scaling.yarn_log_multiplier": rope.get("mscale_all_dim"),
            "attention.temperature_scale": rope.get("llama_4_scaling_beta"),
        }
    if architecture == "qwen3moe":
        return {"expert_feed_forward_length": settings["moe_intermediate_size"]}
    if architecture == "llama4":
        step = settings["interleave_moe_layer_step"]
        width = settings["intermediate_size"]
        return {"expert_feed_forward_length": width, "interleave_moe_layer_step": step}
    if architecture == "gpt-oss":
        return {"expert_feed_forward_length": settings["intermediate_size"]}
    if architecture == "lfm2":
        heads = settings["num_key_value_heads"]
        return {
            "attention.head_count_kv": [0 if kind == "conv" else heads for kind in kinds],
            "shortconv.l_cache": settings["conv_L_cache"],
        }
    if architecture in ("olmo2", "exaone4") and settings.get("sliding_window"):
        slides = [kind == "sliding_attention" for kind in kinds]
        return {"attention.sliding_window_pattern": slides}
    return {}


def gguf_file(
    folder: Path,
    file: Path,
    kind: gguf.GGMLQuantizationType = F32,
    changes: dict[str, Any] | None = None,
    add: dict[str, NDArray[np.float32]] | None = None,
) -> Path:
    """changes: of metadata; None leaves a key out. add: tensors by ggml's name."""
    config = AutoConfig.from_pretrained(folder)
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    settings = model_metadata(config, architecture)
    settings |= {"general.architecture": architecture, **tokenizer_metadata(folder)}
    settings |= changes or {}
    writer = gguf.GGUFWriter(file, settings.pop("general.architecture"))
    for key, value in settings.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            put = {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32}
            whole = writer.add_int32 if value in (-1, -32) else writer.add_uint32
            put.get(type(value), whole)(key, value)
    names = gguf.get_tensor_name_map(NAMES[architecture], config.num_hidden_layers)
    for name, values in converted(folder, config, architecture):
        ggml_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert ggml_name is not None, name
        whole = values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        stored = kind if values.ndim > 1 and whole else F32
        writer.add_tensor(ggml_name, gguf.quantize(values, stored), raw_dtype=stored)
    for name, values in (add or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def tokenizer_metadata(folder: Path) -> dict[str, Any]:
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
