"""Attention of the rows of a forward over a paged cache: a dense prefix, then a tree by ancestry.

    plan = AttentionPlan.of(rows, page_size)    once a forward and window
    mixed = plan.attend(q, kv, how)          per layer

Which columns a row sees, `TensorRows` says; one that sees nothing gets zeros. Each row attends by
itself, so that it depends on nothing beside it.

Letters: M rows, C columns, Hq and Hk query and key heads, group = Hq / Hk, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from eyas.model.rows import MAX_TREE_COLUMNS
from eyas.operators.vocab import capped
from tests.oracle.rows import TensorRows

ROWS_AT_ONCE = 256  # a copy of each one's keys and values


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
        """q [M, Hk, group, D], k, v [M, Hk, C, D], mask bool [M, 1, 1, C] -> as q."""
        if self.softcap is None and self.sinks is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        scores = (q @ k.mT).float() * (self.scale or q.shape[-1] ** -0.5)
        scores = capped(scores, self.softcap).masked_fill(~mask, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.float().view(1, q.shape[1], -1, 1).expand(len(q), -1, -1, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., : k.shape[2]]
        return weights.to(v.dtype) @ v


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What the layers of one forward have in common: the slots int64 [M, C] of each row's columns,
    and which of them it sees, bool [M, C].
    """

    slots: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, rows: TensorRows, page_size: int) -> AttentionPlan:
        bits = zip(rows.prefix_len.tolist(), rows.seen.tolist(), strict=True)
        ends = (length + (seen & 2**MAX_TREE_COLUMNS - 1).bit_length() for length, seen in bits)
        columns = torch.arange(max(ends))
        before, seen = rows.prefix_len[:, None], _in_sight(rows, rows.seen)[:, None]
        mask = (columns >= rows.first_seen[:, None]) & (columns < before)
        e = columns - before
        in_tree = (e >= 0) & (e < MAX_TREE_COLUMNS)
        mask |= in_tree & (seen >> e.clamp(0, MAX_TREE_COLUMNS - 1) & 1).bool()
        pages = rows.page_table[rows.request][:, columns // page_size].long()
        # what a page table holds behind a request's last page has no meaning: any slot will do
        return cls((pages * page_size + columns % page_size).where(mask, 0), mask)

    def attend(self, q: torch.Tensor, kv: torch.Tensor, how: Weighing) -> torch.Tensor:
        """q [M, Hq, D], kv [num_slots, 2, Hk, D] (a layer of a cache, the rows' own entries
        written) -> [M, Hq, D].
        """
        Hk, mixed = kv.shape[2], torch.empty(q.shape, dtype=q.dtype)
        for part in torch.arange(len(q)).split(ROWS_AT_ONCE):
            k, v = kv[self.slots[part]].permute(2, 0, 3, 1, 4)
            by_group = how.mix(q[part].unflatten(1, (Hk, -1)), k, v, self.mask[part, None, None])
            mixed[part] = by_group.flatten(1, 2)
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
