"""From the target's logits to the tokens of one answer: random numbers, cuts, penalties, `Sampler`.

Pure functions of arrays, and `Sampler`, which holds what one answer has drawn so far. The native
library (`cpp/draw.h`) computes the same to the last bit.

The order is: penalties, bias, mask (grammar, min_tokens), temperature, min_p, top_k, top_p. A cut
keeps the best tokens, and of equal ones those with the smaller ids, so a result never depends on
the batch. What is kept is renormalised before the next cut.

Every token of the vocabulary has a random number of its own, and the one whose weight by its number
is largest is drawn: the Gumbel-max trick as a race of exponentials. The numbers follow from the
request's seed, so a drafter knows them, and drafts what they favour (`draft.py`). Weights are whole
numbers and the rest is a few operations of fp64 in one order, so that a seed gives the same token
here and in the native library.

V vocabulary, C candidates.
"""

from __future__ import annotations

import ctypes
import math
import secrets
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from eyas.engine.grammar import GrammarMatcher
from eyas.engine.request import SamplingParams, TokenLogprob
from eyas.model.draws import DrawState, Scores, no_best_logit
from eyas.model.library import address, library

Logits = NDArray[np.float32] | NDArray[np.float64]
Weights = NDArray[np.int64]
Ids = NDArray[np.int64]

# splitmix64's constants
MASK = 2**64 - 1
STEP = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)

# Counter-based random numbers: a hash of the request's seed, the token's index in the answer and
# the token id. There is no state to keep or to roll back.


def fresh_seed() -> int:
    """A seed from the system's randomness."""
    return secrets.randbits(63)


def derived_seed(seed: int, sample: int) -> int:
    """The seed of the sample-th of n samples, as a signed 64-bit number; sample 0 keeps the
    request's own.
    """
    return seed if sample == 0 else signed(_mixed(_mixed(seed ^ STEP) + sample * STEP))


def draw_key(seed: int, index: int) -> int:
    """What the random numbers of the answer's token `index` come from, 64 bits, unsigned."""
    return _mixed(_mixed(seed) + (index + 1) * STEP)


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


def signed(z: int) -> int:
    """The signed 64-bit number of the same bits."""
    z &= MASK
    return z - 2**64 if z >= 2**63 else z


def _mixed(z: int) -> int:
    z &= MASK
    z = (z ^ (z >> SHIFTS[0])) * FACTORS[0] & MASK
    z = (z ^ (z >> SHIFTS[1])) * FACTORS[1] & MASK
    return z ^ (z >> SHIFTS[2])


def host_logits(logits_V: torch.Tensor) -> Logits:
    """The logits as an array of the host, fp32 or fp64; a view where they already are one."""
    if logits_V.dtype != torch.float64:
        logits_V = logits_V.float()
    array: Logits = logits_V.detach().cpu().numpy()
    return array


# A token's weight is a whole number, 2**WEIGHT_BITS of the best one's probability: sums of whole
# numbers are the same in any order, so that vectors and threads draw the same tokens. What is below
# half a unit, 2**-45 of the best one's probability, is never drawn.
WEIGHT_BITS = 44  # so that the sum over 2**19 tokens fits 63 bits
BEST_WEIGHT = 1 << WEIGHT_BITS
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


def sample_natively(logits_V: Logits, params: SamplingParams, seed: int, index: int) -> int:
    """`sample` in the native library of the answer's token `index`, of fp32 logits."""
    assert logits_V.dtype == np.float32
    assert logits_V.flags.c_contiguous
    token = ctypes.c_int64()
    state = DrawState(
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        top_k=min(params.top_k, 2**62),
        repetition=1.0,
        seed=seed,
        num_drawn=index,
    )
    call = ctypes.addressof(state), address(logits_V), 1, len(logits_V), ctypes.addressof(token)
    library().eyas_draw(*call)
    if token.value < 0:
        raise no_best_logit(float(logits_V.max()))
    return token.value


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
    least = torch.from_numpy(logits_V).topk(count, sorted=False).values.min().item()
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
    held_C = torch.from_numpy(weights_C[ranked_C]).cumsum(0).numpy()  # several times numpy's speed
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


# Log-probabilities


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
    return _scored(token, total, logits, top.tolist())


def token_logprob_natively(logits_V: torch.Tensor, token: int, num_top: int) -> TokenLogprob:
    """`token_logprob` in the native library, of fp32 logits on a CPU."""
    assert logits_V.dtype == torch.float32
    assert logits_V.is_contiguous()
    scores = Scores(min(num_top, len(logits_V)), places=1)
    sizes = len(logits_V), token, scores.ints.shape[1] - 1
    outputs = address(scores.ints), address(scores.logits)
    if not library().eyas_score(logits_V.data_ptr(), *sizes, *outputs):
        raise no_best_logit(float(logits_V.max()))
    total, *top = scores.ints[0].tolist()
    return _scored(token, total, scores.logits[0].tolist(), top)


def _scored(token: int, total: int, logits: list[float], top: list[int]) -> TokenLogprob:
    """total: of the weights at temperature 1. logits: the best, the token's, those of `top`."""
    norm = logits[0] + math.log(total / BEST_WEIGHT)
    pairs = tuple((one, logit - norm) for one, logit in zip(top, logits[2:], strict=True))
    return TokenLogprob(token, logits[1] - norm, pairs)


# One answer


class Sampler:
    """Draws the tokens of one answer in their order. `index`: which of the request's n samples.

    Every token that is drawn is emitted, also on the way through a tree, so this state is that of
    the path. Without a seed in the params each sampler takes one from the system.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        end_tokens: frozenset[int],
        matcher: GrammarMatcher | None = None,
        index: int = 0,
    ) -> None:
        assert params.has_grammar == (matcher is not None), "a grammar needs its matcher"
        params.check_vocabulary(vocab_size)
        self.params = params
        self.seed = fresh_seed() if params.seed is None else derived_seed(params.seed, index)
        self.num_drawn = 0
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.ends = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else end_tokens
        )
        self._end_ids = np.array(
            sorted(token for token in self.ends if token < vocab_size), dtype=np.int64
        )
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float64)
        self._seen = _Seen(prompt_ids) if params.has_penalties else None
        self._matcher = matcher
        self._over_with: int | None = None
        self._scores = None if params.logprobs is None else Scores(min(params.logprobs, vocab_size))
        self._state: DrawState | None = None

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is the argmax of the target's logits, so that `take` does."""
        return (
            self.params.temperature == 0
            and self._seen is None
            and self._matcher is None
            and self.logprobs is None
            and len(self._bias_ids) == 0
            and self.num_drawn >= self.params.min_tokens
        )

    @property
    def failure(self) -> str | None:
        """Why the answer ended early: its grammar grew too large to be followed. Else None."""
        return self._matcher.failure if self._matcher is not None else None

    def take(self, token: int) -> None:
        """Count a token that was drawn elsewhere: the argmax."""
        assert self.logprobs is None, "log-probabilities need the logits"
        self._advance(token)

    def draw_state(self) -> DrawState | None:
        """How the library is to draw the next tokens: None for the argmax of the logits. It holds
        until the next token is counted, and this sampler owns its arrays.
        """
        if self.is_plain_greedy:
            return None
        state = self._state = self._state or self._new_state()
        state.num_drawn = self.num_drawn
        if self._seen is not None:
            state.num_seen = len(self._seen.ids)
            state.seen = address(self._seen.ids)
            state.counts = address(self._seen.output_counts)
        return state

    def _new_state(self) -> DrawState:
        params, scores = self.params, self._scores
        return DrawState(
            temperature=params.temperature,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            top_k=min(params.top_k, 2**62),
            seed=self.seed,
            min_tokens=params.min_tokens,
            num_biased=len(self._bias_ids),
            num_ends=len(self._end_ids),
            num_top=0 if scores is None else scores.ints.shape[1] - 1,
            by_caller=self._matcher is not None,
            biased=address(self._bias_ids),
            biases=address(self._bias),
            ends=address(self._end_ids),
            scored_ints=None if scores is None else address(scores.ints),
            scored_logits=None if scores is None else address(scores.logits),
        )

    def take_drawn(self, tokens: Sequence[int]) -> None:
        """Count the tokens of a walk that the library drew with `draw_state`, up to the end."""
        for place, token in enumerate(tokens):
            if self._over_with is not None:
                return
            if self.logprobs is not None:
                assert self._scores is not None
                total, *top = self._scores.ints[place].tolist()
                self.logprobs.append(
                    _scored(token, total, self._scores.logits[place].tolist(), top)
                )
            self._advance(token)

    def draw(self, logits_V: torch.Tensor, native: bool = False) -> int:
        """The next token. The token that ended the answer is repeated: the walk through a tree may
        go past the end. native: compute in the native library, which must be available; of fp32
        logits on a CPU.
        """
        if self._over_with is not None:
            return self._over_with
        raw_V = host_logits(logits_V)
        token = self._draw_allowed(self._adjusted(raw_V), native)
        if self.logprobs is not None:
            num_top = self.params.logprobs or 0
            self.logprobs.append(
                token_logprob_natively(logits_V, token, num_top)
                if native
                else token_logprob(raw_V, token, num_top)
            )
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

    def _draw_allowed(self, logits_V: Logits, native: bool) -> int:
        """The draw among what the grammar allows."""
        if self._matcher is not None:
            logits_V = np.where(self._matcher.mask(), logits_V, logits_V.dtype.type(-np.inf))
        if native:
            return sample_natively(logits_V, self.params, self.seed, self.num_drawn)
        return sample(logits_V, self.params, draw_key(self.seed, self.num_drawn))

    def _advance(self, token: int) -> None:
        self.num_drawn += 1
        if self._seen is not None:
            self._seen.add(token)
        if self._matcher is not None:
            self._matcher.advance(token)
        if token in self.ends:
            self._over_with = token


class _Seen:
    """The distinct tokens of prompt and output, and how often each is in the output, in arrays that
    grow.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        distinct = np.unique(np.array(prompt_ids, dtype=np.int64))
        self._ids = np.concatenate((distinct, np.zeros(64, np.int64)))
        self._counts = np.zeros(len(self._ids), np.int64)
        self._places = {token: place for place, token in enumerate(distinct.tolist())}

    @property
    def ids(self) -> Ids:
        return self._ids[: len(self._places)]

    @property
    def output_counts(self) -> Ids:
        return self._counts[: len(self._places)]

    def add(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids, self._counts = (
                np.concatenate((one, np.zeros_like(one))) for one in (self._ids, self._counts)
            )
        self._ids[place] = token
        self._counts[place] += 1
