"""How likely the target accepts a draft: what is believed at first, corrected by experience.

    conditional  P(candidate drawn | its parent drawn)
    path         the product of the conditionals from the root: never above the parent's

A candidate is judged when its parent was drawn, whether it was verified or not: the next token
drawn says which child it was, if any. Judged and drawn candidates are counted by cell, slowly
forgotten, and each request has a shift of its own; for the two sources of candidates alike:

    HEAD   cells by depth and by the draft's own probability, which is what is believed at first
    TEXT   cells by kind of text, company and the head's opinion (`graft.py`)

At temperature above 0 the draw follows the target's distribution, so greedy and sampled requests
are counted apart. The head's counts go on over all its candidates, whatever text says of them. What
they say of the tokens beside a text's is corrected by one rule: if the head alone gives that token
h and with text it has m, the others share what is left as before, each times (1 - m) / (1 - h).

Knows proposals and emitted tokens; no model and no clock. Letters: B requests, C candidates a
request, N nodes of a tree.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from eyas.engine.graft import (
    NUM_CELLS,
    NUM_COMPANIES,
    NUM_OPINIONS,
    UNPROPOSED,
    cell_of,
    is_proposed,
)
from eyas.engine.text import FIRST_ACCEPTANCE, NUM_KINDS, TextChain
from eyas.model.rows import PAD, Proposals

HEAD, TEXT = 0, 1  # the sources

BELIEF = 10.0  # candidates that what is believed before they are seen weighs as much as
LARGEST = 0.995  # probability that is believed
MEMORY = 0.9995  # what is kept of the counts from one round to the next
REQUEST_MEMORY = 0.99  # of what a request has shown
SPREAD = 0.8  # of requests' log-odds, before it is learned

NUM_BINS, BINS_PER_UNIT = 20, 7.0  # of sqrt(-log p): fine near p = 1, where trees are decided
NUM_DEPTHS = 6  # the last one holds all deeper
_MIDDLES = (np.arange(NUM_BINS) + 0.5) / BINS_PER_UNIT
FIRST_OF_BINS = np.minimum(np.exp(-(_MIDDLES**2)), LARGEST)

# Of text by [kind, company]: alone; behind another text's token; where another says the same, half
# of what would be wrong is right.
_RIVAL, _AGREES = 0.6, 0.5
_KINDS = np.repeat(FIRST_ACCEPTANCE, 2)
FIRST_OF_TEXT = np.stack((_KINDS, _RIVAL * _KINDS, 1 - _AGREES * (1 - _KINDS)), axis=-1)
# By opinion: p becomes 1 - (1 - scale * p) * (1 - lift). Where the head proposes other tokens, and
# about what it accepts itself where it proposes this one.
OPINION_SCALE = np.array([1.0, 0.4, 1.0, 1.0, 1.0, 1.0])
OPINION_LIFT = np.array([0.0, 0.0, 0.9, 0.55, 0.25, 0.08])


class RequestAcceptance(ctypes.Structure):
    """How one request differs from the rest: for each source a shift of the log-odds of acceptance,
    normal with mean `log_odds` and standard deviation `deviation`.

    Before its first draft the shift is that of all requests, 0 give or take their spread. Every
    judged candidate is an observation of a logistic regression with this one coefficient, updated
    by its gradient and information (assumed density filtering; Opper and Winther 1998). What was
    seen is slowly forgotten, so that a request that has stopped drafting is tried again.

    information, pull: float64 by source; pull is log_odds times the precision. The native library
    writes them in place.
    """

    _fields_ = (
        ("greedy", ctypes.c_int64),
        ("information", ctypes.c_double * 2),
        ("pull", ctypes.c_double * 2),
    )
    greedy: int
    information: ctypes.Array[ctypes.c_double]
    pull: ctypes.Array[ctypes.c_double]

    def precision(self, source: int, variance: float = SPREAD**2) -> float:
        """variance: of the requests' shifts, as it is known now."""
        return 1.0 / variance + self.information[source]

    def log_odds(self, source: int, variance: float = SPREAD**2) -> float:
        return self.pull[source] / self.precision(source, variance)

    def deviation(self, source: int, variance: float = SPREAD**2) -> float:
        return float(self.precision(source, variance) ** -0.5)

    def forget(self) -> None:
        """Once a round."""
        for source in (HEAD, TEXT):
            self.information[source] *= REQUEST_MEMORY
            self.pull[source] *= REQUEST_MEMORY

    def observe(self, source: int, variance: float, surplus: float, information: float) -> None:
        """Of a round's judged candidates: how many more were drawn than expected, and the sum of
        p (1 - p).
        """
        log_odds = self.log_odds(source, variance)
        self.information[source] += information
        self.pull[source] = self.precision(source, variance) * log_odds + surplus


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is expected of a round's candidates, float64 [B, C]: conditional on the parent by the
    head's counts, the same with text's, and of the whole path from the root. cells int64 [B, C]:
    where each is counted as the head's.
    """

    conditional: np.ndarray
    weighed: np.ndarray
    paths: np.ndarray
    cells: np.ndarray


class Acceptance:
    """Counts of judged and drawn candidates by source, and the variance of requests' shifts.

    judged, drawn: float64, the head's [2, depths, bins] and text's [2, kinds, companies, opinions];
    the first axis is sampled or greedy. variance: float64 [2].
    """

    def __init__(self) -> None:
        shapes = (2, NUM_DEPTHS, NUM_BINS), (2, NUM_KINDS, NUM_COMPANIES, NUM_OPINIONS)
        self.judged = tuple(np.zeros(shape) for shape in shapes)
        self.drawn = tuple(np.zeros(shape) for shape in shapes)
        # learned by expectation maximization (empirical Bayes)
        self.variance = np.full(2, SPREAD**2)

    def log_odds(self, source: int, requests: Sequence[RequestAcceptance]) -> np.ndarray:
        """Their shifts, float64 [B]."""
        variance = float(self.variance[source])
        return np.array([one.log_odds(source, variance) for one in requests])

    def head_table(self) -> np.ndarray:
        """What the counts say of the head's cells, float64 [2 * depths * bins]."""
        judged, drawn = self.judged[HEAD], self.drawn[HEAD]
        pooled = corrected(FIRST_OF_BINS, drawn.sum(1, keepdims=True), judged.sum(1, keepdims=True))
        table: np.ndarray = np.minimum(corrected(pooled, drawn, judged), LARGEST).reshape(-1)
        return table

    def text_table(self) -> np.ndarray:
        """What they say of text's, float64 [2 * NUM_CELLS]."""
        judged, drawn = self.judged[TEXT], self.drawn[TEXT]
        of_kind = corrected(FIRST_OF_TEXT, drawn.sum(-1), judged.sum(-1))
        pooled = 1 - (1 - OPINION_SCALE * of_kind[..., None]) * (1 - OPINION_LIFT)
        table: np.ndarray = np.minimum(corrected(pooled, drawn, judged), LARGEST).reshape(-1)
        return table

    def calibrate(self, proposals: Proposals, requests: Sequence[RequestAcceptance]) -> Calibration:
        """All probabilities of candidates are within (0, 1), and a path's is below its parent's."""
        cells = head_cells(proposals, requests)
        conditional = shifted(self.head_table()[cells], self.log_odds(HEAD, requests))
        weighed = conditional
        if proposals.text is not None:
            weighed = self._weighed(proposals, conditional, requests)
        paths = path_probs(weighed, proposals.parents, proposals.depths)
        return Calibration(conditional, weighed, paths, cells)

    def _weighed(
        self, proposals: Proposals, conditional: np.ndarray, requests: Sequence[RequestAcceptance]
    ) -> np.ndarray:
        """What the head's counts say of candidates [B, C], corrected by what text says."""
        assert proposals.text is not None
        cells, parents, table = proposals.text.cells, proposals.parents, self.text_table()
        factors = np.exp(self.log_odds(TEXT, requests)).tolist()
        weighed = np.where(parents == PAD, 0.0, conditional)
        for b, c in np.argwhere(cells >= 0).tolist():
            given = float(table[requests[b].greedy * NUM_CELLS + cells[b, c]])
            odds = factors[b] * given
            weighed[b, c] = now = odds / (1.0 - given + odds)
            before = conditional[b, c] if is_proposed(cells[b, c]) else 0.0
            beside = (parents[b] == parents[b, c]) & (cells[b] < 0)
            weighed[b, beside] *= (1.0 - now) / (1.0 - before)
        return np.minimum(weighed, LARGEST)

    def text_paths(
        self, chains: Sequence[TextChain], request: RequestAcceptance, most: int
    ) -> list[float]:
        """Path probabilities of the candidates of a request's chains without the head, descending;
        at most `most`.
        """
        nodes: dict[tuple[int, ...], tuple[int, int]] = {}  # by path: kind and company
        parents: set[tuple[int, ...]] = set()
        for chain in chains:
            path: tuple[int, ...] = ()
            for token, kind in zip(chain.tokens, chain.kinds, strict=True):
                parent, path = path, (*path, token)
                known = nodes.get(path)
                nodes[path] = (kind, int(parent in parents)) if known is None else (known[0], 2)
                parents.add(parent)
        if not nodes:
            return []
        shift = math.exp(request.log_odds(TEXT, float(self.variance[TEXT])))
        table, start = self.text_table(), request.greedy * NUM_CELLS
        found: dict[tuple[int, ...], float] = {(): 1.0}
        for path, (kind, company) in nodes.items():
            given = float(table[start + cell_of(kind, company, 0)])
            found[path] = found[path[:-1]] * (shift * given / (1.0 - given + shift * given))
        del found[()]
        return sorted(found.values(), reverse=True)[:most]

    def observe(
        self,
        proposals: Proposals,
        calibration: Calibration,
        emitted: Sequence[Sequence[int]],
        requests: Sequence[RequestAcceptance],
    ) -> None:
        """emitted: the tokens of each request in this round; calibration: what was expected."""
        judged, drawn = judge(proposals, emitted)
        if (text := proposals.text) is None:
            self._count(HEAD, calibration.conditional, calibration.cells, (judged, drawn), requests)
            return
        greedy = np.array([[one.greedy] for one in requests])
        for source, conditional, cells, own in (
            (HEAD, calibration.conditional, calibration.cells, proposals.scores > UNPROPOSED),
            (TEXT, calibration.weighed, text.cells + greedy * NUM_CELLS, text.cells >= 0),
        ):
            self._count(source, conditional, cells, (judged & own, drawn & own), requests)

    def _count(
        self,
        source: int,
        conditional: np.ndarray,
        cells: np.ndarray,
        seen: tuple[np.ndarray, np.ndarray],
        requests: Sequence[RequestAcceptance],
    ) -> None:
        """seen: bool [B, C], which of the source's candidates were judged and drawn. Nothing is
        forgotten in a round that says nothing.
        """
        judged, drawn = seen
        if not judged.any():
            return
        variance = float(self.variance[source])
        surplus = (drawn.sum(1) - (conditional * judged).sum(1)).tolist()
        information = (conditional * (1 - conditional) * judged).sum(1).tolist()
        shown = []
        of_lines = np.any(judged, axis=1).tolist()
        for request, is_judged, *own in zip(requests, of_lines, surplus, information, strict=True):
            if is_judged:
                request.observe(source, variance, *own)
                shift = request.log_odds(source, variance)
                shown.append(shift**2 + 1 / request.precision(source, variance))
        self.variance[source] += (1 - MEMORY) * (sum(shown) / len(shown) - variance)
        for counts, places in ((self.judged, cells[judged]), (self.drawn, cells[drawn])):
            counts[source][...] *= MEMORY
            np.add.at(counts[source].reshape(-1), places, 1.0)


def corrected(first: np.ndarray, drawn: np.ndarray, judged: np.ndarray) -> np.ndarray:
    """What is believed at first, corrected by counts."""
    believed: np.ndarray = (drawn + BELIEF * first) / (judged + BELIEF)
    return believed


def shifted(probabilities_BN: np.ndarray, log_odds_B: np.ndarray) -> np.ndarray:
    """An average request's probabilities as those of requests that differ, [B, N]."""
    odds_BN = np.exp(log_odds_B)[:, None] * probabilities_BN
    of_requests: np.ndarray = odds_BN / (1.0 - probabilities_BN + odds_BN)
    return of_requests


def head_cells(proposals: Proposals, requests: Sequence[RequestAcceptance]) -> np.ndarray:
    """Where in the head's flat table each candidate is, int64 [B, C]."""
    above = _rooted(proposals.scores, 0.0).take(_above(proposals.parents))
    roots = np.sqrt(np.maximum(above - proposals.scores, 0.0))
    bins = roots.astype(np.float64) * BINS_PER_UNIT
    start = (np.minimum(proposals.depths, NUM_DEPTHS) - 1) * NUM_BINS
    greedy = np.array([[request.greedy * NUM_DEPTHS * NUM_BINS] for request in requests])
    cells: np.ndarray = np.minimum(bins, NUM_BINS - 1).astype(np.int64) + start + greedy
    return cells


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
