"""Products of quantised weights in PyTorch operators: the plain twin of `cpp/quantised.h`, to the
bit, and which products a file's blocks are multiplied in.

A row is quantised per block of 32 to int8, as ggml's Q8_0 and Q8_1 are (quantize_row_q8_0 and _q8_1
of llama.cpp). The products of a block are summed as integers, the blocks in ascending order in
float32 with one rounding each.

Letters: M rows, N outputs, K inputs, B blocks of 32 inputs, S scales of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from eyas.gguf.blocks import BLOCK, BlockMatrix, eight_bit_blocks

Blocks = Mapping[str, BlockMatrix]
LANES = 16  # outputs that the native path computes together: one format


def parts_of(blocks: Blocks, names: Sequence[str], gated: bool = False) -> list[BlockMatrix] | None:
    """The matrices whose outputs are joined in one product, or None where they are not multiplied
    as blocks: one is in a format without a product, or their formats meet inside 16 outputs.
    """
    found = [blocks[name] for name in names if name in blocks]
    if len(found) < len(names):
        return None
    if len({part.kind for part in found}) > 1 and (
        gated or any(part.shape[0] % LANES for part in found[:-1])
    ):
        return None
    return found


def in_eight_bits(tensors: Mapping[str, Tensor]) -> dict[str, BlockMatrix]:
    """The matrices among a model's tensors as Q8_0, embeddings and unfit widths left out."""
    return {
        name: eight_bit_blocks(tensor.float().numpy())
        for name, tensor in tensors.items()
        if tensor.ndim == 2 and tensor.shape[1] % BLOCK == 0 and "embed_tokens" not in name
    }


def quantised_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[M, K] -> whole numbers of int8 [M, B, 32], their scales [M, B] and the scaled sums of the
    numbers [M, B]; all float32, scales and sums of half precision.
    """
    blocks = x.float().view(len(x), -1, BLOCK)
    most = blocks.abs().amax(-1)
    scale = most / 127
    inverse = torch.where(most > 0, 127 / most, 0.0)
    q = (blocks * inverse.unsqueeze(-1)).round().clamp(-128, 127)
    return q, scale.half().float(), (scale * q.sum(-1)).half().float()


class QuantisedLinear:
    """y = x W^T + b, W [N, K] stacked from matrices of blocks, x [M, K] quantised on the way."""

    def __init__(self, parts: Sequence[BlockMatrix], bias: Tensor | None = None) -> None:
        taken = [part.taken_apart() for part in parts]
        self.bias = None if bias is None else bias.float()
        self._codes = [torch.from_numpy(codes) for codes, _, _ in taken]
        self._scales = [torch.from_numpy(scales) for _, scales, _ in taken]
        self._mins = [torch.from_numpy(mins) for _, _, mins in taken]

    def float(self, x: Tensor) -> Tensor:
        """[M, K] -> float32 [M, N]."""
        rows = quantised_rows(x)
        sums = [self._sums(rows, part) for part in range(len(self._codes))]
        y = torch.cat(sums, dim=-1)
        return y if self.bias is None else y + self.bias

    def __call__(self, x: Tensor) -> Tensor:
        """[M, K] -> [M, N], in x's dtype."""
        return self.float(x).to(x.dtype)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """[M, K], [M, N] -> residual + self(x)."""
        return (self.float(x) + residual).to(residual.dtype)

    def _sums(self, rows: tuple[Tensor, Tensor, Tensor], part: int) -> Tensor:
        q, row_scales, row_sums = rows
        codes, scales, mins = self._codes[part], self._scales[part], self._mins[part]
        (N, B, _), S = codes.shape, scales.shape[-1]
        width = BLOCK // S
        y = torch.zeros(len(q), N)
        for b in range(B):
            for s in range(S):
                at = slice(s * width, (s + 1) * width)
                # whole numbers below 2^24: exact in float32, in whatever order
                integers = q[:, b, at] @ codes[:, b, at].float().T
                y = fma(row_scales[:, b, None] * scales[:, b, s], integers, y)
            y = fma(row_sums[:, b, None], mins[:, b], y) if mins.any() else y
        return y


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32, rounded once: the product is exact in float64."""
    return (a.double() * b.double() + c.double()).float()
