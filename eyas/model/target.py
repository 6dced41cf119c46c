"""The target for inference: a Llama-family decoder with the three taps EAGLE-3 needs.

Two ways to the same values: `Layers`, PyTorch operators on any device, and on a CPU `native`, one
call a forward. `tests/test_target.py` holds the logits to transformers'.

Letters: M rows of one forward, R rows whose logits are asked for, B batch, T sequence, Ht hidden, V
vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch
import torch.nn.functional as F

from eyas.errors import MismatchError
from eyas.families import FAMILIES
from eyas.gguf.blocks import KINDS, BlockMatrix, refuse_other_kinds
from eyas.gguf.checkpoint import lies_in_file, matrices_apart
from eyas.model.architecture import TargetConfig
from eyas.model.arrangement import arranged
from eyas.model.attention import capped
from eyas.model.block import Block, Linear, PositionTables, rms_norm
from eyas.model.config import Taps, TargetShape
from eyas.model.draws import Draws
from eyas.model.library import unavailable
from eyas.model.native import NativeTarget, Verified, runs
from eyas.model.packed import Blocks
from eyas.model.rows import (
    FeatureCache,
    NodesToVerify,
    PagedCache,
    Roots,
    Rows,
    TargetOutput,
    prompt_rows,
)
from eyas.model.weights import (
    LazyTensors,
    matrix_sha256,
    read_tensors,
    refuse_nonfinite,
    remembered,
    rounded,
    tensor_sha256,
    with_matrices,
)

Dtype = Literal["auto", "float32", "bfloat16", "float16", "packed"]
# packed: what is not a quantised product, keys, values and features
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "packed": torch.bfloat16,
}
PAGE_SIZE = 16


def default_device() -> str:
    """Where a stage computes that is given no device: a GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def stored_dtype(shape: TargetShape) -> Dtype:
    """The checkpoint's own precision, float32 where it is none of DTYPES."""
    return cast(Dtype, shape.dtype) if shape.dtype in DTYPES else "float32"


def resolve_dtype(dtype: Dtype, shape: TargetShape, device: str = "cpu") -> Dtype:
    """The precision that a target runs in: a key of DTYPES.

    "auto" is the checkpoint's own where this machine computes in it at full speed, on CUDA and by
    the native decoder, which runs no float16: the answers and features are then those of the engine
    that serves the model, at half the bytes of float32. Elsewhere it is float32: PyTorch's bfloat16
    on other processors is slower than float32 and less exact. "packed" is only taken where it is
    asked for: the matrices of a GGUF file in its own blocks, multiplied as they are.
    """
    if dtype != "auto":
        return dtype
    is_cuda = device.startswith("cuda")
    is_fast = is_cuda or (shape.dtype == "bfloat16" and unavailable() is None)
    return stored_dtype(shape) if is_fast else "float32"


class Layers:
    """The whole decoder in PyTorch operators."""

    def __init__(
        self,
        config: TargetConfig,
        tensors: dict[str, torch.Tensor],
        lm_head: torch.Tensor,
    ) -> None:
        """tensors: checked, of one dtype and device."""
        self._config, self._embed_tokens = config, tensors["model.embed_tokens.weight"]
        self.head = Linear(lm_head)
        self._norm, self._eps = tensors["model.norm.weight"], config.rms_norm_eps
        self._input_norms, self._blocks = [], []
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            own = {
                name.removeprefix(prefix): tensor
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }
            self._input_norms.append(own.get("input_layernorm.weight"))
            self._blocks.append(Block(config, own, layer))
        # The last position of a request and the nodes of its tree: a little beyond the trained
        # context never hurts.
        length = config.max_position_embeddings + 64
        self._positions = PositionTables(
            config, length, self._embed_tokens.dtype, str(self._embed_tokens.device)
        )

    def hidden(
        self, rows: Rows, cache: PagedCache, taps: tuple[int, ...] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Last hidden [M, Ht] after the final norm; aux_hidden [M, 3 * Ht] where taps are given."""
        h = F.embedding(rows.token, self._embed_tokens)
        if self._config.embed_scale != 1.0:
            h = h * torch.tensor(self._config.embed_scale, dtype=h.dtype, device=h.device)
        return self.go_on(h, rows, cache, taps)

    def go_on(
        self, h: torch.Tensor, rows: Rows, cache: PagedCache, taps: tuple[int, ...] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `hidden`, from what the first layer takes, [M, Ht]."""
        at = self._positions.place(rows, cache.page_size)
        tapped = []
        for layer, (input_norm, block) in enumerate(
            zip(self._input_norms, self._blocks, strict=True)
        ):
            x = h if input_norm is None else rms_norm(h, input_norm, self._eps)
            h = block(x, h, at, cache)
            if taps is not None and layer in taps:
                tapped.append(h)
        aux_hidden = torch.cat(tapped, dim=-1) if taps is not None else None
        return rms_norm(h, self._norm, self._eps), aux_hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of last hidden states [R, Ht], as the target has them: scaled, and cut softly."""
        logits = self.head(hidden)
        if self._config.logit_scale != 1.0:
            logits = logits * self._config.logit_scale
        return capped(logits, self._config.logit_softcap)

    def last(self, count: int) -> Layers:
        """The last `count` layers and the norm, to `go_on` with."""
        first = len(self._blocks) - count
        short = copy.copy(self)
        short._input_norms, short._blocks = self._input_norms[first:], self._blocks[first:]
        return short


class Target:
    """Weights of a target, laid out for this machine."""

    def __init__(
        self,
        config: TargetConfig,
        tensors: dict[str, torch.Tensor],
        dtype: Dtype = "auto",
        device: str = "cpu",
        native: bool = True,
        blocks: Blocks | None = None,
        lm_head_sha256: str | None = None,
    ) -> None:
        """Lay out a checkpoint's tensors, named as Hugging Face names them.

        dtype: see `resolve_dtype`. native: False takes PyTorch operators even if the native decoder
        could run. blocks: matrices of a GGUF file in its own formats, which come before tensors.
        lm_head_sha256: where it is known. Raises MismatchError when a tensor is missing or has
        another shape, or this machine does not run "packed".
        """
        self.config, self.device = config, device
        self.precision = resolve_dtype(dtype, config, device)
        self.dtype = DTYPES[self.precision]
        matrices = arranged(config, blocks or {})
        # as stored, mapped from the files: another precision is made where it is needed
        self._tensors = with_matrices(arranged(config, tensors), matrices, stored_dtype(config))
        check_shapes(config, self._tensors.shapes)
        self.blocks = (
            {name: one for name, one in matrices.items() if one.kind in KINDS}
            if self.precision == "packed"
            else {}
        )
        self._head_name = (
            "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        )
        self.lm_head_sha256 = lm_head_sha256 or (
            matrix_sha256(matrices[self._head_name])
            if self._head_name in matrices
            else tensor_sha256(self._tensors[self._head_name])
        )
        self.is_native = (
            native
            and device == "cpu"
            and self.dtype != torch.float16
            and runs(config)
            and unavailable() is None
        )
        if self.blocks and native and not self.is_native:
            why = unavailable() if device == "cpu" else f"not on {device}"
            raise MismatchError(
                f"dtype packed is run by the native decoder on a CPU only: {why or 'its shape'}",
                "take another dtype: the weights are then dequantised",
            )
        self._native = (
            NativeTarget(
                config, LazyTensors(self._tensors.shapes, self._cast), self.dtype, self.blocks
            )
            if self.is_native
            else None
        )

    @classmethod
    def load(
        cls, folder: str | Path, dtype: Dtype = "auto", device: str = "cpu", native: bool = True
    ) -> Target:
        """Load a Hugging Face folder, or what a GGUF file became. Raises MissingInputError,
        CorruptError, MismatchError.
        """
        config, root = TargetConfig.from_folder(folder), Path(folder)
        if dtype != "packed" and not lies_in_file(root):
            tensors = read_tensors(folder)
            refuse_nonfinite(folder, tensors)
            return cls(config, tensors, dtype, device, native)
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
        return cls(config, tensors, dtype, device, native, matrices, sha256)

    @cached_property
    def embed_tokens(self) -> torch.Tensor:
        """[V, Ht] in this target's precision; what is packed has rows of its own."""
        return self._tensors["model.embed_tokens.weight"].to(self.device, self.dtype)

    @cached_property
    def lm_head(self) -> torch.Tensor:
        """[V, Ht] in this target's precision."""
        if self.config.tie_word_embeddings:
            return self.embed_tokens
        return self._tensors[self._head_name].to(self.device, self.dtype)

    @property
    def embeddings(self) -> torch.Tensor | BlockMatrix:
        """The embeddings as they are read: `embed_tokens`, or their blocks."""
        return self.blocks.get("model.embed_tokens.weight") or self.embed_tokens

    @property
    def fingerprint(self) -> str:
        """Shape and lm_head's hash, as the key of what was measured of this target's speed."""
        return f"{self.config.model_dump_json()} {self.lm_head_sha256}"

    @cached_property
    def layers(self) -> Layers:
        """The decoder in PyTorch operators, laid out when it is first asked for; of blocks it
        multiplies the dequantised numbers.
        """
        tensors = {name: self._cast(name) for name in self._tensors if name != "lm_head.weight"}
        return Layers(self.config, tensors, self.lm_head)

    def _cast(self, name: str) -> torch.Tensor:
        """A tensor in this target's precision and on its device."""
        if name == "model.embed_tokens.weight":
            return self.embed_tokens
        tensor = self._tensors[name]
        # a norm that was given its offset keeps float32: rounded, the offset would be lost
        keeps = FAMILIES[self.config.family].norm_offset != 0 and tensor.ndim == 1
        return tensor.to(self.device, tensor.dtype if keeps else self.dtype)

    def new_cache(self, num_pages: int, page_size: int = PAGE_SIZE) -> PagedCache:
        config = self.config
        return PagedCache(
            config.num_hidden_layers,
            num_pages,
            page_size,
            config.slot_width,
            self.dtype,
            self.device,
        )

    def forward(
        self,
        rows: Rows,
        cache: PagedCache,
        taps: Taps | None = None,
        logits_of: torch.Tensor | None = None,
        features: FeatureCache | None = None,
    ) -> TargetOutput:
        """One pass over the rows: writes their keys and values, returns logits and features.

        taps: layers whose outputs are the features; None computes none. logits_of: int64 [R], the
        rows to compute logits of; None for all. features: a cache that the features are written to,
        at the rows' slots; without it they are in the output. The output's tensors may be buffers
        that the next forward overwrites.
        """
        if self._native is not None:
            return self._native.forward(rows, cache, taps, logits_of, features)
        hidden, aux_hidden = self.layers.hidden(rows, cache, taps)
        if features is not None and aux_hidden is not None:
            features.write(rows.slot, aux_hidden)
            aux_hidden = None
        logits = self.layers.logits(hidden if logits_of is None else hidden[logits_of])
        return TargetOutput(aux_hidden, logits, logits.argmax(-1))

    def hidden(
        self, rows: Rows, cache: PagedCache, taps: Taps
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Last hidden [M, Ht] after the final norm and aux_hidden [M, 3 * Ht], in the target's
        dtype: the numbers that `forward` computes, bit for bit where the native decoder runs.
        """
        if self._native is not None:
            return self._native.hidden(rows, cache, taps)
        last_hidden, aux_hidden = self.layers.hidden(rows, cache, taps)
        assert aux_hidden is not None
        return last_hidden, aux_hidden

    def verify(
        self,
        roots: Roots,
        chosen: NodesToVerify,
        cache: PagedCache,
        taps: Taps | None,
        features: FeatureCache | None,
        draws: Draws,
    ) -> Verified:
        """Verification in one native call; only if `is_native`: see `NativeTarget.verify`.

        Without it, `Rounds._verify_step_by_step` does the same in Python: forward, walk, move.
        """
        assert self._native is not None
        return self._native.verify(roots, chosen, cache, taps, features, draws)

    @torch.inference_mode()
    def features(
        self, tokens_BT: torch.Tensor, taps: tuple[int, ...] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [B, T] -> aux_hidden [B, T, 3 * Ht] and last_hidden [B, T, Ht] (post-norm).

        Both in the target's dtype. Right padding is harmless: attention is causal. taps: by default
        the three of EAGLE-3, as by `hidden`; or any number of layers, ascending, by PyTorch
        operators.
        """
        B, T = tokens_BT.shape
        pages = -(-T // PAGE_SIZE)
        page_table = np.arange(B * pages, dtype=np.int32).reshape(B, pages)
        rows = prompt_rows(tokens_BT.tolist(), [0] * B, page_table, PAGE_SIZE, self.device)
        cache = self.new_cache(B * pages)
        if taps is None:
            hidden, aux_hidden = self.hidden(rows, cache, self.config.default_taps)
        else:
            hidden, some = self.layers.hidden(rows, cache, taps)
            assert some is not None
            aux_hidden = some
        return aux_hidden.view(B, T, -1), hidden.view(B, T, -1)

    @torch.inference_mode()
    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """int64 [B, T] -> logits [B, T, V]: for checks, not for decoding."""
        _, hidden_BTH = self.features(tokens_BT)
        return self.layers.logits(hidden_BTH.flatten(0, 1)).view(*tokens_BT.shape, -1)


class TargetTail:
    """The last layers of a target, and its final norm, without the weights of the others: what is
    left to compute of hidden states that another engine computed.
    """

    def __init__(self, target: Target, count: int) -> None:
        """count: layers, 0 for the norm alone."""
        self._config, self._device, self._dtype = target.config, target.device, target.dtype
        self._layers = target.layers.last(count)

    @torch.inference_mode()
    def __call__(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """What the first of the layers takes, [T, Ht] of one sample -> last hidden [T, Ht]."""
        T, config = len(hidden_TH), self._config
        pages = np.arange(-(-T // PAGE_SIZE), dtype=np.int32)[None]
        rows = prompt_rows([[0] * T], [0], pages, PAGE_SIZE, self._device)  # the tokens: not read
        width = config.slot_width
        cache = PagedCache(
            config.num_hidden_layers, pages.size, PAGE_SIZE, width, self._dtype, self._device
        )
        h = hidden_TH.to(self._device, self._dtype)
        return self._layers.go_on(h, rows, cache, None)[0]


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
        mlps, inner, has_bias = [f"{prefix}mlp."], config.intermediate_size, config.mlp_bias
        if kind.has_experts:
            assert config.experts is not None
            E, inner, has_bias = (
                config.experts.num_experts,
                config.experts.intermediate_size,
                config.experts.bias,
            )
            add(f"{prefix}mlp.router", (E, H), has_bias)
            mlps = [f"{prefix}mlp.experts.{number}." for number in range(E)]
        for mlp in mlps:
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
        raise MismatchError(
            f"the weights do not fit config.json: {listed}",
            "restore the checkpoint from its source",
        )
