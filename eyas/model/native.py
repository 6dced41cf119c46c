"""Forwards of targets through the C++ library, and what targets and drafts share there.

One call is one forward of the whole model, on threads of its own. Every row's bits depend on the
row alone, not on the rows beside it, the pages or the number of threads: speculation changes no bit
of an answer. tests/oracle/target.py is the plain version.

Letters: M rows, R rows with logits, B requests, H hidden, V target vocabulary, D head dimension, P
pages.
"""

from __future__ import annotations

import ctypes
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from eyas.families import Activation
from eyas.gguf.blocks import BlockMatrix
from eyas.model.architecture import QueryScale, TargetConfig
from eyas.model.arrays import BFLOAT16, FLOAT32, Array, Arrays
from eyas.model.config import DecoderConfig, RopeConfig, Taps
from eyas.model.draws import Draws, draw_states, no_best_logit
from eyas.model.library import address, library
from eyas.model.packed import (
    Blocks,
    PackedLayer,
    PackedLinear,
    Packing,
    joined_linear,
    rows_of_embeddings,
    vector,
)
from eyas.model.rope import rope_table
from eyas.model.rows import FeatureCache, NodesToVerify, PagedCache, Roots, Rows, TargetOutput
from eyas.model.structs import STRUCTS
from eyas.model.threads import num_threads

FIRST_POSITIONS = 4096  # the rotation's table grows with what is asked for
MOST_POSITIONS = 1 << 24  # beyond lies no position of a request
ROWS_AT_ONCE = 4096  # rows of one forward of `hidden`
ROW_COLUMNS = ("token", "request", "position", "slot", "prefix_len", "seen")
DecoderParts, Shape, Factors, Layer, Outer, Positions = (
    STRUCTS[name] for name in ("DecoderParts", "Shape", "Factors", "Layer", "Outer", "Positions")
)
RowsView, Tapped = STRUCTS["RowsView"], STRUCTS["Tapped"]
Lines, Chosen, DrawsOf, VerifyCall = (
    STRUCTS[name] for name in ("Lines", "Chosen", "Draws", "VerifyCall")
)
WRONG = {
    1: "a token is not in the vocabulary",
    3: "a slot, page or prefix is not there",
    4: "logits_of names no row",
}
BAD_POSITION, BAD_LOGITS = 2, 5


@dataclass(frozen=True, slots=True)
class DecoderRole:
    """What a decoder is beside its layers: entries of Shape and Factors that are not a plain
    decoder's, its rotary embeddings and the scales of its queries.
    """

    shape: Mapping[str, int]
    factors: Mapping[str, float]
    ropes: tuple[RopeConfig, ...]
    query_scale: QueryScale | None = None


def target_role(config: TargetConfig, dtype: np.dtype[Any]) -> DecoderRole:
    """dtype: in which the embeddings are scaled."""
    experts = config.experts
    shape = {
        "vocab": config.vocab_size,
        "rotary_dims": config.turned_dims,
        "wide_head_norms": config.qk_norm == "width",
        "activation": get_args(Activation).index(config.activation),
        "conv_kernel": config.conv_kernel or 0,
    }
    if experts is not None:
        shape |= {
            "num_experts": experts.num_experts,
            "experts_per_token": experts.num_experts_per_tok,
            "expert_inner": experts.intermediate_size,
            "renormalises": experts.renormalises,
            "routes_input": experts.routes_input,
            "inner": max(config.intermediate_size, experts.shared_size or 0),
        }
    factors = {
        "score": config.score_scale,
        "softcap": config.attention_softcap or 0.0,
        "embed": float(np.array(config.embed_scale).astype(dtype)),
        "residual": config.residual_scale,
        "logit": config.logit_scale,
        "logit_softcap": config.logit_softcap or 0.0,
    }
    return DecoderRole(shape, factors, config.rotations, config.query_scale)


class NativeDecoder:
    """What targets and drafts share: weights in the library, rotation, the arguments of a call."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: np.dtype[Any],
        role: DecoderRole,
        layers: Sequence[PackedLayer],
        outer: Mapping[str, PackedLinear | Array],
        embed_tokens: Array | BlockMatrix,
        target_ids_W: np.ndarray | None = None,
    ) -> None:
        """outer: the products, norms and plain matrices of Outer that there are."""
        lib, self.dtype = library(), dtype
        self.config, self._lib, self._role = config, lib, role
        self._layers, self._target_ids_W = list(layers), target_ids_W
        self._outer = {
            name: part if isinstance(part, PackedLinear) or part.ndim == 2 else vector(part)
            for name, part in outer.items()
        }
        self._embed, embed_kind = rows_of_embeddings(embed_tokens)
        D = config.head_dim
        shape = {
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "inner": config.intermediate_size,
            "Hq": config.num_attention_heads,
            "Hk": config.num_key_value_heads,
            "D": D,
            "embed_rows": len(self._embed),
            "embed_kind": embed_kind,
            "threads": num_threads(),
            "slot_width": config.slot_width,
            "rotary_dims": D,
        }
        factors = {
            "eps": config.rms_norm_eps,
            "score": 1.0 / math.sqrt(D),
            "embed": 1.0,
            "residual": 1.0,
            "logit": 1.0,
        }
        handles = {
            name: part.handle if isinstance(part, PackedLinear) else address(part)
            for name, part in self._outer.items()
        }
        norms = tuple(handles.pop(f"feature_norm_{i}", None) for i in range(3))
        layer_parts = (Layer * len(layers))(*(layer.parts for layer in layers))
        parts = DecoderParts(
            shape=Shape(**{**shape, **role.shape}),
            factors=Factors(**{**factors, **role.factors}),
            outer=Outer(**handles, feature_norms=norms, embed=address(self._embed)),
            layers=ctypes.addressof(layer_parts),
            target_ids=address(target_ids_W),
            is_bf16=dtype == BFLOAT16,
        )
        self._handle: int = lib.eyas_new(parts)
        weakref.finalize(self, lib.eyas_free, self._handle)
        self._num_positions = 0
        self._set_positions(FIRST_POSITIONS)

    @property
    def num_bytes(self) -> int:
        """Of packed weights, of all experts too."""
        packed = [linear for layer in self._layers for linear in layer.linears]
        packed += [part for part in self._outer.values() if isinstance(part, PackedLinear)]
        return sum(linear.num_bytes for linear in packed)

    def _set_positions(self, length: int) -> None:
        dims = self._role.shape.get("rotary_dims", self.config.head_dim)
        tables = [table for rope in self._role.ropes for table in rope_table(rope, dims, length)]
        scale = self._role.query_scale
        query_scales = None if scale is None else scale.of(np.arange(length))
        self._positions, self._num_positions = (tables, query_scales), length  # kept alive
        listed = (ctypes.c_void_p * len(tables))(*map(address, tables))
        to = Positions(
            tables=ctypes.addressof(listed),
            query_scales=address(query_scales),
            ropes=len(self._role.ropes),
            length=length,
        )
        self._lib.eyas_set_positions(self._handle, to)

    def _view(self, rows: Rows, cache: PagedCache) -> ctypes.Structure:
        assert cache.data.dtype == self.dtype
        B, P = rows.page_table.shape
        columns = [getattr(rows, name) for name in ROW_COLUMNS]
        for column in columns:  # the library sees addresses only
            assert column.dtype == np.int64
            assert column.shape == rows.token.shape
            assert column.flags.c_contiguous
        assert rows.page_table.dtype == np.int32
        assert rows.page_table.flags.c_contiguous
        return RowsView(
            *map(address, columns),
            page_table=address(rows.page_table),
            B=B,
            P=P,
            first_column=rows.first_column,
            page_size=cache.page_size,
            num_slots=cache.data.shape[1],
            M=len(rows.token),
        )

    def _call(
        self,
        function: Callable[..., int],
        struct: str,
        rows: Rows,
        cache: PagedCache,
        arrays: Mapping[str, Array | None],
        **more: Any,
    ) -> None:
        """arrays: whose addresses the struct holds. Raises IndexError, EyasError."""
        more |= {name: address(array) for name, array in arrays.items()}
        call = STRUCTS[struct](rows=self._view(rows, cache), cache=address(cache.data), **more)
        while (status := function(self._handle, call)) != 0:
            self._lengthen(status, int(rows.position.max()))

    def _lengthen(self, status: int, last_position: int) -> None:
        """For a call that failed for its positions. Raises IndexError, EyasError for others."""
        if status == BAD_LOGITS:
            raise no_best_logit(math.nan)
        may_grow = self._num_positions <= last_position < MOST_POSITIONS
        if status != BAD_POSITION or not may_grow:
            raise IndexError(WRONG.get(status, "a position is negative, or beyond all there are"))
        self._set_positions(2 * (last_position + 1))


class NativeTarget(NativeDecoder):
    """A target's forward. Its results may lie in buffers that the next forward overwrites: copy
    what must live longer.
    """

    config: TargetConfig

    def __init__(
        self,
        config: TargetConfig,
        tensors: Arrays,
        dtype: np.dtype[Any],
        blocks: Blocks | None = None,
    ) -> None:
        """tensors by our names (`arranged`), checked; dtype float32 or bfloat16. blocks: those
        multiplied in a GGUF file's own format, their rows quantised.
        """
        blocks, how = blocks or {}, Packing.of(tensors, dtype, blocks)
        num_experts = config.experts.num_experts if config.experts else 0
        layers = [
            PackedLayer(tensors, f"model.layers.{number}.", how, kind, num_experts)
            for number, kind in enumerate(config.layer_kinds)
        ]
        embed_name = "model.embed_tokens.weight"
        head_name = embed_name if config.tie_word_embeddings else "lm_head.weight"
        outer: dict[str, PackedLinear | Array] = {
            "head": joined_linear(tensors, [head_name.removesuffix(".weight")], how),
            "final_norm": tensors["model.norm.weight"],
        }
        embed_blocks = blocks.get(embed_name)
        if embed_blocks is not None and embed_name != head_name:
            embed_blocks.refuse_nonfinite(embed_name)
        embed_tokens = tensors[embed_name] if embed_blocks is None else embed_blocks
        role = target_role(config, FLOAT32 if blocks else dtype)
        super().__init__(config, dtype, role, layers, outer, embed_tokens)
        self._logits, self._aux = np.empty(0, FLOAT32), np.empty(0, dtype)

    def forward(
        self,
        rows: Rows,
        cache: PagedCache,
        taps: Taps | None = None,
        logits_of: np.ndarray | None = None,
        features: FeatureCache | None = None,
    ) -> TargetOutput:
        """One pass over the rows: writes their keys and values, returns logits, float32, and
        features, of the cache's dtype. Raises IndexError.

        taps: layers whose outputs are the features; None computes none. logits_of int64 [R]: the
        rows whose logits are wanted, None for all. features: a cache that the features are written
        to, at the rows' slots; without it they are in the output.
        """
        M, width = len(rows.token), 3 * self.config.hidden_size
        R = M if logits_of is None else len(logits_of)
        logits, best = self._room(R), np.empty(R, np.int64)
        aux_hidden = None
        if taps is not None and features is None:
            if self._aux.size < M * width:
                self._aux = np.empty(M * width, self.dtype)
            aux_hidden = self._aux[: M * width].reshape(M, width)
        aux = aux_hidden if features is None else features.data
        assert features is None or features.data.shape == (cache.data.shape[1], width)
        tapped = Tapped(address(_three(taps)), address(aux), features is not None)
        arrays = {"logits_of": logits_of, "logits": logits, "best": best}
        self._call(self._lib.eyas_forward, "ForwardCall", rows, cache, arrays, tapped=tapped, R=R)
        return TargetOutput(aux_hidden, logits, best)

    def hidden(self, rows: Rows, cache: PagedCache, taps: Taps) -> tuple[Array, Array]:
        """Last hidden [M, H] after the final norm and aux_hidden [M, 3 * H], fresh; no logits: the
        numbers that `forward` computes, bit for bit. ROWS_AT_ONCE at a time. Raises IndexError.
        """
        M, H = len(rows.token), self.config.hidden_size
        last_hidden, aux_hidden = np.empty((M, H), self.dtype), np.empty((M, 3 * H), self.dtype)
        for first in range(0, M, ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            some = replace(rows, **{name: getattr(rows, name)[part] for name in ROW_COLUMNS})
            tapped = Tapped(address(_three(taps)), address(aux_hidden[part]))
            arrays = {"last_hidden": last_hidden[part]}
            self._call(self._lib.eyas_forward, "ForwardCall", some, cache, arrays, tapped=tapped)
        return last_hidden, aux_hidden

    def _room(self, rows: int) -> Array:
        """For logits [rows, V]."""
        V = self.config.vocab_size
        if self._logits.size < rows * V:
            self._logits = np.empty(rows * V, FLOAT32)
        return self._logits[: rows * V].reshape(rows, V)

    def verify(
        self,
        roots: Roots,
        chosen: NodesToVerify,
        cache: PagedCache,
        taps: Taps | None = None,
        features: FeatureCache | None = None,
        draws: Draws | None = None,
    ) -> Verified:
        """One pass over the trees, and each request's walk through its own: the tokens of its path,
        then the bonus token.

        Their columns stand in order behind the request's, features too. draws: how each request
        draws; None takes the best logits. Raises IndexError, and EyasError for logits that are no
        numbers.
        """
        assert cache.data.dtype == self.dtype
        B, P = roots.page_table.shape
        draws = [None] * B if draws is None else draws
        proposals, C = chosen.proposals, chosen.proposals.tokens.shape[1]
        assert len(roots.lens) == len(roots.tokens) == len(chosen.line) == len(draws) == B
        assert proposals.tokens.shape == proposals.parents.shape == chosen.kept.shape
        assert -1 <= min(chosen.line, default=-1) <= max(chosen.line, default=-1) < len(chosen.kept)
        width = 3 * self.config.hidden_size
        assert features is None or features.data.shape == (cache.data.shape[1], width)
        places = int(proposals.depths.max(initial=0)) + 1
        num_nodes = {
            b: 1 + (int(chosen.kept[chosen.line[b]].sum()) if chosen.line[b] >= 0 else 0)
            for b, draw in enumerate(draws)
            if draw is not None and draw.by_caller
        }
        logits_NV = self._room(sum(num_nodes.values()))
        lens = np.array(roots.lens, dtype=np.int64)
        page_table = np.ascontiguousarray(roots.page_table, dtype=np.int32)
        trees: tuple[np.ndarray, ...] = (
            np.array(roots.tokens, dtype=np.int64),
            np.ascontiguousarray(proposals.tokens, dtype=np.int64),
            np.array(chosen.line, dtype=np.int32),
            np.ascontiguousarray(proposals.parents, dtype=np.int32),
            np.ascontiguousarray(chosen.kept, dtype=bool),
        )
        emitted, counts = np.empty((B, places), dtype=np.int64), np.empty(B, dtype=np.int64)
        taps_3, states = _three(taps), draw_states(draws, B)
        aux = None if features is None else features.data
        call = VerifyCall(
            lines=Lines(
                B=B,
                P=P,
                page_size=cache.page_size,
                num_slots=cache.data.shape[1],
                page_table=address(page_table),
                lens=address(lens),
            ),
            chosen=Chosen(*map(address, trees), C=C),
            cache=address(cache.data),
            tapped=Tapped(address(taps_3), address(aux), by_slot=True),
            draws=DrawsOf(ctypes.addressof(states), address(logits_NV), len(logits_NV)),
            places=places,
            emitted=address(emitted),
            counts=address(counts),
        )
        while (status := self._lib.eyas_verify(self._handle, call)) != 0:
            self._lengthen(status, max(roots.lens) + places)
        rows, logits = zip(emitted.tolist(), counts.tolist(), strict=True), {}
        if num_nodes:
            ends = np.cumsum([*num_nodes.values()])[:-1]
            logits = dict(zip(num_nodes, np.split(logits_NV, ends), strict=True))
        return Verified([row[:count] for row, count in rows], logits)


@dataclass(frozen=True, slots=True)
class Verified:
    """Each request's tokens, the bonus token last. logits [N, V]: of the nodes of each request b
    whose caller walks; its tokens are empty, its columns stay.
    """

    tokens: list[list[int]]
    logits: dict[int, np.ndarray]


@functools.cache
def _three(taps: Taps | None) -> np.ndarray | None:
    return None if taps is None else np.array(sorted(taps), dtype=np.int64)
