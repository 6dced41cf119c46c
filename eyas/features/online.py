"""Features straight from the target, in the process that learns from them: nothing is stored.

Knows which samples there are and asks for each as it is wanted. Does not know how they are computed
(capture, decoder), nor who wants them.

Samples have the numbers that they have in a store. With `batch_tokens` 1 each is computed alone, as
`capture` would: the values are the store's to the bit, so the source has the store's identity, and
what was learnt from either is the same work. With more, those of a batch are computed together,
which is faster on a GPU, and values may differ in their last bits: another identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from eyas.artifact import Artifact, Manifest, identity
from eyas.features.capture import CaptureConfig, Forwards, Setting
from eyas.features.decoder import Decoder
from eyas.features.planned import Plan, Work, packed
from eyas.model.vocab import TargetVocabulary
from eyas.shards import FeatureMeta, Sample, Split
from eyas.shards.sample import DTYPES, EXACT


class OnlineTarget:
    """A target at hand and the answers that it is to think about; it is loaded when the first
    features are wanted.
    """

    def __init__(self, config: CaptureConfig, answers: Artifact) -> None:
        """Raises MismatchError: another target wrote the answers, or the decoder asked for does not
        run this one.
        """
        self.setting = Setting.of(config, answers)
        self.forwards_alone = config.batch_tokens == 1

    def features(self, split: Split) -> OnlineFeatures:
        """The samples of a split."""
        return OnlineFeatures(self, split)

    @cached_property
    def plan(self) -> Plan:
        """What becomes of the answers. Raises EmptyInputError."""
        return self.setting.plan()

    @cached_property
    def decoder(self) -> Decoder:
        """The target, loaded."""
        return self.setting.decoder()

    @cached_property
    def forwards(self) -> Forwards:
        """What computes samples."""
        return Forwards(self.decoder)

    @cached_property
    def meta(self) -> FeatureMeta:
        """As the store's, where what is kept is exact."""
        lm_head_sha256 = TargetVocabulary.load(self.setting.folder).lm_head_sha256
        exact = {"codec": "raw", "teacher": "everywhere", "lm_head_sha256": lm_head_sha256}
        return self.setting.meta.model_copy(update=exact)

    @cached_property
    def manifest(self) -> Manifest:
        """What a store of these features would say of itself, or says where the values are the
        same.
        """
        config, settings = self.setting.config, self.setting.settings
        if not self.forwards_alone or config.codec not in EXACT or config.teacher != "everywhere":
            settings = {**settings, "codec": "raw", "teacher": "everywhere", "online": True}
        inputs = {"answers": self.setting.made}
        return Manifest(
            stage="capture",
            identity=identity("capture", settings, inputs),
            config=settings,
            counts=self.setting.counts(self.plan),
            files={},
            inputs=inputs,
            facts={
                "target": config.target,
                "features": self.meta.model_dump(mode="json"),
                "online": True,
            },
        )


class OnlineFeatures:
    """A FeatureSource: the samples of one split, computed as they are asked for."""

    def __init__(self, target: OnlineTarget, split: Split) -> None:
        self._target, self._split = target, split

    @property
    def meta(self) -> FeatureMeta:
        """What the features are features of."""
        return self._target.meta

    @property
    def inputs(self) -> Mapping[str, Manifest]:
        """As FeatureSource.inputs."""
        return {"features": self._target.manifest}

    @cached_property
    def _works(self) -> list[Work]:
        """One for each sample, in the order of a store."""
        works = self._target.setting.works(self._target.plan, self._split, self._target.decoder)
        return [Work([one], work.num_shared) for work in works for one in work.samples]

    @property
    def lengths(self) -> list[int]:
        """T of each sample, without computing one."""
        return [len(work.samples[0]) for work in self._works]

    def __len__(self) -> int:
        return len(self._target.setting.of_split(self._target.plan, self._split))

    def all_tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        """As FeatureSource.all_tokens."""
        samples = (work.samples[0] for work in self._works)
        return (
            (torch.from_numpy(one.token_ids), torch.from_numpy(one.loss_mask)) for one in samples
        )

    def batches(self, batches: Sequence[Sequence[int]]) -> Iterator[list[Sample]]:
        """As FeatureSource.batches; nothing is computed ahead."""
        return (self._computed([self._works[number] for number in numbers]) for numbers in batches)

    def _computed(self, works: list[Work]) -> list[Sample]:
        """The samples of these works, in their order and in the dtype that a store would give them."""
        dtype = DTYPES[self.meta.dtype]
        made = {
            sample.key: sample
            for work in self._together(works)
            for sample in self._target.forwards(work)
        }
        samples = [made[work.samples[0].key] for work in works]
        return [
            Sample(
                one.key,
                one.token_ids,
                one.loss_mask,
                # copies: what inference mode made cannot be learnt from
                one.aux_hidden.to(dtype, copy=True),
                one.last_hidden.to(dtype, copy=True),
                one.source,
            )
            for one in samples
        ]

    def _together(self, works: list[Work]) -> Iterator[Work]:
        """The same samples in as few forwards as the settings allow: those of one beginning and of
        similar lengths.
        """
        by_beginning: dict[bytes, list[Work]] = {}
        for work in works:
            by_beginning.setdefault(work.beginning.tobytes(), []).append(work)
        for alike in by_beginning.values():
            num_shared = alike[0].num_shared
            samples = [work.samples[0] for work in alike]
            yield from (
                Work(batch, num_shared)
                for batch in packed(samples, self._target.setting.config.batch_tokens, num_shared)
            )
