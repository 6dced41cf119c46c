"""Matrix products with weights laid out once for the machine. Knows no model.

On a CPU the time of a decode step is the reading of weights, and a product that lays its weight out anew on every call
reads it twice. oneDNN's blocked layout is one copy for any number of rows; in fp32 MKL's packed layout is about twice as
fast for a few rows, but one copy per number of rows, so only for the numbers that a decoder uses every round
(`prepare`). Other devices and dtypes take `F.linear`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_HAS_ONEDNN = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
_HAS_MKL = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


class Linear:
    """y = x W^T + b for x [M, in], W [out, in], b [out] or None, all of one dtype and device."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.bias = bias
        self._weight = weight
        self._packed_by_rows: dict[int, torch.Tensor] = {}
        self._blocked: torch.Tensor | None = None
        if _HAS_ONEDNN and weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float32):
            self._blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def prepare(self, rows: set[int]) -> None:
        """Lay the weight out for these numbers of rows M (fp32 on a CPU with MKL; elsewhere nothing)."""
        if _HAS_MKL and self._weight.device.type == "cpu" and self._weight.dtype == torch.float32:
            for M in rows - self._packed_by_rows.keys():
                self._packed_by_rows[M] = torch.ops.mkl._mkl_reorder_linear_weight(self._weight, M)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[M, in] -> [M, out]."""
        packed = self._packed_by_rows.get(x.shape[0])
        if packed is not None:
            y: torch.Tensor = torch.ops.mkl._mkl_linear(x, packed, self._weight, self.bias, x.shape[0])
            return y
        if self._blocked is not None:
            y = torch.ops.mkldnn._linear_pointwise(x, self._blocked, self.bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self.bias)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """[M, in], [M, out] -> residual + self(x), in one operator where there is one."""
        if self._blocked is not None and self.bias is None and x.shape[0] not in self._packed_by_rows:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, residual, self._blocked, None, "add")
            return y
        return self(x).add_(residual)
