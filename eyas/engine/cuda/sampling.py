"""From logits to tokens for many samples at once, without the host learning a value.

The twin of `eyas.engine.sampling`: the same whole-number weights, the same cuts in the same order,
the same exponential numbers, so the same logits and seed give the same token. Pure
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
    LOG_SERIES,
    POWER_SERIES,
    SHIFTS,
    SQRT_HALF,
    STEP,
    UNIFORM_SHIFT,
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
    logits_RV: torch.Tensor, key_R: torch.Tensor, params: Cuts, is_cut: bool
) -> torch.Tensor:
    """int64 [R]: the token of each row under its key; of a greedy one any. is_cut False promises
    that no row has a cut, and sorts nothing.
    """
    logits_RV = logits_RV.float()
    weights_RV = weights_of(logits_RV, torch.where(params.temperature > 0, params.temperature, 1.0))
    if is_cut:
        weights_RV = _kept(logits_RV, weights_RV, params)
    return (weights_RV.double() / exponentials(key_R, logits_RV.shape[1])).argmax(-1)


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


def draw_keys(seed_B: torch.Tensor, index_B: torch.Tensor) -> torch.Tensor:
    """int64 [B]: `sampling.draw_key` of int64 seeds and indices, the same bits, on their device."""
    return _mixed(_mixed(seed_B) + (index_B + 1) * signed(STEP))


def exponentials(key_R: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """fp64 [R, V]: `sampling.exponentials` by the same operations."""
    ids_V = torch.arange(vocab_size, device=key_R.device)
    hash_RV = _mixed(key_R[:, None] + (ids_V + 1) * signed(STEP))
    uniform_RV = (2 * _shifted(hash_RV, UNIFORM_SHIFT) + 1).double() * 2.0**-53
    bits_RV = uniform_RV.view(torch.int64)
    whole_RV = (bits_RV - SQRT_HALF) >> EXPONENT_AT
    part_RV = (bits_RV - (whole_RV << EXPONENT_AT)).view(torch.float64)
    part_RV = (part_RV - 1) / (part_RV + 1)
    square_RV = part_RV * part_RV
    series_RV = torch.full_like(part_RV, LOG_SERIES[-1])
    for term in reversed(LOG_SERIES[:-1]):
        series_RV.mul_(square_RV).add_(term)
    return -(whole_RV + part_RV * series_RV)


def _mixed(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shifted(z, SHIFTS[0])) * signed(FACTORS[0])
    z = (z ^ _shifted(z, SHIFTS[1])) * signed(FACTORS[1])
    return z ^ _shifted(z, SHIFTS[2])


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """The shift of an unsigned number: int64's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
