"""One sample of a request while it runs: its tokens, its columns in the caches and how it ends.
Knows no tensor.

    tokens   x_0 ............ x_{n-1} | x_n        n = num_cached; x_n is the root: emitted, not yet in the target's cache
    target   column 0 ....... n-1
    draft    column 1 ....... draft_end-1          its entries; behind them the features of the target's columns wait

The scheduler sets what it plans (first group of fields), the rounds what they have done (second
group); under overlap the scheduler is a round behind and sees the second group only through
outcomes.
"""

from __future__ import annotations

from dataclasses import dataclass

from eyas.engine.acceptance import RequestAcceptance
from eyas.engine.request import DraftedTree, FinishReason, Request, TokenLogprob
from eyas.engine.sampler import Sampler
from eyas.engine.stop import StopChecker


class Running:
    """A sample from its arrival to its end; preempted ones wait again and keep their tokens and
    their sampler.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        sampler: Sampler,
        stops: StopChecker | None,
        max_tokens: int,
    ) -> None:
        self.request, self.index, self.sampler, self.max_tokens = (
            request,
            index,
            sampler,
            max_tokens,
        )
        self.stops = stops
        # The scheduler's
        self.slot = -1
        self.pages: list[int] = []
        self.num_kept = 0  # its first pages, kept for others
        self.num_reused = 0  # columns that another request had computed
        self.num_planned = 0  # tokens whose prefill is done or under way
        self.prefill_end = 0  # tokens to prefill: the prompt; after a preemption all but the root
        self.length = 0  # num_cached as of the last outcome
        self.was_preempted = False
        self.num_in_flight = 0  # rounds launched and not yet looked at
        # The rounds'
        self.tokens: list[int] = list(request.prompt_ids)
        self.num_cached = 0
        self.draft_end = 1
        self.draft_page = -1  # in which the last of its entries was made
        self.acceptance = RequestAcceptance(greedy=request.params.temperature == 0)
        self.finish_reason: FinishReason | None = None

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def is_prefilled(self) -> bool:
        """Whether all of its prefill is done or under way."""
        return self.num_planned >= self.prefill_end > 0

    @property
    def num_missing(self) -> int:
        """Entries that the draft has yet to make before it can propose; the last of them is the
        root's.
        """
        return self.num_cached + 1 - self.draft_end

    @property
    def root(self) -> int:
        return self.tokens[-1]

    def take(self, tokens: list[int], end_tokens: frozenset[int]) -> list[int]:
        """Append the tokens up to the one that ends the sample, set finish_reason; returns those
        appended.
        """
        for count, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            if self._is_stop(token, end_tokens):
                # A grammar that could not be followed to its end has cut the answer; it did not end
                # by itself.
                self.finish_reason = "stop" if self.sampler.failure is None else "length"
            elif self.num_emitted >= self.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                if self.stops is not None and self.stops.finish():
                    self.finish_reason = "stop"
                return tokens[:count]
        return tokens

    def _is_stop(self, token: int, end_tokens: frozenset[int]) -> bool:
        params = self.request.params
        is_end = token in end_tokens and not params.ignore_eos
        return (
            is_end
            or token in params.stop_token_ids
            or (self.stops is not None and self.stops.push(token))
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one job did for one sample: the tokens it emitted, and how far its caches are."""

    running: Running
    token_ids: list[int]
    finish_reason: FinishReason | None
    num_cached: int
    num_accepted_drafts: int | None = None
    logprobs: list[TokenLogprob] | None = None
    tree: DraftedTree | None = None
    text: str | None = None  # of requests with stop strings
