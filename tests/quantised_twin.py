"""Products of quantised weights in PyTorch operators: the plain twin of `model/cpp/quantised.h`, to
the bit.

A weight is scale * code + min. A row is quantised per block of 32 to int8, as ggml's Q8_0 and Q8_1
are (quantize_row_q8_0 and _q8_1 of llama.cpp). The products of a block are summed as integers, the
blocks in ascending order in float32 with one rounding each.

Letters: M rows, N outputs, K inputs, B blocks of 32 inputs, S scales and mins of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.gguf.blocks import BLOCK, BlockMatrix, Kind, quantised
from eyas.model.architecture import TargetConfig
from eyas.model.arrays import FLOAT32, Array, Arrays, cast
from eyas.model.packed import Blocks, parts_of, quantisable
from eyas.operators.tensors import tensor_of, tensors_of
from tests.oracle.block import Block, MixtureOfExperts
from tests.oracle.target import Layers

IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int16)
MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16)  # doubled


def in_eight_bits(tensors: Arrays) -> dict[str, BlockMatrix]:
    """`quantisable` as Q8_0."""
    return {
        name: quantised(cast(one, FLOAT32), Kind.Q8_0) for name, one in quantisable(tensors).items()
    }


def taken_apart(
    matrix: BlockMatrix,
) -> tuple[NDArray[np.int16], NDArray[np.float32], NDArray[np.float32]]:
    """Codes int16 [N, B, 32], scales float32 [N, B, S] and mins [N, B, S]."""
    N, K = matrix.shape
    units = matrix.data.reshape(N, -1, gguf.GGML_QUANT_SIZES[matrix.kind][1])
    B = K // BLOCK
    no_min = np.zeros((N, B, 1), np.float32)
    if matrix.kind == Kind.Q8_0:
        return units[..., 2:].view(np.int8).astype(np.int16), _halves(units, 0), no_min
    if matrix.kind == Kind.Q4_0:
        return _nibbles(units[..., 2:]) - np.int16(8), _halves(units, 0), no_min
    if matrix.kind == Kind.Q4_1:
        return _nibbles(units[..., 4:]), _halves(units, 0), _halves(units, 2)
    if matrix.kind in (Kind.Q5_0, Kind.Q5_1):
        at = 2 if matrix.kind == Kind.Q5_0 else 4
        fifth = np.unpackbits(units[..., at : at + 4], axis=-1, bitorder="little").astype(np.int16)
        codes = _nibbles(units[..., at + 4 :]) + fifth * np.int16(16)
        if matrix.kind == Kind.Q5_1:
            return codes, _halves(units, 0), _halves(units, 2)
        return codes - np.int16(16), _halves(units, 0), no_min
    if matrix.kind == Kind.MXFP4:
        powers = np.ldexp(np.float32(1), units[..., :1].astype(np.int32) - 128)
        return MXFP4[_nibbles(units[..., 1:])], powers, no_min
    if matrix.kind in (Kind.Q4_K, Kind.Q5_K):
        # 6 bits each: of the first 4 blocks whole, of the others' the upper 2 above those
        first, second, rest = np.split(units[..., 4:16], 3, axis=-1)
        low = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], axis=-1)
        high = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], axis=-1)
        codes = _nibbles(units[..., -128:].reshape(N, B // 2, BLOCK)).reshape(N, B, BLOCK)
        if matrix.kind == Kind.Q5_K:
            shifts = np.arange(8, dtype=np.uint8)[:, None]
            fifth = (units[..., None, 16:48] >> shifts & 1).astype(np.int16)
            codes = codes + fifth.reshape(N, B, BLOCK) * np.int16(16)
        scales, mins = _halves(units, 0) * low, -(_halves(units, 2) * high)
        return codes, scales.reshape(N, B, 1), mins.reshape(N, B, 1)
    if matrix.kind == Kind.IQ4_NL:
        return IQ4[_nibbles(units[..., 2:])], _halves(units, 0), no_min
    if matrix.kind == Kind.IQ4_XS:
        low = np.stack([units[..., 4:8] & 15, units[..., 4:8] >> 4], axis=-1).reshape(N, -1, 8)
        high = (units[..., 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(N, -1, 8)
        scales = _halves(units, 0) * (low + high * np.int16(16) - 32)
        codes = IQ4[_nibbles(units[..., 8:].reshape(N, B, 16))]
        return codes, scales.astype(np.float32).reshape(N, B, 1), no_min
    twos = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    if matrix.kind == Kind.Q2_K:
        codes = units[..., 16:80].reshape(N, -1, 1, BLOCK) >> twos & 3
        scales, mins = _halves(units, 80) * (units[..., :16] & 15), units[..., :16] >> 4
        mins = -(_halves(units, 82) * mins)
        return codes.reshape(N, B, BLOCK).astype(np.int16), *(
            found.reshape(N, B, 2) for found in (scales, mins)
        )
    if matrix.kind == Kind.Q3_K:
        codes = (units[..., 32:96].reshape(N, -1, 1, BLOCK) >> twos & 3).reshape(N, B, BLOCK)
        third = units[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
        codes = codes.astype(np.int16) + third.reshape(N, B, BLOCK) * np.int16(4) - np.int16(4)
        low = np.concatenate([units[..., 96:104] & 15, units[..., 96:104] >> 4], axis=-1)
        high = (units[..., None, 104:108] >> twos & 3).reshape(*low.shape)
        scales = _halves(units, 108) * (low + high * np.int16(16) - 32)
        return codes, scales.astype(np.float32).reshape(N, B, 2), no_min
    assert matrix.kind == Kind.Q6_K
    low, high = units[..., :128].reshape(N, -1, 64), units[..., 128:192].reshape(N, -1, BLOCK)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    upper = (high[:, :, None] >> shifts & 3).astype(np.int16).reshape(N, B, BLOCK)
    codes = _nibbles(low).reshape(N, B, BLOCK) + upper * np.int16(16) - np.int16(32)
    scales = _halves(units, 208) * np.ascontiguousarray(units[..., 192:208]).view(np.int8)
    return codes, scales.reshape(N, B, 2), no_min


def _halves(units: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    return np.ascontiguousarray(units[..., at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(pairs: NDArray[np.uint8]) -> NDArray[np.int16]:
    return np.concatenate([pairs & 15, pairs >> 4], axis=-1).astype(np.int16)


def quantised_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[M, K] -> whole numbers of int8 [M, B, 32], their scales [M, B], the scaled sums of the
    numbers [M, B, 1] and those of either half [M, B, 2]; all float32, scales and whole sums of half
    precision.
    """
    blocks = x.float().view(len(x), -1, BLOCK)
    most = blocks.abs().amax(-1)
    scale = most / 127
    # by torch.div: `127 / most` is most's reciprocal times 127, rounded twice
    inverse = torch.where(most > 0, torch.div(torch.full_like(most, 127), most), 0.0)
    q = (blocks * inverse.unsqueeze(-1)).round().clamp(-128, 127)
    whole, halves = q.sum(-1), q.view(*q.shape[:2], 2, -1).sum(-1)
    half_scale = scale.half().float()
    sums = (scale * whole).half().float().unsqueeze(-1)
    return q, half_scale, sums, half_scale.unsqueeze(-1) * halves


class QuantisedLinear:
    """y = x W^T + b, W [N, K] stacked from matrices of blocks, x [M, K] quantised on the way."""

    def __init__(self, parts: Sequence[BlockMatrix], bias: Tensor | None = None) -> None:
        taken = [taken_apart(part) for part in parts]
        self.bias = None if bias is None else bias.float()
        self._codes = [torch.from_numpy(codes) for codes, _, _ in taken]
        self._scales = [torch.from_numpy(scales) for _, scales, _ in taken]
        self._mins = [torch.from_numpy(mins) for _, _, mins in taken]

    def float(self, x: Tensor) -> Tensor:
        rows = quantised_rows(x)
        sums = [self._sums(rows, part) for part in range(len(self._codes))]
        y = torch.cat(sums, dim=-1)
        return y if self.bias is None else y + self.bias

    def __call__(self, x: Tensor) -> Tensor:
        return self.float(x).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return (self.float(x) + residual).to(residual.dtype)

    def _sums(self, rows: tuple[Tensor, Tensor, Tensor, Tensor], part: int) -> Tensor:
        q, row_scales, *row_sums = rows
        codes, scales, mins = self._codes[part], self._scales[part], self._mins[part]
        (N, B, _), S = codes.shape, scales.shape[-1]
        width, has_min = BLOCK // S, bool(mins.any())
        y = torch.zeros(len(q), N)
        for b in range(B):
            for s in range(S):
                at = slice(s * width, (s + 1) * width)
                # whole numbers below 2^24: exact in float32, in whatever order
                integers = q[:, b, at] @ codes[:, b, at].float().T
                y = fma(row_scales[:, b, None] * scales[:, b, s], integers, y)
                y = fma(row_sums[S - 1][:, b, s, None], mins[:, b, s], y) if has_min else y
        return y


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32, rounded once: the product is exact in float64."""
    return (a.double() * b.double() + c.double()).float()


def twin_layers(config: TargetConfig, arrays: Arrays, lm_head: Array, blocks: Blocks) -> Layers:
    """The decoder in PyTorch operators, with products of blocks where the native one has them."""
    tensors = tensors_of(arrays)
    layers = Layers(config, tensors, tensor_of(lm_head))
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    parts = parts_of(blocks, [head])
    if parts is not None:
        layers.head = QuantisedLinear(parts)  # type: ignore[assignment]
    for number, block in enumerate(layers._blocks):
        quantise(block, tensors, blocks, f"model.layers.{number}.")
    return layers


def quantise(block: Block, tensors: dict[str, Tensor], blocks: Blocks, prefix: str) -> None:
    for owner, attribute, names in products(block):
        names = [prefix + name for name in names]
        weights = [f"{name}.weight" for name in names]
        parts = parts_of(blocks, weights, gated=attribute == "gate_up")
        biases = [tensors[f"{name}.bias"] for name in names if f"{name}.bias" in tensors]
        if parts is not None:
            linear = QuantisedLinear(parts, torch.cat(biases) if biases else None)
            setattr(owner, attribute, linear)


def products(block: Block) -> Iterator[tuple[object, str, list[str]]]:
    """Of each product of a layer who has it, under which name, and of which matrices."""
    if block.attention is not None:
        yield block.attention, "qkv", [f"self_attn.{name}_proj" for name in "qkv"]
        yield block.attention, "out", ["self_attn.o_proj"]
    if block.convolution is not None:
        yield block.convolution, "input", ["conv.in_proj"]
        yield block.convolution, "output", ["conv.out_proj"]
    mlps = {"mlp.": block.mlp}
    if isinstance(block.mlp, MixtureOfExperts):
        yield block.mlp, "router", ["mlp.router"]
        mlps = {f"mlp.experts.{number}.": mlp for number, mlp in enumerate(block.mlp.mlps)}
        mlps |= {"mlp.shared.": block.mlp.shared} if block.mlp.shared is not None else {}
    for place, mlp in mlps.items():
        yield mlp, "gate_up", [f"{place}gate_proj", f"{place}up_proj"]
        yield mlp, "down", [f"{place}down_proj"]
