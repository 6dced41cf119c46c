"""A draft head on its target, for inference."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from eyas.engine.tree import Speculation
from eyas.errors import MismatchError
from eyas.gguf.blocks import BlockMatrix
from eyas.model.architecture import MAX_HEAD_DIM
from eyas.model.arrays import BFLOAT16, Array, Arrays, cast
from eyas.model.config import DecoderConfig, HeadConfig, TargetShape, check_head
from eyas.model.native_draft import NativeDraft, head_blocks
from eyas.model.rows import PagedCache
from eyas.model.target import PAGE_SIZE


class HeadTarget(Protocol):
    """What a head takes of its target (`Target`, `evaluate.walks.TargetMatrices`)."""

    @property
    def config(self) -> TargetShape: ...
    @property
    def lm_head_sha256(self) -> str: ...
    @property
    def embed_tokens(self) -> Array: ...
    @property
    def embeddings(self) -> Array | BlockMatrix: ...
    @property
    def lm_head(self) -> Array: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...


def check_branches(config: HeadConfig, speculation: Speculation) -> None:
    """Raise MismatchError where a step has more branches than the head has tokens."""
    if config.draft_vocab_size < speculation.tree_topk:
        raise MismatchError(
            f"the head has {config.draft_vocab_size} tokens to draft, the tree has "
            f"{speculation.tree_topk} branches",
            f"take a tree of fewer branches: {speculation} are draft steps, branches, tokens",
        )


def check_place(config: HeadConfig, served: HeadConfig) -> None:
    """Raise MismatchError unless a head can take over the served head's caches and measured costs:
    the same taps and sizes.
    """
    for name in (*DecoderConfig.model_fields, "draft_vocab_size", "taps"):
        if (own := getattr(config, name)) != (there := getattr(served, name)):
            raise MismatchError(
                f"{name} of the head is {own}, of the served one {there}",
                "restart the server with the other head",
            )


class Draft(NativeDraft):
    """A head on its target: shares the target's embeddings and dtype."""

    def __init__(self, config: HeadConfig, tensors: Arrays, target: HeadTarget) -> None:
        """tensors: of `read_head`. Raises MismatchError for a head of another target."""
        check_head(config, target.config, target.lm_head_sha256)
        if config.head_dim > MAX_HEAD_DIM:
            raise MismatchError(
                f"a head of head_dim {config.head_dim} has no native path",
                f"train a head of a head_dim of {MAX_HEAD_DIM} at most",
            )
        own = {
            name: tensor if name == "d2t" else cast(tensor, target.dtype)
            for name, tensor in tensors.items()
            if name != "t2d"
        }
        blocks = head_blocks(own) if target.dtype == BFLOAT16 else None
        own_head = own.get("lm_head.weight")
        lm_head = target.lm_head if own_head is None else own_head
        super().__init__(config, own, target.embeddings, lm_head, target.dtype, blocks)

    def new_cache(self, num_pages: int, page_size: int = PAGE_SIZE) -> PagedCache:
        return PagedCache(1, num_pages, page_size, self.config.slot_width, self.dtype)
