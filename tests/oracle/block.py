"""One layer of a target for inference, in PyTorch operators on any device, and its parts: products
with weights, norm, the MLP and its experts, the short convolution. Its twin for a CPU is `native`.

Letters: M rows of one forward, H hidden, Hq and Hk heads, D head dimension, I intermediate, E
experts, R rows of one expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.families import Activation
from eyas.model.architecture import LayerKind, TargetConfig
from eyas.model.rope import rope_table
from eyas.operators.tensors import tensor_of
from tests.oracle.attention import AttentionPlan, Weighing, path_slots
from tests.oracle.rows import TensorCache, TensorRows

Tensors = Mapping[str, Tensor]


class Linear:
    """y = x W^T + b for x [M, in], W [out, in], b [out] or None, all of one dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x).add_(residual)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * weight / sqrt(mean(x^2) + eps) over the last dimension, computed in fp32; in the dtype of
    x. A weight that keeps float32 (see `arranged`) is not rounded.
    """
    if weight.dtype != x.dtype:
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


# Where rows sit


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the M rows of one forward sit, worked out once and used by every layer.

    turns: by number of the rotary embedding, cos and sin [M, 1, dims] of each row's position, in
    the model's dtype; the first half of sin is negated. slot [M] int64: where the rows are kept.
    plans: by window and chunk, what each row sees. query_scale [M, 1, 1] or None. path [M, kernel]:
    slots of a convolution, see `path_slots`.
    """

    turns: tuple[tuple[Tensor, Tensor], ...]
    slot: Tensor
    plans: Mapping[tuple[int | None, int | None], AttentionPlan]
    query_scale: Tensor | None
    path: Tensor | None


class PositionTables:
    def __init__(self, config: TargetConfig, length: int, dtype: torch.dtype) -> None:
        self._kernel, self._scale = config.conv_kernel, config.query_scale
        attending = [kind for kind in config.layer_kinds if kind.mixer == "attention"]
        self._sights = {(kind.window, kind.chunk) for kind in attending}
        self._tables = []
        for rope in config.rotations:
            cos, sin = map(tensor_of, rope_table(rope, config.turned_dims, length))
            # rotate_half(x) * sin == roll(x, dims/2) * sin with a negated first half
            whole = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
            self._tables.append(tuple(t.to(dtype).unsqueeze(1) for t in whole))
        self._dtype = dtype

    def place(self, rows: TensorRows, page_size: int) -> Placement:
        turns = tuple(
            (cos.index_select(0, rows.position), sin.index_select(0, rows.position))
            for cos, sin in self._tables
        )
        plans = {
            (window, chunk): AttentionPlan.of(replace(rows, window=window, chunk=chunk), page_size)
            for window, chunk in self._sights
        }
        scale = None
        if self._scale is not None:
            factors = tensor_of(self._scale.of(rows.position.numpy()))
            scale = factors.to(self._dtype)[:, None, None]
        path = path_slots(rows, page_size, self._kernel) if self._kernel else None
        return Placement(turns, rows.slot, plans, scale, path)


# The layer


def joined(tensors: Tensors, names: Sequence[str]) -> Linear:
    biases = [tensors[f"{name}.bias"] for name in names if f"{name}.bias" in tensors]
    weight = torch.cat([tensors[f"{name}.weight"] for name in names])
    return Linear(weight, torch.cat(biases) if biases else None)


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """act(gate) * up. clamped_silu is gpt-oss': both cut at 7, a swish of 1.702, and up + 1."""
    if activation == "silu":
        return F.silu(gate).mul_(up)
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh").mul_(up)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(gate * 1.702) * (up + 1)


class GatedMlp:
    """down(act(gate(x)) * up(x))."""

    def __init__(self, tensors: Tensors, prefix: str, activation: Activation) -> None:
        self.gate_up = joined(tensors, [f"{prefix}gate_proj", f"{prefix}up_proj"])
        self.down = joined(tensors, [f"{prefix}down_proj"])
        self._activation = activation

    def act(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return gated(gate, up, self._activation)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.act(x))


class MixtureOfExperts:
    """Each row's best experts, weighted by the softmax of the router's logits; or, where
    `routes_input`, given the row times the sigmoid of its logit, beside a shared MLP.
    """

    def __init__(self, tensors: Tensors, config: TargetConfig) -> None:
        assert config.experts is not None
        self._experts = config.experts
        self.router = joined(tensors, ["mlp.router"])
        self.mlps = [
            GatedMlp(tensors, f"mlp.experts.{number}.", config.activation)
            for number in range(config.experts.num_experts)
        ]
        has_shared = config.experts.shared_size is not None
        self.shared = GatedMlp(tensors, "mlp.shared.", config.activation) if has_shared else None

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.router(x).float()
        routes = self._experts.routes_input
        best = logits.sort(dim=-1, descending=True, stable=True)
        chosen = best.indices[:, : self._experts.num_experts_per_tok]
        weights = (logits.sigmoid() if routes else logits.softmax(-1)).gather(1, chosen)
        if self._experts.renormalises:
            weights = weights / weights.sum(-1, keepdim=True)
        mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for number in sorted(set(chosen.flatten().tolist())):
            rows, places = (chosen == number).nonzero().unbind(1)
            shares = weights[rows, places, None]
            if routes:
                out = self.mlps[number]((x[rows] * shares).to(x.dtype)).float()
            else:
                out = self.mlps[number](x[rows]).float() * shares
            mixed.index_add_(0, rows, out)
        if self.shared is not None:
            mixed = mixed + self.shared(x).float()
        return mixed.to(x.dtype)


class ShortConvolution:
    """LFM2's mixer: out(C * conv(B * x)), where B, C and x are `in` of the input."""

    def __init__(self, tensors: Tensors) -> None:
        self.input, self.output = (
            joined(tensors, ["conv.in_proj"]),
            joined(tensors, ["conv.out_proj"]),
        )
        self._taps_HK, self._bias = tensors["conv.conv.weight"], tensors.get("conv.conv.bias")

    def __call__(self, x: Tensor, layer: int, at: Placement, cache: TensorCache) -> Tensor:
        assert at.path is not None
        B, C, x = self.input(x).chunk(3, dim=-1)
        cache.write(layer, at.slot, B * x)
        H = x.shape[1]
        kept = cache.data[layer, :, :H][at.path.clamp(min=0)]  # [M, kernel, H]
        kept = kept.masked_fill((at.path < 0)[..., None], 0)
        y = (kept.float() * self._taps_HK.T.float()).sum(1)
        if self._bias is not None:
            y = y + self._bias.float()
        return self.output(C * y.to(x.dtype))


class PagedAttention:
    def __init__(self, config: TargetConfig, tensors: Tensors, kind: LayerKind) -> None:
        self._kind, self._eps = kind, config.rms_norm_eps
        self._Hq, self._Hk = config.num_attention_heads, config.num_key_value_heads
        self._D, self._turned = config.head_dim, config.turned_dims
        self.qkv = joined(tensors, [f"self_attn.{name}_proj" for name in "qkv"])
        self.out = joined(tensors, ["self_attn.o_proj"])
        self._norms = [tensors.get(f"self_attn.{name}_norm.weight") for name in "qk"]
        self._weighing = Weighing(
            config.attention_scale, config.attention_softcap, tensors.get("self_attn.sinks")
        )

    def __call__(self, x: Tensor, layer: int, at: Placement, cache: TensorCache) -> Tensor:
        Hq, Hk, D = self._Hq, self._Hk, self._D
        qkv = self.qkv(x).view(-1, Hq + 2 * Hk, D)
        for norm, heads in zip(self._norms, (slice(0, Hq), slice(Hq, Hq + Hk)), strict=True):
            if norm is not None:
                wide = qkv[:, heads] if norm.numel() == D else qkv[:, heads].flatten(1)
                qkv[:, heads] = rms_norm(wide, norm, self._eps).view(qkv[:, heads].shape)
        if self._kind.rope is not None:
            turned = qkv[:, : Hq + Hk, : self._turned]
            cos, sin = at.turns[self._kind.rope]
            rolled = turned.roll(self._turned // 2, -1)
            turned.mul_(cos).addcmul_(rolled, sin)
        if self._kind.unit_heads:
            ones = torch.ones(D, dtype=x.dtype)
            qkv[:, : Hq + Hk] = rms_norm(qkv[:, : Hq + Hk], ones, self._eps)
        cache.write(layer, at.slot, qkv[:, Hq:])
        is_scaled = at.query_scale is not None and self._kind.scales
        q = qkv[:, :Hq] * at.query_scale if is_scaled else qkv[:, :Hq]
        plan = at.plans[self._kind.window, self._kind.chunk]
        mixed = plan.attend(q, cache.keys_and_values(layer, (Hk, D)), self._weighing)
        return mixed.reshape(-1, Hq * D)


class Block:
    """One layer over `tensors` by our names (`self_attn.q_proj.weight`, ...)."""

    def __init__(self, config: TargetConfig, tensors: Tensors, layer: int) -> None:
        kind = config.layer_kinds[layer]
        self._layer, self._eps = layer, config.rms_norm_eps
        self._residual_scale = config.residual_scale
        is_attention = kind.mixer == "attention"
        self.attention = PagedAttention(config, tensors, kind) if is_attention else None
        self.convolution = None if is_attention else ShortConvolution(tensors)
        self.mlp: GatedMlp | MixtureOfExperts
        if kind.has_experts:
            self.mlp = MixtureOfExperts(tensors, config)
        else:
            self.mlp = GatedMlp(tensors, "mlp.", config.activation)
        self._mlp_norm, self._mixer_out_norm, self._mlp_out_norm = (
            tensors.get(f"{name}.weight")
            for name in ("post_attention_layernorm", "attention_out_norm", "mlp_out_norm")
        )

    def __call__(self, x: Tensor, residual: Tensor, at: Placement, cache: TensorCache) -> Tensor:
        if self.attention is not None:
            mixed = self.attention(x, self._layer, at, cache)
            h = self._added(residual, self.attention.out, mixed, self._mixer_out_norm)
        else:
            assert self.convolution is not None
            h = residual + self.convolution(x, self._layer, at, cache)
        x = h if self._mlp_norm is None else rms_norm(h, self._mlp_norm, self._eps)
        if isinstance(self.mlp, GatedMlp):
            return self._added(h, self.mlp.down, self.mlp.act(x), self._mlp_out_norm)
        return h + self.mlp(x) * self._residual_scale

    def _added(self, h: Tensor, linear: Linear, x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is None and self._residual_scale == 1.0:
            return linear.add(x, h)
        y = linear(x)
        return h + (y if norm is None else rms_norm(y, norm, self._eps)) * self._residual_scale
