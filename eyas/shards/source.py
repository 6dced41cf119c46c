"""Where features come from, to whoever learns from them: a store, or the target itself at work in
the same process.

Knows what is asked of either. Does not know which of them it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from eyas.artifact import Manifest
from eyas.shards.sample import FeatureMeta, Sample


class FeatureSource(Protocol):
    """The samples of one split, by number.

    inputs: what they were made from, for the identity of what is made from them: {"features": a
    manifest of stage `capture`}, with the url of the store, or without one where the features were
    never stored.
    """

    @property
    def meta(self) -> FeatureMeta:
        """What the features are features of."""

    @property
    def inputs(self) -> Mapping[str, Manifest]:
        """Manifests by role; equal ones mean equal features."""

    @property
    def lengths(self) -> list[int]:
        """T of each sample, without computing or reading one."""

    def __len__(self) -> int:
        """The number of samples."""

    def all_tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        """token_ids int32 [T] and loss_mask bool [T] of every sample in order: cheap, for counting."""

    def batches(self, batches: Sequence[Sequence[int]]) -> Iterator[list[Sample]]:
        """The samples of each list of numbers; to go on after n batches, give batches[n:]."""
