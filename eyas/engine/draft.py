"""The draft head for inference: the layer of `model/head.py` over the paged cache, and its trees.

Two ways to the same values, as for the target: PyTorch operators on any device, and on a CPU
`native_draft`. The caller gives columns, hidden states and page tables.

    column c of the draft's cache    feature of x_0 .. x_{c-1}, embedding of x_c -> proposes x_{c+1}

An entry lies in the column of its token, so that a page holds what follows from the tokens up to
its end, for the draft as for the target; it is rotated by c - 1, the position of its feature.
Column 0 is empty.

Letters: B requests, K draft steps, k tree_topk, w width, H hidden, W draft vocabulary, M rows,
C candidates, P pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from eyas.engine.sampling import draw_key, exponentials
from eyas.engine.tree import Speculation, goes_on
from eyas.errors import MismatchError
from eyas.gguf.blocks import BlockMatrix
from eyas.model.block import Block, Linear, PositionTables, rms_norm
from eyas.model.config import HeadConfig, TargetShape, check_head
from eyas.model.draws import Draws, DrawState
from eyas.model.native import MAX_HEAD_DIM, runs
from eyas.model.native_draft import NativeDraft
from eyas.model.packed import in_eight_bits
from eyas.model.rows import (
    FeatureCache,
    Growth,
    PagedCache,
    Proposals,
    Roots,
    Rows,
    prompt_rows,
    rows_of,
    slots_of,
)
from eyas.model.target import PAGE_SIZE

CUT_OFF = -40.0  # added to the scores of what min_p cuts

WITHOUT_NATIVE = "set EYAS_NATIVE=0 to run target and head in PyTorch's operators"


def to_device(array: np.ndarray, device: str) -> torch.Tensor:
    """An array on the device."""
    tensor = torch.from_numpy(array)
    return tensor if device == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class HeadTarget(Protocol):
    """What a head takes of its target: a `Target` has it, and `evaluate.walks.TargetMatrices`."""

    @property
    def config(self) -> TargetShape: ...
    @property
    def lm_head_sha256(self) -> str: ...
    @property
    def embed_tokens(self) -> torch.Tensor: ...
    @property
    def embeddings(self) -> torch.Tensor | BlockMatrix: ...
    @property
    def lm_head(self) -> torch.Tensor: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def is_native(self) -> bool: ...


def check_branches(config: HeadConfig, speculation: Speculation) -> None:
    """Raise MismatchError where a step has more branches than the head has tokens."""
    if config.draft_vocab_size < speculation.tree_topk:
        raise MismatchError(
            f"the head has {config.draft_vocab_size} tokens to draft, the tree has "
            f"{speculation.tree_topk} branches",
            f"take a tree of fewer branches: {speculation} are draft steps, branches, tokens",
        )


class DraftLayers:
    """The head in PyTorch operators."""

    def __init__(
        self, config: HeadConfig, tensors: dict[str, torch.Tensor], target: HeadTarget
    ) -> None:
        """tensors of the target's dtype and device."""
        prefix = "midlayer."
        layer = {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        self._config, self._eps = config, config.rms_norm_eps
        self._embed_tokens = tensors.get("embed_tokens.weight", target.embed_tokens)
        self._embed_norm, self._hidden_norm = (
            layer["input_layernorm.weight"],
            layer["hidden_norm.weight"],
        )
        self._block, self._fc = Block(config, layer, 0), Linear(tensors["fc.weight"])
        self._lm_head = Linear(tensors.get("lm_head.weight", target.lm_head))
        self._norm, self._tensors = tensors["norm.weight"], tensors
        length = target.config.max_position_embeddings + 64
        self._positions = PositionTables(config, length, target.dtype, target.device)

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

    def step(self, rows: Rows, h: torch.Tensor, cache: PagedCache) -> torch.Tensor:
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


class Draft:
    """A head on its target: shares the target's embeddings, dtype and device."""

    def __init__(
        self, config: HeadConfig, tensors: dict[str, torch.Tensor], target: HeadTarget
    ) -> None:
        """tensors: as `read_head` gives them.

        Raises MismatchError if the head was made for another target.
        """
        check_head(config, target.config, target.lm_head_sha256)
        if target.is_native and not runs(config):
            raise MismatchError(
                f"a head of head_dim {config.head_dim} has no native path",
                f"{WITHOUT_NATIVE}, or train a head of a head_dim of {MAX_HEAD_DIM} at most",
            )
        self.config, self.device, self._dtype = config, target.device, target.dtype
        cast = {
            name: tensor.to(target.device, target.dtype)
            for name, tensor in tensors.items()
            if name not in ("d2t", "t2d")
        }
        d2t_offset = tensors["d2t"].cpu()
        self._native: NativeDraft | None = None
        if target.is_native:
            own = {**cast, "d2t": d2t_offset}
            # Half the bytes to read in every step; what drafts lose by it, verification never sees.
            blocks = in_eight_bits(cast) if target.dtype == torch.bfloat16 else None
            own_head = cast.get("lm_head.weight")
            lm_head = target.lm_head if own_head is None else own_head
            self._native = NativeDraft(
                config, own, target.embeddings, lm_head, target.dtype, blocks
            )
        else:
            self._layers = DraftLayers(config, cast, target)
            self._target_ids_W = (torch.arange(config.draft_vocab_size) + d2t_offset).to(
                target.device
            )

    def new_cache(self, num_pages: int, page_size: int = PAGE_SIZE) -> PagedCache:
        width = self.config.slot_width
        return PagedCache(1, num_pages, page_size, width, self._dtype, self.device)

    def extend(self, rows: Rows, aux_hidden: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        """The target's features [M, 3 * Ht] of the columns before the rows' -> outputs [M, H]."""
        if self._native is not None:
            return self._native.extend(rows, aux_hidden, cache)
        return self._layers.step(rows, self._layers.fuse(aux_hidden), cache)

    def step(self, rows: Rows, h: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        """Outputs [M, H] of the rows' parents -> the rows' own [M, H]."""
        if self._native is not None:
            return self._native.step(rows, h, cache)
        return self._layers.step(rows, h, cache)

    def proposals(
        self,
        h: torch.Tensor,
        tree_topk: int,
        draws: Draws | None = None,
        place: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [R, H] -> the k = tree_topk best next tokens of each, and their log-probs.

        Target ids, int64 [R, k]; float32 [R, k]. draws: how each row's request draws, None for the
        argmax; the token is the one `place` behind the next. The target's draw is then guessed with
        the random numbers that it will be drawn with, and the log-probs are those of the guesses.
        """
        if self._native is not None:
            return self._native.proposals(h, tree_topk, draws, place)
        log_probs = self._layers.logits(h).float().log_softmax(-1)
        for row, draw in zip(log_probs, draws or (), strict=False):
            if draw is not None and draw.temperature > 0:
                row[:] = guessed(row, self._target_ids_W, draw, place)
        # A stable sort, not topk, so that of equal tokens the smaller draft id goes first.
        best, ids = log_probs.sort(dim=-1, descending=True, stable=True)
        return self._target_ids_W[ids[:, :tree_topk]], best[:, :tree_topk]

    def enter(self, roots: Roots, cache: PagedCache, features: FeatureCache) -> None:
        """Make the entries of columns starts[b] .. lens[b] from the features before each."""
        rows, aux_hidden = self._entries(roots, cache, features)
        if self._native is not None:
            self._native.enter(rows, aux_hidden, cache)
        else:
            self.extend(rows, aux_hidden, cache)

    def catch_up(self, roots: Roots, cache: PagedCache, features: FeatureCache) -> torch.Tensor:
        """`enter`, and the outputs [B, H] at the last of each request's entries."""
        h = self.extend(*self._entries(roots, cache, features), cache)
        ends = np.cumsum(np.array(roots.lens) + 1 - np.array(roots.starts))
        return h.index_select(0, to_device(ends - 1, self.device))

    def _entries(
        self, roots: Roots, cache: PagedCache, features: FeatureCache
    ) -> tuple[Rows, torch.Tensor]:
        """Columns starts[b] .. lens[b] as rows, and the features [M, 3 * Ht] before each."""
        size, table = cache.page_size, roots.page_table
        tokens = iter(roots.tokens)
        spans = [range(start, end + 1) for start, end in zip(roots.starts, roots.lens, strict=True)]
        by_request = [list(islice(tokens, len(span))) for span in spans]
        rows = prompt_rows(by_request, roots.starts, table, size, self.device, first_column=1)
        request = np.repeat(np.arange(len(spans)), list(map(len, spans)))
        before = np.concatenate([np.arange(span.start, span.stop) for span in spans]) - 1
        slots = slots_of(table, request, before, size)
        return rows, features.read(to_device(slots, self.device))

    def grow(
        self,
        roots: Roots,
        cache: PagedCache,
        features: FeatureCache,
        growth: Growth,
        thresholds: Sequence[float],
        draws: Draws | None = None,
    ) -> Proposals:
        """`catch_up`, then `propose` from the best of what it gives."""
        if self._native is not None:
            return self._native.grow(roots, cache, features, growth, thresholds, draws)
        h = self.catch_up(roots, cache, features)
        first = self.proposals(h, growth.tree_topk, draws)
        return self.propose(roots, h, first, cache, growth, thresholds, draws)

    def propose(
        self,
        roots: Roots,
        h_BH: torch.Tensor,
        first: tuple[torch.Tensor, torch.Tensor],
        cache: PagedCache,
        growth: Growth,
        thresholds: Sequence[float],
        draws: Draws | None = None,
    ) -> Proposals:
        """Grow B trees by up to K - 1 levels behind the roots, of which `lens` and
        `page_table` are read.

        h_BH: the outputs of these last entries; first: the `proposals` from them, the candidates of
        depth 1. The tree's own entries go behind them and are overwritten later. thresholds [K]:
        when to stop, see `tree.goes_on`. Source: EAGLE-2, arXiv 2406.16858, section 4.1.
        """
        if self._native is not None:
            return self._native.propose(roots, h_BH, first, cache, growth, thresholds, draws)
        K, k, width = growth
        ids_Bk, log_probs_Bk = first[0].cpu().numpy(), first[1].cpu().numpy()
        tree = _TreeGrowth(ids_Bk, log_probs_Bk, width)
        starts, page_table = np.asarray(roots.lens, dtype=np.int64), roots.page_table
        h = h_BH.repeat_interleave(width, 0)
        for level in range(K - 1):
            if not goes_on(tree.frontier()[1], thresholds, level):
                break
            rows = tree.rows(level, starts, page_table, cache.page_size, self.device)
            h = self.step(rows, h, cache)
            of_rows = None if draws is None else [draw for draw in draws for _ in range(width)]
            ids, log_probs = self.proposals(h, k, of_rows, level + 1)
            parents = tree.grow(ids.cpu().numpy(), log_probs.cpu().numpy())
            h = h[torch.from_numpy(parents).to(self.device)]
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
        self, level: int, starts_B: np.ndarray, page_table: np.ndarray, page_size: int, device: str
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
        return rows_of(arrays, page_table, device, first_column=1)

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
