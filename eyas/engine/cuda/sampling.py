"""From logits to tokens for many samples at once, without the host learning a value.

The twin of `eyas.engine.sampling`: the same whole-number weights, the same cuts in the same order,
the same quantile of the same uniform numbers, so the same logits and seed give the same token. Pure
functions; penalties, bias and masks need the host.

B samples, R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.engine.sampling import (
    BEST_WEIGHT,
    EXPONENT_AT,
    EXPONENT_BIAS,
    FACTORS,
    LEAST_POWER,
    LOG2_E,
    POWER_SERIES,
    SHIFTS,
    STEP,
    UNIT,
    WEIGHT_BITS,
    signed,
)


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
    weights_RV = weights_of(logits_RV, torch.where(params.temperature > 0, params.temperature, 1.0))
    if is_cut:
        weights_RV = _kept(logits_RV, weights_RV, params)
    cumulative_RV = weights_RV.cumsum(-1)
    place_R1 = share((uniform_R[:, None] / UNIT).long(), cumulative_RV[:, -1:])
    return torch.searchsorted(cumulative_RV, place_R1, right=True)[:, 0].clamp_(
        max=logits_RV.shape[1] - 1
    )


def weights_of(logits_RV: torch.Tensor, temperature_R: torch.Tensor) -> torch.Tensor:
    """int64 [R, V]: `sampling.weights_of` by the same operations, each one of its own."""
    best_R1 = logits_RV.max(-1, keepdim=True).values
    power_RV = (logits_RV.double() - best_R1) * (LOG2_E / temperature_R)[:, None]
    power_RV.clamp_(min=LEAST_POWER)
    whole_RV = power_RV.round()
    power_RV -= whole_RV
    series_RV = torch.full_like(power_RV, POWER_SERIES[-1])
    for term in reversed(POWER_SERIES[:-1]):
        series_RV.mul_(power_RV).add_(term)
    exponent_RV = (whole_RV.long() + EXPONENT_BIAS + WEIGHT_BITS) << EXPONENT_AT
    return series_RV.mul_(exponent_RV.view(torch.float64)).round_().long()


def _kept(logits_RV: torch.Tensor, weights_RV: torch.Tensor, params: Cuts) -> torch.Tensor:
    """The weights, 0 where min_p, top_k or top_p cuts."""
    V = logits_RV.shape[1]
    ids_RV = logits_RV.sort(dim=-1, descending=True, stable=True).indices
    rank_V = torch.arange(V, device=ids_RV.device)
    ranked_RV = weights_RV.gather(1, ids_RV)
    top_k_R1 = torch.where(params.top_k > 0, params.top_k, V)[:, None]
    least_R1 = (params.min_p * BEST_WEIGHT).ceil().long()[:, None]
    ranked_RV = torch.where((ranked_RV >= least_R1) & (rank_V < top_k_R1), ranked_RV, 0)
    cumulative_RV, top_p_R1 = ranked_RV.cumsum(-1), params.top_p[:, None]
    total_R1 = cumulative_RV[:, -1:]
    need_R1 = torch.minimum(total_R1, (top_p_R1 * total_R1.double()).ceil().long())
    count_R1 = torch.searchsorted(cumulative_RV, need_R1) + 1
    ranked_RV = torch.where((rank_V < count_R1) | (top_p_R1 >= 1), ranked_RV, 0)
    return torch.zeros_like(weights_RV).scatter_(1, ids_RV, ranked_RV)


def share(bits: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """bits * total >> 53, for bits < 2**53 and total < 2**63: in parts of 27, 26, 31 and 32 bits,
    whose products fit.
    """
    high, low = bits >> 26, bits & ((1 << 26) - 1)
    upper, lower = total >> 32, total & ((1 << 32) - 1)
    across = high * lower
    rest = low * lower + ((across & 63) << 26) >> 32
    return (high * upper << 5) + (low * upper + (across >> 6) + rest >> 21)


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
