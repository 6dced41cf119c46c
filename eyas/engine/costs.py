"""What the work of a round costs on this machine, in ms: measured once, kept on disk.

target(M)   one target forward of M rows of one request
decode(B)   one of a row of each of B requests, with their prefixes
step(R)     one draft step of R rows, proposals included
extend(R)   the draft's catch-up on R tokens
enter(R)    the draft's entries of R tokens from which nothing is drafted
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from eyas.artifact import cache_folder
from eyas.cores import processor
from eyas.engine.draft import Draft
from eyas.model.library import build
from eyas.model.rows import FeatureCache, Growth, PagedCache, Roots, RowArrays, rows_of, slots_of
from eyas.model.target import Target
from eyas.model.threads import num_threads
from eyas.model.weights import keep

AT_ONCE = 8  # missing entries made in one call with the root's; more: before it, without outputs

POINTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
MOST_PAGES = 1024  # of a cache, used by the timed work
TYPICAL_LENGTH = 200  # columns that a row sees
NUM_LEVELS = 4  # timed together, as one call grows a tree's levels
STALE = 1.5  # a table this much slower than the machine was measured on a busy one

_FORMAT = 4
_DENSE = 1024  # rows of a curve's table, at least
_FEW = 16
_WORKS = ("target", "decode", "step", "extend", "enter")
_MIN_POINTS, _MIN_REPEATS, _MAX_REPEATS = 3, 3, 9


class Curve:
    """Milliseconds over rows: linear between measured points, flat before the first, straight
    behind the last.
    """

    def __init__(self, rows: Sequence[int], ms: Sequence[float]) -> None:
        """rows: ascending, at least two. ms: smoothed where noise makes more rows cheaper."""
        is_ascending = len(rows) == len(ms) > 1 and all(a < b for a, b in pairwise(rows))
        if not (is_ascending and all(math.isfinite(value) and value >= 0 for value in ms)):
            raise ValueError("a curve needs two points or more, of ascending rows and finite costs")
        self.rows, self.ms = [int(row) for row in rows], monotone(ms)
        # over the last three points: two are within noise of each other
        behind = max(0, len(rows) - 3)
        self.slope = (self.ms[-1] - self.ms[behind]) / (self.rows[-1] - self.rows[behind])
        self.dense = np.array([self._at(row) for row in range(max(_DENSE, self.rows[-1] + 1))])
        self._table: list[float] = self.dense.tolist()

    def __call__(self, rows: int) -> float:
        """0 for no rows."""
        if rows <= 0:
            return 0.0
        return self._table[rows] if rows < len(self._table) else self._at(rows)

    def span(self, start: int, count: int) -> np.ndarray:
        """Costs of start, start + 1, ... rows, float64 [count]."""
        if start + count <= len(self.dense):
            return self.dense[start : start + count]
        return np.array([self._at(row) for row in range(start, start + count)])

    def _at(self, rows: int) -> float:
        if rows >= self.rows[-1]:
            return self.ms[-1] + self.slope * (rows - self.rows[-1])
        if rows <= self.rows[0]:
            return self.ms[0]
        place = bisect_right(self.rows, rows)
        low, high = self.rows[place - 1], self.rows[place]
        return self.ms[place - 1] + (self.ms[place] - self.ms[place - 1]) * (rows - low) / (
            high - low
        )


@dataclass(frozen=True, slots=True)
class CostTable:
    target: Curve
    decode: Curve
    step: Curve
    extend: Curve
    enter: Curve

    def forward(self, num_requests: int, rows: int) -> float:
        """One target forward of `rows` rows of several requests."""
        return self.target(rows) + self.prefixes(num_requests)

    def prefixes(self, num_requests: int) -> float:
        """Extra time of several requests' prefixes over one's."""
        return max(0.0, self.decode(num_requests) - self.target(num_requests))

    def forwards(self, num_requests: int, max_nodes: int) -> np.ndarray:
        """Target forwards of the requests' roots with 0, 1, .. max_nodes nodes, float64."""
        return self.target.span(num_requests, max_nodes + 1) + self.prefixes(num_requests)

    def to_json(self) -> dict[str, Any]:
        curves = {name: getattr(self, name) for name in _WORKS}
        return {"format": _FORMAT} | {
            name: {"rows": curve.rows, "ms": curve.ms} for name, curve in curves.items()
        }

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> CostTable:
        """Raises ValueError, KeyError or TypeError for anything that `to_json` did not write."""
        if row["format"] != _FORMAT:
            raise ValueError(f"format {row['format']}")
        return cls(*(Curve(row[name]["rows"], row[name]["ms"]) for name in _WORKS))


def monotone(values: Sequence[float]) -> list[float]:
    """The nearest never falling sequence (least squares): pool adjacent violators."""
    pools: list[tuple[float, int]] = []  # mean, count
    for value in values:
        mean, count = float(value), 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _timed(work: Callable[[int], None], rows: int, clock: Callable[[], float]) -> float:
    start = clock()
    work(rows)
    return (clock() - start) * 1e3


def measure(
    works: Sequence[Callable[[int], None]],
    points: Sequence[int],
    budget_s: float = 2.0,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Time the table's five kinds of work, in its order, at these ascending numbers of rows, in
    about `budget_s`.

    One call each warms up. Repeats go over all points in turn, so that a slow moment spoils one
    sample of each; the second fastest counts. Points that do not fit into half the budget are left
    out.
    """
    samples: list[list[list[float]]] = []  # point, work, repeat
    began = clock()
    for rows in points:
        for work in works:
            work(rows)
        samples.append([[_timed(work, rows, clock)] for work in works])
        if clock() - began > budget_s / 2 and len(samples) >= _MIN_POINTS:
            break
    while (done := len(samples[0][0])) < _MAX_REPEATS and (
        done < _MIN_REPEATS or clock() - began < budget_s
    ):
        for rows, point in zip(points, samples, strict=False):
            for work, times in zip(works, point, strict=True):
                if rows <= _FEW:
                    work(rows)  # its weights come into the caches, as by the round before
                times.append(_timed(work, rows, clock))
    seconds = [[sorted(times)[1] for times in point] for point in samples]
    return CostTable(*(Curve(points[: len(samples)], ms) for ms in zip(*seconds, strict=True)))


def kept_or_measured(
    identity: Mapping[str, str | int],
    measure_now: Callable[[], CostTable],
    is_stale: Callable[[CostTable], bool] = lambda table: False,
) -> CostTable:
    """The table kept for this identity, or one measured now, and kept. A file that cannot be read
    or `is_stale` is measured again.
    """
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder("costs") / f"{key}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = CostTable.from_json(json.loads(path.read_text(encoding="utf-8")))
        if not is_stale(kept):
            return kept
    table = measure_now()
    keep(path, json.dumps({"identity": identity} | table.to_json()))
    return table


def round_costs(work: RoundWork) -> CostTable:
    """The cost table of these models: kept from an earlier start, or measured in two seconds."""
    identity: dict[str, str | int] = {
        "target": work.target.fingerprint,
        "head": work.draft.config.model_dump_json() if work.draft is not None else "none",
        "tree_topk": work.tree_topk,
        "dtype": work.target.precision,
        "processor": processor(),
        "threads": num_threads(),
        "native": build(),
    }
    return kept_or_measured(
        identity, work.measured, lambda kept: kept.target(1) > STALE * work.fastest_ms()
    )


class RoundWork:
    """The timed work of real models, behind prefixes of typical length. It writes into pages, so it
    runs before any request holds one.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        tree_topk: int,
        cache: PagedCache,
        drafts: tuple[PagedCache, FeatureCache] | None,
    ) -> None:
        """cache: the target's. drafts: the draft's entries and their features. Without a draft its
        work costs nothing.
        """
        assert (draft is None) == (drafts is None)
        self.target, self.draft, self.tree_topk = target, draft, tree_topk
        self._cache, self._drafts = cache, drafts
        num_pages = min(self._cache.num_pages, MOST_PAGES)
        self._num_slots = num_pages * self._cache.page_size
        self._length = max(2, min(TYPICAL_LENGTH, self._num_slots // 2))
        self._table = np.arange(num_pages, dtype=np.int32)[None]
        self._roots: dict[int, tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]] = {}

    def measured(self) -> CostTable:
        works = [self.steps, self.extend, self.enter]
        if self.draft is None:
            works = [lambda _: None] * 3
        table = measure((self.forward, self.decode, *works), POINTS)
        one = Curve(table.step.rows, [ms / NUM_LEVELS for ms in table.step.ms])
        return replace(table, step=one)

    def forward(self, M: int) -> None:
        column = self._length + np.arange(M, dtype=np.int64) % (self._num_slots - self._length)
        nothing, prefix = np.zeros(M, dtype=np.int64), np.full(M, self._length, dtype=np.int64)
        # at the prefix's last position: the next may begin a chunk of attention, without prefix
        self._forward((nothing, nothing, prefix - 1, column, prefix, nothing), self._table)

    def _forward(self, arrays: RowArrays, pages: np.ndarray) -> None:
        rows = rows_of(arrays, pages)
        taps = self.draft.config.taps if self.draft is not None else None
        self.target.forward(rows, self._cache, taps).best.tolist()

    def decode(self, B: int) -> None:
        """Requests beyond the room of the cache read the pages of others."""
        size = self._cache.page_size
        own = min(self._length // size + 1, self._table.shape[1])
        starts = np.arange(B) * own % (self._table.shape[1] - own + 1)
        pages = (starts[:, None] + np.arange(own)).astype(np.int32)
        column = np.full(B, min(self._length, own * size - 1))
        slot, nothing = slots_of(pages, np.arange(B), column, size), np.zeros(B, dtype=np.int64)
        self._forward((nothing, np.arange(B), column, slot, column + 1, nothing), pages)

    def extend(self, M: int) -> None:
        """One entry of each of M requests."""
        assert self.draft is not None
        assert self._drafts is not None
        last = min(self._length, self._num_slots - 1)
        roots = Roots([last] * M, [last] * M, [0] * M, np.repeat(self._table, M, axis=0))
        h = self.draft.catch_up(roots, *self._drafts)
        self.draft.proposals(h[-1:], self.tree_topk)[0].tolist()

    def enter(self, M: int) -> None:
        """Consecutive columns of one request, as of a prompt."""
        assert self.draft is not None
        assert self._drafts is not None
        last = min(max(self._length, M), self._num_slots - 1)
        M = min(M, last)
        self.draft.enter(Roots([last], [last - M + 1], [0] * M, self._table), *self._drafts)

    def steps(self, R: int) -> None:
        """NUM_LEVELS levels of trees: R rows each, k to a request."""
        assert self.draft is not None
        assert self._drafts is not None
        k = self.tree_topk
        B = max(1, R // k)
        if B not in self._roots:  # the roots of the trees are not timed
            h = np.zeros((B, self.draft.config.hidden_size), np.float32)
            self._roots[B] = h, self.draft.proposals(h, k)
        h, first = self._roots[B]
        lens = [min(self._length, self._num_slots - NUM_LEVELS * k - 2)] * B
        roots = Roots(lens, lens, [], np.repeat(self._table, B, axis=0))
        growth, thresholds = Growth(1 + NUM_LEVELS, k, k), [0.0] * (1 + NUM_LEVELS)
        self.draft.propose(roots, h, first, self._drafts[0], growth, thresholds)

    def fastest_ms(self) -> float:
        """Of a few forwards of one row."""
        return min(_timed(self.forward, 1, time.perf_counter) for _ in range(8))
