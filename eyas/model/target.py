"""The target for inference: a Llama-family decoder with the three taps EAGLE-3 needs.

Letters: M rows of one forward, R rows whose logits are asked for, B batch, T sequence, Ht hidden, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, get_args

import numpy as np

from eyas.errors import MismatchError
from eyas.families import FAMILIES
from eyas.gguf.blocks import KINDS, PLAIN, BlockMatrix, refuse_other_kinds
from eyas.gguf.checkpoint import lies_in_file, matrices_apart
from eyas.gguf.file import release
from eyas.model.architecture import ELSEWHERE, TargetConfig
from eyas.model.arrangement import arranged
from eyas.model.arrays import BFLOAT16, FLOAT16, FLOAT32, Array, Arrays, cast, refuse_nonfinite
from eyas.model.config import RESTORE_CONFIG, Taps, TargetShape
from eyas.model.library import unavailable
from eyas.model.native import NativeTarget
from eyas.model.packed import Blocks
from eyas.model.rows import PagedCache, Rows, prompt_rows
from eyas.model.weights import (
    LazyArrays,
    array_sha256,
    matrix_sha256,
    read_arrays,
    remembered,
    rounded,
    with_matrices,
)

Dtype = Literal["auto", "float32", "bfloat16", "float16", "packed"]
# packed: what is not a quantised product, keys, values and features
DTYPES = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16, "packed": BFLOAT16}
PAGE_SIZE = 16


def stored_dtype(shape: TargetShape) -> Dtype:
    """The checkpoint's own precision, float32 where it is none of DTYPES."""
    stored: dict[str, Dtype] = {name: name for name in get_args(Dtype)[1:4]}
    return stored.get(shape.dtype, "float32")


def resolve_dtype(dtype: Dtype, shape: TargetShape) -> Dtype:
    """The precision that our own decoder runs a target in: a key of DTYPES.

    "auto" is "packed" for a GGUF file whose matrices the library multiplies in the file's own
    blocks, bfloat16 for a checkpoint stored in it and float32 for others.
    """
    if dtype != "auto":
        return dtype
    if shape.in_blocks:
        return "packed"
    return "bfloat16" if shape.dtype == "bfloat16" else "float32"


class Target(NativeTarget):
    def __init__(
        self,
        config: TargetConfig,
        tensors: Arrays,
        dtype: Dtype = "auto",
        blocks: Blocks | None = None,
        lm_head_sha256: str | None = None,
    ) -> None:
        """Lay out a checkpoint's tensors, named as Hugging Face names them.

        dtype: see `resolve_dtype`. blocks: matrices of a GGUF file in its own formats, which come
        before tensors. lm_head_sha256: where it is known. Raises MismatchError when a tensor is
        missing or has another shape, or the native decoder does not run it on this machine.
        """
        self.config, self.precision = config, resolve_dtype(dtype, config)
        self.dtype = DTYPES[self.precision]
        self._weights = TargetWeights(config, tensors, self.dtype, blocks or {})
        self.blocks = self._weights.products if self.precision == "packed" else {}
        self.lm_head_sha256 = lm_head_sha256 or self._weights.lm_head_sha256()
        self._lay_out()

    def _lay_out(self) -> None:
        if why := unavailable():
            raise MismatchError(f"the decoder does not run on this machine: {why}", ELSEWHERE)
        if self.precision == "float16":
            hint = "take float32, bfloat16 or packed"
            raise MismatchError("our own decoder computes in no float16", hint)
        super().__init__(self.config, self._weights.cast, self.dtype, self.blocks)

    @classmethod
    def load(cls, folder: str | Path, dtype: Dtype = "auto") -> Self:
        """Load a Hugging Face folder, or the folder of a GGUF file. Raises MissingInputError,
        CorruptError, MismatchError.
        """
        config, root = TargetConfig.from_folder(folder), Path(folder)
        dtype = resolve_dtype(dtype, config)
        if dtype != "packed" and not lies_in_file(root):
            tensors = read_arrays(folder)
            refuse_nonfinite(folder, tensors)
            target = cls(config, tensors, dtype)
            for tensor in tensors.values():  # packed by now; embeddings are read where they lie
                release(tensor)
            return target
        stored, vectors, matrices = matrices_apart(root)
        if dtype == "packed":
            refuse_other_kinds(matrices)
        tensors = {name: rounded(values, stored) for name, values in vectors.items()}
        refuse_nonfinite(folder, tensors)
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        sha256 = None
        if (name := f"{head}.weight") in matrices:
            kept = root / "lm_head.sha256"
            sha256 = remembered(kept, lambda: matrix_sha256(matrices[name]))
        return cls(config, tensors, dtype, matrices, sha256)

    @property
    def embed_tokens(self) -> Array:
        """[V, Ht] in this target's precision; what is packed has rows of its own."""
        return self._weights.embed_tokens

    @property
    def lm_head(self) -> Array:
        """[V, Ht] in this target's precision."""
        return self._weights.lm_head

    @property
    def embeddings(self) -> Array | BlockMatrix:
        """`embed_tokens`, or their blocks."""
        return self.blocks.get("model.embed_tokens.weight") or self.embed_tokens

    @property
    def fingerprint(self) -> str:
        """Shape and lm_head's hash: the key of what was measured of this target's speed."""
        return f"{self.config.model_dump_json()} {self.lm_head_sha256}"

    def new_cache(self, num_pages: int, page_size: int = PAGE_SIZE) -> PagedCache:
        config = self.config
        sizes = config.num_hidden_layers, num_pages, page_size, config.slot_width
        return PagedCache(*sizes, self.dtype)

    def features(
        self, tokens_BT: np.ndarray, taps: Sequence[int] | None = None
    ) -> tuple[Array, Array]:
        """int64 [B, T] -> aux_hidden [B, T, 3 * Ht] and last_hidden [B, T, Ht] (post-norm), in the
        target's dtype.

        Right padding is harmless: attention is causal. taps: by default EAGLE-3's three; or any
        number of layers, three of which a forward gives.
        """
        B, T = tokens_BT.shape
        rows, cache = self._rows_of(tokens_BT)
        layers = self.config.default_taps if taps is None else taps
        streams: dict[int, Array] = {}
        for three in threes(layers, self.config.num_hidden_layers):
            last_hidden, aux_hidden = self.hidden(rows, cache, three)
            streams |= zip(three, np.split(aux_hidden, 3, axis=-1), strict=True)
        tapped = np.concatenate([streams[layer] for layer in layers], axis=-1)
        return tapped.reshape(B, T, -1), last_hidden.reshape(B, T, -1)

    def logits(self, tokens_BT: np.ndarray) -> Array:
        """int64 [B, T] -> logits [B, T, V]: for checks, not for decoding."""
        logits = self.forward(*self._rows_of(tokens_BT)).logits
        return logits.reshape(*tokens_BT.shape, -1).copy()

    def _rows_of(self, tokens_BT: np.ndarray) -> tuple[Rows, PagedCache]:
        B, T = tokens_BT.shape
        pages = -(-T // PAGE_SIZE)
        page_table = np.arange(B * pages, dtype=np.int32).reshape(B, pages)
        rows = prompt_rows(tokens_BT.tolist(), [0] * B, page_table, PAGE_SIZE)
        return rows, self.new_cache(B * pages)


class TargetWeights:
    """A checkpoint's tensors by our names, checked; other precisions are made when asked for."""

    def __init__(
        self, config: TargetConfig, published: Arrays, dtype: np.dtype[Any], blocks: Blocks
    ) -> None:
        """Raises MismatchError."""
        self._config, self._dtype = config, dtype
        self._matrices = arranged(config, blocks)
        # as stored, mapped from the files
        own = arranged(config, published)
        self._stored = with_matrices(own, self._matrices, stored_dtype(config))
        check_shapes(config, self._stored.shapes)
        self._tied = config.tie_word_embeddings
        self._head_name = "model.embed_tokens.weight" if self._tied else "lm_head.weight"
        self.cast = LazyArrays(self._stored.shapes, self._cast)

    @property
    def products(self) -> dict[str, BlockMatrix]:
        """The matrices that are multiplied in a GGUF file's own formats."""
        return {name: one for name, one in self._matrices.items() if one.kind in (*KINDS, *PLAIN)}

    def lm_head_sha256(self) -> str:
        """Of what is stored."""
        if self._head_name in self._matrices:
            return matrix_sha256(self._matrices[self._head_name])
        return array_sha256(self._stored[self._head_name])

    @cached_property
    def embed_tokens(self) -> Array:
        return cast(self._stored["model.embed_tokens.weight"], self._dtype)

    @cached_property
    def lm_head(self) -> Array:
        return self.embed_tokens if self._tied else cast(self._stored[self._head_name], self._dtype)

    def _cast(self, name: str) -> Array:
        if name == "model.embed_tokens.weight":
            return self.embed_tokens
        tensor = self._stored[name]
        # a norm with an added offset keeps float32: rounding would lose the offset
        keeps = FAMILIES[self._config.family].norm_offset != 0 and tensor.ndim == 1
        return tensor if keeps else cast(tensor, self._dtype)


def threes(layers: Sequence[int], num_layers: int) -> Iterator[Taps]:
    """All of these layers, three at a time; others fill the last three."""
    wanted = sorted(set(layers))
    wanted += [layer for layer in range(num_layers) if layer not in wanted][: -len(wanted) % 3]
    for first in range(0, len(wanted), 3):
        one, two, three = sorted(wanted[first : first + 3])
        yield one, two, three


def expected_shapes(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a target by our names."""
    H, V, D = config.hidden_size, config.vocab_size, config.head_dim
    q, kv = config.num_attention_heads * D, config.num_key_value_heads * D
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (V, H),
        "model.norm.weight": (H,),
    }
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = (V, H)

    def add(name: str, shape: tuple[int, ...], has_bias: bool) -> None:
        found[f"{name}.weight"] = shape
        if has_bias:
            found[f"{name}.bias"] = shape[:1]

    before = ("input_layernorm", "post_attention_layernorm")
    after = ("attention_out_norm", "mlp_out_norm")
    norms = {"before": before, "after": after, "both": before + after}[config.norms]
    for layer, kind in enumerate(config.layer_kinds):
        prefix = f"model.layers.{layer}."
        found |= {f"{prefix}{name}.weight": (H,) for name in norms}
        if kind.mixer == "conv":
            add(f"{prefix}conv.in_proj", (3 * H, H), config.conv_bias)
            add(f"{prefix}conv.conv", (H, config.conv_kernel or 0), config.conv_bias)
            add(f"{prefix}conv.out_proj", (H, H), config.conv_bias)
        else:
            for name, rows in {"q": q, "k": kv, "v": kv}.items():
                add(f"{prefix}self_attn.{name}_proj", (rows, H), config.attention_bias)
            add(f"{prefix}self_attn.o_proj", (H, q), config.attention_out_bias)
            if config.qk_norm != "none":
                is_wide = config.qk_norm == "width"
                found[f"{prefix}self_attn.q_norm.weight"] = (q if is_wide else D,)
                found[f"{prefix}self_attn.k_norm.weight"] = (kv if is_wide else D,)
            if config.sinks:
                found[f"{prefix}self_attn.sinks"] = (config.num_attention_heads,)
        mlps, has_bias = {f"{prefix}mlp.": config.intermediate_size}, config.mlp_bias
        if kind.has_experts:
            assert config.experts is not None
            E, has_bias = config.experts.num_experts, config.experts.bias
            add(f"{prefix}mlp.router", (E, H), has_bias)
            names = [f"{prefix}mlp.experts.{number}." for number in range(E)]
            mlps = dict.fromkeys(names, config.experts.intermediate_size)
            if config.experts.shared_size is not None:
                mlps[f"{prefix}mlp.shared."] = config.experts.shared_size
        for mlp, inner in mlps.items():
            add(f"{mlp}gate_proj", (inner, H), has_bias)
            add(f"{mlp}up_proj", (inner, H), has_bias)
            add(f"{mlp}down_proj", (H, inner), has_bias)
    return found


def check_shapes(config: TargetConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise MismatchError unless the tensors are exactly those of the config, in their shapes."""
    expected = expected_shapes(config)
    ignored = {"lm_head.weight"} | {name for name in shapes if name.endswith("rotary_emb.inv_freq")}
    wrong = [
        f"{name}: {shapes.get(name, 'missing')}, expected {shape}"
        for name, shape in expected.items()
        if shapes.get(name) != shape
    ]
    wrong += [
        f"{name}: not a tensor of this architecture"
        for name in shapes.keys() - expected.keys() - ignored
    ]
    if wrong:
        listed = "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise MismatchError(f"the weights do not fit config.json: {listed}", RESTORE_CONFIG)
