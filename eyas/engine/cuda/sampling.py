"""From logits to tokens for many samples at once, without the host learning a value.

The twin of `eyas.engine.sampling`: the same cuts in the same order, the same quantile of the same
uniform numbers, so a seed gives the same token up to the rounding of sums. Pure functions;
penalties, bias and masks need the host.

B samples, R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.engine.sampling import FACTORS, SHIFTS, STEP, UNIT, signed


@dataclass(frozen=True, slots=True)
class Cuts:
    """Of each row: temperature (0: greedy), top_p, min_p fp64 [R]; top_k int64 [R], 0 for none."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor


def sampled(
    logits_RV: torch.Tensor, uniform_R: torch.Tensor, params: Cuts, is_cut: bool
) -> torch.Tensor:
    """int64 [R]: the token of each row; of a greedy one any. is_cut False promises that no row has
    a cut, and sorts nothing.
    """
    logits_RV = logits_RV.float()
    best_R1 = logits_RV.max(-1, keepdim=True).values
    temperature_R1 = torch.where(params.temperature > 0, params.temperature, 1.0)[:, None]
    weights_RV = ((logits_RV.double() - best_R1) / temperature_R1).exp_()
    if is_cut:
        weights_RV = _kept(logits_RV, weights_RV, params)
    cumulative_RV = weights_RV.cumsum(-1)
    quantile_R1 = uniform_R[:, None] * cumulative_RV[:, -1:]
    return torch.searchsorted(cumulative_RV, quantile_R1, right=True)[:, 0].clamp_(
        max=logits_RV.shape[1] - 1
    )


def _kept(logits_RV: torch.Tensor, weights_RV: torch.Tensor, params: Cuts) -> torch.Tensor:
    """The weights, 0 where min_p, top_k or top_p cuts."""
    V = logits_RV.shape[1]
    ids_RV = logits_RV.sort(dim=-1, descending=True, stable=True).indices
    rank_V = torch.arange(V, device=ids_RV.device)
    ranked_RV = weights_RV.gather(1, ids_RV)
    top_k_R1 = torch.where(params.top_k > 0, params.top_k, V)[:, None]
    ranked_RV = torch.where(
        (ranked_RV >= params.min_p[:, None]) & (rank_V < top_k_R1), ranked_RV, 0.0
    )
    cumulative_RV = ranked_RV.cumsum(-1)
    top_p_R1 = params.top_p[:, None]
    count_R1 = torch.searchsorted(cumulative_RV, top_p_R1 * cumulative_RV[:, -1:]) + 1
    ranked_RV = torch.where((rank_V < count_R1) | (top_p_R1 >= 1), ranked_RV, 0.0)
    return torch.zeros_like(weights_RV).scatter_(1, ids_RV, ranked_RV)


def uniforms(seed_B: torch.Tensor, index_B: torch.Tensor) -> torch.Tensor:
    """fp64 [B]: `sampling.uniform` of int64 seeds and indices, to the same bit, on their device."""
    mixed_B = _mixed(_mixed(seed_B) + (index_B + 1) * signed(STEP))
    return _shifted(mixed_B, 11).double() * UNIT


def _mixed(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shifted(z, SHIFTS[0])) * signed(FACTORS[0])
    z = (z ^ _shifted(z, SHIFTS[1])) * signed(FACTORS[1])
    return z ^ _shifted(z, SHIFTS[2])


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """The shift of an unsigned number: int64's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
