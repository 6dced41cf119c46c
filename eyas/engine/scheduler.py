"""Who runs next: admission, chunks of prefill, room for trees, preemption. Knows pages and lengths,
no tensor.

Jobs alternate while there is both to do: one of prefill, of at most prefill_chunk tokens, then one
round of all that decode, so that neither starves. Requests are admitted in the order of their
arrival; when pages run out, the youngest gives its own up and waits again, first in line, with its
tokens kept.

Under overlap a job is planned before the outcome of the one before it is known: lengths are upper
bounds then, and preemption, which needs to know, waits until nothing is in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from eyas.engine.pages import ROOT, PagePool
from eyas.engine.running import Outcome, Running


@dataclass(frozen=True, slots=True)
class Job:
    """One forward of the target and what belongs to it. chunks: of a prefill, the columns [start,
    end) of each sample.

    page_table int32 [B, P] is a copy: the scheduler may go on while the job runs.
    """

    runnings: list[Running]
    page_table: np.ndarray
    chunks: list[range] | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """max_emitted: tokens a round may emit; tree_columns: columns it may write from the root's on."""

    max_batch: int
    prefill_chunk: int
    max_emitted: int
    tree_columns: int


class Scheduler:
    """Waiting and running samples, and the pages of the latter."""

    def __init__(self, pool: PagePool, limits: Limits, keeps_prefixes: bool = True) -> None:
        self.num_preempted = 0
        self.num_prompt_tokens = 0
        self.num_reused_tokens = 0
        self._pool, self._limits, self._keeps_prefixes = pool, limits, keeps_prefixes
        self._waiting: deque[Running] = deque()
        self._running: list[Running] = []  # in the order of their arrival
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
        return any(running.request.id == request_id for running in (*self._waiting, *self._running))

    def most_pages(self, num_tokens: int) -> int:
        """Pages that a sample of so many tokens, prompt and answer, holds at most: with a round in
        flight and the next.
        """
        return self._pool.pages_for(
            num_tokens + self._limits.max_emitted + self._limits.tree_columns
        )

    def add(self, running: Running) -> None:
        self._waiting.append(running)

    def cancel(self, request_id: str) -> None:
        """Forget all samples of a request; those in flight write on into pages that nobody reads
        before they are rewritten.
        """
        self._waiting = deque(
            running for running in self._waiting if running.request.id != request_id
        )
        for running in [running for running in self._running if running.request.id == request_id]:
            self._leave(running)

    def schedule(self, nothing_in_flight: bool = True) -> Job | None:
        """The next job; None when there is nothing to do, or nothing before the job in flight is
        over.
        """
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
        """Take note of what a job did. False when the sample has left in the meantime."""
        running = outcome.running
        if not running.pages:
            return False
        running.num_in_flight -= 1
        running.length = outcome.num_cached
        if self._keeps_prefixes:
            self._keep(running)
        if outcome.finish_reason is not None:
            self._leave(running)
        return True

    def check(self) -> None:
        """Raise AssertionError unless every page and every slot is accounted for."""
        self._pool.check(running.pages for running in self._running)
        slots = sorted([running.slot for running in self._running] + self._free_slots)
        assert slots == list(range(self._limits.max_batch)), "a slot is lost or held twice"

    # Prefill

    def _prefill(self) -> Job | None:
        """Chunks of those that are not through, then of newcomers while there is room for them."""
        left = self._limits.prefill_chunk
        runnings, chunks = [], []
        for running in self._unprefilled():
            count = min(left, running.prefill_end - running.num_planned)
            runnings.append(running)
            chunks.append(range(running.num_planned, running.num_planned + count))
            running.num_planned += count
            running.num_in_flight += 1
            left -= count
            if left == 0:
                break
        return Job(runnings, self._page_table(runnings), chunks) if runnings else None

    def _unprefilled(self) -> Iterator[Running]:
        yield from [running for running in self._running if not running.is_prefilled]
        while (
            self._waiting
            and self._free_slots
            and self._is_apart(self._waiting[0])
            and self._admit(self._waiting[0])
        ):
            yield self._running[-1]

    def _is_apart(self, newcomer: Running) -> bool:
        """Whether no other sample of the same request is still at its prompt: once it is through,
        its pages can be shared.
        """
        same = (running for running in self._running if running.request is newcomer.request)
        return not self._keeps_prefixes or all(
            running.length >= running.prefill_end for running in same
        )

    def _admit(self, newcomer: Running) -> bool:
        """Give the first of those waiting its pages: its tokens' and a round's. False when there
        are not enough.
        """
        # a root is emitted and not cached
        end = len(newcomer.tokens) - (1 if newcomer.num_emitted else 0)
        # The last token is computed in any case: without it there are no logits, and no feature for
        # the draft.
        salt = newcomer.request.cache_salt
        reused = self._pool.match(newcomer.tokens[: end - 1], salt) if self._keeps_prefixes else []
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
        """A round of all that are through their prompt, preempting the youngest until there is room
        for its trees.
        """
        self._waits_for_room = False
        while True:
            runnings = [running for running in self._running if running.is_prefilled]
            short = next((running for running in runnings if not self._has_room(running)), None)
            if short is None:
                break
            if not nothing_in_flight:
                self._waits_for_room = True
                return None
            self._preempt(self._running[-1])
        for running in runnings:
            running.num_in_flight += 1
        return Job(runnings, self._page_table(runnings)) if runnings else None

    def _has_room(self, running: Running) -> bool:
        """Whether a sample has pages for one more round after those in flight, allocating them
        where it can.
        """
        length = (
            max(running.length, running.prefill_end)
            + running.num_in_flight * self._limits.max_emitted
        )
        missing = self._pool.pages_for(length + self._limits.tree_columns) - len(running.pages)
        if missing <= 0:
            return True
        pages = self._pool.allocate(missing)
        running.pages += pages or []
        return pages is not None

    def _preempt(self, running: Running) -> None:
        assert running.num_in_flight == 0, "its tokens are not all known"
        self._leave(running)
        running.num_planned = running.prefill_end = 0
        running.was_preempted = True
        self._waiting.appendleft(running)
        self.num_preempted += 1

    def _leave(self, running: Running) -> None:
        self._running.remove(running)
        self._pool.release(running.pages)
        self._free_slots.append(running.slot)
        running.pages, running.num_in_flight = [], 0  # its slot stays known to a job in flight

    def _keep(self, running: Running) -> None:
        """Keep the sample's full pages for others."""
        size = self._pool.page_size
        for number in range(running.num_kept, running.length // size):
            before = running.pages[number - 1] if number else ROOT
            tokens = running.tokens[number * size : (number + 1) * size]
            running.pages[number] = self._pool.keep(
                before, tokens, running.pages[number], running.request.cache_salt
            )
            running.num_kept = number + 1

    def _page_table(self, runnings: list[Running]) -> np.ndarray:
        table = np.zeros(
            (len(runnings), max((len(running.pages) for running in runnings), default=0)),
            dtype=np.int32,
        )
        for line, running in zip(table, runnings, strict=True):
            line[: len(running.pages)] = running.pages
        return table
