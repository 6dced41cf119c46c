"""Targets that our own decoder does not run: their shape, and the names of their matrices by
transformers' model, which is built without memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from eyas.errors import MismatchError
from eyas.model.arrangement import BESIDE, refuse_untied
from eyas.model.arrays import Array
from eyas.model.config import RopeConfig, TargetShape, end_token_ids, read_config
from eyas.model.weights import read_arrays, read_shapes

# as SpecForge's head for DeepSeek-V3, Llama 3 and Qwen3
MLA_HEAD_DIM, MLA_KEY_VALUE_HEADS = 128, 8
NORM_EPSILONS = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "norm_eps",
    "layernorm_epsilon",
)
RESTORE = "restore the checkpoint from its source, its tensors' names as they were"
MATRIX_ALONE = "a head is trained against lm_head's matrix, a scale and a soft cap alone"
# of transformers, as it reads a config, and loads or runs a model
FAULTS = (AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
QUANTISATIONS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
VALUE_HEADS = ("v_head", "value_head")
ANOTHER = (
    "eyas captures decoder-only language models that the installed transformers knows, "
    "without code of their own"
)


def transformers_config(folder: str | Path) -> Any:
    """transformers' config of a folder; no download, and no code of the model runs. Raises
    MismatchError.
    """
    stated = read_config(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (*FAULTS, StrictDataclassError) as error:
        what = (
            f"{folder} is a {stated.get('model_type')!r} model, which the installed "
            "transformers does not load"
        )
        raise MismatchError(f"{what}: {first_line(error)}", ANOTHER) from error
    auto_class(config)
    return config


def auto_class(config: Any) -> Any:
    """transformers' class for a (multimodal) language model. Raises MismatchError."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise MismatchError(
        f"transformers has no language model of the {config.model_type!r} kind", ANOTHER
    )


def shape_of(config: Any, folder: str | Path) -> TargetShape:
    """The shape in a transformers config. Raises MismatchError if it has no sizes of a decoder."""
    text = usual_layer(config.get_text_config(decoder=True))
    given: dict[str, Any] = {
        name: getattr(text, name, None)
        for name in ("hidden_size", "num_hidden_layers", "vocab_size")
    }
    if not all(isinstance(size, int) for size in given.values()):
        lacking = ", ".join(name for name, size in given.items() if not isinstance(size, int))
        raise MismatchError(
            f"{folder}: the config of a {config.model_type!r} model tells no {lacking}", ANOTHER
        )
    hidden: int = given["hidden_size"]
    ends = getattr(config, "eos_token_id", None)  # Gemma 3's are not in the part for text
    return TargetShape(
        **given,
        **head_attention(text, hidden),
        family=config.model_type,
        intermediate_size=mlp_width(text, hidden),
        rms_norm_eps=next(
            (eps for name in NORM_EPSILONS if (eps := getattr(text, name, None)) is not None), 1e-6
        ),
        max_position_embeddings=_number(text, "max_position_embeddings") or 2048,
        rope=head_rope(getattr(text, "rope_parameters", None)),
        tie_word_embeddings=bool(config.tie_word_embeddings),
        eos_token_ids=end_token_ids(folder, text.eos_token_id if ends is None else ends),
        dtype=str(config.dtype or torch.float32).removeprefix("torch."),
        # Cohere's, over Granite's
        logit_scale=float(getattr(text, "logit_scale", None) or 1)
        / float(getattr(text, "logits_scaling", None) or 1),
        logit_softcap=getattr(text, "final_logit_softcapping", None),
    )


def usual_layer(text: Any) -> Any:
    """The config of the most frequent kind of layer (Gemma 4's kinds differ in their heads)."""
    if not getattr(text, "is_heterogeneous", False):
        return text
    sizes = "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"
    kinds = [tuple(getattr(one, size, None) for size in sizes) for one in text.per_layer_config]
    return text.per_layer_config[kinds.index(max(kinds, key=kinds.count))]


def head_attention(text: Any, hidden: int) -> dict[str, int]:
    """Attention heads of a draft head: the target's own.

    MLA's (DeepSeek, Kimi) would be 128 pairs of keys and values a token: there a head gets as many
    of the size of the target's values as fill the width, and MLA_KEY_VALUE_HEADS.
    """
    if getattr(text, "kv_lora_rank", None):
        size = _number(text, "v_head_dim") or MLA_HEAD_DIM
        heads = max(1, hidden // size)
        keys = math.gcd(heads, MLA_KEY_VALUE_HEADS)
        return {"num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": size}
    heads = getattr(text, "num_attention_heads", None) or max(1, hidden // 64)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": _number(text, "num_key_value_heads") or heads,
        "head_dim": _number(text, "head_dim") or hidden // heads,
    }


def mlp_width(text: Any, hidden: int) -> int:
    """The MLP's width of a draft head: the dense MLP's or that of a token's experts together,
    whichever is more (gpt-oss and Mixtral state an expert's as intermediate_size).
    """
    dense = _number(text, "intermediate_size") or 4 * hidden
    expert = _number(text, "moe_intermediate_size") or dense
    at_work = _number(text, "num_experts_per_tok") or 0
    return max(dense, expert * (at_work + (_number(text, "n_shared_experts") or 0)))


def head_rope(parameters: Any) -> RopeConfig:
    """The rotary embedding of a head: the target's, or only its base if heads have no such kind.

    parameters: transformers' `rope_parameters`; full attention's, if by kind of layer.
    """
    if not parameters:
        return RopeConfig()
    by_kind = [value for value in parameters.values() if isinstance(value, dict)]
    own = parameters.get("full_attention") or (by_kind[0] if by_kind else parameters)
    if own.get("partial_rotary_factor") in (None, 1):
        try:
            return RopeConfig.from_hf({"rope_parameters": own})
        except MismatchError:
            pass
    theta = own.get("rope_theta")
    return RopeConfig(theta=theta) if theta else RopeConfig()


def transformers_matrices(folder: str | Path, shape: TargetShape) -> tuple[Array, Array]:
    """embed_tokens and lm_head [V, Ht] as stored. Raises what `matrix_names` raises."""
    embed_name, head_name = matrix_names(folder, shape)
    tensors = read_arrays(folder, {embed_name, head_name})
    if shape.tie_word_embeddings:
        refuse_untied(tensors[embed_name], tensors[head_name])
        head_name = embed_name
    return tensors[embed_name], tensors[head_name]


def matrix_names(folder: str | Path, shape: TargetShape) -> tuple[str, str]:
    """A checkpoint's names of embed_tokens and lm_head, by shape and the model's own names; no
    tensor is read. Raises MismatchError, MissingInputError, CorruptError.
    """
    wanted = (shape.vocab_size, shape.hidden_size)
    found = sorted(name for name, size in read_shapes(folder).items() if size == wanted)
    embed_name, head_name = _names(transformers_config(folder))
    # checkpoints have other prefixes (`language_model.`): the last two parts decide, if unique
    stored = []
    for name in (embed_name, head_name):
        last = "." + ".".join(name.split(".")[-2:])
        alike = [one for one in found if f".{one}".endswith(last)]
        stored.append(name if name in found else alike[0] if len(alike) == 1 else None)
    embed, head = stored
    rest = [name for name in found if name not in (embed, head)]
    if shape.tie_word_embeddings:
        embed, head = embed or head, head or embed
    elif len(rest) == 1:  # the loader may have another name for one of them
        embed, head = embed or rest[0], head or rest[0]
    if embed is None or head is None or (embed == head and not shape.tie_word_embeddings):
        raise MismatchError(
            f"{folder} has no recognisable embeddings and lm_head of {wanted}: the model calls "
            f"them {embed_name} and {head_name}, tensors of this shape are "
            f"{', '.join(found) or 'not there'}",
            RESTORE,
        )
    return embed, head


def _names(config: Any) -> tuple[str, str]:
    """The model's own names of both. Raises MismatchError if one is absent or has a bias."""
    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=False)
    owners = {id(module): name for name, module in model.named_modules()}
    found = [
        owners.get(id(module))
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
    ]
    if None in found:
        raise MismatchError(f"{type(model).__name__} has no embeddings or no lm_head", ANOTHER)
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise MismatchError(f"{type(model).__name__}: its lm_head has a bias", MATRIX_ALONE)
    return f"{found[0]}.weight", f"{found[1]}.weight"


def refuse_partly_loaded(
    folder: Path, config: Any, shape: TargetShape, loaded: Mapping[str, Any]
) -> None:
    """Raise MismatchError for tensors that transformers, with a warning, fills at random (missing,
    of another shape) or drops (unexpected). loaded: its `output_loading_info`.

    A quantiser has scales of its own names: there unexpected tensors do not count.
    """
    faults = [f"{name} is missing" for name in sorted(loaded["missing_keys"])]
    for name, stored, wanted in sorted(loaded["mismatched_keys"]):
        faults.append(f"{name} is {tuple(stored)} and has to be {tuple(wanted)}")
    if getattr(config, "quantization_config", None) is None:
        faults += [
            f"{name} is not a tensor of this architecture"
            for name in sorted(loaded["unexpected_keys"])
            if not _is_beside(name, shape.num_hidden_layers)
        ]
    if not faults:
        return
    apart = next((name for name in QUANTISATIONS if (folder / name).exists()), None)
    hint = RESTORE
    if apart is not None:
        hint = (
            f"{apart} says how it is quantised, and transformers reads only quantization_config in "
            "config.json: give the checkpoint before it was quantised, or write it there"
        )
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    raise MismatchError(
        f"{folder} is not the model of its config.json: " + "; ".join(faults[:3]) + more, hint
    )


def _is_beside(name: str, num_layers: int) -> bool:
    """Whether a tensor is of an encoder of images or sounds, of multi-token prediction, or of a
    value head, which reinforcement learning leaves.
    """
    parts = name.split(".")
    layer = re.search(r"\blayers\.(\d+)\.", name)
    is_behind = layer is not None and int(layer[1]) >= num_layers
    is_of_mtp = any(part.startswith("mtp") for part in parts)
    return is_behind or is_of_mtp or bool(BESIDE.match(name)) or parts[0] in VALUE_HEADS


def first_line(error: Exception) -> str:
    """The first line of another library's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _number(text: Any, name: str) -> int | None:
    """A whole number of a config; of a list by layer the largest."""
    value = getattr(text, name, None)
    return max(value) if isinstance(value, list) else value
