"""What the native library does on this machine, measured in half a second."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from eyas.gguf.blocks import BLOCK, BlockMatrix
from eyas.gguf.file import Kind
from eyas.model.library import address, library
from eyas.model.packed import PackedLinear
from eyas.model.structs import STRUCTS

N, K, REPEATED = 32768, 6144, 1024  # 200 MB: more than caches hold; so many different rows
CHECKED = 64  # outputs
SECONDS = 0.15
MOST_ERROR = 0.02  # a row in 8 bits has some .005


@dataclass(frozen=True, slots=True)
class Speed:
    """read, product: billions of bytes a second, of a plain read and of multiplying a Q8_0 matrix
    by one row. error: of the product, relative to NumPy's.
    """

    read: float
    product: float
    error: float

    @property
    def is_right(self) -> bool:
        return self.error < MOST_ERROR


def measured(threads: int) -> Speed:
    """Needs the library."""
    lib, matrix, rng = library(), _random_matrix(), np.random.default_rng(1)
    linear = PackedLinear.of_blocks([matrix], (), threads)
    x, y = rng.standard_normal(K, dtype=np.float32), np.empty(N, dtype=np.float32)
    call = STRUCTS["ProductCall"](address(x), address(y), M=1, threads=threads)
    multiplying = _fastest(lambda: lib.eyas_multiply(linear.handle, call))
    words = matrix.data.size // ctypes.sizeof(ctypes.c_int64)
    reading = _fastest(lambda: lib.eyas_read(address(matrix.data), words, threads))
    expected = matrix[:CHECKED].dequantised().astype(np.float64) @ x
    error = np.linalg.norm(y[:CHECKED] - expected) / np.linalg.norm(expected)
    size = matrix.data.size / 1e9
    return Speed(size / reading, size / multiplying, float(error))


def _random_matrix() -> BlockMatrix:
    shape = REPEATED, K // BLOCK, 2 + BLOCK
    blocks = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    blocks[..., :2] = np.full(1, 0.01, dtype=np.float16).view(np.uint8)
    return BlockMatrix(Kind.Q8_0, np.tile(blocks.reshape(REPEATED, -1), (N // REPEATED, 1)))


def _fastest(call: Callable[[], object]) -> float:
    best, end = float("inf"), time.perf_counter() + SECONDS
    while (start := time.perf_counter()) < end:
        call()
        best = min(best, time.perf_counter() - start)
    return best
