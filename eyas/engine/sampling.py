"""From the target's logits to a token. Pure functions; know no request but its SamplingParams."""

from __future__ import annotations

import torch

from eyas.engine.request import SamplingParams


def adjusted_probs(logits_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """fp64 [V]: softmax(logits / temperature), cut to the top_k, then to the smallest set holding top_p, renormalised.

    temperature > 0. Ties at a cut go to the smaller token id, so the result never depends on the batch.
    """
    logits_V = logits_V.double() / params.temperature
    order_V = torch.argsort(logits_V, descending=True, stable=True)
    sorted_V = logits_V[order_V].softmax(-1)
    kept_V = torch.ones_like(sorted_V, dtype=torch.bool)
    if params.top_k:
        kept_V[params.top_k :] = False
        sorted_V = torch.where(kept_V, sorted_V, 0.0)
        sorted_V = sorted_V / sorted_V.sum()
    if params.top_p < 1:
        kept_V &= sorted_V.cumsum(-1) - sorted_V < params.top_p  # the mass before a token decides: the best always stays
    sorted_V = torch.where(kept_V, sorted_V, 0.0)
    return torch.zeros_like(sorted_V).scatter_(0, order_V, sorted_V / sorted_V.sum())


def draw(probs_V: torch.Tensor, uniform: float) -> int:
    """The token at quantile `uniform` in [0, 1) of the distribution: one uniform number, one token."""
    cumulative_V = probs_V.cumsum(-1)
    quantile = torch.tensor(uniform * float(cumulative_V[-1]), dtype=torch.float64)
    return min(int(torch.searchsorted(cumulative_V, quantile, right=True)), int(probs_V.nonzero()[-1]))
