"""The plan of a run put together: tokens, bytes by codec, room, hours by stage and what a store
would cost.

Knows a run's settings and how the parts are asked. Does not know how a plan is shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.artifact import Artifact
from eyas.chat import Chat
from eyas.errors import StorageFullError
from eyas.features.capture import CaptureConfig, load_decoder
from eyas.features.generate import GenerateConfig
from eyas.hub import resolve_target
from eyas.model.config import TargetConfig, TargetShape
from eyas.model.vocab import target_shape
from eyas.model.weights import read_shapes
from eyas.plan import needs as counting
from eyas.plan.needs import Needs, Room
from eyas.plan.sample import capture_speed, generate_speed, train_speed
from eyas.plan.speeds import Speeds, devices_needed, hours, published, train_flops_per_token
from eyas.records import Prompt
from eyas.shards import FeatureMeta
from eyas.train.trainer import TrainConfig

SECONDS = 5.0  # of a stage's work, to measure its speed
SMALL = 500_000_000  # parameters


@dataclasses.dataclass(frozen=True)
class Work:
    """What of a run file decides on sizes and speeds. output: where the run writes."""

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

    def store_cost(self, price_per_gb_month: float) -> dict[str, float]:
        """What each codec's features cost in a store for a month, in the price's currency."""
        return {
            codec: size / 1e9 * price_per_gb_month for codec, size in self.bytes_by_codec.items()
        }

    def to_json(self, price_per_gb_month: float | None = None) -> dict[str, Any]:
        """Everything, as JSON has it."""
        row = dataclasses.asdict(self) | {
            "room": {**dataclasses.asdict(self.room), "fits": self.room.fits}
        }
        if price_per_gb_month is not None:
            row["cost_per_month"] = self.store_cost(price_per_gb_month)
        return row


class Planner:
    """One run file's target and settings, looked at once."""

    def __init__(self, work: Work) -> None:
        """Raises what reading the target raises."""
        self.work, self.folder = work, resolve_target(work.target)
        self.shape: TargetShape = target_shape(self.folder)
        self.chat = Chat(self.folder, work.generate.date)
        self.meta: FeatureMeta = work.capture.meta_of(self.shape)
        self.head_parameters = counting.head_parameters(self.shape, work.train.head)

    def needs(
        self, num_prompts: int, looked_at: Sequence[Prompt], answer_tokens: int | None = None
    ) -> Needs:
        """Tokens of so many prompts of which these are looked at. Raises EmptyInputError."""
        return counting.count(looked_at, num_prompts, self.chat, self.work.generate, answer_tokens)

    def room(self, needs: Needs) -> Room:
        """What the run writes, and what is free where it does."""
        work = self.work
        return counting.room_for(
            needs, self.meta, work.capture, self.head_parameters, Artifact(work.output), work.online
        )

    def estimate(self, needs: Needs, speeds: Speeds, notes: Sequence[str] = ()) -> Estimate:
        """All of it. speeds: those that are known."""
        sizes = {
            str(name): size
            for name, size in counting.feature_bytes(
                needs, self.meta, self.work.capture.held_out_share
            ).items()
        }
        passed = {
            str(stage): number
            for stage, number in hours(needs, speeds, self.work.train.epochs).items()
        }
        if self.work.online and "capture" in passed:
            passed["capture"] *= self.work.train.epochs  # computed again in each
        room, parameters = self.room(needs), target_parameters(self.folder)
        return Estimate(
            needs,
            sizes,
            self.meta.codec,
            room,
            speeds,
            passed,
            self.head_parameters,
            parameters,
            tuple(notes),
        )

    def measured(
        self, looked_at: Sequence[Prompt], needs: Needs, seconds: float = SECONDS
    ) -> tuple[Speeds, list[str]]:
        """Speeds of this machine, and what could not be measured, in words."""
        work, speeds, notes = self.work, Speeds(), []
        length = min(
            self.work.generate.max_length, max(2, needs.feature_tokens // max(1, needs.prompts))
        )
        prompts = [
            self.chat.prompt_ids([{"role": "user", "content": prompt.turns[0]}])
            for prompt in looked_at[:64]
        ]
        fitting = [ids for ids in prompts if len(ids) < work.generate.max_length]
        if work.generate.servers:
            notes.append(
                "generate: servers answer, whose speed is not this machine's: state it (--speed "
                "generate=...)"
            )
        elif not isinstance(self.shape, TargetConfig):
            notes.append(
                "generate: eyas' own engine does not run this target: state the servers' speed "
                "(--speed generate=...)"
            )
        else:
            speeds["generate"] = generate_speed(work.generate, self.folder, fitting, seconds)
        loaded = load_decoder(work.capture, self.shape, self.folder)
        row = (fitting[0] * (length // len(fitting[0]) + 1))[:length]
        speeds["capture"] = capture_speed(loaded, row, work.capture.batch_tokens, seconds)
        del loaded
        speeds["train"] = train_speed(work.train, work.target, self.meta, length, seconds)
        return speeds, notes

    def published(self, device: str, count: int = 1) -> tuple[Speeds, list[str]]:
        """Estimates for named devices, and what is to be known of them. Raises ConfigError."""
        parameters, matrix = (
            target_parameters(self.folder),
            self.shape.vocab_size * self.shape.hidden_size,
        )
        flops = train_flops_per_token(
            self.head_parameters, self.work.train.objective.num_ttt_steps, matrix
        )
        speeds = published(device, parameters, self.work.generate.max_batch, flops, count)
        least = devices_needed(device, parameters)
        notes = [f"the target in bfloat16 needs {least} of {device}"] if least > count else []
        if parameters < SMALL:
            notes.append(
                "of a target this small, launching work takes longer than the work: measure there "
                "(--measure)"
            )
        return speeds, notes


def target_parameters(folder: str | Path) -> int:
    """Numbers in the target's files; of a mixture of experts all are counted, though a token meets
    a few.
    """
    total = 0
    for size in read_shapes(folder).values():
        number = 1
        for one in size:
            number *= one
        total += number
    return total


def refuse_without_room(room: Room, output: str) -> None:
    """Raises StorageFullError when what is still to be written does not fit."""
    if room.fits:
        return
    assert room.free is not None
    raise StorageFullError(
        f"the run needs up to {room.missing / 1e9:,.2f} GB more at {output} (answers "
        f"{room.answers / 1e9:,.2f}, features "
        f"{room.features / 1e9:,.2f}, head {room.head / 1e9:,.2f}), {room.free / 1e9:,.2f} GB are "
        "free",
        "free some space, choose another output or a smaller capture.codec, take fewer prompts, a "
        "smaller max_tokens or "
        "online: true; or, where answers are sure to be shorter than max_tokens, eyas run --anyway",
    )
