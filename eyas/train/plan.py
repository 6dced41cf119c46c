"""Which samples a run sees, in which batches and steps. Knows lengths, counts of tokens and a seed,
no head and no loss's value.

Letters: V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from eyas.errors import EmptyInputError
from eyas.model.batch import Batch, plan_batches, plan_packs
from eyas.shards import Sample
from eyas.shards.source import FeatureSource
from eyas.train.loss import ObjectiveConfig, judged_positions


class BatchConfig(BaseModel):
    """What is computed at once. tokens: of one batch, padding included: what one device takes.
    per_step: batches that one update of the weights sees, shared by the ranks. packed: samples one
    behind the other in one row, in place of one a row with padding.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int = Field(4096, ge=1)
    per_step: int = Field(1, ge=1)
    packed: bool = False


def survey(source: FeatureSource, config: ObjectiveConfig) -> tuple[Tensor, list[int]]:
    """Counts int64 [V] of tokens under the loss mask, and the numbers of the samples with a
    position to train on.
    """
    counts_V = torch.zeros(source.meta.vocab_size, dtype=torch.int64)
    usable = []
    for number, (token_ids, loss_mask) in enumerate(source.all_tokens()):
        counts_V += torch.bincount(token_ids[loss_mask], minlength=len(counts_V))
        if judged_positions(loss_mask[None], config.loss_mask).any():
            usable.append(number)
    if not usable:
        raise EmptyInputError(
            "the features hold no answer of two tokens or more",
            "generate and capture answers with more prompts",
        )
    return counts_V, usable


def plan(
    config: BatchConfig, passes: Sequence[Sequence[int]], lengths: Sequence[int], seed: int
) -> list[list[list[int]]]:
    """Of every step of the run, in order, its batches of sample numbers; the last one may have
    fewer.

    passes: of each epoch, the samples. Depends on nothing but the arguments, not on how many ranks
    share a step.
    """
    batches: list[list[int]] = []
    for epoch, numbers in enumerate(passes):
        planned = plan_packs if config.packed else plan_batches
        places = planned([lengths[number] for number in numbers], config.tokens, f"{seed}/{epoch}")
        batches += [[numbers[place] for place in batch] for batch in places]
    return [
        batches[first : first + config.per_step]
        for first in range(0, len(batches), config.per_step)
    ]


def read_batches(
    samples: Iterator[list[Sample]], count: int, config: BatchConfig, device: str
) -> list[Batch]:
    """The next so many batches, on the device."""
    following = (next(samples) for _ in range(count))
    if config.packed:
        return [Batch.packed(one, config.tokens, device) for one in following]
    return [Batch.of(one, device) for one in following]
