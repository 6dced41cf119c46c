"""What one job leaves on the device for the next, by slot: the host need not know it to launch. Knows no request.

Letters: S slots, H draft hidden, A = 3 * Ht target features, k tree_topk, Q pending columns at most.
"""

from __future__ import annotations

import numpy as np
import torch

MAX_PENDING = 64


class FutureMap:
    """Buffers of the draft's state of every slot, and of the last feature of every page.

    h [S, H]: the draft's output at its last entry; first_ids int64, first_log_probs fp32 [S, k]: its proposals from there.
    pending [S, Q, A]: features whose entries the draft has not made yet. boundary [num_pages, A]: the target's feature of
    the last column of each full page, from which the draft's entry of the next page's first column is made.
    """

    def __init__(self, slots: int, num_pages: int, sizes: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
        """sizes: (H, A, k)."""
        H, A, k = sizes
        self.h = torch.zeros(slots, H, dtype=dtype, device=device)
        self.first_ids = torch.zeros(slots, k, dtype=torch.int64, device=device)
        self.first_log_probs = torch.zeros(slots, k, dtype=torch.float32, device=device)
        self.pending = torch.zeros(slots, MAX_PENDING, A, dtype=dtype, device=device)
        self.boundary = torch.zeros(num_pages, A, dtype=dtype, device=device)
        self._device = device

    def index(self, numbers: list[int]) -> torch.Tensor:
        """int64 indices on the device."""
        return torch.from_numpy(np.asarray(numbers, dtype=np.int64)).to(self._device)

    def pending_of(self, counts: list[tuple[int, int]]) -> torch.Tensor:
        """The first `count` pending features of each (slot, count), beside each other: [sum of counts, A]."""
        places = [slot * MAX_PENDING + place for slot, count in counts for place in range(count)]
        return self.pending.flatten(0, 1)[self.index(places)]
