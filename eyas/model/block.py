"""One decoder layer for inference, shared by targets and draft heads: fused projections, cache,
tree attention.

Knows the Llama family's layer in PyTorch operators, on any device; its twin for a CPU is `native`.
Does not know where its input comes from: a target gives it normed hidden states, a head gives it
[embedding, feature] of twice the width.

Letters: M rows of one forward, H hidden, Hq and Hk heads, D head dimension, I intermediate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from eyas.model.attention import AttentionPlan, attention_plan, tree_attention
from eyas.model.cache import PagedCache
from eyas.model.config import DecoderConfig
from eyas.model.linear import Linear
from eyas.model.rope import rope_table
from eyas.model.rows import Rows

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the M rows of one forward sit, worked out once and used by every layer.

    cos, sin [M, 1, D]: the rotation of each row's position, in the model's dtype; the first half of
    sin is negated. slot [M] int64: where keys and values go. plan: what each row sees.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    slot: torch.Tensor
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
        return Placement(cos, sin, rows.slot, attention_plan(rows, page_size))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x * weight / sqrt(mean(x^2) + eps) over the last dimension, computed in fp32."""
    return F.rms_norm(x, weight.shape, weight, eps)


class Block:
    """Attention and MLP of one layer over `tensors` named as in transformers
    (`self_attn.q_proj.weight`, ...).
    """

    def __init__(self, config: DecoderConfig, tensors: Tensors, layer: int) -> None:
        def joined(names: Sequence[str]) -> Linear:
            biases = [tensors[f"{name}.bias"] for name in names if f"{name}.bias" in tensors]
            return Linear(
                torch.cat([tensors[f"{name}.weight"] for name in names]),
                torch.cat(biases) if biases else None,
            )

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

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, at: Placement, cache: PagedCache
    ) -> torch.Tensor:
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
        mixed = tree_attention(qkv[:, :Hq], cache.data[self._layer], at.plan)
        h = self._out.add(mixed.reshape(-1, Hq * D), residual)
        gate, up = self._gate_up(rms_norm(h, self._post_norm, self._eps)).chunk(2, dim=-1)
        return self._down.add(F.silu(gate).mul_(up), h)
