"""What one job leaves on the device for the next, by slot: the host need not know it to launch. Knows no request.

Letters: S slots, H draft hidden, A = 3 * Ht target features, Q pending columns at most.
"""

from __future__ import annotations

import numpy as np
import torch

MAX_PENDING = 64


def to_device(array: np.ndarray, device: str) -> torch.Tensor:
    """An array on the device; the host goes on while it travels."""
    tensor = torch.from_numpy(array)
    return tensor if device == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class FutureMap:
    """Buffers of the state of every slot, and of the last feature of every page.

    root, length int64 [S]: the last token emitted and its column. h [S, H]: the draft's output at the root's entry. These three
    are kept by `TensorRounds`. pending [S, Q, A]: features whose entries the draft has not made yet. boundary
    [num_pages, A]: the target's feature of the last column of each full page, from which the draft's entry of the next page's
    first column is made.
    """

    def __init__(self, slots: int, num_pages: int, widths: tuple[int, int], dtype: torch.dtype, device: str) -> None:
        """widths: (H, A)."""
        H, A = widths
        self.root = torch.zeros(slots, dtype=torch.int64, device=device)
        self.length = torch.zeros(slots, dtype=torch.int64, device=device)
        self.h = torch.zeros(slots, H, dtype=dtype, device=device)
        self.pending = torch.zeros(slots, MAX_PENDING, A, dtype=dtype, device=device)
        self.boundary = torch.zeros(num_pages, A, dtype=dtype, device=device)
        self._device = device

    def index(self, numbers: list[int]) -> torch.Tensor:
        """int64 indices on the device."""
        return to_device(np.asarray(numbers, dtype=np.int64), self._device)

    def note_pending(self, slots: list[int], places: list[int], features: torch.Tensor, rows: list[int]) -> None:
        """Put these rows of features [M, A] into the slots' places."""
        if len(rows) == 1:  # plain decoding of one request: an index operation less counts
            self.pending[slots[0], places[0]].copy_(features[rows[0]])
            return
        flat = [slot * MAX_PENDING + place for slot, place in zip(slots, places, strict=True)]
        self.pending.flatten(0, 1).index_copy_(0, self.index(flat), features.index_select(0, self.index(rows)))

    def pending_of(self, counts: list[tuple[int, int]]) -> torch.Tensor:
        """The first `count` pending features of each (slot, count), beside each other: [sum of counts, A]."""
        flat = [slot * MAX_PENDING + place for slot, count in counts for place in range(count)]
        return self.pending.flatten(0, 1).index_select(0, self.index(flat))
