"""One decoder layer for inference, shared by targets and draft heads: fused projections, cache, tree attention.

Knows the Llama family's layer. Does not know where its input comes from: a target gives it normed hidden states, a head
gives it [embedding, feature] of twice the width.

Letters: M tokens of one forward (B requests x N tokens), H hidden, Hq and Hk heads, D head dimension, I intermediate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from eyas.model.attention import tree_attention
from eyas.model.cache import KVCache
from eyas.model.config import DecoderConfig
from eyas.model.linear import Linear
from eyas.model.rope import rope_table

Tensors = Mapping[str, torch.Tensor]


@dataclass(slots=True)
class Placement:
    """Where the M = B * N tokens of one forward sit, worked out once and used by every layer.

    The B requests lie in cache rows [first_row, first_row + B), and the first `columns` columns of each are looked at.
    cos, sin [M, 1, D]: the rotation of each token's position, in the model's dtype; the first half of sin is negated.
    slots [M] int64: where keys and values go. mask [B or 1, 1, N, C] additive, or None when all columns are seen.
    """

    first_row: int
    B: int
    N: int
    columns: int
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None


class Rope:
    """The rotation table of a model, and the placement of its forwards."""

    def __init__(self, config: DecoderConfig, length: int, dtype: torch.dtype, device: str) -> None:
        cos, sin = rope_table(config.rope, config.head_dim, length)
        sin[:, : config.head_dim // 2].neg_()  # rotate_half(x) * sin == roll(x, D/2) * sin with a negated first half
        self._cos, self._sin = (table.to(device, dtype).unsqueeze(1) for table in (cos, sin))
        self._dtype, self._device = dtype, device

    def place(
        self, first_row: int, columns: int, positions: np.ndarray, slots: np.ndarray, mask: torch.Tensor | None
    ) -> Placement:
        """The placement of B * N tokens: positions and slots int64 [B, N], mask as in Placement, in any dtype."""
        positions_M = torch.from_numpy(positions.ravel()).to(self._device)
        slots_M = torch.from_numpy(slots.ravel()).to(self._device)
        cos, sin = self._cos.index_select(0, positions_M), self._sin.index_select(0, positions_M)
        mask = None if mask is None else mask.to(self._device, self._dtype)
        B, N = positions.shape
        return Placement(first_row, B, N, columns, cos, sin, slots_M, mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * weight / sqrt(mean(x^2) + eps) over the last dimension, computed in fp32."""
    return F.rms_norm(x, weight.shape, weight, eps)


class Block:
    """Attention and MLP of one layer over `tensors` named as in transformers (`self_attn.q_proj.weight`, ...)."""

    def __init__(self, config: DecoderConfig, tensors: Tensors, layer: int) -> None:
        def joined(names: Sequence[str]) -> Linear:
            biases = [tensors[f"{name}.bias"] for name in names if f"{name}.bias" in tensors]
            return Linear(torch.cat([tensors[f"{name}.weight"] for name in names]), torch.cat(biases) if biases else None)

        self._layer, self._eps = layer, config.rms_norm_eps
        self._Hq, self._Hk, self._D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._qkv = joined([f"self_attn.{name}_proj" for name in "qkv"])
        self._out = joined(["self_attn.o_proj"])
        self._gate_up = joined(["mlp.gate_proj", "mlp.up_proj"])
        self._down = joined(["mlp.down_proj"])
        self._post_norm = tensors["post_attention_layernorm.weight"]
        self._q_norm, self._k_norm = tensors.get("self_attn.q_norm.weight"), tensors.get("self_attn.k_norm.weight")

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self._qkv, self._out, self._gate_up, self._down)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, at: Placement, cache: KVCache) -> torch.Tensor:
        """x [M, in] (normed), residual [M, H] -> the layer's output [M, H]. Writes the tokens' keys and values."""
        Hq, Hk, D = self._Hq, self._Hk, self._D
        qkv = self._qkv(x).view(-1, Hq + 2 * Hk, D)
        q_and_k = qkv[:, : Hq + Hk]
        if self._q_norm is not None and self._k_norm is not None:
            q_and_k[:, :Hq] = rms_norm(q_and_k[:, :Hq], self._q_norm, self._eps)
            q_and_k[:, Hq:] = rms_norm(q_and_k[:, Hq:], self._k_norm, self._eps)
        rolled = q_and_k.roll(D // 2, -1)
        q_and_k.mul_(at.cos).addcmul_(rolled, at.sin)
        cache.write(self._layer, at.slots, qkv[:, Hq:].view(-1, 2, Hk, D))
        keys, values = cache.read(self._layer, at.first_row, at.B, at.columns)
        q = qkv[:, :Hq].view(at.B, at.N, Hq, D).transpose(1, 2)
        mixed = tree_attention(q, keys, values, at.mask).transpose(1, 2).reshape(-1, Hq * D)
        h = self._out.add(mixed, residual)
        gate, up = self._gate_up(rms_norm(h, self._post_norm, self._eps)).chunk(2, dim=-1)
        return self._down.add(F.silu(gate).mul_(up), h)
