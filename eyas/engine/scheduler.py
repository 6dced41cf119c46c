"""Which samples run next: admission, chunks of prefill, room for trees, preemption.

Knows samples, pages and lengths, no tensor.

Jobs alternate while both kinds are possible: a prefill of at most prefill_chunk tokens, then one
round of all samples that decode, so that neither starves. Requests are admitted in the order of
their arrival. When pages run out, the sample that was admitted last is preempted: it gives up its
pages, keeps its tokens, and is the next to be admitted.

Under overlap a job is planned before the outcome of the one before it is known: lengths are upper
bounds then, and preemption, which needs to know, waits until nothing is in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from eyas.engine.acceptance import RequestAcceptance
from eyas.engine.pages import ROOT, PagePool
from eyas.engine.request import FinishReason, Request, TokenLogprob, Update
from eyas.engine.sampling import Sampler
from eyas.engine.stop import StopChecker
from eyas.engine.text import TextIndex


class RunningSample:
    """One sample of a request, from its arrival to its end.

        tokens   x_0 ......... x_{n-1} | x_n    n = num_cached; x_n is the root: emitted, not cached
        target   column 0 .... n-1
        draft    column 1 .... draft_end-1      its entries; behind them only features are there

    A preempted sample keeps its tokens and its sampler. The scheduler sets its fields when it
    plans, the rounds set theirs when the work is done. Under overlap the scheduler is a round
    behind and learns the rounds' fields from outcomes only.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        sampler: Sampler,
        stops: StopChecker | None,
        max_tokens: int,
    ) -> None:
        self.request, self.index, self.max_tokens = request, index, max_tokens
        self.sampler, self.stops = sampler, stops
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
        # of the prompt's tokens behind the first, as far as they are computed; None: not wanted, or
        # on their way to the client
        self.prompt_logprobs: list[TokenLogprob] | None = (
            None if request.params.prompt_logprobs is None else []
        )
        self.text = (
            TextIndex()
        )  # of its tokens, as far as drafts were looked up; a preemption keeps it
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
        """Entries that the draft lacks before it can propose; the last of them is the root's."""
        return self.num_cached + 1 - self.draft_end

    @property
    def root(self) -> int:
        return self.tokens[-1]

    def take(self, tokens: list[int], end_tokens: frozenset[int]) -> list[int]:
        """Append the tokens, up to the one that ends the sample; returns those appended.

        Sets finish_reason if the sample ends.
        """
        params = self.request.params
        for count, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            is_end = token in end_tokens and not params.ignore_eos
            if self.stops is not None:
                is_end |= self.stops.push(token)
            if is_end or token in params.stop_token_ids:
                # A grammar that grew too large has cut the answer: it did not end by itself.
                self.finish_reason = "stop" if self.sampler.failure is None else "length"
            elif self.num_emitted >= self.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                if self.stops is not None and self.stops.finish():
                    self.finish_reason = "stop"
                return tokens[:count]
        return tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one job did for one sample: its num_cached after the job, and what it emitted."""

    sample: RunningSample
    num_cached: int
    update: Update


@dataclass(frozen=True, slots=True)
class Job:
    """One forward of the target and what belongs to it.

    page_table int32 [B, P] is a copy: the scheduler may plan on while the job runs. chunks: of a
    prefill, the columns [start, end) of each sample.
    """

    samples: list[RunningSample]
    page_table: np.ndarray
    chunks: list[range] | None = None


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The most that jobs may hold.

    max_batch: running samples. prefill_chunk: tokens of a prefill. max_emitted: tokens that a round
    may emit for a sample. tree_columns: columns that a round may write for a sample, the root's
    and those behind it. scored_chunk: tokens of a prefill that are scored for prompt_logprobs.
    """

    max_batch: int
    prefill_chunk: int
    max_emitted: int
    tree_columns: int
    scored_chunk: int = 64


class Scheduler:
    """The waiting and the running samples, and the pages of the running ones."""

    def __init__(self, pool: PagePool, limits: BatchLimits, keeps_prefixes: bool = True) -> None:
        self.num_preempted = 0
        self.num_prompt_tokens = 0
        self.num_reused_tokens = 0
        self._pool, self._limits, self._keeps_prefixes = pool, limits, keeps_prefixes
        self._waiting: deque[RunningSample] = deque()
        self._running: list[RunningSample] = []  # in the order of their arrival
        self._free_slots = list(range(limits.max_batch - 1, -1, -1))
        self._prefilled_last = False
        # a round needs a preemption, which waits for what is in flight
        self._waits_for_room = False

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id waits or runs."""
        return any(sample.request.id == request_id for sample in (*self._waiting, *self._running))

    def most_pages(self, num_tokens: int) -> int:
        """The most pages that a sample of so many tokens, prompt and answer, ever holds.

        The last round may be planned while the one before is in flight.
        """
        return self._pool.pages_for(
            num_tokens + self._limits.max_emitted + self._limits.tree_columns
        )

    def add(self, sample: RunningSample) -> None:
        self._waiting.append(sample)

    def cancel(self, request_id: str) -> None:
        """Forget all samples of a request; an unknown id is no error.

        A job in flight may still write to their pages: no sample reads those before it has written
        them itself.
        """
        self._waiting = deque(sample for sample in self._waiting if sample.request.id != request_id)
        for sample in [sample for sample in self._running if sample.request.id == request_id]:
            self._leave(sample)

    def schedule(self, nothing_in_flight: bool = True) -> Job | None:
        """The next job; None if there is nothing to do or it must wait for the job in flight."""
        if self._prefilled_last:
            job = self._decode(nothing_in_flight)
            if job is not None or self._waits_for_room:
                self._prefilled_last = job is None
                return job
        if job := self._prefill():
            self._prefilled_last = True
            return job
        self._prefilled_last = False
        return self._decode(nothing_in_flight)

    def settle(self, outcome: Outcome) -> bool:
        """Record what a job did for a sample. False if it was cancelled in the meantime."""
        sample = outcome.sample
        if not sample.pages:
            return False
        sample.num_in_flight -= 1
        sample.length = outcome.num_cached
        if self._keeps_prefixes:
            self._keep(sample)
        if outcome.update.finish_reason is not None:
            self._leave(sample)
        return True

    def check(self) -> None:
        """Raise AssertionError unless every page and every slot is accounted for."""
        self._pool.check(sample.pages for sample in self._running)
        slots = sorted([sample.slot for sample in self._running] + self._free_slots)
        assert slots == list(range(self._limits.max_batch)), "a slot is lost or held twice"

    # Prefill

    def _prefill(self) -> Job | None:
        """A job of chunks: first of running samples, then of newly admitted ones."""
        left, left_scored = self._limits.prefill_chunk, self._limits.scored_chunk
        samples, chunks = [], []
        for sample in self._unprefilled():
            count = min(left, sample.prefill_end - sample.num_planned)
            if sample.prompt_logprobs is not None:
                count = min(count, left_scored)
                left_scored -= count
                if count == 0:
                    continue
            samples.append(sample)
            chunks.append(range(sample.num_planned, sample.num_planned + count))
            sample.num_planned += count
            sample.num_in_flight += 1
            left -= count
            if left == 0:
                break
        return Job(samples, self._page_table(samples), chunks) if samples else None

    def _unprefilled(self) -> Iterator[RunningSample]:
        """The running samples with prefill left; then admits waiting ones, while they fit."""
        yield from [sample for sample in self._running if not sample.is_prefilled]
        while (
            self._waiting
            and self._free_slots
            and self._is_apart(self._waiting[0])
            and self._admit(self._waiting[0])
        ):
            yield self._running[-1]

    def _is_apart(self, newcomer: RunningSample) -> bool:
        """Whether no other sample of the same request is in its prefill.

        Once that one is done, the newcomer can share its pages.
        """
        same = (sample for sample in self._running if sample.request is newcomer.request)
        return not self._keeps_prefixes or all(
            sample.length >= sample.prefill_end for sample in same
        )

    def _admit(self, newcomer: RunningSample) -> bool:
        """Run the first waiting sample: give it the pages of its tokens and of a round.

        False, and nothing changed, if there are too few pages.
        """
        # a root is emitted and not cached
        end = len(newcomer.tokens) - (1 if newcomer.num_emitted else 0)
        # The last token is computed in any case: without it there are no logits, and no feature for
        # the draft; all are for the prompt's log-probabilities.
        salt, reused = newcomer.request.cache_salt, list[int]()
        if self._keeps_prefixes and newcomer.prompt_logprobs is None:
            reused = self._pool.match(newcomer.tokens[: end - 1], salt)
        count = self._pool.pages_for(end + self._limits.tree_columns) - len(reused)
        # A page to grow for each that runs already, or the newcomer would be preempted as soon as
        # it is in.
        fits = count + len(self._running) <= self._pool.num_available
        rest = self._pool.allocate(count) if fits else None
        if rest is None:
            self._pool.release(reused)
            return False
        self._waiting.popleft()
        newcomer.pages = reused + rest
        newcomer.num_kept = len(reused)
        newcomer.num_planned = newcomer.num_cached = newcomer.length = (
            len(reused) * self._pool.page_size
        )
        newcomer.num_reused = newcomer.num_cached
        newcomer.draft_end = max(newcomer.num_cached, 1)
        newcomer.prefill_end = end
        newcomer.slot = self._free_slots.pop()
        self._running.append(newcomer)
        if not newcomer.was_preempted:
            self.num_prompt_tokens += end
            self.num_reused_tokens += newcomer.length
        return True

    # Decoding

    def _decode(self, nothing_in_flight: bool) -> Job | None:
        """A round of all samples that are prefilled; preempts until there are pages for its trees.

        None if there is no such sample, or if it must preempt while a job is in flight.
        """
        self._waits_for_room = False
        while True:
            samples = [sample for sample in self._running if sample.is_prefilled]
            short = next((sample for sample in samples if not self._has_room(sample)), None)
            if short is None:
                break
            if not nothing_in_flight:
                self._waits_for_room = True
                return None
            self._preempt(self._running[-1])
        for sample in samples:
            sample.num_in_flight += 1
        return Job(samples, self._page_table(samples)) if samples else None

    def _has_room(self, sample: RunningSample) -> bool:
        """Whether a sample has pages for a round after those in flight; allocates missing ones."""
        length = (
            max(sample.length, sample.prefill_end) + sample.num_in_flight * self._limits.max_emitted
        )
        missing = self._pool.pages_for(length + self._limits.tree_columns) - len(sample.pages)
        if missing <= 0:
            return True
        pages = self._pool.allocate(missing)
        sample.pages += pages or []
        return pages is not None

    def _preempt(self, sample: RunningSample) -> None:
        """Take a sample's pages and put it at the head of the waiting ones."""
        assert sample.num_in_flight == 0, "its tokens are not all known"
        self._leave(sample)
        sample.num_planned = sample.prefill_end = 0
        sample.was_preempted = True
        self._waiting.appendleft(sample)
        self.num_preempted += 1

    def _leave(self, sample: RunningSample) -> None:
        """Take a sample out of the running ones and release its pages and its slot."""
        self._running.remove(sample)
        self._pool.release(sample.pages)
        self._free_slots.append(sample.slot)
        sample.pages, sample.num_in_flight = [], 0  # its slot stays known to a job in flight

    def _keep(self, sample: RunningSample) -> None:
        """Offer the sample's full pages to other requests (`PagePool.keep`)."""
        size = self._pool.page_size
        for number in range(sample.num_kept, sample.length // size):
            before = sample.pages[number - 1] if number else ROOT
            tokens = sample.tokens[number * size : (number + 1) * size]
            sample.pages[number] = self._pool.keep(
                before, tokens, sample.pages[number], sample.request.cache_salt
            )
            sample.num_kept = number + 1

    def _page_table(self, samples: list[RunningSample]) -> np.ndarray:
        """int32 [B, P]: the pages of each sample, zeros behind them."""
        table = np.zeros(
            (len(samples), max((len(sample.pages) for sample in samples), default=0)),
            dtype=np.int32,
        )
        for line, sample in zip(table, samples, strict=True):
            line[: len(sample.pages)] = sample.pages
        return table
