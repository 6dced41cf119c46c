"""A world without a model: drafts with probabilities, a target that follows them as the world says,
and what rounds cost.

Time is computed, never measured. The draft's own probability is wrong (the target follows it at
`power` and `share`), and the table that the policy is given is wrong too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from eyas.engine.acceptance import along_paths
from eyas.engine.costs import CostTable, Curve
from eyas.engine.policy import Policy, RoundPlan
from eyas.engine.tree import Speculation, goes_on
from eyas.model.rows import Proposals
from tests.test_tree import above_of

K, TOPK, MOST = 6, 3, 12  # draft steps, branches, tokens judged
POINTS = [1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256, 512]
MISS = 1_000_000  # a token that no candidate has


@dataclass(frozen=True)
class Machine:
    """Costs in ms. Up to `flat` rows a forward costs the same; behind it rows are paid for."""

    forward: float
    per_row: float
    flat: int
    step: float
    step_row: float
    overhead: float = 0.15
    tree_overhead: float = 0.1

    def target(self, rows: int) -> float:
        return self.forward + self.per_row * max(0, rows - self.flat)

    def draft(self, rows: int) -> float:
        return self.step + self.step_row * rows if rows else 0.0

    def table(self, errors: tuple[float, float, float]) -> CostTable:
        works = (self.target, self.target, self.draft, self.draft, self.draft)
        each = (errors[0], *errors, errors[-1])
        curves = [
            Curve(POINTS, [work(M) * error for M in POINTS])
            for work, error in zip(works, each, strict=True)
        ]
        return CostTable(*curves)


MACHINES = {
    "small model on a CPU": Machine(0.6, 0.064, 1, 0.045, 0.004),
    "1 B model on a CPU": Machine(45.0, 2.0, 16, 1.6, 0.1),
    "GPU": Machine(12.0, 0.08, 64, 0.45, 0.0005),
    "dear draft": Machine(0.6, 0.03, 4, 0.5, 0.02),
}


@dataclass(frozen=True)
class World:
    """power: the target follows a candidate with its probability to this power; share: times this;
    sure: of the draft.

    noise: standard deviation of the log of a round's time; pauses: share of the rounds that take 20
    times as long.
    """

    machine: Machine
    power: float = 1.2
    share: float = 0.97
    sure: float = 2.0
    seed: int = 0
    num_trees: int = 1536
    noise: float = 0.05
    pauses: float = 0.0

    @property
    def trees(self) -> Proposals:
        return self.trees_of(TOPK)

    @cache  # noqa: B019 (few worlds, each as long as its test)
    def trees_of(self, width: int) -> Proposals:
        """Drafted to the full depth: a shallower draft is a prefix of it."""
        rng, T, k = np.random.default_rng(self.seed), self.num_trees, TOPK
        parents, frontier = [np.full((T, k), -1)], np.tile(np.arange(width), (T, 1))
        conditional = [self._fresh(rng, (T, 1)).reshape(T, k)]
        path = conditional[0][:, :width]
        for level in range(K - 1):
            new = self._fresh(rng, (T, width)).reshape(T, width * k)
            parents.append(np.repeat(frontier, k, axis=1))
            path = np.repeat(path, k, axis=1) * new
            best = np.sort(np.argsort(-path, axis=1, kind="stable")[:, :width], axis=1)
            path, frontier = np.take_along_axis(path, best, 1), best + k + level * width * k
            conditional.append(new)
        depths = np.array(
            [1] * k + [2 + level for level in range(K - 1) for _ in range(width * k)],
            dtype=np.int32,
        )
        parents_TC, given = (
            np.concatenate(parents, 1).astype(np.int32),
            np.concatenate(conditional, 1),
        )
        scores = np.log(along_paths(given, above_of(parents_TC), int(depths.max()))).astype(
            np.float32
        )
        tokens = np.tile(np.arange(len(depths)), (T, 1))  # a candidate's token is its index
        return Proposals(tokens, scores, parents_TC, depths)

    def _fresh(self, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        first = rng.beta(self.sure, 1.0, shape)
        second = (1 - first) * rng.uniform(0.3, 0.8, shape)
        third = np.minimum((1 - first - second) * rng.uniform(0.2, 0.7, shape), second)
        return np.sort(np.maximum(np.stack((first, second, third), -1), 1e-4), axis=-1)[..., ::-1]

    @property
    def paths(self) -> list[list[int]]:
        return self.paths_of(TOPK)

    @cache  # noqa: B019
    def paths_of(self, width: int) -> list[list[int]]:
        """What the target draws down each whole tree: candidates, while it was proposed."""
        rng, trees = np.random.default_rng(self.seed + 1), self.trees_of(width)
        above = np.take_along_axis(trees.scores, np.maximum(trees.parents, 0).astype(np.int64), 1)
        given = np.exp(np.where(trees.parents < 0, trees.scores, trees.scores - above))
        follow = self.share * given**self.power
        drawn = []
        for t in range(self.num_trees):
            path: list[int] = []
            for level in levels(trees.depths):
                children = level.start + np.flatnonzero(
                    trees.parents[t, level] == (path[-1] if path else -1)
                )
                chances = follow[t, children].cumsum()
                place = int((chances < rng.uniform()).sum())
                if place == len(children):
                    break
                path.append(int(children[place]))
            drawn.append(path)
        return drawn

    def plain_rate(self, B: int) -> float:
        return B / (self.machine.target(B) + self.machine.overhead)

    def best_fixed_rate(self, B: int) -> float:
        """Tokens/ms of the best of plain decoding and all fixed trees, on the same trees as
        `auto_rate`.
        """
        return max(
            self.plain_rate(B),
            *(self.fixed_rate(B, d, n) for d in (1, 2, 3, 4, 6) for n in (1, 2, 3, 5, 7, 9, 11)),
        )

    def fixed_rate(self, B: int, depth: int, num_nodes: int) -> float:
        shallow = int(np.searchsorted(self.trees.depths, depth, side="right"))
        best = np.argsort(-self.trees.scores[:, :shallow], axis=1, kind="stable")[:, :num_nodes]
        kept = [set(row) for row in best.tolist()]
        accepted = [
            sum(node in tree for node in path) for tree, path in zip(kept, self.paths, strict=True)
        ]
        length, machine = 1 + float(np.mean(accepted)), self.machine
        ms = machine.draft(round(B * length)) + (depth - 1) * machine.draft(B * TOPK)
        ms += machine.target(B + B * best.shape[1]) + machine.overhead + machine.tree_overhead
        return B * length / ms

    def auto_rate(
        self, B: int, num_rounds: int, errors: tuple[float, float, float] = (1.3, 0.75, 1.0)
    ) -> tuple[float, RecordedPolicy]:
        """Tokens/ms of the policy over rounds of B requests, each replaced by a new one after 150
        tokens or so.
        """
        tokens_B, total_ms, policy = played([self], B, num_rounds, errors)
        return sum(tokens_B) / total_ms, policy

    def emit(self, tree: int, kept: np.ndarray, width: int = TOPK) -> list[int]:
        emitted: list[int] = []
        for node in self.paths_of(width)[tree]:
            emitted.append(node)
            if node >= len(kept) or not kept[node]:
                return emitted
        return [*emitted, MISS]


def levels(depths: np.ndarray) -> list[slice]:
    """The candidates of each depth, from 1 on."""
    depth = int(depths[-1]) if len(depths) else 0
    bounds = depths.searchsorted(np.arange(1, depth + 2)).tolist()
    return [slice(start, stop) for start, stop in pairwise(bounds)]


class RecordedPolicy(Policy):
    """Keeps the plans of all rounds."""

    def __init__(self, speculation: Speculation, costs: CostTable) -> None:
        super().__init__(speculation, costs)
        self.records: list[RoundPlan] = []

    def observe(self, plan: RoundPlan, emitted: list[list[int]], real_ms: float) -> None:
        super().observe(plan, emitted, real_ms)
        self.records.append(plan)


def played(
    worlds: list[World], B: int, num_rounds: int, errors: tuple[float, float, float]
) -> tuple[list[int], float, RecordedPolicy]:
    """Tokens of each of B requests under the policy, and the ms of all rounds. Request b follows
    world b % len(worlds); all are of one machine.
    """
    first = worlds[0]
    machine = first.machine
    policy = RecordedPolicy(Speculation("auto", K, TOPK, MOST), machine.table(errors))
    rng = np.random.default_rng(first.seed + 2)
    pending = [1] * B
    ages = rng.integers(0, 150, B).tolist()
    at, tokens_B, total_ms = 0, [0] * B, 0.0
    for _ in range(num_rounds):
        round_ = policy.plan(pending)
        drafting = np.flatnonzero(round_.drafting).tolist()
        picked = np.arange(at, at + len(drafting)) % first.num_trees
        at += len(drafting)
        emitted: list[list[int]] = []
        ms = machine.target(B)
        if drafting:
            own = [worlds[b % len(worlds)] for b in drafting]
            proposals = propose(own, picked, round_.thresholds, round_.width)
            kept = policy.choose(round_, proposals)
            emitted = [
                world.emit(tree, row, round_.width)
                for world, tree, row in zip(own, picked.tolist(), kept, strict=True)
            ]
            depth = int(proposals.depths[-1])
            ms = machine.target(B + int(kept.sum())) + machine.tree_overhead
            ms += (depth - 1) * machine.draft(len(drafting) * round_.width)
            ms += machine.draft(sum(pending[b] for b in drafting))
        ms = (ms + machine.overhead) * float(np.exp(rng.normal(0, first.noise)))
        if first.pauses and rng.uniform() < first.pauses:
            ms *= 20
        policy.observe(round_, emitted, ms)
        counts = [1] * B
        for b, row in zip(drafting, emitted, strict=True):
            counts[b] = len(row)
            pending[b] = 0
        for b, count in enumerate(counts):
            pending[b] += count
            ages[b] += count
            tokens_B[b] += count
            if ages[b] > 150:
                pending[b], ages[b] = 1, 0
        total_ms += ms
    return tokens_B, total_ms, policy


def propose(
    own: list[World], picked: np.ndarray, thresholds: list[float], width: int = TOPK
) -> Proposals:
    """The tree of each request in its world, as deep as the thresholds let them together."""
    depths = own[0].trees_of(width).depths
    bounds = levels(depths)
    tokens, scores, parents = (
        np.stack(
            [
                getattr(world.trees_of(width), name)[tree]
                for world, tree in zip(own, picked.tolist(), strict=True)
            ]
        )
        for name in ("tokens", "scores", "parents")
    )
    depth = 1
    while depth < K and goes_on(scores[:, bounds[depth - 1]], thresholds, depth - 1):
        depth += 1
    C = bounds[depth - 1].stop
    return Proposals(tokens[:, :C], scores[:, :C], parents[:, :C], depths[:C])
