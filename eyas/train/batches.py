"""Which samples a run sees, in which batches and steps: functions of lengths and a seed.

Letters: V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing, nullcontext
from itertools import islice
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.utils._pytree import tree_leaves

from eyas.errors import EmptyInputError
from eyas.operators.batch import Batch, plan_batches
from eyas.shards import FeatureSource, Sample
from eyas.shards.reader import BATCHES_AHEAD, ahead
from eyas.train.loss import judged_positions
from eyas.train.step import LossModule, PlannedBatch


class BatchConfig(BaseModel):
    """tokens: at most so many in a batch, padding included; choose what one device can hold.
    per_step: batches of one update of the weights, shared by the ranks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int = Field(4096, ge=1)
    per_step: int = Field(1, ge=1)


def survey(source: FeatureSource) -> tuple[Tensor, dict[int, int]]:
    """Read all tokens once: counts int64 [V] under the loss mask, and {sample: answer tokens} of
    those with a judged position. Raises EmptyInputError if there is none.
    """
    counts_V = torch.zeros(source.meta.vocab_size, dtype=torch.int64)
    usable: dict[int, int] = {}
    for number, (token_ids, loss_mask) in enumerate(source.all_tokens()):
        counts_V += torch.bincount(token_ids[loss_mask], minlength=len(counts_V))
        if judged_positions(loss_mask[None]).any():
            usable[number] = int(loss_mask.sum())
    if not usable:
        raise EmptyInputError(
            "the features hold no answer of two tokens or more",
            "generate and capture answers with more prompts",
        )
    return counts_V, usable


def plan_steps(
    config: BatchConfig, epochs: Sequence[Sequence[int]], lengths: Sequence[int], seed: int
) -> list[list[list[int]]]:
    """For each step, for each of its batches, the sample numbers. The last step may be smaller.

    epochs: sample numbers of each. lengths: tokens of each sample.
    """
    batches: list[list[int]] = []
    for epoch, numbers in enumerate(epochs):
        of_epoch = [lengths[number] for number in numbers]
        places = plan_batches(of_epoch, config.tokens, f"{seed}/{epoch}")
        batches += [[numbers[place] for place in batch] for batch in places]
    return [
        batches[first : first + config.per_step]
        for first in range(0, len(batches), config.per_step)
    ]


def feed(
    reader: Generator[list[Sample]], sizes: Sequence[int], first_step: int, module: LossModule
) -> Generator[list[PlannedBatch]]:
    """For each step from `first_step` on, sizes[i] batches on the module's device, with their
    plans.

    A thread makes them BATCHES_AHEAD steps ahead; on a GPU it copies beside the computation.
    """
    is_gpu = module.embed_tokens.is_cuda
    copies = torch.cuda.Stream(module.embed_tokens.device) if is_gpu else None  # type: ignore[no-untyped-call]

    def made(number: int) -> tuple[list[PlannedBatch], Any]:
        batches = []
        if copies is not None:  # a new thread is on GPU 0, where each rank would take memory
            torch.cuda.set_device(copies.device)
        with torch.cuda.stream(copies) if is_gpu else nullcontext():
            for samples in islice(reader, sizes[number]):
                batches.append(module.planned(Batch.of(samples), first_step + number))
            return batches, copies.record_event() if copies else None

    steps = ahead(made, range(len(sizes)), lambda _: 1, 1, 1 + BATCHES_AHEAD)
    with closing(reader), closing(steps):
        for batches, copied in steps:
            if copied is not None:
                stream = torch.cuda.current_stream()
                stream.wait_event(copied)
                for batch, plan in batches:
                    for one in tree_leaves((list(batch.tensors.values()), plan)):
                        if isinstance(one, Tensor):
                            one.record_stream(stream)  # it was allocated on the other
            yield batches
