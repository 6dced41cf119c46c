"""Attention of the rows of a forward over a paged cache: a dense prefix, then a tree by ancestry.

    plan = AttentionPlan.of(rows, page_size)    once a forward and window
    mixed = plan.attend(q, kv, how)          per layer

Which columns a row sees, `TensorRows` says; one that sees nothing gets zeros. These are PyTorch's
operators for any device; on a CPU the native library has its own.

Letters: M rows, B requests, N rows of one request, C columns, Hq and Hk query and key heads, D head
dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from eyas.model.rows import MAX_TREE_COLUMNS
from eyas.operators.vocab import capped
from tests.oracle.rows import TensorRows


@dataclass(frozen=True, slots=True)
class Weighing:
    """How a layer weighs what a row sees: softmax of scale * q.k, 1 / sqrt(D) by default.

    softcap: cuts the scores softly (Gemma 2). sinks [Hq]: logits that take a share of the weight
    and have no value (gpt-oss).
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    def mix(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """q [b, Hk, group * N, D], k, v [b, Hk, C, D], mask bool [b, 1, group * N, C] -> as q."""
        if self.softcap is None and self.sinks is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        b, Hk, queries, D = q.shape
        scores = (q @ k.mT).float() * (self.scale or D**-0.5)
        scores = capped(scores, self.softcap)
        scores = scores.masked_fill(~mask, -torch.inf)
        if self.sinks is not None:
            group = len(self.sinks) // Hk
            sinks = self.sinks.float().view(1, Hk, group, 1).expand(b, Hk, group, queries // group)
            scores = torch.cat((scores, sinks.reshape(b, Hk, queries, 1)), dim=-1)
        weights = scores.softmax(-1)[..., : k.shape[2]]
        return weights.to(v.dtype) @ v


PLAIN_WEIGHING = Weighing()


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The b requests of a forward that have the same number of rows: each one's columns are
    gathered once.

    rows int64 [b * N]: their places among the M. slots int64 [b * C]. mask bool [b, 1, N, C], True
    where seen.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor

    def attend(self, q: torch.Tensor, kv: torch.Tensor, how: Weighing) -> torch.Tensor:
        """q [M, Hq, D] -> [b * N, Hq, D]. The heads of a group are queries beside each other: keys
        are never repeated.
        """
        b, _, N, C = self.mask.shape
        _, Hq, D = q.shape
        Hk = kv.shape[2]
        group = Hq // Hk
        wide_q = (
            q.index_select(0, self.rows)
            .view(b, N, Hk, group, D)
            .permute(0, 2, 3, 1, 4)
            .reshape(b, Hk, group * N, D)
        )
        k, v = kv.index_select(0, self.slots).view(b, C, 2, Hk, D).permute(2, 0, 3, 1, 4)
        mixed = how.mix(wide_q, k, v, self.mask.repeat(1, 1, group, 1))
        return mixed.view(b, Hk, group, N, D).permute(0, 3, 1, 2, 4).reshape(b * N, Hq, D)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What the layers of one forward have in common. Planning reads the rows on the host."""

    buckets: tuple[_Bucket, ...]

    @classmethod
    def of(cls, rows: TensorRows, page_size: int) -> AttentionPlan:
        request, seen = rows.request.cpu().numpy(), rows.seen.cpu().numpy()
        ends = rows.prefix_len.cpu().numpy() + _bit_lengths(seen)
        order = np.argsort(request, kind="stable")
        _, starts, counts = np.unique(request[order], return_index=True, return_counts=True)
        is_tree = np.logical_or.reduceat(seen[order] != 0, starts)
        # Trees and prompts of one size stay apart: the bits of a long prompt's mask need not be
        # looked at.
        kinds = 2 * counts + is_tree
        buckets = []
        for kind in np.unique(kinds):
            places = order[starts[kinds == kind, None] + np.arange(kind // 2)]
            buckets.append(
                _bucket(rows, page_size, places, ends[places].max(1), with_tree=bool(kind % 2))
            )
        return cls(tuple(buckets))

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, how: Weighing = PLAIN_WEIGHING
    ) -> torch.Tensor:
        """q [M, Hq, D], kv [num_slots, 2, Hk, D] (a layer of a cache, the rows' own entries
        written) -> [M, Hq, D].
        """
        mixed = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for bucket in self.buckets:
            mixed.index_copy_(0, bucket.rows, bucket.attend(q, kv, how))
        return mixed


def path_slots(rows: TensorRows, page_size: int, count: int) -> torch.Tensor:
    """Where the last `count` tokens of each row's path lie, its own last: int64 [M, count], -1
    before the sequence begins. Reads the rows on the host.
    """
    prefix_len, seen = rows.prefix_len.tolist(), rows.seen.tolist()
    pages, requests = rows.page_table.cpu().numpy(), rows.request.tolist()
    slots = np.full((len(rows), count), -1, dtype=np.int64)
    for m, (length, bits, request) in enumerate(zip(prefix_len, seen, requests, strict=True)):
        nodes = [length + bit for bit in range(MAX_TREE_COLUMNS) if bits >> bit & 1]
        columns = [*range(max(0, length - count), length), *nodes][-count:]
        for place, column in enumerate(columns, start=count - len(columns)):
            page = int(pages[request, column // page_size])
            slots[m, place] = page * page_size + column % page_size
    return torch.from_numpy(slots).to(rows.slot.device)


def _in_sight(rows: TensorRows, seen: torch.Tensor) -> torch.Tensor:
    """The bits `seen` [M] of the columns that lie in each row's run of positions: its ancestors
    stand one position apart, itself last.
    """
    if rows.chunk is None:
        return seen
    kept = []
    for bits, count in zip(
        seen.tolist(), (rows.position - rows.first_position + 1).tolist(), strict=True
    ):
        nodes = [bit for bit in range(MAX_TREE_COLUMNS) if bits >> bit & 1][-count:]
        whole = sum(1 << bit for bit in nodes)
        kept.append(whole - (1 << MAX_TREE_COLUMNS) * (whole >> MAX_TREE_COLUMNS - 1))
    return torch.tensor(kept, device=seen.device)


def _bit_lengths(seen: np.ndarray) -> np.ndarray:
    """Of int64 [M], read as 64 bits without a sign: 1 + the place of the highest bit set, or 0."""
    bits = np.unpackbits(
        seen.astype("<i8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little"
    )
    lengths: np.ndarray = (bits * np.arange(1, MAX_TREE_COLUMNS + 1)).max(1)
    return lengths


def _bucket(
    rows: TensorRows, page_size: int, places: np.ndarray, ends: np.ndarray, with_tree: bool
) -> _Bucket:
    """places int64 [b, N] of the rows; ends int64 [b], one behind the last column that is seen of
    each request.
    """
    device = rows.page_table.device
    places_bN = torch.from_numpy(places).to(device)
    first_seen = rows.first_seen[places_bN][..., None]
    columns = torch.arange(int(first_seen.min()), int(ends.max()), device=device)
    pages = rows.page_table[rows.request[places_bN[:, 0]]]
    slots = pages[:, columns // page_size].long() * page_size + columns % page_size
    # What a page table holds behind a request's last page has no meaning: any valid slot will do.
    slots.masked_fill_(columns >= torch.from_numpy(ends).to(device)[:, None], 0)
    prefix_len = rows.prefix_len[places_bN][..., None]
    mask = (columns >= first_seen) & (columns < prefix_len)
    if with_tree:
        seen = _in_sight(rows, rows.seen)[places_bN][..., None]
        e = columns - prefix_len
        in_tree = (e >= 0) & (e < MAX_TREE_COLUMNS)
        mask |= in_tree & (seen >> e.clamp(0, MAX_TREE_COLUMNS - 1) & 1).bool()
    return _Bucket(places_bN.flatten(), slots.flatten(), mask[:, None])
