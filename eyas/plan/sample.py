"""Speeds of the stages on this machine, from a few seconds of each stage's own work.

Knows the engine, the decoder and the trainer. Does not know what is made of the figures.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from eyas.artifact import Artifact, Manifest
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.features.decoder import FeatureDecoder
from eyas.features.generate import GenerateConfig
from eyas.hub import resolve_target
from eyas.model.vocab import TargetVocabulary
from eyas.plan.speeds import Speed
from eyas.shards import FeatureMeta, Sample
from eyas.shards.sample import DTYPES
from eyas.train.trainer import TrainConfig, train


class Enough(Exception):
    """Raised in the middle of a stage that is only timed."""


def generate_speed(
    config: GenerateConfig, folder: str, prompts: Sequence[list[int]], seconds: float
) -> Speed:
    """Tokens answered a second by the engine in this process, its batch full of these prompts again
    and again.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = Engine.load(
        folder,
        None,
        config.dtype,
        EngineConfig(max_batch=config.max_batch, max_length=config.max_length),
        device,
    )
    params = SamplingParams(max_tokens=config.max_tokens)
    running = asked = emitted = 0
    started = time.monotonic()
    while time.monotonic() - started < seconds or not emitted:
        while running < config.max_batch:
            engine.add(Request(str(asked), tuple(prompts[asked % len(prompts)]), params))
            running, asked = running + 1, asked + 1
        for update in engine.step():
            emitted += len(update.token_ids)
            running -= update.finish_reason is not None
    return Speed(emitted / (time.monotonic() - started), f"measured here for {seconds:g} s")


def capture_speed(
    decoder: FeatureDecoder, tokens: list[int], batch_tokens: int, seconds: float
) -> Speed:
    """Tokens of features a second, computed in batches of rows such as this one."""
    rows = [tokens] * max(1, batch_tokens // len(tokens))
    decoder.states(rows[:1])  # what is done once
    started, done = time.monotonic(), 0
    while time.monotonic() - started < seconds or not done:
        decoder.states(rows)
        done += len(rows) * len(tokens)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return Speed(done / (time.monotonic() - started), f"measured here for {seconds:g} s")


def train_speed(
    config: TrainConfig, target: str, meta: FeatureMeta, length: int, seconds: float
) -> Speed:
    """Tokens of samples a second of the trainer, on made-up samples of this length. meta: without
    the hash of lm_head.
    """
    vocabulary = TargetVocabulary.load(resolve_target(target))
    meta = meta.model_copy(update={"lm_head_sha256": vocabulary.lm_head_sha256})
    said = int(vocabulary.lm_head.sum(1).argmax())
    del vocabulary
    rows: list[float] = []

    def track(done: int, total: int | None = None, note: str = "") -> None:
        rows.append(time.monotonic())
        if rows[-1] - rows[0] > seconds and len(rows) > 1:
            raise Enough

    per_batch = max(1, config.batches.tokens // length)
    per_step = per_batch * config.batches.per_step
    steps = 200
    source = MadeUp(meta, said, length, per_step * steps)
    quick = config.model_copy(
        update={
            "epochs": 1,
            "start": None,
            "stop": config.stop.model_copy(update={"measurements": 0}),
            "checkpoint_every": steps + 1,
        }
    )
    with TemporaryDirectory() as folder, contextlib.suppress(Enough):
        train(quick, target, source, Artifact(folder), track)
    steps_done = len(rows) - 1  # the first does what is done once
    return Speed(
        steps_done * per_step * length / (rows[-1] - rows[0]), f"measured here for {seconds:g} s"
    )


class MadeUp:
    """A FeatureSource of samples that say one thing: features are ones, and every token is what the
    target says after them.

    So every position of the second half, which is the target's, is one to learn from.
    """

    def __init__(self, meta: FeatureMeta, said: int, length: int, count: int) -> None:
        self.meta, self._said, self._length, self._count = meta, said, length, count
        self.inputs: Mapping[str, Manifest] = {
            "features": Manifest(
                stage="capture", identity="made up", config={}, counts={}, files={}
            )
        }

    @property
    def lengths(self) -> list[int]:
        """T of each sample."""
        return [self._length] * self._count

    def __len__(self) -> int:
        return self._count

    def all_tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        """As FeatureSource.all_tokens."""
        return map(self._tokens, range(self._count))

    def batches(self, batches: Sequence[Sequence[int]]) -> Iterator[list[Sample]]:
        """As FeatureSource.batches."""
        return ([self._sample(number) for number in numbers] for numbers in batches)

    def _tokens(self, number: int) -> tuple[Tensor, Tensor]:
        ids = torch.full((self._length,), self._said, dtype=torch.int32)
        return ids, torch.arange(self._length) >= self._length // 2

    def _sample(self, number: int) -> Sample:
        H = self.meta.hidden_size
        hidden = torch.ones(self._length, 4 * H, dtype=DTYPES[self.meta.dtype])
        return Sample(str(number), *self._tokens(number), hidden[:, H:], hidden[:, :H])
