"""How likely the target accepts a draft: the draft's own probability, corrected by counts.

    conditional  P(candidate drawn | its parent drawn)
    path         product of the conditionals from the root: never above the parent's

A candidate, verified or not, is judged when its parent was drawn: the next drawn token says which
child it was. The ratio of drawn to expected candidates of the head, counted by depth, corrects a
head's confidence. A candidate of text has the probability of its kind of match.

Letters: B requests with candidates, C candidates of each, D longest answer of the round, K draft
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eyas.engine.text import FIRST_ACCEPTANCE, NUM_KINDS
from eyas.model.rows import HEAD, TEXT, Proposals

BELIEF = 5.0  # weight of the first belief, in candidates
MEMORY = 0.9995  # decay of the counts in a round
LARGEST = 0.995  # probability
SOURCES = ("head", "text", "both")

_FIRST_OF_TEXT = np.repeat(FIRST_ACCEPTANCE, 2)  # by kind


@dataclass(frozen=True, slots=True)
class Calibration:
    """above int64 [B, C]: each candidate's parent as a place in an array [B, C + 1] whose last
    column is the root. own [B, C]: the draft's conditionals. paths float64 [B, C]: calibrated path
    probabilities.
    """

    above: np.ndarray
    own: np.ndarray
    paths: np.ndarray


class Acceptance:
    """expected, drawn float64 [K]: judged candidates of the head. text_judged, text_drawn float64
    [NUM_KINDS]: those of text.
    """

    def __init__(self, num_draft_steps: int) -> None:
        self._of_heads = np.zeros((2, num_draft_steps))
        self._of_texts = np.zeros((2, NUM_KINDS))
        self.expected, self.drawn = self._of_heads
        self.text_judged, self.text_drawn = self._of_texts
        self._ratios: np.ndarray | None = None
        self._conditional: np.ndarray | None = None

    def of_text(self) -> np.ndarray:
        """Conditionals of text's candidates by kind, float64 [NUM_KINDS]."""
        if self._conditional is None:
            drawn = self.text_drawn + BELIEF * _FIRST_OF_TEXT
            self._conditional = np.minimum(drawn / (self.text_judged + BELIEF), LARGEST)
        return self._conditional

    def ratios(self) -> np.ndarray:
        """Drawn by expected candidates of the head by depth, float64 [K]."""
        if self._ratios is None:
            of_all = (self.drawn.sum() + BELIEF) / (self.expected.sum() + BELIEF)
            self._ratios = (self.drawn + BELIEF * of_all) / (self.expected + BELIEF)
        return self._ratios

    def calibrate(self, proposals: Proposals) -> Calibration:
        scores, parents, kinds = proposals.scores, proposals.parents, proposals.kinds
        B, C = scores.shape
        above = np.where(parents < 0, C, parents).astype(np.int64)
        if B > 1:
            above += np.arange(0, B * (C + 1), C + 1)[:, None]
        own = np.exp(scores - _with_root(scores, 0.0).take(above))
        if kinds is not None:
            own *= proposals.proposed_by(HEAD)
        conditional = own * self.ratios().take(self._levels(proposals.depths))
        if kinds is not None:
            wrong = 1.0 - self.of_text().take(kinds) * proposals.proposed_by(TEXT)
            conditional = 1.0 - (1.0 - np.minimum(conditional, LARGEST)) * wrong
        conditional = np.minimum(conditional, LARGEST)
        longest = int(proposals.depths.max(initial=1))
        return Calibration(above, own, along_paths(conditional, above, longest))

    def observe(
        self, proposals: Proposals, calibration: Calibration, emitted: Sequence[Sequence[int]]
    ) -> list[int]:
        """Count a round. emitted: each request's tokens. Returns the accepted drafts of each of
        SOURCES.
        """
        kinds, depths = proposals.kinds, proposals.depths
        judged, drawn, accepted = judge(proposals, calibration.above, emitted)
        is_heads = proposals.proposed_by(HEAD)
        level, K = self._levels(depths), len(self.drawn)
        self._ratios = self._conditional = None
        self._of_heads *= MEMORY
        self.expected += np.bincount(level, (calibration.own * judged).sum(0), K)
        self.drawn += np.bincount(level, (is_heads & drawn).sum(0), K)
        num_accepted = int(np.count_nonzero(accepted))
        if kinds is None:
            return [num_accepted, 0, 0]
        is_texts = proposals.proposed_by(TEXT)
        self._of_texts *= MEMORY
        for counts, those in ((self.text_judged, judged), (self.text_drawn, drawn)):
            counts += np.bincount(kinds[those & is_texts], minlength=NUM_KINDS)
        if num_accepted == 0:
            return [0, 0, 0]
        of_text = int(np.count_nonzero(accepted & is_texts))
        both = int(np.count_nonzero(accepted & is_texts & is_heads))
        return [num_accepted - of_text, of_text - both, both]

    def _levels(self, depths: np.ndarray) -> np.ndarray:
        """Where these depths are counted: text's chains may be deeper than K."""
        levels: np.ndarray = np.minimum(depths, len(self.drawn)) - 1
        return levels


def along_paths(own: np.ndarray, above: np.ndarray, longest: int) -> np.ndarray:
    """Products [B, C] of own [B, C] over each candidate's path from the root: of numbers, or of
    bools. above: of `Calibration`. longest: depth of the longest path. Each step doubles the
    multiplied part of a path.
    """
    B, C = own.shape
    paths, jump = _with_root(own, 1), np.empty((B, C + 1), dtype=np.int64)
    jump[:, :C] = above
    jump[:, C] = np.arange(C, B * (C + 1), C + 1)  # the root is above itself
    for step in range((longest - 1).bit_length()):
        if step:
            jump = jump.take(jump)
        paths = paths * paths.take(jump)
    return paths[:, :C]


def judge(
    proposals: Proposals, above: np.ndarray, emitted: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Three bool [B, C]: candidates whose parent was drawn; those drawn themselves; of these the
    accepted drafts, all but a request's last token.
    """
    lengths = [len(row) for row in emitted]
    depth, longest = int(proposals.depths.max()), max(lengths)
    emitted_BD = np.full((len(emitted), max(depth, longest)), -2)
    for b, row in enumerate(emitted):
        emitted_BD[b, : len(row)] = row
    following = emitted_BD[:, proposals.depths - 1]
    # candidates deeper than the answer were not drawn
    follows = proposals.tokens == following
    if proposals.sources is not None:
        follows &= proposals.sources > 0
    drawn = along_paths(follows, above, max(1, min(depth, longest)))
    judged = _with_root(drawn, True).take(above) & (following >= 0)
    return judged, drawn, drawn & (proposals.depths < np.array(lengths)[:, None])


def _with_root(values: np.ndarray, root: float) -> np.ndarray:
    """[B, C] -> [B, C + 1], the root's column last."""
    B, C = values.shape
    rooted = np.empty((B, C + 1), dtype=values.dtype)
    rooted[:, :C] = values
    rooted[:, C] = root
    return rooted
