"""The unroll of training-time test (TTT): K steps of a head from many slots at once.

Slot t holds the feature of tokens x_0 .. x_t and the embedding of x_{t+1}; step i predicts
x_{t+2+i} from the state of step i - 1 and the embedding of x_{t+1+i}: the true token in training,
else the head's own draft. What slot 2 sees, s(t,i) being slot t at step i:

    step 0   [s(0,0) s(1,0) s(2,0)]
    step 1   [s(0,0) s(1,0) s(2,0)] [s(2,1)]                  the last key turned to position 2 + 1
    step 2   [s(0,0) s(1,0) s(2,0)] [s(2,1) s(2,2)]

as a server's draft does: exact keys up to its slot, its own guesses after it. A slot alone sees its
steps 1 and later, so only the slots in `Slots` are computed, with T + i scores at step i.

A batch is one stream of B x T tokens. Attention runs by tiles of slots over the tokens from the
begin of a tile's first row to its last slot, without T x T masks or scores. A CPU recomputes a
tile's scores in the backward; a GPU has one kernel for all tiles. With `recompute` the backward
recomputes all but the layer's inputs and attention's (Chen et al., arXiv 1604.06174).

Letters: B batch, T sequence, M = B T, N slots, n slots of a tile, c its tokens, A width of the
three streams, H hidden, X the layer's input, Hq and Hk heads of queries and keys, D head dimension,
K steps, i steps before the current one.
"""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from eyas.errors import ConfigError

Rotation = tuple[Tensor, ...]  # cosines, sines
Tables = TypeVar("Tables", bound=tuple[Any, ...])
Result = TypeVar("Result", Tensor, tuple[Tensor, ...])
BLOCK = 128  # slots of a tile, and tokens of a GPU's block mask
MOST_GRAPHS = 64
# An MLP of 28,672 columns keeps 0.9 GB of them in bf16. Weights are cast anew for each part.
RECOMPUTED_ROWS = 4096
COLUMNS_IN_STEPS_OF = 32  # c is a multiple of it, for few sizes


class Layer(Protocol):
    """What the unroll calls; `operators.head.Head` has the shapes."""

    def fuse(self, aux_hidden: Tensor) -> Tensor: ...
    def inputs(self, embeds: Tensor, hidden: Tensor) -> Tensor: ...
    def rotation(self, positions: Tensor) -> Rotation: ...
    def queries(self, x: Tensor, turn: Rotation) -> Tensor: ...
    def keys(self, x: Tensor, turn: Rotation) -> Tensor: ...
    def values(self, x: Tensor) -> Tensor: ...
    def output(self, residual: Tensor, mixed: Tensor) -> Tensor: ...


class TileRange(NamedTuple):
    """A tile's slots [begin, end) of N, and the tokens [low, high) of M that it sees."""

    begin: int
    end: int
    low: int
    high: int


class Slots(NamedTuple):
    """The N slots to unroll out of B x T, row by row; int32.

    flat_N = b * T + t. slot_N: t. first_N: b * T. window: positions that a slot sees, its own step
    included, at least the unroll's; None is all. kept_N: their numbers among the slots of the step
    before; None at step 0. blocks: of a GPU's BlockMask.
    """

    flat_N: Tensor
    slot_N: Tensor
    first_N: Tensor
    tiles: tuple[TileRange, ...]
    window: int | None = None
    kept_N: Tensor | None = None
    blocks: tuple[Tensor, ...] = ()

    @classmethod
    def where(cls, active_BT: Tensor, window: int | None = None) -> Slots:
        """The slots where a bool [B, T] is true (one at least), on its device."""
        device, flat_N = active_BT.device, active_BT.cpu().flatten().nonzero().squeeze(1)
        return sent(cls.of(flat_N, active_BT.shape, window, device.type), device)

    @classmethod
    def of(cls, flat_N: Tensor, size: Sequence[int], window: int | None, kind: str) -> Slots:
        """These ascending slots, on the CPU. size: B and T. kind: of their device."""
        assert len(flat_N) > 0, "no slot to unroll"
        B, T = size
        first_N, slot_N = flat_N // T * T, flat_N % T
        looks_N = first_N if window is None else torch.maximum(first_N, flat_N - window + 1)
        # slots ascend: the first and last one bound a tile's tokens
        begins = list(range(0, len(flat_N), BLOCK))
        ends = [min(begin + BLOCK, len(flat_N)) for begin in begins]
        lows, highs = looks_N[begins].tolist(), flat_N[[end - 1 for end in ends]].tolist()
        step = COLUMNS_IN_STEPS_OF
        tiles = tuple(
            TileRange(begin, end, low // step * step, min(B * T, (high // step + 1) * step))
            for begin, end, low, high in zip(begins, ends, lows, highs, strict=True)
        )
        slots = cls(flat_N.int(), slot_N.int(), first_N.int(), tiles, window)
        if kind != "cuda":  # the plain form runs anywhere
            return slots
        looks = first_N if window is None else None
        return slots._replace(blocks=blocks_of(tiles, flat_N, looks, B * T))

    def take(self, x_BT: Tensor) -> Tensor:
        """[B, T, ...] -> [N, ...]."""
        return x_BT.flatten(0, 1).index_select(0, self.flat_N)


def sent(tree: Tables, device: str | torch.device) -> Tables:
    """A tree of tuples, its int32 tensors sent from the CPU to a device by one asynchronous copy.
    A tensor that occurs twice stays one.
    """
    if torch.device(device).type == "cpu":
        return tree
    leaves, spec = tree_flatten(tree)
    found = {id(one): one for one in leaves if isinstance(one, Tensor)}
    flat = torch.cat([one.flatten() for one in found.values()])
    flat = flat.pin_memory() if torch.cuda.is_available() else flat
    sizes = [one.numel() for one in found.values()]
    parts = torch.split(flat.to(device, non_blocking=True), sizes)
    made = {
        place: part.view(one.shape).clone()  # kernels are compiled for a storage's offset
        for (place, one), part in zip(found.items(), parts, strict=True)
    }
    there: Tables = tree_unflatten([made.get(id(one), one) for one in leaves], spec)
    return there


def unroll(
    layer: Layer,
    aux_hidden_BTA: Tensor,
    embeds_BTH: Tensor,
    slots_K: Sequence[Slots],
    next_embeds: Callable[[int, Tensor], Tensor],
    recompute: bool = False,
) -> Iterator[Tensor]:
    """Yield the layer's un-normed output [N, H] of each of the K steps.

    aux_hidden_BTA: the target's three streams. embeds_BTH: the embedding of x_{t+1} at slot t.
    slots_K: the N slots of each step, all of them slots of the step before. next_embeds(i, output
    of step i - 1 [N, H]) -> [N, H]: embeddings for step i > 0. recompute: see `by_rows`.
    """

    def fed(embeds: Tensor, hidden: Tensor, *turn: Tensor) -> tuple[Tensor, ...]:
        x = layer.inputs(embeds, hidden)
        return x, layer.keys(x, turn), layer.values(x)

    def attending(embeds: Tensor, hidden: Tensor, *turn: Tensor) -> tuple[Tensor, ...]:
        x, key, value = fed(embeds, hidden, *turn)
        return layer.queries(x, turn), key, value

    slots, (B, T, _) = slots_K[0], aux_hidden_BTA.shape
    # positions end with a row's last one and the steps after it
    places = torch.arange(T + len(slots_K), device=aux_hidden_BTA.device)
    table = layer.rotation(places)

    def turned_to(positions: Tensor) -> Rotation:
        return tuple(one.index_select(0, positions) for one in table)

    (feature_MH,) = by_rows(lambda x: (layer.fuse(x),), recompute, aux_hidden_BTA.flatten(0, 1))
    turn = turned_to(places[:T].repeat(B))
    x_MX, keys, values = by_rows(fed, recompute, embeds_BTH.flatten(0, 1), feature_MH, *turn)
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    x_NX, hidden_NH = x_MX.index_select(0, slots.flat_N), feature_MH.index_select(0, slots.flat_N)
    for step, of_step in enumerate(slots_K):
        if of_step.flat_N is not slots.flat_N:
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
            (queries,) = by_rows(lambda x, *of: (layer.queries(x, of),), recompute, x_NX, *turn)
        mixed = attend(slots, queries, keys, values, [*own_keys, *own_values])
        (hidden_NH,) = by_rows(lambda *of: (layer.output(*of),), recompute, hidden_NH, mixed)
        yield hidden_NH


def by_rows(
    function: Callable[..., tuple[Tensor, ...]], recompute: bool, *rows: Tensor
) -> tuple[Tensor, ...]:
    """function(*rows), a function of each row [N, ...] alone. recompute: only the results are kept;
    the backward computes the rest again, RECOMPUTED_ROWS at a time.
    """
    if not recompute:
        return function(*rows)
    chunks = [torch.split(one, RECOMPUTED_ROWS) for one in rows]
    parts = [again(function, *chunk) for chunk in zip(*chunks, strict=True)]
    return tuple(torch.cat(of_result) for of_result in zip(*parts, strict=True))


def again(function: Callable[..., Result], *given: Tensor) -> Result:
    """function(*given), which the backward computes again from its arguments."""
    made: Result = checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False)
    return made


def attend(
    slots: Slots, queries: Tensor, keys: Tensor, values: Tensor, own: Sequence[Tensor]
) -> Tensor:
    """Attention of the slots' queries [N, Hq, D] -> [N, Hq, D].

    A slot sees the shared keys and values [M, Hk, D] of its row up to itself, and its own i pairs
    [N, Hk, D] up to this step. own: all keys, then all values. Softmax in float32 or wider. The
    backward needs only the arguments, and on a GPU the output.
    """
    first_N = slots.first_N
    if slots.window is not None:  # at step i a slot is i positions past its token
        past = len(own) // 2 + 1 - slots.window
        first_N = torch.maximum(first_N, slots.flat_N + past)
    with torch.autocast(queries.device.type, enabled=False):
        if slots.blocks:
            return fused_attention(slots, first_N, queries, keys, values, own)
        parts = []
        for begin, end, low, high in slots.tiles:
            columns_c = torch.arange(low, high, device=slots.flat_N.device)
            part = slice(begin, end)
            unseen_nc = columns_c > slots.flat_N[part, None]
            unseen_nc |= columns_c < first_N[part, None]
            shared, of_tile = (keys[low:high], values[low:high]), [one[part] for one in own]
            parts.append(again(plain_attention, unseen_nc, queries[part], *shared, *of_tile))
        return torch.cat(parts)


def plain_attention(
    unseen_nc: Tensor, queries: Tensor, keys: Tensor, values: Tensor, *own: Tensor
) -> Tensor:
    """As `attend` for n slots and c tokens. unseen_nc: bool. Own keys and values are multiplied in
    float32 or wider: elementwise, a CPU is twice as fast as with bf16.
    """
    (n, _, D), (c, Hk, _) = queries.shape, keys.shape
    queries_hgnD = queries.view(n, Hk, -1, D).permute(1, 2, 0, 3) * D**-0.5
    shared = queries_hgnD.flatten(1, 2) @ keys.permute(1, 2, 0)
    scores = widened(shared.view(Hk, -1, n, c).masked_fill_(unseen_nc, float("-inf")))
    if own:
        own_keys, own_values = (
            widened(torch.stack(of, dim=1)).permute(2, 0, 1, 3).unsqueeze(1)  # [Hk, 1, n, i, D]
            for of in (own[: len(own) // 2], own[len(own) // 2 :])
        )
        own_scores = (widened(queries_hgnD).unsqueeze(-2) * own_keys).sum(-1)
        scores = torch.cat((scores, own_scores), dim=-1)
    weights = scores.softmax(-1)
    mixed = weights[..., :c].to(values.dtype).flatten(1, 2) @ values.transpose(0, 1)
    mixed = mixed.view(Hk, -1, n, D)
    if own:
        mixed = mixed + (weights[..., c:].unsqueeze(-1) * own_values).sum(-2)
    return mixed.permute(2, 0, 1, 3).flatten(1, 2).to(queries.dtype)


def fused_attention(
    slots: Slots,
    first_N: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    own: Sequence[Tensor],
) -> Tensor:
    """As `attend`: torch's FlexAttention (arXiv 2412.05496) over the shared keys, weighted against
    a slot's own keys by its softmax's log-sum. first_N: the first token that each slot sees.
    """
    (N, Hq, D), (M, Hk, _), i = queries.shape, keys.shape, len(own) // 2
    last_N = slots.flat_N

    def is_seen(_batch: Tensor, _head: Tensor, slot: Tensor, token: Tensor) -> Tensor:
        return (token >= first_N[slot]) & (token <= last_N[slot])

    tables: tuple[Any, ...] = (*slots.blocks, (BLOCK, BLOCK), is_seen)
    mask = BlockMask((N, M), *tables)
    by_head = (one.transpose(0, 1).unsqueeze(0) for one in (queries, keys, values))
    mixed, found = flex_kernel(queries.device.type)(
        *by_head, block_mask=mask, enable_gqa=Hq > Hk, return_aux=AuxRequest(lse=True)
    )
    mixed_NqD: Tensor = mixed.squeeze(0).transpose(0, 1)
    if not own:
        return mixed_NqD.contiguous()
    own_keys, own_values = (
        torch.stack(list(of), dim=2) for of in (own[:i], own[i:])
    )  # [N, Hk, i, D]
    by_group = (queries * D**-0.5).view(N, Hk, -1, D)
    own_scores = widened(by_group @ own_keys.mT).view(N, Hq, i)
    sums = found.lse.squeeze(0).T.unsqueeze(-1).to(own_scores.dtype)
    weights = torch.cat((sums, own_scores), dim=-1).softmax(-1).to(values.dtype)
    of_own = weights[..., 1:].reshape(N, Hk, -1, i) @ own_values
    return mixed_NqD * weights[..., :1] + of_own.view(N, Hq, D)


@functools.cache
def flex_kernel(kind: str) -> Callable[..., Any]:
    """FlexAttention compiled for a type of device; a CPU's has no backward and is for tests.

    Sizes vary, with gradients and without: beyond dynamo's limit of 8 graphs it would silently
    compute all scores.
    """
    plain: Callable[..., Any] = flex_attention
    if kind == "cpu":
        return plain
    refuse_no_compiler()
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    return torch.compile(plain, dynamic=True, fullgraph=True)


def refuse_no_compiler() -> None:
    """Raise ConfigError where Triton, by which torch compiles a GPU's kernels, cannot work."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    if compiler is None or not header.is_file():
        what = f"PyTorch compiles kernels for the GPU by Triton, which needs gcc and {header}"
        raise ConfigError(what, "install both (Debian, Ubuntu: apt install gcc python3-dev)")


def blocks_of(
    tiles: Sequence[TileRange], flat_N: Tensor, looks_N: Tensor | None, M: int
) -> tuple[Tensor, ...]:
    """The tables of a BlockMask for tiles of BLOCK slots: the blocks of tokens that a tile sees in
    part, and as a whole; both again by block of tokens. looks_N: the first token that a slot sees;
    None if it changes with the step, and no block counts as whole.
    """
    ends = torch.tensor([[low // BLOCK, -(-high // BLOCK)] for _, _, low, high in tiles]).unsqueeze(
        -1
    )
    places = torch.arange(-(-M // BLOCK))
    partial = (places >= ends[:, 0]) & (places < ends[:, 1])
    whole = torch.zeros_like(partial)
    if looks_N is not None:
        begins, lasts = [tile.begin for tile in tiles], [tile.end - 1 for tile in tiles]
        whole = (places * BLOCK >= looks_N[lasts, None]) & (
            places * BLOCK + BLOCK - 1 <= flat_N[begins, None]
        )
    tables = []
    for seen in (partial & ~whole, whole, (partial & ~whole).T, whole.T):
        number = seen.sum(-1)
        order = seen.int().argsort(dim=-1, descending=True, stable=True)
        tables += [number[None, None].int(), order[None, None].int()]
    return tuple(tables)


def widened(x: Tensor) -> Tensor:
    """x in float32, or unchanged if its dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
