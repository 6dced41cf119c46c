"""The draft's entries of a job's samples, made when they are needed, and what a head may do wrong.

    target    [ x_0 ..... x_{n-1} ]  the columns in the target's cache
    features  column 0 ... n-1       of every column there, in the same pages
    draft     [ e_1 .. e_{m-1} ]     m = draft_end; a tree needs entries up to column n, the root's

An entry is the draft's key and value of one column. That of column c is computed from the feature
of column c - 1 and the token of column c, so a page that has its features can get its entries
later, and a head that does not draft costs next to nothing. Knows no target and no policy.

Letters: b a sample's place in the job, B' samples that draft, H draft hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from eyas.engine.costs import AT_ONCE
from eyas.engine.draft import Draft
from eyas.engine.scheduler import Job
from eyas.model.rows import FeatureCache, Growth, Proposals, Roots


class DraftError(Exception):
    """The head has given something that is no draft."""


# What a head may raise: anything but a broken invariant of ours, after which nothing is trusted.
HEAD_FAULTS = (DraftError, ArithmeticError, LookupError, MemoryError, RuntimeError, ValueError)


def check_scores(scores: np.ndarray) -> None:
    """Raise DraftError unless the candidates' scores, log-probabilities, are all numbers."""
    if not math.isfinite(scores.sum(dtype=np.float64)):
        bad = int((~np.isfinite(scores)).sum())
        raise DraftError(f"{bad} of {scores.size} log-probabilities are NaN or infinite")


class Entries:
    """The draft's cache of entries, and the target's features that they are made from when needed.

    Which full pages have all entries is recorded by page, not by sample: `PagePool.keep` may give a
    sample another page for its own, one that was filled without drafting. which: places b in the
    job.
    """

    def __init__(
        self, draft: Draft, num_pages: int, page_size: int, features: FeatureCache
    ) -> None:
        self.draft, self.features = draft, features
        self.cache = draft.new_cache(num_pages, page_size)
        self._size = page_size
        self._is_full = np.zeros(num_pages, dtype=bool)  # pages with an entry in every column

    def begin_pages(self, job: Job, num_new: dict[int, int]) -> None:
        """Record that pages which samples have begun to write have no entries yet.

        num_new: for place b, how many columns the job has written, up to num_cached.
        """
        for b, count in num_new.items():
            end = job.samples[b].num_cached
            first, stop = -((count - end) // self._size), -(-end // self._size)
            if first < stop:
                self._is_full[job.page_table[b, first:stop]] = False

    def check(self, job: Job, b: int) -> None:
        """Set a sample's draft_end back to the first page that is not known to have its entries."""
        sample = job.samples[b]
        pages = job.page_table[b, : -(-sample.draft_end // self._size)]
        has_entries = self._is_full[pages]
        # a page that is not full: its own, unless the pool has given it another one since
        if sample.draft_end % self._size:
            has_entries[-1] |= sample.draft_page == pages[-1]
        if not has_entries.all():
            sample.draft_end = max(1, int(has_entries.argmin()) * self._size)

    def extend(self, job: Job, which: list[int]) -> torch.Tensor:
        """Make the entries up to the roots'; returns the draft's outputs at the roots, [B', H]."""
        return self.draft.catch_up(self._up_to_roots(job, which), self.cache, self.features)

    def grow(
        self,
        job: Job,
        which: list[int],
        growth: Growth,
        thresholds: Sequence[float],
    ) -> Proposals:
        """Make the entries up to the roots', and grow trees: see `Draft.grow`."""
        roots = self._up_to_roots(job, which)
        draws = [job.samples[b].sampler.draw_state() for b in which]
        return self.draft.grow(roots, self.cache, self.features, growth, thresholds, draws)

    def enter(self, job: Job, which: list[int]) -> None:
        """Make the entries of all columns before the roots', without outputs."""
        for b in which:
            self.check(job, b)
        which = [b for b in which if job.samples[b].num_missing > 1]
        if which:
            lasts = [job.samples[b].num_cached - 1 for b in which]
            self.draft.enter(self._missing(job, which, lasts), self.cache, self.features)

    def made(self, job: Job, b: int, end: int) -> None:
        """Record that a sample has its entries of all columns before `end`."""
        sample, pages = job.samples[b], job.page_table[b]
        self._is_full[pages[sample.draft_end // self._size : end // self._size]] = True
        sample.draft_end, sample.draft_page = end, int(pages[(end - 1) // self._size])

    def _up_to_roots(self, job: Job, which: list[int]) -> Roots:
        """The columns without entries, up to the roots', for one call of the draft.

        Of samples that lack more than AT_ONCE, all but the root's are made here.
        """
        for b in which:
            self.check(job, b)
        far = [b for b in which if job.samples[b].num_missing > AT_ONCE]
        if far:
            self.enter(job, far)
        return self._missing(job, which, [job.samples[b].num_cached for b in which])

    def _missing(self, job: Job, which: list[int], lasts: list[int]) -> Roots:
        """Columns draft_end .. last of each sample, recorded as made: the caller makes them."""
        samples = [job.samples[b] for b in which]
        starts = [sample.draft_end for sample in samples]
        tokens = [
            token
            for sample, start, last in zip(samples, starts, lasts, strict=True)
            for token in sample.tokens[start : last + 1]
        ]
        for b, last in zip(which, lasts, strict=True):
            self.made(job, b, last + 1)
        return Roots(lasts, starts, tokens, job.page_table[which])
