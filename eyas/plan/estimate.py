"""The plan of a run: tokens, bytes by codec, room, hours by stage and what a store costs.

Knows a run's settings. Does not know how a plan is shown.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.artifact import Artifact
from eyas.chat import Chat
from eyas.errors import EmptyInputError, StorageFullError
from eyas.features.capture import CaptureConfig, load_decoder
from eyas.features.generate import GenerateConfig
from eyas.hub import resolve_target
from eyas.model.config import TargetConfig, TargetShape
from eyas.model.vocab import target_shape
from eyas.model.weights import read_shapes
from eyas.plan.needs import Needs, Room, count_needs, feature_bytes, head_parameters, room_for
from eyas.plan.speeds import (
    Speeds,
    capture_speed,
    devices_needed,
    generate_speed,
    hours,
    published,
    train_speed,
)
from eyas.records import Prompt
from eyas.shards import FeatureMeta
from eyas.train.trainer import TrainConfig

SECONDS = 5.0  # of a stage's work, to measure its speed
SMALL = 500_000_000  # parameters


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """The settings of a run file that decide on sizes and speeds. output: where the run writes."""

    target: str
    output: str
    generate: GenerateConfig
    capture: CaptureConfig
    train: TrainConfig
    online: bool = False


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A run's plan. hours: of the stages whose speed is known."""

    needs: Needs
    bytes_by_codec: dict[str, int]
    codec: str
    room: Room
    speeds: Speeds
    hours: dict[str, float]
    head_parameters: int
    target_parameters: int
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        row = dataclasses.asdict(self)
        row["room"]["fits"] = self.room.fits
        return row


class Planner:
    """A run's settings with what its target's files say, read once."""

    def __init__(self, run: PlannedRun) -> None:
        """Raises what reading the target raises."""
        self.run, self.folder = run, resolve_target(run.target)
        self.shape: TargetShape = target_shape(self.folder)
        self.chat = Chat(self.folder, run.generate.date)
        self.meta: FeatureMeta = run.capture.meta_of(self.shape)
        self.head_parameters = head_parameters(self.shape, run.train.head)

    def needs(
        self, num_prompts: int, sample: Sequence[Prompt], answer_tokens: int | None = None
    ) -> Needs:
        """Tokens of num_prompts prompts, from a sample of them. Raises EmptyInputError."""
        return count_needs(sample, num_prompts, self.chat, self.run.generate, answer_tokens)

    def room(self, needs: Needs) -> Room:
        """Bytes that the run writes, and those that are free there."""
        run = self.run
        return room_for(
            needs, self.meta, run.capture, self.head_parameters, Artifact(run.output), run.online
        )

    def estimate(self, needs: Needs, speeds: Speeds, notes: Sequence[str] = ()) -> Estimate:
        """The plan, with hours of the stages in `speeds`."""
        passes = self.run.train.epochs * self.run.train.data_share
        by_stage = {str(stage): time for stage, time in hours(needs, speeds, passes).items()}
        if self.run.online and "capture" in by_stage:
            by_stage["capture"] *= passes  # every epoch computes the features again
        sizes = feature_bytes(needs, self.meta, self.run.capture.held_out_share)
        return Estimate(
            needs=needs,
            bytes_by_codec={str(codec): size for codec, size in sizes.items()},
            codec=self.meta.codec,
            room=self.room(needs),
            speeds=speeds,
            hours=by_stage,
            head_parameters=self.head_parameters,
            target_parameters=target_parameters(self.folder),
            notes=tuple(notes),
        )

    def measured(
        self, sample: Sequence[Prompt], needs: Needs, seconds: float = SECONDS
    ) -> tuple[Speeds, list[str]]:
        """Speeds of this machine, and notes on what was not measured. Raises EmptyInputError."""
        run, speeds, notes = self.run, Speeds(), []
        length = min(run.generate.max_length, max(2, needs.feature_tokens // max(1, needs.prompts)))
        prompts = [
            self.chat.prompt_ids([{"role": "user", "content": prompt.turns[0]}])
            for prompt in sample[:64]
        ]
        fitting = [ids for ids in prompts if len(ids) < run.generate.max_length]
        if not fitting:
            raise EmptyInputError(
                f"no prompt is shorter than generate.max_length ({run.generate.max_length} tokens)",
                "give shorter prompts, or a larger generate.max_length",
            )
        state_it = "(--speed generate=...)"
        if run.generate.servers:
            notes.append(f"generate: the servers' speed is not measured: state it {state_it}")
        elif not isinstance(self.shape, TargetConfig):
            notes.append(
                "generate: eyas' own engine does not run this target: state the servers' speed "
                + state_it
            )
        else:
            speeds["generate"] = generate_speed(run.generate, self.folder, fitting, seconds)
        loaded = load_decoder(run.capture, self.shape, self.folder)
        row = (fitting[0] * (length // len(fitting[0]) + 1))[:length]
        speeds["capture"] = capture_speed(loaded, row, run.capture.batch_tokens, seconds)
        del loaded
        speeds["train"] = train_speed(run.train, run.target, self.meta, length, seconds)
        return speeds, notes

    def published(self, device: str, count: int = 1) -> tuple[Speeds, list[str]]:
        """Estimates for named devices, and notes on them. Raises ConfigError."""
        parameters = target_parameters(self.folder)
        # of a token: forward and backward of the head at every TTT step, the target's lm_head once
        flops = 6.0 * self.head_parameters * self.run.train.objective.num_ttt_steps
        flops += 2.0 * self.shape.vocab_size * self.shape.hidden_size
        speeds = published(device, parameters, self.run.generate.max_batch, flops, count)
        least = devices_needed(device, parameters)
        notes = [f"the target in bfloat16 needs {least} of {device}"] if least > count else []
        if parameters < SMALL:
            notes.append(
                "of a target this small, launching work takes longer than the work: measure there "
                "(--measure)"
            )
        return speeds, notes


def target_parameters(folder: str | Path) -> int:
    """Parameters in the target's files, of a mixture of experts those of all experts."""
    return sum(map(math.prod, read_shapes(folder).values()))


def refuse_without_room(room: Room, output: str) -> None:
    """Raises StorageFullError when what is still to be written does not fit."""
    if room.fits:
        return
    assert room.free is not None
    raise StorageFullError(
        f"the run needs up to {room.missing / 1e9:,.2f} GB more at {output} (answers "
        f"{room.answers / 1e9:,.2f}, features {room.features / 1e9:,.2f}, head "
        f"{room.head / 1e9:,.2f}), {room.free / 1e9:,.2f} GB are free",
        "free some space, choose another output or a smaller capture.codec, take fewer prompts, a "
        "smaller max_tokens or online: true; or, where answers are sure to be shorter than "
        "max_tokens, eyas run --anyway",
    )
