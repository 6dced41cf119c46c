"""The draft's entries: made from the target's features when they are needed, not before. Knows jobs
and the draft.

    features   column 0 ..................... n-1     of every column in the target's cache, in its pages
    entries    column 1 ... draft_end-1                made so far; a tree needs them up to the root's, column n

An entry of column c follows from the feature of column c - 1 and the token of column c, so whoever
has a page has what its entries are made of, and may put off making them. Which full pages have
theirs is known by page: a sample may be given a page in another's stead that was filled without
drafting.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from eyas.engine.costs import AT_ONCE
from eyas.engine.draft import Draft
from eyas.engine.scheduler import Job
from eyas.engine.tree import Speculation
from eyas.model.rows import FeatureCache, Proposals, Roots


class Entries:
    """The draft's cache and the features it is filled from."""

    def __init__(
        self, draft: Draft, num_pages: int, page_size: int, features: FeatureCache
    ) -> None:
        self.draft, self.features = draft, features
        self.cache = draft.new_cache(num_pages, page_size)
        self._size = page_size
        self._is_full = np.zeros(num_pages, dtype=bool)  # pages with an entry in every column

    def begin_pages(self, job: Job, num_new: dict[int, int]) -> None:
        """Forget what the pages held before in which the samples' newest columns begin; num_new of
        each sample.
        """
        for b, count in num_new.items():
            end = job.runnings[b].num_cached
            first, stop = -((count - end) // self._size), -(-end // self._size)
            if first < stop:
                self._is_full[job.page_table[b, first:stop]] = False

    def check(self, job: Job, b: int) -> None:
        """Set a sample's draft_end back to the first page that is not known to have its entries."""
        running = job.runnings[b]
        pages = job.page_table[b, : -(-running.draft_end // self._size)]
        has_entries = self._is_full[pages]
        # the last page is its own, unless it was given another in its stead
        if running.draft_end % self._size:
            has_entries[-1] |= running.draft_page == pages[-1]
        if not has_entries.all():
            running.draft_end = max(1, int(has_entries.argmin()) * self._size)

    def extend(self, job: Job, who: list[int]) -> torch.Tensor:
        """Make the entries up to the roots'; the draft's outputs [B, H] there."""
        return self.draft.catch_up(self._up_to_roots(job, who), self.cache, self.features)

    def grow(
        self, job: Job, who: list[int], speculation: Speculation, thresholds: Sequence[float]
    ) -> Proposals:
        """Make the entries up to the roots', and grow trees from there."""
        return self.draft.grow(
            self._up_to_roots(job, who), self.cache, self.features, speculation, thresholds
        )

    def enter(self, job: Job, who: list[int]) -> None:
        """Make the entries of all columns before the roots', of which nobody asks what they
        propose.
        """
        for b in who:
            self.check(job, b)
        who = [b for b in who if job.runnings[b].num_missing > 1]
        if who:
            self.draft.enter(
                self._missing(job, who, [job.runnings[b].num_cached - 1 for b in who]),
                self.cache,
                self.features,
            )

    def made(self, job: Job, b: int, end: int) -> None:
        """Take note that a sample's entries before column `end` are there."""
        running = job.runnings[b]
        self._is_full[job.page_table[b, running.draft_end // self._size : end // self._size]] = True
        running.draft_end, running.draft_page = end, int(job.page_table[b, (end - 1) // self._size])

    def _up_to_roots(self, job: Job, who: list[int]) -> Roots:
        """What is missing up to the roots' entries; where that is much, most of it is made here."""
        for b in who:
            self.check(job, b)
        far = [b for b in who if job.runnings[b].num_missing > AT_ONCE]
        if far:
            self.enter(job, far)
        return self._missing(job, who, [job.runnings[b].num_cached for b in who])

    def _missing(self, job: Job, who: list[int], lasts: list[int]) -> Roots:
        """Columns draft_end .. lasts[b], whose entries count as made from here on."""
        runnings = [job.runnings[b] for b in who]
        starts = [running.draft_end for running in runnings]
        tokens = [
            token
            for running, start, last in zip(runnings, starts, lasts, strict=True)
            for token in running.tokens[start : last + 1]
        ]
        for b, last in zip(who, lasts, strict=True):
            self.made(job, b, last + 1)
        return Roots(lasts, starts, tokens, job.page_table[who])
