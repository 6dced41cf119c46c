"""What real rounds take on this machine against what the cost table says: Python, draws, prefixes
of other lengths.

A ratio by kind of round and by load, as the engine's own `Correction` has it, from a few seconds of
the real engine before anything is predicted. Knows engines and clocks.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eyas.engine.costs import CostTable
from eyas.engine.engine import Engine
from eyas.engine.policy import Policy, RoundPlan
from eyas.engine.request import Request
from eyas.engine.tree import Speculation
from eyas.evaluate.decoding import Models

NUM_PREFILLS, NUM_TURNS = 12, 5
PATIENCE = 4  # times the budget, for a load that is hardly reached: answers of one token
NEARLY = 0.75  # of the load: a round of so many counts


@dataclass(frozen=True)
class Overheads:
    """Real ms over the table's: of prefills, and of plain rounds and those with trees at `loads`
    requests, ascending.
    """

    prefill: float = 1.0
    loads: list[int] = field(default_factory=lambda: [1])
    plain: list[float] = field(default_factory=lambda: [1.0])
    tree: list[float] = field(default_factory=lambda: [1.0])

    def ratio(self, kind: str, num_requests: int) -> float:
        """Of a kind, "plain" or "tree", between the loads by their logarithm."""
        known = self.plain if kind == "plain" else self.tree
        return float(
            np.interp(math.log2(num_requests), [math.log2(load) for load in self.loads], known)
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class WatchedPolicy(Policy):
    """A policy of which the last round's prediction can be asked: kind, requests, the table's ms."""

    last: tuple[str, int, float] | None = None

    def forget(self) -> None:
        self.last = None

    def observe(self, round_: RoundPlan, emitted: Sequence[Sequence[int]], real_ms: float) -> None:
        self.last = ("tree" if emitted else "plain", round_.num_requests, round_.predicted_ms)
        super().observe(round_, emitted, real_ms)


def overheads(
    models: Models,
    costs: CostTable,
    speculations: Sequence[str],
    requests: Sequence[Request],
    loads: Sequence[int],
    budget_s: float,
) -> dict[str, Overheads]:
    """Of each way to speculate, at these loads; about budget_s for each of them and load, and as
    much for plain rounds.

    All of them take turns of a fraction of a second, so that a busy moment of the machine hits them
    alike.
    """
    reached = [load for load in sorted(set(loads)) if load <= len(requests)] or [1]
    plainly = [dataclasses.replace(request, speculation=False) for request in requests]
    by_load = []
    for load in reached:
        engines = [_Busy(watched(models, costs, speculations[0]), plainly, load)]
        engines += [_Busy(watched(models, costs, one), requests, load) for one in speculations]
        for _ in range(NUM_TURNS):
            for engine in engines:
                engine.run(budget_s / NUM_TURNS)
        by_load.append(engines)
    prefill = statistics.median(
        prefill_ratios(watched(models, costs, speculations[0]), costs, requests)
    )
    plain = [engines[0].ratio("plain") for engines in by_load]
    return {
        one: Overheads(
            prefill, reached, plain, [engines[number].ratio("tree") for engines in by_load]
        )
        for number, one in enumerate(speculations, start=1)
    }


def watched(models: Models, costs: CostTable, speculation: str) -> Engine:
    """An engine whose policy is watched, and knows the costs."""
    engine = models.engine(speculation)
    engine.policy = engine.rounds.policy = WatchedPolicy(
        Speculation.parse(speculation), costs, native=models.target.is_native
    )
    return engine


class _Busy:
    """An engine that is kept at so many requests, and the ratios of real ms over predicted of its
    rounds, by kind.

    Requests come again under other names when all are through.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request], load: int) -> None:
        self._engine, self._load, self._running = engine, load, 0
        self._waiting = _again(requests)
        self._ratios: dict[str, list[float]] = {"plain": [], "tree": []}

    def run(self, budget_s: float) -> None:
        """Rounds while time lasts, two in any case; the first of each turn is not counted, the
        caches being another's.
        """
        policy = self._engine.policy
        assert isinstance(policy, WatchedPolicy)
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < (budget_s if count > 1 else PATIENCE * budget_s):
            while self._running < self._load:
                self._engine.add(next(self._waiting))
                self._running += 1
            policy.forget()
            started = time.perf_counter()
            updates = self._engine.step()
            ms = (time.perf_counter() - started) * 1e3
            self._running -= sum(update.finish_reason is not None for update in updates)
            if policy.last is not None and policy.last[1] >= NEARLY * self._load:
                kind, _, table_ms = policy.last
                count += 1
                if count > 1:
                    self._ratios[kind].append(ms / table_ms)

    def ratio(self, kind: str) -> float:
        """The lower quartile: whatever else runs on the machine only ever adds. Without any of this
        kind, that of all.
        """
        known = sorted(
            self._ratios[kind] or [one for other in self._ratios.values() for one in other]
        )
        return known[len(known) // 4] if known else 1.0


def prefill_ratios(engine: Engine, costs: CostTable, requests: Sequence[Request]) -> list[float]:
    """Real over predicted of whole prompts, one at a time."""
    ratios = []
    chunk = engine.config.prefill_chunk
    for number, request in enumerate(requests[: NUM_PREFILLS + 1]):
        params = dataclasses.replace(request.params, max_tokens=1, min_tokens=0)
        before = engine.metrics()
        engine.add(dataclasses.replace(request, id=f"prefill {number}", params=params))
        started = time.perf_counter()
        while engine.has_work:
            engine.step()
        ms = (time.perf_counter() - started) * 1e3
        after = engine.metrics()
        rows = len(request.prompt_ids) - int(
            after["prompt_tokens_reused"] - before["prompt_tokens_reused"]
        )
        sizes = [min(chunk, rows - start) for start in range(0, rows, chunk)]
        ratios.append(ms / sum(costs.target(size) + costs.enter(size) for size in sizes))
    return ratios[1:] or ratios


def _again(requests: Sequence[Request]) -> Iterator[Request]:
    turn = 0
    while True:
        for request in requests:
            yield dataclasses.replace(request, id=f"{turn} {request.id}")
        turn += 1
