"""The eval stage: what a head brings on answers and prompts that it has not seen, into eval.json.

    features    chains, counted on what `capture` held out: seconds, and no target is run          -> tau, ...
    questions   trees and chains at several temperatures, through the engine's own code            -> trees
                the same answers played back at any load, with the costs of this machine or another
                -> predicted

Knows the order of things and the file. Does not know how rounds are counted, nor a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from eyas.artifact import Artifact, Manifest, file_identity, identity
from eyas.chat import Chat
from eyas.errors import ConfigError, EmptyInputError
from eyas.evaluate.chains import Chains, check_belongs
from eyas.evaluate.decoding import Models, ModelsConfig, threads
from eyas.evaluate.prediction import PredictConfig, predict, read_costs, speculating
from eyas.evaluate.questions import Asked, Question, questions_identity
from eyas.evaluate.served import serve
from eyas.hub import resolve_head, resolve_target
from eyas.lineage import head_manifest
from eyas.log import Track, quiet
from eyas.model.batch import plan_batches
from eyas.model.head import load_head
from eyas.model.vocab import TargetVocabulary
from eyas.model.weights import fingerprint
from eyas.shards.source import FeatureSource

DEFAULT_TREES = ("fixed(6,3,12)", "fixed(4,1,5)")  # the engine's own sizes, and a chain


class EvalConfig(BaseModel):
    """Settings of the eval stage.

    Of chains on features: num_draft_steps, and batch_tokens, which counts padding. Of prompts
    through the engine: trees as `eyas serve` takes them,
    fixed(num_draft_steps,tree_topk,num_verify_tokens) with one branch for a chain, or auto; the
    first tree at the first temperature is what is told first, and predicted is for the first
    temperature.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_draft_steps: int = Field(7, ge=1, le=16)
    batch_tokens: int = Field(8192, ge=1)
    trees: tuple[str, ...] = Field(DEFAULT_TREES, min_length=1)
    temperatures: tuple[float, ...] = Field((0.0, 1.0), min_length=1)
    num_prompts: int = Field(200, ge=1)
    max_tokens: int = Field(128, ge=2)
    seed: int = 0
    models: ModelsConfig = ModelsConfig()
    predict: PredictConfig = PredictConfig()

    @field_validator("trees")
    @classmethod
    def _are_trees(cls, trees: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(str, map(speculating, trees)))

    @field_validator("temperatures")
    @classmethod
    def _are_temperatures(cls, temperatures: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 <= temperature <= 100 for temperature in temperatures):
            raise ConfigError(
                f"temperatures: {list(temperatures)}", "give numbers from 0 (greedy) to 100"
            )
        return temperatures


@dataclass(frozen=True)
class HeldOut:
    """What the head has not seen: features of answers, prompts to be answered, or both. The first
    num_prompts are asked.
    """

    features: FeatureSource | None = None
    questions: Sequence[Question] = ()


def evaluate(
    config: EvalConfig,
    target: str,
    head: str,
    held_out: HeldOut,
    output: Artifact,
    track: Track = quiet,
) -> Manifest:
    """Measure a head on what is held out and write eval.json. head: the output of `train`, or a
    head of any form.

    Raises MismatchError when head, features and target do not belong together, EmptyInputError
    without an answer of two tokens, EyasError for a prediction that cannot be.
    """
    folder, questions = resolve_target(target), held_out.questions[: config.num_prompts]
    if held_out.features is None and not questions:
        raise EmptyInputError(
            "there is nothing held out to measure with", "give features, prompts, or both"
        )
    # Weights are laid out for the number of threads that there is when they are loaded.
    files, made = Path(resolve_head(head)), head_manifest(head, {})
    with threads(config.models.threads):
        settings = described(config, folder, questions)
        inputs = {
            "head": made,
            **(held_out.features.inputs if held_out.features is not None else {}),
        }
        # What does not fit is refused before the folder is claimed.
        work = (
            None
            if output.is_done()
            else Work.of(config, folder, files, HeldOut(held_out.features, questions))
        )
        if not output.begin(identity("eval", settings, inputs)):
            return output.manifest("eval")
        assert work is not None, "a folder is not done, or holds other work"
        result = work.done(track)
    output.write_json("eval.json", result)
    counts = {"answers": result["answers"], "tokens": result["tokens"], "rounds": result["rounds"]}
    facts = {name: result[name] for name in ("tau", "tau_interval", "accept_hist")}
    return output.finish("eval", settings, inputs, counts, facts)


def described(config: EvalConfig, folder: str, questions: Sequence[Question]) -> dict[str, Any]:
    """The config as far as it says what is measured, with what is asked and of whom; contents in
    place of paths.
    """
    if not questions:
        return config.model_dump(mode="json", include={"num_draft_steps", "batch_tokens"})
    settings = config.model_dump(mode="json")
    if config.predict.costs is not None:
        settings["predict"]["costs"] = file_identity(config.predict.costs)
    return {
        **settings,
        "questions": questions_identity(questions),
        "target_fingerprint": fingerprint(folder),
    }


@dataclass(frozen=True)
class Work:
    """All that is loaded to measure with: of features, of prompts, or of both."""

    config: EvalConfig
    source: FeatureSource | None = None
    chains: Chains | None = None
    models: Models | None = None
    asked: Asked | None = None

    @classmethod
    def of(cls, config: EvalConfig, folder: str, head: Path, held_out: HeldOut) -> Work:
        """Raises what loading raises, and MismatchError for what does not belong together."""
        chains = models = asked = None
        if held_out.features is not None:
            vocabulary = TargetVocabulary.load(folder)
            loaded = load_head(head, vocabulary.config, vocabulary.lm_head)
            check_belongs(loaded.config, held_out.features.meta, vocabulary)
            chains = Chains(loaded, vocabulary, config.num_draft_steps, Chat(folder).decode)
        if held_out.questions:
            asked = Asked.of(
                held_out.questions, Chat(folder), config.models.max_length - config.max_tokens
            )
            if config.predict.costs is not None:
                read_costs(config.predict.costs)
            models = Models.load(folder, head, config.models)
        return cls(config, held_out.features, chains, models, asked)

    def done(self, track: Track) -> dict[str, Any]:
        """The content of eval.json. Raises EmptyInputError where there is no round to tell of."""
        told: dict[str, Any] = {}
        if self.source is not None and self.chains is not None:
            count(self.chains, self.source, self.config.batch_tokens, track)
            told = self.chains.to_json()
        if self.models is not None and self.asked is not None:
            told = {**of_prompts(self.config, self.models, self.asked, track), **told}
        return told


def count(chains: Chains, source: FeatureSource, batch_tokens: int, track: Track) -> None:
    """All samples of the source. Raises EmptyInputError where no answer has two tokens."""
    done = 0
    for samples in source.batches(plan_batches(source.lengths, batch_tokens, "eval")):
        chains.add(samples)
        done += len(samples)
        track(done, len(source), f"tau {chains.tau:.3f}")
    if chains.rounds == 0:
        raise EmptyInputError(
            "the held-out features hold no answer of two tokens or more",
            "capture with more prompts",
        )


def of_prompts(config: EvalConfig, models: Models, asked: Asked, track: Track) -> dict[str, Any]:
    """The part of eval.json that prompts give. Raises EmptyInputError where nothing was drafted."""
    speculations = [speculating(tree) for tree in config.trees]
    ways = [
        (speculation, temperature)
        for temperature in config.temperatures
        for speculation in speculations
    ]
    served = serve(models, asked, ways, (config.max_tokens, config.seed), track)
    trees = [one.to_json(asked, models.t2d_V) for one in served]
    if not trees[0]["rounds"]:
        hint = "give prompts with longer answers, or a fixed tree first"
        raise EmptyInputError(f"no round of {trees[0]['speculation']} drafted anything", hint)
    told = {**trees[0], **in_short(config, trees), "left_out": asked.num_left_out}
    if config.predict.concurrencies:
        requests = asked.requests(config.max_tokens, config.temperatures[0], config.seed)
        told["predicted"] = predict(config.predict, models, speculations, requests, track)
    return told


def in_short(config: EvalConfig, trees: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the first of the trees is told with, and the trees."""
    return {
        "tau_by_source": {name: one["tau"] for name, one in trees[0]["by_source"].items()},
        "assumes": f"{trees[0]['speculation']} in {config.models.dtype} at temperature "
        f"{trees[0]['temperature']:g}",
        "dtype": config.models.dtype,
        "trees": list(trees),
        "temperatures": list(config.temperatures),
        "languages": sorted(trees[0]["by_language"]),
    }
