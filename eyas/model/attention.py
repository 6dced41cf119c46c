"""Attention of N new tokens over a dense prefix and over each other by ancestry. Pure functions; know no cache.

A request's keys are the columns [0, len) of its prefix, which every new token sees, then the N new tokens, of which a
token sees its ancestors and itself:

    columns   0 ......... len-1 | len .. len+N-1
    node n    all seen          | ancestors of n, and n

Letters: B batch, N new tokens (tree nodes), C columns, Hq and Hk query and key heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def ancestor_matrix(parents: Sequence[int]) -> torch.Tensor:
    """[N, N] bool: row n is True at n and at its ancestors. parents[n] < n, and -1 for a node that has none."""
    seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] = seen[parent]
        seen[node, node] = True
    return seen


def prefix_mask(ancestors_BNN: torch.Tensor, prefix_lens: Sequence[int], columns: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, 1, N, C] additive mask (0 seen, -inf hidden) from each request's ancestor matrix and prefix length."""
    B, N, _ = ancestors_BNN.shape
    mask = torch.full((B, 1, N, columns), float("-inf"), dtype=dtype)
    for b, length in enumerate(prefix_lens):
        mask[b, 0, :, :length] = 0
        mask[b, 0, :, length : length + N].masked_fill_(ancestors_BNN[b], 0)
    return mask


def tree_attention_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The plain definition: softmax(q k^T / sqrt(D) + mask) v, in float64. Shapes as in `tree_attention`."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1).double(), v.repeat_interleave(group, 1).double()
    scores = q.double() @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask.double()
    return (scores.softmax(-1) @ v).to(q.dtype)


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
