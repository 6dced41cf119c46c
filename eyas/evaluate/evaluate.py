"""The eval stage: what a head brings on answers and prompts that it has not seen, in eval.json.

features    chains, on the answers that `capture` held out; no target runs          -> tau, ...
prompts     trees at several temperatures, through the engine                       -> trees
            with the costs of forwards from an `eyas bench`: speed-up by load       -> predicted
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from eyas.artifact import Artifact, Manifest, identity
from eyas.chat import Chat
from eyas.engine.tree import Speculation
from eyas.errors import ConfigError, EmptyInputError
from eyas.evaluate.chains import Chains
from eyas.evaluate.speedup import DraftCost, predictions, read_bench
from eyas.evaluate.trees import (
    EvalPrompt,
    Models,
    ModelsConfig,
    PromptSet,
    measure_tree,
    prompts_digest,
    torch_threads,
)
from eyas.hub import resolve_head, resolve_target
from eyas.lineage import head_manifest
from eyas.log import Track, quiet
from eyas.model.config import TargetConfig
from eyas.model.target import resolve_dtype
from eyas.model.weights import fingerprint
from eyas.shards import FeatureSource

DEFAULT_TREES = ("fixed(6,3,12)", "fixed(4,1,5)")  # the engine's own sizes, and a chain
ANSWER_TOKENS = 64  # of each answer: enough for twenty rounds


class EvalConfig(BaseModel):
    """Settings of the eval stage.

    Chains on features: num_draft_steps. Prompts through the engine: trees as `eyas serve` takes
    them, fixed(num_draft_steps,tree_topk,num_verify_tokens) with one branch for a chain, or auto;
    the first tree at the first temperature gives the headline, and the first temperature the
    speed-ups. By default what is worth its time: 400 short answers, as the interval of tau is over
    prompts. costs: a finished `eyas bench` with an arm that does not speculate, of any engine;
    draft_step_ms: a draft step there, where it is known (else it follows from the weights).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_draft_steps: int = Field(7, ge=1, le=16)
    trees: tuple[str, ...] = Field(DEFAULT_TREES, min_length=1)
    temperatures: tuple[float, ...] = Field((0.0, 1.0), min_length=1)
    num_prompts: int = Field(100, ge=1)
    max_tokens: int = Field(ANSWER_TOKENS, ge=2)
    seed: int = 0
    models: ModelsConfig = ModelsConfig()
    costs: str | None = None
    draft_step_ms: float | None = Field(None, ge=0)

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

    target, head: any name that `eyas.hub` resolves. Writes eval.json. Raises MismatchError when
    head, features and target do not belong together, EmptyInputError where no round drafts,
    ConfigError for costs without a plain arm.
    """
    if features is None and not prompts:
        raise EmptyInputError(
            "there is nothing held out to measure with", "give features, prompts, or both"
        )
    if config.costs is not None and not prompts:
        raise ConfigError("costs are for trees, which take prompts", "give prompts")
    folder, files = resolve_target(target), Path(resolve_head(head))
    prompts = prompts[: config.num_prompts]
    if prompts:  # what "auto" stands for on this machine
        models = config.models
        dtype = resolve_dtype(models.dtype, TargetConfig.from_folder(folder), models.device)
        models = models.model_copy(update={"dtype": dtype})
        config = config.model_copy(update={"models": models})
    settings = described(config, folder, prompts)
    inputs = {"head": head_manifest(head, {}), **(features.inputs if features is not None else {})}
    work = identity("eval", settings, inputs)
    if output.is_done_for(work):
        return output.manifest("eval")
    # Weights are laid out for the number of threads that there is when they are loaded.
    with torch_threads(config.models.threads):
        chains = trees = None
        if features is not None:
            chains = Chains.load(folder, files, features, config.num_draft_steps)
        if prompts:
            trees = TreeMeasurement(config, folder, files, prompts)
        output.begin(work)  # not before: what does not fit takes no folder
        of_features = chains.measure(Chat(folder), track) if chains else {}
        result = {**(trees.measure(track) if trees else {}), **of_features}
    output.write_json("eval.json", result)
    counts = {"answers": result["answers"], "tokens": result["tokens"], "rounds": result["rounds"]}
    facts = {name: result[name] for name in ("tau", "tau_interval", "accept_hist")}
    return output.finish("eval", settings, inputs, counts, facts)


def described(config: EvalConfig, folder: str, prompts: Sequence[EvalPrompt]) -> dict[str, Any]:
    """The settings that decide on the result, with contents in place of paths."""
    if not prompts:
        return config.model_dump(mode="json", include={"num_draft_steps"})
    settings = config.model_dump(mode="json")
    if config.costs is not None:
        settings["costs"] = Artifact(config.costs).manifest("bench").identity
    return {
        **settings,
        "prompts": prompts_digest(prompts),
        "target_fingerprint": fingerprint(folder),
    }


class TreeMeasurement:
    """Models, prompts and costs of forwards, loaded to measure trees with."""

    def __init__(
        self, config: EvalConfig, folder: str, head: Path, prompts: Sequence[EvalPrompt]
    ) -> None:
        """Raises what loading raises, and EmptyInputError where no prompt can be asked."""
        self._config = config
        self._prompts = PromptSet.of(
            prompts, Chat(folder), config.models.max_length - config.max_tokens
        )
        self._bench = read_bench(config.costs) if config.costs is not None else None
        self._models = Models.load(folder, head, config.models)

    def measure(self, track: Track) -> dict[str, Any]:
        """The part of eval.json that prompts give. Raises EmptyInputError where nothing drafts."""
        config, measured = self._config, list[dict[str, Any]]()
        for temperature in config.temperatures:
            requests = self._prompts.requests(config.max_tokens, temperature, config.seed)
            for name in config.trees:
                bar = _part_of(track, len(measured), len(config.temperatures) * len(config.trees))
                tree = Speculation.parse(name)
                measured.append(measure_tree(self._models, self._prompts, tree, requests, bar))
        first = measured[0]
        if not first["rounds"]:
            raise EmptyInputError(
                f"no round of {first['speculation']} drafted anything",
                "give prompts with longer answers, or a fixed tree first",
            )
        result = {
            **first,
            "tau_by_source": {name: one["tau"] for name, one in first["by_source"].items()},
            "assumes": f"{first['speculation']} in {config.models.dtype} at temperature "
            f"{first['temperature']:g}",
            "dtype": config.models.dtype,
            "trees": measured,
            "temperatures": list(config.temperatures),
            "languages": sorted(first["by_language"]),
            "left_out": self._prompts.num_left_out,
        }
        return result if self._bench is None else {**result, "predicted": self._predicted(measured)}

    def _predicted(self, measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
        assert self._bench is not None
        curve, source = self._bench
        draft = DraftCost(self._models.weights_share, self._config.draft_step_ms)
        temperature = self._config.temperatures[0]
        taus = [
            (Speculation.parse(one["speculation"]), one["tau"])
            for one in measured
            if one["temperature"] == temperature
        ]
        return {
            "by_concurrency": predictions(curve, draft, taus),
            "temperature": temperature,
            "draft_step_ms": draft.step_ms,
            "draft_weights_share": draft.weights_share,
            **source,
        }


def _part_of(track: Track, number: int, count: int) -> Track:
    """A Track for one of `count` equal parts of the work."""

    def moved(done: int, total: int | None = None, note: str = "") -> None:
        track(number * (total or 0) + done, count * total if total else None, note)

    return moved
