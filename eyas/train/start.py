"""Where a run starts: fresh weights, or an existing head.

Letters: V target vocabulary, W draft vocabulary, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, model_validator
from torch import Tensor, nn

from eyas.errors import MismatchError
from eyas.hub import resolve_head
from eyas.model.config import MOST_DRAFT_TOKENS, HeadConfig, HeadOptions
from eyas.model.dialects import LM_HEAD
from eyas.operators.head import Head, load_head
from eyas.operators.vocab import TargetVocabulary, draft_vocabulary
from eyas.shards import FeatureMeta, Sample

COVERAGE = 0.99  # of the answers' tokens by the default draft vocabulary
SCALED_BY, START_SCALE = 16, 0.5  # conversations, and the share, of `scale_to_states`
LEAST_CHANNEL = 1e-3  # times the mean size of a channel: smaller ones are scaled as this
W_IN_STEPS_OF = 128  # a size that all devices multiply well
RIDGE = 0.01  # times the mean square of the regressors


class StartConfig(BaseModel):
    """An existing head to continue from.

    head: folder or URL of a head in any form, an id of the hub, or "smollm2". licence: of a head
    that eyas did not make, for the lineage. vocabulary: keep the draft tokens, or recount them by
    the features, as many as before or head.draft_vocab_size: tokens drafted before keep their row
    of lm_head, others get the target's row by the head's own map. other_target: the head was
    trained for another fine-tune of the same shape, and that is intended.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    head: str
    licence: str = "not given"
    vocabulary: Literal["keep", "recount"] = "keep"
    other_target: bool = False

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"head": value} if isinstance(value, str) else value


def fresh_head(
    options: HeadOptions,
    meta: FeatureMeta,
    vocabulary: TargetVocabulary,
    counts_V: Tensor,
    seed: int,
) -> Head:
    """A new head, float32 on the CPU, drawn from the seed.

    meta: for the taps. counts_V: of tokens in answers; the most frequent are drafted,
    `covering_size` unless options say how many. Raises ConfigError.
    """
    W = options.draft_vocab_size or covering_size(counts_V)
    options = options.model_copy(update={"draft_vocab_size": W})
    shape = HeadConfig.for_target(vocabulary.config, options, meta.taps)
    head = Head(shape.model_copy(update={"target_lm_head_sha256": vocabulary.lm_head_sha256}))
    head.set_vocabulary(*draft_vocabulary(counts_V, W))
    initialise(head, vocabulary, seed)
    return head


def covering_size(counts_V: Tensor) -> int:
    """The fewest tokens that cover COVERAGE, in steps of W_IN_STEPS_OF, up to MOST_DRAFT_TOKENS."""
    covered_V = counts_V.sort(descending=True).values.double().cumsum(0) / counts_V.sum()
    fewest = int((covered_V < COVERAGE).sum()) + 1
    return min(-(-fewest // W_IN_STEPS_OF) * W_IN_STEPS_OF, len(counts_V), MOST_DRAFT_TOKENS)


@torch.no_grad()
def initialise(head: Head, vocabulary: TargetVocabulary, seed: int) -> None:
    """Draw all weights in place.

    Norms are ones; matrices normal with variance 1 / fan_in; o_proj and down_proj zero; lm_head has
    the target's rows.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in head.named_parameters():
        if weight.ndim == 1:
            nn.init.ones_(weight)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)
        elif name != LM_HEAD:
            weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
    head.lm_head.weight.copy_(vocabulary.lm_head[head.target_ids_W])


@torch.no_grad()
def scale_to_states(head: Head, samples: Iterable[Sample]) -> None:
    """Scale a new head by the target's states in these answers (docs/decisions/training.md).

    lm_head (norm, if lm_head is frozen) takes half their root mean square, so that logits begin at
    half the target's scale. Where no norm stands before fc, `feature_scale` gives fc's input
    channels a mean square of 1, since targets have a few channels that are far larger.
    """
    square, last_square, count = torch.zeros(head.fc.in_features, dtype=torch.float64), 0.0, 0
    for sample in samples:
        answer_T = sample.loss_mask.clone()
        answer_T[:1] = False  # targets keep states at position 0 that are far larger
        aux, last = (one[answer_T].double() for one in (sample.aux_hidden, sample.last_hidden))
        if aux.isfinite().all() and last.isfinite().all():  # else its step will name the sample
            square += aux.square().sum(0)
            last_square += float(last.square().sum()) / last.shape[1]
            count += len(last)
    head.feature_scale = torch.ones(len(square))
    if not last_square:
        return
    if not (head.config.fc_norm or head.config.norm_before_fc):
        rms_A = (square / count).sqrt()
        head.feature_scale = rms_A.clamp(min=LEAST_CHANNEL * float(rms_A.mean())).float().pow(-1)
    scale = START_SCALE * math.sqrt(last_square / count)
    if head.config.train_lm_head:
        head.lm_head.weight.mul_(scale)
    else:
        head.norm.weight.fill_(scale)


def existing_head(
    config: StartConfig, options: HeadOptions, meta: FeatureMeta, vocabulary: TargetVocabulary
) -> Head:
    """The head of `config`, float32, ready to be trained for this target.

    Raises what loading raises, and one MismatchError that names all that does not fit.
    """
    head = load_head(resolve_head(config.head), vocabulary.config, vocabulary.lm_head)
    shape, faults = head.config, []
    sizes = shape.target_hidden_size, shape.vocab_size
    if sizes != (meta.hidden_size, meta.vocab_size):
        faults.append(
            "it is for a target of hidden size {} and a vocabulary of {}, ".format(*sizes)
            + f"this one has {meta.hidden_size} and {meta.vocab_size}"
        )
    elif head.embed_tokens is not None:
        if not torch.equal(head.embed_tokens, vocabulary.embed_tokens.to(head.embed_tokens)):
            faults.append(
                "it has embeddings of its own, which are not this target's and would be lost"
            )
        head.embed_tokens = None
    if shape.taps != meta.taps:
        faults.append(
            f"it reads the outputs of layers {shape.taps}, the features are of {meta.taps}"
        )
    trained_with = shape.target_lm_head_sha256
    if trained_with not in ("", vocabulary.lm_head_sha256) and not config.other_target:
        faults.append(
            "it was trained for another target of the same shape (set start.other_target: true if "
            "that is meant)"
        )
    # No weight depends on a window: a head is trained on under any.
    free = {"sliding_window", "draft_vocab_size" if config.vocabulary == "recount" else ""}
    # Only options that the run file sets, even to their default; the others are the head's own.
    for name in sorted(options.model_fields_set - free):
        asked = getattr(options, name)
        if asked is not None and asked != getattr(shape, name):
            faults.append(f"head.{name} is {asked}, its own is {getattr(shape, name)}")
    if faults:
        raise MismatchError(
            f"{config.head} cannot be the start: " + "; ".join(faults),
            "leave out `head` options and capture features of this target at the head's layers, or "
            "start afresh",
        )
    changed: dict[str, object] = {"target_lm_head_sha256": vocabulary.lm_head_sha256}
    if "sliding_window" in options.model_fields_set:
        changed["sliding_window"] = options.sliding_window
    head.config = shape.model_copy(update=changed)
    return head


@torch.no_grad()
def recount(
    head: Head, vocabulary: TargetVocabulary, counts_V: Tensor, num_tokens: int | None
) -> None:
    """Choose the draft tokens again by counts_V, in place: num_tokens, or as many as before.

    Tokens that were drafted keep their row of lm_head. Others get the target's row by the linear
    map from the target's rows of old tokens to the head's (ridge regression on what a scale
    leaves). vocabulary: on the CPU.
    """
    W, lm_head = num_tokens or head.config.draft_vocab_size, head.lm_head
    old_row_V = torch.full((head.config.vocab_size,), -1, dtype=torch.int64)
    old_row_V[head.target_ids_W] = torch.arange(head.config.draft_vocab_size)
    old_WH = vocabulary.lm_head[head.target_ids_W].to(lm_head.weight)
    scale = (old_WH * lm_head.weight).sum() / old_WH.square().sum()
    square_HH = old_WH.T @ old_WH
    square_HH.diagonal().add_(RIDGE * float(square_HH.diagonal().mean()))
    rest_HH = torch.linalg.solve(square_HH, old_WH.T @ (lm_head.weight - scale * old_WH))
    head.config = head.config.model_copy(update={"draft_vocab_size": W})
    head.d2t = torch.empty(W, dtype=torch.int64)
    head.set_vocabulary(*draft_vocabulary(counts_V, W))
    ids_W = head.target_ids_W
    was_W = old_row_V[ids_W]
    of_target_WH = vocabulary.lm_head[ids_W].to(lm_head.weight)
    fresh_WH = scale * of_target_WH + of_target_WH @ rest_HH
    rows_WH = torch.where((was_W >= 0).unsqueeze(1), lm_head.weight[was_W.clamp(min=0)], fresh_WH)
    head.lm_head = nn.Linear(rows_WH.shape[1], W, bias=False, device="meta")  # draws no numbers
    head.lm_head.weight = nn.Parameter(rows_WH, requires_grad=lm_head.weight.requires_grad)
