"""The key-value cache: a stretch of columns per batch row. Knows no request and no model.

    data [L, rows * columns, 2, Hk, D]    row r's column c is slot r * columns + c; 2 = key, value

A slot is the place of one token. Who is in which row, and how many of its columns hold a token, the engine knows.
"""

from __future__ import annotations

import torch


class KVCache:
    """Keys and values of `num_layers` layers for `rows` requests of up to `columns` tokens each."""

    def __init__(
        self, num_layers: int, rows: int, columns: int, heads: tuple[int, int], dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        """heads: (Hk, D). Memory: num_layers * rows * columns * 2 * Hk * D elements, allocated here, once."""
        self.rows, self.columns = rows, columns
        self._heads, self._dim = heads
        # Zeros, not empty: a masked column still takes part in the product, and 0 * NaN is NaN.
        self.data = torch.zeros(num_layers, rows * columns, 2, *heads, dtype=dtype, device=device)

    def write(self, layer: int, slots_M: torch.Tensor, kv: torch.Tensor) -> None:
        """Put kv [M, 2, Hk, D] into the slots (int64 [M])."""
        self.data[layer].index_copy_(0, slots_M, kv)

    def read(self, layer: int, first_row: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `rows` rows from `first_row` on, columns [0, columns): two views [rows, Hk, columns, D]."""
        Hk, D = self._heads, self._dim
        size, stride = (rows, Hk, columns, D), (self.columns * 2 * Hk * D, D, 2 * Hk * D, 1)
        start = layer * self.data.stride(0) + first_row * stride[0]
        return self.data.as_strided(size, stride, start), self.data.as_strided(size, stride, start + Hk * D)

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copy slots [n] to slots [n] in every layer; the sources are read before anything is written."""
        self.data[:, destinations] = self.data[:, sources]

    def move_row(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` columns of one row to another."""
        start, end = source * self.columns, destination * self.columns
        self.data[:, end : end + length] = self.data[:, start : start + length]
