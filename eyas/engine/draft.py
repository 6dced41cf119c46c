"""The draft head for inference: the layer of `operators/head.py` over the paged cache; its trees.

`native_draft` computes; the caller gives columns, hidden states and page tables.

    column c of the draft's cache    feature of x_0 .. x_{c-1}, embedding of x_c -> proposes x_{c+1}

An entry lies in the column of its token, so that a page holds what follows from the tokens up to
its end, for the draft as for the target; it is rotated by c - 1, the position of its feature.
Column 0 is empty.

Letters: B requests, K draft steps, k tree_topk, w width, H hidden, W draft vocabulary, M rows,
C candidates, P pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np

from eyas.engine.tree import Speculation
from eyas.errors import MismatchError
from eyas.gguf.blocks import BlockMatrix
from eyas.model.architecture import MAX_HEAD_DIM
from eyas.model.arrays import BFLOAT16, Array, Arrays, cast
from eyas.model.config import DecoderConfig, HeadConfig, TargetShape, check_head
from eyas.model.draws import Draws
from eyas.model.native_draft import NativeDraft, head_blocks
from eyas.model.rows import (
    FeatureCache,
    Growth,
    PagedCache,
    Proposals,
    Roots,
    Rows,
    prompt_rows,
    slots_of,
)
from eyas.model.target import PAGE_SIZE


class HeadTarget(Protocol):
    """What a head takes of its target: a `Target` has it, and `evaluate.walks.TargetMatrices`."""

    @property
    def config(self) -> TargetShape: ...
    @property
    def lm_head_sha256(self) -> str: ...
    @property
    def embed_tokens(self) -> Array: ...
    @property
    def embeddings(self) -> Array | BlockMatrix: ...
    @property
    def lm_head(self) -> Array: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...


def check_branches(config: HeadConfig, speculation: Speculation) -> None:
    """Raise MismatchError where a step has more branches than the head has tokens."""
    if config.draft_vocab_size < speculation.tree_topk:
        raise MismatchError(
            f"the head has {config.draft_vocab_size} tokens to draft, the tree has "
            f"{speculation.tree_topk} branches",
            f"take a tree of fewer branches: {speculation} are draft steps, branches, tokens",
        )


def check_place(config: HeadConfig, served: HeadConfig) -> None:
    """Raise MismatchError unless a head can go on from the caches of the served one, at the costs
    that were measured with it: it has the same taps and sizes.
    """
    for name in (*DecoderConfig.model_fields, "draft_vocab_size", "taps"):
        if (own := getattr(config, name)) != (there := getattr(served, name)):
            raise MismatchError(
                f"{name} of the head is {own}, of the served one {there}",
                "restart the server with the other head",
            )


class Draft:
    """A head on its target: shares the target's embeddings and dtype."""

    def __init__(self, config: HeadConfig, tensors: Arrays, target: HeadTarget) -> None:
        """tensors: as `read_head` gives them.

        Raises MismatchError if the head was made for another target.
        """
        check_head(config, target.config, target.lm_head_sha256)
        if config.head_dim > MAX_HEAD_DIM:
            raise MismatchError(
                f"a head of head_dim {config.head_dim} has no native path",
                f"train a head of a head_dim of {MAX_HEAD_DIM} at most",
            )
        self.config, self._dtype = config, target.dtype
        own = {
            name: tensor if name == "d2t" else cast(tensor, target.dtype)
            for name, tensor in tensors.items()
            if name != "t2d"
        }
        blocks = head_blocks(own) if target.dtype == BFLOAT16 else None
        own_head = own.get("lm_head.weight")
        lm_head = target.lm_head if own_head is None else own_head
        lent = target.embeddings, lm_head
        self._native = NativeDraft(config, own, *lent, target.dtype, blocks)

    def new_cache(self, num_pages: int, page_size: int = PAGE_SIZE) -> PagedCache:
        return PagedCache(1, num_pages, page_size, self.config.slot_width, self._dtype)

    def extend(self, rows: Rows, aux_hidden: Array, cache: PagedCache) -> Array:
        """The target's features [M, 3 * Ht] of the columns before the rows' -> outputs [M, H]."""
        return self._native.extend(rows, aux_hidden, cache)

    def step(self, rows: Rows, h: Array, cache: PagedCache) -> Array:
        """Outputs [M, H] of the rows' parents -> the rows' own [M, H]."""
        return self._native.step(rows, h, cache)

    def proposals(
        self,
        h: Array,
        tree_topk: int,
        draws: Draws | None = None,
        place: int = 0,
    ) -> tuple[Array, Array]:
        """Outputs [R, H] -> the k = tree_topk best next tokens of each, and their log-probs.

        Target ids, int64 [R, k]; float32 [R, k]. draws: how each row's request draws, None for the
        argmax; the token is the one `place` behind the next. The target's draw is then guessed with
        the random numbers that it will be drawn with, and the log-probs are those of the guesses.
        """
        return self._native.proposals(h, tree_topk, draws, place)

    def enter(self, roots: Roots, cache: PagedCache, features: FeatureCache) -> None:
        """Make the entries of columns starts[b] .. lens[b] from the features before each."""
        self._native.enter(*self._entries(roots, cache, features), cache)

    def catch_up(self, roots: Roots, cache: PagedCache, features: FeatureCache) -> Array:
        """`enter`, and the outputs [B, H] at the last of each request's entries."""
        h = self.extend(*self._entries(roots, cache, features), cache)
        ends = np.cumsum(np.array(roots.lens) + 1 - np.array(roots.starts))
        last: Array = h[ends - 1]
        return last

    def _entries(
        self, roots: Roots, cache: PagedCache, features: FeatureCache
    ) -> tuple[Rows, Array]:
        """Columns starts[b] .. lens[b] as rows, and the features [M, 3 * Ht] before each."""
        size, table = cache.page_size, roots.page_table
        tokens = iter(roots.tokens)
        spans = [range(start, end + 1) for start, end in zip(roots.starts, roots.lens, strict=True)]
        by_request = [list(islice(tokens, len(span))) for span in spans]
        rows = prompt_rows(by_request, roots.starts, table, size, first_column=1)
        request = np.repeat(np.arange(len(spans)), list(map(len, spans)))
        before = np.concatenate([np.arange(span.start, span.stop) for span in spans]) - 1
        slots = slots_of(table, request, before, size)
        return rows, features.read(slots)

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
        return self._native.grow(roots, cache, features, growth, thresholds, draws)

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
        """Grow B trees by up to K - 1 levels behind the roots, of which `lens` and
        `page_table` are read.

        h_BH: the outputs of these last entries; first: the `proposals` from them, the candidates of
        depth 1. The tree's own entries go behind them and are overwritten later. thresholds [K]:
        when to stop, see `tree.goes_on`. Source: EAGLE-2, arXiv 2406.16858, section 4.1.
        """
        return self._native.propose(roots, h_BH, first, cache, growth, thresholds, draws)
