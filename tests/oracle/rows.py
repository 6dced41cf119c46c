"""The rows and caches of `eyas.model.rows` as PyTorch's tensors, which share their memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.model.rows import PagedCache, Rows
from eyas.operators.tensors import tensor_of


@dataclass(frozen=True, slots=True)
class TensorRows:
    """`Rows` as tensors. window: how many positions a row sees, its own among them; None is all. It
    is more than the levels of a tree, so that only the prefix is cut. chunk: a row sees those of
    its own run of so many positions, in its tree too.
    """

    token: torch.Tensor
    request: torch.Tensor
    position: torch.Tensor
    slot: torch.Tensor
    prefix_len: torch.Tensor
    seen: torch.Tensor
    page_table: torch.Tensor
    first_column: int = 0
    window: int | None = None
    chunk: int | None = None

    @classmethod
    def of(cls, rows: Rows) -> TensorRows:
        columns = rows.token, rows.request, rows.position, rows.slot, rows.prefix_len, rows.seen
        return cls(*map(tensor_of, (*columns, rows.page_table)), rows.first_column)

    def __len__(self) -> int:
        return len(self.token)

    @property
    def first_seen(self) -> torch.Tensor:
        """The first column of the prefix that each row sees, int64 [M]."""
        # the entry in column c has the position c - first_column
        return (self.first_position + self.first_column).minimum(self.prefix_len)

    @property
    def first_position(self) -> torch.Tensor:
        """The first position that each row sees, int64 [M]."""
        if self.chunk is not None:
            return self.position // self.chunk * self.chunk
        seen = self.window or int(self.position.max()) + 1
        return (self.position - seen + 1).clamp(min=0)


class TensorCache:
    def __init__(self, cache: PagedCache) -> None:
        self.page_size, self.data = cache.page_size, tensor_of(cache.data)

    def write(self, layer: int, slot_M: torch.Tensor, kept: torch.Tensor) -> None:
        flat = kept.flatten(1)
        self.data[layer, :, : flat.shape[1]].index_copy_(0, slot_M, flat)

    def keys_and_values(self, layer: int, heads: tuple[int, int]) -> torch.Tensor:
        """[num_slots, 2, Hk, D] of an attention layer; heads: (Hk, D)."""
        kept = self.data[layer, :, : 2 * heads[0] * heads[1]]
        return kept.view(-1, 2, *heads)
