"""Weights and states as NumPy arrays, of bfloat16 too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from eyas.errors import CorruptError

Array = NDArray[Any]
Arrays = Mapping[str, Array]

FLOAT32, FLOAT16 = np.dtype(np.float32), np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# types with NaN and infinity: as whole numbers, and infinity's bits
_INFINITY: dict[np.dtype[Any], tuple[Any, int]] = {
    np.dtype(np.float64): (np.uint64, 0x7FF0000000000000),
    FLOAT32: (np.uint32, 0x7F800000),
    FLOAT16: (np.uint16, 0x7C00),
    BFLOAT16: (np.uint16, 0x7F80),
}
FLOATS = tuple(_INFINITY)
_AT_ONCE = 1 << 20  # numbers, which stay in the caches
RESTORE = "restore the file from its source"


def cast(array: Array, dtype: np.dtype[Any]) -> Array:
    """The array in this precision, itself where it has it."""
    return array.astype(dtype, copy=False)


def fits_bfloat16(array: Array) -> bool:
    """Whether bfloat16 holds every number exactly."""
    if array.dtype != FLOAT32:
        return bool(array.dtype == BFLOAT16)
    return not any((part.view(np.uint32) & 0xFFFF).any() for part in _parts(array))


def nonfinite(arrays: Arrays) -> list[str]:
    """A line for every array that holds a NaN or an infinity."""
    return [
        f"{name}: {bad} of {array.size} values are NaN or infinite"
        for name, array in arrays.items()
        if (bad := _count_nonfinite(array))
    ]


def refuse_nonfinite(what: str | Path, arrays: Arrays) -> None:
    """Raise CorruptError if any weight is NaN or infinite."""
    if found := nonfinite(arrays):
        more = f"; and {len(found) - 3} tensors more" if len(found) > 3 else ""
        raise CorruptError(f"{what}: {'; '.join(found[:3])}{more}", RESTORE)


def _count_nonfinite(array: Array) -> int:
    if array.dtype not in _INFINITY:
        return 0
    bits, infinity = _INFINITY[array.dtype]
    magnitudes = np.iinfo(bits).max >> 1
    return sum(
        int(((part.view(bits) & bits(magnitudes)) >= bits(infinity)).sum())
        for part in _parts(array)
    )


def _parts(array: Array) -> list[Array]:
    flat = np.ascontiguousarray(array).reshape(-1)
    return [flat[first : first + _AT_ONCE] for first in range(0, flat.size, _AT_ONCE)]
