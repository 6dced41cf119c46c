"""Stage `capture`: answers become feature samples: tokens, loss mask, three taps, last hidden
state. Tokens and masks come from the answers' records, without template and tokenizer.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import cached_property, partial
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field, model_validator

from eyas.artifact import Artifact, Manifest, identity
from eyas.cores import cores
from eyas.errors import (
    ConfigError,
    EmptyInputError,
    MismatchError,
    MissingInputError,
    StorageFullError,
)
from eyas.executor import Place, open_executor
from eyas.features.answers import hold_to
from eyas.features.fleet import FleetConfig
from eyas.features.forward import FeatureForward, ForwardTask, SampleSource, WorkerForward
from eyas.features.marks import Mark
from eyas.features.samples import CapturePlan, SamplePlan, forward_batches, plan_samples
from eyas.features.state_proof import prove_by
from eyas.features.states import StateFleet, start_command
from eyas.hub import PACKAGED, resolve_target
from eyas.log import Track, quiet, size_text
from eyas.model.architecture import TargetConfig
from eyas.model.config import TargetShape
from eyas.model.target import Dtype, resolve_dtype, stored_dtype
from eyas.model.weights import fingerprint
from eyas.operators.decoder import FeatureDecoder, HookedDecoder, OwnDecoder, default_device
from eyas.operators.shape import target_shape
from eyas.operators.vocab import TargetVocabulary
from eyas.records import RECORD, read_answers
from eyas.settings import Flag, Settings
from eyas.shards import (
    CodecName,
    EncodedSample,
    FeatureMeta,
    Sample,
    ShardWriter,
    Split,
    encoded,
)
from eyas.shards.sample import DTYPES

SAMPLES_PER_SHARD = 50
SPLITS: tuple[Split, ...] = get_args(Split)
# no part of the identity
PLACES = {"target", "device_map", "executor", "workers", "servers", "client"}
EVERY_HOST = (
    "each host loads the target by the name in the settings: give an id of the hub, a URL, or a "
    "folder that all hosts mount at one path"
)


class CaptureConfig(Settings):
    """`dtype`: "auto" is the checkpoint's for transformers and servers, else `resolve_dtype`.
    `codec`, `teacher`: see shards.FeatureMeta; held-out samples are always exact. `batch_tokens`:
    with 1 a sample's bits depend on nothing beside it. Truncated answers and loops stay by default:
    a server decodes them too.
    """

    target: str = Field(description="a folder, a GGUF file, or a name of a hub")
    decoder: Literal["auto", "own", "transformers"] = Field(
        "auto", description="ours, or transformers'; auto: ours where it can"
    )
    dtype: Dtype = Field("auto", description="of the computation; auto: the checkpoint's")
    device_map: str | None = Field(None, description="spreads a large target over devices")
    batch_tokens: int = Field(default=4096, ge=1, description="tokens of a forward, with padding")
    store_dtype: Literal["float32", "bfloat16"] = Field("bfloat16", description="of stored states")
    codec: CodecName = Field("within4", description="of stored states; held-out samples are exact")
    teacher: Literal["everywhere", "supervised"] = Field(
        "everywhere", description="positions that store the target's last state"
    )
    held_out_share: float = Field(0.05, ge=0, lt=1, description="share kept out of training")
    leave_out: tuple[Mark, ...] = Field(
        ("empty", "refused"), description="marks of dropped answers"
    )
    executor: Place = Field("local", description="where workers run; the result is the same")
    workers: int = Field(1, ge=1, description="processes that compute; on Ray, one for each host")
    servers: Annotated[tuple[str, ...], Flag("--server")] = Field(
        (), description="URL of a vLLM server of hidden states"
    )
    client: FleetConfig = FleetConfig()

    @model_validator(mode="after")
    def _one_place(self) -> CaptureConfig:
        if self.servers and self.has_workers:
            raise ValueError("servers: they compute, and no workers: leave one of the two out")
        return self

    @property
    def has_workers(self) -> bool:
        return self.executor == "ray" or self.workers > 1

    def decoder_of(self, shape: TargetShape) -> str:
        """`decoder` without "auto": transformers' for unknown targets and on GPUs."""
        if self.decoder != "auto":
            return self.decoder
        on_gpu = self.device_map is not None or default_device() != "cpu"
        return "own" if isinstance(shape, TargetConfig) and not on_gpu else "transformers"

    def dtype_of(self, shape: TargetShape) -> Dtype:
        """`dtype` without "auto". Raises MismatchError for "packed" unless our decoder computes."""
        if not self.servers and self.decoder_of(shape) == "own":
            return resolve_dtype(self.dtype, shape)
        if self.dtype == "packed":
            whose = "servers have" if self.servers else "transformers' decoder has"
            hint = "take our own decoder: decoder: own, no servers"
            raise MismatchError(f"{whose} no dtype packed", hint)
        return stored_dtype(shape) if self.dtype == "auto" else self.dtype

    def meta_of(self, shape: TargetShape, lm_head_sha256: str = "") -> FeatureMeta:
        return FeatureMeta(
            taps=shape.default_taps,
            hidden_size=shape.hidden_size,
            vocab_size=shape.vocab_size,
            lm_head_sha256=lm_head_sha256,
            dtype=self.store_dtype,
            codec=self.codec,
            teacher=self.teacher,
        )


def held_out_meta(meta: FeatureMeta) -> FeatureMeta:
    """Held-out samples are stored exactly."""
    return meta if meta.is_exact else meta.model_copy(update={"codec": "lossless"})


class CaptureTask:
    """What is captured from what. settings: the config in the identity, without "auto"."""

    def __init__(
        self, config: CaptureConfig, answers: Artifact, splits: tuple[Split, ...] = SPLITS
    ) -> None:
        """Raises MismatchError for another target, or one that the decoder does not run."""
        made, folder = answers.manifest("generate"), resolve_target(config.target)
        if made.config.get("record") != RECORD:
            raise MismatchError(
                f"the answers in {answers.url} hold no tokens: an older version of eyas wrote them",
                "run `eyas generate` again, into another folder",
            )
        target_fingerprint = fingerprint(folder)
        if made.config["target_fingerprint"] != target_fingerprint:
            raise MismatchError(
                f"the answers in {answers.url} were written by another target than {config.target}",
                f"give the same target ({made.facts['target']}), or run `eyas generate` with this "
                "one",
            )
        self.config, self.folder, self.answers, self.made = config, folder, answers, made
        self.splits, self.shape = splits, shape_for(config, folder)
        self.shape.refuse_few_layers()
        self.settings: dict[str, Any] = {
            **config.model_dump(mode="json", exclude=PLACES),
            "splits": list(splits),
            "decoder": "servers" if config.servers else config.decoder_of(self.shape),
            "dtype": config.dtype_of(self.shape),
            "target_fingerprint": target_fingerprint,
        }

    @cached_property
    def plan(self) -> CapturePlan:
        """Raises EmptyInputError if no answer can be used, MismatchError for unknown tokens."""
        # servers decode a token behind the sample
        room = self.shape.max_position_embeddings - bool(self.config.servers)
        plan = plan_samples(read_answers(self.answers), room, self.config.leave_out)
        most = max((int(one.token_ids.max()) for one in plan.samples), default=0)
        if most >= self.shape.vocab_size:
            raise MismatchError(
                f"the answers in {self.answers.url} hold token {most}, of {self.shape.vocab_size}",
                "run `eyas generate` again, with this target",
            )
        if not plan.samples:
            reasons = ", ".join(f"{reason} {count}" for reason, count in plan.reasons.items())
            raise EmptyInputError(
                f"none of the {plan.num_answers} answers can be used ({reasons})",
                "fewer marks in `leave_out` let more answers in; see the answers themselves",
            )
        return plan

    @property
    def batch_tokens(self) -> int:
        """A server's samples are stored one by one."""
        return 1 if self.config.servers else self.config.batch_tokens

    def samples(self, split: Split) -> list[SamplePlan]:
        share = self.config.held_out_share
        return [one for one in self.plan.samples if split_of(one.prompt_id, share) == split]

    def batches(self, split: Split) -> list[list[SamplePlan]]:
        """The forwards of a split; its values do not depend on the other split."""
        return list(forward_batches(self.samples(split), self.batch_tokens))

    def counts(self) -> dict[str, int]:
        """For the manifest: all answers; samples and tokens of the stored splits."""
        plan = self.plan
        stored = {split: self.samples(split) if split in self.splits else [] for split in SPLITS}
        return {
            "answers": plan.num_answers,
            "merged": plan.num_merged,
            **{f"dropped_{reason}": count for reason, count in plan.reasons.items()},
            **{split: len(samples) for split, samples in stored.items()},
            "tokens": sum(len(one) for samples in stored.values() for one in samples),
        }


def shape_for(config: CaptureConfig, folder: str) -> TargetShape:
    """Raises MismatchError if our decoder is asked for and cannot run the target."""
    return TargetConfig.from_folder(folder) if config.decoder == "own" else target_shape(folder)


def open_forward(
    config: CaptureConfig, shape: TargetShape, folder: str, stores: bool = True
) -> FeatureForward:
    """Load the decoder. stores: its samples are to be stored."""
    dtype, device = config.dtype_of(shape), "cpu"
    decoder: FeatureDecoder
    if config.decoder_of(shape) == "own":
        decoder = OwnDecoder.load(folder, dtype)
    else:
        decoder, device = HookedDecoder.load(folder, dtype, config.device_map), default_device()
    vocabulary = None
    if stores:
        vocabulary = TargetVocabulary.load(folder)
        # embeddings have no use here
        vocabulary = replace(vocabulary, embed_tokens=vocabulary.lm_head).to(device, torch.bfloat16)
    return FeatureForward(decoder, DTYPES[config.store_dtype], vocabulary)


def load_on_worker(config: CaptureConfig, target_fingerprint: str) -> FeatureForward:
    """`open_forward` on another host. Raises MissingInputError or MismatchError for the target."""
    try:
        folder = resolve_target(config.target)
    except MissingInputError as error:
        raise MissingInputError(error.what, EVERY_HOST) from error
    if fingerprint(folder) != target_fingerprint:
        raise MismatchError(f"{folder} holds another target than on the first host", EVERY_HOST)
    return open_forward(config, shape_for(config, folder), folder)


def open_workers(task: CaptureTask) -> WorkerForward:
    """Raises ConfigError if workers would share a GPU or Ray is not installed."""
    config, settings = task.config, task.settings
    is_local = config.executor == "local"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if is_local and settings["decoder"] == "transformers" and 0 < gpus < config.workers:
        raise ConfigError(
            f"workers: {config.workers} processes would load the target onto {gpus} GPUs",
            f"workers: {gpus}, each with a GPU of its own",
        )
    own = {name: settings[name] for name in ("decoder", "dtype")}
    if config.target not in PACKAGED and os.path.exists(config.target):
        own["target"] = os.path.abspath(config.target)  # a worker may stand in another folder
    load = partial(load_on_worker, config.model_copy(update=own), settings["target_fingerprint"])
    work = ForwardTask(load, config.workers if is_local else 1)
    return WorkerForward(open_executor(config.executor, work, config.workers), config.workers)


def open_source(task: CaptureTask, stores: bool = False) -> FeatureForward | StateFleet:
    """A decoder here, or proved servers. stores: its samples are to be stored; those of servers
    have no best tokens.
    """
    config, shape = task.config, task.shape
    if not config.servers:
        return open_forward(config, shape, task.folder, stores)
    dtype = config.dtype_of(shape)
    decoder = HookedDecoder.load(task.folder, dtype, config.device_map)
    proof = prove_by(decoder, dtype, task.plan.samples)
    command = start_command(task.folder, shape, dtype, proof.max_length)
    run = identity("capture", task.settings, {"answers": task.made})
    return StateFleet(config.servers, config.client, decoder, proof, run, command)


def split_of(prompt_id: str, held_out_share: float) -> Split:
    """By a hash of the prompt's id alone: it stays when other prompts come or go."""
    number = int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:8], "big")
    return "held_out" if number < held_out_share * 2**64 else "train"


def capture(
    config: CaptureConfig,
    answers: Artifact,
    output: Artifact,
    track: Track = quiet,
    splits: tuple[Split, ...] = SPLITS,
) -> Manifest:
    """Capture all answers of these splits into `output`; resumes on what computes alike.

    Raises MismatchError (another target wrote the answers, another decoder began), EmptyInputError,
    StorageFullError.
    """
    task = CaptureTask(config, answers, splits)
    inputs = {"answers": task.made}
    with output.begun(identity("capture", task.settings, inputs)) as is_work:
        if not is_work:
            return output.manifest()
        output.write_jsonl("dropped.jsonl", task.plan.dropped)
        opened = open_workers(task) if config.has_workers else open_source(task, stores=True)
        with closing(opened) as source:
            hold_to(output, source.computed_by())
            meta = config.meta_of(task.shape, source.lm_head_sha256)
            metas: dict[Split, FeatureMeta] = {"train": meta, "held_out": held_out_meta(meta)}
            writers = {
                split: ShardWriter(output, split, meta, SAMPLES_PER_SHARD)
                for split, meta in metas.items()
            }
            work = [(writers[split], plans) for split in splits for plans in task.batches(split)]
            needed = sum(
                len(one) * writer.meta.bytes_per_token
                for writer, plans in work
                for one in plans
                if one.key not in writer.keys
            )
            if (free := output.room()) is not None and needed > free:
                raise StorageFullError(
                    f"the features need {size_text(needed)} at {output.url}, {size_text(free)} "
                    "are free",
                    "free some space, choose another folder, an object store or a smaller codec, "
                    "or capture fewer answers",
                )
            _capture_missing(source, work, track)
            for writer in writers.values():
                writer.close()
            facts = {
                "target": config.target,
                "features": meta.model_dump(mode="json"),
                "computed_by": source.computed_by()["here"],
                **source.facts(),
            }
        return output.finish("capture", task.settings, inputs, task.counts(), facts)


def _capture_missing(
    source: SampleSource, work: list[tuple[ShardWriter, list[SamplePlan]]], track: Track
) -> None:
    """Compute the samples that no whole shard holds. A batch is computed whole or not at all: its
    bits do not depend on interruptions. Threads encode beside the next forward: one is slower than
    a GPU.
    """
    missing = [
        (writer, plans)
        for writer, plans in work
        if not writer.keys.issuperset(one.key for one in plans)
    ]
    total, left = (sum(len(plans) for _, plans in rows) for rows in (work, missing))
    num_tokens, started = 0, time.monotonic()

    def write(writer: ShardWriter, samples: Sequence[Sample | EncodedSample]) -> None:
        meta, codec = writer.meta, writer.codec

        def coded(one: Sample | EncodedSample) -> Sample | EncodedSample:
            if codec is None or isinstance(one, EncodedSample):
                return one
            return encoded(one, meta, codec)

        for sample in coders.map(coded, [one for one in samples if one.key not in writer.keys]):
            writer.add(sample)

    with (
        ThreadPoolExecutor(cores(), "encode") as coders,
        ThreadPoolExecutor(1, "write") as pool,
        closing(source.samples(missing)) as computed,
    ):
        writing = pool.submit(lambda: None)
        for (writer, plans), samples in zip(missing, computed, strict=True):
            writing.result()
            writing = pool.submit(write, writer, samples)
            num_tokens += sum(map(len, plans))
            left -= len(plans)
            speed = f"{num_tokens / (time.monotonic() - started):.0f} tokens/s"
            track(total - left, total, ", ".join(filter(None, (speed, source.status()))))
        writing.result()
