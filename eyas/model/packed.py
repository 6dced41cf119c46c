"""Weights packed for the library's products, once, in the order in which they are read. Float32
weights that bfloat16 holds exactly are stored as such; blocks of a GGUF file stay as they are.

Letters: N outputs, K inputs.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.gguf.blocks import BLOCK, KINDS, PLAIN, BlockMatrix
from eyas.gguf.file import Kind
from eyas.model.architecture import MAX_HEAD_DIM, LayerKind
from eyas.model.arrays import BFLOAT16, FLOAT32, Array, Arrays, cast, fits_bfloat16
from eyas.model.library import address, library
from eyas.model.structs import STRUCTS
from eyas.model.threads import num_threads
from eyas.model.weights import LazyArrays

Part, Weights, Layer = (STRUCTS[name] for name in ("Part", "Weights", "Layer"))
# how weights are packed: float32, bfloat16, bfloat16 in 12 bits, half precision
FULL, SHORT, SQUEEZED, HALF = 0, 1, 2, 3
# bytes in bfloat16: fewer stay in the caches, where unpacking takes longer than reading more
SQUEEZED_FROM = 1 << 24

TWO_BITS, TWO_BIT_RUN = 1000, 64  # number of the format in cpp/formats.h; weights of a scale
TWO_BIT_ROWS, TINY = 4096, 1e-30  # made at a time

LANES = 16  # outputs that the library computes together: one format

Blocks = Mapping[str, BlockMatrix]  # matrices in a GGUF file's own format, by name
PLAIN_LAYER = LayerKind()


@dataclass(frozen=True, slots=True)
class Packing:
    """How a model's weights are packed. squeezed: bfloat16 in 12 bits. blocks: those multiplied in
    a GGUF file's own format instead.
    """

    dtype: np.dtype[Any]
    threads: int
    squeezed: bool
    blocks: Blocks

    @classmethod
    def of(cls, tensors: Arrays, dtype: np.dtype[Any], blocks: Blocks | None) -> Packing:
        """On the threads of this moment."""
        shapes = (
            tensors.shapes.values()
            if isinstance(tensors, LazyArrays)
            else (tensor.shape for tensor in tensors.values())
        )
        large = 2 * sum(map(math.prod, shapes)) >= SQUEEZED_FROM
        return cls(dtype, num_threads(), large, blocks or {})


class PackedLinear:
    """Weights [N, K] of one product, stacked from parts and packed for streaming. The `of_...`
    raise MemoryError.
    """

    def __init__(self, handle: int) -> None:
        self.handle = handle
        weakref.finalize(self, library().eyas_free_linear, handle)
        self.num_bytes: int = library().eyas_linear_bytes(handle)

    @classmethod
    def of_arrays(
        cls,
        weights: Sequence[Array],
        biases: Sequence[Array],
        dtype: np.dtype[Any],
        threads: int,
        squeezed: bool,
        gated: bool = False,
    ) -> PackedLinear:
        """squeezed: bfloat16 in 12 bits; gated: gate and up joined."""
        is_short = dtype == BFLOAT16 or all(map(fits_bfloat16, weights))
        stored = BFLOAT16 if is_short else FLOAT32
        parts = [np.ascontiguousarray(cast(weight, stored)) for weight in weights]
        kind = FULL if not is_short else SQUEEZED if squeezed else SHORT
        K, kinds = parts[0].shape[1], [kind] * len(parts)
        return cls._stacked(library().eyas_linear, parts, kinds, K, biases, threads, gated)

    @classmethod
    def of_blocks(
        cls,
        matrices: Sequence[BlockMatrix],
        biases: Sequence[Array],
        threads: int,
        gated: bool = False,
    ) -> PackedLinear:
        """From the blocks of a GGUF file that fit together (`parts_of`)."""
        parts, kinds = [one.data for one in matrices], [int(one.kind) for one in matrices]
        K = matrices[0].shape[1]
        return cls._stacked(library().eyas_quantised, parts, kinds, K, biases, threads, gated)

    @classmethod
    def of_numbers(
        cls,
        matrices: Sequence[BlockMatrix],
        biases: Sequence[Array],
        how: Packing,
        gated: bool = False,
    ) -> PackedLinear:
        """From numbers without scales of a GGUF file, each as it is."""
        if how.dtype == BFLOAT16 and {matrix.kind for matrix in matrices} == {Kind.F16}:
            parts, kinds = [matrix.data for matrix in matrices], [HALF] * len(matrices)
            K = matrices[0].shape[1]
            return cls._stacked(library().eyas_linear, parts, kinds, K, biases, how.threads, gated)
        values = [matrix.dequantised() for matrix in matrices]
        return cls.of_arrays(values, biases, FLOAT32, how.threads, how.squeezed, gated)

    @classmethod
    def of_two_bits(cls, rows: Array, K: int, threads: int) -> PackedLinear:
        """From `two_bit_rows` of K inputs."""
        return cls._stacked(library().eyas_quantised, [rows], [TWO_BITS], K, (), threads)

    @classmethod
    def _stacked(
        cls,
        make: Callable[[ctypes.Structure], int],
        parts: Sequence[Array],
        kinds: Sequence[int],
        K: int,
        biases: Sequence[Array],
        threads: int,
        gated: bool = False,
    ) -> PackedLinear:
        bias = np.concatenate([cast(part, FLOAT32) for part in biases]) if biases else None
        listed = (Part * len(parts))(*map(Part, map(address, parts), map(len, parts), kinds))
        weights = Weights(
            parts=ctypes.addressof(listed),
            count=len(listed),
            K=K,
            gated=gated,
            threads=threads,
            bias=address(bias),
        )
        return cls(make(weights))


def parts_of(blocks: Blocks, names: Sequence[str], gated: bool = False) -> list[BlockMatrix] | None:
    """The matrices whose outputs are joined in one product; None where one is in a format without a
    product, or their formats meet inside 16 outputs.
    """
    found = [blocks[name] for name in names if name in blocks]
    if len(found) < len(names) or any(part.kind not in KINDS for part in found):
        return None
    if len({part.kind for part in found}) > 1 and (
        gated or any(part.shape[0] % LANES for part in found[:-1])
    ):
        return None
    return found


def quantisable(tensors: Arrays) -> dict[str, Array]:
    """The matrices among a model's tensors, embeddings and unfit widths left out."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.ndim == 2
        and name.endswith("weight")
        and tensor.shape[1] % BLOCK == 0
        and "embed_tokens" not in name
    }


def two_bit_rows(weight: Array) -> Array:
    """A matrix [N, K] with one of four numbers for each weight, K a multiple of TWO_BIT_RUN: uint8
    [N, bytes of a row], `TwoBits` of cpp/formats.h.
    """
    N, K = weight.shape
    made = np.empty((N, K // TWO_BIT_RUN, 2 + TWO_BIT_RUN // 4), dtype=np.uint8)
    for first in range(0, N, TWO_BIT_ROWS):
        runs = cast(weight[first : first + TWO_BIT_ROWS], FLOAT32)
        runs = runs.reshape(len(runs), -1, TWO_BIT_RUN)
        # four evenly spaced numbers fit a normal distribution best when they are so far apart
        scales = np.sqrt(np.square(runs).mean(-1)).astype(np.float16)
        apart = np.maximum(scales.astype(np.float32), TINY)[..., None]
        codes = np.clip(np.floor(runs / apart) + 2, 0, 3).astype(np.uint8)
        four = codes.reshape(*codes.shape[:2], -1, 4)
        to = made[first : first + TWO_BIT_ROWS]
        to[..., :2] = scales[..., None].view(np.uint8)
        to[..., 2:] = four[..., 0] | four[..., 1] << 2 | four[..., 2] << 4 | four[..., 3] << 6
    return made.reshape(N, -1)


# The vectors of a layer, and their names in a checkpoint.
VECTORS = {
    "input_norm": "input_layernorm.weight",
    "out_norm": "attention_out_norm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "mlp_out_norm": "mlp_out_norm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "sinks": "self_attn.sinks",
    "taps": "conv.conv.weight",
    "taps_bias": "conv.conv.bias",
}


class PackedLayer:
    """The weights of one layer, packed in the order in which they are read."""

    def __init__(
        self,
        tensors: Arrays,
        prefix: str,
        how: Packing,
        kind: LayerKind = PLAIN_LAYER,
        num_experts: int = 0,
    ) -> None:
        """tensors by our names behind the prefix. num_experts: of the model's mixtures."""

        def joined(*names: str) -> PackedLinear:
            gated = len(names) == 2
            return joined_linear(tensors, [prefix + name for name in names], how, gated)

        def mlp(of: str) -> tuple[PackedLinear, PackedLinear]:
            return joined(f"{of}.gate_proj", f"{of}.up_proj"), joined(f"{of}.down_proj")

        linears: dict[str, PackedLinear] = {}
        if kind.mixer == "conv":
            linears |= {"in": joined("conv.in_proj"), "out": joined("conv.out_proj")}
        else:
            linears["in"] = joined(*(f"self_attn.{name}_proj" for name in "qkv"))
            linears["out"] = joined("self_attn.o_proj")
        experts: list[PackedLinear] = []
        of_all = "mlp.shared" if kind.has_experts else "mlp"
        if f"{prefix}{of_all}.down_proj.weight" in tensors:
            linears["gate_up"], linears["down"] = mlp(of_all)
        if kind.has_experts:
            linears["router"] = joined("mlp.router")
            for number in range(num_experts):
                experts += mlp(f"mlp.experts.{number}")
        vectors = {
            name: vector(tensors[prefix + stored])
            for name, stored in VECTORS.items()
            if prefix + stored in tensors
        }
        if kind.unit_heads:
            vectors |= dict.fromkeys(("q_norm", "k_norm"), np.ones(MAX_HEAD_DIM, FLOAT32))
        self.linears = [*linears.values(), *experts]
        self._experts = (ctypes.c_void_p * len(experts))(*(one.handle for one in experts))
        self._vectors = vectors  # kept alive
        self.parts = Layer(
            **{name: linear.handle for name, linear in linears.items()},
            **{name: address(tensor) for name, tensor in vectors.items()},
            experts=ctypes.addressof(self._experts) if experts else None,
            window=kind.window or 0,
            chunk=kind.chunk or 0,
            rope=-1 if kind.rope is None else kind.rope,
            scales=kind.scales,
        )


def vector(tensor: Array) -> Array:
    """A norm's weights, or the taps of a convolution by tap, [kernel, H]."""
    return np.ascontiguousarray(cast(tensor, FLOAT32).T)


def joined_linear(
    tensors: Arrays, names: Sequence[str], how: Packing, gated: bool = False
) -> PackedLinear:
    """One product of the weights and biases under some names: of their blocks where they fit
    together, else of the tensors. Raises CorruptError for scales that are no numbers.
    """
    weights = [f"{name}.weight" for name in names]
    biases = [tensors[f"{name}.bias"] for name in names if f"{name}.bias" in tensors]
    of_file = {name: how.blocks[name] for name in weights if name in how.blocks}
    for name, part in of_file.items():
        part.refuse_nonfinite(name)
    stored = list(of_file.values())
    if (parts := parts_of(how.blocks, weights, gated)) is not None:
        packed = PackedLinear.of_blocks(parts, biases, how.threads, gated)
    elif len(stored) == len(weights) and all(part.kind in PLAIN for part in stored):
        packed = PackedLinear.of_numbers(stored, biases, how, gated)
    else:
        own = [tensors[name] for name in weights]
        packed = PackedLinear.of_arrays(own, biases, how.dtype, how.threads, how.squeezed, gated)
    for part in stored:
        part.release()
    return packed


def rows_of_embeddings(embed_tokens: Array | BlockMatrix) -> tuple[Array, int]:
    """The rows as the library reads them, and ggml's number of their type."""
    if isinstance(embed_tokens, BlockMatrix):
        return embed_tokens.data, int(embed_tokens.kind)
    is_short = embed_tokens.dtype == BFLOAT16
    rows = np.ascontiguousarray(cast(embed_tokens, BFLOAT16 if is_short else FLOAT32))
    return rows, int(Kind.BF16 if is_short else Kind.F32)
