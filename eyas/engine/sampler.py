"""The draws of one answer, in order: its random numbers, penalties, grammar and log-probabilities
as they stand.

Every token that is drawn is emitted, also on the way through a tree, so this state is that of the
path by construction. Knows no tree, no batch and no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from eyas.engine.logprobs import token_logprob
from eyas.engine.request import SamplingParams, TokenLogprob
from eyas.engine.sampling import Ids, Logits, host_logits, penalised, sample
from eyas.engine.uniform import derived_seed, fresh_seed, uniform


class Matcher(Protocol):
    """What a sampler asks of a grammar: which tokens may come next, and to hear which one came."""

    @property
    def failure(self) -> str | None:
        """Why the grammar could not be followed any further; from there on only end tokens are
        allowed.
        """

    def mask(self) -> NDArray[np.bool_]:
        """[V]; end tokens are allowed where the grammar may stop, and at least one token always is."""

    def advance(self, token: int) -> None:
        """Take note of the token drawn."""


class Sampler:
    """Draws the tokens of one answer. `index` says which of the request's n samples it is.

    Without a seed in the params each sampler takes one from the system.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        end_tokens: frozenset[int],
        matcher: Matcher | None = None,
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
        """Whether the next draw needs what only this object knows, beside the seed, num_drawn and
        the four cuts.
        """
        return (
            self._seen is not None
            or self._matcher is not None
            or self.logprobs is not None
            or len(self._bias_ids) > 0
            or self.num_drawn < self.params.min_tokens
        )

    @property
    def failure(self) -> str | None:
        """Why the answer ended before it was whole: its grammar grew too large to be followed. None
        where all is well.
        """
        return self._matcher.failure if self._matcher is not None else None

    def take(self, token: int) -> None:
        """Take note of a token that was drawn elsewhere: the argmax, or a device's draw at this
        sampler's uniform number.
        """
        assert self.logprobs is None, "log-probabilities need the logits"
        self._advance(token)

    def draw(self, logits_V: torch.Tensor) -> int:
        """The next token. After one that ended the answer it comes again: the walk through a tree
        may go past the end.
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
        """Penalties, bias and the mask of min_tokens, in this order; the logits themselves where
        there is nothing to do.
        """
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
        """The draw among what the grammar allows: mostly few tokens, so the rest is left out rather
        than masked.
        """
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
