"""Muon for whole weights and for those that FSDP2 splits by rows: the same bits.

torch's own multiplies split matrices split, and gathers each fifteen times a step. Here each rank
collects the update of one matrix in bf16, makes it orthogonal, and returns to every rank its rows:
two exchanges a matrix.

Letters: A rows, B columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from eyas.operators.tensors import multiplies_bf16

MATCHED_RMS = 0.2  # of AdamW's steps (Liu et al., arXiv 2502.16982)


class Muon(torch.optim.Muon):
    """torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"`, without weight decay by default."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Gradients are there: no `closure`. Split weights take part on all ranks."""
        assert closure is None, "weights have their gradients before the step"
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if group["weight_decay"]:
                kept = 1 - group["lr"] * group["weight_decay"] * (1 - getattr(self, "found_inf", 0))
                for weight in weights:
                    own_rows(weight).mul_(kept)
            if not any(isinstance(weight, DTensor) for weight in weights):
                self._step_whole(weights, group)
                continue
            # the largest first: matrices of one round are alike in size, so no rank waits long
            weights.sort(key=torch.numel, reverse=True)
            ranks = weights[0].device_mesh.get_group()
            for first in range(0, len(weights), ranks.size()):
                self._step_round(weights[first : first + ranks.size()], group, ranks)

    def _step_whole(self, weights: Sequence[Tensor], group: dict[str, Any]) -> None:
        """Matrices of one shape together; a tall one is transposed."""
        by_shape: dict[tuple[int, ...], list[Tensor]] = {}
        for weight in weights:
            by_shape.setdefault(tuple(sorted(weight.shape)), []).append(weight)
        for alike in by_shape.values():
            updates = [self._update(weight, group) for weight in alike]
            wide = [one.T if one.shape[0] > one.shape[1] else one for one in updates]
            turned = orthogonalised(torch.stack(wide) if len(wide) > 1 else wide[0], group)
            for weight, part in zip(alike, turned.view(-1, *turned.shape[-2:]), strict=True):
                rows = part if part.shape == weight.shape else part.T
                self._add(weight, rows, rate_of(weight.shape, group))

    def _step_round(
        self, weights: Sequence[DTensor], group: dict[str, Any], ranks: dist.ProcessGroup
    ) -> None:
        """At most as many matrices as ranks; number i is made orthogonal by rank i."""
        updates = [self._update(weight, group) for weight in weights]
        rank, size = ranks.rank(), ranks.size()
        # of a rank's rows of each matrix, padded: the last ranks have fewer
        numbers = [-(-len(weight) // size) * weight.shape[1] for weight in weights]
        numbers += [0] * (size - len(weights))
        rows = zip(updates, numbers, strict=False)
        sent = torch.cat([F.pad(one.flatten(), (0, count - one.numel())) for one, count in rows])
        received = sent.new_empty(size * numbers[rank])
        own = [numbers[rank]] * size
        dist.all_to_all_single(received, sent, own, numbers, group=ranks)
        if rank < len(weights):
            whole_AB = received.view(-1, weights[rank].shape[1])[: len(weights[rank])]
            whole_AB.copy_(orthogonalised(whole_AB, group))
        dist.all_to_all_single(sent, received, numbers, own, group=ranks)
        for weight, part in zip(weights, torch.split(sent, numbers), strict=False):
            local = weight.to_local()
            turned = part.view(-1, weight.shape[1])[: len(local)]
            self._add(local, turned, rate_of(weight.shape, group))

    def _update(self, weight: Tensor, group: dict[str, Any]) -> Tensor:
        """This rank's rows of the update, bf16, before orthogonalisation; updates the momentum."""
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum, rows = own_rows(state["momentum_buffer"]), own_rows(gradient)
        if (found_inf := getattr(self, "found_inf", None)) is not None:
            rows = rows.where(found_inf == 0, momentum)  # which the momentum itself does not change
        momentum.lerp_(rows, 1 - group["momentum"])
        return rows.lerp(momentum, group["momentum"]).bfloat16()  # Nesterov's

    def _add(self, rows: Tensor, turned: Tensor, rate: float) -> None:
        """A `found_inf` of 1, on the device, leaves the update out, as in torch's fused AdamW."""
        if (found_inf := getattr(self, "found_inf", None)) is not None:
            turned = turned * (1 - found_inf).to(turned.dtype)
        rows.add_(turned, alpha=-rate)


def own_rows(matrix: Tensor) -> Tensor:
    """This rank's rows of a split matrix; all of a whole one."""
    return matrix.to_local() if isinstance(matrix, DTensor) else matrix


def rate_of(shape: Sequence[int], group: dict[str, Any]) -> float:
    """The factor of the orthogonal update of a matrix of this shape."""
    return float(group["lr"] * MATCHED_RMS * math.sqrt(max(shape)))


def orthogonalised(matrix_AB: Tensor, group: dict[str, Any]) -> Tensor:
    """A matrix [..., A, B] with singular values near 1.

    The Newton-Schulz iteration of Jordan (kellerjordan.github.io/posts/muon) in the order of
    operations of torch.optim.Muon: the same bits. In float32 where products in bf16 are slow.
    """
    a, b, c = group["ns_coefficients"]
    is_tall = matrix_AB.shape[-2] > matrix_AB.shape[-1]
    x = matrix_AB.mT if is_tall else matrix_AB
    x = x if multiplies_bf16(x.device.type) else x.float()
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).to(matrix_AB.dtype)
