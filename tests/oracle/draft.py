"""The draft head in PyTorch operators, and the growth of its trees in Python: what the native
library computes (`eyas.model.native_draft`), written plainly.

Letters: B requests, K draft steps, k tree_topk, w width, H hidden, W draft vocabulary, M rows,
C candidates, P pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from eyas.engine.draft import Draft, HeadTarget
from eyas.engine.tree import goes_on
from eyas.model.arrays import Array, Arrays, cast
from eyas.model.config import HeadConfig, check_head
from eyas.model.draws import Draws, DrawState
from eyas.model.rows import (
    FeatureCache,
    Growth,
    PagedCache,
    Proposals,
    Roots,
    Rows,
    rows_of,
    slots_of,
)
from eyas.operators.tensors import array_of, tensor_of, tensors_of
from tests.oracle.block import Block, Linear, PositionTables, rms_norm
from tests.oracle.rows import TensorCache, TensorRows
from tests.oracle.sampling import draw_key, exponentials

CUT_OFF = -40.0  # added to the scores of what min_p cuts


class DraftLayers:
    """The head in PyTorch operators."""

    def __init__(
        self, config: HeadConfig, tensors: dict[str, torch.Tensor], target: HeadTarget
    ) -> None:
        """tensors of the target's dtype, its embeddings and lm_head where the head has none."""
        prefix = "midlayer."
        layer = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        self._config, self._eps = config, config.rms_norm_eps
        self._embed_tokens = tensors["embed_tokens.weight"]
        self._embed_norm, self._hidden_norm = (
            layer["input_layernorm.weight"],
            layer["hidden_norm.weight"],
        )
        self._block, self._fc = Block(config, layer, 0), Linear(tensors["fc.weight"])
        self._lm_head = Linear(tensors["lm_head.weight"])
        self._norm, self._tensors = tensors["norm.weight"], tensors
        length = target.config.max_position_embeddings + 64
        self._positions = PositionTables(config, length, tensors["fc.weight"].dtype)

    def fuse(self, aux_hidden: torch.Tensor) -> torch.Tensor:
        """Target features [M, 3 * Ht] -> [M, H]."""
        if self._config.fc_norm:
            streams = [
                rms_norm(stream, self._tensors[f"fc_norm.{number}.weight"], self._eps)
                for number, stream in enumerate(aux_hidden.chunk(3, dim=-1))
            ]
            aux_hidden = torch.cat(streams, dim=-1)
        if self._config.norm_before_fc:
            aux_hidden = rms_norm(aux_hidden, self._tensors["input_norm.weight"], self._eps)
        return self._fc(aux_hidden)

    def step(self, rows: TensorRows, h: torch.Tensor, cache: TensorCache) -> torch.Tensor:
        """Features or previous outputs [M, H] -> outputs [M, H]: what is fed back."""
        rows = replace(rows, window=self._config.sliding_window)
        normed = rms_norm(h, self._hidden_norm, self._eps)
        embedded = rms_norm(
            F.embedding(rows.token, self._embed_tokens), self._embed_norm, self._eps
        )
        residual = normed if self._config.norm_before_residual else h
        h = self._block(
            torch.cat((embedded, normed), dim=-1),
            residual,
            self._positions.place(rows, cache.page_size),
            cache,
        )
        return rms_norm(h, self._norm, self._eps) if self._config.norm_output else h

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        return self._lm_head(h if self._config.norm_output else rms_norm(h, self._norm, self._eps))


class OperatorDraft(Draft):
    """A draft whose steps are `DraftLayers`."""

    def __init__(self, config: HeadConfig, tensors: Arrays, target: HeadTarget) -> None:
        check_head(config, target.config, target.lm_head_sha256)
        self.config, self.dtype = config, target.dtype
        maps = ("d2t", "t2d")
        lent = {"embed_tokens.weight": target.embed_tokens, "lm_head.weight": target.lm_head}
        own = {name: one for name, one in tensors.items() if name not in maps}
        given = {name: cast(one, target.dtype) for name, one in {**lent, **own}.items()}
        self._layers = DraftLayers(config, tensors_of(given), target)
        self._target_ids_W = np.arange(config.draft_vocab_size) + tensors["d2t"]

    def extend(self, rows: Rows, aux_hidden: Array, cache: PagedCache) -> Array:
        with torch.inference_mode():
            h = self._layers.fuse(tensor_of(cast(aux_hidden, self.dtype)))
            return self._step(rows, h, cache)

    def step(self, rows: Rows, h: Array, cache: PagedCache) -> Array:
        return self._step(rows, tensor_of(cast(h, self.dtype)), cache)

    @torch.inference_mode()
    def _step(self, rows: Rows, h: torch.Tensor, cache: PagedCache) -> Array:
        return array_of(self._layers.step(TensorRows.of(rows), h, TensorCache(cache)))

    @torch.inference_mode()
    def proposals(
        self, h: Array, tree_topk: int, draws: Draws | None = None, place: int = 0
    ) -> tuple[Array, Array]:
        logits = self._layers.logits(tensor_of(cast(h, self.dtype)))
        log_probs = logits.float().log_softmax(-1)
        for row, draw in zip(log_probs, draws or (), strict=False):
            if draw is not None and draw.temperature > 0:
                row[:] = guessed(row, tensor_of(self._target_ids_W), draw, place)
        # A stable sort, not topk, so that of equal tokens the smaller draft id goes first.
        best, ids = log_probs.sort(dim=-1, descending=True, stable=True)
        return self._target_ids_W[ids[:, :tree_topk].numpy()], best[:, :tree_topk].numpy()

    def enter(self, roots: Roots, cache: PagedCache, features: FeatureCache) -> None:
        self.extend(*self._entries(roots, cache, features), cache)

    def grow(
        self,
        roots: Roots,
        cache: PagedCache,
        features: FeatureCache,
        growth: Growth,
        thresholds: Sequence[float],
        draws: Draws | None = None,
    ) -> Proposals:
        h = self.catch_up(roots, cache, features)
        first = self.proposals(h, growth.tree_topk, draws)
        return self.propose(roots, h, first, cache, growth, thresholds, draws)

    def propose(
        self,
        roots: Roots,
        h_BH: Array,
        first: tuple[Array, Array],
        cache: PagedCache,
        growth: Growth,
        thresholds: Sequence[float],
        draws: Draws | None = None,
    ) -> Proposals:
        K, k, width = growth
        tree = _TreeGrowth(*first, width)
        starts, page_table = np.asarray(roots.lens, dtype=np.int64), roots.page_table
        h = h_BH.repeat(width, 0)
        for level in range(K - 1):
            if not goes_on(tree.frontier()[1], thresholds, level):
                break
            rows = tree.rows(level, starts, page_table, cache.page_size)
            h = self.step(rows, h, cache)
            of_rows = None if draws is None else [draw for draw in draws for _ in range(width)]
            h = h[tree.grow(*self.proposals(h, k, of_rows, level + 1))]
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
    """The candidates so far and the frontier of the next level: the w best of the last."""

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
        """Tokens and scores of the frontier [B, w]."""
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
