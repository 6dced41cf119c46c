"""Attention of N new tokens over a dense prefix and over each other by ancestry. Pure functions; know no cache.

A request's keys are the columns [0, len) of its prefix, which every new token sees, then the N new tokens, of which a
token sees its ancestors and itself:

    columns   0 ......... len-1 | len .. len+N-1
    node n    all seen          | ancestors of n, and n

Letters: B batch, N new tokens (tree nodes), E columns after the prefix, C columns, Hq and Hk query and key heads,
D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F


def ancestor_matrix(parents: Sequence[int]) -> np.ndarray:
    """[N, N] bool: row n is True at n and at its ancestors. parents[n] < n, and -1 for a node that has none."""
    seen = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def prefix_mask(seen_BNE: np.ndarray, prefix_lens: Sequence[int], columns: int) -> torch.Tensor:
    """[B, 1, N, C] additive fp32 mask (0 seen, -inf hidden): all of each prefix, then E columns as `seen_BNE` (bool) says.

    E is N, or more when earlier tree levels lie between the prefix and the new tokens.
    """
    B, N, E = seen_BNE.shape
    mask = np.full((B, 1, N, columns), -np.inf, dtype=np.float32)
    for b, length in enumerate(prefix_lens):
        mask[b, 0, :, :length] = 0
        mask[b, 0, :, length : length + E][seen_BNE[b]] = 0
    return torch.from_numpy(mask)


def tree_attention_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The plain definition: softmax(q k^T / sqrt(D) + mask) v, in float64. Shapes as in `tree_attention`."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).double(), v.repeat_interleave(group, 1).double()
    scores = q.double() @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask.double()
    mixed: torch.Tensor = scores.softmax(-1) @ v
    return mixed.to(q.dtype)


def tree_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """q [B, Hq, N, D], k and v [B, Hk, C, D], mask [B or 1, 1, N, C] additive or None (all seen) -> [B, Hq, N, D].

    Query heads of a group share a key head: they are laid beside each other as Hq / Hk * N queries of one head, so keys
    are never repeated in memory.
    """
    B, Hq, N, D = q.shape
    group = Hq // k.shape[1]
    if group == 1:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    grouped = q.reshape(B, k.shape[1], group * N, D)
    wide = None if mask is None else mask.repeat(1, 1, group, 1)
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=wide).view(B, Hq, N, D)
