"""The matrices of a GGUF file as they lie in it: blocks of codes with their scales. Knows which
formats the decoder multiplies as they are, and how one is taken apart; no model.

A weight is scale * code + min. Formats are ggml's (ggml-common.h of llama.cpp).

Letters: N rows, K columns, B blocks of 32 columns, S scales of a block (1 or 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from eyas.errors import MismatchError
from eyas.gguf.file import dequantised_rows
from eyas.gguf.folder import linked_file, raw_tensors

Kind = gguf.GGMLQuantizationType
KINDS = (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0, Kind.Q4_K, Kind.Q6_K)
BLOCK = 32


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A matrix [N, K] in a format of KINDS. data: uint8 [N, bytes of a row], mapped or copied."""

    kind: gguf.GGMLQuantizationType
    data: NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, int]:
        block, num_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return len(self.data), self.data.shape[1] // num_bytes * block

    def dequantised(self) -> NDArray[np.float32]:
        """Its values, float32 [N, K]."""
        return dequantised_rows(self.data, self.kind)

    def taken_apart(
        self,
    ) -> tuple[NDArray[np.int16], NDArray[np.float32], NDArray[np.float32]]:
        """Codes int16 [N, B, 32], scales float32 [N, B, S] and mins [N, B]."""
        N, K = self.shape
        units = self.data.reshape(N, -1, gguf.GGML_QUANT_SIZES[self.kind][1])
        B = K // BLOCK
        no_min = np.zeros((N, B), np.float32)
        if self.kind == Kind.Q8_0:
            return units[..., 2:].view(np.int8).astype(np.int16), _halves(units, 0), no_min
        if self.kind == Kind.Q4_0:
            return _nibbles(units[..., 2:]) - np.int16(8), _halves(units, 0), no_min
        if self.kind == Kind.Q4_1:
            return _nibbles(units[..., 4:]), _halves(units, 0), _halves(units, 2)[..., 0]
        if self.kind == Kind.Q4_K:
            # 6 bits each: of the first 4 blocks whole, of the others' the upper 2 above those
            first, second, rest = np.split(units[..., 4:16], 3, axis=-1)
            low = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], axis=-1)
            high = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], axis=-1)
            codes = _nibbles(units[..., 16:].reshape(N, B // 2, BLOCK)).reshape(N, B, BLOCK)
            scales, mins = _halves(units, 0) * low, -(_halves(units, 2) * high)
            return codes, scales.reshape(N, B, 1), mins.reshape(N, B)
        assert self.kind == Kind.Q6_K
        low, high = units[..., :128].reshape(N, -1, 64), units[..., 128:192].reshape(N, -1, BLOCK)
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        upper = (high[:, :, None] >> shifts & 3).astype(np.int16).reshape(N, B, BLOCK)
        codes = _nibbles(low).reshape(N, B, BLOCK) + upper * np.int16(16) - np.int16(32)
        scales = _halves(units, 208) * np.ascontiguousarray(units[..., 192:208]).view(np.int8)
        return codes, scales.reshape(N, B, 2), no_min


def eight_bit_blocks(weight: NDArray[np.float32]) -> BlockMatrix:
    """A matrix [N, K] in Q8_0, K a multiple of 32."""
    return BlockMatrix(Kind.Q8_0, gguf.quantize(weight, Kind.Q8_0))


def _halves(units: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    """A number of half precision of each unit, [N, units, 1]."""
    return np.ascontiguousarray(units[..., at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(pairs: NDArray[np.uint8]) -> NDArray[np.int16]:
    """[..., n] bytes -> [..., 2 n] codes: the lower halves first."""
    return np.concatenate([pairs & 15, pairs >> 4], axis=-1).astype(np.int16)


def block_matrices(folder: str | Path) -> dict[str, BlockMatrix]:
    """The matrices of the file that a target's folder was made from, under Hugging Face's names;
    those in other formats are left out.

    Raises MismatchError (no GGUF file, or none of its matrices in a format of KINDS),
    MissingInputError, CorruptError.
    """
    file = linked_file(Path(folder))
    found = {
        name: BlockMatrix(kind, rows)
        for name, kind, rows in raw_tensors(file)
        if kind in KINDS and rows.ndim == 2
    }
    if not found:
        raise MismatchError(
            f"{file.path} holds no matrix in {', '.join(kind.name for kind in KINDS)}",
            "dtype packed is for files in these types; leave it out for this one",
        )
    return found
