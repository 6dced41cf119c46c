"""The paged key-value cache: one pool of slots. Knows no request and no model.

    data [L, num_slots, 2, Hk, D]     slot = page * page_size + offset; 2 = key, value
    features [num_slots, A]           the target's features of the same tokens, A = 3 * Ht: a draft's entries are made of them

A slot is the place of one token, a page page_size slots in a row. Who owns which page, the
allocator knows. A target's cache, its features and its draft's cache have the same pages: one page
table serves them all.
"""

from __future__ import annotations

import torch

Slots = list[int] | torch.Tensor  # int64 [n]; a list where the host knows them


class PagedCache:
    """Keys and values of `num_layers` layers for num_pages * page_size tokens."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        heads: tuple[int, int],
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        """heads: (Hk, D). Memory: num_layers * num_pages * page_size * 2 * Hk * D elements,
        allocated here, once.
        """
        self.num_pages, self.page_size = num_pages, page_size
        # Zeros, not empty: a masked slot may still take part in a product, and 0 * NaN is NaN.
        self.data = torch.zeros(
            num_layers, num_pages * page_size, 2, *heads, dtype=dtype, device=device
        )
        # The same memory for moves on a CPU, where NumPy's indexing takes a fifth of the time that
        # PyTorch's does.
        self._bytes = self.data.view(torch.uint8).numpy() if device == "cpu" else None

    def write(self, layer: int, slot_M: torch.Tensor, kv: torch.Tensor) -> None:
        """Put kv [M, 2, Hk, D] into slots int64 [M]."""
        self.data[layer].index_copy_(0, slot_M, kv)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of slots int64 [...]: two tensors [..., Hk, D], copied."""
        kv = self.data[layer][slots]
        return kv.select(-3, 0), kv.select(-3, 1)

    def move(self, sources: Slots, destinations: Slots) -> None:
        """Copy slots to slots in every layer; the sources are read before anything is written."""
        if self._bytes is not None and isinstance(sources, list):
            self._bytes[:, destinations] = self._bytes[:, sources]
        else:
            self.data[:, destinations] = self.data[:, sources]


class FeatureCache:
    """The target's features of every cached token. Like keys and values they follow from the tokens
    up to their own.
    """

    def __init__(self, num_slots: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
        """Memory: num_slots * width elements, allocated here, once."""
        self.data = torch.zeros(num_slots, width, dtype=dtype, device=device)

    def write(self, slots: torch.Tensor, features: torch.Tensor) -> None:
        """Put features [M, A] into slots int64 [M]."""
        self.data.index_copy_(0, slots, features)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """The features [M, A] in slots int64 [M], copied."""
        return self.data.index_select(0, slots)

    def move(self, sources: Slots, destinations: Slots) -> None:
        """Copy slots to slots; the sources are read before anything is written."""
        self.data[destinations] = self.data[sources]
