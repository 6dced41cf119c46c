"""The TTT unroll: a head's K steps from many slots at once, as a pure function. Knows no weights, no loss and no files.

Slot t holds the feature of tokens x_0 .. x_t and the embedding of x_{t+1}; step 0 predicts x_{t+2}, step i x_{t+2+i}. Step i
feeds back the state of step i - 1 with the embedding of x_{t+1+i}: the true token in training, the head's own draft when
it runs free. What slot 2 sees, s(t,i) being slot t at step i:

    step 0   [s(0,0) s(1,0) s(2,0)]
    step 1   [s(0,0) s(1,0) s(2,0)] [s(2,1)]                  the last key turned to position 2 + 1
    step 2   [s(0,0) s(1,0) s(2,0)] [s(2,1) s(2,2)]

which is what a server's draft sees: exact keys up to its slot, its own guesses after. Steps 1 and later are seen by their own
slot alone, so only the slots asked for are computed, and scores are T + i wide, never T x K.

Letters: B batch, T sequence, N slots unrolled in the whole batch, M most of them in one row of it, H hidden, X the layer's
input, Hq and Hk heads of queries and keys, G = Hq / Hk, D head dimension, K steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]


class Layer(Protocol):
    """What the unroll asks of a head."""

    def fuse(self, aux_hidden: Tensor) -> Tensor:
        """[..., 3 H] -> [..., H]."""

    def inputs(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """[..., H], [..., H] -> [..., X]."""

    def rotation(self, positions: Tensor) -> Rotation:
        """Integers [...] -> what turns queries and keys at these positions, [..., D] each."""

    def queries(self, x: Tensor, turn: Rotation) -> Tensor:
        """[..., X] -> [..., Hq, D]; `turn` broadcasts to the leading dimensions."""

    def keys(self, x: Tensor, turn: Rotation) -> Tensor:
        """[..., X] -> [..., Hk, D]."""

    def values(self, x: Tensor) -> Tensor:
        """[..., X] -> [..., Hk, D]."""

    def output(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """[..., H], [..., Hq, D] -> [..., H]."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The N slots to unroll out of B x T, row by row.

    flat_N = b * T + t; slot_N = t; place_N = b * M + m, with m the slot's rank in its row; slot_BM = t, and 0 in padding.
    """

    flat_N: Tensor
    slot_N: Tensor
    place_N: Tensor
    slot_BM: Tensor

    @classmethod
    def where(cls, active_BT: Tensor) -> Slots:
        """The slots where a bool [B, T] is true; at least one must be."""
        B, T = active_BT.shape
        row_N, slot_N = active_BT.nonzero(as_tuple=True)
        M = int(active_BT.sum(1).max())
        assert M > 0, "no slot to unroll"
        place_N = row_N * M + (active_BT.cumsum(1) - 1)[row_N, slot_N]
        slot_BM = torch.zeros(B * M, dtype=torch.int64, device=active_BT.device)
        slot_BM[place_N] = slot_N
        return cls(row_N * T + slot_N, slot_N, place_N, slot_BM.view(B, M))

    def take(self, x_BT: Tensor) -> Tensor:
        """[B, T, ...] -> [N, ...]."""
        return x_BT.flatten(0, 1).index_select(0, self.flat_N)

    def pad(self, x_N: Tensor) -> Tensor:
        """[N, heads, D] -> [B, heads, M, D], zeros in padding."""
        B, M = self.slot_BM.shape
        padded = x_N.new_zeros(B * M, *x_N.shape[1:]).index_copy(0, self.place_N, x_N)
        return padded.view(B, M, *x_N.shape[1:]).transpose(1, 2)

    def unpad(self, x_BhMD: Tensor) -> Tensor:
        """The inverse of `pad`: [B, heads, M, D] -> [N, heads, D]."""
        return x_BhMD.transpose(1, 2).flatten(0, 1).index_select(0, self.place_N)


def unroll(
    layer: Layer,
    aux_hidden_BTA: Tensor,
    embeds_BTH: Tensor,
    slots: Slots,
    next_embeds: Callable[[int, Tensor], Tensor],
    num_steps: int,
) -> Iterator[Tensor]:
    """Yield the layer's un-normed output [N, H] of steps 0 .. num_steps - 1.

    aux_hidden_BTA [B, T, 3 H] and embeds_BTH, the embedding of x_{t+1} at slot t. Rows are padded on the right: what lies
    beyond a slot is never seen. next_embeds(i, output of step i - 1 [N, H]) -> [N, H], the embeddings that step i takes.
    """
    T = embeds_BTH.shape[1]
    feature_BTH = layer.fuse(aux_hidden_BTA)
    x_BTX = layer.inputs(embeds_BTH, feature_BTH)
    positions_T = torch.arange(T, device=x_BTX.device)
    keys = layer.keys(x_BTX, layer.rotation(positions_T)).transpose(1, 2)
    values = layer.values(x_BTX).transpose(1, 2)
    unseen_BMT = positions_T > slots.slot_BM.unsqueeze(-1)
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    x_NX, hidden_NH = slots.take(x_BTX), slots.take(feature_BTH)
    for step in range(num_steps):
        turn = layer.rotation(slots.slot_N + step)
        if step > 0:
            x_NX = layer.inputs(next_embeds(step, hidden_NH), hidden_NH)
            own_keys.append(slots.pad(layer.keys(x_NX, turn)))
            own_values.append(slots.pad(layer.values(x_NX)))
        queries = slots.pad(layer.queries(x_NX, turn))
        mixed = attend(queries, (keys, values), (own_keys, own_values), unseen_BMT)
        hidden_NH = layer.output(hidden_NH, slots.unpad(mixed))
        yield hidden_NH


def attend(
    queries: Tensor, shared: tuple[Tensor, Tensor], own: tuple[list[Tensor], list[Tensor]], unseen_BMT: Tensor
) -> Tensor:
    """Attention of queries [B, Hq, M, D] over shared keys and values [B, Hk, T, D] and one own pair [B, Hk, M, D] a step.

    unseen_BMT bool: which shared keys a query must not see. Softmax in float32 or wider. Returns [B, Hq, M, D].
    """
    (keys, values), (own_keys, own_values) = shared, own
    (B, Hq, M, D), (Hk, T) = queries.shape, keys.shape[1:3]
    q = (queries * D**-0.5).reshape(B, Hk, Hq // Hk, M, D)
    scores = (q.flatten(2, 3) @ keys.transpose(-1, -2)).view(B, Hk, Hq // Hk, M, T)
    scores = scores.masked_fill(unseen_BMT[:, None, None], float("-inf"))
    if own_keys:
        own_scores = (q.unsqueeze(-2) * torch.stack(own_keys, dim=-2).unsqueeze(2)).sum(-1)
        scores = torch.cat((scores, own_scores), dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(values.dtype)
    to_shared, to_own = weights.split((T, len(own_keys)), dim=-1)
    mixed: Tensor = (to_shared.flatten(2, 3) @ values).view(q.shape)
    if own_values:
        mixed = mixed + (to_own.unsqueeze(-1) * torch.stack(own_values, dim=-2).unsqueeze(2)).sum(-2)
    return mixed.flatten(1, 2)
