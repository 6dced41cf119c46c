"""From the target's logits to a token in NumPy: what the native library (`cpp/draw.h`) computes, to
the last bit.

V vocabulary, C candidates.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from eyas.engine.request import SamplingParams, TokenLogprob
from eyas.engine.sampling import BEST_WEIGHT, WEIGHT_BITS, Ids, Sampler, mixed, scored
from eyas.model.draws import no_best_logit

Logits = NDArray[np.float32] | NDArray[np.float64]
Weights = NDArray[np.int64]

# splitmix64's constants
STEP = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)


def draw_key(seed: int, index: int) -> int:
    """What the random numbers of the answer's token `index` come from, 64 bits, unsigned."""
    return mixed(mixed(seed) + (index + 1) * STEP)


def exponentials(key: int, ids_C: Ids) -> NDArray[np.float64]:
    """The exponential numbers of these ids, in units of log(2): -log2 of uniform numbers, which are
    odd multiples of 2**-53.

    By operations that `cpp/draw.h` repeats. The series is that of log2((1 + s) / (1 - s)), the
    number's exponent taken off.
    """
    z = np.uint64(key) + (ids_C.astype(np.uint64) + np.uint64(1)) * np.uint64(STEP)
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    z ^= z >> np.uint64(SHIFTS[2])
    uniform_C = ((z >> np.uint64(UNIFORM_SHIFT)) * np.uint64(2) + np.uint64(1)) * 2.0**-53
    bits_C = uniform_C.view(np.int64)
    whole_C = (bits_C - SQRT_HALF) >> EXPONENT_AT
    part_C = (bits_C - (whole_C << EXPONENT_AT)).view(np.float64)
    part_C = (part_C - 1) / (part_C + 1)
    square_C = part_C * part_C
    series_C = np.full(len(part_C), LOG_SERIES[-1])
    for term in reversed(LOG_SERIES[:-1]):
        series_C *= square_C
        series_C += term
    numbers: NDArray[np.float64] = -(whole_C + part_C * series_C)
    return numbers


LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
LEAST_POWER = -64.0  # of 2: its weight is 0
POWER_SERIES = [1.0]  # of 2**f, |f| <= 1/2: the rest is below 2**-47
for _place in range(1, 12):
    POWER_SERIES.append(POWER_SERIES[-1] * LN_2 / _place)
EXPONENT_BIAS, EXPONENT_AT = 1023, 52  # of fp64
UNIFORM_SHIFT = 12  # of 64 bits: 52 are left
SQRT_HALF = 0x3FE6A09E667F3BCD  # its bits
LOG_SERIES = [2 * LOG2_E / (2 * place + 1) for place in range(8)]  # the rest is below 2**-44
_WEIGHT_SLACK = 4  # units, above what rounding can turn around


def sample(logits_V: Logits, params: SamplingParams, key: int) -> int:
    """The token that the numbers of `key` draw from what the cuts keep; the argmax at temperature
    0. Sorts nothing that it need not cut. `cpp/draw.h` is its twin, to the bit.

    With independent exponential numbers e, the largest weight / e falls on each token with the
    probability of its weight (Gumbel-max; Maddison et al. 2014, arXiv 1411.0030).
    """
    if params.temperature == 0:
        return int(logits_V.argmax())
    ids_C: Ids | None = None
    if 0 < params.top_k < len(logits_V):
        ids_C = best_ids(logits_V, params.top_k)
        logits_V = logits_V[ids_C]
    weights_C = weights_of(logits_V, params.temperature)
    if params.min_p > 0:
        weights_C[weights_C < least_weight(params.min_p)] = 0
    if params.top_p < 1:
        kept_C = _nucleus(logits_V, weights_C, params.top_p)
        ids_C, weights_C = kept_C if ids_C is None else ids_C[kept_C], weights_C[kept_C]
    drawn_C = np.flatnonzero(weights_C)
    ids_C = drawn_C if ids_C is None else ids_C[drawn_C]
    return int(ids_C[(weights_C[drawn_C] / exponentials(key, ids_C)).argmax()])


def weights_of(logits_V: Logits, temperature: float) -> Weights:
    """int64 [V]: 2**44 * exp((logit - best) / temperature), rounded.

    By a few operations of fp64, in this order and none fused, that `cpp/draw.h` repeats: libraries
    differ in the last bit of their exp. Raises EyasError unless the best logit is a finite number.
    """
    best = logits_V.max()
    if not math.isfinite(best):
        raise no_best_logit(best)
    power_V = np.subtract(logits_V, best, dtype=np.float64)
    power_V *= LOG2_E / temperature
    np.maximum(power_V, LEAST_POWER, out=power_V)
    whole_V = np.rint(power_V)
    power_V -= whole_V
    series_V = np.full(len(power_V), POWER_SERIES[-1])
    for term in reversed(POWER_SERIES[:-1]):
        series_V *= power_V
        series_V += term
    exponent_V = whole_V.astype(np.int64)
    exponent_V += EXPONENT_BIAS + WEIGHT_BITS
    exponent_V <<= EXPONENT_AT
    series_V *= exponent_V.view(np.float64)
    weights_V: Weights = np.rint(series_V, out=series_V).astype(np.int64)
    return weights_V


def least_weight(min_p: float) -> int:
    """What min_p keeps has this weight or more."""
    return math.ceil(min_p * BEST_WEIGHT)


def nucleus_weight(total: int, top_p: float) -> int:
    """What the nucleus has to hold of the total."""
    return min(total, math.ceil(top_p * total))


def best_ids(logits_V: Logits, count: int) -> Ids:
    """The ids of the `count` best logits, ascending; of equal ones at the cut those with the
    smaller ids.
    """
    if count >= len(logits_V):
        return np.arange(len(logits_V))
    least = np.partition(logits_V, -count)[-count]
    ids_C = np.flatnonzero(logits_V >= least)
    if len(ids_C) > count:
        at_cut = np.flatnonzero(logits_V[ids_C] == least)
        ids_C = np.delete(ids_C, at_cut[count - len(ids_C) :])
    return ids_C


def _nucleus(logits_C: Logits, weights_C: Weights, top_p: float) -> Ids:
    """The smallest set of the best that holds top_p of the weight, ascending.

    Tokens that each have less than a C-th of the weight outside hold less than that together: the
    set is among the others, and only they are sorted.
    """
    total = int(weights_C.sum())
    thin = int((1 - top_p) * total / len(weights_C)) - _WEIGHT_SLACK
    among_C = np.flatnonzero(weights_C >= thin)
    ranked_C = among_C[np.argsort(-logits_C[among_C], kind="stable")]
    held_C = weights_C[ranked_C].cumsum()
    count = int(np.searchsorted(held_C, nucleus_weight(total, top_p))) + 1
    return np.sort(ranked_C[:count])


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


def token_logprob(logits_V: Logits, token: int, num_top: int) -> TokenLogprob:
    """log_softmax(logits) at `token` and at the num_top best tokens, best first, of equal ones the
    smaller id.

    Of the raw logits, before penalties, bias, mask and temperature: as OpenAI's API and vLLM's
    default have it. In fp64, of the weights at temperature 1: to 1e-9 or better.
    """
    top: Ids = best_ids(logits_V, num_top) if num_top else np.empty(0, np.int64)
    top = top[np.argsort(-logits_V[top], kind="stable")]
    total = int(weights_of(logits_V, 1.0).sum())
    logits = [float(logits_V.max()), float(logits_V[token]), *logits_V[top].tolist()]
    return scored(token, total, logits, top.tolist())


class PlainSampler(Sampler):
    """Draws in Python."""

    def draw(self, logits_V: Logits) -> int:
        if self._over_with is not None:
            return self._over_with
        adjusted_V = self._adjusted(logits_V)
        if self._matcher is not None:
            adjusted_V = np.where(self._matcher.mask(), adjusted_V, adjusted_V.dtype.type(-np.inf))
        token = sample(adjusted_V, self.params, draw_key(self.seed, self.num_drawn))
        if self.logprobs is not None:
            self.logprobs.append(token_logprob(logits_V, token, self.params.logprobs or 0))
        self._advance(token)
        return token

    def _adjusted(self, logits_V: Logits) -> Logits:
        """Penalties, bias and the mask of min_tokens; the logits themselves where none applies."""
        params = self.params
        adjusted_V = logits_V
        if self._seen is not None:
            adjusted_V = penalised(adjusted_V, self._seen.ids, self._seen.output_counts, params)
        if len(self._bias_ids):
            adjusted_V = adjusted_V.copy() if adjusted_V is logits_V else adjusted_V
            adjusted_V[self._bias_ids] += self._bias.astype(adjusted_V.dtype)
        if self.num_drawn < params.min_tokens:
            adjusted_V = adjusted_V.copy() if adjusted_V is logits_V else adjusted_V
            adjusted_V[self._end_ids] = -np.inf
        return adjusted_V
