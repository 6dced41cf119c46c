"""The draft head: EAGLE-3's one decoder layer over [embedding, feature] (arXiv 2503.01840), in
PyTorch. Weights start as NaN: they are loaded, or drawn by `train.start.initialise`.

    f = fc(aux_hidden)                                  once, on the target's features
    x = [input_layernorm(embedding), hidden_norm(h)]    h = f, then the layer's output, un-normed
    h = h + o(attention(x)) ;  h = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(h))

Flags for published heads:

    norm_before_fc          aux_hidden is normed before fc, as a whole
    fc_norm                 its three streams are, each
    norm_before_residual    h = hidden_norm(h) + o(attention(x))
    norm_output             the layer puts out, and is fed, norm(h); logits = lm_head of that

Letters: T sequence, H hidden, X = 2 H, W draft vocabulary, V target vocabulary, D head dimension,
Hq and Hk heads of queries and of keys and values.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.errors import MismatchError
from eyas.model.config import HeadConfig, RopeConfig, TargetShape
from eyas.model.dialects import EMBED_TOKENS, LM_HEAD
from eyas.model.rope import inverse_frequencies
from eyas.operators.tensors import read_head, write_head
from eyas.operators.ttt import Rotation

KeysValues = tuple[Tensor, Tensor]  # [B, S, Hk, D] each


def rotation(rope: RopeConfig, dims: int, positions: Tensor) -> Rotation:
    """Cosines and sines of integer positions [...], float32 [..., dims] each, in equal halves."""
    frequencies = _frequencies_on(rope, dims, positions.device)
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


@functools.cache
def _frequencies_on(rope: RopeConfig, dims: int, device: torch.device) -> Tensor:
    return torch.from_numpy(inverse_frequencies(rope, dims)).to(device)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., dims] by cos, sin that broadcast to it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class RmsNorm(nn.Module):
    """x * weight / sqrt(mean(x^2) + eps), computed in float32 or wider; the dtype is x's."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)  # with one dtype it is one kernel on a GPU
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, weight.shape, weight, self.eps)


class Attention(nn.Module):
    """The four projections; the caller computes attention."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        H, D = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(2 * H, config.num_attention_heads * D, bias=False)
        self.k_proj = nn.Linear(2 * H, config.num_key_value_heads * D, bias=False)
        self.v_proj = nn.Linear(2 * H, config.num_key_value_heads * D, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * D, H, bias=False)


class Mlp(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Midlayer(nn.Module):
    """The decoder layer's weights, under EAGLE's names."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.hidden_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)


class Head(nn.Module):
    """A draft head of `config`'s shape. `forward` takes embeddings: the target's or the head's own.

    embed_tokens [V, H], float32: a published head's own; not trained or written. feature_scale
    [3 H], float32: multiplies fc's inputs in training, and is folded into fc before the head is
    written (`train.start.scale_to_states`).
    """

    d2t: Tensor
    t2d: Tensor
    embed_tokens: Tensor | None
    feature_scale: Tensor | None

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("embed_tokens", None, persistent=False)
        self.register_buffer("feature_scale", None)
        H, W = config.hidden_size, config.draft_vocab_size
        with torch.device("meta"):  # skip random initialisation
            if config.norm_before_fc:
                self.input_norm = RmsNorm(3 * H, config.rms_norm_eps)
            if config.fc_norm:
                self.fc_norm = nn.ModuleList(RmsNorm(H, config.rms_norm_eps) for _ in range(3))
            self.fc = nn.Linear(3 * H, H, bias=False)
            self.midlayer = Midlayer(config)
            self.norm = RmsNorm(H, config.rms_norm_eps)
            self.lm_head = nn.Linear(H, W, bias=False)
            self.register_buffer("d2t", torch.empty(W, dtype=torch.int64))
            self.register_buffer("t2d", torch.empty(config.vocab_size, dtype=torch.bool))
        self.to_empty(device="cpu")
        for weight in self.parameters():
            nn.init.constant_(weight, float("nan"))
        self.lm_head.requires_grad_(config.train_lm_head)
        self.set_vocabulary(torch.zeros(W, dtype=torch.int64), torch.arange(config.vocab_size) < W)

    def set_vocabulary(self, d2t_offset: Tensor, t2d_mask: Tensor) -> None:
        """Take d2t_offset int64 [W] and t2d_mask bool [V]."""
        self.d2t.copy_(d2t_offset)
        self.t2d.copy_(t2d_mask)

    @property
    def target_ids_W(self) -> Tensor:
        """The target's id of each draft token, int64 [W]."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    # Parts of the layer, which `unroll` calls

    def fuse(self, aux_hidden: Tensor) -> Tensor:
        """[..., 3 H] -> [..., H]: the target's three streams to one feature."""
        fused: Tensor = self.fc(self.fc_inputs(aux_hidden))
        return fused

    def fc_inputs(self, aux_hidden: Tensor) -> Tensor:
        """[..., 3 H] -> [..., 3 H]: the three streams as fc takes them."""
        if self.config.fc_norm:
            streams = zip(self.fc_norm, aux_hidden.chunk(3, dim=-1), strict=True)
            aux_hidden = torch.cat([norm(stream) for norm, stream in streams], dim=-1)
        if self.config.norm_before_fc:
            aux_hidden = self.input_norm(aux_hidden)
        if self.feature_scale is not None:
            aux_hidden = aux_hidden * self.feature_scale
        return aux_hidden

    def inputs(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """Embedding [..., H] and feature or fed-back state [..., H] -> [..., X]."""
        layer = self.midlayer
        return torch.cat((layer.input_layernorm(embeds), layer.hidden_norm(hidden)), dim=-1)

    def rotation(self, positions: Tensor) -> Rotation:
        return rotation(self.config.rope, self.config.head_dim, positions)

    def queries(self, x: Tensor, turn: Rotation) -> Tensor:
        """[..., X] -> [..., Hq, D], rotated to their positions."""
        return self._turned(self.midlayer.self_attn.q_proj(x), turn)

    def keys(self, x: Tensor, turn: Rotation) -> Tensor:
        """[..., X] -> [..., Hk, D], as `queries`."""
        return self._turned(self.midlayer.self_attn.k_proj(x), turn)

    def values(self, x: Tensor) -> Tensor:
        """[..., X] -> [..., Hk, D]."""
        projected: Tensor = self.midlayer.self_attn.v_proj(x)
        return self._by_head(projected)

    def output(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """The layer's input [..., H] and attention's output [..., Hq, D] -> [..., H]."""
        if self.config.norm_before_residual:
            residual = self.midlayer.hidden_norm(residual)
        hidden: Tensor = residual + self.midlayer.self_attn.o_proj(mixed.flatten(-2))
        changed: Tensor = self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))
        hidden = hidden + changed
        if self.config.norm_output:
            hidden = self.norm(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Layer output [..., H] -> [..., W]."""
        scores: Tensor = self.lm_head(self.normed(hidden))
        return scores

    def normed(self, hidden: Tensor) -> Tensor:
        """Layer output [..., H] as lm_head takes it."""
        as_taken: Tensor = hidden if self.config.norm_output else self.norm(hidden)
        return as_taken

    def _by_head(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.config.head_dim)

    def _turned(self, projected: Tensor, turn: Rotation) -> Tensor:
        cos, sin = (table.to(projected.dtype).unsqueeze(-2) for table in turn)
        return apply_rope(self._by_head(projected), cos, sin)

    def forward(
        self, embeds_BTH: Tensor, hidden_BTH: Tensor, past: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        """The plain reference: the layer's output [B, T, H] for T slots after those in `past`, and
        all keys and values.
        """
        T, S = hidden_BTH.shape[1], past[0].shape[1] if past is not None else 0
        positions_T = torch.arange(S, S + T, device=hidden_BTH.device)
        x = self.inputs(embeds_BTH, hidden_BTH)
        turn = self.rotation(positions_T)
        queries, keys, values = self.queries(x, turn), self.keys(x, turn), self.values(x)
        if past is not None:
            keys, values = torch.cat((past[0], keys), dim=1), torch.cat((past[1], values), dim=1)
        groups = queries.shape[2] // keys.shape[2]
        keys_of_queries, values_of_queries = (
            kv.repeat_interleave(groups, dim=2) for kv in (keys, values)
        )
        scores = (
            torch.einsum("bthd,bshd->bhts", queries, keys_of_queries) * self.config.head_dim**-0.5
        )
        columns, window = torch.arange(S + T, device=hidden_BTH.device), self.config.sliding_window
        unseen = columns > positions_T[:, None]
        if window is not None:
            unseen |= columns <= positions_T[:, None] - window
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        mixed = torch.einsum("bhts,bshd->bthd", weights, values_of_queries)
        return self.output(hidden_BTH, mixed), (keys, values)


def load_head(
    folder: str | Path, target: TargetShape | None = None, target_lm_head: Tensor | None = None
) -> Head:
    """A head of any form, in float32; target: as in `read_head`. target_lm_head [V, H]: for heads
    without one. Raises MissingInputError, CorruptError, MismatchError.
    """
    config, tensors = read_head(folder, target)
    if LM_HEAD not in tensors:
        if target_lm_head is None:
            raise MismatchError(
                f"{folder} has no lm_head: it uses its target's",
                "serve it, or put the target's lm_head.weight into the file",
            )
        tensors[LM_HEAD] = target_lm_head
    return head_of(config, tensors)


def head_of(config: HeadConfig, tensors: Mapping[str, Tensor]) -> Head:
    """A head of these weights by EAGLE's names, in float32."""
    head, weights = Head(config), dict(tensors)
    embed_tokens = weights.pop(EMBED_TOKENS, None)
    head.load_state_dict(weights)
    head.embed_tokens = None if embed_tokens is None else embed_tokens.float()
    return head


def head_files(head: Head) -> dict[str, bytes]:
    """The files of a head in our own form, by name, in the head's dtype."""
    return write_head(head.config, head.state_dict(), "eyas")
