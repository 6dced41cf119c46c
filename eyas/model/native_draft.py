"""A draft head through the C++ library: its entries, its proposals, and whole trees in one call.

The plain versions are tests/plain_eagle.py for a step, and tests/oracle/draft.py for trees.

Letters: M rows, R rows with proposals, B requests, H hidden of the head, Ht of the target, W draft
vocabulary, K draft steps, k tree_topk, C candidates.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from eyas.gguf.blocks import BlockMatrix, quantised
from eyas.gguf.file import Kind
from eyas.model.architecture import LayerKind
from eyas.model.arrays import FLOAT32, Array, Arrays, cast
from eyas.model.config import HeadConfig
from eyas.model.draws import Draws, draw_states
from eyas.model.library import address
from eyas.model.native import DecoderRole, NativeDecoder
from eyas.model.packed import (
    TWO_BIT_RUN,
    Blocks,
    PackedLayer,
    PackedLinear,
    Packing,
    joined_linear,
    quantisable,
    two_bit_rows,
)
from eyas.model.rows import (
    MAX_TREE_COLUMNS,
    FeatureCache,
    Growth,
    PagedCache,
    Proposals,
    Roots,
    Rows,
    prompt_rows,
    slots_of,
)
from eyas.model.structs import STRUCTS

MAX_TOPK = 16
LARGE_FROM = 1 << 24  # weights: fewer stay in the caches
ProposalsCall, GrowthCall = STRUCTS["ProposalsCall"], STRUCTS["Growth"]


class NativeDraft(NativeDecoder):
    """A draft head's extend, step, proposals and growth of trees. Hidden states are float32, and
    fresh with every call.

        column c of the cache    feature of x_0 .. x_{c-1}, embedding of x_c -> proposes x_{c+1}

    An entry lies in the column of its token, so that a page holds what follows from the tokens up
    to its end; it is rotated by c - 1, the position of its feature. Column 0 is empty.
    """

    config: HeadConfig

    def __init__(
        self,
        config: HeadConfig,
        tensors: Arrays,
        embed_tokens: Array | BlockMatrix,
        lm_head_fallback: Array,
        dtype: np.dtype[Any],
        blocks: Blocks | None = None,
    ) -> None:
        """tensors under EAGLE's names; the head's own `embed_tokens` and `lm_head` go before the
        target's. blocks: weights that are multiplied so instead, by the same names.
        """
        layer = "midlayer."
        tensors = {"lm_head.weight": lm_head_fallback, **tensors}
        how = Packing.of(tensors, dtype, blocks)
        layers = [PackedLayer(tensors, layer, how, LayerKind(window=config.sliding_window))]
        outer: dict[str, PackedLinear | Array] = {
            **lm_head_parts(tensors, how),
            "fc": joined_linear(tensors, ["fc"], how),
            "final_norm": tensors["norm.weight"],
            "hidden_norm": tensors[f"{layer}hidden_norm.weight"],
        }
        if config.norm_before_fc:
            outer["features_norm"] = tensors["input_norm.weight"]
        if config.fc_norm:
            outer |= {f"feature_norm_{i}": tensors[f"fc_norm.{i}.weight"] for i in range(3)}
        self._W = len(tensors["lm_head.weight"])
        d2t_offset = tensors.get("d2t")
        target_ids_W = None if d2t_offset is None else np.arange(self._W) + d2t_offset
        shape = {
            "vocab": self._W,
            "is_draft": True,
            "norm_before_residual": config.norm_before_residual,
            "norm_output": config.norm_output,
        }
        role = DecoderRole(shape, {}, (config.rope,))
        embed_tokens = tensors.get("embed_tokens.weight", embed_tokens)
        super().__init__(config, dtype, role, layers, outer, embed_tokens, target_ids_W)

    def extend(self, rows: Rows, aux_hidden: Array, cache: PagedCache) -> Array:
        """The target's features [M, 3 * Ht] of the columns before the rows' -> outputs [M, H].
        Raises IndexError.
        """
        assert aux_hidden.shape == (len(rows), 3 * self.config.hidden_size)
        aux_hidden = np.ascontiguousarray(cast(aux_hidden, self.dtype))
        return self._run(self._lib.eyas_extend, rows, aux_hidden, cache)

    def enter(self, roots: Roots, cache: PagedCache, features: FeatureCache) -> None:
        """Make the entries of columns starts[b] .. lens[b] from the features before each, without
        outputs: in half the time.
        """
        rows, before = self._entries(roots, cache, features)
        self._run(self._lib.eyas_extend, rows, before, cache, has_outputs=False)

    def catch_up(self, roots: Roots, cache: PagedCache, features: FeatureCache) -> Array:
        """`enter`, and the outputs [B, H] at the last of each request's entries."""
        h = self.extend(*self._entries(roots, cache, features), cache)
        last: Array = h[np.cumsum(np.array(roots.lens) + 1 - np.array(roots.starts)) - 1]
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
        slots = slots_of(table, rows.request, rows.position, size)
        return rows, features.read(slots)

    def step(self, rows: Rows, h: Array, cache: PagedCache) -> Array:
        """Outputs [M, H] of the rows' parents -> the rows' own [M, H]. Raises IndexError."""
        assert h.shape == (len(rows), self.config.hidden_size)
        return self._run(self._lib.eyas_step, rows, np.ascontiguousarray(h, FLOAT32), cache)

    def proposals(
        self, h: Array, tree_topk: int, draws: Draws | None = None, place: int = 0
    ) -> tuple[Array, Array]:
        """Outputs [R, H] -> the k = tree_topk best next tokens of each, and their log-probs.

        Target ids, int64 [R, k]; float32 [R, k]. draws: how each row's request draws, None for the
        argmax; the token is the one `place` behind the next. The target's draw is then guessed with
        its own random numbers; the log-probs are those of the guesses.
        """
        assert 0 < tree_topk <= min(MAX_TOPK, self._W)
        assert h.shape[1:] == (self.config.hidden_size,)
        h, R = np.ascontiguousarray(h, FLOAT32), len(h)
        ids, log_probs = np.empty((R, tree_topk), np.int64), np.empty((R, tree_topk), FLOAT32)
        states = draw_states(draws, R)
        call = ProposalsCall(
            h=address(h),
            draws=ctypes.addressof(states),
            place=place,
            R=R,
            k=tree_topk,
            ids=address(ids),
            log_probs=address(log_probs),
        )
        status = self._lib.eyas_proposals(self._handle, call)
        assert status == 0
        return (ids if self._target_ids_W is None else self._target_ids_W[ids]), log_probs

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
        """Grow B trees by up to K - 1 levels behind the roots, of which `lens` and `page_table` are
        read (EAGLE-2, arXiv 2406.16858, section 4.1). Raises IndexError.

        h_BH: the outputs of these last entries; first: the `proposals` from them, the candidates of
        depth 1. The tree's own entries go behind them and are overwritten later. thresholds [K]:
        when to stop, see `engine.tree.goes_on`.
        """
        B = len(roots.lens)
        assert h_BH.shape == (B, self.config.hidden_size)
        assert first[0].shape == first[1].shape == (B, growth[1])
        inputs = {
            "first_ids": np.ascontiguousarray(first[0]),
            "first_log_probs": np.ascontiguousarray(first[1], FLOAT32),
            "h": np.ascontiguousarray(h_BH, FLOAT32),
        }
        return self._grown(self._lib.eyas_propose, roots, cache, growth, thresholds, draws, inputs)

    def grow(
        self,
        roots: Roots,
        cache: PagedCache,
        features: FeatureCache,
        growth: Growth,
        thresholds: Sequence[float],
        draws: Draws | None = None,
    ) -> Proposals:
        """`catch_up`, then `propose` from the best of what it gives, in one call. Raises
        IndexError.
        """
        assert features.data.dtype == self.dtype
        assert features.data.shape == (cache.data.shape[1], 3 * self.config.hidden_size)
        starts, tokens = (np.array(one, dtype=np.int64) for one in (roots.starts, roots.tokens))
        assert len(tokens) == (np.array(roots.lens) + 1 - starts).sum()
        inputs = {"starts": starts, "entered": tokens, "features": features.data}
        return self._grown(self._lib.eyas_grow, roots, cache, growth, thresholds, draws, inputs)

    def _grown(
        self,
        function: Callable[..., int],
        roots: Roots,
        cache: PagedCache,
        growth: Growth,
        thresholds: Sequence[float],
        draws: Draws | None,
        inputs: Mapping[str, np.ndarray],
    ) -> Proposals:
        """inputs: fields of the call that say where the trees begin."""
        K, k, width = growth
        assert 0 < width <= k <= min(MAX_TOPK, self._W)
        assert (K - 1) * width <= MAX_TREE_COLUMNS
        assert len(thresholds) == K
        assert cache.data.dtype == self.dtype
        B, C = len(roots.lens), k + (K - 1) * width * k
        assert len(roots.page_table) == B
        tokens, parents = np.empty((B, C), np.int64), np.empty((B, C), np.int32)
        scores, lens = np.empty((B, C), FLOAT32), np.array(roots.lens, dtype=np.int64)
        page_table = np.ascontiguousarray(roots.page_table, dtype=np.int32)
        states, least = draw_states(draws, B), (ctypes.c_double * K)(*thresholds)
        call = GrowthCall(
            B,
            *growth,
            P=page_table.shape[1],
            page_size=cache.page_size,
            num_slots=cache.data.shape[1],
            lens=address(lens),
            page_table=address(page_table),
            kv=address(cache.data),
            draws=ctypes.addressof(states),
            thresholds=ctypes.addressof(least),
            tokens=address(tokens),
            parents=address(parents),
            scores=address(scores),
            **{name: address(array) for name, array in inputs.items()},
        )
        while (drafted := function(self._handle, call)) < 0:
            self._lengthen(-drafted, max(roots.lens) + K - 2)
        n = k + drafted * width * k
        return Proposals(tokens[:, :n], scores[:, :n], parents[:, :n], _depths(*growth)[:n])

    def _run(
        self,
        function: Callable[..., int],
        rows: Rows,
        inputs: Array,
        cache: PagedCache,
        has_outputs: bool = True,
    ) -> Array:
        h = np.empty((has_outputs * len(rows), self.config.hidden_size), FLOAT32)
        arrays = {"inputs": inputs, "h": h if has_outputs else None}
        self._call(function, "StatesCall", rows, cache, arrays)
        return h


def head_blocks(tensors: Arrays) -> dict[str, BlockMatrix]:
    """The matrices of a head in few bits: half the bytes to read in every step, a third for a large
    head, whose tau is the same in five bits. Verification never sees what drafts lose.
    """
    matrices = quantisable(tensors)
    large = sum(tensor.size for tensor in matrices.values()) >= LARGE_FROM
    lm_head = matrices.pop("lm_head.weight", None)
    kind = Kind.Q5_0 if large else Kind.Q8_0
    blocks = {name: quantised(cast(tensor, FLOAT32), kind) for name, tensor in matrices.items()}
    if lm_head is not None and not is_coarse(lm_head):
        blocks["lm_head.weight"] = quantised(cast(lm_head, FLOAT32), Kind.Q8_0)
    return blocks


def is_coarse(lm_head: Array) -> bool:
    """Whether a draft's lm_head is first read in two bits: a step reads a quarter of it."""
    return lm_head.shape[1] % TWO_BIT_RUN == 0 and lm_head.size >= LARGE_FROM


def lm_head_parts(tensors: Arrays, how: Packing) -> dict[str, PackedLinear | Array]:
    """The lm_head of Outer. Of a coarse one, the logits that may be the best are computed from its
    own numbers.
    """
    weight = tensors["lm_head.weight"]
    if not how.blocks or not is_coarse(weight):
        return {"head": joined_linear(tensors, ["lm_head"], how)}
    coarse = PackedLinear.of_two_bits(two_bit_rows(weight), weight.shape[1], how.threads)
    return {"head": coarse, "head_rows": np.ascontiguousarray(cast(weight, how.dtype))}


@functools.cache
def _depths(K: int, k: int, width: int) -> np.ndarray:
    """int32 [C], of all candidates that K draft steps can give."""
    counts = [k, *[width * k] * (K - 1)]
    depths: np.ndarray = np.repeat(np.arange(1, K + 1), counts).astype(np.int32)
    return depths
