"""The train stage: features -> head. The run and its loop over steps.

A run is a fixed list of steps of `batches.per_step` batches, drawn from the seed; the ranks share
each step's batches. A killed run resumes from its checkpoint to the same weights, bit for bit, on
the same machines; on other numbers of ranks the steps have the same batches.

Letters: V target vocabulary.
"""

from __future__ import annotations

import copy
import logging
import math
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from eyas.artifact import Artifact, Manifest, identity
from eyas.errors import ConfigError, EyasError, MismatchError, StorageFullError
from eyas.hub import resolve_target
from eyas.lineage import head_manifest
from eyas.log import Track, quiet, size_text
from eyas.model.checkpoint import expected_shapes
from eyas.model.config import HeadConfig, HeadOptions
from eyas.operators.head import Head, head_files
from eyas.operators.vocab import TargetVocabulary
from eyas.shards import FeatureMeta, FeatureSource
from eyas.tau import ratio_of_sums
from eyas.train.batches import BatchConfig, feed, plan_steps, survey
from eyas.train.held_out import MEASURED_STEPS, HeldOutSample
from eyas.train.loss import ObjectiveConfig
from eyas.train.ranks import Ranks, asked_to_stop, joined, unsharded
from eyas.train.start import (
    SCALED_BY,
    StartConfig,
    existing_head,
    fresh_head,
    recount,
    scale_to_states,
)
from eyas.train.state import (
    CHECKPOINT,
    DIVERGED_AT,
    METRICS,
    StopConfig,
    TrainingState,
    checkpoint,
    measured_steps,
)
from eyas.train.step import (
    LONG_RUN,
    Dtype,
    LossModule,
    RateConfig,
    StepFigures,
    optimizers_of,
    peak_flops,
    quickest,
    rows_of,
    training_step,
    usual_learning_rate,
)

log = logging.getLogger(__name__)
ENOUGH_JUDGED = 100  # positions: if none of them carries loss, none will
LAST_BATCHES = 50  # the manifest has their mean loss and accuracy
# steps whose figures are read at once: reading waits for the device
READ_EVERY, READ_EVERY_ELSEWHERE = {"cpu": 1}, 8

# not in the identity: a run may be resumed with other values
WITHOUT_EFFECT = {
    "checkpoint_every": True,
    "objective": {"recompute"},  # rounding apart
    "start": {"head"},  # enters as an input, by its content
}
# settings of earlier versions, with their present meaning
GONE = {"data_share": 1.0, "batches.packed": False, "head.draft_tokens": None}

# Called on the first rank with each row of metrics.jsonl; a resumed run repeats steps. One that
# raises is dropped with a warning: no tracker ends a run.
OnRow = Callable[[Mapping[str, Any]], None]

# weights, two moments and the best head in a checkpoint; the head and its exports
HEAD_BYTES_PER_PARAMETER = 24


class TrainConfig(BaseModel):
    """start: a head to continue from; null draws new weights. dtype: auto is bfloat16, or float32
    on a CPU that multiplies bfloat16 slowly (without AVX-512). checkpoint_every: steps.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    head: HeadOptions = HeadOptions()
    objective: ObjectiveConfig = ObjectiveConfig()
    start: StartConfig | None = None
    epochs: int = Field(3, ge=1, description="passes over the samples")
    batches: BatchConfig = BatchConfig()
    learning_rate: RateConfig = RateConfig()
    dtype: Dtype = Field("auto", description="of the computation; weights are float32")
    stop: StopConfig = StopConfig()
    checkpoint_every: int = Field(200, ge=1)
    seed: int = Field(0, description="of new weights, order and random draws")

    @model_validator(mode="before")
    @classmethod
    def _without_gone(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        given = {name: dict(one) if isinstance(one, dict) else one for name, one in given.items()}
        for name, value in GONE.items():
            section, _, field = name.rpartition(".")
            place = given.get(section) if section else given
            if isinstance(place, dict) and place.pop(field, value) != value:
                raise ValueError(f"{name} is no setting any more (CHANGELOG.md): leave it out")
        return given


class DivergedError(EyasError):
    """The loss diverged: these weights are not saved."""


class UntrainedError(EyasError):
    """No position of the answers carries loss: the first weights are not saved."""


class StoppedError(EyasError):
    """A signal came; the checkpoint is written."""

    def __init__(self, number: int, step: int, num_steps: int) -> None:
        super().__init__(
            f"stopped by {signal.Signals(number).name} after step {step} of {num_steps}, with a "
            "checkpoint of it",
            "run the same command again: it resumes there",
        )
        self.exit_code = 128 + number  # what shells expect


def train(
    config: TrainConfig,
    target: str,
    source: FeatureSource,
    output: Artifact,
    track: Track = quiet,
    held_out: FeatureSource | None = None,
    on_row: OnRow | None = None,
) -> Manifest:
    """Train a head on a source of features; an interrupted run resumes from its last checkpoint.

    Under torchrun every process calls this with the same arguments; the first rank writes. target:
    any name of the model. held_out: the conversations that tau is measured on. Writes the head with
    the best held-out tau (without measurements the last) in bfloat16, or float32 if asked for;
    metrics.jsonl, one row a step; last/ if another head was best; measured/ with `StopConfig.keep`.

    Raises MismatchError (another target), EmptyInputError and UntrainedError (no trainable answer),
    ConfigError, and EyasError, with the samples' names, if a loss or gradient is not finite or the
    loss diverges. The last checkpoint stays.
    """
    with ExitStack() as stack:
        ranks = stack.enter_context(joined())
        with ranks.raised_on_all():
            trainer = Trainer(config, target, source, held_out, ranks)
            trainer.on_row = on_row if ranks.is_first else None
        if ranks.broadcast_object(lambda: stack.enter_context(output.begun(trainer.identity))):
            track = track if ranks.is_first else quiet
            trainer.begin(output)
            trainer.fit(output, track)
            trainer.finish(output)
        return ranks.broadcast_object(lambda: output.manifest("train"))


class Trainer:
    """One run: __init__ checks the input, `begin` plans the steps and makes state and module, `fit`
    trains, `finish` writes the head.
    """

    state: TrainingState
    module: LossModule
    on_row: OnRow | None = None
    _finished: int  # steps whose measurement, if one was due, is done too
    _judged = _trained = 0  # positions, of the steps of this process

    def __init__(
        self,
        config: TrainConfig,
        target: str,
        source: FeatureSource,
        held_out: FeatureSource | None,
        ranks: Ranks,
    ) -> None:
        self.config, self.ranks, self.source = config, ranks, source
        self.vocabulary = vocabulary = TargetVocabulary.load(resolve_target(target, True))
        check_same_target(source.meta, vocabulary)
        self.start_head = self.held_out = None
        if config.start:
            self.start_head = existing_head(config.start, config.head, source.meta, vocabulary)
        if held_out is not None and len(held_out) and config.stop.measurements:
            check_same_target(held_out.meta, vocabulary)
            self.held_out = HeldOutSample(held_out, config.batches.tokens)
        check_settings(config, ranks, self.held_out is not None)
        self.settings = config.model_dump(mode="json", exclude=WITHOUT_EFFECT)  # type: ignore[arg-type]
        # keeps the identities of runs with settings that went
        self.settings["batches"]["packed"], self.settings["head"]["draft_tokens"] = False, None
        self.inputs = dict(source.inputs)
        known = {manifest.identity for manifest in self.inputs.values()}
        for name, manifest in held_out.inputs.items() if held_out and self.held_out else ():
            if manifest.identity not in known:
                self.inputs[f"held_out_{name}"] = manifest
        if start := config.start:
            self.inputs["start"] = head_manifest(start.head, {"licence": start.licence})
        self.identity = identity("train", self.settings, self.inputs)

    def begin(self, output: Artifact) -> None:
        config, ranks = self.config, self.ranks
        self.counts_V, self.usable = ranks.broadcast_object(lambda: survey(self.source))
        epochs = [list(self.usable)] * config.epochs
        steps = plan_steps(config.batches, epochs, self.source.lengths, config.seed)
        self.steps = steps[: config.stop.max_steps]
        size, num_steps = self.vocabulary.config.hidden_size, len(self.steps)
        usual = usual_learning_rate(size, LONG_RUN if config.start else num_steps)
        peak = config.learning_rate.peak or usual
        self.rate = config.learning_rate.model_copy(update={"peak": peak})
        self.measure_at = measured_steps(num_steps, config.stop) if self.held_out else set()
        content = checkpoint(output, ranks)
        # by the first rank: other hosts may not see its folder, or have other processors
        auto = content.get("dtype") or quickest(ranks.device)  # a resumed run keeps its own
        asked = auto if config.dtype == "auto" else config.dtype
        resumes, dtype = ranks.broadcast_object(lambda: (bool(content), asked))
        ranks.broadcast_object(lambda: self._refuse_without_room(output))
        head = self._initial_head(resumes).to(ranks.device)
        self.vocabulary = self.vocabulary.to(ranks.device, getattr(torch, dtype))
        self.module = LossModule(head, self.vocabulary, config.objective, dtype)
        ranks.shard(self.module, getattr(torch, dtype))
        optimizers = optimizers_of(head, config.objective.weight_decay)
        self.state = TrainingState(head, optimizers, dtype)
        self.state.resume(content, output, ranks)

    def _refuse_without_room(self, output: Artifact) -> None:
        shape = HeadConfig.for_target(self.vocabulary.config, self.config.head)
        shape = self.start_head.config if self.start_head is not None else shape
        parameters = sum(map(math.prod, expected_shapes(shape).values()))
        present = sum(map(output.size, output.all_names()))
        needed, free = HEAD_BYTES_PER_PARAMETER * parameters - present, output.room()
        if free is not None and needed > free:
            raise StorageFullError(
                f"a head of {parameters:,} parameters needs {size_text(needed)} at {output.url}, "
                f"{size_text(free)} are free",
                "free some space, or give another --output",
            )

    def _initial_head(self, resumes: bool) -> Head:
        """The head before step 0, float32: config.start's, or fresh; not scaled if a checkpoint
        will replace its weights.
        """
        config, ranks, vocabulary = self.config, self.ranks, self.vocabulary
        if head := self.start_head:
            if config.start and config.start.vocabulary == "recount":
                recount(head, vocabulary, self.counts_V, config.head.draft_vocab_size)
            return head
        head = fresh_head(config.head, self.source.meta, vocabulary, self.counts_V, config.seed)
        if resumes:
            head.feature_scale = torch.ones(head.fc.in_features)
            return head
        few = min(SCALED_BY, len(self.usable))
        numbers = random.Random(config.seed).sample(list(self.usable), few)
        batches = self.source.batches([[number] for number in numbers])
        with ranks.raised_on_all():
            scale_to_states(head, (sample for batch in batches for sample in batch))
        ranks.broadcast([*head.to(ranks.device).parameters(), *head.buffers()])
        return head

    def fit(self, output: Artifact, track: Track) -> None:
        """Measure the start, then train the remaining steps, fewer by `StopConfig.patience`.

        An EyasError, and SIGINT and SIGTERM as StoppedError, save the last whole step first. A
        DivergedError leaves the older checkpoint.
        """
        state, config, ranks, num_steps = self.state, self.config, self.ranks, len(self.steps)
        self._finished = state.step
        mine = [ranks.share(batches) for batches in self.steps[state.step :]]
        reader = self.source.batches([numbers for batches in mine for numbers in batches])
        self._feed = feed(reader, list(map(len, mine)), state.step, self.module)
        if self.measure_at and state.step == 0:
            self._measure()
        pending: list[StepFigures] = []
        read_every = READ_EVERY.get(ranks.device, READ_EVERY_ELSEWHERE)
        due = {num_steps, *self.measure_at, *range(0, num_steps, config.checkpoint_every)}
        began = time.monotonic()
        try:
            with closing(self._feed), asked_to_stop() as signal_of:
                while state.step < num_steps and not state.patience.is_over(config.stop):
                    try:
                        with ranks.raised_on_all():
                            batches = next(self._feed)
                        rate = self.rate.at(state.step, num_steps)
                        pending.append(training_step(state, self.module, batches, ranks, rate))
                    except EyasError:
                        if pending:  # the whole steps before it
                            self._read(pending, began, output)
                        raise
                    if len(pending) < read_every and state.step not in due:
                        continue
                    *_, row = self._read(pending, began, output)
                    pending = []
                    if state.step % config.checkpoint_every == 0 and state.step < num_steps:
                        state.save(output, ranks)
                    tau = f" tau {state.patience.best:.2f}" if state.patience.best else ""
                    note = f"loss {row['loss']:.3f} accuracy {row['accuracy'][0]:.3f}{tau}"
                    track(state.step, num_steps, note)
                    if state.step < num_steps and (came := max(ranks.all_gather(signal_of()))):
                        raise StoppedError(came, state.step, num_steps)
                    began = time.monotonic()
        except (DivergedError, UntrainedError):  # the older checkpoint stays
            if ranks.is_first:
                output.write_jsonl(METRICS, state.metrics)
            raise
        except EyasError:
            # not in mid-measurement, nor before the first step
            if state.step == self._finished > 0:
                state.save(output, ranks)
            raise

    def _read(
        self, pending: Sequence[StepFigures], began: float, output: Artifact
    ) -> list[dict[str, Any]]:
        """The rows of these steps, judged."""
        rows = rows_of(pending, self.ranks, self.state.head.config)
        seconds = (time.monotonic() - began) / len(rows)
        peak = peak_flops(self.ranks.device, self.state.dtype)
        for row, figures in zip(rows, pending, strict=True):
            row["seconds"], row["tokens_per_s"] = seconds, row["tokens"] / seconds
            if peak:
                row["mfu"] = row["flops"] / (seconds * peak * self.ranks.size)
            self._judge(row, figures.keys, output)
            if self.on_row is not None:
                try:
                    self.on_row(copy.deepcopy(row))
                except Exception as error:  # its words may hold a login
                    data = {"step": row["step"], "error": type(error).__name__}
                    log.warning("on_row failed and is called no more", extra={"data": data})
                    self.on_row = None
        return rows

    def _judge(self, row: dict[str, Any], keys: Sequence[str], output: Artifact) -> None:
        """Measure held-out tau if due, and write the row. Raises DivergedError; UntrainedError;
        EyasError for a step that is not finite, with the state before it.
        """
        state, step = self.state, row["step"]
        if not math.isfinite(row["loss"] + row["grad_norm"]):
            state.step = step - 1
            self._feed.close()  # a source may have one reader
            with self.ranks.raised_on_all():
                unsound = [
                    one.key
                    for samples in self.source.batches(self.ranks.share(self.steps[state.step]))
                    for one in samples
                    if not (one.aux_hidden.isfinite().all() and one.last_hidden.isfinite().all())
                ]
            names, broken = map(self.ranks.all_gather_flat, (keys, unsound))
            raise EyasError(
                f"step {step} has loss {row['loss']} and gradient norm {row['grad_norm']}; its "
                f"samples: {', '.join(names)}",
                f"the features of {', '.join(broken)} are not finite: capture them again"
                if broken
                else "try a lower learning_rate",
            )
        state.trend.add(row["loss"])
        if state.trend.has_diverged():
            state.add_row(row, output, self.ranks)
            raise DivergedError(
                f"the loss diverges: its running mean is {state.trend.mean:.3f} at step "
                f"{step}, more than {DIVERGED_AT:g} times its lowest, "
                f"{state.trend.lowest:.3f}; the samples of this step: "
                f"{', '.join(self.ranks.all_gather_flat(keys))}",
                "begin in another folder with a lower learning_rate",
            )
        if step in self.measure_at:
            row |= self._measure()
            if self.config.stop.keep:
                measured = self._finished_head()
                with self.ranks.raised_on_all():
                    if self.ranks.is_first:
                        write_head(output, f"measured/{step}/", measured)
        state.add_row(row, output, self.ranks)
        self._finished = step
        self._judged, self._trained = self._judged + row["judged"], self._trained + row["trained"]
        is_enough = self._judged >= ENOUGH_JUDGED or step == len(self.steps)
        trained = any(one["trained"] for one in state.metrics)  # before a resume too
        if is_enough and not self._trained and not self.ranks.broadcast_object(lambda: trained):
            raise UntrainedError(
                f"nothing is trained: at none of {self._judged} positions of the answers is the "
                "target's most likely next token one of the "
                f"{state.head.config.draft_vocab_size} draft tokens",
                "the answers are not this target's: let it answer the prompts itself (`eyas "
                "generate`, at the temperature it is used at); or give a larger "
                "head.draft_vocab_size",
            )

    def _measure(self) -> dict[str, Any]:
        """Measure the head, and remember the best. A new one's start is none: its layer is idle."""
        assert self.held_out is not None, "measured without a sample"
        state = self.state
        with unsharded(self.module):
            counts, loss = self.held_out.measure(self.module, self.ranks)
        tau = float(ratio_of_sums(counts.numpy()))
        if state.step == 0:
            state.patience.start = tau
        # tau is 0 if no answer of the sample is long enough for a round
        if tau > 0 and (state.step or self.config.start) and state.patience.add(state.step, tau):
            state.keep_best()
        emitted, rounds = counts.T.tolist()
        by_conversation = {"emitted": emitted, "rounds": rounds}
        return {"held_out_tau": tau, "held_out_loss": loss, "held_out_counts": by_conversation}

    def finish(self, output: Artifact) -> None:
        """Write the best measured head; without measurements the last one."""
        state, ranks = self.state, self.ranks
        last = None
        if state.patience.best:
            last = self._finished_head() if state.patience.best_step != state.step else None
            state.restore_best(ranks)
            if ranks.is_first and state.patience.best <= state.patience.start:
                log.warning(
                    f"no head of this run is better than its start (tau "
                    f"{state.patience.start:.2f}): train on more answers, or with another "
                    "learning_rate"
                )
        head = self._finished_head()
        with ranks.raised_on_all():
            if not ranks.is_first:
                return
            for folder, one in (("", head), ("last/", last)):
                if one:
                    write_head(output, folder, one)
            output.write_jsonl(METRICS, state.metrics)
            output.delete(CHECKPOINT)
            counts = {
                "batches": state.step,
                "samples": len(self.usable),
                "answer_tokens": sum(self.usable.values()),  # of one pass
                "parameters": sum(weight.numel() for weight in head.parameters()),
            }
            output.finish("train", self.settings, self.inputs, counts, self._facts(head))

    def _finished_head(self) -> Head:
        """A copy of the head, unsharded, without feature_scale. All ranks call it."""
        head, weights = Head(self.state.head.config).to(self.ranks.device), self.state.weights()
        if "feature_scale" in weights:
            weights["fc.weight"] = weights["fc.weight"] * weights.pop("feature_scale")
        head.load_state_dict(weights)
        return head.to(torch.float32 if self.config.dtype == "float32" else torch.bfloat16)

    def _facts(self, head: Head) -> dict[str, Any]:
        state = self.state
        covered = self.counts_V[head.t2d.cpu()].sum() / self.counts_V.sum()
        facts: dict[str, Any] = {
            "draft_vocab_size": head.config.draft_vocab_size,
            "draft_vocabulary_coverage": float(covered),
            "planned_batches": len(self.steps),
            "computed_in": self.state.dtype,
            "learning_rate": self.rate.peak,
        }
        if last := state.metrics[-LAST_BATCHES:]:
            columns = zip(*(row["accuracy"] for row in last), strict=True)
            facts["last_batches"] = {
                "loss": sum(row["loss"] for row in last) / len(last),
                "accuracy": [sum(column) / len(last) for column in columns],
            }
        if self.held_out is not None:
            facts["held_out"] = {
                "tau": state.patience.best,
                "start_tau": state.patience.start,
                "step": state.patience.best_step,
                "samples": len(self.held_out.numbers),
                "num_draft_steps": MEASURED_STEPS,
            }
        return facts


def write_head(output: Artifact, folder: str, head: Head) -> None:
    """folder: "", or a path that ends with /."""
    for name, data in head_files(head).items():
        output.write(folder + name, data)


def check_settings(config: TrainConfig, ranks: Ranks, measures: bool) -> None:
    """Raise ConfigError for what does not fit the run."""
    if config.batches.per_step < ranks.size:
        raise ConfigError(
            f"a step of {config.batches.per_step} batches has no work for {ranks.size} processes",
            f"set batches.per_step to {ranks.size} or more; the head depends on it, not on the "
            "number of processes",
        )
    if config.stop.patience and not measures:
        raise ConfigError(
            "stop.patience waits for held-out tau, and none is measured",
            "capture with a held_out_share, leave stop.measurements above 0, or set stop.patience: "
            "null",
        )


def check_same_target(meta: FeatureMeta, vocabulary: TargetVocabulary) -> None:
    """Raise MismatchError unless the features are of this target."""
    theirs, ours = ((one.hidden_size, one.vocab_size) for one in (meta, vocabulary.config))
    if theirs != ours or meta.lm_head_sha256 != vocabulary.lm_head_sha256:
        how = "the same shape (its lm_head has another hash)"
        if theirs != ours:
            how = "hidden size {} and vocabulary {}; this one has {} and {}".format(*theirs, *ours)
        raise MismatchError(
            f"the features are of another target of {how}",
            "give the target that the features were captured from, or capture them again",
        )
