"""The two vocabularies: the target's embedding and output matrices, and the draft's choice among its tokens.

Knows counts and matrices. Does not know text, tokenizers or how the counts were made.

Letters: V target vocabulary, W draft vocabulary, Ht target hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from eyas.errors import ConfigError, MismatchError
from eyas.model.config import TargetConfig
from eyas.model.weights import read_tensors, tensor_sha256


def draft_vocabulary(counts_V: Tensor, draft_vocab_size: int) -> tuple[Tensor, Tensor]:
    """Keep the `draft_vocab_size` most counted tokens, ids ascending; of equally counted ones, the lower id.

    counts_V: int64 [V]. Returns d2t_offset int64 [W] (target id = draft id + d2t_offset[draft id]) and t2d_mask bool [V].
    Raises ConfigError when the target has fewer tokens than are asked for.
    """
    V, W = len(counts_V), draft_vocab_size
    if not 0 < W <= V:
        raise ConfigError(f"a draft vocabulary of {W} tokens does not fit a target of {V}", f"choose 1 to {V}")
    kept_W = counts_V.sort(descending=True, stable=True).indices[:W].sort().values
    t2d_mask = torch.zeros(V, dtype=torch.bool)
    t2d_mask[kept_W] = True
    return kept_W - torch.arange(W), t2d_mask


@dataclass(frozen=True, slots=True)
class TargetVocabulary:
    """What a head borrows from its target: embed_tokens [V, Ht] and lm_head [V, Ht], both frozen."""

    config: TargetConfig
    embed_tokens: Tensor
    lm_head: Tensor
    lm_head_sha256: str

    @classmethod
    def load(cls, folder: str | Path, dtype: torch.dtype = torch.float32) -> TargetVocabulary:
        """Read the two matrices of a Hugging Face folder, and none of its layers.

        Raises MissingInputError, CorruptError, MismatchError.
        """
        config = TargetConfig.from_folder(folder)
        embed_name = "model.embed_tokens.weight"
        head_name = embed_name if config.tie_word_embeddings else "lm_head.weight"
        tensors = read_tensors(folder, {embed_name, head_name})
        if tensors.keys() != {embed_name, head_name}:
            raise MismatchError(f"{folder} lacks {embed_name} or {head_name}", "restore the checkpoint from its source")
        stored = tensors[head_name]
        return cls(config, tensors[embed_name].to(dtype), stored.to(dtype), tensor_sha256(stored))

    def to(self, device: str) -> TargetVocabulary:
        """The same on another device."""
        return replace(self, embed_tokens=self.embed_tokens.to(device), lm_head=self.lm_head.to(device))
