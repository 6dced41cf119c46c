"""One decoder layer of the Llama family for inference, in PyTorch operators on any device, and its
parts: products with weights, rotary embedding, norm.

Targets and draft heads share it: a target's input is normed hidden states, a head's [embedding,
feature] of twice the width. Its twin for a CPU is `native`.

Letters: M rows of one forward, H hidden, Hq and Hk heads, D head dimension, I intermediate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.model.attention import AttentionPlan
from eyas.model.config import DecoderConfig, RopeConfig
from eyas.model.rows import PagedCache, Rows

Tensors = Mapping[str, Tensor]
_HAS_ONEDNN = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


class Linear:
    """y = x W^T + b for x [M, in], W [out, in], b [out] or None, all of one dtype and device.

    On a CPU the time of a decode step is the reading of weights, and a product that lays its weight
    out anew on every call reads it twice: the weight is kept in oneDNN's blocked layout, one copy
    for any number of rows. Other devices and dtypes take `F.linear`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.bias = bias
        self._weight = weight
        self._blocked: Tensor | None = None
        if (
            _HAS_ONEDNN
            and weight.device.type == "cpu"
            and weight.dtype in (torch.bfloat16, torch.float32)
        ):
            self._blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def __call__(self, x: Tensor) -> Tensor:
        """[M, in] -> [M, out]."""
        if self._blocked is not None:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._blocked, self.bias, "none", [], ""
            )
            return y
        return F.linear(x, self._weight, self.bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """[M, in], [M, out] -> residual + self(x), in one operator where there is one."""
        if self._blocked is not None and self.bias is None:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, residual, self._blocked, None, "add")
            return y
        return self(x).add_(residual)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * weight / sqrt(mean(x^2) + eps) over the last dimension, computed in fp32."""
    return F.rms_norm(x, weight.shape, weight, eps)


# Rotary embedding, in Llama's convention: channel d turns with channel d + D / 2


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each channel pair, float32 [D / 2].

    linear: all divided by `factor`. llama3 (Llama 3.1's published scaling): waves that fit
    `high_freq_factor` times or more into the original context stay, those that fit
    `low_freq_factor` times or fewer are divided by `factor`, and those between are interpolated.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        waves_in_context = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (waves_in_context - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        kept = kept.clamp(0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / rope.factor)
    return frequencies


def rotation(rope: RopeConfig, head_dim: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of integer positions [...], float32 [..., D] each; the second half of D
    repeats the first.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * inverse_frequencies(rope, head_dim).to(
        positions.device
    )
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def rope_table(rope: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 .. length - 1, float32 [length, D] each."""
    return rotation(rope, head_dim, torch.arange(length))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [..., D] by cos, sin broadcastable to it; the result has the dtype of x times that of
    the table.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the M rows of one forward sit, worked out once and used by every layer.

    cos, sin [M, 1, D]: the rotation of each row's position, in the model's dtype; the first half of
    sin is negated. slot [M] int64: where keys and values go. plan: what each row sees.
    """

    cos: Tensor
    sin: Tensor
    slot: Tensor
    plan: AttentionPlan


class Rope:
    """The rotation table of a model, and the placement of its forwards."""

    def __init__(self, config: DecoderConfig, length: int, dtype: torch.dtype, device: str) -> None:
        cos, sin = rope_table(config.rope, config.head_dim, length)
        # rotate_half(x) * sin == roll(x, D/2) * sin with a negated first half
        sin[:, : config.head_dim // 2].neg_()
        self._cos, self._sin = (table.to(device, dtype).unsqueeze(1) for table in (cos, sin))

    def place(self, rows: Rows, page_size: int) -> Placement:
        cos, sin = (
            self._cos.index_select(0, rows.position),
            self._sin.index_select(0, rows.position),
        )
        return Placement(cos, sin, rows.slot, AttentionPlan.of(rows, page_size))


# The layer


class Block:
    """Attention and MLP of one layer over `tensors` named as in transformers
    (`self_attn.q_proj.weight`, ...).
    """

    def __init__(self, config: DecoderConfig, tensors: Tensors, layer: int) -> None:
        def joined(names: Sequence[str]) -> Linear:
            biases = [tensors[f"{name}.bias"] for name in names if f"{name}.bias" in tensors]
            weight = torch.cat([tensors[f"{name}.weight"] for name in names])
            return Linear(weight, torch.cat(biases) if biases else None)

        self._layer, self._eps = layer, config.rms_norm_eps
        self._Hq, self._Hk, self._D = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self._qkv = joined([f"self_attn.{name}_proj" for name in "qkv"])
        self._out = joined(["self_attn.o_proj"])
        self._gate_up = joined(["mlp.gate_proj", "mlp.up_proj"])
        self._down = joined(["mlp.down_proj"])
        self._post_norm = tensors["post_attention_layernorm.weight"]
        self._q_norm, self._k_norm = (
            tensors.get("self_attn.q_norm.weight"),
            tensors.get("self_attn.k_norm.weight"),
        )

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self._qkv, self._out, self._gate_up, self._down)

    def __call__(self, x: Tensor, residual: Tensor, at: Placement, cache: PagedCache) -> Tensor:
        """x [M, in] (normed), residual [M, H] -> the layer's output [M, H]. Writes the rows' keys
        and values.
        """
        Hq, Hk, D = self._Hq, self._Hk, self._D
        qkv = self._qkv(x).view(-1, Hq + 2 * Hk, D)
        q_and_k = qkv[:, : Hq + Hk]
        if self._q_norm is not None and self._k_norm is not None:
            q_and_k[:, :Hq] = rms_norm(q_and_k[:, :Hq], self._q_norm, self._eps)
            q_and_k[:, Hq:] = rms_norm(q_and_k[:, Hq:], self._k_norm, self._eps)
        rolled = q_and_k.roll(D // 2, -1)
        q_and_k.mul_(at.cos).addcmul_(rolled, at.sin)
        cache.write(self._layer, at.slot, qkv[:, Hq:].view(-1, 2, Hk, D))
        mixed = at.plan.attend(qkv[:, :Hq], cache.data[self._layer])
        h = self._out.add(mixed.reshape(-1, Hq * D), residual)
        gate, up = self._gate_up(rms_norm(h, self._post_norm, self._eps)).chunk(2, dim=-1)
        return self._down.add(F.silu(gate).mul_(up), h)
