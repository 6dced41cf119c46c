"""The eval stage: tau of a head on held-out answers and prompts, in eval.json.

features    chains and, without prompts, trees along `capture`'s answers   -> tau, ..., trees
prompts     trees at several temperatures, by the engine                   -> trees
against     the same of another head, and the change of tau                -> against
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from eyas.artifact import Artifact, Manifest, identity
from eyas.chat import Chat
from eyas.engine.tree import Speculation
from eyas.errors import ConfigError, EmptyInputError, MismatchError
from eyas.evaluate.breakdown import WAYS, AnswerCounts
from eyas.evaluate.comparison import FEW, compare
from eyas.evaluate.trees import (
    EvalPrompt,
    Models,
    ModelsConfig,
    PromptSet,
    measure_tree,
    prompts_digest,
)
from eyas.evaluate.walks import GREEDY, AnswerWalks
from eyas.hub import resolve_head, resolve_target
from eyas.lineage import head_manifest
from eyas.log import Track, quiet
from eyas.model.architecture import TargetConfig
from eyas.model.target import resolve_dtype
from eyas.model.threads import threads
from eyas.model.weights import fingerprint
from eyas.operators.decoder import default_device
from eyas.operators.vocab import TargetVocabulary
from eyas.settings import Flag, Settings
from eyas.shards import FeatureSource

DEFAULT_TREES = (str(Speculation("fixed")), "fixed(4,1,5)")  # the engine's default, and a chain
ANSWER_TOKENS = 64  # twenty rounds


class EvalConfig(Settings):
    """What is measured. trees: such as "fixed(6,3,12) auto"; of one branch a chain."""

    num_draft_steps: int = Field(7, ge=1, le=16, description="steps of chains on features")
    trees: Annotated[tuple[str, ...], Flag(separator=" ")] = Field(
        DEFAULT_TREES, min_length=1, description="as for `eyas serve`, fixed or auto"
    )
    temperatures: Annotated[tuple[float, ...], Flag(separator=" ")] = Field(
        (0.0, 1.0), min_length=1, description="of answers; the first one is the headline"
    )
    num_prompts: Annotated[int, Flag()] = Field(
        100, ge=1, description="held-out prompts that are answered"
    )
    max_tokens: int = Field(ANSWER_TOKENS, ge=2, description="tokens of an answer")
    seed: int = Field(0, description="of random draws; the prompt is mixed in")
    models: ModelsConfig = ModelsConfig()
    against: Annotated[str | None, Flag()] = Field(
        None, description="another head, on the same answers"
    )
    tolerance: Annotated[float | None, Flag()] = Field(
        None,
        ge=0,
        lt=1,
        description="with against: share of tau that a source may lose; exit code 3 unless better",
    )

    @field_validator("trees")
    @classmethod
    def _are_trees(cls, trees: tuple[str, ...]) -> tuple[str, ...]:
        parsed = [Speculation.parse(tree) for tree in trees]
        if any(tree.mode == "off" for tree in parsed):
            raise ConfigError(
                "with speculation off there is no tau",
                "give fixed(6,3,12), a chain such as fixed(4,1,5), or auto",
            )
        return tuple(map(str, parsed))

    @field_validator("temperatures")
    @classmethod
    def _are_temperatures(cls, temperatures: tuple[float, ...]) -> tuple[float, ...]:
        if not all(0 <= temperature <= 100 for temperature in temperatures):
            raise ConfigError(
                f"temperatures: {list(temperatures)}", "give numbers from 0 (greedy) to 100"
            )
        return temperatures

    @property
    def max_prompt_tokens(self) -> int:
        """Longer prompts are left out: prompt and answer must fit into models.max_length."""
        return self.models.max_length - self.max_tokens


def evaluate(
    config: EvalConfig,
    target: str,
    head: str,
    output: Artifact,
    features: FeatureSource | None = None,
    prompts: Sequence[EvalPrompt] = (),
    track: Track = quiet,
) -> Manifest:
    """Measure a head on held-out features, on prompts (the first num_prompts), or both.

    target, head: any name that `eyas.hub` resolves. A head worse than config.against is not refused
    here (`comparison.refuse_worse`). Raises MismatchError when head, features and target do not
    belong together, EmptyInputError if no round drafts, ConfigError.
    """
    if features is None and not prompts:
        raise EmptyInputError(
            "there is nothing held out to measure with", "give features, prompts, or both"
        )
    if config.tolerance is not None and config.against is None:
        raise ConfigError("tolerance: there is no other head to compare with", "give --against")
    folder, prompts = resolve_target(target), prompts[: config.num_prompts]
    if prompts:
        models = config.models
        try:
            shape = TargetConfig.from_folder(folder)
        except MismatchError as error:
            raise MismatchError(
                f"{error.what}: it answers no prompts here",
                "give --features alone: let a server answer the prompts (`eyas generate --server "
                "URL`), then `eyas capture` these answers with -s held_out_share=0.99",
            ) from error
        dtype = resolve_dtype(models.dtype, shape)
        models = models.model_copy(update={"dtype": dtype})
        config = config.model_copy(update={"models": models})
        # the other head is an input, and the tolerance judges the result
        settings = config.model_dump(mode="json", exclude={"against", "tolerance"})
        settings["prompts"] = prompts_digest(prompts)
        settings["target_fingerprint"] = fingerprint(folder)
    else:
        settings = config.model_dump(mode="json", include={"num_draft_steps", "trees"})
    inputs = {"head": head_manifest(head, {}), **(features.inputs if features is not None else {})}
    if config.against is not None:
        inputs["against"] = head_manifest(config.against, {})
    work = identity("eval", settings, inputs)
    if output.is_done_for(work):
        return output.manifest("eval")
    with ExitStack() as stack:
        # weights are laid out for the number of threads at loading
        stack.enter_context(threads(config.models.threads))
        new = HeadMeasurement(config, folder, head, features, prompts)
        other = None
        if config.against is not None:
            first = {"trees": config.trees[:1], "temperatures": config.temperatures[:1]}
            headline = config.model_copy(update=first)
            other = HeadMeasurement(headline, folder, config.against, features, prompts)
        # not before: refused inputs leave no folder
        if not stack.enter_context(output.begun(work)):
            return output.manifest("eval")
        result, answers = new.measure(track)
        if other is not None:
            _, others = other.measure(track)
            result |= {"against_head": config.against, "against": compare(others, answers)}
        output.write_json("eval.json", result)
        named = ("answers", "tokens", "rounds")
        facts = {name: result[name] for name in ("tau", "tau_interval", "accept_hist")}
        if warnings := list(cautions(result, config, len(prompts))):
            facts["warnings"] = warnings
        return output.finish("eval", settings, inputs, {one: result[one] for one in named}, facts)


def cautions(result: Mapping[str, Any], config: EvalConfig, num_prompts: int) -> Iterator[str]:
    """Warnings: few prompts, and what was asked for and is not measured."""
    counts = {source: one["prompts"] for source, one in result.get("against", {}).items()}
    if few := [f"{number} ({source})" for source, number in counts.items() if number < FEW]:
        yield (
            f"the comparison rests on few prompts, {', '.join(few)}: another {FEW} may decide "
            "otherwise; measure on more prompts (num_prompts, capture.held_out_share)"
        )
    if left_out := result.get("left_out"):
        yield (
            f"{left_out} of {num_prompts} prompts are not measured: longer than "
            f"{config.max_prompt_tokens} tokens (models.max_length less max_tokens), or refused "
            "by the chat template"
        )
    drawn = result.get("answers_temperature")
    others = [f"{one:g}" for one in config.temperatures if one != drawn]
    if not num_prompts and others:
        how = "in several ways" if drawn is None else f"at temperature {drawn:g}"
        yield (
            f"temperature {', '.join(others)} is not measured: the answers of these features were "
            f"drawn {how}; give --prompts, or features of other answers (generate's `sampling`)"
        )
    if result.get("answers_temperature") == 0 and result["greedy_share"] < GREEDY:
        yield (
            f"the answers are greedy, yet {1 - result['greedy_share']:.1%} of their tokens are not "
            "the target's best by the features: another precision answered than computed them"
        )


class HeadMeasurement:
    def __init__(
        self,
        config: EvalConfig,
        folder: str,
        head: str,
        features: FeatureSource | None,
        prompts: Sequence[EvalPrompt],
    ) -> None:
        """Raises what loading raises, and EmptyInputError if no prompt can be asked."""
        files = Path(resolve_head(head))
        self._config, self._chat, self._features = config, Chat(folder), features
        self._models: Models | None = None
        if prompts:
            self._prompts = PromptSet.of(prompts, self._chat, config.max_prompt_tokens)
            self._models = Models.load(folder, files, config.models)
        if features is not None:
            vocabulary = TargetVocabulary.load(folder).to(default_device())
            trees = () if prompts else config.trees
            given = vocabulary, files, trees, config.num_draft_steps, features
            self._on_features = AnswerWalks.load(*given)

    def measure(self, track: Track) -> tuple[dict[str, Any], list[AnswerCounts]]:
        """eval.json's content, and the counts of the answers: of the first tree at the first
        temperature or, without prompts, of the chains. Raises EmptyInputError if nothing drafts.
        """
        result: dict[str, Any] = {}
        answers: list[AnswerCounts] = []
        if self._features is not None:
            result = self._on_features.measure(self._features, self._chat, track)
            answers = self._on_features.of_chain
        if self._models is not None:
            measured = list(self._on_prompts(self._models, track))
            answers, trees = measured[0][1], [one for one, _ in measured]
            first, config = trees[0], self._config
            if not first["rounds"]:
                raise EmptyInputError(
                    f"no round of {first['speculation']} drafted anything",
                    "give prompts with longer answers, or a fixed tree first",
                )
            result = {
                **first,
                "assumes": f"{first['speculation']} in {config.models.dtype} at temperature "
                f"{first['temperature']:g}",
                "dtype": config.models.dtype,
                "trees": trees,
                "temperatures": list(config.temperatures),
                "languages": sorted(first["by_language"]),
                "left_out": self._prompts.num_left_out,
                **result,
                "ways": {**result.get("ways", {}), "trees": WAYS["engine"]},
            }
        return result, answers

    def _on_prompts(
        self, models: Models, track: Track
    ) -> Iterator[tuple[dict[str, Any], list[AnswerCounts]]]:
        """An entry and the counts of its answers, by temperature and tree."""
        config, prompts, count = self._config, self._prompts, len(self._config.temperatures)
        for number, temperature in enumerate(config.temperatures):
            requests = prompts.requests(config.max_tokens, temperature, config.seed)
            for place, name in enumerate(config.trees, number * len(config.trees)):
                bar = _part_of(track, place, count * len(config.trees))
                tree = Speculation.parse(name)
                yield measure_tree(models, prompts, tree, requests, bar)


def _part_of(track: Track, number: int, count: int) -> Track:
    def moved(done: int, total: int | None = None, note: str = "") -> None:
        track(number * (total or 0) + done, count * total if total else None, note)

    return moved
