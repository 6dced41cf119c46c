"""What a run starts from: fresh weights, or a head that is there already. Knows heads, counts of
tokens, and the target's matrices.

Does not know optimizers or batches.

Letters: V target vocabulary, W draft vocabulary, H hidden.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from eyas.artifact import Manifest
from eyas.errors import MismatchError
from eyas.hub import resolve_head
from eyas.lineage import head_manifest
from eyas.model.config import HeadConfig, HeadOptions
from eyas.model.head import Head, load_head
from eyas.model.vocab import TargetVocabulary, draft_vocabulary
from eyas.shards import FeatureMeta
from eyas.train.initial import initialise


class StartConfig(BaseModel):
    """A head to go on from, and what it must not lose.

    head: folder or URL of a head in any form, an id of the hub, or "builtin". licence: of one that
    eyas did not make, for the lineage. vocabulary: its draft tokens stay (keep), or are chosen anew
    by the counts of the features (recount): tokens that were drafted before keep their row of
    lm_head, others get the target's. other_target: it was trained for another fine-tune of the same
    shape, and that is meant. keep_mix: features of the mix that it was trained on; on their
    held-out conversations (keep_samples of them) the new head's tau must not be lower than the old
    one's by more than keep_tolerance, a share. keep_share: of the training samples, taken from it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    head: str
    licence: str = "not given"
    vocabulary: Literal["keep", "recount"] = "keep"
    other_target: bool = False
    keep_mix: str | None = None
    keep_share: float = Field(0.0, ge=0, lt=1)
    keep_tolerance: float = Field(0.02, ge=0, lt=1)
    keep_samples: int = Field(256, ge=2)

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("keep_mix") and not value.get("head"):
            raise ValueError(
                "keep_mix without a head that learned it: give --start (start.head) as well"
            )
        return {"head": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _share_of_something(self) -> StartConfig:
        if self.keep_share and not self.keep_mix:
            raise ValueError("keep_share: there is no old mix to take a share of; give keep_mix")
        return self


def fresh_head(
    options: HeadOptions,
    meta: FeatureMeta,
    vocabulary: TargetVocabulary,
    counts_V: Tensor,
    seed: int,
) -> Head:
    """A new head for this target, its weights drawn from the seed. Raises ConfigError."""
    shape = HeadConfig.for_target(vocabulary.config, options, meta.taps)
    head = Head(shape.model_copy(update={"target_lm_head_sha256": vocabulary.lm_head_sha256}))
    head.set_vocabulary(*draft_vocabulary(counts_V, options.draft_vocab_size))
    initialise(head, vocabulary, seed)
    return head


def warm_head(
    config: StartConfig, options: HeadOptions, meta: FeatureMeta, vocabulary: TargetVocabulary
) -> Head:
    """The head of `config`, in float32, ready to be trained for this target.

    Raises MismatchError for a head of another shape, of other layers, of another target, or of
    other options than are asked for, and for one that cannot get other draft tokens.
    """
    head = given_head(config.head, vocabulary)
    refuse_other(head, config, options, meta, vocabulary)
    if config.vocabulary == "recount" and head.config.owns_embeddings:
        raise MismatchError(
            "new draft tokens start from the target's lm_head, which has another width than this "
            "head's",
            "set start.vocabulary: keep",
        )
    head.config = head.config.model_copy(
        update={"target_lm_head_sha256": vocabulary.lm_head_sha256}
    )
    return head


def given_head(url: str, vocabulary: TargetVocabulary) -> Head:
    """A head in any form, wherever StartConfig has it. Raises MissingInputError, CorruptError,
    MismatchError.
    """
    return load_head(resolve_head(url), vocabulary.config, vocabulary.lm_head.cpu())


def refuse_other(
    head: Head,
    config: StartConfig,
    options: HeadOptions,
    meta: FeatureMeta,
    vocabulary: TargetVocabulary,
) -> None:
    """Raise one MismatchError that names all that does not fit, if anything does not."""
    shape, faults = head.config, []
    if (shape.target_hidden_size, shape.vocab_size) != (meta.hidden_size, meta.vocab_size):
        faults.append(
            f"it is for a target of hidden size {shape.target_hidden_size} and a vocabulary of "
            f"{shape.vocab_size}, "
            f"this one has {meta.hidden_size} and {meta.vocab_size}"
        )
    elif head.embed_tokens is not None and not shape.owns_embeddings:
        if not torch.equal(head.embed_tokens, vocabulary.embed_tokens.to(head.embed_tokens)):
            faults.append(
                "it has embeddings of its own, which are not this target's and would be lost"
            )
        head.embed_tokens = None
    if shape.taps != meta.taps:
        faults.append(
            f"it reads the outputs of layers {shape.taps}, the features are of {meta.taps}"
        )
    if (
        shape.target_lm_head_sha256 not in ("", vocabulary.lm_head_sha256)
        and not config.other_target
    ):
        faults.append(
            "it was trained for another target of the same shape (set start.other_target: true if "
            "that is meant)"
        )
    # said, be it the default; what is not said is the head's own
    for name in sorted(options.model_fields_set):
        asked = getattr(options, name)
        if asked is not None and asked != getattr(shape, name):
            faults.append(f"head.{name} is {asked}, its own is {getattr(shape, name)}")
    if faults:
        raise MismatchError(
            f"{config.head} cannot be gone on from: " + "; ".join(faults),
            "leave out `head` options and capture features of this target at the head's layers, or "
            "start afresh",
        )


@torch.no_grad()
def recount(head: Head, vocabulary: TargetVocabulary, counts_V: Tensor) -> None:
    """Choose W draft tokens anew, in place; vocabulary on the CPU, of the head's width."""
    old_row_V = torch.full((head.config.vocab_size,), -1, dtype=torch.int64)
    old_row_V[head.target_ids_W] = torch.arange(head.config.draft_vocab_size)
    old_lm_head_WH = head.lm_head.weight.clone()
    head.set_vocabulary(*draft_vocabulary(counts_V, head.config.draft_vocab_size))
    ids_W = head.target_ids_W
    was_W = old_row_V[ids_W]
    fresh_WH = vocabulary.lm_head.cpu()[ids_W].to(old_lm_head_WH)
    head.lm_head.weight.copy_(
        torch.where((was_W >= 0).unsqueeze(1), old_lm_head_WH[was_W.clamp(min=0)], fresh_WH)
    )


def identity_of(config: StartConfig) -> Manifest:
    """The manifest of the head of `config`, for identity and lineage of what is made from it."""
    return head_manifest(config.head, {"licence": config.licence})
