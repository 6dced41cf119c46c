"""The train stage: features -> head. The loop over steps: what is read, judged, kept, and when it
ends.

Knows the order of the work. Does not know how features were made, what a head is exported to, nor a
loss.

A run is a fixed list of steps of `batches.per_step` batches, drawn from the seed alone; the ranks
share the batches of each step. A checkpoint is the state after so many steps. So a run that was
killed goes on to the same weights, bit for bit, on the same machines, and on another number of
ranks it meets the same batches in the same steps.

Letters: V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from eyas.artifact import Artifact, Manifest, identity
from eyas.errors import ConfigError, EmptyInputError, EyasError, MismatchError
from eyas.hub import resolve_target
from eyas.log import Track, quiet
from eyas.model.batch import Batch
from eyas.model.config import HeadOptions
from eyas.model.head import head_files
from eyas.model.vocab import TargetVocabulary
from eyas.shards import FeatureMeta, Features
from eyas.shards.source import FeatureSource
from eyas.train.checkpoint import CHECKPOINT, METRICS, Run, pack, resume, save, unpack
from eyas.train.held_out import HeldOut, tau_of
from eyas.train.loss import ObjectiveConfig
from eyas.train.mixture import Mixture, check_alike, drawn
from eyas.train.optimizer import OptimizerConfig, adamw, learning_rate
from eyas.train.plan import BatchConfig, plan, read_batches, survey
from eyas.train.ranks import Ranks, joined
from eyas.train.regression import Comparison, compared, refuse_loss
from eyas.train.start import StartConfig, fresh_head, given_head, identity_of, recount, warm_head
from eyas.train.step import Given, Precision, teaching_in_tf32, update
from eyas.train.stopping import StopConfig, measured_steps
from eyas.train.tracker import RunOf, TrackerConfig, Trackers, open_trackers, scalars

KEEP = "keep.json"
WITHOUT_EFFECT = {  # on the weights: a run may go on with others
    "tracker": True,
    "checkpoint_every": True,
    # head and keep_mix count by what they hold
    "start": {"head", "keep_mix", "keep_tolerance", "keep_samples"},
}


class TrainConfig(BaseModel):
    """Settings of the train stage. start: a head to go on from; null draws new weights.
    checkpoint_every counts steps.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    head: HeadOptions = HeadOptions()
    objective: ObjectiveConfig = ObjectiveConfig()
    start: StartConfig | None = None
    epochs: int = Field(3, ge=1)
    batches: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    dtype: Precision = "bfloat16"
    stop: StopConfig = StopConfig()
    tracker: TrackerConfig = TrackerConfig()
    checkpoint_every: int = Field(200, ge=1)
    seed: int = 0


class DivergedError(EyasError):
    """The loss ran away: the weights are no longer worth keeping."""


def train(
    config: TrainConfig,
    target: str,
    source: FeatureSource,
    output: Artifact,
    track: Track = quiet,
    held_out: FeatureSource | None = None,
) -> Manifest:
    """Train a head on a source of features; an interrupted run goes on from its last checkpoint.

    Started by torchrun, every process calls this with the same arguments; the first one writes.
    target: a folder, or "builtin". held_out: what tau is measured on. Writes eyas_head.json and
    model.safetensors (in config.dtype) of the head that measured best, or of the last,
    metrics.jsonl, a row a step, and last/, where the last is not the best.

    Raises MismatchError for features or a head of another target, EmptyInputError for features
    without a trainable answer, ConfigError for settings that do not fit each other, and EyasError,
    naming the samples, when a loss or gradient is no finite number or the loss runs away; and when
    the head loses on the old mix (config.start) more than it may. The checkpoint is kept in all of
    these cases.
    """
    with ExitStack() as stack:
        ranks = stack.enter_context(joined())
        stack.enter_context(teaching_in_tf32(config.dtype))
        training = ranks.together(lambda: Training(config, target, source, held_out, ranks))
        done = not ranks.first(
            lambda: output.begin(identity("train", training.settings, training.inputs))
        )
        if not done:
            if not ranks.is_first:
                track = quiet
            trackers = training.begin(output)
            stack.callback(trackers.close)
            training.go_on(output, track, trackers)
            training.finish(output)
        return ranks.first(lambda: output.manifest("train"))


class Training:
    """One run: its sources, its plan and its state."""

    run: Run
    _whole: int  # steps done with all that belongs to them

    def __init__(
        self,
        config: TrainConfig,
        target: str,
        source: FeatureSource,
        held_out: FeatureSource | None,
        ranks: Ranks,
    ) -> None:
        """Look at everything that may be wrong with the input, before any work. Raises
        MismatchError, ConfigError.
        """
        self.config, self.ranks = config, ranks
        self.keep_mix = config.start.keep_mix if config.start else None
        self.num_new, self.source = len(source), source
        if config.start and self.keep_mix and config.start.keep_share:
            self.source = Mixture(source, Features(Artifact(self.keep_mix), "train"))
        self.vocabulary = TargetVocabulary.load(resolve_target(target)).to(ranks.device)
        check_same_target(self.source.meta, self.vocabulary)
        self.held_out = self._sample(held_out, config.stop.samples)
        self.old_mix = self._old_mix(config.start)
        check_settings(config, ranks, self.held_out is not None)
        self.start = (
            warm_head(config.start, config.head, self.source.meta, self.vocabulary)
            if config.start
            else None
        )
        self.settings = config.model_dump(mode="json", exclude=WITHOUT_EFFECT)  # type: ignore[arg-type]
        self.inputs = self._inputs()
        self.given = Given.of(
            config.objective, config.optimizer.max_grad_norm, config.dtype, self.vocabulary, ranks
        )

    def _sample(self, source: FeatureSource | None, num_samples: int) -> HeldOut | None:
        if source is None or not len(source) or not self.config.stop.measurements:
            return None
        return self._held_out(source, num_samples)

    def _old_mix(self, start: StartConfig | None) -> HeldOut | None:
        """What a head that is gone on from must not lose on. Raises MismatchError, EmptyInputError."""
        if start is None or start.keep_mix is None:
            return None
        source = Features(Artifact(start.keep_mix), "held_out")
        check_alike(self.source.meta, source.meta)
        if len(source) < 2:
            raise EmptyInputError(
                f"{start.keep_mix} holds out {len(source)} conversations, too few to compare two "
                "heads on",
                "capture the old mix with a larger held_out_share",
            )
        return self._held_out(source, start.keep_samples)

    def _held_out(self, source: FeatureSource, num_samples: int) -> HeldOut:
        check_same_target(source.meta, self.vocabulary)
        steps, dtype = self.config.stop.num_draft_steps, getattr(torch, self.config.dtype)
        return HeldOut.of(source, num_samples, steps, self.config.batches.tokens, dtype)

    def _inputs(self) -> dict[str, Manifest]:
        inputs = dict(self.source.inputs)
        known = {made.identity for made in inputs.values()}
        if self.held_out is not None:
            others = {
                f"held_out_{name}": made for name, made in self.held_out.source.inputs.items()
            }
            inputs |= {name: made for name, made in others.items() if made.identity not in known}
        if self.config.start:
            inputs["start"] = identity_of(self.config.start)
        if self.keep_mix:
            inputs.setdefault("old_features", Artifact(self.keep_mix).manifest("capture"))
        return inputs

    # The work

    def begin(self, output: Artifact) -> Trackers:
        """Plan the run, and take up its state: that of a checkpoint, or a new one. On every rank
        alike.
        """
        config, ranks = self.config, self.ranks
        self.counts_V, self.usable = ranks.first(lambda: survey(self.source, config.objective))
        self.steps = plan(config.batches, self._passes(), self.source.lengths, config.seed)
        self.measure_at = measured_steps(len(self.steps), config.stop) if self.held_out else set()
        self.run = self._started()
        ranks.together(lambda: resume(self.run, output) if ranks.is_first else None)
        if ranks.size > 1:
            state = ranks.first(lambda: pack(self.run))
            unpack(self.run, state)
        name = config.tracker.run or output.url.rsplit("/", 1)[-1]
        told = RunOf(
            config.tracker,
            name,
            identity("train", self.settings, self.inputs),
            self.settings,
            self.run.step,
        )
        return ranks.together(
            lambda: open_trackers(told, output.local_path("")) if ranks.is_first else Trackers({})
        )

    def _passes(self) -> list[list[int]]:
        """The samples of each epoch: all new ones, and some of the old mix's."""
        new, old = (
            [number for number in self.usable if (number >= self.num_new) == is_old]
            for is_old in (False, True)
        )
        share, seed = self.config.start.keep_share if self.config.start else 0.0, self.config.seed
        return [
            [*new, *drawn(old, len(new), share, f"{seed}/{epoch}")]
            for epoch in range(self.config.epochs)
        ]

    def _started(self) -> Run:
        config, on_cpu = self.config, self.vocabulary.to("cpu")
        head = self.start or fresh_head(
            config.head, self.source.meta, on_cpu, self.counts_V, config.seed
        )
        if config.start and config.start.vocabulary == "recount":
            recount(head, on_cpu, self.counts_V)
        head.to(self.ranks.device)
        return Run(
            head,
            adamw(
                [weight for weight in head.parameters() if weight.requires_grad], config.optimizer
            ),
        )

    def go_on(self, output: Artifact, track: Track, trackers: Trackers) -> None:
        """All steps that are left, or as many as it takes. Raises EyasError, after keeping what was
        done.
        """
        try:
            self._steps(output, track, trackers)
        except DivergedError:
            if self.ranks.is_first:
                output.write_jsonl(METRICS, self.run.metrics)  # the checkpoint is of a better time
            raise
        except EyasError:
            # else a step was done and not judged yet
            if self.ranks.is_first and self.run.step == self._whole:
                save(self.run, output)
            raise

    def _steps(self, output: Artifact, track: Track, trackers: Trackers) -> None:
        run, config, ranks = self.run, self.config, self.ranks
        self._whole = run.step
        todo = self.steps[run.step :]
        mine = [ranks.share(batches) for batches in todo]
        samples = self.source.batches([numbers for batches in mine for numbers in batches])
        for batches in mine:
            if run.patience.is_over(config.stop):
                break
            read = functools.partial(
                read_batches, samples, len(batches), config.batches, ranks.device
            )
            loaded = ranks.together(read)
            row = update(
                run, loaded, self.given, learning_rate(run.step, len(self.steps), config.optimizer)
            )
            run.drift.add(row["loss"])
            run.metrics.append(row)
            if run.drift.is_away(config.stop):
                raise diverged(run, loaded, config, ranks)
            if run.step in self.measure_at:
                row["held_out_tau"] = self._measure()
            self._whole = run.step
            trackers.log(run.step, scalars(row))
            if run.step % config.checkpoint_every == 0 and run.step < len(self.steps):
                ranks.together(lambda: save(run, output) if ranks.is_first else None)
            track(run.step, len(self.steps), note(row, run))

    def _measure(self) -> float:
        """tau of the head as it is, remembered if it is the best; 0 says that no answer of the
        sample has a round.
        """
        assert self.held_out is not None, "measured without a sample"
        run = self.run
        tau = tau_of(self.held_out.counts(run.head, self.vocabulary, self.ranks))
        if tau > 0 and run.patience.add(run.step, tau, self.config.stop.min_gain):
            run.keep_best()
        return tau

    # The end

    def finish(self, output: Artifact) -> None:
        """Write the head that is kept, after asking whether it lost on the old mix. Raises
        EyasError for a head that did.
        """
        run, ranks, dtype = self.run, self.ranks, getattr(torch, self.config.dtype)
        if self.old_mix:  # a head that is refused stays in its checkpoint
            ranks.together(lambda: save(run, output) if ranks.is_first else None)
        measured = run.patience.best_step > 0
        last = (
            head_files(run.head.to(dtype))
            if measured and run.patience.best_step != run.step
            else {}
        )
        if run.best is not None:
            run.head.load_state_dict(run.best)
        run.head.to(dtype)
        comparison = self._compare(output)
        facts = self._facts(comparison)
        files = (
            {**head_files(run.head), **{f"last/{name}": data for name, data in last.items()}}
            if ranks.is_first
            else {}
        )
        ranks.together(lambda: self._write(output, files, facts) if ranks.is_first else None)

    def _write(
        self, output: Artifact, files: Mapping[str, bytes], facts: Mapping[str, Any]
    ) -> None:
        run = self.run
        for name, data in files.items():
            output.write(name, data)
        output.write_jsonl(METRICS, run.metrics)
        output.delete(CHECKPOINT)
        size = sum(weight.numel() for weight in run.head.parameters())
        counts = {"batches": run.step, "samples": len(self.usable), "parameters": size}
        output.finish("train", self.settings, self.inputs, counts, facts)

    def _compare(self, output: Artifact) -> Comparison | None:
        """What the head, as it is written, has of the tau on the old mix that the head had that it
        comes from.
        """
        start, sample = self.config.start, self.old_mix
        if start is None or sample is None:
            return None
        before = given_head(start.head, self.vocabulary).to(self.ranks.device)
        after = self.run.head.float()
        comparison = compared(
            *(sample.counts(head, self.vocabulary, self.ranks) for head in (before, after))
        )
        self.run.head.to(getattr(torch, self.config.dtype))
        if self.ranks.is_first:
            output.write_json(KEEP, {**comparison.to_json(), "tolerance": start.keep_tolerance})
        refuse_loss(comparison, start.keep_tolerance)
        return comparison

    def _facts(self, comparison: Comparison | None) -> dict[str, Any]:
        run = self.run
        facts: dict[str, Any] = {
            "draft_vocabulary_coverage": float(
                self.counts_V[run.head.t2d.cpu()].sum() / self.counts_V.sum()
            ),
            "planned_batches": len(self.steps),
        }
        if run.metrics:
            facts["last_batches"] = mean_of_last(run.metrics)
        if self.held_out is not None:
            facts["held_out"] = {
                "tau": run.patience.best,
                "step": run.patience.best_step,
                "samples": len(self.held_out.numbers),
            }
        if comparison and self.config.start:
            facts["keep"] = {**comparison.to_json(), "tolerance": self.config.start.keep_tolerance}
        return facts


def note(row: Mapping[str, Any], run: Run) -> str:
    """What the progress bar says of a step."""
    tau = f" tau {run.patience.best:.2f}" if run.patience.best_step else ""
    return f"loss {row['loss']:.3f} accuracy {row['accuracy'][0]:.3f}{tau}"


def diverged(
    run: Run, batches: Sequence[Batch], config: TrainConfig, ranks: Ranks
) -> DivergedError:
    """The error of a loss that runs away, naming the samples of the step where that was seen."""
    keys = [
        key
        for of_rank in ranks.gathered([batch.keys for batch in batches])
        for keys in of_rank
        for key in keys
    ]
    return DivergedError(
        f"the loss runs away: its running mean is {run.drift.mean:.3f} at step {run.step}, more "
        "than "
        f"{config.stop.diverged_at:g} times its lowest, {run.drift.lowest:.3f}; the samples of "
        f"this step: {', '.join(keys)}",
        "begin in another folder with a lower optimizer.learning_rate, or allow more with "
        "stop.diverged_at",
    )


def check_settings(config: TrainConfig, ranks: Ranks, measures: bool) -> None:
    """Raise ConfigError for settings that do not fit the run."""
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
    ours = vocabulary.config
    if (meta.hidden_size, meta.vocab_size) != (ours.hidden_size, ours.vocab_size):
        raise MismatchError(
            f"the features are of a target of hidden size {meta.hidden_size} and a vocabulary of "
            f"{meta.vocab_size}; "
            f"this one has {ours.hidden_size} and {ours.vocab_size}",
            "give the target that the features were captured from",
        )
    if meta.lm_head_sha256 != vocabulary.lm_head_sha256:
        raise MismatchError(
            "the features are of another target of the same shape (its lm_head has another hash)",
            "give the target that the features were captured from, or capture them again",
        )


def mean_of_last(metrics: Sequence[Mapping[str, Any]], count: int = 50) -> dict[str, Any]:
    """Loss and accuracy per step, averaged over the last batches."""
    last = metrics[-count:]
    accuracy = [
        sum(column) / len(last) for column in zip(*(row["accuracy"] for row in last), strict=True)
    ]
    return {"loss": sum(row["loss"] for row in last) / len(last), "accuracy": accuracy}
