"""The decoder of `cpp/` for x86-64 with AVX-512, built when first used, and the forwards of targets
and drafts through it.

One call is one forward of the whole model (or the growth of whole trees), on threads of its own.
Every row's bits depend on the row alone, not on the rows beside it, the pages or the number of
threads: speculation changes no bit of an answer, in float32 and in bfloat16. Weights are packed
here, once; a float32 model whose weights are bfloat16 numbers is stored as such.

Knows no request. Its PyTorch twins are `target.Layers` and `engine/draft.py`; without compiler or
AVX-512 they do the work.

Letters: M rows, R rows with logits, B requests, H hidden, V and W vocabularies of target and draft,
D head dimension, P pages, K draft steps, k tree_topk.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import math
import os
import platform
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eyas.artifact import cache_folder
from eyas.gguf.blocks import BlockMatrix
from eyas.model.block import Tensors, rope_table
from eyas.model.config import DecoderConfig, HeadConfig, Taps, TargetConfig
from eyas.model.draws import DrawState, no_best_logit
from eyas.model.quantised import Blocks, parts_of
from eyas.model.rows import (
    MAX_TREE_COLUMNS,
    FeatureCache,
    NodesToVerify,
    PagedCache,
    Proposals,
    Roots,
    Rows,
    TargetOutput,
)

SOURCES = Path(__file__).parent / "cpp"
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++20",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-shared",
    "-fPIC",
    "-pthread",
)
NEEDED = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
MAX_TOPK = 16
MAX_HEAD_DIM = 256  # kMaxHeadDim of attention.h: what a thread keeps of a row's sums
FULL, PLAIN, SQUEEZED = 0, 1, 2  # how weights are packed: float32, bfloat16, bfloat16 in 12 bits
# bytes in bfloat16: fewer stay in the caches, where unpacking takes longer than reading more
SQUEEZED_FROM = 1 << 24
FIRST_POSITIONS = 4096  # of the rotation's table; it grows with what is asked for
MOST_POSITIONS = 1 << 24  # no request has so many: what lies beyond is no position
WRONG = {
    1: "a token is not in the vocabulary",
    3: "a slot, page or prefix is not there",
    4: "logits_of names no row",
}
BAD_POSITION, BAD_LOGITS = 2, 5

logger = logging.getLogger(__name__)


@contextmanager
def one_torch_thread(enabled: bool) -> Iterator[None]:
    """Keep PyTorch's small operators on one thread while the native path's own threads work beside
    them: two pools on the same cores wait for each other, and a copy of a few kilobytes takes
    milliseconds.
    """
    threads = torch.get_num_threads()
    if enabled:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# The library


def unavailable() -> str | None:
    """Why this machine or process has no native path, in one line; None when it has. Builds the
    library when there is none.
    """
    if os.environ.get("EYAS_NATIVE") == "0":
        return "EYAS_NATIVE=0 turns it off"
    return _loaded()[1]


def runs(config: DecoderConfig) -> bool:
    """Whether the native path runs decoders of this shape."""
    return config.head_dim <= MAX_HEAD_DIM


def library() -> ctypes.CDLL:
    """The library, built at need. Only for a process in which `unavailable()` is None."""
    lib, why = _loaded()
    assert lib is not None, why
    return lib


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    missing = sorted(set(NEEDED) - set(_cpu().split()))
    if platform.machine() != "x86_64" or missing:
        return None, f"the processor has no {', '.join(missing) or 'AVX-512'}"
    compiler = next(
        filter(None, map(shutil.which, (os.environ.get("CXX") or "g++", "c++", "clang++"))), None
    )
    if compiler is None:
        return None, "there is no C++ compiler (g++)"
    try:
        return _declared(ctypes.CDLL(str(_built(compiler)))), None
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or str(error)).strip().splitlines()
        return (
            None,
            f"{compiler} failed: {next((line for line in lines if 'error' in line), lines[0])}",
        )
    except OSError as error:
        return None, f"the library cannot be built or loaded: {error}"


def _cpu() -> str:
    """Model and flags of the processor, as Linux says it: what -march=native compiles for."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    kept = {
        line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in reversed(lines)
    }
    return f"{kept.get('model name', '')} {kept.get('flags', '')}"


def _built(compiler: str) -> Path:
    """The library's file, built unless there is one of these sources, this compiler and this
    processor.
    """
    sources = sorted(SOURCES.glob("*.*"))
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True
    ).stdout
    parts = [*(source.read_text() for source in sources), *FLAGS, version, _cpu()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = cache_folder("native")
    built = folder / f"decoder-{key}.so"
    if built.exists():
        return built
    logger.warning("building the native decoder, once for this machine (%s)", built)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch) / built.name
        command = [compiler, *FLAGS, str(SOURCES / "decoder.cpp"), "-o", str(fresh)]
        subprocess.run(command, capture_output=True, text=True, check=True)
        fresh.replace(built)
    return built


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    signatures = {
        "eyas_linear": (
            pointer,
            [pointer, pointer, integer, integer, integer, integer, pointer, integer],
        ),
        "eyas_quantised": (
            pointer,
            [pointer, pointer, pointer, integer, integer, integer, pointer, integer],
        ),
        "eyas_multiply": (None, [pointer, pointer, integer, integer, pointer]),
        "eyas_free_linear": (None, [pointer]),
        "eyas_linear_bytes": (integer, [pointer]),
        "eyas_read": (integer, [pointer, integer, integer]),
        "eyas_new": (
            pointer,
            [integer, pointer, ctypes.c_float, pointer, pointer, pointer, pointer],
        ),
        "eyas_free": (None, [pointer]),
        "eyas_set_rope": (None, [pointer, pointer, pointer, integer]),
        "eyas_forward": (integer, [*[pointer] * 5, integer, pointer, integer, *[pointer] * 3]),
        "eyas_verify": (integer, [pointer] * 3),
        "eyas_score": (integer, [pointer, integer, integer, integer, pointer, pointer]),
        "eyas_draw": (None, [pointer, pointer, integer, integer, pointer]),
        "eyas_extend": (integer, [pointer] * 5),
        "eyas_step": (integer, [pointer] * 5),
        "eyas_proposals": (integer, [pointer, pointer, integer, integer, pointer, pointer]),
        "eyas_propose": (integer, [pointer] * 3),
        "eyas_grow": (integer, [pointer] * 3),
        "eyas_calibrate": (None, [pointer, ctypes.c_double, pointer]),
        "eyas_choose": (integer, [pointer, ctypes.c_double, ctypes.c_double, pointer]),
        "eyas_judge": (None, [pointer, pointer]),
        "eyas_weigh_text": (None, [pointer, ctypes.c_double, pointer]),
        "eyas_who_drafts": (integer, [pointer, ctypes.c_double, ctypes.c_double, pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


# Weights


class PackedLinear:
    """Weights [N, K] of one product, stacked from parts and packed for streaming."""

    def __init__(self, handle: int | None) -> None:
        """handle: of the library's product. Raises MemoryError for none."""
        if handle is None:
            raise MemoryError("no memory for the packed weights")
        self.handle = handle
        weakref.finalize(self, library().eyas_free_linear, handle)
        self.num_bytes: int = library().eyas_linear_bytes(handle)

    @classmethod
    def of_tensors(
        cls,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
        dtype: torch.dtype,
        threads: int,
        squeezed: bool,
        gated: bool = False,
    ) -> PackedLinear:
        """squeezed: bfloat16 in 12 bits; gated: two parts, gate and up, whose outputs are joined.
        Raises MemoryError.
        """
        stored = (
            torch.bfloat16
            if dtype == torch.bfloat16 or all(map(_is_bfloat16, weights))
            else torch.float32
        )
        parts = [weight.detach().to(stored).contiguous() for weight in weights]
        bias = _joined(biases)
        rows = (ctypes.c_int64 * len(parts))(*map(len, parts))
        kind = FULL if stored == torch.float32 else SQUEEZED if squeezed else PLAIN
        return cls(
            library().eyas_linear(
                _pointers(parts),
                rows,
                len(parts),
                parts[0].shape[1],
                kind,
                gated,
                _pointer(bias),
                threads,
            )
        )

    @classmethod
    def of_blocks(
        cls,
        matrices: Sequence[BlockMatrix],
        biases: Sequence[torch.Tensor],
        threads: int,
        gated: bool = False,
    ) -> PackedLinear:
        """From the blocks of a GGUF file, which `quantised.parts_of` says fit together. Raises
        MemoryError.
        """
        parts = [np.ascontiguousarray(matrix.data) for matrix in matrices]
        bias, count, K = _joined(biases), len(parts), matrices[0].shape[1]
        integers = ctypes.c_int64 * count
        return cls(
            library().eyas_quantised(
                (ctypes.c_void_p * count)(*map(address, parts)),
                integers(*map(len, parts)),
                integers(*(int(matrix.kind) for matrix in matrices)),
                count,
                K,
                gated,
                _pointer(bias),
                threads,
            )
        )


def _joined(biases: Sequence[torch.Tensor]) -> torch.Tensor | None:
    return torch.cat([part.detach().float() for part in biases]).contiguous() if biases else None


def _is_bfloat16(weight: torch.Tensor) -> bool:
    """Whether every number of it is one of bfloat16."""
    if weight.dtype == torch.bfloat16:
        return True
    first = weight[:1].float()
    return bool((first.bfloat16().float() == first).all()) and bool(
        (weight.bfloat16().float() == weight.float()).all()
    )


def _is_large(tensors: Iterable[torch.Tensor]) -> bool:
    return 2 * sum(tensor.numel() for tensor in tensors) >= SQUEEZED_FROM


def address(array: np.ndarray) -> int:
    """Where an array's numbers lie, in half the time that `array.ctypes` takes."""
    return array.__array_interface__["data"][0]  # type: ignore[no-any-return]


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _pointers(tensors: Sequence[torch.Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*map(_pointer, tensors))


def _layer_linears(
    tensors: Tensors,
    prefix: str,
    dtype: torch.dtype,
    threads: int,
    squeezed: bool,
    blocks: Blocks | None = None,
) -> list[PackedLinear]:
    """The products of one layer in the order of their use, so that they lie in memory as they are
    read.
    """

    def packed(names: Sequence[str], gated: bool = False) -> PackedLinear:
        biases = [
            tensors[f"{prefix}{name}.bias"] for name in names if f"{prefix}{name}.bias" in tensors
        ]
        weights = [f"{prefix}{name}.weight" for name in names]
        parts = parts_of(blocks or {}, weights, gated)
        if parts is not None:
            return PackedLinear.of_blocks(parts, biases, threads, gated)
        return PackedLinear.of_tensors(
            [tensors[name] for name in weights],
            biases,
            dtype,
            threads,
            squeezed,
            gated,
        )

    return [
        packed([f"self_attn.{name}_proj" for name in "qkv"]),
        packed(["self_attn.o_proj"]),
        packed(["mlp.gate_proj", "mlp.up_proj"], gated=True),
        packed(["mlp.down_proj"]),
    ]


def _rows_of_embeddings(
    embed_tokens: torch.Tensor | BlockMatrix,
) -> tuple[torch.Tensor | np.ndarray, int, int]:
    """What must be kept alive, how the library reads it (0 float32, 1 bfloat16, else a number of
    ggml's), and where it lies.
    """
    if isinstance(embed_tokens, BlockMatrix):
        data = np.ascontiguousarray(embed_tokens.data)
        return data, int(embed_tokens.kind), address(data)
    kept = embed_tokens.detach().contiguous()
    kept = kept if kept.dtype in (torch.bfloat16, torch.float32) else kept.float()
    return kept, int(kept.dtype == torch.bfloat16), kept.data_ptr()


# Decoders


@dataclass(frozen=True, slots=True)
class DecoderRole:
    """What a decoder of the library is for, beside its layers' shape. num_logits: rows of lm_head;
    the flags are those of HeadConfig.
    """

    num_logits: int
    is_draft: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False


class NativeDecoder:
    """What targets and drafts have in common: weights in the library, rotation, and the arguments
    of a call.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        role: DecoderRole,
        linears: Sequence[PackedLinear | None],
        norms: Sequence[torch.Tensor | None],
        embed_tokens: torch.Tensor | BlockMatrix,
        target_ids_W: torch.Tensor | None = None,
    ) -> None:
        lib, self.dtype = library(), dtype
        self._config, self._lib = config, lib
        self._linears = list(linears)
        self._norms = [
            None if norm is None else norm.detach().float().contiguous() for norm in norms
        ]
        self._embed, embed_kind, embed_at = _rows_of_embeddings(embed_tokens)
        self._target_ids_W = target_ids_W
        shape = (ctypes.c_int64 * 13)(
            config.num_hidden_layers,
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            role.num_logits,
            len(self._embed),
            embed_kind,
            role.is_draft,
            role.norm_before_residual,
            role.norm_output,
            torch.get_num_threads(),
        )
        linear_handles = [None if linear is None else linear.handle for linear in self._linears]
        handles = (ctypes.c_void_p * len(linear_handles))(*linear_handles)
        is_bf16, eps = dtype == torch.bfloat16, config.rms_norm_eps
        self._handle: int = lib.eyas_new(
            is_bf16,
            shape,
            eps,
            handles,
            _pointers(self._norms),
            embed_at,
            _pointer(target_ids_W),
        )
        weakref.finalize(self, lib.eyas_free, self._handle)
        self._num_positions = 0
        self._set_positions(FIRST_POSITIONS)

    @property
    def num_bytes(self) -> int:
        """Bytes of packed weights: what a forward with logits reads at least."""
        return sum(linear.num_bytes for linear in self._linears if linear is not None)

    def _set_positions(self, length: int) -> None:
        half = self._config.head_dim // 2
        cos, sin = rope_table(self._config.rope, self._config.head_dim, length)
        self._rope = cos[:, :half].contiguous(), sin[:, :half].contiguous()
        self._num_positions = length
        self._lib.eyas_set_rope(
            self._handle, self._rope[0].data_ptr(), self._rope[1].data_ptr(), length
        )

    def _arguments(
        self, rows: Rows, cache: PagedCache
    ) -> tuple[ctypes.Array[ctypes.c_int64], ctypes.Array[ctypes.c_void_p]]:
        assert cache.data.dtype == self.dtype
        B, P = rows.page_table.shape
        columns = (rows.token, rows.request, rows.position, rows.slot, rows.prefix_len, rows.seen)
        # what the library cannot see: it is given addresses, and judges the numbers there
        for column in columns:
            assert column.dtype == torch.int64
            assert column.shape == rows.token.shape
            assert column.is_contiguous()
        assert rows.page_table.dtype == torch.int32
        assert rows.page_table.is_contiguous()
        ints = (ctypes.c_int64 * 6)(
            len(rows.token), B, P, rows.first_column, cache.page_size, cache.data.shape[1]
        )
        pointers = (ctypes.c_void_p * 8)(
            *map(_pointer, columns), rows.page_table.data_ptr(), cache.data.data_ptr()
        )
        return ints, pointers

    def _is_done(self, status: int, last_position: int) -> bool:
        """Whether the call did its work; False when it must be made again, with a longer table.
        Raises IndexError, EyasError.
        """
        if status == 0:
            return True
        if status == BAD_LOGITS:
            raise no_best_logit(math.nan)
        may_grow = self._num_positions <= last_position < MOST_POSITIONS
        if status != BAD_POSITION or not may_grow:
            raise IndexError(WRONG.get(status, "a position is negative, or beyond all there are"))
        self._set_positions(2 * (last_position + 1))
        return False


class NativeTarget(NativeDecoder):
    """A target's forward. What it returns may lie in buffers that its next forward overwrites: copy
    what must live longer.
    """

    def __init__(
        self,
        config: TargetConfig,
        tensors: Tensors,
        dtype: torch.dtype,
        blocks: Blocks | None = None,
    ) -> None:
        """tensors as in a Hugging Face checkpoint, checked; dtype float32 or bfloat16. blocks:
        those of them that are multiplied in a GGUF file's own format, their rows quantised.
        """
        blocks = blocks or {}
        threads, squeezed = torch.get_num_threads(), _is_large(tensors.values())
        linears, norms = [], []
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            linears += _layer_linears(tensors, prefix, dtype, threads, squeezed, blocks)
            names = (
                "input_layernorm",
                "post_attention_layernorm",
                "self_attn.q_norm",
                "self_attn.k_norm",
            )
            norms += [tensors.get(f"{prefix}{name}.weight") for name in names]
        embed_name = "model.embed_tokens.weight"
        head_name = embed_name if config.tie_word_embeddings else "lm_head.weight"
        if head_name in blocks:
            linears.append(PackedLinear.of_blocks([blocks[head_name]], [], threads))
        else:
            lm_head = tensors[head_name]
            linears.append(PackedLinear.of_tensors([lm_head], [], dtype, threads, squeezed))
        embed_tokens = blocks.get(embed_name) or tensors[embed_name]
        norms.append(tensors["model.norm.weight"])
        role = DecoderRole(config.vocab_size)
        super().__init__(config, dtype, role, [*linears, None], [*norms, *[None] * 5], embed_tokens)
        self._logits, self._aux = torch.empty(0, dtype=torch.float32), torch.empty(0, dtype=dtype)

    def forward(
        self,
        rows: Rows,
        cache: PagedCache,
        taps: Taps | None = None,
        logits_of: torch.Tensor | None = None,
        features: FeatureCache | None = None,
    ) -> TargetOutput:
        """One pass over the rows. logits_of int64 [R]: the rows whose logits are wanted, None for
        all. Raises IndexError.

        The logits are float32; aux_hidden has the cache's dtype, and with `features` goes there, to
        the rows' slots.
        """
        ints, pointers = self._arguments(rows, cache)
        M, V, width = len(rows.token), self._config.vocab_size, 3 * self._config.hidden_size
        R = M if logits_of is None else len(logits_of)
        if self._logits.numel() < R * V:
            self._logits = torch.empty(R * V, dtype=torch.float32)
        logits, best = self._logits[: R * V].view(R, V), torch.empty(R, dtype=torch.int64)
        aux_hidden, taps_3 = None, _three(taps)
        if taps is not None and features is None:
            if self._aux.numel() < M * width:
                self._aux = torch.empty(M * width, dtype=self.dtype)
            aux_hidden = self._aux[: M * width].view(M, width)
        aux = aux_hidden if features is None else features.data
        assert features is None or features.data.shape == (cache.data.shape[1], width)
        outputs = (
            taps_3,
            _pointer(aux),
            features is not None,
            _pointer(logits_of),
            R,
            logits.data_ptr(),
            best.data_ptr(),
            None,
        )
        while (status := self._lib.eyas_forward(self._handle, ints, pointers, *outputs)) != 0:
            self._is_done(status, int(rows.position.max()))
        return TargetOutput(aux_hidden, logits, best)

    def hidden(
        self, rows: Rows, cache: PagedCache, taps: Taps
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Last hidden [M, H] after the final norm and aux_hidden [M, 3 * H], fresh; no logits.
        Raises IndexError.
        """
        ints, pointers = self._arguments(rows, cache)
        M, H = len(rows.token), self._config.hidden_size
        last_hidden = torch.empty(M, H, dtype=self.dtype)
        aux_hidden = torch.empty(M, 3 * H, dtype=self.dtype)
        taken = (_three(taps), aux_hidden.data_ptr(), False, None, 0, None, None)
        outputs = (*taken, last_hidden.data_ptr())
        while (status := self._lib.eyas_forward(self._handle, ints, pointers, *outputs)) != 0:
            self._is_done(status, int(rows.position.max()))
        return last_hidden, aux_hidden

    def verify(
        self,
        roots: Roots,
        chosen: NodesToVerify,
        cache: PagedCache,
        taps: Taps | None = None,
        features: FeatureCache | None = None,
        draws: Sequence[DrawState | None] | None = None,
    ) -> Verified:
        """One pass over the trees, and each request's walk through its own: the tokens of the path
        that it takes, then the bonus token.

        Their columns stand in order behind the request's, features too. draws: how each request
        draws; None takes the best logits. Of one that draws by_caller there are no tokens but the
        logits of its nodes, and its columns stay. Raises IndexError, and EyasError for logits that
        are no numbers.
        """
        assert cache.data.dtype == self.dtype
        B, P = roots.page_table.shape
        draws = [None] * B if draws is None else draws
        proposals, C = chosen.proposals, chosen.proposals.tokens.shape[1]
        assert len(roots.lens) == len(roots.tokens) == len(chosen.line) == len(draws) == B
        assert proposals.tokens.shape == proposals.parents.shape == chosen.kept.shape
        assert -1 <= min(chosen.line, default=-1) <= max(chosen.line, default=-1) < len(chosen.kept)
        width = 3 * self._config.hidden_size
        assert features is None or features.data.shape == (cache.data.shape[1], width)
        places = int(proposals.depths[-1]) + 1 if C else 1
        num_nodes = {
            b: 1 + (int(chosen.kept[chosen.line[b]].sum()) if chosen.line[b] >= 0 else 0)
            for b, draw in enumerate(draws)
            if draw is not None and draw.by_caller
        }
        room, V = sum(num_nodes.values()), self._config.vocab_size
        if self._logits.numel() < room * V:
            self._logits = torch.empty(room * V, dtype=torch.float32)
        arrays = (
            np.array(roots.lens, dtype=np.int64),
            np.array(roots.tokens, dtype=np.int64),
            np.array(chosen.line, dtype=np.int32),
            np.ascontiguousarray(proposals.tokens, dtype=np.int64),
            np.ascontiguousarray(proposals.parents, dtype=np.int32),
            np.ascontiguousarray(chosen.kept, dtype=bool),
            np.ascontiguousarray(roots.page_table, dtype=np.int32),
        )
        emitted, counts = np.empty((B, places), dtype=np.int64), np.empty(B, dtype=np.int64)
        taps_3 = _three(taps)
        states = (ctypes.c_void_p * B)(
            *(None if draw is None else ctypes.addressof(draw) for draw in draws)
        )
        ints = (ctypes.c_int64 * 7)(B, P, cache.page_size, cache.data.shape[1], C, places, room)
        pointers = (ctypes.c_void_p * 14)(
            *(address(array) for array in arrays),
            cache.data.data_ptr(),
            None if taps_3 is None else ctypes.addressof(taps_3),
            None if features is None else features.data.data_ptr(),
            ctypes.addressof(states),
            address(emitted),
            address(counts),
            self._logits.data_ptr(),
        )
        while (status := self._lib.eyas_verify(self._handle, ints, pointers)) != 0:
            self._is_done(status, max(roots.lens) + places)
        rows = zip(emitted.tolist(), counts.tolist(), strict=True)
        parts = torch.split(self._logits[: room * V].view(room, V), list(num_nodes.values()))
        logits = dict(zip(num_nodes, parts, strict=True)) if num_nodes else {}
        return Verified([row[:count] for row, count in rows], logits)


@dataclass(frozen=True, slots=True)
class Verified:
    """Of each request the tokens of its walk, the bonus token last. logits [N, V]: of the nodes of
    each request b whose caller walks; its tokens are empty.
    """

    tokens: list[list[int]]
    logits: dict[int, torch.Tensor]


class NativeDraft(NativeDecoder):
    """A draft head's extend, step, proposals and growth of trees. Hidden states are float32, and
    fresh with every call.
    """

    def __init__(
        self,
        config: HeadConfig,
        tensors: Tensors,
        embed_tokens: torch.Tensor,
        lm_head_fallback: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        """tensors under EAGLE's names; the head's own `embed_tokens` and `lm_head`, if it has them,
        go before the target's.
        """
        threads, layer = torch.get_num_threads(), "midlayer."
        lm_head = tensors.get("lm_head.weight", lm_head_fallback)
        squeezed = _is_large(tensors.values())
        linears = [
            *_layer_linears(tensors, layer, dtype, threads, squeezed),
            PackedLinear.of_tensors([lm_head], [], dtype, threads, squeezed),
            PackedLinear.of_tensors([tensors["fc.weight"]], [], dtype, threads, squeezed),
        ]
        features = tensors["input_norm.weight"] if config.norm_before_fc else None
        each = [
            tensors[f"fc_norm.{stream}.weight"] if config.fc_norm else None for stream in range(3)
        ]
        norms = [
            tensors[f"{layer}input_layernorm.weight"],
            tensors[f"{layer}post_attention_layernorm.weight"],
            tensors.get(f"{layer}self_attn.q_norm.weight"),
            tensors.get(f"{layer}self_attn.k_norm.weight"),
            tensors["norm.weight"],
            tensors[f"{layer}hidden_norm.weight"],
            features,
            *each,
        ]
        self._W = len(lm_head)
        d2t_offset = tensors.get("d2t")
        target_ids_W = (
            None if d2t_offset is None else (torch.arange(self._W) + d2t_offset.cpu()).contiguous()
        )
        role = DecoderRole(self._W, True, config.norm_before_residual, config.norm_output)
        embed_tokens = tensors.get("embed_tokens.weight", embed_tokens)
        super().__init__(config, dtype, role, linears, norms, embed_tokens, target_ids_W)

    def extend(self, rows: Rows, aux_hidden: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        """The target's features [M, 3 * Ht] of the columns before the rows' -> outputs [M, H].
        Raises IndexError.
        """
        assert aux_hidden.shape == (len(rows), 3 * self._config.hidden_size)
        aux_hidden = aux_hidden.to(self.dtype).contiguous()
        return self._states("eyas_extend", rows, aux_hidden, cache)

    def enter(self, rows: Rows, aux_hidden: torch.Tensor, cache: PagedCache) -> None:
        """`extend` without its outputs: the rows' keys and values, in half the time."""
        ints, pointers = self._arguments(rows, cache)
        assert aux_hidden.shape == (len(rows), 3 * self._config.hidden_size)
        features = aux_hidden.to(self.dtype).contiguous()
        while (
            status := self._lib.eyas_extend(self._handle, ints, pointers, features.data_ptr(), None)
        ) != 0:
            self._is_done(status, int(rows.position.max()))

    def step(self, rows: Rows, h: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        """Outputs [M, H] of the rows' parents -> the rows' own [M, H]. Raises IndexError."""
        assert h.shape == (len(rows), self._config.hidden_size)
        return self._states("eyas_step", rows, h.float().contiguous(), cache)

    def proposals(self, h: torch.Tensor, tree_topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [R, H] -> the k best next tokens of each (target ids, int64 [R, k]) and their
        log-probs, float32 [R, k].
        """
        assert 0 < tree_topk <= min(MAX_TOPK, self._W)
        assert h.shape[1:] == (self._config.hidden_size,)
        h, R = h.float().contiguous(), len(h)
        ids, log_probs = torch.empty(R, tree_topk, dtype=torch.int64), torch.empty(R, tree_topk)
        status = self._lib.eyas_proposals(
            self._handle, h.data_ptr(), R, tree_topk, ids.data_ptr(), log_probs.data_ptr()
        )
        assert status == 0
        return (ids if self._target_ids_W is None else self._target_ids_W[ids]), log_probs

    def propose(
        self,
        lens: Sequence[int],
        h_BH: torch.Tensor,
        first: tuple[torch.Tensor, torch.Tensor],
        page_table: np.ndarray,
        cache: PagedCache,
        growth: tuple[int, int],
        thresholds: Sequence[float],
    ) -> Proposals:
        """Grow B trees by up to K - 1 levels, growth being (K, k): see
        `engine.draft.Draft.propose`. Raises IndexError.
        """
        K, out = growth[0], self._room(len(lens), growth, thresholds)
        lens_B = np.asarray(lens, dtype=np.int64)
        assert h_BH.shape == (len(lens), self._config.hidden_size)
        assert first[0].shape == first[1].shape == (len(lens), growth[1])
        assert len(page_table) == len(lens)
        h_BH, first_ids, first_log_probs = (
            h_BH.float().contiguous(),
            first[0].contiguous(),
            first[1].float().contiguous(),
        )
        page_table = np.ascontiguousarray(page_table, dtype=np.int32)
        ints = self._growth_sizes(len(lens), growth, page_table, cache)
        pointers = (ctypes.c_void_p * 10)(
            address(lens_B),
            first_ids.data_ptr(),
            h_BH.data_ptr(),
            first_log_probs.data_ptr(),
            address(page_table),
            out.least,
            cache.data.data_ptr(),
            *out.pointers,
        )
        while (drafted := self._lib.eyas_propose(self._handle, ints, pointers)) < 0:
            self._is_done(-drafted, int(lens_B.max()) + K - 2)
        return out.proposals(drafted)

    def grow(
        self,
        roots: Roots,
        cache: PagedCache,
        features: FeatureCache,
        growth: tuple[int, int],
        thresholds: Sequence[float],
    ) -> Proposals:
        """`extend`, `proposals` and `propose` in one call: see `engine.draft.Draft.grow`. Raises
        IndexError.
        """
        assert features.data.dtype == self.dtype
        K, out = growth[0], self._room(len(roots.lens), growth, thresholds)
        lens, starts, tokens = (
            np.array(one, dtype=np.int64) for one in (roots.lens, roots.starts, roots.tokens)
        )
        assert len(tokens) == (lens + 1 - starts).sum()
        assert len(roots.page_table) == len(lens) == len(starts)
        assert features.data.shape == (cache.data.shape[1], 3 * self._config.hidden_size)
        page_table = np.ascontiguousarray(roots.page_table, dtype=np.int32)
        ints = self._growth_sizes(len(lens), growth, page_table, cache)
        pointers = (ctypes.c_void_p * 10)(
            address(lens),
            address(starts),
            address(tokens),
            features.data.data_ptr(),
            address(page_table),
            out.least,
            cache.data.data_ptr(),
            *out.pointers,
        )
        while (drafted := self._lib.eyas_grow(self._handle, ints, pointers)) < 0:
            self._is_done(-drafted, max(roots.lens) + K - 2)
        return out.proposals(drafted)

    def _room(
        self, B: int, growth: tuple[int, int], thresholds: Sequence[float]
    ) -> CandidateBuffers:
        assert 0 < growth[1] <= min(MAX_TOPK, self._W)
        return CandidateBuffers(B, growth, thresholds)

    def _growth_sizes(
        self, B: int, growth: tuple[int, int], page_table: np.ndarray, cache: PagedCache
    ) -> ctypes.Array[ctypes.c_int64]:
        assert cache.data.dtype == self.dtype
        return (ctypes.c_int64 * 6)(
            B, *growth, page_table.shape[1], cache.page_size, cache.data.shape[1]
        )

    def _states(
        self, call: str, rows: Rows, inputs: torch.Tensor, cache: PagedCache
    ) -> torch.Tensor:
        ints, pointers = self._arguments(rows, cache)
        h = torch.empty(len(rows.token), self._config.hidden_size)
        function = getattr(self._lib, call)
        while (
            status := function(self._handle, ints, pointers, inputs.data_ptr(), h.data_ptr())
        ) != 0:
            self._is_done(status, int(rows.position.max()))
        return h


class CandidateBuffers:
    """Room for the candidates of B trees of K levels, and what a level must promise."""

    def __init__(self, B: int, growth: tuple[int, int], thresholds: Sequence[float]) -> None:
        K, k = growth
        assert (K - 1) * k <= MAX_TREE_COLUMNS
        assert len(thresholds) >= K - 1
        C = k + (K - 1) * k * k
        self._K, self._k = K, k
        self._tokens, self._scores = (
            np.empty((B, C), dtype=np.int64),
            np.empty((B, C), dtype=np.float32),
        )
        self._parents = np.empty((B, C), dtype=np.int32)
        self._least = (ctypes.c_double * max(K - 1, 1))(*thresholds[: K - 1])

    @property
    def least(self) -> int:
        return ctypes.addressof(self._least)

    @property
    def pointers(self) -> tuple[int, int, int]:
        return address(self._tokens), address(self._parents), address(self._scores)

    def proposals(self, drafted: int) -> Proposals:
        """Of so many levels behind the first."""
        count = self._k + drafted * self._k * self._k
        depths = _depths(self._K, self._k)[:count]
        return Proposals(
            self._tokens[:, :count], self._scores[:, :count], self._parents[:, :count], depths
        )


def _three(taps: Taps | None) -> ctypes.Array[ctypes.c_int64] | None:
    return None if taps is None else (ctypes.c_int64 * 3)(*sorted(taps))


@functools.cache
def _depths(K: int, k: int) -> np.ndarray:
    """Depths int32 [C] of all candidates that K draft steps can give."""
    depths: np.ndarray = np.repeat(np.arange(1, K + 1), [k, *[k * k] * (K - 1)]).astype(np.int32)
    return depths
