"""What SGLang's speculation calls of its CPU kernels, in torch: those kernels are on no index.

PyPI's sgl-kernel and sglang-kernel are CUDA builds; the CPU's are compiled from SGLang's sources.
With this module on the path SGLang's own server, scheduler, draft worker and verification run, and
these functions stand in for the innermost loops, read off the Triton versions of the same release
(0.5.23: kernels/ops/speculative, kernels/ops/kvcache). Right, not fast: no figure of speed is to be
taken from it. No `convert_weight_packed`, by which SGLang knows the real package: its layers stay
those of torch. Its page size is 1.

Letters: B requests, T tokens of all of them, N nodes of a tree, D head dimension.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

__version__ = "0.0.0"
FULL_MASK = 0  # TreeMaskMode: one of the whole sequence, else of the nodes alone


# Attention


def extend_attention_cpu(
    q: torch.Tensor,
    k: Any,
    v: Any,
    out: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    key_scale: float,
    value_scale: float,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_extend_len: int,
    scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Any,
    sinks: Any,
    tree_mask: torch.Tensor | None,
    is_causal: bool,
) -> None:
    """The last extend_seq_lens tokens of each request see what is before them; nodes of a tree see
    their ancestors: tree_mask, [B * N * N]. Keys and values lie in the buffers already.
    """
    assert is_causal, "no encoder"
    assert not any((is_cross, logit_cap)), "of other models"
    starts = zip(req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc, strict=True)
    seen = 0
    for row, length, extended, start in (map(int, one) for one in starts):
        mask = torch.ones(extended, length, dtype=torch.bool)
        if tree_mask is None:
            mask = mask.tril(length - extended)
            if window > 0:
                mask &= mask.triu(length - extended - window + 1)
        else:
            nodes = tree_mask[seen : seen + extended * extended].view(extended, extended)
            mask[:, length - extended :] = nodes.bool()
            seen += extended * extended
        places = req_to_token[row, :length].long()
        of = slice(start, start + extended)
        attend(q[of], k_buffer[places], v_buffer[places], out[of], mask, scale)


def decode_attention_cpu(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    key_scale: float,
    value_scale: float,
    out: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    places: torch.Tensor,
    logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    logit_cap: float,
    is_cross: bool,
    window: int,
    encoder_lens: Any,
    sinks: Any,
) -> None:
    """One token of each request sees all of it; its key and value are written first."""
    assert not any((is_cross, logit_cap)), "of other models"
    if k is not None and v is not None:
        k_buffer[places] = k.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        v_buffer[places] = v.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for number, (row, length) in enumerate(zip(req_pool_indices, seq_lens, strict=True)):
        seen = req_to_token[int(row), : int(length)].long()
        seen = seen[-window:] if window > 0 else seen
        of = slice(number, number + 1)
        attend(q[of], k_buffer[seen], v_buffer[seen], out[of], None, scale)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> None:
    """q, out [T, heads, D]; k, v [length, key heads, D]; mask [T, length]."""
    q, k, v = (one.transpose(0, 1)[None].to(q.dtype) for one in (q, k, v))
    found = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    out.copy_(found[0].transpose(0, 1))


# Trees


def build_tree_kernel_efficient_cpu(
    parents: torch.Tensor,
    selected: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    num_nodes: int,
    mask_mode: int,
) -> None:
    """Nodes 1 to N - 1 are `selected` candidates; parents[candidate // topk] is a candidate, too,
    where that is not 0, the root. Writes the mask, positions, and first children and siblings.
    """
    assert int(mask_mode) != FULL_MASK, "the CPU's attention takes the nodes' mask"
    B, N = len(seq_lens), num_nodes
    mask_BNN = tree_mask[: B * N * N].view(B, N, N)
    mask_BNN.copy_(torch.eye(N, dtype=mask_BNN.dtype).expand(B, N, N))
    retrieve_index.copy_(torch.arange(B * N).view(B, N))
    for number in range(B):
        chosen, above = selected[number].tolist(), parents[number].tolist()
        of_node = {candidate: node for node, candidate in reversed([*enumerate(chosen, 1)])}
        parent = [0] + [
            0 if not one // topk else of_node.get(above[one // topk], 0) for one in chosen
        ]
        for node in range(N - 1, 0, -1):  # so that the first of two siblings is the earlier node
            next_sibling[number, node] = next_token[number, parent[node]]
            next_token[number, parent[node]] = node
        positions[number * N] = seq_lens[number]
        for node in range(1, N):
            steps, at = 0, node
            while at and steps < depth:
                mask_BNN[number, node, at] = True
                steps, at = steps + 1, parent[at]
            mask_BNN[number, node, 0] = True
            positions[number * N + node] = seq_lens[number] + steps


def verify_tree_greedy_cpu(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Follow the target's choices from the root, child by child."""
    wanted = target_predict.flatten().tolist()
    for number in range(len(candidates)):
        child, sibling = retrive_next_token[number].tolist(), retrive_next_sibling[number].tolist()
        index, tokens = retrive_index[number].tolist(), candidates[number].tolist()
        node = accepted = 0
        accept_index[number, 0] = index[0]
        while accepted + 1 < accept_index.shape[1]:
            at = child[node]
            while at != -1 and tokens[at] != wanted[index[node]]:
                at = sibling[at]
            if at == -1:
                break
            predicts[index[node]] = wanted[index[node]]
            accepted, node = accepted + 1, at
            accept_index[number, accepted] = index[node]
        accept_token_num[number] = accepted
        predicts[index[node]] = wanted[index[node]]


def fill_bonus_tokens_cpu(
    tokens: torch.Tensor, lengths: torch.Tensor, bonus_tokens: torch.Tensor, stride: int
) -> None:
    """The last accepted token of each request."""
    at = torch.arange(len(lengths)) * stride + lengths.long() - 1
    bonus_tokens.copy_(tokens.flatten()[at])


# Places in the cache


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, places: torch.Tensor, accepted_places: torch.Tensor
) -> None:
    """Places of what was accepted, one after the other."""
    kept = accept_index.flatten()
    kept = kept[kept > -1].long()
    accepted_places[: len(kept)] = places[kept]


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    places: torch.Tensor,
    pool_len: int,
) -> None:
    """Write places [T] into the table: of each request from its start to its end."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[row, start:end] = places[at : at + end - start].to(req_to_token.dtype)
        at += end - start


def assign_extend_cache_locs_cpu(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    places: torch.Tensor,
    pool_len: int,
) -> None:
    """Read places [T] from the table: of each request from its start to its end."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        places[at : at + end - start] = req_to_token[row, start:end]
        at += end - start


def assign_draft_cache_locs_contiguous_cpu(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    places: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the places of each request's drafts, topk * num_steps behind its tokens."""
    ends = seq_lens + topk * num_steps
    assign_extend_cache_locs_cpu(rows, req_to_token, seq_lens, ends, places, pool_len)


def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> torch.Tensor:
    """A table with a row for each branch: the request's tokens, then the branch's own drafts."""
    table = req_to_token[rows.long()].repeat_interleave(topk, dim=0)
    for number, length in enumerate(seq_lens.tolist()):
        for branch in range(1, topk):
            start = length + branch * num_steps
            own = req_to_token[int(rows[number]), start : start + num_steps]
            table[number * topk + branch, length : length + num_steps] = own
    return table


def copy_all_layer_kv_cache_cpu(
    pointers: torch.Tensor, strides: torch.Tensor, to: torch.Tensor, source: torch.Tensor
) -> None:
    """Move rows of every layer's buffer, of `strides` bytes each; all are read before any is
    written, as source and target overlap.
    """
    moves = [*zip(to.tolist(), source.tolist(), strict=True)]
    for pointer, size in zip(pointers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + row * size, size) for _, row in moves]
        for (row, _), content in zip(moves, rows, strict=True):
            ctypes.memmove(pointer + row * size, content, size)


def rotate_input_ids_cpu(*_: Any) -> None:
    """Of drafts with several layers, which EAGLE-3's are not."""
    raise NotImplementedError


torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu
