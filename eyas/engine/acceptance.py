"""How likely the target is to follow the draft: the draft's own probability, corrected by what was seen so far.

    conditional      P(candidate drawn | its parent drawn), from the draft's conditional probability and the depth
    path             the product of the conditionals from the root: never above the parent's

A candidate is judged when its parent was drawn, whether it was verified or not: the next token drawn says which child it
was, if any. At temperature above 0 the draw follows the target's distribution, so greedy and sampled requests are counted
apart. Knows proposals and emitted tokens; no model, no clock.

Letters: B requests, C candidates a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from eyas.model.outputs import Proposals

_NUM_BINS, _BINS_PER_UNIT = 20, 7.0  # of sqrt(-log p): fine near p = 1, where trees are decided
_NUM_DEPTHS = 6  # the last one holds all deeper
_PRIOR_SHRINK = 0.9  # a draft is surer of itself than the target is of it
_PRIOR_COUNT, _POOLED_COUNT = 6.0, 12.0  # weight of the draft's own word; of the same bin at all depths
_LARGEST = 0.995


@dataclass(slots=True)
class RequestAcceptance:
    """How one request differs from the rest: log of a factor on the odds of being accepted, shrunk to 0."""

    greedy: bool
    log_odds: float = 0.0

    def observe(self, surplus: float) -> None:
        """surplus: accepted less expected, over the round's judged candidates."""
        self.log_odds = max(-1.5, min(1.5, 0.98 * self.log_odds + 0.1 * surplus))


class Acceptance:
    """Counts of judged and drawn candidates, by greedy or sampled, depth and probability; slowly forgotten."""

    def __init__(self, memory: float = 0.998) -> None:
        self._memory = memory  # kept of the counts from one round to the next
        shape = (2, _NUM_DEPTHS, _NUM_BINS)
        self._judged, self._drawn = np.zeros(shape), np.zeros(shape)
        middles = (np.arange(_NUM_BINS) + 0.5) / _BINS_PER_UNIT
        self._prior = np.minimum(_PRIOR_SHRINK * np.exp(-(middles**2)), _LARGEST)
        self._table = np.broadcast_to(self._prior, shape).reshape(-1)

    def conditional(self, proposals: Proposals, requests: Sequence[RequestAcceptance]) -> np.ndarray:
        """float64 [B, C], each in (0, 1)."""
        cells = self._cells(proposals, np.array([request.greedy for request in requests]))
        probs: np.ndarray = self._table[cells]
        factors = [request.log_odds for request in requests]
        if any(factors):
            factor = np.exp(np.array(factors))[:, None]
            probs = factor * probs / (1.0 - probs + factor * probs)
        return probs

    def observe(
        self,
        proposals: Proposals,
        conditional: np.ndarray,
        emitted: Sequence[Sequence[int]],
        requests: Sequence[RequestAcceptance],
    ) -> None:
        """emitted: the tokens that each request drew in the round; conditional: what was expected."""
        judged, drawn = judge(proposals, emitted)
        for request, row_judged, row_drawn, row in zip(requests, judged, drawn, conditional, strict=True):
            request.observe(float(row_drawn.sum() - row[row_judged].sum()))
        cells = self._cells(proposals, np.array([request.greedy for request in requests]))
        self._judged *= self._memory
        self._drawn *= self._memory
        size = self._judged.size
        self._judged += np.bincount(cells[judged], minlength=size).reshape(self._judged.shape)
        self._drawn += np.bincount(cells[drawn], minlength=size).reshape(self._drawn.shape)
        pooled = (self._drawn.sum(1, keepdims=True) + _PRIOR_COUNT * self._prior) / (
            self._judged.sum(1, keepdims=True) + _PRIOR_COUNT
        )
        self._table = np.minimum((self._drawn + _POOLED_COUNT * pooled) / (self._judged + _POOLED_COUNT), _LARGEST).reshape(-1)

    def _cells(self, proposals: Proposals, greedy: np.ndarray) -> np.ndarray:
        """Where in the flat table each candidate is, int64 [B, C]."""
        bins = np.minimum(np.sqrt(-conditional_scores(proposals)) * _BINS_PER_UNIT, _NUM_BINS - 1).astype(np.int64)
        depth = np.minimum(proposals.depths, _NUM_DEPTHS) - 1
        cells: np.ndarray = bins + depth * _NUM_BINS + greedy[:, None] * (_NUM_DEPTHS * _NUM_BINS)
        return cells


def levels(depths: np.ndarray) -> list[slice]:
    """The candidates of each depth, from 1 on."""
    bounds = np.searchsorted(depths, np.arange(1, int(depths[-1]) + 2)).tolist() if len(depths) else [0]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def conditional_scores(proposals: Proposals) -> np.ndarray:
    """Log-probabilities given the parent, float [B, C], at most 0 whatever the rounding."""
    scores, parents = proposals.scores, proposals.parents
    above = np.where(parents >= 0, np.take_along_axis(scores, np.maximum(parents, 0).astype(np.int64), 1), 0)
    scores_given: np.ndarray = np.minimum(scores - above, 0)
    return scores_given


def path_probs(conditional: np.ndarray, parents: np.ndarray, depths: np.ndarray) -> np.ndarray:
    """Conditionals [B, C] to probabilities of whole paths [B, C]."""
    paths = conditional.copy()
    for level in levels(depths)[1:]:
        paths[:, level] *= np.take_along_axis(paths, parents[:, level].astype(np.int64), 1)
    return paths


def judge(proposals: Proposals, emitted: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """bool [B, C] twice: the candidates whose parent was drawn, and those that were drawn themselves."""
    tokens, parents = proposals.tokens, proposals.parents
    judged, drawn = np.zeros(tokens.shape, dtype=bool), np.zeros(tokens.shape, dtype=bool)
    bounds = levels(proposals.depths)
    depth = max(map(len, emitted), default=0)
    drawn_BD = np.full((len(emitted), depth), -1, dtype=np.int64)
    for b, row in enumerate(emitted):
        drawn_BD[b, : len(row)] = row
    at = np.full((len(emitted), 1), -1)  # the candidate where each walk stands; -2 when it has ended
    for level, next_token in zip(bounds, drawn_BD.T, strict=False):
        at[next_token < 0] = -2
        children = parents[:, level] == at
        hits = children & (tokens[:, level] == next_token[:, None])
        judged[:, level], drawn[:, level] = children, hits
        at = np.where(hits.any(1), hits.argmax(1) + level.start, -2)[:, None]
    return judged, drawn
