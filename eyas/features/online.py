"""Features computed in the training process when they are read, without a store.

With `batch_tokens` 1 values and identity are those of a store, to the bit. Larger batches are
faster on a GPU and may differ in last bits: another identity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from itertools import chain
from threading import Lock

import torch
from torch import Tensor

from eyas.artifact import Artifact, Manifest, identity
from eyas.features.capture import CaptureConfig, CaptureTask, open_source
from eyas.features.forward import FeatureForward
from eyas.features.samples import forward_batches
from eyas.features.states import StateFleet
from eyas.operators.shape import StoredMatrices
from eyas.shards import CODECS, FeatureMeta, Sample, Split
from eyas.shards.sample import DTYPES

__all__ = ["CaptureConfig", "OnlineFeatures", "OnlineTarget"]


class OnlineTarget(CaptureTask):
    """What `capture` would store, shared by both splits; the target loads with the first read."""

    def __init__(self, config: CaptureConfig, answers: Artifact) -> None:
        super().__init__(config, answers)
        self.computing = Lock()  # training is fed by a thread while held-out samples are measured

    @cached_property
    def source(self) -> FeatureForward | StateFleet:
        return open_source(self)

    @cached_property
    def meta(self) -> FeatureMeta:
        meta = self.config.meta_of(self.shape, StoredMatrices.load(self.folder).lm_head_sha256)
        return meta.model_copy(update={"codec": "raw", "teacher": "everywhere"})

    @cached_property
    def manifest(self) -> Manifest:
        """A store's manifest; the same identity where the values are the same."""
        config, settings, inputs = self.config, self.settings, {"answers": self.made}
        is_whole = config.teacher == "everywhere"
        if not (self.batch_tokens == 1 and is_whole and CODECS[config.codec].error == 0):
            settings = {**settings, "codec": "raw", "teacher": "everywhere", "online": True}
        return Manifest(
            stage="capture",
            identity=identity("capture", settings, inputs),
            config=settings,
            counts=self.counts(),
            files={},
            inputs=inputs,
            facts={
                "target": config.target,
                "features": self.meta.model_dump(mode="json"),
                "online": True,
            },
        )

    def features(self, split: Split) -> OnlineFeatures:
        return OnlineFeatures(self, split)


class OnlineFeatures:
    """A FeatureSource that computes its samples."""

    def __init__(self, target: OnlineTarget, split: Split) -> None:
        self._target, self.meta = target, target.meta
        self.inputs = {"features": target.manifest}
        self._plans = list(chain.from_iterable(target.batches(split)))  # as in a store
        self.lengths = list(map(len, self._plans))

    def __len__(self) -> int:
        return len(self._plans)

    def all_tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        for one in self._plans:
            yield torch.from_numpy(one.token_ids), torch.from_numpy(one.loss_mask)

    def batches(self, batches: Sequence[Sequence[int]]) -> Generator[list[Sample]]:
        """Servers are asked for later batches ahead."""
        target, dtype = self._target, DTYPES[self.meta.dtype]
        most = target.batch_tokens
        asked = [[self._plans[number] for number in numbers] for numbers in batches]
        work = ((None, plans) for batch in asked for plans in forward_batches(batch, most))
        with closing(target.source.samples(work)) as computed:
            for batch in asked:
                made: dict[str, Sample] = {}
                with target.computing:
                    while len(made) < len(batch):
                        made |= {one.key: one for one in next(computed)}
                # copies: those of inference mode have no gradient
                yield [
                    dataclasses.replace(
                        one,
                        aux_hidden=one.aux_hidden.to(dtype, copy=True),
                        last_hidden=one.last_hidden.to(dtype, copy=True),
                    )
                    for one in (made[plan.key] for plan in batch)
                ]
