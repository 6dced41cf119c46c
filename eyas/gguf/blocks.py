"""The matrices of a GGUF file as stored: blocks of codes with their scales.

KINDS: the formats of ggml (llama.cpp's ggml-common.h) that the native decoder multiplies without
dequantising. A new one is an entry here and in model/cpp/formats.h, its numbers in
tests/quantised_twin.py. Letters: N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from eyas.errors import CorruptError, MismatchError
from eyas.gguf.file import DAMAGED, Kind, dequantised_rows, release

# By format: the offsets of the float16 scales in a block.
HALVES = {
    **{Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q5_0: (0,), Kind.Q5_1: (0, 2), Kind.Q8_0: (0,)},
    **{Kind.MXFP4: (), Kind.IQ4_NL: (0,), Kind.IQ4_XS: (0,), Kind.Q2_K: (80, 82)},
    **{Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)},
}
KINDS = tuple(HALVES)
# Formats without scales, and the exponent's bits: all 1 in NaN and infinity.
EXPONENTS: dict[Kind, np.uint16 | np.uint32] = {
    Kind.F32: np.uint32(0x7F800000),
    Kind.F16: np.uint16(0x7C00),
    Kind.BF16: np.uint16(0x7F80),
}
PLAIN = tuple(EXPONENTS)
BLOCK = 32
# MXFP4: a larger scale overflows, and 255 is NaN.
LARGEST_POWER = 252


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A matrix [N, K] in a format of ggml.

    stored: uint8 [rows, bytes of a row]. order: numbers of the stored rows; None is all in order.
    """

    kind: gguf.GGMLQuantizationType
    stored: NDArray[np.uint8]
    order: NDArray[np.intp] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]."""
        block, num_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        rows = self.stored if self.order is None else self.order
        return len(rows), self.stored.shape[1] // num_bytes * block

    @property
    def ndim(self) -> int:
        return 2

    @property
    def data(self) -> NDArray[np.uint8]:
        """The rows, uint8 [N, bytes of a row], contiguous."""
        rows = self.stored if self.order is None else self.stored[self.order]
        return np.ascontiguousarray(rows)

    def __getitem__(self, rows: Any) -> BlockMatrix:
        """Rows, by a slice or by their numbers."""
        chosen = rows if isinstance(rows, slice) else np.asarray(rows)
        if self.order is not None:
            return BlockMatrix(self.kind, self.stored, self.order[chosen])
        if isinstance(chosen, slice):
            return BlockMatrix(self.kind, self.stored[chosen])
        return BlockMatrix(self.kind, self.stored, chosen)

    def dequantised(self) -> NDArray[np.float32]:
        """The values, float32 [N, K]."""
        return dequantised_rows(self.data, self.kind)

    def release(self) -> None:
        """Give back the memory of a mapped file; later reads come from the file."""
        release(self.stored)

    def refuse_nonfinite(self, name: str) -> None:
        """Raise CorruptError for a scale (of PLAIN formats: a number) that is NaN or infinite."""
        units = self.data.reshape(-1, gguf.GGML_QUANT_SIZES[self.kind][1])
        bad = units[:, 0] > LARGEST_POWER if self.kind == Kind.MXFP4 else np.zeros(1, bool)
        for at in HALVES.get(self.kind, ()):
            bad = bad | (units[:, at + 1] & 0x7C == 0x7C)
        if self.kind in EXPONENTS:
            exponent = EXPONENTS[self.kind]
            bad = units.view(exponent.dtype) & exponent == exponent
        if count := int(bad.sum()):
            what = f"{name}: {count} of {len(units)} blocks have a scale that is NaN or infinite"
            raise CorruptError(what, DAMAGED)


def are_multiplied(kinds: Collection[str]) -> bool:
    """Whether matrices of types of these names are multiplied as stored: all of them are known, and
    some are neither float32 nor bfloat16.
    """
    plain, known = {"F32", "BF16"}, {kind.name for kind in (*KINDS, *PLAIN)}
    return not plain >= set(kinds) and known >= set(kinds)


def refuse_other_kinds(matrices: Mapping[str, BlockMatrix]) -> None:
    """Raise MismatchError unless the matrices of a file are multiplied as stored."""
    kinds = {matrix.kind.name for matrix in matrices.values()}
    if not are_multiplied(kinds):
        known = ", ".join(kind.name for kind in (*KINDS, Kind.F16))
        others = sorted(kinds - {kind.name for kind in (*KINDS, *PLAIN)})
        what = f"matrices in {', '.join(others)}" if others else f"no matrix in {known}"
        raise MismatchError(
            f"the GGUF file holds {what}",
            f"dtype packed is for files in {known}: leave it out, or take another file",
        )


def quantised(weight: NDArray[np.float32], kind: Kind) -> BlockMatrix:
    """A matrix [N, K] in a type with blocks of 32 numbers, which K is a multiple of."""
    return BlockMatrix(kind, gguf.quantize(weight, kind))
