"""What one job leaves on the device for the next, by slot: the host need not know it to launch.
Knows no request.

Letters: S slots, H draft hidden.
"""

from __future__ import annotations

import numpy as np
import torch


def to_device(array: np.ndarray, device: str) -> torch.Tensor:
    """An array on the device; the host goes on while it travels."""
    tensor = torch.from_numpy(array)
    return tensor if device == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class FutureMap:
    """Buffers of the state of every slot.

    root, length int64 [S]: the last token emitted and its column. h [S, H]: the draft's output at
    the root's entry.
    """

    def __init__(self, slots: int, H: int, dtype: torch.dtype, device: str) -> None:
        self.root = torch.zeros(slots, dtype=torch.int64, device=device)
        self.length = torch.zeros(slots, dtype=torch.int64, device=device)
        self.h = torch.zeros(slots, H, dtype=dtype, device=device)
