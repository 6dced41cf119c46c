"""The rules that benchmarks/arena.py plays, and the machines whose time they are charged.

A rule is asked for each round what it drafts and verifies; it is shown all that the head proposed,
and uses what it would have drafted. `Oracle` alone looks at what follows.

Letters: B requests, C candidates of each, K draft steps, k branches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from recording import levels, num_accepted, of_best_path

from eyas.engine.costs import AT_ONCE, CostTable, Curve
from eyas.engine.policy import Policy, RoundPlan
from eyas.engine.tree import Speculation, goes_on, most_probable
from eyas.model.rows import Proposals


@dataclass(slots=True)
class Under:
    """A request under way. at: the number of its root in the answer; missing: the draft's entries
    that it lacks.
    """

    name: str
    at: int = 0
    missing: int = 1

    def advance(self, num_tokens: int, drafted: bool) -> None:
        self.at += num_tokens
        self.missing = num_tokens + (0 if drafted else self.missing)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a rule does in a round: drafting bool [B], kept bool [B, C], levels drafted, and rows of
    a draft step by request.
    """

    drafting: np.ndarray
    kept: np.ndarray
    depth: int = 0
    width: int = 1

    @property
    def drafts(self) -> bool:
        return bool(self.drafting.any())


@dataclass(frozen=True)
class Machine:
    """A cost table, and what Python takes beside it in every round and in one that drafts."""

    table: CostTable
    every_ms: float
    drafting_ms: float

    def round_ms(self, under: Sequence[Under], turn: Turn, depths: np.ndarray) -> float:
        """What this round would take."""
        B, nodes = len(under), int(turn.kept.sum())
        ms = self.table.forward(B, B + nodes) + self.every_ms
        if turn.drafts:
            missing = [
                one.missing for one, drafts in zip(under, turn.drafting, strict=True) if drafts
            ]
            ms += self.draft_ms(missing, turn.depth, turn.width)
        return ms

    def draft_ms(self, missing: Sequence[int], depth: int, width: int) -> float:
        """Of the requests that draft, by the entries that each lacks."""
        far = [tokens for tokens in missing if tokens > AT_ONCE]
        ms = self.table.extend(sum(missing) - sum(far) + len(far)) + self.table.enter(sum(far))
        return ms + (depth - 1) * self.table.step(len(missing) * width) + self.drafting_ms


def _table(rows: Sequence[int], **ms: Sequence[float]) -> CostTable:
    return CostTable(
        *(Curve(rows, ms[name]) for name in ("target", "decode", "step", "extend", "enter"))
    )


ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
# SmolLM2 in bf16 and its packaged head, as the engine measured them at starts on quiet machines
ZEN = _table(
    ROWS,
    target=(5.66, 5.66, 6.02, 6.03, 6.88, 8.25, 11.3, 14.6, 20.4, 27.0, 38.8, 51.8),
    decode=(5.84, 5.9, 6.42, 6.59, 7.53, 8.88, 12.3, 15.5, 21.9, 28.7, 41.1, 54.3),
    step=(0.156, 0.163, 0.163, 0.173, 0.257, 0.34, 0.578, 0.701, 1.05, 1.37, 1.95, 2.49),
    extend=(0.332, 0.332, 0.332, 0.435, 0.454, 0.54, 0.893, 1.1, 1.39, 1.66, 2.12, 2.72),
    enter=(0.096, 0.098, 0.11, 0.131, 0.141, 0.218, 0.335, 0.346, 0.439, 0.581, 0.707, 0.894),
)
# the target as measured on a Xeon without tiles (rows 1, 4, 8, 16, 32); the draft as above
XEON_ROWS = (1, 4, 8, 16, 32, 64)
XEON_MS = (13.0, 18.4, 24.1, 41.0, 83.0, 166.0)
XEON = _table(
    XEON_ROWS,
    target=XEON_MS,
    decode=XEON_MS,
    step=tuple(0.028 * ms for ms in XEON_MS),
    extend=tuple(0.059 * ms for ms in XEON_MS),
    enter=tuple(0.017 * ms for ms in XEON_MS),
)
TILES = _table(
    ROWS,
    target=(8.8, 8.8, 8.8, 9.09, 9.27, 10.3, 11.2, 12.3, 18.2, 18.2, 23.4, 29.9),
    decode=(8.91, 8.97, 9.48, 10.8, 12.1, 13.7, 17.3, 21.1, 30.7, 33.7, 50.4, 64.4),
    step=(0.21, 0.21, 0.21, 0.29, 0.38, 0.41, 0.73, 0.89, 1.25, 1.56, 2.24, 3.06),
    extend=(0.49, 0.49, 0.6, 0.6, 0.68, 0.93, 1.43, 1.71, 2.22, 2.56, 3.22, 3.82),
    enter=(0.1, 0.1, 0.11, 0.17, 0.18, 0.21, 0.35, 0.45, 0.58, 0.68, 0.93, 1.09),
)
MACHINES = {
    "2 cores of Zen 5": Machine(ZEN, 0.2, 0.15),
    "2 cores of a Xeon with tiles": Machine(TILES, 0.2, 0.15),
    "2 cores of a Xeon without tiles": Machine(XEON, 0.2, 0.15),
}


class Rule(Protocol):
    """One way to decide."""

    def turn(
        self, under: Sequence[Under], proposals: Proposals, following: Sequence[Sequence[int]]
    ) -> Turn:
        """What to draft and verify. following: the tokens to come, for the oracle alone."""
        ...

    def learn(self, emitted: Sequence[Sequence[int]], ms: float) -> None:
        """What came of the last turn: the tokens of each request, and the time."""


def nothing(proposals: Proposals) -> Turn:
    """A plain round."""
    B, C = proposals.tokens.shape
    return Turn(np.zeros(B, dtype=bool), np.zeros((B, C), dtype=bool))


class Plain:
    """Never drafts."""

    def turn(
        self, under: Sequence[Under], proposals: Proposals, following: Sequence[Sequence[int]]
    ) -> Turn:
        return nothing(proposals)

    def learn(self, emitted: Sequence[Sequence[int]], ms: float) -> None:
        pass


class Fixed(Plain):
    """Every request drafts to `depth` and verifies its `num_nodes` most probable (EAGLE-2)."""

    def __init__(self, depth: int, num_nodes: int, depths: np.ndarray, branches: int = 3) -> None:
        self._depth, self._nodes = depth, num_nodes
        self._end = int(np.searchsorted(depths, depth, side="right"))
        self._width = min(branches, num_nodes)

    def turn(
        self, under: Sequence[Under], proposals: Proposals, following: Sequence[Sequence[int]]
    ) -> Turn:
        B, C = proposals.tokens.shape
        kept = np.zeros((B, C), dtype=bool)
        kept[:, : self._end] = most_probable(proposals.scores[:, : self._end], self._nodes)
        return Turn(np.ones(B, dtype=bool), kept, self._depth, self._width)


def chain(proposals: Proposals, line: int, depth: int) -> list[int]:
    """The head's best candidate of each level behind the one before: what a chain would draft. It
    ends early where a tree of three branches has left it.
    """
    found: list[int] = []
    for level in levels(proposals.depths)[:depth]:
        above = found[-1] if found else -1
        children = level.start + np.flatnonzero(proposals.parents[line, level] == above)
        if not len(children):
            break
        found.append(int(children[proposals.scores[line, children].argmax()]))
    return found


class MovingAverage(Plain):
    """SGLang's adaptive chains: tiers of 1, 3 and 7 steps (here 6, the most that is recorded) by a
    moving average of accepted drafts over all requests, with hysteresis; always drafts.
    """

    TIERS, SHARE, EVERY, DOWN = (1, 3, 6), 0.2, 5, 0.25

    def __init__(self, depths: np.ndarray) -> None:
        self._tier, self._average, self._num_rounds = 1, 2.0, 0

    def turn(
        self, under: Sequence[Under], proposals: Proposals, following: Sequence[Sequence[int]]
    ) -> Turn:
        kept, depth = np.zeros(proposals.tokens.shape, dtype=bool), self.TIERS[self._tier]
        for line in range(len(kept)):
            kept[line, chain(proposals, line, depth)] = True
        return Turn(np.ones(len(kept), dtype=bool), kept, depth)

    def learn(self, emitted: Sequence[Sequence[int]], ms: float) -> None:
        accepted = float(np.mean([len(row) - 1 for row in emitted]))
        self._average += self.SHARE * (accepted - self._average)
        self._num_rounds += 1
        if self._num_rounds % self.EVERY:
            return
        if self._tier + 1 < len(self.TIERS) and self._average > self.TIERS[self._tier] - 0.5:
            self._tier += 1
        elif self._tier and self._average < self.TIERS[self._tier - 1] - 0.5 - self.DOWN:
            self._tier -= 1


class OneBudget(Plain):
    """vLLM's adaptive verification (its pull request 52228): chains for all requests, always; an
    online logistic estimate of acceptance from the draft's log-odds and the depth; the most
    probable survivors of all requests are verified while tokens by ms rise, by a known cost table.
    """

    DEPTH, RATE = 4, 0.05

    def __init__(self, table: CostTable, depths: np.ndarray) -> None:
        self._table = table
        self._weights = np.array([0.0, 1.0, 0.0])  # of 1, the draft's log-odds, the level
        self._chains: list[list[int]] = []
        self._features: list[np.ndarray] = []
        self._proposals: Proposals | None = None

    def turn(
        self, under: Sequence[Under], proposals: Proposals, following: Sequence[Sequence[int]]
    ) -> Turn:
        B = len(under)
        self._proposals, self._chains, self._features = proposals, [], []
        survival: list[tuple[float, int, int]] = []
        for line in range(B):
            nodes = chain(proposals, line, self.DEPTH)
            steps = np.diff(proposals.scores[line, nodes].astype(np.float64), prepend=0.0)
            given = np.clip(np.exp(steps), 1e-4, 1 - 1e-4)
            features = np.stack(
                (np.ones(len(nodes)), np.log(given / (1 - given)), np.arange(len(nodes))), 1
            )
            alive = 1.0
            for place, features_of in enumerate(features):
                alive *= 1 / (1 + math.exp(-float(features_of @ self._weights)))
                survival.append((alive, line, nodes[place]))
            self._chains.append(nodes)
            self._features.append(features)
        survival.sort(reverse=True)
        draft_ms = self._table.extend(sum(min(one.missing, AT_ONCE) for one in under))
        draft_ms += (self.DEPTH - 1) * self._table.step(B)
        ms = self._table.forwards(B, len(survival)) + draft_ms
        tokens = B + np.cumsum([0.0, *(alive for alive, _, _ in survival)])
        kept = np.zeros(proposals.tokens.shape, dtype=bool)
        for _, line, node in survival[: int((tokens / ms).argmax())]:
            kept[line, node] = True
        return Turn(np.ones(B, dtype=bool), kept, self.DEPTH)

    def learn(self, emitted: Sequence[Sequence[int]], ms: float) -> None:
        assert self._proposals is not None
        for line, (row, nodes) in enumerate(zip(emitted, self._chains, strict=True)):
            for place, (node, token) in enumerate(zip(nodes, row, strict=False)):
                features = self._features[line][place]
                hit = int(self._proposals.tokens[line, node]) == token
                error = hit - 1 / (1 + math.exp(-float(features @ self._weights)))
                self._weights += self.RATE * error * features / (1 + float(features @ features))
                if not hit:
                    break


_NEVER = np.float32(-40)  # log-probability


class Ours(Plain):
    """The engine's own policy."""

    def __init__(self, table: CostTable, K: int, k: int, most_nodes: int) -> None:
        self._policy = Policy(Speculation("auto", K, k, most_nodes + 1), table)
        self._plan: RoundPlan | None = None
        self._width = k

    def turn(
        self, under: Sequence[Under], proposals: Proposals, following: Sequence[Sequence[int]]
    ) -> Turn:
        plan = self._policy.plan([one.missing for one in under])
        self._plan, turn = plan, nothing(proposals)
        if not plan.drafts:
            return turn
        drafting = np.flatnonzero(plan.drafting)
        parts = proposals.tokens, proposals.scores, proposals.parents
        tokens, scores, parents = (part[drafting] for part in parts)
        bounds, depth = levels(proposals.depths), 1
        if plan.width < self._width:  # what would not have been drafted is neither chosen nor drawn
            there = of_best_path(Proposals(tokens, scores, parents, proposals.depths))
            scores, tokens = np.where(there, scores, _NEVER), np.where(there, tokens, -1)
        while depth < len(bounds) and goes_on(
            scores[:, bounds[depth - 1]], plan.thresholds, depth - 1
        ):
            depth += 1
        end = bounds[depth - 1].stop
        parts = tokens[:, :end], scores[:, :end], parents[:, :end]
        drafted = Proposals(*parts, proposals.depths[:end])
        kept = self._policy.choose(plan, drafted)
        turn.kept[drafting, :end] = kept
        return Turn(plan.drafting.copy(), turn.kept, depth, plan.width)

    def learn(self, emitted: Sequence[Sequence[int]], ms: float) -> None:
        assert self._plan is not None
        drafting = np.flatnonzero(self._plan.drafting)
        self._policy.observe(self._plan, [emitted[line] for line in drafting], ms)


class Oracle(Plain):
    """Knows what follows: the most tokens - rate * ms of a round, by depth and by the requests that
    gain most; the rate is that of the long run.
    """

    def __init__(self, machine: Machine, rate: float) -> None:
        self._machine, self._rate = machine, rate

    def turn(
        self, under: Sequence[Under], proposals: Proposals, following: Sequence[Sequence[int]]
    ) -> Turn:
        B, C = proposals.tokens.shape
        everything = np.ones(C, dtype=bool)
        length_B = np.array(
            [
                min(num_accepted(proposals, line, everything, left), len(left) - 1)
                for line, left in enumerate(following)
            ]
        )
        forwards = self._machine.table.forwards(B, int(length_B.sum()))
        best, found = B - self._rate * float(forwards[0]), (0, 0)
        for depth in range(1, int(length_B.max(initial=0)) + 1):
            gains = np.minimum(length_B, depth)
            order = np.argsort(-gains, kind="stable")
            for count in range(1, int(np.count_nonzero(gains)) + 1):
                nodes = int(gains[order[:count]].sum())
                missing = [under[line].missing for line in order[:count]]
                ms = float(forwards[nodes]) + self._machine.draft_ms(missing, depth, 1)
                if (worth := B + nodes - self._rate * ms) > best:
                    best, found = worth, (depth, count)
        depth, count = found
        turn = nothing(proposals)
        for line in np.argsort(-np.minimum(length_B, depth), kind="stable")[:count]:
            turn.drafting[line] = True
            path = accepted_path(proposals, int(line), following[line])
            turn.kept[line, path[: min(depth, int(length_B[line]))]] = True
        return Turn(turn.drafting, turn.kept, depth)


def accepted_path(proposals: Proposals, line: int, following: Sequence[int]) -> list[int]:
    """The candidates that the target will draw."""
    path: list[int] = []
    for token in following:
        above = path[-1] if path else -1
        hits = (proposals.parents[line] == above) & (proposals.tokens[line] == token)
        if not hits.any():
            break
        path.append(int(hits.argmax()))
    return path
