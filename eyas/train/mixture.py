"""Two sources as one: the features that a head is tuned on, and a share of those that it came from.

Knows no head and no loss.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from torch import Tensor

from eyas.artifact import Manifest
from eyas.errors import MismatchError
from eyas.shards import FeatureMeta, Sample
from eyas.shards.source import FeatureSource


class Mixture:
    """A FeatureSource of the samples of `new`, and after them those of `old`."""

    def __init__(self, new: FeatureSource, old: FeatureSource) -> None:
        """Raises MismatchError for features of two targets or of other layers."""
        check_alike(new.meta, old.meta)
        self._new, self._old = new, old

    @property
    def meta(self) -> FeatureMeta:
        """Of the new ones: target and layers are the old ones' too."""
        return self._new.meta

    @property
    def inputs(self) -> Mapping[str, Manifest]:
        """Those of both, the old ones' as "old_..."."""
        return {
            **self._new.inputs,
            **{f"old_{name}": made for name, made in self._old.inputs.items()},
        }

    @property
    def lengths(self) -> list[int]:
        """T of each sample."""
        return [*self._new.lengths, *self._old.lengths]

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def all_tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        """As FeatureSource.all_tokens."""
        return chain(self._new.all_tokens(), self._old.all_tokens())

    def batches(self, batches: Sequence[Sequence[int]]) -> Iterator[list[Sample]]:
        """As FeatureSource.batches; each source reads its own part of every batch ahead."""
        first_old = len(self._new)
        new = self._new.batches(
            [[number for number in numbers if number < first_old] for numbers in batches]
        )
        old = self._old.batches(
            [
                [number - first_old for number in numbers if number >= first_old]
                for numbers in batches
            ]
        )
        for numbers, of_new, of_old in zip(batches, new, old, strict=True):
            take_new, take_old = iter(of_new), iter(of_old)
            yield [next(take_new if number < first_old else take_old) for number in numbers]


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


def drawn(old: Sequence[int], num_new: int, share: float, seed: str) -> list[int]:
    """Which of the old samples join num_new new ones in one epoch, so that they are `share` of all,
    or as many as there are.
    """
    wanted = round(num_new * share / (1.0 - share))
    return sorted(random.Random(f"{seed}/old").sample(list(old), min(wanted, len(old))))
