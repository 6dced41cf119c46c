"""The shape of any target, and its embedding and output matrices as stored.

`foreign`, which needs transformers, is imported only for targets that our decoder does not run.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import MismatchError
from eyas.model.architecture import TargetConfig
from eyas.model.arrangement import arranged, published_names
from eyas.model.arrays import Array, refuse_nonfinite
from eyas.model.config import TargetShape
from eyas.model.weights import array_sha256, read_arrays


def target_shape(folder: str | Path) -> TargetShape:
    """A target's shape; a TargetConfig if our own decoder runs it. Raises MissingInputError,
    CorruptError, MismatchError.
    """
    try:
        return TargetConfig.from_folder(folder)
    except MismatchError:
        foreign = _foreign()
        shape: TargetShape = foreign.shape_of(foreign.transformers_config(folder), folder)
        return shape


@dataclass(frozen=True, slots=True)
class StoredMatrices:
    """What a head borrows from its target: embed_tokens and lm_head [V, Ht] as stored."""

    config: TargetShape
    embed_tokens: Array
    lm_head: Array
    lm_head_sha256: str

    @classmethod
    def load(cls, folder: str | Path) -> StoredMatrices:
        """Read both from a Hugging Face folder, and no layer. Raises MissingInputError,
        CorruptError, MismatchError.
        """
        config = target_shape(folder)
        if isinstance(config, TargetConfig):
            embed_name = "model.embed_tokens.weight"
            head_name = embed_name if config.tie_word_embeddings else "lm_head.weight"
            wanted = published_names(embed_name) | published_names("lm_head.weight")
            tensors = arranged(config, read_arrays(folder, wanted))
            if not {embed_name, head_name} <= tensors.keys():
                raise MismatchError(
                    f"{folder} lacks {embed_name} or {head_name}",
                    "restore the checkpoint from its source",
                )
            embed_tokens, lm_head = tensors[embed_name], tensors[head_name]
        else:
            embed_tokens, lm_head = _foreign().transformers_matrices(folder, config)
        matrices = {"embed_tokens": embed_tokens, "lm_head": lm_head}
        if embed_tokens is lm_head:
            del matrices["lm_head"]
        refuse_nonfinite(folder, matrices)
        return cls(config, embed_tokens, lm_head, array_sha256(lm_head))


def refuse_unnamed(folder: str | Path, shape: TargetShape) -> None:
    """Raise what `StoredMatrices.load` would raise for names, before tensors are read."""
    if not isinstance(shape, TargetConfig):
        _foreign().matrix_names(folder, shape)


def _foreign() -> Any:
    return importlib.import_module("eyas.operators.foreign")
