"""How likely the target is to follow the draft: the draft's own probability, corrected by what was
seen so far.

    conditional      P(candidate drawn | its parent drawn), from the draft's conditional probability and the depth
    path             the product of the conditionals from the root: never above the parent's

A candidate is judged when its parent was drawn, whether it was verified or not: the next token
drawn says which child it was, if any. At temperature above 0 the draw follows the target's
distribution, so greedy and sampled requests are counted apart. Knows proposals and emitted tokens;
no model, no clock.

Letters: B requests, C candidates a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from eyas.engine import native_choice
from eyas.model.rows import Proposals

_NUM_BINS, _BINS_PER_UNIT = 20, 7.0  # of sqrt(-log p): fine near p = 1, where trees are decided
_NUM_DEPTHS = 6  # the last one holds all deeper
_PRIOR_SHRINK = 0.9  # a draft is surer of itself than the target is of it
# weight of the draft's own word; of the same bin at all depths
_PRIOR_COUNT, _POOLED_COUNT = 6.0, 12.0
_LARGEST = 0.995
# at first every round counts at once, later eight are counted together
_EAGER_ROUNDS, _COUNT_EVERY = 32, 8
_FEW_REQUESTS = 4  # up to here a loop is faster than arrays


@dataclass(slots=True)
class RequestAcceptance:
    """How one request differs from the rest: log of a factor on the odds of being accepted, shrunk
    to 0.
    """

    greedy: bool
    log_odds: float = 0.0

    def observe(self, surplus: float) -> None:
        """surplus: accepted less expected, over the round's judged candidates."""
        self.log_odds = max(-1.5, min(1.5, 0.98 * self.log_odds + 0.1 * surplus))


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What is expected of a round's candidates, float64 [B, C]: given the parent, and of the whole
    path from the root.

    cells: where each one is counted.
    """

    conditional: np.ndarray
    paths: np.ndarray
    cells: np.ndarray


class Acceptance:
    """Counts of judged and drawn candidates, by greedy or sampled, depth and probability; slowly
    forgotten.
    """

    def __init__(self, memory: float = 0.998, native: bool = False) -> None:
        """memory: what is kept of the counts from one round to the next; native: in the library,
        which there is then.
        """
        self._memory, self._native = memory, native
        shape = (2, _NUM_DEPTHS, _NUM_BINS)
        self._judged, self._drawn = np.zeros(shape), np.zeros(shape)
        middles = (np.arange(_NUM_BINS) + 0.5) / _BINS_PER_UNIT
        self._prior = np.minimum(_PRIOR_SHRINK * np.exp(-(middles**2)), _LARGEST)
        self._table = np.broadcast_to(self._prior, shape).reshape(-1)
        # cells judged and drawn, not yet counted
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_rounds = 0

    def calibrate(self, proposals: Proposals, requests: Sequence[RequestAcceptance]) -> Calibrated:
        """All probabilities are within (0, 1), and a path's is below its parent's."""
        if self._native:
            greedy, log_odds = [one.greedy for one in requests], [one.log_odds for one in requests]
            bins = _NUM_DEPTHS, _NUM_BINS, _BINS_PER_UNIT
            return Calibrated(
                *native_choice.calibrate(proposals, self._table, bins, greedy, log_odds)
            )
        above = _above(proposals.parents)
        cells = self._cells(proposals, above, requests)
        conditional: np.ndarray = self._table[cells]
        factors = [request.log_odds for request in requests]
        if any(factors):
            factor = np.exp(np.array(factors))[:, None]
            odds = factor * conditional
            conditional = odds / (1.0 - conditional + odds)
        return Calibrated(conditional, _paths(conditional, above, proposals.depths), cells)

    def observe(
        self,
        proposals: Proposals,
        calibrated: Calibrated,
        emitted: Sequence[Sequence[int]],
        requests: Sequence[RequestAcceptance],
    ) -> None:
        """emitted: the tokens that each request drew in the round; calibrated: what was expected."""
        if self._native:
            judged, drawn, surplus = native_choice.judge(proposals, calibrated.conditional, emitted)
        else:
            judged, drawn = judge(proposals, emitted)
            surplus = (drawn.sum(1) - (calibrated.conditional * judged).sum(1)).tolist()
        for request, value in zip(requests, surplus, strict=True):
            request.observe(value)
        self._waiting.append((calibrated.cells[judged], calibrated.cells[drawn]))
        self._num_rounds += 1
        if self._num_rounds < _EAGER_ROUNDS or len(self._waiting) == _COUNT_EVERY:
            self._count()

    def _count(self) -> None:
        kept, size = self._memory ** len(self._waiting), self._judged.size
        for counts, cells in zip(
            (self._judged, self._drawn), zip(*self._waiting, strict=True), strict=True
        ):
            counts *= kept
            counts += np.bincount(np.concatenate(cells), minlength=size).reshape(counts.shape)
        self._waiting.clear()
        pooled = (self._drawn.sum(1, keepdims=True) + _PRIOR_COUNT * self._prior) / (
            self._judged.sum(1, keepdims=True) + _PRIOR_COUNT
        )
        self._table = np.minimum(
            (self._drawn + _POOLED_COUNT * pooled) / (self._judged + _POOLED_COUNT), _LARGEST
        ).reshape(-1)

    def _cells(
        self, proposals: Proposals, above: np.ndarray, requests: Sequence[RequestAcceptance]
    ) -> np.ndarray:
        """Where in the flat table each candidate is, int64 [B, C]."""
        bins = (
            np.sqrt(np.maximum(_rooted(proposals.scores, 0.0).take(above) - proposals.scores, 0.0))
            * _BINS_PER_UNIT
        )
        start = (np.minimum(proposals.depths, _NUM_DEPTHS) - 1) * _NUM_BINS
        greedy = np.array([[request.greedy * _NUM_DEPTHS * _NUM_BINS] for request in requests])
        cells: np.ndarray = np.minimum(bins, _NUM_BINS - 1).astype(np.int64) + start + greedy
        return cells


def levels(depths: np.ndarray) -> list[slice]:
    """The candidates of each depth, from 1 on."""
    bounds = (
        np.searchsorted(depths, np.arange(1, int(depths[-1]) + 2)).tolist() if len(depths) else [0]
    )
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def path_probs(conditional: np.ndarray, parents: np.ndarray, depths: np.ndarray) -> np.ndarray:
    """Conditionals [B, C] to probabilities of whole paths [B, C]."""
    return _paths(conditional, _above(parents), depths)


def _above(parents: np.ndarray) -> np.ndarray:
    """Flat place of each candidate's parent in an array [B, C + 1] whose last column is the root,
    int64 [B, C].
    """
    B, C = parents.shape
    above: np.ndarray = np.where(parents < 0, C, parents) + (C + 1) * np.arange(B)[:, None]
    return above


def _rooted(values: np.ndarray, root: float) -> np.ndarray:
    """Values [B, C] with a column for the root behind them, [B, C + 1]."""
    B, C = values.shape
    rooted = np.empty((B, C + 1), dtype=values.dtype)
    rooted[:, :C] = values
    rooted[:, C] = root
    return rooted


def _paths(conditional: np.ndarray, above: np.ndarray, depths: np.ndarray) -> np.ndarray:
    """Each step doubles how much of its path a candidate has multiplied up."""
    B, C = conditional.shape
    paths, jump = _rooted(conditional, 1.0), np.empty((B, C + 1), dtype=np.int64)
    jump[:, :C] = above
    jump[:, C] = np.arange(C, B * (C + 1), C + 1)  # the root is above itself
    for step in range((int(depths[-1]) - 1).bit_length() if len(depths) else 0):
        if step:
            jump = jump.take(jump)
        paths = paths * paths.take(jump)
    return paths[:, :C]


def judge(proposals: Proposals, emitted: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """bool [B, C] twice: the candidates whose parent was drawn, and those that were drawn
    themselves.
    """
    return (_judge_one_by_one if len(emitted) <= _FEW_REQUESTS else _judge_together)(
        proposals, emitted
    )


def _judge_one_by_one(
    proposals: Proposals, emitted: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    judged, drawn = (
        np.zeros(proposals.tokens.shape, dtype=bool),
        np.zeros(proposals.tokens.shape, dtype=bool),
    )
    for b, (tokens, parents, row) in enumerate(
        zip(proposals.tokens.tolist(), proposals.parents.tolist(), emitted, strict=True)
    ):
        at, k = -1, parents.count(-1)
        for token in row:
            if at not in parents:
                break
            first = parents.index(at)  # the children of a node stand together
            judged[b, first : first + k] = True
            children = tokens[first : first + k]
            if token not in children:
                break
            at = first + children.index(token)
            drawn[b, at] = True
    return judged, drawn


def _judge_together(
    proposals: Proposals, emitted: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    tokens, parents = proposals.tokens, proposals.parents
    judged, drawn = np.zeros(tokens.shape, dtype=bool), np.zeros(tokens.shape, dtype=bool)
    bounds = levels(proposals.depths)
    depth = max(map(len, emitted), default=0)
    drawn_BD = np.full((len(emitted), depth), -1, dtype=np.int64)
    for b, row in enumerate(emitted):
        drawn_BD[b, : len(row)] = row
    # the candidate where each walk stands; -2 when it has ended
    at = np.full((len(emitted), 1), -1)
    for level, next_token in zip(bounds, drawn_BD.T, strict=False):
        at[next_token < 0] = -2
        children = parents[:, level] == at
        hits = children & (tokens[:, level] == next_token[:, None])
        judged[:, level], drawn[:, level] = children, hits
        at = np.where(hits.any(1), hits.argmax(1) + level.start, -2)[:, None]
    return judged, drawn
