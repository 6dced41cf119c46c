"""The two vocabularies: the target's embedding and output matrices, and the draft's choice among
its tokens.

Knows counts and matrices. Does not know text, tokenizers or how the counts were made.

Letters: V target vocabulary, W draft vocabulary, Ht target hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from eyas.errors import ConfigError, MismatchError
from eyas.model.config import TargetConfig, TargetShape
from eyas.model.foreign import matrices, target_shape
from eyas.model.weights import read_tensors, tensor_sha256


def draft_vocabulary(counts_V: Tensor, draft_vocab_size: int) -> tuple[Tensor, Tensor]:
    """Keep the `draft_vocab_size` most counted tokens, ids ascending; of equally counted ones, the
    lower id.

    counts_V: int64 [V]. Returns d2t_offset int64 [W] (target id = draft id + d2t_offset[draft id])
    and t2d_mask bool [V]. Raises ConfigError when the target has fewer tokens than are asked for.
    """
    V, W = len(counts_V), draft_vocab_size
    if not 0 < W <= V:
        raise ConfigError(
            f"a draft vocabulary of {W} tokens does not fit a target of {V}", f"choose 1 to {V}"
        )
    kept_W = counts_V.sort(descending=True, stable=True).indices[:W].sort().values
    t2d_mask = torch.zeros(V, dtype=torch.bool)
    t2d_mask[kept_W] = True
    return kept_W - torch.arange(W), t2d_mask


@dataclass(frozen=True, slots=True)
class TargetVocabulary:
    """What a head borrows from its target: embed_tokens [V, Ht] and lm_head [V, Ht], both frozen.

    lm_head holds the target's own scale of its logits; lm_head_sha256 is of what is stored.
    """

    config: TargetShape
    embed_tokens: Tensor
    lm_head: Tensor
    lm_head_sha256: str

    @classmethod
    def load(cls, folder: str | Path, dtype: torch.dtype = torch.float32) -> TargetVocabulary:
        """Read the two matrices of a Hugging Face folder, and none of its layers.

        Raises MissingInputError, CorruptError, MismatchError.
        """
        config = target_shape(folder)
        embed_tokens, stored = (
            own_matrices(folder, config)
            if isinstance(config, TargetConfig)
            else matrices(folder, config)
        )
        lm_head = (
            stored.to(dtype) if config.logit_scale == 1.0 else stored.to(dtype) * config.logit_scale
        )
        return cls(config, embed_tokens.to(dtype), lm_head, tensor_sha256(stored))

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """What the target says after last hidden states [R, Ht]: its logits [R, V]."""
        return self.capped(hidden_RH.to(self.lm_head.dtype) @ self.lm_head.T)

    def capped(self, logits: Tensor) -> Tensor:
        """lm_head's output as the target puts it out: Gemma 2 cuts it softly, which changes
        probabilities and no argmax.
        """
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def to(self, device: str) -> TargetVocabulary:
        """The same on another device."""
        return replace(
            self, embed_tokens=self.embed_tokens.to(device), lm_head=self.lm_head.to(device)
        )


def own_matrices(folder: str | Path, config: TargetConfig) -> tuple[Tensor, Tensor]:
    """embed_tokens and lm_head [V, Ht], as stored, of a target that our own decoder runs."""
    embed_name = "model.embed_tokens.weight"
    head_name = embed_name if config.tie_word_embeddings else "lm_head.weight"
    tensors = read_tensors(folder, {embed_name, head_name})
    if tensors.keys() != {embed_name, head_name}:
        raise MismatchError(
            f"{folder} lacks {embed_name} or {head_name}", "restore the checkpoint from its source"
        )
    return tensors[embed_name], tensors[head_name]
