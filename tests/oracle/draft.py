"""The growth of a head's trees in Python, and its guesses of what the target draws: what the native
library computes (`eyas.model.native_draft`), written plainly. A step of the head is in
tests/plain_eagle.py.

Letters: B requests, K draft steps, k tree_topk, w width, H hidden, W draft vocabulary, M rows,
C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from eyas.engine.tree import goes_on
from eyas.model.arrays import Array
from eyas.model.draws import Draws, DrawState
from eyas.model.rows import Growth, PagedCache, Proposals, Roots, Rows, rows_of, slots_of
from tests.oracle.sampling import draw_key, exponentials

CUT_OFF = -40.0  # added to the scores of what min_p cuts


class Steps(Protocol):
    """Steps of a draft, and what their outputs propose; as `NativeDraft` has them."""

    def step(self, rows: Rows, h: Array, cache: PagedCache) -> Array: ...

    def proposals(
        self, h: Array, tree_topk: int, draws: Draws | None = None, place: int = 0
    ) -> tuple[Array, Array]: ...


def grown(
    draft: Steps,
    roots: Roots,
    h_BH: Array,
    first: tuple[Array, Array],
    cache: PagedCache,
    growth: Growth,
    thresholds: Sequence[float],
    draws: Draws | None = None,
) -> Proposals:
    """The trees of all requests, a level of them in each step of the draft."""
    K, k, width = growth
    tree = _TreeGrowth(*first, width)
    starts, page_table = np.asarray(roots.lens, dtype=np.int64), roots.page_table
    h = h_BH.repeat(width, 0)
    for level in range(K - 1):
        if not goes_on(tree.frontier()[1], thresholds, level):
            break
        rows = tree.rows(level, starts, page_table, cache.page_size)
        h = draft.step(rows, h, cache)
        of_rows = None if draws is None else [draw for draw in draws for _ in range(width)]
        h = h[tree.grow(*draft.proposals(h, k, of_rows, level + 1))]
    return tree.proposals()


def guessed(
    log_probs_W: torch.Tensor, ids_W: torch.Tensor, draw: DrawState, place: int
) -> torch.Tensor:
    """Log-probs of what the target draws, float32 [W], from the draft's own of target ids [W].

    The target draws the best of its logit + temperature * Gumbel number; here the draft's own plus
    the same number stands for it, and a softmax says how sure that is. So the less is left to
    chance, the more these are the draft's own.

    Two models that draw with the same Gumbel numbers agree with a probability of (1 - d) / (1 + d)
    or more, d their total variation distance (Daliri, Musco and Suresh, arXiv 2408.07978).
    """
    scores_W = log_probs_W.clone()
    if draw.min_p > 0:
        least = log_probs_W.max() + draw.temperature * math.log(draw.min_p)
        scores_W[log_probs_W < least] += CUT_OFF
    key = draw_key(draw.seed, draw.num_drawn + place)
    numbers_W = torch.from_numpy(exponentials(key, ids_W.cpu().numpy()))
    scores_W -= (draw.temperature * numbers_W.log()).to(scores_W)
    return scores_W.log_softmax(-1)


class _TreeGrowth:
    def __init__(self, ids_Bk: np.ndarray, log_probs_Bk: np.ndarray, width: int) -> None:
        B, self._k = ids_Bk.shape
        self._width = width
        self._tokens, self._scores = [ids_Bk.astype(np.int64)], [log_probs_Bk.astype(np.float32)]
        self._parents = [np.full((B, self._k), -1, dtype=np.int32)]
        self._frontier_Bw = np.tile(np.arange(width), (B, 1))  # candidate indices
        # tree columns of each frontier node's ancestors
        self._seen_Bw = np.zeros((B, width), dtype=np.int64)
        self._requests = np.arange(B)[:, None]

    def frontier(self) -> tuple[np.ndarray, np.ndarray]:
        at = self._requests, self._frontier_Bw
        return np.concatenate(self._tokens, axis=1)[at], np.concatenate(self._scores, axis=1)[at]

    def rows(
        self, level: int, starts_B: np.ndarray, page_table: np.ndarray, page_size: int
    ) -> Rows:
        """The frontier as rows of the draft's forward; marks their own columns as seen."""
        B, width = self._frontier_Bw.shape
        place = level * width + np.arange(width)
        self._seen_Bw = self._seen_Bw | np.left_shift(np.int64(1), place)
        column = (starts_B[:, None] + 1 + place).ravel()
        request = np.repeat(np.arange(B), width)
        arrays = (
            self.frontier()[0].ravel(),
            request,
            np.repeat(starts_B + level, width),
            slots_of(page_table, request, column, page_size),
            np.repeat(starts_B + 1, width),
            self._seen_Bw.ravel(),
        )
        return rows_of(arrays, page_table, first_column=1)

    def grow(self, ids: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
        """Add the k children of every frontier node, and choose the next frontier.

        ids, log_probs: [B * w, k], of the forward of `rows`. Returns, for each node of the next
        frontier, the row of that forward that its parent is in: int64 [B * w].
        """
        (B, width), k = self._frontier_Bw.shape, self._k
        start = sum(level.shape[1] for level in self._tokens)
        above_Bw = self.frontier()[1]
        scores = (above_Bw[:, :, None] + log_probs.reshape(B, width, k)).reshape(B, width * k)
        self._tokens.append(ids.reshape(B, width * k).astype(np.int64))
        self._scores.append(scores.astype(np.float32))
        self._parents.append(np.repeat(self._frontier_Bw, k, axis=1).astype(np.int32))
        best_Bw = np.argsort(-self._scores[-1], axis=1, kind="stable")[:, :width]
        best_Bw.sort(axis=1)
        self._frontier_Bw = start + best_Bw
        self._seen_Bw = self._seen_Bw[self._requests, best_Bw // k]
        parents: np.ndarray = (self._requests * width + best_Bw // k).ravel()
        return parents

    def proposals(self) -> Proposals:
        sizes = [level.shape[1] for level in self._tokens]
        depths = np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes)
        tokens, scores, parents = (
            np.concatenate(one, axis=1) for one in (self._tokens, self._scores, self._parents)
        )
        return Proposals(tokens, scores, parents, depths)
