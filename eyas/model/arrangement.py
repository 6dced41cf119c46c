"""A published checkpoint's tensors under our names and in our order of rows.

Names, matrices that hold several, pairs of channels that are turned as neighbours, norms stored
without their 1, experts in one tensor, and MXFP4's 4-bit blocks (OCP Microscaling Formats 1.0)
become one form here, when a target is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from eyas.errors import MismatchError
from eyas.families import FAMILIES, Family
from eyas.model.architecture import TargetConfig
from eyas.model.arrays import BFLOAT16, FLOAT32, RESTORE, Array, cast

Rows = TypeVar("Rows", bound=Any)  # an array, or blocks of a GGUF file: what has rows to choose
LAYER = re.compile(r"(model\.layers\.\d+\.)(.+)\.(\w+)")
# prefixes in checkpoints that hold more than a decoder of text
WITHIN = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.", ""),
)
# what is no part of the decoder
BESIDE = re.compile(r"(model\.)?\w*(vision|visual|image|audio|speech|projector|connector)")
MXFP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by three bits; the fourth is the sign


def arranged(config: TargetConfig, published: Mapping[str, Rows]) -> dict[str, Rows]:
    """Tensors or blocks by our names; others keep their own. Raises MismatchError."""
    family = FAMILIES[config.family]
    found: dict[str, Any] = {}
    for name, tensor in published.items():
        own = our_name(name, family)
        if own is None:
            continue
        try:
            if family.stacked and ".mlp.experts." in own:
                found |= _one_by_one(own, tensor, published, name, family)
            else:
                found |= _parts(own, tensor, config, family)
        except (IndexError, ValueError) as error:  # rows that are not there
            shape = tuple(tensor.shape)
            raise MismatchError(f"{name} is {shape}, not as config.json says", RESTORE) from error
    if config.tie_word_embeddings and "lm_head.weight" in found:
        refuse_untied(found.get("model.embed_tokens.weight"), found["lm_head.weight"])
    for name, tensor in found.items():
        if family.norm_offset and "norm" in name.rsplit(".", 2)[-2]:
            found[name] = cast(tensor, FLOAT32) + np.float32(family.norm_offset)
        elif name.endswith("conv.conv.weight") and tensor.ndim == 3:
            found[name] = tensor[:, 0]
    return found


def refuse_untied(embed_tokens: Any, lm_head: Any) -> None:
    """Raise MismatchError for a stored lm_head [V, H] that differs from the embeddings where
    config.json ties them.
    """
    if embed_tokens is not None and not np.array_equal(embed_tokens, lm_head):
        raise MismatchError(
            "config.json says tie_word_embeddings, and the weights hold another lm_head.weight: "
            "programs differ in which they take",
            "write false there, or delete lm_head.weight",
        )


def our_name(name: str, family: Family) -> str | None:
    """None for what is no part of a decoder of text."""
    if BESIDE.match(name):
        return None
    for outside, inside in WITHIN:
        if name.startswith(outside):
            name = inside + name.removeprefix(outside)
            break
    stem, _, kind = name.rpartition(".")
    if stem in family.names:
        return f"{family.names[stem]}.{kind}"
    match = LAYER.fullmatch(name)
    if match is None or not family.names:
        return name
    prefix, part, kind = match.groups()
    return f"{prefix}{_renamed(part, family.names)}.{kind}"


def published_names(name: str) -> set[str]:
    """What a tensor outside of the layers may be called in a checkpoint."""
    within = {
        outside + name.removeprefix(inside) for outside, inside in WITHIN if name.startswith(inside)
    }
    return {name} | within


def _renamed(part: str, names: Mapping[str, str]) -> str:
    if part in names:
        return names[part]
    for published, ours in names.items():
        if part.startswith(f"{published}."):
            part = ours + part.removeprefix(published)
            break
    beginning, dot, end = part.rpartition(".")
    return f"{beginning}{dot}{names.get(end, end)}"


def _parts(name: str, tensor: Any, config: TargetConfig, family: Family) -> dict[str, Any]:
    """One tensor, or those that it holds one behind the other; heads in halves."""
    match = LAYER.fullmatch(name)
    if match is None:
        return {name: tensor}
    prefix, part, kind = match.groups()
    found, first = {}, 0
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    heads["v_proj"] = heads["k_proj"]
    parts = family.fused.get(part, (part,))
    for one in parts:
        end, of_heads = tensor.shape[0], heads.get(one.rpartition(".")[2])
        if len(parts) > 1:
            size = config.head_dim * of_heads if of_heads else config.intermediate_size
            end = first + size
        rows = tensor[first:end] if len(parts) > 1 else tensor
        if family.interleaved_heads and one.endswith(("q_proj", "k_proj")):
            rows = rows[_halves(end - first, config)]
        found[f"{prefix}{one}.{kind}"] = rows
        first = end
    return found


def _halves(num_rows: int, config: TargetConfig) -> Array:
    """In each head, the even turned channels before the odd ones: int64 [num_rows]."""
    D, turned = config.head_dim, config.rotary_dims or config.head_dim
    order = np.concatenate([np.arange(0, turned, 2), np.arange(1, turned, 2), np.arange(turned, D)])
    rows: Array = (np.arange(0, num_rows, D)[:, None] + order).ravel()
    return rows


# All experts of a layer in one tensor


def _one_by_one(
    name: str, tensor: Any, published: Mapping[str, Any], stored_name: str, family: Family
) -> dict[str, Any]:
    """The matrices or biases of each expert. MXFP4 is two tensors, `_blocks` and `_scales`."""
    stem, _, end = name.rpartition("mlp.experts.")
    if end.split(".", 1)[0].isdigit():
        return {name: tensor}  # a GGUF file has them apart
    if end.endswith("_scales"):
        return {}
    if end.endswith("_blocks"):
        scales = published.get(stored_name.removesuffix("_blocks") + "_scales")
        if scales is None or tensor.ndim != 4 or scales.shape != tensor.shape[:-1]:
            raise MismatchError(f"{stored_name} has no scales of its blocks", RESTORE)
        matrices = [mxfp4(one, scale) for one, scale in zip(tensor, scales, strict=True)]
        part, kind = end.removesuffix("_blocks"), "weight"
    elif end.endswith("_bias"):
        matrices, part, kind = list(tensor), end.removesuffix("_bias"), "bias"
    else:
        matrices, part, kind = [one.T for one in tensor], end, "weight"
    found = {}
    for number, matrix in enumerate(matrices):
        place, half = f"{stem}mlp.experts.{number}.", len(matrix) // 2
        if part == "gate_up_proj":
            turns = family.stacked == "turns"
            found[f"{place}gate_proj.{kind}"] = matrix[0::2] if turns else matrix[:half]
            found[f"{place}up_proj.{kind}"] = matrix[1::2] if turns else matrix[half:]
        else:
            found[f"{place}{part}.{kind}"] = matrix
    return found


def mxfp4(blocks: Array, scales: Array) -> Array:
    """uint8 [N, G, 16] (two numbers a byte, the low one first) and uint8 [N, G] (exponents, biased
    by 127) -> bfloat16 [N, 32 * G], exact.
    """
    values = np.array([*MXFP4, *(-value for value in MXFP4)], FLOAT32)
    codes = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(*blocks.shape[:-1], -1)
    exponents = scales.astype(np.int32)[..., None] - 127
    numbers = np.ldexp(values[codes], exponents)
    return cast(numbers.reshape(*numbers.shape[:-2], -1), BFLOAT16)
