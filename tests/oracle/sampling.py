"""From the target's logits to a token, by definition: what the native library (`cpp/draw.h`)
computes, to the last bit. V vocabulary, C candidates.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from eyas.engine.request import SamplingParams, TokenLogprob
from eyas.engine.sampling import (
    BEST_WEIGHT,
    FACTORS,
    SHIFTS,
    STEP,
    WEIGHT_BITS,
    Ids,
    Sampler,
    mixed,
    scored,
)
from eyas.model.draws import no_best_logit

Logits = NDArray[np.float32] | NDArray[np.float64]
Weights = NDArray[np.int64]


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


def sample(logits_V: Logits, params: SamplingParams, key: int) -> int:
    """The token that the numbers of `key` draw from what the cuts keep; the argmax at temperature
    0. With independent exponential numbers e, the largest weight / e falls on each token with the
    probability of its weight (Gumbel-max; Maddison et al. 2014, arXiv 1411.0030).
    """
    if params.temperature == 0:
        return int(logits_V.argmax())
    weights_V = kept_weights(logits_V, params)
    ids_C = np.flatnonzero(weights_V)
    return int(ids_C[(weights_V[ids_C] / exponentials(key, ids_C)).argmax()])


def kept_weights(logits_V: Logits, params: SamplingParams) -> Weights:
    """int64 [V]: the weights of the tokens that the cuts keep, 0 elsewhere; by one sort."""
    weights_V = weights_of(logits_V, params.temperature)
    order_V = np.argsort(-logits_V, kind="stable")
    weights_V[weights_V < math.ceil(params.min_p * BEST_WEIGHT)] = 0
    if params.top_k:
        weights_V[order_V[params.top_k :]] = 0
    if params.top_p < 1:
        sums_V, need = weights_V[order_V].cumsum(), math.ceil(params.top_p * int(weights_V.sum()))
        count = np.searchsorted(sums_V, min(need, sums_V[-1])) + 1
        weights_V[order_V[count:]] = 0
    return weights_V


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
    """As `eyas.engine.sampling.token_logprob`."""
    top = np.argsort(-logits_V, kind="stable")[:num_top]
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
        params, adjusted_V = self.params, logits_V.copy()
        if self._seen is not None:
            adjusted_V = penalised(adjusted_V, self._seen.ids, self._seen.output_counts, params)
        adjusted_V[self._bias_ids] += self._bias.astype(adjusted_V.dtype)
        if self.num_drawn < params.min_tokens:
            adjusted_V[self._end_ids] = -np.inf
        return adjusted_V
