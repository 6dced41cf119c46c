"""The unroll of training-time test (TTT): K steps of a head from many slots at once.

A pure function of the layer (`Layer`), features and embeddings.

Slot t holds the feature of tokens x_0 .. x_t and the embedding of x_{t+1}; step 0 predicts x_{t+2},
step i x_{t+2+i}. Step i feeds back the state of step i - 1 with the embedding of x_{t+1+i}: the
true token in training, the head's own draft when it runs free. What slot 2 sees, s(t,i) being slot
t at step i:

    step 0   [s(0,0) s(1,0) s(2,0)]
    step 1   [s(0,0) s(1,0) s(2,0)] [s(2,1)]                  the last key turned to position 2 + 1
    step 2   [s(0,0) s(1,0) s(2,0)] [s(2,1) s(2,2)]

which is what a server's draft sees: exact keys up to its slot, its own guesses after. Steps 1 and
later are seen by their own slot alone, so only the slots in `Slots` are computed, and a slot has T
+ i scores at step i, never T x K.

A batch is one stream of its B x T tokens. Attention takes the slots a tile at a time, and a tile
looks at the tokens from the begin of its first document to its last slot: no mask and no scores of
T x T are made, and a packed row costs what its documents do.

What is kept for the backward grows with N x K. With `recompute` only the layer's inputs and
attention's queries, keys, values and output are kept; the rest, above all the MLP's, is computed
again, some rows at a time (Chen et al., arXiv 1604.06174).

Letters: B batch, T sequence, M = B T, N slots unrolled, n slots of a tile, c tokens it looks at, A
the width of the target's three streams, H hidden, X the layer's input, Hq and Hk heads of queries
and keys, G = Hq / Hk, D head dimension, K steps, i the steps before the current one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Rotation = tuple[Tensor, ...]  # cosines, sines
Tables = TypeVar("Tables", bound=tuple[Any, ...])
SLOTS_OF_A_TILE = {"cpu": 128}  # by device type
SLOTS_OF_A_TILE_ELSEWHERE = 1024
# Rows computed again at a time: an MLP of 28,672 columns keeps 0.9 GB of them in bf16. Fewer cost
# time: for each part the weights are cast to the precision of the maths anew.
RECOMPUTED_ROWS = 4096
COLUMNS_IN_STEPS_OF = 32  # c is a multiple of it, so that tiles come in few sizes


class Layer(Protocol):
    """What the unroll calls of a head; `operators.head.Head` is one."""

    def fuse(self, aux_hidden: Tensor) -> Tensor:
        """The target's three streams [..., A] -> one feature [..., H]."""

    def inputs(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """Embedding [..., H] and feature or fed-back state [..., H] -> layer input [..., X]."""

    def rotation(self, positions: Tensor) -> Rotation:
        """Integers [...] -> cosines and sines of the rotary embedding, [..., D] each."""

    def queries(self, x: Tensor, turn: Rotation) -> Tensor:
        """[..., X] -> rotated queries [..., Hq, D]; `turn` broadcasts to the leading dimensions."""

    def keys(self, x: Tensor, turn: Rotation) -> Tensor:
        """[..., X] -> rotated keys [..., Hk, D]; `turn` as for queries."""

    def values(self, x: Tensor) -> Tensor:
        """[..., X] -> values [..., Hk, D]."""

    def output(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """What the layer was fed [..., H] and attention's output [..., Hq, D] -> [..., H]."""


class TileRange(NamedTuple):
    """A tile's slots begin .. end - 1 of the N, and the tokens low .. high - 1 of the M it sees."""

    begin: int
    end: int
    low: int
    high: int


class Slots(NamedTuple):
    """The N slots to unroll out of B x T, row by row.

    All int32. flat_N = b * T + t. slot_N: the slot's place in its document. first_N: where in the
    stream of B x T tokens its document begins. position_M: each token's place in its document.
    tiles: the N slots cut into tiles. window: how many positions a slot sees, that of its own step
    among them; None is all. It is at least as long as the unroll, so that only tokens leave it.
    kept_N: where they are among the slots of the step before; None at step 0.
    """

    flat_N: Tensor
    slot_N: Tensor
    first_N: Tensor
    position_M: Tensor
    tiles: tuple[TileRange, ...]
    window: int | None = None
    kept_N: Tensor | None = None

    @classmethod
    def where(
        cls, active_BT: Tensor, starts_BT: Tensor | None = None, window: int | None = None
    ) -> Slots:
        """The slots where a bool [B, T] is true; at least one must be. On the device of active_BT.

        starts_BT: int64, the column where each token's document begins, -1 in padding; without it a
        row is a document.
        """
        kind, active_BT = active_BT.device, active_BT.cpu()
        starts_BT = torch.zeros(active_BT.shape) if starts_BT is None else starts_BT.cpu()
        flat_N = active_BT.flatten().nonzero().squeeze(1)
        return sent(cls.of(flat_N, starts_BT.long(), window, kind.type), kind)

    @classmethod
    def of(cls, flat_N: Tensor, starts_BT: Tensor, window: int | None, kind: str) -> Slots:
        """These slots, in ascending order, on the CPU. kind: of the device that they are for."""
        assert len(flat_N) > 0, "no slot to unroll"
        B, T = starts_BT.shape
        starts_BT = starts_BT.clamp(min=0)
        first_N = (starts_BT + torch.arange(0, B * T, T).unsqueeze(1)).flatten()[flat_N]
        position_M = (torch.arange(T) - starts_BT).flatten()
        looks_N = first_N if window is None else torch.maximum(first_N, flat_N - window + 1)
        tiles = tiles_of(flat_N, looks_N, B * T, kind)
        slot_N = position_M[flat_N].int()
        return cls(flat_N.int(), slot_N, first_N.int(), position_M.int(), tiles, window)

    def among(self, before: Slots) -> Slots:
        """The same slots behind those of the step before, which hold them."""
        return self._replace(kept_N=torch.searchsorted(before.flat_N, self.flat_N, out_int32=True))

    def take(self, x_BT: Tensor) -> Tensor:
        """[B, T, ...] -> [N, ...]."""
        return x_BT.flatten(0, 1).index_select(0, self.flat_N)


def sent(tree: Tables, device: str | torch.device) -> Tables:
    """A tree of tuples with its tensors, int32 on the CPU, on a device: by one copy, which no one
    waits for. A part that is there twice is one part there.
    """
    if torch.device(device).type == "cpu":
        return tree
    made: dict[int, Any] = {}

    def tensors(one: Any) -> Iterator[Tensor]:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, tuple):
            for part in one:
                yield from tensors(part)

    def rebuilt(one: Any) -> Any:
        if id(one) not in made:
            assert not isinstance(one, Tensor), "a tensor that was not sent"
            if not isinstance(one, tuple):
                return one
            parts = [rebuilt(part) for part in one]
            made[id(one)] = type(one)(*parts) if hasattr(one, "_fields") else tuple(parts)
        return made[id(one)]

    found = {id(one): one for one in tensors(tree)}
    flat = torch.cat([one.flatten() for one in found.values()]).pin_memory()
    sizes = [one.numel() for one in found.values()]
    parts = torch.split(flat.to(device, non_blocking=True), sizes)
    for (place, one), part in zip(found.items(), parts, strict=True):
        made[place] = part.view(one.shape)
    there: Tables = rebuilt(tree)
    return there


def tiles_of(flat_N: Tensor, first_N: Tensor, num_tokens: int, kind: str) -> tuple[TileRange, ...]:
    """`Slots.tiles` for the stream of num_tokens tokens.

    first_N: the first token that each slot sees. Both tensors ascend: a tile's first and last slot
    bound what it looks at.
    """
    size = SLOTS_OF_A_TILE.get(kind, SLOTS_OF_A_TILE_ELSEWHERE)
    begins = list(range(0, len(flat_N), size))
    ends = [min(begin + size, len(flat_N)) for begin in begins]
    lows, highs = first_N[begins].tolist(), flat_N[[end - 1 for end in ends]].tolist()
    step = COLUMNS_IN_STEPS_OF
    return tuple(
        TileRange(begin, end, low // step * step, min(num_tokens, (high // step + 1) * step))
        for begin, end, low, high in zip(begins, ends, lows, highs, strict=True)
    )


def unroll(
    layer: Layer,
    aux_hidden_BTA: Tensor,
    embeds_BTH: Tensor,
    slots_K: Sequence[Slots],
    next_embeds: Callable[[int, Tensor], Tensor],
    recompute: bool = False,
) -> Iterator[Tensor]:
    """Yield the layer's un-normed output [N, H] of each of the K steps.

    aux_hidden_BTA: the target's three streams. embeds_BTH: the embedding of x_{t+1} at slot t. What
    lies beyond a slot or before its document is never seen. slots_K: the slots of each step, each
    among those of the step before; N is their number. next_embeds(i, output of step i - 1 [N, H])
    -> [N, H]: the embeddings that step i takes, for i > 0. recompute: see `by_rows`.
    """

    def fed(embeds: Tensor, hidden: Tensor, *turn: Tensor) -> tuple[Tensor, ...]:
        x = layer.inputs(embeds, hidden)
        return x, layer.keys(x, turn), layer.values(x)

    def attending(embeds: Tensor, hidden: Tensor, *turn: Tensor) -> tuple[Tensor, ...]:
        x, key, value = fed(embeds, hidden, *turn)
        return layer.queries(x, turn), key, value

    def queried(x: Tensor, *turn: Tensor) -> tuple[Tensor, ...]:
        return (layer.queries(x, turn),)

    slots = slots_K[0]
    # one table for all: no position lies behind a row's last one and the steps after it
    table = layer.rotation(
        torch.arange(aux_hidden_BTA.shape[1] + len(slots_K), device=aux_hidden_BTA.device)
    )

    def turned_to(positions: Tensor) -> Rotation:
        return tuple(one.index_select(0, positions) for one in table)

    (feature_MH,) = by_rows(lambda x: (layer.fuse(x),), recompute, aux_hidden_BTA.flatten(0, 1))
    turn = turned_to(slots.position_M)
    x_MX, keys, values = by_rows(fed, recompute, embeds_BTH.flatten(0, 1), feature_MH, *turn)
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    x_NX, hidden_NH = x_MX.index_select(0, slots.flat_N), feature_MH.index_select(0, slots.flat_N)
    for step, of_step in enumerate(slots_K):
        if of_step is not slots:
            slots, kept_N = of_step, of_step.kept_N
            assert kept_N is not None, "slots of another batch"
            hidden_NH = hidden_NH.index_select(0, kept_N)
            own_keys = [one.index_select(0, kept_N) for one in own_keys]
            own_values = [one.index_select(0, kept_N) for one in own_values]
        turn = turned_to(slots.slot_N + step)
        if step > 0:
            rows = next_embeds(step, hidden_NH), hidden_NH, *turn
            queries, own_key, own_value = by_rows(attending, recompute, *rows)
            own_keys.append(own_key)
            own_values.append(own_value)
        else:
            (queries,) = by_rows(queried, recompute, x_NX, *turn)
        mixed: Tensor = Attend.apply(slots, queries, keys, values, *own_keys, *own_values)  # type: ignore[no-untyped-call]
        (hidden_NH,) = by_rows(lambda *of: (layer.output(*of),), recompute, hidden_NH, mixed)
        yield hidden_NH


def by_rows(
    function: Callable[..., tuple[Tensor, ...]], recompute: bool, *rows: Tensor
) -> tuple[Tensor, ...]:
    """function(*rows), a function of each row alone, [N, ...] each.

    recompute: of what it computes only the results are kept; the backward computes the rest again,
    RECOMPUTED_ROWS at a time.
    """
    if not recompute:
        return function(*rows)
    cut = [torch.split(one, RECOMPUTED_ROWS) for one in rows]
    parts = [
        checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False)
        for part in zip(*cut, strict=True)
    ]
    return tuple(torch.cat(of_result) for of_result in zip(*parts, strict=True))


class Attend(torch.autograd.Function):
    """Attention of the slots' queries [N, Hq, D], tile by tile -> [N, Hq, D].

    A slot sees the shared keys and values [M, Hk, D] of its document up to itself, and its own i
    pairs [N, Hk, D] of the steps before and of this one. Softmax in float32 or wider. As in flash
    attention (Dao et al., arXiv 2205.14135, algorithm 4), the weights are not kept for the backward
    but computed again.
    """

    @staticmethod
    def forward(
        ctx: Any, slots: Slots, queries: Tensor, keys: Tensor, values: Tensor, *own: Tensor
    ) -> Tensor:
        """own: all keys, then all values."""
        mixed = torch.empty_like(queries)
        with torch.autocast(queries.device.type, enabled=False):
            for tile in slots.tiles:
                part = Tile.of(slots, tile, queries, keys, values, own)
                mixed[tile.begin : tile.end] = part.mix(part.weights())
        ctx.slots = slots
        ctx.save_for_backward(queries, keys, values, mixed, *own)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of everything but the slots."""
        slots: Slots = ctx.slots
        queries, keys, values, mixed, *own = ctx.saved_tensors
        wide = torch.promote_types(keys.dtype, torch.float32)
        of_queries, of_own = torch.empty_like(queries), [torch.empty_like(one) for one in own]
        of_keys, of_values = (
            torch.zeros_like(keys, dtype=wide),
            torch.zeros_like(values, dtype=wide),
        )
        for tile in slots.tiles:
            begin, end, low, high = tile
            part = Tile.of(slots, tile, queries, keys, values, own)
            of_queries[begin:end], keys_here, values_here, own_here = part.gradients(
                part.weights(), grads[0][begin:end], mixed[begin:end]
            )
            of_keys[low:high] += keys_here
            of_values[low:high] += values_here
            for whole, piece in zip(of_own, own_here, strict=True):
                whole[begin:end] = piece
        return None, of_queries, of_keys.to(keys.dtype), of_values.to(values.dtype), *of_own


@dataclass(frozen=True, slots=True)
class Tile:
    """n slots and the c tokens they look at, laid out for batched products.

    queries [Hk, G n, D], scaled; keys, values [Hk, c, D]; own_keys, own_values [Hk, 1, n, i, D],
    None at step 0; unseen_nc: bool, the tokens beyond a slot or before its document. Own keys and
    values are float32 or wider: a CPU multiplies these elementwise twice as fast as bf16.
    """

    num_slots: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    own_keys: Tensor | None
    own_values: Tensor | None
    unseen_nc: Tensor

    @classmethod
    def of(
        cls,
        slots: Slots,
        tile: TileRange,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        own: Sequence[Tensor],
    ) -> Tile:
        """Cut a tile out of the inputs of `Attend.forward`."""
        begin, end, low, high = tile
        columns_c = torch.arange(low, high, device=queries.device)
        last_n1, first_n1 = slots.flat_N[begin:end, None], slots.first_N[begin:end, None]
        half = len(own) // 2
        if slots.window is not None:  # at step i a slot stands i positions behind its token
            first_n1 = torch.maximum(first_n1, last_n1 + half - slots.window + 1)

        def stacked(of_steps: Sequence[Tensor]) -> Tensor | None:
            if not of_steps:
                return None
            return widened(
                torch.stack([one[begin:end] for one in of_steps], dim=1)
                .permute(2, 0, 1, 3)
                .unsqueeze(1)
            )

        return cls(
            end - begin,
            by_group(queries[begin:end], keys.shape[1]).flatten(1, 2) * queries.shape[-1] ** -0.5,
            keys[low:high].transpose(0, 1),
            values[low:high].transpose(0, 1),
            stacked(own[:half]),
            stacked(own[half:]),
            (columns_c > last_n1) | (columns_c < first_n1),
        )

    def weights(self) -> Tensor:
        """Attention weights [Hk, G, n, c + i], float32 or wider."""
        scores = widened(
            self.by_slot(self.queries @ self.keys.transpose(1, 2)).masked_fill_(
                self.unseen_nc, float("-inf")
            )
        )
        if self.own_keys is not None:
            own = (widened(self.by_slot(self.queries)).unsqueeze(-2) * self.own_keys).sum(-1)
            scores = torch.cat((scores, own), dim=-1)
        return scores.softmax(-1)

    def mix(self, weights: Tensor) -> Tensor:
        """Weights [Hk, G, n, c + i] -> [n, Hq, D]."""
        to_shared, to_own = self.split(weights)
        mixed = self.by_slot(to_shared.to(self.values.dtype).flatten(1, 2) @ self.values)
        if self.own_values is not None:
            mixed = mixed + (to_own.unsqueeze(-1) * self.own_values).sum(-2)
        return mixed.permute(2, 0, 1, 3).flatten(1, 2)

    def by_slot(self, x: Tensor) -> Tensor:
        """[Hk, G n, ...] -> [Hk, G, n, ...]."""
        return x.view(x.shape[0], -1, self.num_slots, x.shape[-1])

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[..., c + i] -> [..., c], [..., i]."""
        c = self.keys.shape[1]
        return x[..., :c], x[..., c:]

    def gradients(
        self, weights: Tensor, grad: Tensor, mixed: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Of queries [n, Hq, D], keys and values [c, Hk, D], and the slots' own keys, then own
        values, [n, Hk, D] for each step.

        From `weights`, the output's gradient `grad` and the output `mixed`, [n, Hq, D] each.
        """
        Hk, dtype = self.keys.shape[0], self.keys.dtype
        grad_hgnD = by_group(grad, Hk)
        wide = widened(grad_hgnD)
        by_weight = [widened(self.by_slot(grad_hgnD.flatten(1, 2) @ self.values.transpose(1, 2)))]
        if self.own_values is not None:
            by_weight.append((wide.unsqueeze(-2) * self.own_values).sum(-1))
        # sum_j weight_j * gradient_j over all keys, for the gradient of the softmax
        level = (wide * widened(by_group(mixed, Hk))).sum(-1, keepdim=True)
        score_shared, score_own = self.split((torch.cat(by_weight, dim=-1) - level).mul_(weights))
        weight_shared, weight_own = self.split(weights)
        score_shared, weight_shared = (
            score_shared.to(dtype).flatten(1, 2),
            weight_shared.to(dtype).flatten(1, 2),
        )
        of_queries = self.by_slot(score_shared @ self.keys)
        own: list[Tensor] = []
        if self.own_keys is not None:
            of_queries = of_queries + (score_own.unsqueeze(-1) * self.own_keys).sum(-2)
            of_own_keys = (
                score_own.unsqueeze(-1) * widened(self.by_slot(self.queries)).unsqueeze(-2)
            ).sum(1)
            of_own_values = (weight_own.unsqueeze(-1) * wide.unsqueeze(-2)).sum(1)
            own = [
                one.transpose(0, 1) for of in (of_own_keys, of_own_values) for one in of.unbind(2)
            ]
        return (
            of_queries.mul_(self.keys.shape[-1] ** -0.5).permute(2, 0, 1, 3).flatten(1, 2),
            (score_shared.transpose(1, 2) @ self.queries).transpose(0, 1),
            (weight_shared.transpose(1, 2) @ grad_hgnD.flatten(1, 2)).transpose(0, 1),
            own,
        )


def widened(x: Tensor) -> Tensor:
    """x in float32, or unchanged if its dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def by_group(x_nhD: Tensor, num_heads: int) -> Tensor:
    """[n, Hq, D] -> [Hk, G, n, D], the heads that share a key side by side."""
    n, Hq, D = x_nhD.shape
    return x_nhD.reshape(n, num_heads, Hq // num_heads, D).permute(1, 2, 0, 3)
