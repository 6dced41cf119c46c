"""The matrices of a GGUF file as they lie in it: blocks of codes with their scales.

KINDS are the formats of ggml (ggml-common.h of llama.cpp) that the native decoder multiplies as
they are. Another one is an entry here and one in model/cpp/formats.h; tests/quantised_twin.py says
what its numbers are.

Letters: N rows, K columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from eyas.errors import MismatchError
from eyas.gguf.file import Kind, dequantised_rows
from eyas.gguf.folder import linked_file
from eyas.gguf.tensors import raw_tensors

KINDS = (
    *(Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.MXFP4),
    *(Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
)
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

    def __getitem__(self, rows: Any) -> BlockMatrix:
        """Some of its rows, a slice or their numbers in an order: blocks stay whole."""
        chosen = rows if isinstance(rows, slice) else np.asarray(rows)
        return BlockMatrix(self.kind, self.data[chosen])

    def dequantised(self) -> NDArray[np.float32]:
        """Its values, float32 [N, K]."""
        return dequantised_rows(self.data, self.kind)


def eight_bit_blocks(weight: NDArray[np.float32]) -> BlockMatrix:
    """A matrix [N, K] in Q8_0, K a multiple of 32."""
    return BlockMatrix(Kind.Q8_0, gguf.quantize(weight, Kind.Q8_0))


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
