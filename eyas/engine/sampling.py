"""The tokens of one answer: its seed, its penalties and log-probabilities, `Sampler`.

The native library (`cpp/draw.h`) draws; tests/oracle/sampling.py is the plain form, equal to the
last bit. Order: penalties, bias, mask (grammar, min_tokens), temperature, min_p, top_k, top_p. A
cut keeps the best tokens, of equal ones the smaller ids, so no result depends on the batch; the
rest is renormalised before the next cut.

Each token of the vocabulary has an exponential random number; the token with the largest ratio of
weight to number is drawn (Gumbel-max). The numbers follow from the request's seed, so a drafter
knows them too. A weight is a whole number, 2**WEIGHT_BITS times the best token's probability ratio:
sums are the same in any order, for vectors and threads too. V vocabulary.
"""

from __future__ import annotations

import ctypes
import math
import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eyas.engine.grammar import GrammarMatcher
from eyas.engine.request import SamplingParams, TokenLogprob
from eyas.errors import InputError
from eyas.model.draws import DrawState, Scores, no_best_logit
from eyas.model.library import address, library

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]

WEIGHT_BITS = 44  # so that the sum over 2**19 tokens fits 63 bits
BEST_WEIGHT = 1 << WEIGHT_BITS

# splitmix64's constants
MASK = 2**64 - 1
STEP = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)


def derived_seed(seed: int, sample: int) -> int:
    """The seed of the sample-th of n samples, signed 64 bits; sample 0 keeps the request's own."""
    return seed if sample == 0 else signed(mixed(mixed(seed ^ STEP) + sample * STEP))


def signed(z: int) -> int:
    """The signed 64-bit number of the same bits."""
    z &= MASK
    return z - 2**64 if z >= 2**63 else z


def mixed(z: int) -> int:
    """A hash of 64 bits: splitmix64's output function."""
    z &= MASK
    z = (z ^ (z >> SHIFTS[0])) * FACTORS[0] & MASK
    z = (z ^ (z >> SHIFTS[1])) * FACTORS[1] & MASK
    return z ^ (z >> SHIFTS[2])


# Log-probabilities


def token_logprob(logits_V: Logits, token: int, num_top: int) -> TokenLogprob:
    """log_softmax(logits) at `token` and at the num_top best tokens, best first, of equal ones the
    smaller id.

    Of raw logits, before penalties, bias, mask and temperature, as in OpenAI's API; fp64 from the
    weights at temperature 1, to 1e-9 or better. Raises EyasError.
    """
    check_logits(logits_V)
    scores = Scores(min(num_top, len(logits_V)), places=1)
    sizes = len(logits_V), token, scores.ints.shape[1] - 1
    outputs = address(scores.ints), address(scores.logits)
    if not library().eyas_score(address(logits_V), *sizes, *outputs):
        raise no_best_logit(float(logits_V.max()))
    total, *top = scores.ints[0].tolist()
    return scored(token, total, scores.logits[0].tolist(), top)


def check_logits(logits_V: Logits) -> None:
    """The library reads an address: float32, contiguous."""
    assert logits_V.dtype == np.float32
    assert logits_V.flags.c_contiguous


def scored(token: int, total: int, logits: list[float], top: list[int]) -> TokenLogprob:
    """total: of the weights at temperature 1. logits: the best, the token's, those of `top`."""
    norm = logits[0] + math.log(total / BEST_WEIGHT)
    pairs = tuple((one, logit - norm) for one, logit in zip(top, logits[2:], strict=True))
    return TokenLogprob(token, logits[1] - norm, pairs)


# One answer


class Sampler:
    """Draws the tokens of one answer in order. `index`: which of the request's n samples.

    Every drawn token is emitted, also on the way through a tree: the state is that of the path.
    Without a seed each sampler takes one from the system.
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
        self.seed = (
            secrets.randbits(63) if params.seed is None else derived_seed(params.seed, index)
        )
        self.num_drawn = 0
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        own_ends = frozenset() if params.ignore_eos else end_tokens
        self.ends = own_ends | frozenset(params.stop_token_ids)
        end_ids = sorted(token for token in self.ends if token < vocab_size)
        self._end_ids = np.array(end_ids, dtype=np.int64)
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float64)
        self._seen = _Seen(prompt_ids) if params.has_penalties else None
        self._matcher = matcher
        self._over_with: int | None = None
        # under a grammar draws are from masked logits, and scored apart
        is_scored = params.logprobs is not None and matcher is None
        self._scores = Scores(min(params.logprobs or 0, vocab_size)) if is_scored else None
        self._state: DrawState | None = None

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is the argmax of the target's logits."""
        return (
            self.params.temperature == 0
            and self._seen is None
            and self._matcher is None
            and self.logprobs is None
            and len(self._bias_ids) == 0
            and self.num_drawn >= self.params.min_tokens
        )

    @property
    def failure(self) -> InputError | None:
        """Why there is no next token: its grammar cannot be followed. Else None."""
        return self._matcher.failure if self._matcher is not None else None

    @property
    def is_late(self) -> bool:
        """Whether a round has waited for its mask, which is still not there."""
        return self._matcher is not None and self._matcher.is_late and not self.wait(0.0)

    def wait(self, seconds: float) -> bool:
        """Whether within `seconds` the next token can be drawn, or is known never to be."""
        return self._matcher is None or self._matcher.wait(seconds)

    def draw_state(self) -> DrawState | None:
        """How the library draws the next tokens; None: the argmax. Valid until the next token is
        counted; this sampler owns its arrays.
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
                self.logprobs.append(scored(token, total, self._scores.logits[place].tolist(), top))
            self._advance(token)

    def draw(self, logits_V: Logits) -> int:
        """The next token of logits fp32 [V]; after the end the ending token again, since a walk may
        go past it. Raises EyasError for logits that are no numbers.
        """
        if self._over_with is not None:
            return self._over_with
        check_logits(logits_V)
        state, allowed_V = self.draw_state(), logits_V
        if self._matcher is not None:
            allowed_V = np.where(self._matcher.mask(), logits_V, np.float32(-np.inf))
        if state is None:
            token = int(logits_V.argmax())
        else:
            drawn = ctypes.c_int64()
            call = ctypes.addressof(state), address(allowed_V), 1, len(allowed_V)
            library().eyas_draw(*call, ctypes.addressof(drawn))
            token = drawn.value
        if token < 0 or not math.isfinite(logits_V[token]):
            raise no_best_logit(float(logits_V.max()))
        if self._matcher is None:
            self.take_drawn([token])
            return token
        if self.logprobs is not None:
            self.logprobs.append(token_logprob(logits_V, token, self.params.logprobs or 0))
        self._advance(token)
        return token

    def _advance(self, token: int) -> None:
        self.num_drawn += 1
        if self._seen is not None:
            self._seen.add(token)
        if self._matcher is not None:
            self._matcher.advance(token)
        if token in self.ends:
            self._over_with = token


class _Seen:
    """The distinct tokens of prompt and output, with their counts in the output."""

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
