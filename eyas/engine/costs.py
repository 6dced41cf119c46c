"""What the work of a round costs on this machine, in milliseconds: measured once, kept on disk,
corrected while running.

    target(M)   one target forward of M rows of one request     decode(B)   of a row of each of B requests, and their prefixes
    step(R)     one draft step of R rows, proposals included    extend(R)   the draft's catch-up on R tokens
    enter(R)    its entries of R tokens that nothing is drafted from

Knows numbers of rows and clocks, no model: the caller gives the functions to time, and they return
only when the work is done.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from eyas.artifact import cache_folder

# entries that are made together with the root's; of more the root's comes apart: the others need no
# output
AT_ONCE = 8

_FORMAT = 4
_DENSE = 1024  # rows up to which a curve is kept as a table
_FEW = 16
_WORKS = ("target", "decode", "step", "extend", "enter")
_MIN_POINTS, _MIN_REPEATS, _MAX_REPEATS = 3, 3, 9


class Curve:
    """Milliseconds over rows: linear between the measured points, flat before the first, straight
    on behind the last.
    """

    def __init__(self, rows: Sequence[int], ms: Sequence[float]) -> None:
        """rows ascending, at least two; ms of any order: noise that makes more rows cheaper is
        smoothed away.
        """
        if len(rows) != len(ms) or len(rows) < 2 or any(a >= b for a, b in pairwise(rows)):
            raise ValueError("a curve needs two points or more, of ascending rows")
        if not all(math.isfinite(value) and value >= 0 for value in ms):
            raise ValueError("a curve needs finite costs")
        self.rows, self.ms = [int(row) for row in rows], monotone(ms)
        # over the last three points: two are within noise of each other
        behind = max(0, len(rows) - 3)
        self.slope = (self.ms[-1] - self.ms[behind]) / (self.rows[-1] - self.rows[behind])
        self._dense = np.array([self._at(row) for row in range(_DENSE)])
        self._table: list[float] = self._dense.tolist()

    def __call__(self, rows: int) -> float:
        """0 for no rows: what is not run costs nothing."""
        if rows <= 0:
            return 0.0
        return self._table[rows] if rows < _DENSE else self._at(rows)

    def span(self, start: int, count: int) -> np.ndarray:
        """Costs of start, start + 1, ... rows, float64 [count]."""
        if start + count <= _DENSE:
            return self._dense[start : start + count]
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
    """The curves of a machine, a target and a head."""

    target: Curve
    decode: Curve
    step: Curve
    extend: Curve
    enter: Curve

    def forward(self, num_requests: int, rows: int) -> float:
        """One target forward of so many rows of so many requests."""
        return self.target(rows) + self.prefixes(num_requests)

    def prefixes(self, num_requests: int) -> float:
        """What the prefixes of so many requests take in place of one's."""
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


@dataclass(frozen=True, slots=True)
class CostIdentity:
    """All that the costs depend on. target, head: fingerprints; device: its name as the system
    gives it.
    """

    target: str
    head: str
    dtype: str
    device: str
    threads: int
    torch_version: str
    native: bool

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


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


def measure(
    works: Sequence[Callable[[int], None]],
    points: Sequence[int],
    budget_s: float = 2.0,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Time the table's five works, in its order, at these numbers of rows (ascending), about
    `budget_s` in all.

    One call each to warm up, then repeats over all points in turn, so that a slow moment spoils one
    sample of each instead of all samples of one. The second fastest counts: whatever else runs on
    the machine only ever adds. Points that do not fit into half the budget are left out: the curve
    goes straight on.
    """
    samples: list[list[list[float]]] = []  # point, work, repeat

    def timed(work: Callable[[int], None], rows: int) -> float:
        start = clock()
        work(rows)
        return (clock() - start) * 1e3

    began = clock()
    for rows in points:
        for work in works:
            work(rows)
        samples.append([[timed(work, rows)] for work in works])
        if clock() - began > budget_s / 2 and len(samples) >= _MIN_POINTS:
            break
    while (done := len(samples[0][0])) < _MAX_REPEATS and (
        done < _MIN_REPEATS or clock() - began < budget_s
    ):
        for rows, point in zip(points, samples, strict=False):
            for work, times in zip(works, point, strict=True):
                if rows <= _FEW:
                    # its weights are in the caches then, as they are from round to round
                    work(rows)
                times.append(timed(work, rows))
    measured = list(points[: len(samples)])
    return CostTable(
        *(
            Curve(measured, [sorted(point[place])[1] for point in samples])
            for place in range(len(works))
        )
    )


def kept_or_measured(
    identity: CostIdentity,
    measure_now: Callable[[], CostTable],
    is_stale: Callable[[CostTable], bool] = lambda table: False,
    folder: Path | None = None,
) -> tuple[CostTable, bool]:
    """The table kept for this identity and True, or one measured now, kept, and False.

    A file that cannot be read or is of an older form is as good as none, and so is one that
    `is_stale`. A folder that cannot be written costs the next start two seconds, no more.
    """
    path = (folder or cache_folder("costs")) / f"{identity.key}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        kept = CostTable.from_json(json.loads(path.read_text(encoding="utf-8")))
        if not is_stale(kept):
            return kept, True
    table = measure_now()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8"
        ) as part:
            json.dump({"identity": asdict(identity)} | table.to_json(), part)
        os.replace(part.name, path)
    return table, False
