"""Stage `capture`: finished conversations become feature samples: tokens, loss mask, three taps,
last hidden state.

Knows the stage: in which split a sample goes, what is done already, whether there is room. Does not
know which answers become samples (planned), what computes features (decoder, hooks), nor how
samples lie on disk (shards).
"""

from __future__ import annotations

import datetime
import hashlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field

from eyas.artifact import Artifact, Manifest, identity
from eyas.chat import Chat
from eyas.errors import EmptyInputError, MismatchError, StorageFullError
from eyas.features.decoder import Beginning, Decoder, OwnDecoder, Streams
from eyas.features.hooks import HookedDecoder
from eyas.features.planned import Plan, Planned, Work, batches, plan_samples
from eyas.hub import resolve_target
from eyas.log import Track, quiet
from eyas.model.config import TargetConfig, TargetShape
from eyas.model.vocab import target_shape
from eyas.model.weights import fingerprint
from eyas.records import read_answers
from eyas.shards import CodecName, FeatureMeta, Sample, ShardWriter, Split
from eyas.shards.sample import EXACT

Dtype = Literal["float32", "bfloat16", "float16"]
# where it takes place; nothing of it is part of the work's identity
PLACES = {"target", "device_map"}


class CaptureConfig(BaseModel):
    """Settings of the stage.

    `decoder` computes: our own, or transformers', which knows many more models; "auto" is our own
    where it knows the target. `dtype` is what it computes in; "auto" is float32 for our own and the
    checkpoint's for transformers'. `device_map` spreads a large target over devices ("auto": see
    accelerate; transformers' decoder only). `store_dtype` is what is kept, `codec` and `teacher`
    how (see shards.FeatureMeta); samples held out are kept exactly, since a server has no rounded
    features. `batch_tokens` counts the padding of a forward; with 1 every sample is computed alone,
    so that its values, to the last bit, depend on nothing beside it. `splits`: which of them are
    kept.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    decoder: Literal["auto", "own", "transformers"] = "auto"
    dtype: Literal["auto", Dtype] = "auto"
    device_map: str | None = None
    batch_tokens: int = Field(default=4096, ge=1)
    share_beginnings: bool = True
    store_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    codec: CodecName = "within4"
    teacher: Literal["everywhere", "supervised"] = "everywhere"
    samples_per_shard: int = Field(default=50, ge=1)
    held_out_share: float = Field(default=0.05, ge=0, lt=1)
    splits: tuple[Split, ...] = Field(default=("train", "held_out"), min_length=1)


@dataclass(frozen=True)
class Setting:
    """What is captured from what: the answers, the target in its folder, and the settings that
    decide on values.

    settings: the config as it enters an identity, with what "auto" stands for.
    """

    config: CaptureConfig
    folder: str
    shape: TargetShape
    answers: Artifact
    made: Manifest
    settings: dict[str, Any]

    @classmethod
    def of(cls, config: CaptureConfig, answers: Artifact) -> Setting:
        """Raises MismatchError (another target wrote the answers, or one that the decoder asked for
        does not run).
        """
        made, folder = answers.manifest("generate"), resolve_target(config.target)
        target_fingerprint = fingerprint(folder)
        if made.config["target_fingerprint"] != target_fingerprint:
            raise MismatchError(
                f"the answers in {answers.url} were written by another target than {config.target}",
                f"give the same target ({made.facts['target']}), or run `eyas generate` with this "
                "one",
            )
        shape = (
            TargetConfig.from_folder(folder) if config.decoder == "own" else target_shape(folder)
        )
        decoder = resolved_decoder(config, shape)
        settings = {
            **config.model_dump(mode="json", exclude=PLACES),
            "decoder": decoder,
            "dtype": resolved_dtype(config, shape, decoder),
            "target_fingerprint": target_fingerprint,
        }
        return cls(config, folder, shape, answers, made, settings)

    @property
    def meta(self) -> FeatureMeta:
        """Of the features, but for the hash of lm_head, which is known when the target is loaded."""
        return meta_of(self.config, self.shape)

    def plan(self) -> Plan:
        """What becomes of the answers. Raises EmptyInputError when none can be used."""
        chat = Chat(self.folder, datetime.date.fromisoformat(self.made.config["date"]))
        plan = plan_samples(read_answers(self.answers), chat, self.shape.max_position_embeddings)
        if not plan.samples:
            reasons = ", ".join(f"{reason} {count}" for reason, count in plan.reasons.items())
            raise EmptyInputError(
                f"none of the {plan.num_answers} answers can be used ({reasons})",
                "a larger max_tokens in `generate` lets more answers end by themselves",
            )
        return plan

    def decoder(self) -> Decoder:
        """Load the target. Raises what loading raises."""
        if self.settings["decoder"] == "own":
            return OwnDecoder.load(self.folder, self.settings["dtype"])
        return HookedDecoder.load(self.folder, self.settings["dtype"], self.config.device_map)

    def of_split(self, plan: Plan, split: Split) -> list[Planned]:
        """The plan's samples of a split."""
        return [
            one
            for one in plan.samples
            if split_of(one.prompt_id, self.config.held_out_share) == split
        ]

    def works(self, plan: Plan, split: Split, decoder: Decoder) -> list[Work]:
        """The samples of a split forward by forward: what the other split holds changes no value of
        this one.
        """
        shares = self.config.share_beginnings and decoder.reuses
        return list(batches(self.of_split(plan, split), self.config.batch_tokens, shares=shares))

    def counts(self, plan: Plan) -> dict[str, int]:
        """What a manifest counts: all answers, and the samples and tokens of the splits that are
        kept.
        """
        dropped = {f"dropped_{reason}": count for reason, count in plan.reasons.items()}
        kept = {
            split: self.of_split(plan, split) if split in self.config.splits else []
            for split in get_args(Split)
        }
        sizes = {split: len(samples) for split, samples in kept.items()}
        tokens = sum(len(one) for samples in kept.values() for one in samples)
        return {
            "answers": plan.num_answers,
            "merged": plan.num_merged,
            **dropped,
            **sizes,
            "tokens": tokens,
        }


def meta_of(config: CaptureConfig, shape: TargetShape) -> FeatureMeta:
    """What features of this target are of, but for the hash of its lm_head. Raises MismatchError
    for too few layers.
    """
    return FeatureMeta(
        taps=shape.default_taps,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        lm_head_sha256="",
        dtype=config.store_dtype,
        codec=config.codec,
        teacher=config.teacher,
    )


def meta_of_split(meta: FeatureMeta, split: Split) -> FeatureMeta:
    """How a split is kept: what is held out is kept exactly, so that a head is judged by the
    features that a server has.
    """
    if split == "held_out" and meta.codec not in EXACT:
        return meta.model_copy(update={"codec": "lossless"})
    return meta


def resolved_decoder(config: CaptureConfig, shape: TargetShape) -> str:
    """What "auto" stands for: transformers' where our own does not know the target, or where the
    target is to be spread.
    """
    if config.decoder != "auto":
        return config.decoder
    return (
        "own" if isinstance(shape, TargetConfig) and config.device_map is None else "transformers"
    )


def resolved_dtype(config: CaptureConfig, shape: TargetShape, decoder: str) -> str:
    """What "auto" stands for."""
    if config.dtype != "auto":
        return config.dtype
    return (
        shape.dtype if decoder == "transformers" and shape.dtype in get_args(Dtype) else "float32"
    )


def split_of(prompt_id: str, held_out_share: float) -> Split:
    """The split of all samples of a prompt: a hash of its id alone, so it stays the same when other
    prompts come or go.
    """
    number = int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:8], "big")
    return "held_out" if number < held_out_share * 2**64 else "train"


class Forwards:
    """Computes works one after the other, in the decoder's dtype; a beginning that several share is
    computed once in a row.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._begun: tuple[bytes, Beginning] | None = None

    def __call__(self, work: Work) -> Iterator[Sample]:
        """The samples of one work."""
        after = self._beginning(work)
        streams = self._decoder.streams(
            [one.token_ids[work.num_shared :].tolist() for one in work.samples], after
        )
        for row, one in enumerate(work.samples):
            end = len(one) - work.num_shared
            own = Streams(streams.aux_hidden[row, :end], streams.last_hidden[row, :end])
            whole = own if after is None else _joined(after.streams, own)
            ids, mask = torch.from_numpy(one.token_ids), torch.from_numpy(one.loss_mask)
            yield Sample(one.key, ids, mask, whole.aux_hidden, whole.last_hidden, one.source)

    def _beginning(self, work: Work) -> Beginning | None:
        if not work.num_shared:
            return None
        name = work.beginning.tobytes()
        if self._begun is None or self._begun[0] != name:
            self._begun = name, self._decoder.begin(work.beginning.tolist())
        return self._begun[1]


def _joined(first: Streams, second: Streams) -> Streams:
    return Streams(
        torch.cat([first.aux_hidden, second.aux_hidden]),
        torch.cat([first.last_hidden, second.last_hidden]),
    )


def capture(
    config: CaptureConfig, answers: Artifact, output: Artifact, track: Track = quiet
) -> Manifest:
    """Capture all finished answers into `output`; resumes.

    Raises MismatchError (another target wrote the answers), EmptyInputError, StorageFullError, and
    what loading raises.
    """
    setting = Setting.of(config, answers)
    inputs = {"answers": setting.made}
    if not output.begin(identity("capture", setting.settings, inputs)):
        return output.manifest()
    plan = setting.plan()
    output.write_jsonl("dropped.jsonl", plan.dropped)
    decoder = setting.decoder()
    meta = setting.meta.model_copy(update={"lm_head_sha256": decoder.lm_head_sha256})
    metas = {split: meta_of_split(meta, split) for split in get_args(Split)}
    writers = {
        split: ShardWriter(output, split, metas[split], config.samples_per_shard) for split in metas
    }
    works = [
        (writers[split], work)
        for split in config.splits
        for work in setting.works(plan, split, decoder)
    ]
    missing = (
        (writer, len(one))
        for writer, work in works
        for one in work.samples
        if one.key not in writer.keys
    )
    check_room(output, sum(length * writer.meta.bytes_per_token for writer, length in missing))
    _capture_missing(Forwards(decoder), works, track)
    for writer in writers.values():
        writer.close()
    facts = {
        "target": config.target,
        "features": meta.model_dump(mode="json"),
        "num_retokenised": plan.num_retokenised,
    }
    return output.finish("capture", setting.settings, inputs, setting.counts(plan), facts)


def check_room(output: Artifact, num_bytes: int) -> None:
    """Refuse work that the disk cannot hold before it begins. Object stores have no end that can be
    asked for.
    """
    free = room_at(output)
    if free is not None and num_bytes > free:
        raise StorageFullError(
            f"the features need {num_bytes / 1e9:,.2f} GB at {output.url}, {free / 1e9:,.2f} GB "
            "are free",
            "free some space, choose another folder, an object store or a smaller codec, or "
            "capture fewer answers",
        )


def room_at(output: Artifact) -> int | None:
    """Bytes free where an artifact is to be, whether its folder is there yet or not; None for an
    object store.
    """
    folder = output.local_path("")
    if folder is None:
        return None
    place = Path(folder).resolve()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _capture_missing(
    forwards: Forwards, works: list[tuple[ShardWriter, Work]], track: Track
) -> None:
    """All samples that no whole shard holds yet. A work is computed as a whole or not at all, so
    that its values, down to the last bit, do not depend on where an earlier run was cut."""
    done, total, started, num_tokens = (
        0,
        sum(len(work.samples) for _, work in works),
        time.monotonic(),
        0,
    )
    for writer, work in works:
        missing = {one.key for one in work.samples} - writer.keys
        if missing:
            num_tokens += sum(map(len, work.samples))
            for sample in forwards(work):
                if sample.key in missing:
                    writer.add(sample)
        done += len(work.samples)
        track(done, total, f"{num_tokens / (time.monotonic() - started):.0f} tokens/s")
