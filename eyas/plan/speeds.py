"""Speeds of a run's stages in tokens a second: stated, estimated from the published peaks of a GPU,
or measured on this machine by a few seconds of each stage's own work.

Letters: P parameters of the target, b requests at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from torch import Tensor

from eyas.artifact import Artifact, Manifest
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.errors import ConfigError
from eyas.features.decoder import FeatureDecoder
from eyas.features.generate import GenerateConfig
from eyas.hub import resolve_target
from eyas.model.target import default_device
from eyas.model.vocab import TargetVocabulary
from eyas.plan.needs import Needs
from eyas.shards import FeatureMeta, Sample
from eyas.shards.sample import DTYPES
from eyas.train.trainer import TrainConfig, train

Stage = Literal["generate", "capture", "train"]
STAGES: tuple[Stage, ...] = ("generate", "capture", "train")
# shares of the published peaks that are assumed; good kernels on large matrices reach more
COMPUTE_SHARE, BANDWIDTH_SHARE = 0.4, 0.6
BYTES_PER_PARAMETER = 2  # bfloat16


@dataclasses.dataclass(frozen=True)
class DevicePeaks:
    """Published peaks: dense bfloat16 arithmetic, memory bandwidth, memory."""

    teraflops: float
    terabytes_per_s: float
    gigabytes: int


# From the makers' data sheets, without sparsity.
DEVICES = {
    "a10g": DevicePeaks(70, 0.60, 24),
    "a100-40gb": DevicePeaks(312, 1.555, 40),
    "a100-80gb": DevicePeaks(312, 2.039, 80),
    "b200": DevicePeaks(2250, 8.0, 180),
    "h100-pcie": DevicePeaks(756, 2.0, 80),
    "h100-sxm": DevicePeaks(989, 3.35, 80),
    "h200": DevicePeaks(989, 4.8, 141),
    "l4": DevicePeaks(121, 0.30, 24),
    "l40s": DevicePeaks(362, 0.864, 48),
    "mi300x": DevicePeaks(1307, 5.3, 192),
    "rtx-4090": DevicePeaks(165, 1.008, 24),
}


@dataclasses.dataclass(frozen=True)
class Speed:
    """Tokens a second: of generate those of answers, of capture and train those of samples.

    how: where the figure is from, in words.
    """

    tokens_per_s: float
    how: str


Speeds = dict[Stage, Speed]


def stated(values: list[str]) -> Speeds:
    """Speeds from "stage=tokens a second". Raises ConfigError."""
    speeds: Speeds = {}
    for value in values:
        name, _, number = value.partition("=")
        stage = next((stage for stage in STAGES if stage == name.strip()), None)
        try:
            tokens = float(number)
        except ValueError:
            tokens = 0.0
        if stage is None or not 0 < tokens < float("inf"):
            hint = f"e.g. --speed capture=20000; stages: {', '.join(STAGES)}"
            raise ConfigError(f"--speed {value} is not STAGE=TOKENS_PER_SECOND", hint)
        speeds[stage] = Speed(tokens, "stated")
    return speeds


def published(name: str, parameters: int, batch: int, train_flops: float, count: int = 1) -> Speeds:
    """Estimates for `count` devices of a name in DEVICES. train_flops: of one token in training.

    A decoding step of b requests reads all weights once and computes 2 P for each request; the
    longer of both counts. Capture computes 2 P a token. Several devices share the work without
    loss. Raises ConfigError for an unknown name.
    """
    device = DEVICES.get(name.lower())
    if device is None:
        raise ConfigError(
            f"the published peaks of {name} are not known",
            f"known: {', '.join(DEVICES)}; or state --speed",
        )
    flops = COMPUTE_SHARE * device.teraflops * 1e12
    bandwidth = BANDWIDTH_SHARE * device.terabytes_per_s * 1e12
    step_s = max(parameters * BYTES_PER_PARAMETER / bandwidth, 2 * parameters * batch / flops)
    peaks = (
        f"{device.teraflops:g} TFLOP/s and {BANDWIDTH_SHARE:.0%} of {device.terabytes_per_s:g} TB/s"
    )
    how = f"estimated: {COMPUTE_SHARE:.0%} of {peaks}, {name.lower()}'s published peaks" + (
        f", times {count}" if count > 1 else ""
    )
    return {
        "generate": Speed(count * batch / step_s, how),
        "capture": Speed(count * flops / (2 * parameters), how),
        "train": Speed(count * flops / train_flops, how),
    }


def devices_needed(name: str, parameters: int) -> int:
    """Devices of a name that hold the target in bfloat16 in four fifths of their memory."""
    return max(
        1, -(-parameters * BYTES_PER_PARAMETER // round(0.8e9 * DEVICES[name.lower()].gigabytes))
    )


def hours(needs: Needs, speeds: Speeds, passes: float) -> dict[Stage, float]:
    """Hours of each stage whose speed is known. passes: of training over all features.

    A measured speed of `generate` includes prompts; an estimated one does not, and prompts are
    added at the speed of `capture`.
    """
    found: dict[Stage, float] = {}
    if "generate" in speeds:
        seconds = needs.answer_tokens / speeds["generate"].tokens_per_s
        if speeds["generate"].how.startswith("estimated"):
            seconds += needs.prompt_tokens / speeds["capture"].tokens_per_s
        found["generate"] = seconds / 3600
    if "capture" in speeds:
        found["capture"] = needs.feature_tokens / speeds["capture"].tokens_per_s / 3600
    if "train" in speeds:
        found["train"] = passes * needs.feature_tokens / speeds["train"].tokens_per_s / 3600
    return found


# Measured here


class _TimeIsUp(Exception):
    """Ends a training run that is only timed."""


def generate_speed(
    config: GenerateConfig, folder: str, prompts: Sequence[list[int]], seconds: float
) -> Speed:
    """Answer tokens a second of the engine in this process, with a full batch of these prompts."""
    engine = Engine.load(
        folder,
        None,
        config.dtype,
        EngineConfig(max_batch=config.max_batch, max_length=config.max_length, speculation="off"),
        default_device(),
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
    """Tokens of features a second, in batches of rows like this one."""
    rows = [tokens] * max(1, batch_tokens // len(tokens))
    decoder.states(rows[:1])  # includes what is done once
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
    """Tokens of samples a second of the trainer, on synthetic samples of this length.

    meta: without the hash of lm_head.
    """
    vocabulary = TargetVocabulary.load(resolve_target(target))
    meta = meta.model_copy(update={"lm_head_sha256": vocabulary.lm_head_sha256})
    token = int(vocabulary.lm_head.sum(1).argmax())
    del vocabulary
    steps_at: list[float] = []

    def track(done: int, total: int | None = None, note: str = "") -> None:
        steps_at.append(time.monotonic())
        if steps_at[-1] - steps_at[0] > seconds and len(steps_at) > 1:
            raise _TimeIsUp

    per_batch = max(1, config.batches.tokens // length)
    per_step = per_batch * config.batches.per_step
    steps = 200
    source = SyntheticFeatures(meta, token, length, per_step * steps)
    timed = config.model_copy(
        update={
            "epochs": 1,
            "data_share": 1.0,
            "start": None,
            "stop": config.stop.model_copy(update={"measurements": 0}),
            "checkpoint_every": steps + 1,
        }
    )
    with TemporaryDirectory() as folder, contextlib.suppress(_TimeIsUp):
        train(timed, target, source, Artifact(folder), track)
    steps_done = len(steps_at) - 1  # the first includes what is done once
    return Speed(
        steps_done * per_step * length / (steps_at[-1] - steps_at[0]),
        f"measured here for {seconds:g} s",
    )


class SyntheticFeatures:
    """A FeatureSource whose features are ones and whose tokens are all what the target predicts
    from them, so every position of the second half, the answer, is trained on.
    """

    def __init__(self, meta: FeatureMeta, token: int, length: int, count: int) -> None:
        self.meta, self._token, self._length = meta, token, length
        made = Manifest(stage="capture", identity="synthetic", config={}, counts={}, files={})
        self.inputs: Mapping[str, Manifest] = {"features": made}
        self.lengths = [length] * count

    def __len__(self) -> int:
        return len(self.lengths)

    def all_tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self._tokens() for _ in self.lengths)

    def batches(self, batches: Sequence[Sequence[int]]) -> Iterator[list[Sample]]:
        return ([self._sample(number) for number in numbers] for numbers in batches)

    def _tokens(self) -> tuple[Tensor, Tensor]:
        ids = torch.full((self._length,), self._token, dtype=torch.int32)
        return ids, torch.arange(self._length) >= self._length // 2

    def _sample(self, number: int) -> Sample:
        H = self.meta.hidden_size
        hidden = torch.ones(self._length, 4 * H, dtype=DTYPES[self.meta.dtype])
        return Sample(str(number), *self._tokens(), hidden[:, H:], hidden[:, :H])
