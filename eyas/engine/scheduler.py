"""Which samples run next: admission, chunks of prefill, room for trees, preemption.

Prefills of at most prefill_chunk tokens alternate with rounds of all samples that decode. Beside
decoding samples a prefill is so short, at the measured pace, that none pauses much longer than
pause_ms. Prompts share a prefill (`prefill.shares`). While the sample at the head of the line
cannot be admitted, no other is. When pages run out, the sample admitted last gives up its pages,
keeps its tokens, and goes to the head of the line.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from eyas.engine.pages import ROOT, PagePool
from eyas.engine.prefill import LEAST_ROWS, PromptPace, shares
from eyas.engine.request import FinishReason, Request, TokenLogprob
from eyas.engine.sampling import Sampler
from eyas.engine.stop import StopChecker
from eyas.engine.text import TextIndex
from eyas.errors import InputError

MASKS_S = 0.025  # seconds a round waits for grammar masks
_ANY_MS = 1e9
_MOST_IN_LINE = 256  # waiting samples looked at: bounds the cost of a job
_PAUSE_SHARE = 0.7  # part of pause_ms that is planned
_ROUND_RATE = 0.2  # learning rate of the time of a round


class RunningSample:
    """One sample of a request, from its arrival to its end.

        tokens   x_0 ......... x_{n-1} | x_n    n = num_cached; x_n is the root: emitted, not cached
        target   column 0 .... n-1
        draft    column 1 .... draft_len-1      the head's entries; behind them only features

    While it runs, 0 <= num_cached < len(tokens) and draft_len <= num_cached + 1. A preempted sample
    keeps its tokens, its sampler and its text.
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
        self.tokens: list[int] = list(request.prompt_ids)
        self.num_cached = 0  # while it waits: columns found in kept pages
        self.num_reused = 0  # such columns of the first start, until an update has said so
        self.draft_len = 1
        self.pages: list[int] = []
        self.num_kept = 0  # its first pages, kept for others
        self.prefill_end = len(self.tokens)  # after a preemption all but the root
        self.place = 0  # in line, lowest first; below 0 after a preemption
        # from the second prompt token on; None: not asked for, or already sent
        self.prompt_logprobs: list[TokenLogprob] | None = (
            None if request.params.prompt_logprobs is None else []
        )
        self.text = TextIndex()  # its tokens up to the last look-up of drafts
        self.finish_reason: FinishReason | None = None
        self.error: InputError | None = None  # why it ended early

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def is_prefilled(self) -> bool:
        return self.num_left <= 0

    @property
    def num_left(self) -> int:
        """Tokens still to be prefilled."""
        return self.prefill_end - self.num_cached

    @property
    def num_missing(self) -> int:
        """Entries that the draft lacks before it can propose, the root's last."""
        return self.num_cached + 1 - self.draft_len

    @property
    def root(self) -> int:
        return self.tokens[-1]

    def start(self, pages: list[int], num_reused: int, num_drafted: int, page_size: int) -> None:
        """Take the pages; the first num_reused hold its prefix, num_drafted of them with the
        draft's entries.
        """
        self.pages, self.num_kept = pages, num_reused
        self.num_cached, self.draft_len = num_reused * page_size, max(1, num_drafted * page_size)

    def wait(self, place: int, num_found: int) -> None:
        """Wait without pages; num_found of its columns are in kept ones."""
        assert not self.pages
        self.place, self.num_cached = place, num_found
        # without the root, which is emitted and not cached
        self.prefill_end = len(self.tokens) - (1 if self.num_emitted else 0)

    def read(self, end: int) -> None:
        """The target has the columns of its prompt below `end`; a token drawn behind them was
        taken.
        """
        assert self.num_cached < end <= self.prefill_end
        self.num_cached = end
        if self.max_tokens == 0 and end == self.prefill_end:
            self.finish_reason = "length"

    def enter(self, last: int) -> range:
        """The columns up to `last` without the draft's entry, counted as made: the caller makes
        them.
        """
        missing = range(self.draft_len, last + 1)
        self.draft_len = last + 1
        return missing

    def lose_entries(self, first: int = 1) -> None:
        """The draft's entries from a column on have to be made again."""
        self.draft_len = min(self.draft_len, max(1, first))

    def advance(self, tokens: list[int], end_tokens: frozenset[int]) -> list[int]:
        """`take` the tokens of a round: the target has the columns of all but the last."""
        taken = self.take(tokens, end_tokens)
        self.num_cached += len(taken)
        if not taken:  # the root's entry is made again: the next tree grows from it
            self.lose_entries(self.num_cached)
        return taken

    def take(self, tokens: list[int], end_tokens: frozenset[int]) -> list[int]:
        """Append the tokens up to the one that ends the sample; returns these. Sets finish_reason
        where the sample ends: by a token, else by its error.
        """
        params = self.request.params
        for count, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            is_end = token in end_tokens and not params.ignore_eos
            is_end |= token in params.stop_token_ids
            if self.stops is not None and not is_end:  # an end token is not part of the text
                is_end = self.stops.push(token)
            if is_end:
                self.finish_reason = "stop"
            elif self.num_emitted >= self.max_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                if self.stops is not None and self.stops.finish():
                    self.finish_reason = "stop"
                self.error = None
                return tokens[:count]
        if self.error is not None:
            self.finish_reason = "length"
        return tokens


def _is_scored(sample: RunningSample) -> bool:
    return sample.prompt_logprobs is not None


def page_table(samples: Sequence[RunningSample]) -> np.ndarray:
    """int32 [B, P]: the pages of each sample, zeros behind them."""
    width = max((len(sample.pages) for sample in samples), default=0)
    table = np.zeros((len(samples), width), dtype=np.int32)
    for line, sample in zip(table, samples, strict=True):
        line[: len(sample.pages)] = sample.pages
    return table


@dataclass(frozen=True, slots=True)
class Job:
    """One forward of the target. chunks: of a prefill, the columns [start, end) of each sample;
    None for a round.
    """

    samples: list[RunningSample]
    chunks: list[range] | None = None


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The most that jobs may hold.

    max_batch: running samples. prefill_chunk: tokens of a prefill. tree_columns: columns that a
    round may write for a sample, from the root's on. scored_chunk: tokens of a prefill scored for
    prompt_logprobs. pause_ms: between two rounds of decoding samples.
    """

    max_batch: int
    prefill_chunk: int
    tree_columns: int
    scored_chunk: int = 64
    pause_ms: float = _ANY_MS


class Scheduler:
    """The waiting and running samples, and the running ones' pages. Each job of `schedule` is run
    and settled before the next.
    """

    def __init__(self, pool: PagePool, limits: BatchLimits, keeps_prefixes: bool = True) -> None:
        self.num_preempted = 0
        self.num_prompt_tokens = 0
        self.num_reused_tokens = 0
        self._pool, self._limits, self._keeps_prefixes = pool, limits, keeps_prefixes
        self._waiting: list[RunningSample] = []  # the first in line first
        self._running: list[RunningSample] = []  # in the order of their admission
        self._num_arrived = 0
        self._prefilled_last = False
        self._pace, self._round_ms = PromptPace(), 0.0

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
        return any(sample.request.id == request_id for sample in (*self._waiting, *self._running))

    def most_pages(self, num_tokens: int) -> int:
        """The most pages that a sample of num_tokens, prompt and answer, ever holds."""
        return self._pool.pages_for(num_tokens + self._limits.tree_columns)

    def add(self, sample: RunningSample) -> None:
        self._num_arrived += 1
        self._wait(sample, self._num_arrived)

    def cancel(self, request_id: str) -> None:
        """Drop all samples of a request; an unknown id is no error."""
        self._waiting = [sample for sample in self._waiting if sample.request.id != request_id]
        for sample in [sample for sample in self._running if sample.request.id == request_id]:
            self._leave(sample)

    def schedule(self) -> Job | None:
        """The next job; None if there is none, or while all samples wait for grammars."""
        first, second = self._prefill, self._round
        if self._prefilled_last:
            first, second = second, first
        job = first() or second()
        if job is None and self._running:
            self._running[0].sampler.wait(MASKS_S)
        self._prefilled_last = job is not None and job.chunks is not None
        return job

    def settle(self, job: Job, ms: float = 0.0) -> None:
        """Keep a job's pages for other requests, release ended samples, learn from its time."""
        if job.chunks is None:
            self._round_ms += _ROUND_RATE * (ms - self._round_ms) if self._round_ms else ms
        elif ms:
            scored = sum(map(len, itertools.compress(job.chunks, map(_is_scored, job.samples))))
            self._pace.observe(sum(map(len, job.chunks)), scored, ms)
        for sample in job.samples:
            if self._keeps_prefixes:
                self._keep(sample)
            if sample.finish_reason is not None:
                self._leave(sample)

    def forget_drafts(self) -> None:
        """Another head drafts: all entries have to be made again."""
        self._pool.is_drafted[:] = [False] * self._pool.num_pages
        for sample in self._running:
            sample.lose_entries()

    def check(self) -> None:
        self._pool.check(sample.pages for sample in self._running)

    # Prefill

    def _prefill(self) -> Job | None:
        left_ms = _ANY_MS
        if any(sample.is_prefilled for sample in self._running):
            left_ms = _PAUSE_SHARE * self._limits.pause_ms - self._round_ms
        most = min(self._limits.prefill_chunk, self._pace.rows(left_ms, False))
        scored = min(most, self._limits.scored_chunk, self._pace.rows(left_ms, True))
        weights = 1.0, most / scored
        readers: dict[RunningSample, RunningSample | None] = {}
        while True:
            line = self._line(readers, weights)
            least = math.ceil(LEAST_ROWS * weights[any(map(_is_scored, [*line][:1]))])
            counts = dict(zip(line, shares([*line.values()], most, least), strict=True))
            newcomers = [one for one, count in counts.items() if count and not one.pages]
            if not newcomers:
                break
            for newcomer in newcomers:
                readers[newcomer] = self._admit(newcomer)
                if readers[newcomer] is None:
                    break
        samples, chunks = [one for one, count in counts.items() if count], []
        for one in samples:
            rows = max(1, round(counts[one] / weights[_is_scored(one)]))
            chunks.append(range(one.num_cached, min(one.num_cached + rows, one.prefill_end)))
        return Job(samples, chunks) if samples else None

    def _line(
        self,
        readers: Mapping[RunningSample, RunningSample | None],
        weights: tuple[float, float],
    ) -> dict[RunningSample, int]:
        """The samples that read their prompts or may be admitted, in line order, with the rest of
        each in rows that are not scored. readers: of `_admit`; a sample that reads for others has
        the best of their places and the least of their rests.
        """
        has_room = len(self._running) < self._limits.max_batch and None not in readers.values()
        reading = [sample for sample in self._running if not sample.is_prefilled]
        reading += self._waiting[: _MOST_IN_LINE * has_room]
        line: dict[RunningSample, int] = {}
        for sample in sorted(reading, key=attrgetter("place")):
            reader = readers.get(sample) or sample
            left = math.ceil(sample.num_left * weights[_is_scored(reader)])
            line[reader] = min(left, line.get(reader, left))
        return line

    def _admit(self, newcomer: RunningSample) -> RunningSample | None:
        """Run a waiting sample: give it pages for its tokens and a round. Returns who reads for it:
        itself; a running sample that is about to compute the next page of both; or None where there
        are too few pages. In the last two cases nothing changes.
        """
        reused = self._reused(newcomer)
        leader = self._leader(newcomer, len(reused) + 1)
        count = self._pool.pages_for(newcomer.prefill_end + self._limits.tree_columns) - len(reused)
        # a page to grow for each running sample, or the newcomer would be preempted at once
        fits = count + len(self._running) <= self._pool.num_available
        fits &= len(self._running) < self._limits.max_batch
        rest = self._pool.allocate(count) if fits and leader is None else None
        if rest is None:
            self._pool.release(reused)
            return leader
        self._waiting.remove(newcomer)
        drafted = self._pool.num_drafted(reused)
        newcomer.start(reused + rest, len(reused), drafted, self._pool.page_size)
        self._running.append(newcomer)
        if newcomer.place > 0:  # it has not run before
            self.num_prompt_tokens += newcomer.prefill_end
            newcomer.num_reused = newcomer.num_cached
            self.num_reused_tokens += newcomer.num_cached
        return newcomer

    def _reused(self, newcomer: RunningSample) -> list[int]:
        # the last token is always computed; prompt_logprobs need all
        if not self._keeps_prefixes or _is_scored(newcomer):
            return []
        prefix = newcomer.tokens[: newcomer.prefill_end - 1]
        return self._pool.match(prefix, newcomer.request.cache_salt)

    def _leader(self, newcomer: RunningSample, num_pages: int) -> RunningSample | None:
        """The running sample that is about to compute this page of a newcomer: of the same request,
        or of a prompt that takes several jobs to read.
        """
        end = num_pages * self._pool.page_size
        if not self._keeps_prefixes or _is_scored(newcomer) or end >= newcomer.prefill_end:
            return None
        prefix, salt = newcomer.tokens[:end], newcomer.request.cache_salt
        return next(
            (
                one
                for one in self._running
                if one.num_cached < end <= one.prefill_end
                and (one.request is newcomer.request or one.num_left > self._limits.prefill_chunk)
                and one.request.cache_salt == salt
                and one.tokens[:end] == prefix
            ),
            None,
        )

    # Rounds

    def _round(self) -> Job | None:
        """A round of all prefilled samples, except those whose grammars are late; preempts until
        there are pages for its trees.
        """
        while True:
            samples = [one for one in self._running if one.is_prefilled and not one.sampler.is_late]
            if all(map(self._has_room, samples)):
                return Job(samples) if samples else None
            last = self._running[-1]  # it gives up its pages, and is the first in line
            self._leave(last)
            self.num_preempted += 1
            self._wait(last, -self.num_preempted)

    def _has_room(self, sample: RunningSample) -> bool:
        """Whether a sample has pages for a round; allocates missing ones."""
        missing = self._pool.pages_for(sample.num_cached + self._limits.tree_columns)
        missing -= len(sample.pages)
        if missing <= 0:
            return True
        pages = self._pool.allocate(missing)
        sample.pages += pages or []
        return pages is not None

    def _wait(self, sample: RunningSample, place: int) -> None:
        found = self._reused(sample)
        sample.wait(place, len(found) * self._pool.page_size)
        self._pool.release(found)
        bisect.insort(self._waiting, sample, key=attrgetter("place"))

    def _leave(self, sample: RunningSample) -> None:
        self._running.remove(sample)
        self._pool.release(sample.pages)
        sample.pages = []

    def _keep(self, sample: RunningSample) -> None:
        size = self._pool.page_size
        for number in range(sample.num_kept, sample.num_cached // size):
            before = sample.pages[number - 1] if number else ROOT
            tokens = sample.tokens[number * size : (number + 1) * size]
            own, salt = sample.pages[number], sample.request.cache_salt
            page = sample.pages[number] = self._pool.keep(before, tokens, own, salt)
            sample.num_kept = number + 1
            if page != own and not self._pool.is_drafted[page]:
                sample.lose_entries(number * size)
