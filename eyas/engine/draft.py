"""The draft head for inference: the layer of `model/head.py` with fused projections and a cache, and its tree of proposals.

Knows the head and how a tree is grown. Does not know requests: the caller says which rows, lengths and hidden states.

    entry i of the draft's cache    feature of x_0 .. x_i  and  embedding of x_{i+1}  ->  proposes x_{i+2}

Letters: B rows, K draft steps, k tree_topk, H hidden, W draft vocabulary, M tokens of one forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field

from eyas.engine.tree import Candidates
from eyas.errors import MismatchError
from eyas.model.attention import prefix_mask
from eyas.model.block import Block, Placement, Rope, rms_norm
from eyas.model.cache import KVCache
from eyas.model.config import HeadConfig
from eyas.model.linear import Linear
from eyas.model.target import Target


class Growth(BaseModel):
    """How a tree grows: at most so many levels, so many branches a node (1: a chain), and when to stop early."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_draft_steps: int = Field(6, ge=1, le=16)
    tree_topk: int = Field(3, ge=1, le=16)
    min_path_probability: float = Field(0.2, ge=0, lt=1)


class Draft:
    """A head on its target: shares the target's embeddings, dtype and device."""

    def __init__(self, config: HeadConfig, tensors: dict[str, torch.Tensor], target: Target) -> None:
        """tensors under EAGLE's names. Raises MismatchError when the head was made for another target."""
        check_head(config, target)
        self.config = config
        cast = {name: tensor.to(target.device, target.dtype) for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
        layer = {name.removeprefix("midlayer."): tensor for name, tensor in cast.items() if name.startswith("midlayer.")}
        self._embed_tokens = target.embed_tokens
        self._input_norm, self._hidden_norm = layer["input_layernorm.weight"], layer["hidden_norm.weight"]
        self._block = Block(config, layer, 0)
        self._fc, self._lm_head = Linear(cast["fc.weight"]), Linear(cast["lm_head.weight"])
        self._norm = cast["norm.weight"]
        self._target_ids_W = (torch.arange(config.draft_vocab_size) + tensors["d2t"].cpu()).to(target.device)
        self.rope = Rope(config, target.config.max_position_embeddings + 64, target.dtype, target.device)
        self._dtype, self._device = target.dtype, target.device

    def prepare(self, layer_rows: set[int], logit_rows: set[int]) -> None:
        """Lay the weights out for these numbers of tokens (see `Linear.prepare`)."""
        for linear in (*self._block.linears, self._fc):
            linear.prepare(layer_rows)
        self._lm_head.prepare(logit_rows)

    def new_cache(self, rows: int, columns: int) -> KVCache:
        heads = (self.config.num_key_value_heads, self.config.head_dim)
        return KVCache(1, rows, columns, heads, self._dtype, self._device)

    def fuse(self, aux_hidden: torch.Tensor) -> torch.Tensor:
        """Target features [M, 3 * Ht] -> [M, H]."""
        return self._fc(aux_hidden)

    def forward(self, tokens_M: torch.Tensor, h: torch.Tensor, at: Placement, cache: KVCache) -> torch.Tensor:
        """Tokens int64 [M] and features or previous outputs [M, H] -> outputs [M, H], un-normed: they are fed back."""
        eps = self.config.rms_norm_eps
        embedded = rms_norm(F.embedding(tokens_M, self._embed_tokens), self._input_norm, eps)
        return self._block(torch.cat((embedded, rms_norm(h, self._hidden_norm, eps)), dim=-1), h, at, cache)

    def proposals(self, h: torch.Tensor, tree_topk: int) -> tuple[list[list[int]], list[list[float]]]:
        """Outputs [M, H] -> the k best next tokens of each (ids of the target) and their log-probabilities."""
        logits = self._lm_head(rms_norm(h, self._norm, self.config.rms_norm_eps))
        best, ids = logits.float().log_softmax(-1).topk(tree_topk, dim=-1)
        return self._target_ids_W[ids].tolist(), best.tolist()

    def propose(
        self, h_BH: torch.Tensor, first: Sequence[Candidates], lens: Sequence[int], growth: Growth, cache: KVCache
    ) -> None:
        """Grow each row's candidates by up to K - 1 levels, in place; `first` holds each row's k candidates of depth 1.

        h_BH: the output of each row's last entry; lens [B]: entries in each row's cache. The tree's own entries go behind
        them and are overwritten by the next extend. Source of the expansion: EAGLE-2, arXiv 2406.16858, section 4.1. A level
        is drafted only while some path is at least as probable as `min_path_probability`: a forward that the target
        will hardly follow costs more than it brings.
        """
        B, k = len(lens), len(first[0].tokens)
        frontiers = [list(range(k)) for _ in range(B)]
        h = h_BH.repeat_interleave(k, 0)  # [B * k, H]: what each frontier node's parent put out
        seen_BkE = np.zeros((B, k, 0), dtype=bool)
        own = np.broadcast_to(np.eye(k, dtype=bool), (B, k, k))
        starts = np.asarray(lens, dtype=np.int64)[:, None]
        rows = np.arange(B, dtype=np.int64)[:, None] * cache.columns
        least = math.log(growth.min_path_probability) if growth.min_path_probability > 0 else -math.inf
        for level in range(growth.num_draft_steps - 1):
            if max(row.scores[node] for row, frontier in zip(first, frontiers, strict=True) for node in frontier) < least:
                break
            seen_BkE = np.concatenate((seen_BkE, own), axis=2)
            columns = max(lens) + seen_BkE.shape[2]
            positions = np.repeat(starts + level, k, axis=1)
            slots = rows + starts + level * k + np.arange(k)
            at = self.rope.place(0, columns, positions, slots, prefix_mask(seen_BkE, lens, columns))
            tokens = [[row.tokens[node] for node in frontier] for row, frontier in zip(first, frontiers, strict=True)]
            h = self.forward(torch.tensor(tokens, device=self._device).flatten(), h, at, cache)
            ids, log_probs = self.proposals(h, k)
            chosen = []  # rows of h, and of seen_BkE, that the next frontier's parents are in
            for b, (row, frontier) in enumerate(zip(first, frontiers, strict=True)):
                start = len(row.tokens)
                for place, node in enumerate(frontier):
                    row.expand(node, ids[b * k + place], log_probs[b * k + place])
                frontiers[b] = row.best(start, k)
                chosen += [b * k + (node - start) // k for node in frontiers[b]]
            if level < growth.num_draft_steps - 2:
                h = h[torch.tensor(chosen, device=self._device)]
                seen_BkE = seen_BkE.reshape(B * k, -1)[chosen].reshape(B, k, -1)


def check_head(config: HeadConfig, target: Target) -> None:
    """Raise MismatchError unless the head was made for this target."""
    ours, shape = target.config, f"{target.config.hidden_size} and a vocabulary of {target.config.vocab_size}"
    if (config.target_hidden_size, config.vocab_size) != (ours.hidden_size, ours.vocab_size):
        raise MismatchError(
            f"the head is for a target of hidden size {config.target_hidden_size} and a vocabulary of {config.vocab_size}; "
            f"this target has {shape}",
            "serve the head with the target that it was trained on",
        )
    if max(config.taps) >= ours.num_hidden_layers:
        raise MismatchError(
            f"the head taps layers {config.taps}; the target has {ours.num_hidden_layers}", "use the head's own target"
        )
    if config.target_lm_head_sha256 and config.target_lm_head_sha256 != target.lm_head_sha256:
        raise MismatchError(
            "the head was trained on another target of the same shape (its lm_head has another hash)",
            "serve the head with the target that it was trained on, or train one for this target",
        )
