"""The tensors of a GGUF file as those of a published checkpoint.

ggml's differ by family (eyas/families.py): in names; rows of q and k are interleaved, as ggml's
rotary embedding turns neighbours where transformers turns halves; norms hold what is added to them;
the experts of a layer lie in one tensor.

Letters: E experts, N rows, K columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from eyas.errors import CorruptError, MismatchError
from eyas.families import FAMILIES
from eyas.gguf.configuration import (
    LONG_FACTORS,
    OTHER_ARCHITECTURE,
    ROPE_FACTORS,
    SHORT_FACTORS,
    family_of,
    key_value_heads,
)
from eyas.gguf.file import DAMAGED, GgufFile, Kind, dequantised_rows

# Llama's, by ggml's.
GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BY_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>.+)")
SINKS, SHORT_CONVOLUTION = "self_attn.sinks", "conv.conv.weight"
# whose experts are published as one tensor, their inputs first
STACKED_EXPERTS = FAMILIES["gpt_oss"]


def published_names(file: GgufFile) -> dict[str, str]:
    """By ggml's names, those in a published checkpoint, * for an expert's number. Raises
    MismatchError for a tensor that the family has not.
    """
    _, family = family_of(file)
    parts, names = {**GLOBAL, **BY_LAYER, **family.gguf_names}, {}
    for name in file.tensors:
        if name in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS):
            continue
        stem, _, kind = name.rpartition(".")
        in_layer = LAYER.fullmatch(stem)
        found = parts.get(in_layer["part"] if in_layer else stem)
        if found is None:
            raise MismatchError(f"{file.path} holds {name}", OTHER_ARCHITECTURE)
        whole = f"model.layers.{in_layer['layer']}.{found}" if in_layer else found
        names[name] = whole if found == SINKS else f"{whole}.{kind}"
    return names


def check_types(file: GgufFile) -> None:
    """Raises MismatchError for a type that the `gguf` package does not dequantise."""
    for kind, tensor in {tensor.kind: tensor for tensor in file.tensors.values()}.items():
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
        _values(file, tensor.name, kind, block)


def half_order(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows [heads * D, ...] from ggml's order, in which a turned pair is two neighbours, to
    transformers', in which it is one row of each half.
    """
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def stored_tensors(file: GgufFile) -> Iterator[tuple[str, Kind, NDArray[np.uint8]]]:
    """Every tensor under its published name: its type, and its rows as they lie in the file, in the
    published order. Raises MismatchError, CorruptError.
    """
    _, family = family_of(file)
    heads = {"attn_q": file.count("attention.head_count"), "attn_k": key_value_heads(file)}
    for ggml_name, name in published_names(file).items():
        tensor, part = file.tensors[ggml_name], ggml_name.split(".")[-2]
        rows = tensor.data
        if family.gguf_interleaved and part in heads:
            if tensor.shape[0] % (2 * heads[part]):
                what = (
                    f"{file.path} has {heads[part]} heads for the {tensor.shape[0]} rows of {name}"
                )
                raise CorruptError(what, DAMAGED)
            # a row's blocks stay whole: whole rows change places
            by_row = rows.reshape(tensor.shape[0], -1)
            rows = half_order(by_row, heads[part]).reshape(rows.shape)
        yield name, tensor.kind, rows


def raw_tensors(file: GgufFile) -> Iterator[tuple[str, Kind, NDArray[np.uint8]]]:
    """`stored_tensors`, each expert's by itself."""
    for name, kind, rows in stored_tensors(file):
        if "*" not in name:
            yield name, kind, rows
            continue
        for expert, own in enumerate(rows):
            yield name.replace("*", str(expert)), kind, own


def weights(file: GgufFile) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every tensor of the published checkpoint. Raises MismatchError, CorruptError."""
    _, family = family_of(file)
    if family is STACKED_EXPERTS:
        yield from _stacked(file)
    for name, kind, rows in raw_tensors(file):
        if family is STACKED_EXPERTS and ".experts." in name:
            continue
        values = _values(file, name, kind, rows)
        if family.gguf_norm_offset and name.endswith("norm.weight"):
            values = values - np.float32(family.norm_offset)
        yield name, values[:, None] if name.endswith(SHORT_CONVOLUTION) else values


def _stacked(file: GgufFile) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """gpt-oss' experts: gate and up in one tensor [E, K, 2N], one output of each by turns; down
    [E, K, N]; biases [E, 2N] and [E, N].
    """
    stored = {name: (kind, rows) for name, kind, rows in stored_tensors(file) if "*" in name}

    def of_experts(name: str) -> NDArray[np.float32]:
        if name not in stored:
            raise CorruptError(f"{file.path} lacks {name}", DAMAGED)
        kind, rows = stored[name]
        return _values(file, name, kind, rows)

    for name in stored:
        if ".up_proj." in name:
            continue
        values = of_experts(name)
        if ".gate_proj." in name:
            up = of_experts(name.replace("gate_proj", "up_proj"))
            if up.shape != values.shape:
                raise CorruptError(f"{file.path}: {name} is not of the shape of up_proj", DAMAGED)
            values = np.stack([values, up], axis=2).reshape(len(up), -1, *up.shape[2:])
        stem, _, kind = name.replace("*.", "").replace("gate_proj", "gate_up_proj").rpartition(".")
        if kind == "weight":
            yield stem, np.ascontiguousarray(values.swapaxes(1, 2))
        else:
            yield f"{stem}_bias", values


def _values(file: GgufFile, name: str, kind: Kind, rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    try:
        return dequantised_rows(rows, kind)
    except NotImplementedError as error:
        raise MismatchError(
            f"{file.path} holds {name} in {kind.name}, which gguf does not dequantise",
            "take a file in another quantisation (Q8_0, Q6_K, Q4_K_M, ...)",
        ) from error
    except (ValueError, IndexError) as error:
        raise CorruptError(f"{file.path}: {name} is cut: {error}", DAMAGED) from error
