"""Matrix products with weights laid out once for the machine. Knows no model.

On a CPU the time of a decode step is the reading of weights, and a product that lays its weight out
anew on every call reads it twice. oneDNN's blocked layout is one copy for any number of rows. Other
devices and dtypes take `F.linear`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_HAS_ONEDNN = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


class Linear:
    """y = x W^T + b for x [M, in], W [out, in], b [out] or None, all of one dtype and device."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self._weight = weight
        self._blocked: torch.Tensor | None = None
        if (
            _HAS_ONEDNN
            and weight.device.type == "cpu"
            and weight.dtype in (torch.bfloat16, torch.float32)
        ):
            self._blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[M, in] -> [M, out]."""
        if self._blocked is not None:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._blocked, self.bias, "none", [], ""
            )
            return y
        return F.linear(x, self._weight, self.bias)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """[M, in], [M, out] -> residual + self(x), in one operator where there is one."""
        if self._blocked is not None and self.bias is None:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, residual, self._blocked, None, "add"
            )
            return y
        return self(x).add_(residual)
