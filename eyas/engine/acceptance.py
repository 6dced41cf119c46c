"""How likely the target accepts a draft: the draft's own probability, corrected by experience.

    conditional  P(candidate drawn | its parent drawn), from the draft's own and the depth
    path         the product of the conditionals from the root: never above the parent's

A candidate is judged when its parent was drawn, whether it was verified or not: the next token
drawn says which child it was, if any. At temperature above 0 the draw follows the target's
distribution, so greedy and sampled requests are counted apart. Knows proposals and emitted tokens,
no model and no clock.

Letters: B requests, C candidates a request.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from eyas.model.library import library, pointers
from eyas.model.rows import Proposals

_NUM_BINS, _BINS_PER_UNIT = 20, 7.0  # of sqrt(-log p): fine near p = 1, where trees are decided
_NUM_DEPTHS = 6  # the last one holds all deeper
_PRIOR_SHRINK = 0.9  # a draft is surer of itself than the target is of it
# weight of the draft's own probability; of the same bin pooled over all depths
_PRIOR_COUNT, _POOLED_COUNT = 6.0, 12.0
LARGEST = 0.995  # probability that is believed
_MEMORY = 0.998  # what is kept of the counts from one round to the next
SPREAD = 0.8  # of requests' log-odds, before it is learned
_REQUEST_MEMORY = 0.99  # what is kept of a request's own rounds from one to the next
# of trees before any was seen: the best path's probability, each further one times that again
_FIRST_PATH = 0.85
_NUM_TREES = 16  # of late
_LEAST_GAIN = 0.02
# tokens that a level brings for a frontier of probability 1, before it is learned
_FIRST_GAIN, _FIRST_GAIN_WEIGHT = 0.4, 0.4
UNPROPOSED = -50.0  # the score of a path that the head did not propose is below it
# at first every round is counted at once, later eight are counted together
_EAGER_ROUNDS, _COUNT_EVERY = 32, 8


@dataclass(slots=True)
class RequestAcceptance:
    """How one request differs from the rest: a shift of the log-odds of acceptance, normal with
    mean `log_odds` and standard deviation `deviation`.

    Before its first draft the shift is that of all requests, 0 give or take their spread. Every
    judged candidate is an observation of a logistic regression with this one coefficient, updated
    by its gradient and information (assumed density filtering; Opper and Winther 1998). What was
    seen is slowly forgotten, so that a request that has stopped drafting is tried again.
    """

    greedy: bool
    information: float = 0.0
    pull: float = 0.0  # log_odds times the precision
    variance: float = SPREAD**2  # of the requests' shifts
    of_text: RequestAcceptance | None = None

    @property
    def text(self) -> RequestAcceptance:
        """The same of drafts from text."""
        if self.of_text is None:
            self.of_text = RequestAcceptance(self.greedy)
        return self.of_text

    @property
    def precision(self) -> float:
        return 1.0 / self.variance + self.information

    @property
    def log_odds(self) -> float:
        return self.pull / self.precision

    @property
    def deviation(self) -> float:
        return float(self.precision**-0.5)

    def forget(self, variance: float) -> None:
        """Once a round. variance: of the requests' shifts, as it is known now."""
        self.information *= _REQUEST_MEMORY
        self.pull *= _REQUEST_MEMORY
        self.variance = variance
        if self.of_text is not None:
            self.of_text.forget(self.of_text.variance)

    def observe(self, surplus: float, information: float) -> None:
        """Of a round's judged candidates: how many more were drawn than expected, and the sum of
        p (1 - p).
        """
        log_odds = self.log_odds
        self.information += information
        self.pull = self.precision * log_odds + surplus


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is expected of a round's candidates, float64 [B, C]: conditional on the parent, and of
    the whole path from the root. cells int64 [B, C]: where each is counted.
    """

    conditional: np.ndarray
    paths: np.ndarray
    cells: np.ndarray


class CellCounts:
    """How many candidates of each cell were judged and drawn, float64 of a table's shape; slowly
    forgotten.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.judged, self.drawn = np.zeros(shape), np.zeros(shape)
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []  # not yet counted
        self._num_rounds = 0

    def add(self, judged: np.ndarray, drawn: np.ndarray) -> bool:
        """A round's cells, places in the flat table. Returns whether the counts have changed."""
        self._waiting.append((judged, drawn))
        self._num_rounds += 1
        if self._num_rounds >= _EAGER_ROUNDS and len(self._waiting) < _COUNT_EVERY:
            return False
        kept, size = _MEMORY ** len(self._waiting), self.judged.size
        for counts, cells in zip(
            (self.judged, self.drawn), zip(*self._waiting, strict=True), strict=True
        ):
            counts *= kept
            counts += np.bincount(np.concatenate(cells), minlength=size).reshape(counts.shape)
        self._waiting.clear()
        return True


class Acceptance:
    """Counts of judged and drawn candidates, by greedy or sampled, depth and probability; slowly
    forgotten.
    """

    def __init__(self, native: bool = False) -> None:
        """native: compute in the native library, which must be available. A round has few
        candidates: array operations take longer there than the arithmetic.
        """
        self._native = native
        shape = (2, _NUM_DEPTHS, _NUM_BINS)
        self._counts = CellCounts(shape)
        middles = (np.arange(_NUM_BINS) + 0.5) / _BINS_PER_UNIT
        self._prior = np.minimum(_PRIOR_SHRINK * np.exp(-(middles**2)), LARGEST)
        self._table = np.broadcast_to(self._prior, shape).reshape(-1)
        # of requests' shifts: learned by expectation maximization (empirical Bayes)
        self.variance = SPREAD**2

    def calibrate(self, proposals: Proposals, requests: Sequence[RequestAcceptance]) -> Calibration:
        """All probabilities are within (0, 1), and a path's is below its parent's."""
        if self._native:
            return _calibrate_natively(proposals, self._table, requests)
        cells = self._cells(proposals, requests)
        conditional: np.ndarray = self._table[cells]
        factors = [request.log_odds for request in requests]
        if any(factors):
            factor = np.exp(np.array(factors))[:, None]
            odds = factor * conditional
            conditional = odds / (1.0 - conditional + odds)
        paths = path_probs(conditional, proposals.parents, proposals.depths)
        return Calibration(conditional, paths, cells)

    def observe(
        self,
        proposals: Proposals,
        calibration: Calibration,
        emitted: Sequence[Sequence[int]],
        requests: Sequence[RequestAcceptance],
    ) -> None:
        """emitted: the tokens of each request in this round; calibration: what was expected."""
        conditional = calibration.conditional
        if self._native:
            judged, drawn, surplus = _judge_natively(proposals, conditional, emitted)
        else:
            judged, drawn = judge(proposals, emitted)
            surplus = (drawn.sum(1) - (conditional * judged).sum(1)).tolist()
        if proposals.text is not None:  # of the head's candidates only
            own = proposals.scores > UNPROPOSED
            judged, drawn = judged & own, drawn & own
            surplus = (drawn.sum(1) - (conditional * judged).sum(1)).tolist()
        information = (conditional * (1 - conditional) * judged).sum(1).tolist()
        for request, *seen in zip(requests, surplus, information, strict=True):
            request.observe(*seen)
        shown = sum(one.log_odds**2 + 1 / one.precision for one in requests) / len(requests)
        self.variance += (1 - _MEMORY) * (shown - self.variance)
        if self._counts.add(calibration.cells[judged], calibration.cells[drawn]):
            self._make_table()

    def _make_table(self) -> None:
        judged, drawn = self._counts.judged, self._counts.drawn
        pooled = (drawn.sum(1, keepdims=True) + _PRIOR_COUNT * self._prior) / (
            judged.sum(1, keepdims=True) + _PRIOR_COUNT
        )
        table = (drawn + _POOLED_COUNT * pooled) / (judged + _POOLED_COUNT)
        self._table = np.minimum(table, LARGEST).reshape(-1)

    def _cells(self, proposals: Proposals, requests: Sequence[RequestAcceptance]) -> np.ndarray:
        """Where in the flat table each candidate is, int64 [B, C]."""
        above = _rooted(proposals.scores, 0.0).take(_above(proposals.parents))
        bins = np.sqrt(np.maximum(above - proposals.scores, 0.0)) * _BINS_PER_UNIT
        start = (np.minimum(proposals.depths, _NUM_DEPTHS) - 1) * _NUM_BINS
        greedy = np.array([[request.greedy * _NUM_DEPTHS * _NUM_BINS] for request in requests])
        cells: np.ndarray = np.minimum(bins, _NUM_BINS - 1).astype(np.int64) + start + greedy
        return cells


class ExpectedTrees:
    """What a tree that is not drafted yet will be: one of the trees of late.

    Letters: K draft steps, N nodes of a tree, R trees of late, Q kinds of requests.
    """

    def __init__(self, num_draft_steps: int, max_nodes: int, num_kinds: int) -> None:
        # path probabilities of the trees of each depth at most, the best first, and how deep they
        # were drafted; kinds apart
        first_KN = np.tile(_FIRST_PATH ** np.arange(1.0, max_nodes + 1), (num_draft_steps, 1))
        for depth in range(num_draft_steps):
            first_KN[depth, depth + 1 :] *= 0.3
        self.paths_QRKN = np.tile(first_KN, (num_kinds, _NUM_TREES, 1, 1))
        self.reached_QR = np.full((num_kinds, _NUM_TREES), num_draft_steps)
        self._num_seen = [0] * num_kinds
        # by level but the last: tokens that the next one brought, the probability that it grew from
        self._prior = np.full(num_draft_steps - 1, _FIRST_GAIN_WEIGHT)
        self._brought, self._grown_from = _FIRST_GAIN * self._prior, self._prior.copy()

    def gains(self) -> list[float]:
        """Tokens that each level but the first brings, by the probability of its frontier."""
        gains: list[float] = (self._brought / self._grown_from).tolist()
        return [max(gain, 1e-3) for gain in gains]

    def observe(
        self,
        proposals: Proposals,
        paths: np.ndarray,
        requests: Sequence[RequestAcceptance],
        kinds: np.ndarray,
        least: float,
    ) -> None:
        """Trees that were drafted, text's candidates in them at any depth. kinds: int64, of the
        requests for which the head has drafted. least: the path probability below which a node is
        not worth its time.
        """
        K, N = self.paths_QRKN.shape[2:]
        bounds, is_text, scores = levels(proposals.depths), None, proposals.scores
        if (text := proposals.text) is not None:
            requests = [one for one, grown in zip(requests, text.grown, strict=True) if grown]
            paths, scores = paths[text.grown], scores[text.grown]
            is_text, bounds = text.cells[text.grown] >= 0, bounds[: text.head_depth]
        shifts = np.exp([-request.log_odds for request in requests])[:, None]
        self._brought += _LEAST_GAIN * (_FIRST_GAIN * self._prior - self._brought)
        self._grown_from += _LEAST_GAIN * (self._prior - self._grown_from)
        before = 0.0
        for level in range(K):
            if level < len(bounds):
                there = paths[:, : bounds[level].stop]
                if is_text is not None:
                    there = np.where(is_text | (proposals.depths <= level + 1), paths, 0.0)
                within = -np.sort(-there, axis=1)[:, :N]
                value = float(np.maximum(within - least, 0).sum()) / len(within)
                if level:
                    frontier = scores[:, bounds[level - 1]].max(1)
                    self._brought[level - 1] += value - before
                    self._grown_from[level - 1] += float(np.exp(frontier).sum()) / len(within)
                before = value
                odds = shifts * within
                usual = odds / (1 - within + odds)  # as of a request without a shift
            for place, row in zip(self._places(kinds), usual, strict=True):
                self.paths_QRKN[place][level, : len(row)] = row
                self.paths_QRKN[place][level, len(row) :] = 0.0
        for place in self._places(kinds):
            self.reached_QR[place] = len(bounds)
        for kind in kinds.tolist():
            self._num_seen[kind] += 1

    def _places(self, kinds: np.ndarray) -> list[tuple[int, int]]:
        """Where trees of these kinds go, each in place of the oldest of its kind."""
        seen, places = list(self._num_seen), []
        for kind in kinds.tolist():
            places.append((kind, seen[kind] % _NUM_TREES))
            seen[kind] += 1
        return places


def levels(depths: np.ndarray) -> list[slice]:
    """The candidates of each depth, from 1 on."""
    bounds = (
        np.searchsorted(depths, np.arange(1, int(depths[-1]) + 2)).tolist() if len(depths) else [0]
    )
    return [slice(start, stop) for start, stop in pairwise(bounds)]


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


def path_probs(conditional: np.ndarray, parents: np.ndarray, depths: np.ndarray) -> np.ndarray:
    """Conditionals [B, C] to probabilities of whole paths [B, C].

    Each step doubles how much of its path a candidate has multiplied up.
    """
    B, C = conditional.shape
    paths, jump = _rooted(conditional, 1.0), np.empty((B, C + 1), dtype=np.int64)
    jump[:, :C] = _above(parents)
    jump[:, C] = np.arange(C, B * (C + 1), C + 1)  # the root is above itself
    for step in range((int(depths[-1]) - 1).bit_length() if len(depths) else 0):
        if step:
            jump = jump.take(jump)
        paths = paths * paths.take(jump)
    return paths[:, :C]


def judge(proposals: Proposals, emitted: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """bool [B, C] twice: candidates whose parent was drawn, and those drawn themselves."""
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


# The same in the native library


def _calibrate_natively(
    proposals: Proposals, table: np.ndarray, requests: Sequence[RequestAcceptance]
) -> Calibration:
    """table float64 [2 * depths * bins]."""
    B, C = proposals.scores.shape
    inputs = (
        np.ascontiguousarray(proposals.scores),
        np.ascontiguousarray(proposals.parents),
        np.ascontiguousarray(proposals.depths),
        table,
        np.array([one.greedy for one in requests], dtype=np.uint8),
        np.array([one.log_odds for one in requests]),
    )
    conditional, paths, cells = np.empty((B, C)), np.empty((B, C)), np.empty((B, C), dtype=np.int64)
    sizes = (ctypes.c_int64 * 4)(B, C, _NUM_DEPTHS, _NUM_BINS)
    library().eyas_calibrate(sizes, _BINS_PER_UNIT, pointers(*inputs, conditional, paths, cells))
    return Calibration(conditional, paths, cells)


def _judge_natively(
    proposals: Proposals, conditional: np.ndarray, emitted: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """`judge`, and of each request how many more were drawn than expected."""
    B, C = proposals.tokens.shape
    judged, drawn, surplus = np.empty((B, C), dtype=bool), np.empty((B, C), dtype=bool), np.empty(B)
    inputs = (
        np.ascontiguousarray(proposals.tokens),
        np.ascontiguousarray(proposals.parents),
        np.array([token for row in emitted for token in row], dtype=np.int64),
        np.array(list(map(len, emitted)), dtype=np.int64),
        conditional,
    )
    library().eyas_judge((ctypes.c_int64 * 2)(B, C), pointers(*inputs, judged, drawn, surplus))
    return judged, drawn, surplus.tolist()
