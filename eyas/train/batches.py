"""Which samples a run sees, in which batches and steps.

Works on sources, lengths, counts of tokens and a seed. Does not know heads or the value of a loss.

Letters: V target vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from eyas.artifact import Manifest
from eyas.errors import EmptyInputError, MismatchError
from eyas.model.batch import Batch, plan_batches, plan_packs
from eyas.shards import FeatureMeta, FeatureSource, Sample
from eyas.train.loss import ObjectiveConfig, judged_positions


class BatchConfig(BaseModel):
    """The sizes of a batch and of a step.

    tokens: at most so many in a batch, padding included; choose what one device can hold. per_step:
    batches of one update of the weights, shared by the ranks. packed: a batch is one row with
    samples one behind the other, instead of one sample a row with padding.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int = Field(4096, ge=1)
    per_step: int = Field(1, ge=1)
    packed: bool = False


class MixedSource:
    """A FeatureSource of the samples of `new`, and after them those of `old`, by number."""

    def __init__(self, new: FeatureSource, old: FeatureSource) -> None:
        """Raises MismatchError for features of two targets or of other layers."""
        check_alike(new.meta, old.meta)
        self._new, self._old = new, old

    @property
    def meta(self) -> FeatureMeta:
        """The new source's; the old one has the same target and layers."""
        return self._new.meta

    @property
    def inputs(self) -> Mapping[str, Manifest]:
        """The manifests of both sources; names of the old one begin with "old_"."""
        old = {f"old_{name}": manifest for name, manifest in self._old.inputs.items()}
        return {**self._new.inputs, **old}

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each sample."""
        return [*self._new.lengths, *self._old.lengths]

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def all_tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        return chain(self._new.all_tokens(), self._old.all_tokens())

    def batches(self, batches: Sequence[Sequence[int]]) -> Iterator[list[Sample]]:
        """As FeatureSource.batches; each source reads its own part of every batch ahead."""
        first_old = len(self._new)
        new = self._new.batches([[at for at in one if at < first_old] for one in batches])
        old = self._old.batches(
            [[at - first_old for at in one if at >= first_old] for one in batches]
        )
        for numbers, of_new, of_old in zip(batches, new, old, strict=True):
            next_new, next_old = iter(of_new), iter(of_old)
            yield [next(next_new if number < first_old else next_old) for number in numbers]


def check_alike(new: FeatureMeta, old: FeatureMeta) -> None:
    """Raise MismatchError unless both are features of one target's same layers."""
    if (new.lm_head_sha256, new.hidden_size, new.vocab_size) != (
        old.lm_head_sha256,
        old.hidden_size,
        old.vocab_size,
    ):
        raise MismatchError(
            "the old features are of another target", "capture the old mix from this target"
        )
    if new.taps != old.taps:
        raise MismatchError(
            f"the old features are of the layers {old.taps}, the new ones of {new.taps}",
            "capture both at the same layers",
        )


def survey(
    source: FeatureSource, config: ObjectiveConfig, left_out: frozenset[int] = frozenset()
) -> tuple[Tensor, dict[int, int]]:
    """Read all tokens once: how often each is in an answer, and which samples can be trained on.

    left_out: numbers of samples that count as not there. Returns counts int64 [V] under the loss
    mask, and of the samples that have a judged position number -> answer tokens. Raises
    EmptyInputError if there is none.
    """
    counts_V = torch.zeros(source.meta.vocab_size, dtype=torch.int64)
    usable: dict[int, int] = {}
    for number, (token_ids, loss_mask) in enumerate(source.all_tokens()):
        if number in left_out:
            continue
        counts_V += torch.bincount(token_ids[loss_mask], minlength=len(counts_V))
        if judged_positions(loss_mask[None], config.loss_mask).any():
            usable[number] = int(loss_mask.sum())
    if not usable:
        raise EmptyInputError(
            "the features hold no answer of two tokens or more",
            "generate and capture answers with more prompts",
        )
    return counts_V, usable


def left_out_samples(num_samples: int, share: float, seed: int) -> frozenset[int]:
    """The samples that a run on `share` of them does not take.

    The order is the seed's alone, so what a smaller share takes, a larger one takes too.
    """
    order = random.Random(f"{seed}/share").sample(range(num_samples), num_samples)
    return frozenset(order[max(1, round(share * num_samples)) :])


def old_samples(old: Sequence[int], num_new: int, share: float, seed: str) -> list[int]:
    """The old samples of one epoch, drawn by seed: `share` of it beside num_new new samples.

    All of them if there are fewer than that.
    """
    count = round(num_new * share / (1.0 - share))
    return sorted(random.Random(f"{seed}/old").sample(list(old), min(count, len(old))))


def plan_steps(
    config: BatchConfig, epochs: Sequence[Sequence[int]], lengths: Sequence[int], seed: int
) -> list[list[list[int]]]:
    """The whole run: for each step, for each of its batches, the sample numbers.

    epochs: the sample numbers of each epoch. lengths: tokens of each sample. The last step may have
    fewer batches. Depends on the arguments only, not on how many ranks share a step.
    """
    planned = plan_packs if config.packed else plan_batches
    batches: list[list[int]] = []
    for epoch, numbers in enumerate(epochs):
        places = planned([lengths[number] for number in numbers], config.tokens, f"{seed}/{epoch}")
        batches += [[numbers[place] for place in batch] for batch in places]
    return [
        batches[first : first + config.per_step]
        for first in range(0, len(batches), config.per_step)
    ]


def read_batches(
    samples: Iterator[list[Sample]], count: int, config: BatchConfig, device: str
) -> list[Batch]:
    """Take `count` batches of samples from the iterator, as tensors on the device."""
    following = (next(samples) for _ in range(count))
    if config.packed:
        return [Batch.packed(one, config.tokens, device) for one in following]
    return [Batch.of(one, device) for one in following]
