"""What the parts of a round cost with these models on this machine: the work that `costs` times.
Knows the rounds' caches.

Called before anything runs: it writes into pages that nobody holds yet.
"""

from __future__ import annotations

import platform
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from eyas.engine.costs import CostIdentity, CostTable, Curve, kept_or_measured, measure
from eyas.engine.rounds import Rounds, one_torch_thread
from eyas.engine.tree import Speculation
from eyas.model.rows import Roots, Rows, rows_of, slots_of

POINTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
TYPICAL_LENGTH = 200  # columns that a row sees
NUM_LEVELS = 4  # timed together: a call's own time is spread over a tree's levels
# a table this much slower than the machine is now was measured on a busy one, or by older code
STALE = 1.5


def round_costs(rounds: Rounds) -> CostTable:
    """The cost table of these rounds: kept from an earlier start on the same machine, or measured
    now, in about two seconds.
    """
    assert rounds.draft is not None
    identity = CostIdentity(
        target=rounds.target.fingerprint,
        head=rounds.draft.fingerprint,
        dtype=str(rounds.target.dtype),
        device=device_name(rounds.target.device),
        threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        native=rounds.target.is_native,
    )
    works = _Works(rounds)
    with torch.inference_mode(), one_torch_thread(rounds.target.is_native):
        table, _ = kept_or_measured(
            identity, works.measured, lambda kept: kept.target(1) > STALE * works.fastest_ms()
        )
    return table


def device_name(device: str) -> str:
    """The processor as the system names it."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


class _Works:
    """What is timed: each method does its work for a number of rows, behind prefixes of a typical
    length.
    """

    def __init__(self, rounds: Rounds) -> None:
        assert rounds.entries is not None
        self._rounds, self._target, self._draft = rounds, rounds.target, rounds.entries.draft
        self._draft_cache, self._features = rounds.entries.cache, rounds.entries.features
        self._num_slots = rounds.cache.num_pages * rounds.cache.page_size
        self._length = max(2, min(TYPICAL_LENGTH, self._num_slots // 2))
        self._table = np.arange(rounds.cache.num_pages, dtype=np.int32)[None]

    def measured(self) -> CostTable:
        table = measure((self.forward, self.decode, self.steps, self.extend, self.enter), POINTS)
        one = Curve(table.step.rows, [ms / NUM_LEVELS for ms in table.step.ms])
        return replace(table, step=one)

    def forward(self, M: int) -> None:
        self._target.forward(
            self._rows(M, 0), self._rounds.cache, self._draft.config.taps
        ).best.tolist()

    def decode(self, B: int) -> None:
        """Requests beyond those that the cache has room for read the pages of others."""
        size = self._rounds.cache.page_size
        own = min(self._length // size + 1, self._table.shape[1])
        starts = np.arange(B) * own % (self._table.shape[1] - own + 1)
        pages = (starts[:, None] + np.arange(own)).astype(np.int32)
        column = np.full(B, min(self._length, own * size - 1))
        slot = slots_of(pages, np.arange(B), column, size)
        arrays = (
            np.zeros(B, dtype=np.int64),
            np.arange(B),
            column,
            slot,
            column + 1,
            np.zeros(B, dtype=np.int64),
        )
        rows = rows_of(arrays, pages, self._target.device)
        self._target.forward(rows, self._rounds.cache, self._draft.config.taps).best.tolist()

    def extend(self, M: int) -> None:
        h = self._draft.catch_up(self._entries(M), self._draft_cache, self._features)
        self._draft.proposals(h[-1:], self._rounds.speculation.tree_topk)[0].tolist()

    def enter(self, M: int) -> None:
        """Of a prompt: consecutive columns of one request."""
        last = min(max(self._length, M), self._num_slots - 1)
        M = min(M, last)
        self._draft.enter(
            Roots([last], [last - M + 1], [0] * M, self._table), self._draft_cache, self._features
        )

    def _entries(self, M: int) -> Roots:
        """One of each of M requests."""
        last = min(self._length, self._num_slots - 1)
        return Roots([last] * M, [last] * M, [0] * M, np.repeat(self._table, M, axis=0))

    def steps(self, R: int) -> None:
        """NUM_LEVELS levels of trees: R rows each, k of them to a request."""
        k = self._rounds.speculation.tree_topk
        B = max(1, R // k)
        h, first, tables = self._roots(B, k)
        lens = [min(self._length, self._num_slots - NUM_LEVELS * k - 2)] * B
        tree = Speculation("fixed", 1 + NUM_LEVELS, k)
        self._draft.propose(lens, h, first, tables, self._draft_cache, tree, [0.0] * NUM_LEVELS)

    @cache  # noqa: B019  (lives as long as the measurement)
    def _roots(
        self, B: int, k: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], np.ndarray]:
        """What B trees grow from: outputs, first candidates and page tables."""
        h = torch.zeros(
            B, self._draft.config.hidden_size, dtype=self._target.dtype, device=self._target.device
        )
        return h, self._draft.proposals(h, k), np.repeat(self._table, B, axis=0)

    def fastest_ms(self) -> float:
        """The fastest of a few forwards of one row."""
        times = []
        for _ in range(8):
            started = time.perf_counter()
            self.forward(1)
            times.append((time.perf_counter() - started) * 1e3)
        return min(times)

    def _rows(self, M: int, first_column: int) -> Rows:
        column = self._length + np.arange(M, dtype=np.int64) % (self._num_slots - self._length)
        nothing, prefix = np.zeros(M, dtype=np.int64), np.full(M, self._length, dtype=np.int64)
        arrays = nothing, nothing, prefix, column, prefix, nothing
        return rows_of(arrays, self._table, self._target.device, first_column)
