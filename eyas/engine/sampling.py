"""From the target's logits to a token. Pure functions of arrays; know no request but its
SamplingParams.

The order is: penalties, bias, mask (grammar, min_tokens), temperature, min_p, top_k, top_p. A cut
keeps the best tokens, and of equal ones those with the smaller ids, so a result never depends on
the batch. What is kept is renormalised before the next cut.

`kept_weights` and `draw` are the plain form, `sample` the fast one. Both add the same numbers in
the same order (zeros between them change no sum), so they give the same token to the last bit of
the uniform number.

V vocabulary, C candidates.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from eyas.engine.request import SamplingParams
from eyas.errors import EyasError

Logits = NDArray[np.float32] | NDArray[np.float64]
Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

# of a logarithm: far above the rounding of exp, for a cut that a second, exact one follows
_MARGIN = 1e-6


def host_logits(logits_V: torch.Tensor) -> Logits:
    """The logits as an array of the host, fp32 or fp64; a view where they already are one."""
    if logits_V.dtype != torch.float64:
        logits_V = logits_V.float()
    array: Logits = logits_V.detach().cpu().numpy()
    return array


# The plain form


def adjusted_probs(logits_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """fp64 [V]: softmax(logits / temperature), cut by min_p, top_k and top_p, renormalised.
    temperature > 0.
    """
    weights_V = kept_weights(host_logits(logits_V), params)
    return torch.from_numpy(weights_V / weights_V.sum())


def draw(probs_V: torch.Tensor, uniform: float) -> int:
    """The token at quantile `uniform` in [0, 1) of the distribution (its sum may be any): one
    number, one token.
    """
    return _quantile(probs_V.double().numpy(), uniform)


def kept_weights(logits_V: Logits, params: SamplingParams) -> Floats:
    """[V]: exp of the scaled logits where a token is kept, 0 elsewhere; the best has weight 1. By
    one sort, plainly.
    """
    weights_V = np.exp(_scaled(logits_V, params.temperature))
    order_V = np.argsort(-logits_V, kind="stable")
    kept_V = np.ones(len(logits_V), dtype=bool)
    kept_V[weights_V < params.min_p] = False
    if params.top_k:
        kept_V[order_V[params.top_k :]] = False
    weights_V[~kept_V] = 0.0
    if params.top_p < 1:
        count = _num_holding(weights_V[order_V], params.top_p * _total(weights_V))
        weights_V[order_V[count:]] = 0.0
    return weights_V


# The fast form


def sample(logits_V: Logits, params: SamplingParams, uniform: float) -> int:
    """The same token as draw(kept_weights(logits, params), uniform), and the argmax at temperature
    0. Sorts nothing that it was not asked to cut."""
    if params.temperature == 0:
        return int(logits_V.argmax())
    ids_C: Ids | None = None
    if 0 < params.top_k < len(logits_V):
        ids_C = best_ids(logits_V, params.top_k)
        logits_V = logits_V[ids_C]
    scaled_C = _scaled(logits_V, params.temperature)
    if params.min_p > 0:
        kept_C = np.flatnonzero(scaled_C >= math.log(params.min_p) - _MARGIN)
        ids_C, scaled_C, logits_V = _taken(ids_C, kept_C), scaled_C[kept_C], logits_V[kept_C]
    # in place: at 128,000 tokens a new array costs more than the sums
    weights_C = np.exp(scaled_C, out=scaled_C)
    if params.min_p > 0:
        weights_C[weights_C < params.min_p] = 0.0
    if params.top_p < 1:
        kept_C = _nucleus(logits_V, weights_C, params)
        ids_C, weights_C = _taken(ids_C, kept_C), weights_C[kept_C]
    at = _quantile(weights_C, uniform)
    return at if ids_C is None else int(ids_C[at])


def best_ids(logits_V: Logits, count: int) -> Ids:
    """The ids of the `count` best logits, ascending; of equal ones at the cut those with the
    smaller ids.
    """
    if count >= len(logits_V):
        return np.arange(len(logits_V))
    least = torch.from_numpy(logits_V).topk(count, sorted=False).values.min().item()
    return _best_down_to(logits_V, least, count)


def _nucleus(logits_C: Logits, weights_C: Floats, params: SamplingParams) -> Ids:
    """The smallest set of the best that holds top_p of the weight, ascending.

    Tokens that each have less than a C-th of the weight outside hold less than that together: the
    set is among the others, and only they are sorted.
    """
    total = _total(weights_C)
    among_C = np.flatnonzero(weights_C >= (1 - params.top_p) * total / len(weights_C))
    logits_C = logits_C[among_C]
    sorted_C = logits_C.copy()
    # and the weights anew from these: half the time of sorting places and gathering by them
    sorted_C[::-1].sort()
    count = _num_holding(np.exp(_scaled(sorted_C, params.temperature)), params.top_p * total)
    return among_C[_best_down_to(logits_C, sorted_C[count - 1], count)]


def _best_down_to(logits_V: Logits, least: float, count: int) -> Ids:
    """The `count` best ids, ascending, where `least` is the logit of the worst of them."""
    ids_C = np.flatnonzero(logits_V >= least)
    if len(ids_C) > count:
        at_cut = np.flatnonzero(logits_V[ids_C] == least)
        ids_C = np.delete(ids_C, at_cut[count - len(ids_C) :])
    return ids_C


def _taken(ids_C: Ids | None, kept_C: Ids) -> Ids:
    return kept_C if ids_C is None else ids_C[kept_C]


# Both forms


def _scaled(logits_V: Logits, temperature: float) -> Floats:
    best = logits_V.max()
    if not math.isfinite(best):
        raise EyasError(
            f"the target's best logit is {best}",
            "check the target's weights and dtype: its numbers overflow",
        )
    scaled_V: Floats = np.subtract(logits_V, best, dtype=np.float64)
    if temperature != 1:
        scaled_V /= temperature
    return scaled_V


def _cumulative(weights_V: Floats) -> Floats:
    """Sums from the left, one after the other: torch's is several times as fast as numpy's."""
    array: Floats = torch.from_numpy(weights_V).cumsum(0).numpy()
    return array


def _total(weights_V: Floats) -> float:
    return float(_cumulative(weights_V)[-1])


def _num_holding(best_first_C: Floats, mass: float) -> int:
    """How many of the weights, from the first, it takes to hold `mass`; all of them where rounding
    leaves it just short.
    """
    return min(int(np.searchsorted(_cumulative(best_first_C), mass)) + 1, len(best_first_C))


def _quantile(weights_V: Floats, uniform: float) -> int:
    cumulative_V = _cumulative(weights_V)
    return int(np.searchsorted(cumulative_V, uniform * cumulative_V[-1], side="right"))


# Penalties


def penalised(
    logits_V: Logits, seen_ids: Ids, output_counts: NDArray[np.int64], params: SamplingParams
) -> Logits:
    """New logits [V]: penalties for the tokens seen_ids (each once) of prompt and output,
    output_counts times in the output.

    The repetition penalty is CTRL's (a positive logit is divided by it, a negative one multiplied),
    over prompt and output; the frequency penalty (for each occurrence) and the presence penalty
    (once) are OpenAI's, over the output.
    """
    logits_V = logits_V.copy()
    seen_C = logits_V[seen_ids].astype(np.float64)
    if params.repetition_penalty != 1:
        seen_C = np.where(
            seen_C > 0, seen_C / params.repetition_penalty, seen_C * params.repetition_penalty
        )
    seen_C -= params.frequency_penalty * output_counts + params.presence_penalty * (
        output_counts > 0
    )
    logits_V[seen_ids] = seen_C
    return logits_V
