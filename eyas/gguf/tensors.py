"""The tensors of a GGUF file as those of a published checkpoint.

By family (eyas/families.py) ggml's have other names, interleaved rows of q and k (its rotary
embedding turns neighbours, transformers' turns halves), norms with their offset added, and the
experts of a layer in one tensor. Letters: E experts, N rows, K columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import gguf
import numpy as np
from numpy.typing import NDArray

from eyas.errors import CorruptError, MismatchError
from eyas.gguf.blocks import BlockMatrix
from eyas.gguf.configuration import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    family_of,
    key_value_heads,
    unread,
)
from eyas.gguf.file import DAMAGED, GgufFile, StoredTensor, dequantised_rows

# Llama's names by ggml's.
GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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


@dataclass(frozen=True, slots=True)
class PublishedTensor:
    """A tensor of the published checkpoint [..., K]. rows(first, last): float32 [n, K]."""

    name: str
    shape: tuple[int, ...]
    rows: Callable[[int, int], NDArray[np.float32]]

    def values(self) -> NDArray[np.float32]:
        """The whole tensor, float32."""
        count = int(np.prod(self.shape[:-1], dtype=object))
        return self.rows(0, count).reshape(self.shape)


def published_names(file: GgufFile) -> dict[str, str]:
    """Published names by ggml's, * for an expert's number. Raises MismatchError for a tensor that
    the family does not have.
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
            raise unread(file, f"holds {name}")
        whole = f"model.layers.{in_layer['layer']}.{found}" if in_layer else found
        names[name] = whole if found == SINKS else f"{whole}.{kind}"
    return names


def check_types(file: GgufFile) -> None:
    """Raise MismatchError for a type that the `gguf` package does not dequantise."""
    for kind, tensor in {tensor.kind: tensor for tensor in file.tensors.values()}.items():
        try:
            dequantised_rows(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            raise MismatchError(
                f"{file.path} holds {tensor.name} in {kind.name}, which gguf does not dequantise",
                "take a file in another quantisation (Q8_0, Q6_K, Q4_K_M, ...)",
            ) from error


def half_order(count: int, heads: int) -> NDArray[np.intp]:
    """Numbers of ggml's rows [heads * D] in transformers' order: ggml's rotated pairs are
    neighbours, transformers' are one row of each half.
    """
    return np.arange(count).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def stored_tensors(file: GgufFile) -> Iterator[tuple[str, StoredTensor, NDArray[np.intp] | None]]:
    """Every tensor under its published name, and the published order of its rows if it differs.
    Raises MismatchError, CorruptError.
    """
    _, family = family_of(file)
    heads = {"attn_q": file.count("attention.head_count"), "attn_k": key_value_heads(file)}
    for ggml_name, name in published_names(file).items():
        tensor, part, order = file.tensors[ggml_name], ggml_name.split(".")[-2], None
        if family.gguf_interleaved and part in heads:
            if tensor.shape[0] % (2 * heads[part]):
                what = f"{heads[part]} heads for the {tensor.shape[0]} rows of {name}"
                raise CorruptError(f"{file.path} has {what}", DAMAGED)
            order = half_order(tensor.shape[0], heads[part])
        yield name, tensor, order


def raw_tensors(file: GgufFile) -> Iterator[tuple[str, tuple[int, ...], BlockMatrix]]:
    """Published name, shape, and rows as stored of every tensor, each expert's by itself. A vector
    is one row.
    """
    for name, tensor, order in stored_tensors(file):
        shape, data = tensor.shape, tensor.data
        if "*" in name:
            for expert, own in enumerate(data):
                rows = own.reshape(-1, data.shape[-1])
                yield name.replace("*", str(expert)), shape[1:], BlockMatrix(tensor.kind, rows)
        elif len(shape) == 1:
            if order is not None:
                data = data.reshape(len(order), -1)[order]
            yield name, shape, BlockMatrix(tensor.kind, data.reshape(1, -1))
        else:
            rows = data.reshape(-1, data.shape[-1])
            yield name, shape, BlockMatrix(tensor.kind, rows, order)


def weights(file: GgufFile, apart: bool = False) -> Iterator[PublishedTensor]:
    """Every tensor of the published checkpoint; apart: each expert's by itself. Raises
    MismatchError, CorruptError.
    """
    _, family = family_of(file)
    stacks = family.stacked is not None and not apart
    if stacks:
        yield from _stacked(file, family.stacked == "turns")
    for name, shape, matrix in raw_tensors(file):
        if stacks and ".experts." in name:
            continue
        offset = 0.0
        if family.gguf_norm_offset and name.endswith("norm.weight"):
            offset = family.norm_offset
        if name.endswith(SHORT_CONVOLUTION):
            shape = (shape[0], 1, *shape[1:])
        yield PublishedTensor(name, shape, partial(_rows, matrix, offset))


def _rows(matrix: BlockMatrix, offset: float, first: int, last: int) -> NDArray[np.float32]:
    values = matrix[first:last].dequantised()
    return values - np.float32(offset) if offset else values


def _stacked(file: GgufFile, by_turns: bool) -> Iterator[PublishedTensor]:
    """All experts of a layer: gate and up in one tensor [E, K, 2N]; down [E, K, N]; biases [E, 2N]
    and [E, N]. by_turns: outputs of gate and up alternate; else up's come after gate's.
    """
    stored = {name: tensor for name, tensor, _ in stored_tensors(file) if "*" in name}
    for name, tensor in stored.items():
        if ".up_proj." in name:
            continue
        parts = [tensor]
        if ".gate_proj." in name:
            other = name.replace("gate_proj", "up_proj")
            if other not in stored:
                raise CorruptError(f"{file.path} lacks {other}", DAMAGED)
            if stored[other].shape != tensor.shape:
                raise CorruptError(f"{file.path}: {name} is not of the shape of up_proj", DAMAGED)
            parts.append(stored[other])
        stem, _, kind = name.replace("*.", "").replace("gate_proj", "gate_up_proj").rpartition(".")
        shape, rows = tensor.shape, partial(_of_parts, parts, by_turns)
        if kind == "weight":
            shape = (shape[0], shape[2], shape[1] * len(parts))
            yield PublishedTensor(stem, shape, rows)
        else:
            yield PublishedTensor(f"{stem}_bias", (shape[0], shape[1] * len(parts)), rows)


def _of_parts(
    parts: list[StoredTensor], by_turns: bool, first: int, last: int
) -> NDArray[np.float32]:
    """[n, parts * N]: of tensors [E, N, K] n of their E * K columns, of tensors [E, N] n rows."""
    values = [
        dequantised_rows(part.data[first:last], part.kind)
        if len(part.shape) == 2
        else _columns(part, first, last)
        for part in parts
    ]
    if by_turns:
        return np.stack(values, axis=2).reshape(last - first, -1)
    return np.concatenate(values, axis=1)


def _columns(part: StoredTensor, first: int, last: int) -> NDArray[np.float32]:
    """n of the E * K columns of a tensor [E, N, K] as rows [n, N]."""
    N, K = part.shape[1:]
    block, num_bytes = gguf.GGML_QUANT_SIZES[part.kind]
    found, at = np.empty((last - first, N), np.float32), first
    while at < last:
        expert, column = divmod(at, K)
        end, begin = min(K, column + last - at), column // block
        data = part.data[expert, :, begin * num_bytes : -(-end // block) * num_bytes]
        values = dequantised_rows(np.ascontiguousarray(data), part.kind)
        taken = values[:, column - begin * block : end - begin * block]
        found[at - first : at - first + end - column] = taken.T
        at += end - column
    return found
