"""How likely the target accepts a draft that text gives, alone or with the head.

Counts of judged and drawn candidates by kind of the text, the head's opinion and whether other text
disagrees (`graft.py`'s cells), greedy and sampled requests apart, slowly forgotten; and a shift of
each request's own. Knows candidates and what was drawn; no model and no clock.

The head's own counts (`acceptance.py`) go on over all its candidates, whatever text says of them.
What they say of the tokens beside a text's is corrected by one rule: if the head alone gives that
token h and with text it has m, the others share what is left as before, each times (1 - m) / (1 -
h).

Letters: B lines, C candidates a line, N nodes of a tree.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np

from eyas.engine.acceptance import (
    LARGEST,
    Calibration,
    CellCounts,
    RequestAcceptance,
    judge,
    path_probs,
)
from eyas.engine.graft import NUM_CELLS, NUM_COMPANIES, NUM_OPINIONS, cell_of, is_proposed
from eyas.engine.text import FIRST_ACCEPTANCE, NUM_KINDS, TextChain
from eyas.model.library import library, pointers
from eyas.model.rows import PAD, Proposals

_FIRST_COUNT, _POOLED_COUNT = 6.0, 8.0  # weight of what is believed before it is seen; of the kind
# of a kind's acceptance, where the head disagrees, or other text before it; where it agrees, half
# of what would be wrong is right
_DISAGREES, _RIVAL, _AGREES = 0.4, 0.6, 0.5
# of a token that the head proposes too: about what it accepts at each opinion, before it is seen
_HEAD_AGREES = (0.9, 0.55, 0.25, 0.08)


class TextAcceptance:
    """Counts by cell, for greedy and for sampled requests."""

    def __init__(self, native: bool = False) -> None:
        """native: compute in the native library, which must be available."""
        self._native = native
        shape = (2, NUM_KINDS, NUM_COMPANIES, NUM_OPINIONS)
        self._counts = CellCounts(shape)
        kinds = np.repeat(FIRST_ACCEPTANCE, 2)
        self._first = np.stack((kinds, _RIVAL * kinds, 1 - _AGREES * (1 - kinds)), axis=-1)
        self._make_table()

    def paths(
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
        shift, start = math.exp(request.text.log_odds), request.greedy * NUM_CELLS
        found: dict[tuple[int, ...], float] = {(): 1.0}
        for path, (kind, company) in nodes.items():
            given = self._list[start + cell_of(kind, company, 0)]
            found[path] = found[path[:-1]] * shift * given / (1.0 - given + shift * given)
        del found[()]
        return sorted(found.values(), reverse=True)[:most]

    def weigh(
        self,
        proposals: Proposals,
        calibration: Calibration,
        requests: Sequence[RequestAcceptance],
    ) -> Calibration:
        """What the head's counts say of candidates [B, C], corrected by what text says."""
        if self._native:
            return self._weigh_natively(proposals, calibration, requests)
        assert proposals.text is not None
        cells, parents = proposals.text.cells, proposals.parents
        weighed = np.where(parents == PAD, 0.0, calibration.conditional)
        for b, c in np.argwhere(cells >= 0).tolist():
            request = requests[b]
            given = self._list[request.greedy * NUM_CELLS + cells[b, c]]
            odds = math.exp(request.text.log_odds) * given
            weighed[b, c] = now = odds / (1.0 - given + odds)
            before = calibration.conditional[b, c] if is_proposed(cells[b, c]) else 0.0
            beside = (parents[b] == parents[b, c]) & (cells[b] < 0)
            weighed[b, beside] *= (1.0 - now) / (1.0 - before)
        weighed = np.minimum(weighed, LARGEST)
        paths = path_probs(weighed, parents, proposals.depths)
        return Calibration(weighed, paths, calibration.cells)

    def _weigh_natively(
        self,
        proposals: Proposals,
        calibration: Calibration,
        requests: Sequence[RequestAcceptance],
    ) -> Calibration:
        assert proposals.text is not None
        B, C = proposals.tokens.shape
        weighed, paths = np.empty((B, C)), np.empty((B, C))
        inputs = (
            proposals.text.cells,
            proposals.parents,
            self._table,
            np.array([one.greedy for one in requests], dtype=np.uint8),
            np.array([one.text.log_odds for one in requests]),
            calibration.conditional,
        )
        sizes = (ctypes.c_int64 * 4)(B, C, NUM_CELLS, NUM_OPINIONS)
        library().eyas_weigh_text(sizes, LARGEST, pointers(*inputs, weighed, paths))
        return Calibration(weighed, paths, calibration.cells)

    def observe(
        self,
        proposals: Proposals,
        weighed: Calibration,
        emitted: Sequence[Sequence[int]],
        requests: Sequence[RequestAcceptance],
    ) -> None:
        """emitted: the tokens of each line's request in this round; weighed: what was expected."""
        assert proposals.text is not None
        cells, conditional = proposals.text.cells, weighed.conditional
        judged, drawn = judge(proposals, emitted)
        judged &= cells >= 0
        drawn &= cells >= 0
        surplus = (drawn.sum(1) - (conditional * judged).sum(1)).tolist()
        information = (conditional * (1 - conditional) * judged).sum(1).tolist()
        for request, *seen in zip(requests, surplus, information, strict=True):
            request.text.observe(*seen)
        greedy = np.array([[one.greedy * NUM_CELLS] for one in requests])
        places = cells + greedy
        if self._counts.add(places[judged], places[drawn]):
            self._make_table()

    def _make_table(self) -> None:
        judged, drawn = self._counts.judged, self._counts.drawn
        of_kind = (drawn.sum(-1) + _FIRST_COUNT * self._first) / (judged.sum(-1) + _FIRST_COUNT)
        pooled = np.empty(judged.shape)
        pooled[..., 0], pooled[..., 1] = of_kind, _DISAGREES * of_kind
        pooled[..., 2:] = 1 - (1 - of_kind[..., None]) * (1 - np.array(_HEAD_AGREES))
        table = (drawn + _POOLED_COUNT * pooled) / (judged + _POOLED_COUNT)
        self._table = np.minimum(table, LARGEST).reshape(-1)
        self._list: list[float] = self._table.tolist()
