"""Tokens and bytes of a run, counted before it: prompts by the target's template, answers at a
stated length; without one these are upper bounds (max_tokens, no row dropped).
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

from eyas.artifact import Artifact
from eyas.chat import Chat
from eyas.data.ledger import SourceRow
from eyas.data.prompts import PromptsConfig
from eyas.data.sources import read_source
from eyas.errors import EmptyInputError, StorageFullError, TemplateError
from eyas.features.capture import CaptureConfig, held_out_meta
from eyas.features.generate import GenerateConfig, count_prompts
from eyas.hub import resolve_target
from eyas.log import size_text
from eyas.model.checkpoint import expected_shapes
from eyas.model.config import HeadConfig, HeadOptions, TargetShape
from eyas.operators.shape import target_shape
from eyas.records import Message, Prompt
from eyas.shards import CODECS, CodecName, FeatureMeta
from eyas.train.trainer import HEAD_BYTES_PER_PARAMETER, TrainConfig

SAMPLE_SIZE = 1000  # prompts, evenly spaced
STAND_IN = "Yes."  # for an answer; answers' tokens are counted apart
# an answer's row holds its text and all earlier turns as JSON, twice (journal and part)
ROW_BYTES_PER_TOKEN = 8
FILLER = (
    "I would like to know how a young hawk is raised, and what it takes to let it hunt by itself "
    "one day. "
)


@dataclasses.dataclass(frozen=True)
class Needs:
    """Totals of a run. prompt_tokens: summed over answers. feature_tokens: computed by `capture`,
    where a conversation is one sample if the template keeps earlier turns. sampled: counted
    prompts.
    """

    prompts: int
    answers: int
    prompt_tokens: int
    answer_tokens: int
    feature_tokens: int
    sampled: int


@dataclasses.dataclass(frozen=True)
class Room:
    """Bytes by stage. free: None for an object store. present: already written."""

    answers: int
    features: int
    head: int
    free: int | None
    present: int = 0

    @property
    def missing(self) -> int:
        return max(0, self.answers + self.features + self.head - self.present)

    @property
    def fits(self) -> bool:
        return self.free is None or self.missing <= self.free


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """The settings that decide on sizes. begun: folders of its stages."""

    target: str
    output: str
    generate: GenerateConfig
    capture: CaptureConfig
    train: TrainConfig
    online: bool = False
    begun: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """bytes_by_codec: of all features; codec: the run's own."""

    needs: Needs
    room: Room
    bytes_by_codec: dict[str, int]
    codec: str

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "fits": self.room.fits}


def plan_run(
    run: PlannedRun, num_prompts: int, sample: Sequence[Prompt], answer_tokens: int | None = None
) -> Plan:
    """The plan for num_prompts prompts, from a sample. answer_tokens: the mean, if known.

    Raises EmptyInputError, MismatchError (too few layers), and what reading the target raises.
    """
    folder = resolve_target(run.target)
    shape = target_shape(folder)
    shape.refuse_few_layers()
    chat = Chat(folder, run.generate.date)
    needs = count_needs(sample, num_prompts, chat, run.generate, answer_tokens)
    meta = run.capture.meta_of(shape)
    sizes = feature_bytes(needs, meta, run.capture.held_out_share)
    features = sizes[meta.codec]
    if run.online:  # only held-out features are stored
        held_out = held_out_meta(meta).bytes_per_token
        features = round(needs.feature_tokens * run.capture.held_out_share * held_out)
    room = Room(
        answers=(needs.prompt_tokens + needs.answer_tokens) * ROW_BYTES_PER_TOKEN,
        features=features,
        head=head_parameters(shape, run.train.head) * HEAD_BYTES_PER_PARAMETER,
        free=Artifact(run.output).room(),
        present=sum(one.size(name) for one in map(Artifact, run.begun) for name in one.all_names()),
    )
    return Plan(needs, room, {str(codec): size for codec, size in sizes.items()}, meta.codec)


def refuse_without_room(room: Room, output: str) -> None:
    """Raises StorageFullError."""
    if room.fits:
        return
    assert room.free is not None
    raise StorageFullError(
        f"the run needs up to {size_text(room.missing)} more at {output} (answers "
        f"{size_text(room.answers)}, features {size_text(room.features)}, head "
        f"{size_text(room.head)}), {size_text(room.free)} are free",
        "free some space, choose another output or a smaller capture.codec, take fewer prompts, a "
        "smaller max_tokens or online: true; or, where answers are sure to be shorter than "
        "max_tokens, eyas run --anyway",
    )


def filler_prompts(count: int, characters: int) -> list[Prompt]:
    """A prompt of English filler that stands for `count` prompts of one turn."""
    text = (FILLER * (characters // len(FILLER) + 1))[:characters]
    return [Prompt("", "", "", (text,))] if count else []


def read_prompts(artifact: Artifact) -> tuple[int, list[Prompt]]:
    """The number of prompts in a finished artifact, and a sample. Raises EmptyInputError,
    MissingInputError.
    """
    artifact.manifest("prompts")
    count = count_prompts(artifact)
    rows = islice(artifact.read_rows("prompts"), 0, None, -(-count // SAMPLE_SIZE))
    return count, [Prompt.from_json(row) for row in rows]


def source_prompts(config: PromptsConfig) -> tuple[int, list[Prompt]]:
    """The number of prompts in the sources, nothing dropped, and a sample."""
    draw, count, sample = random.Random(config.seed), 0, list[Prompt]()
    of_sources = (
        islice((row for row in read_source(one) if isinstance(row, SourceRow)), one.max_prompts)
        for one in config.sources
    )
    for row in islice(chain.from_iterable(of_sources), config.max_prompts):
        count += 1
        place = len(sample) if count <= SAMPLE_SIZE else draw.randrange(count)
        if place < SAMPLE_SIZE:
            sample[place : place + 1] = [Prompt("", "", "", row.turns, row.system)]
    wanted = config.match.num_prompts if config.match else None
    return min(count, wanted or count), sample


def count_needs(
    prompts: Sequence[Prompt],
    num_prompts: int,
    chat: Chat,
    config: GenerateConfig,
    answer_tokens: int | None = None,
) -> Needs:
    """Needs of num_prompts prompts, from a sample. Raises EmptyInputError if the template takes
    none.
    """
    length = min(answer_tokens or config.max_tokens, config.max_tokens)
    merged = keeps_earlier_turns(chat)
    turns = [turn_lengths(prompt, chat, length, config.max_length) for prompt in prompts]
    counted = [one for one in turns if one is not None]
    if not counted:
        raise EmptyInputError(
            "the target's template takes none of the prompts",
            "see what `eyas generate` drops of some of them, and why",
        )
    scale = num_prompts / len(prompts) * config.answers_per_prompt
    features = [[one[-1]] if merged and one else one for one in counted]
    total_before, num_answers = sum(map(sum, counted)), sum(map(len, counted))
    samples = sum(map(len, features))
    return Needs(
        prompts=num_prompts,
        answers=round(num_answers * scale),
        prompt_tokens=round(total_before * scale),
        answer_tokens=round(num_answers * scale) * length,
        feature_tokens=round((sum(map(sum, features)) + samples * length) * scale),
        sampled=len(prompts),
    )


def turn_lengths(
    prompt: Prompt, chat: Chat, answer_tokens: int, max_length: int
) -> list[int] | None:
    """Tokens before each answer, earlier answers included; None if the template refuses the prompt.
    As in `generate`, turns without room for an answer are left out.
    """
    messages: list[Message] = (
        [{"role": "system", "content": prompt.system}] if prompt.system is not None else []
    )
    lengths = []
    for number, turn in enumerate(prompt.turns):
        messages.append({"role": "user", "content": turn})
        try:
            length = len(chat.prompt_ids(messages)) + number * answer_tokens
        except TemplateError:
            return None
        if length >= max_length:
            break
        lengths.append(length)
        messages.append({"role": "assistant", "content": STAND_IN})
    return lengths


def keeps_earlier_turns(chat: Chat) -> bool:
    """Whether the next turn begins with this one's tokens: `capture` merges them."""
    messages: list[Message] = [
        {"role": "user", "content": FILLER},
        {"role": "assistant", "content": STAND_IN},
    ]
    try:
        prompt_ids, answer_ids = chat.answered(messages)
        first = prompt_ids + answer_ids
        second = chat.prompt_ids([*messages, {"role": "user", "content": FILLER}])
    except TemplateError:
        return False
    return second[: len(first)] == first


def feature_bytes(needs: Needs, meta: FeatureMeta, held_out_share: float) -> dict[CodecName, int]:
    """By the codec of the training part; the held-out part is lossless."""
    sizes = dict[CodecName, int]()
    for name in CODECS:
        trained = meta.model_copy(update={"codec": name})
        held_out = held_out_meta(trained).bytes_per_token
        per_token = (1 - held_out_share) * trained.bytes_per_token + held_out_share * held_out
        sizes[name] = round(needs.feature_tokens * per_token)
    return sizes


def head_parameters(shape: TargetShape, options: HeadOptions) -> int:
    """Raises ConfigError."""
    config = HeadConfig.for_target(shape, options)
    shapes = expected_shapes(config).items()
    return sum(math.prod(size) for name, size in shapes if name not in ("d2t", "t2d"))
