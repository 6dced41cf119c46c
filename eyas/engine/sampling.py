"""From the target's logits to the tokens of one answer: random numbers, cuts, penalties, `Sampler`.

Pure functions of arrays, and `Sampler`, which holds what one answer has drawn so far. Knows no
tree, no batch and no device.

The order is: penalties, bias, mask (grammar, min_tokens), temperature, min_p, top_k, top_p. A cut
keeps the best tokens, and of equal ones those with the smaller ids, so a result never depends on
the batch. What is kept is renormalised before the next cut.

Sums run over tokens in the order of their ids, so a uniform number gives one token to its last bit.

V vocabulary, C candidates.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from eyas.engine.grammar import GrammarMatcher
from eyas.engine.request import SamplingParams, TokenLogprob
from eyas.errors import EyasError

Logits = NDArray[np.float32] | NDArray[np.float64]
Weights = NDArray[np.float64]
Ids = NDArray[np.int64]

# of a logarithm: far above the rounding of exp, for a cut that a second, exact one follows
_MARGIN = 1e-6

# splitmix64's constants; eyas.engine.cuda.sampling computes the same numbers on a device
MASK = 2**64 - 1
STEP = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)
UNIT = 2.0**-53

# Counter-based random numbers: a token's number is a hash of the request's seed and the token's
# index. There is no state to keep, to move with a request or to roll back.


def fresh_seed() -> int:
    """A seed from the system's randomness."""
    return secrets.randbits(63)


def derived_seed(seed: int, sample: int) -> int:
    """The seed of the sample-th of n samples, as a signed 64-bit number; sample 0 keeps the
    request's own.
    """
    return seed if sample == 0 else signed(_mixed(_mixed(seed ^ STEP) + sample * STEP))


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1), 53 bits, of token `index` under `seed`."""
    return (_mixed(_mixed(seed) + (index + 1) * STEP) >> 11) * UNIT


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


def sample(logits_V: Logits, params: SamplingParams, uniform: float) -> int:
    """The token at quantile `uniform` of what the cuts keep; the argmax at temperature 0. Sorts
    nothing that it need not cut.
    """
    if params.temperature == 0:
        return int(logits_V.argmax())
    ids_C: Ids | None = None
    if 0 < params.top_k < len(logits_V):
        ids_C = best_ids(logits_V, params.top_k)
        logits_V = logits_V[ids_C]
    scaled_C = _scaled(logits_V, params.temperature)
    if params.min_p > 0:
        kept_C = np.flatnonzero(scaled_C >= math.log(params.min_p) - _MARGIN)
        ids_C, scaled_C, logits_V = _of(ids_C, kept_C), scaled_C[kept_C], logits_V[kept_C]
    # in place: at 128,000 tokens a new array costs more than the sums
    weights_C = np.exp(scaled_C, out=scaled_C)
    if params.min_p > 0:
        weights_C[weights_C < params.min_p] = 0.0
    if params.top_p < 1:
        kept_C = _nucleus(logits_V, weights_C, params)
        ids_C, weights_C = _of(ids_C, kept_C), weights_C[kept_C]
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


def _nucleus(logits_C: Logits, weights_C: Weights, params: SamplingParams) -> Ids:
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


def _of(ids_C: Ids | None, kept_C: Ids) -> Ids:
    return kept_C if ids_C is None else ids_C[kept_C]


def _scaled(logits_V: Logits, temperature: float) -> Weights:
    best = logits_V.max()
    if not math.isfinite(best):
        raise EyasError(
            f"the target's best logit is {best}",
            "check the target's weights and dtype: its numbers overflow",
        )
    scaled_V: Weights = np.subtract(logits_V, best, dtype=np.float64)
    if temperature != 1:
        scaled_V /= temperature
    return scaled_V


def _cumulative(weights_V: Weights) -> Weights:
    """Sums from the left, one after the other: torch's is several times as fast as numpy's."""
    array: Weights = torch.from_numpy(weights_V).cumsum(0).numpy()
    return array


def _total(weights_V: Weights) -> float:
    return float(_cumulative(weights_V)[-1])


def _num_holding(best_first_C: Weights, mass: float) -> int:
    """How many of the weights, from the first, it takes to hold `mass`; all of them where rounding
    leaves it just short.
    """
    return min(int(np.searchsorted(_cumulative(best_first_C), mass)) + 1, len(best_first_C))


def _quantile(weights_V: Weights, uniform: float) -> int:
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


# Log-probabilities


def token_logprob(logits_V: Logits, token: int, num_top: int) -> TokenLogprob:
    """log_softmax(logits) in fp64 at `token` and at the num_top best tokens, best first, of equal
    ones the smaller id.

    Of the raw logits, before penalties, bias, mask and temperature: as OpenAI's API and vLLM's
    default have it.
    """
    best = float(logits_V.max())
    norm = best + float(np.log(np.exp(np.subtract(logits_V, best, dtype=np.float64)).sum()))
    top: Ids = best_ids(logits_V, num_top) if num_top else np.empty(0, np.int64)
    top = top[np.argsort(-logits_V[top], kind="stable")]
    pairs = tuple((int(one), float(logits_V[one]) - norm) for one in top)
    return TokenLogprob(token, float(logits_V[token]) - norm, pairs)


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

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is the argmax of the target's logits, so that `take` does."""
        return self.params.temperature == 0 and not self.needs_host

    @property
    def needs_host(self) -> bool:
        """Whether the next draw depends on more than the seed, num_drawn and the four cuts."""
        return (
            self._seen is not None
            or self._matcher is not None
            or self.logprobs is not None
            or len(self._bias_ids) > 0
            or self.num_drawn < self.params.min_tokens
        )

    @property
    def failure(self) -> str | None:
        """Why the answer ended early: its grammar grew too large to be followed. Else None."""
        return self._matcher.failure if self._matcher is not None else None

    def take(self, token: int) -> None:
        """Count a token that was drawn elsewhere: the argmax, or a device's draw at this sampler's
        uniform number.
        """
        assert self.logprobs is None, "log-probabilities need the logits"
        self._advance(token)

    def draw(self, logits_V: torch.Tensor) -> int:
        """The next token. The token that ended the answer is repeated: the walk through a tree may
        go past the end.
        """
        if self._over_with is not None:
            return self._over_with
        raw_V = host_logits(logits_V)
        number = uniform(self.seed, self.num_drawn) if self.params.temperature > 0 else 0.0
        token = self._draw_allowed(self._adjusted(raw_V), number)
        if self.logprobs is not None:
            self.logprobs.append(token_logprob(raw_V, token, self.params.logprobs or 0))
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

    def _draw_allowed(self, logits_V: Logits, number: float) -> int:
        """The draw among what the grammar allows: mostly few tokens, so the others are left out."""
        if self._matcher is None:
            return sample(logits_V, self.params, number)
        ids_C = np.flatnonzero(self._matcher.mask())
        return int(ids_C[sample(logits_V[ids_C], self.params, number)])

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
