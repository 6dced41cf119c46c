"""Attention of the rows of a forward over a paged cache: a dense prefix, then a tree by ancestry.

    plan = AttentionPlan.of(rows, page_size)    once a forward: what every layer has in common
    mixed = plan.attend(q, kv)                  per layer

Which columns a row sees, `Rows` says; one that sees nothing gets zeros. These are PyTorch's
operators for any device; on a CPU the native library has its own.

Letters: M rows, B requests, N rows of one request, C columns, Hq and Hk query and key heads, D head
dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from eyas.model.rows import MAX_TREE_COLUMNS, Rows


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

    def attend(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
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
        mixed = F.scaled_dot_product_attention(
            wide_q, k, v, attn_mask=self.mask.repeat(1, 1, group, 1)
        )
        return mixed.view(b, Hk, group, N, D).permute(0, 3, 1, 2, 4).reshape(b * N, Hq, D)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What the layers of one forward have in common. Planning reads the rows on the host."""

    buckets: tuple[_Bucket, ...]

    @classmethod
    def of(cls, rows: Rows, page_size: int) -> AttentionPlan:
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

    def attend(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """q [M, Hq, D], kv [num_slots, 2, Hk, D] (a layer of a cache, the rows' own entries
        written) -> [M, Hq, D].
        """
        mixed = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for bucket in self.buckets:
            mixed.index_copy_(0, bucket.rows, bucket.attend(q, kv))
        return mixed


def _bit_lengths(seen: np.ndarray) -> np.ndarray:
    """Of int64 [M], read as 64 bits without a sign: 1 + the place of the highest bit set, or 0."""
    bits = np.unpackbits(
        seen.astype("<i8").view(np.uint8).reshape(-1, 8), axis=1, bitorder="little"
    )
    lengths: np.ndarray = (bits * np.arange(1, MAX_TREE_COLUMNS + 1)).max(1)
    return lengths


def _bucket(
    rows: Rows, page_size: int, places: np.ndarray, ends: np.ndarray, with_tree: bool
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
    prefix_len, seen = rows.prefix_len[places_bN][..., None], rows.seen[places_bN][..., None]
    mask = (columns >= first_seen) & (columns < prefix_len)
    if with_tree:
        e = columns - prefix_len
        in_tree = (e >= 0) & (e < MAX_TREE_COLUMNS)
        mask |= in_tree & (seen >> e.clamp(0, MAX_TREE_COLUMNS - 1) & 1).bool()
    return _Bucket(places_bN.flatten(), slots.flatten(), mask[:, None])
