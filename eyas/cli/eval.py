"""`eyas eval`: a head on what it has not seen -> tau, before a server runs it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from eyas.artifact import Artifact
from eyas.bench.workload import read_tasks, task_of
from eyas.chat.chat import Messages
from eyas.cli.options import (
    AsJson,
    HeadArgument,
    Output,
    StageOptions,
    TargetOption,
    print_json,
    with_flags,
)
from eyas.cli.stage import stage
from eyas.errors import ConfigError
from eyas.evaluate.comparison import ALL, described, refuse_worse
from eyas.evaluate.evaluate import EvalConfig
from eyas.evaluate.evaluate import evaluate as measure
from eyas.evaluate.trees import EvalPrompt
from eyas.lineage import target_of
from eyas.log import quiet
from eyas.settings import validated
from eyas.shards import Features

CONFIG = EvalConfig


@with_flags(CONFIG)
def command(
    head: HeadArgument,
    target: TargetOption,
    output: Output,
    features: Annotated[
        str | None,
        typer.Option(
            help="output of `eyas capture`: chains on its held-out answers and, without prompts, "
            "trees; the target is not run"
        ),
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="held-out prompts or conversations, JSON lines, as for bench")
    ] = None,
    as_json: AsJson = False,
    *,
    stated: StageOptions,
) -> None:
    """Measure tau with its interval, by source, language, tree and temperature.

    By default on 100 prompts, answers of 64 tokens, in the default tree and a chain, greedy and at
    temperature 1; more with --num-prompts, --trees, --temperatures and -s max_tokens=N. Of a target
    that eyas' own engine does not run: --features alone.
    """
    if features is None and prompts is None:
        raise ConfigError(
            "there is nothing to measure with",
            "give --prompts FILE, or --features, the output of `eyas capture`",
        )
    config = stated.config(EvalConfig, "eval")
    found = evaluate(head, prompts, target=target, features=features, output=output, **dict(config))
    show_table(found.result)
    print_json({**headline(found.result), "output": output}, as_json)
    judge(found.result, config)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """tau: tokens per round, by the first tree at the first temperature or, with features alone, by
    chains. tau_interval: 95 %, resampled by prompt; None for too few prompts. accept_hist[a] counts
    the rounds that accepted a drafts. result: all of eval.json.
    """

    tau: float
    tau_interval: tuple[float, float] | None
    accept_hist: list[int]
    result: dict[str, Any]


def evaluate(
    head: str | os.PathLike[str],
    prompts: str | os.PathLike[str] | Sequence[str | Messages] | None = None,
    *,
    target: str | os.PathLike[str] | None = None,
    features: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    progress: bool = True,
    **settings: Any,
) -> Evaluation:
    """Measure a head on what it was not trained on, before a server runs it.

    head: a folder or URL in any form, a hub id, "smollm2". prompts: a file of JSON lines, as for
    `eyas bench`, of which num_prompts are drawn; or a list of texts or conversations. target: any
    name of the model; None: the one that the head was trained for. features: output of `eyas
    capture`, for chains on its held-out answers. output: a folder or URL for eval.json. progress:
    on stderr. settings: EvalConfig's fields (docs/settings.md).

    Raises ConfigError, MissingInputError, EmptyInputError, MismatchError (a head of another
    target).
    """
    if prompts is not None and not isinstance(prompts, str | os.PathLike):
        settings = {"num_prompts": max(1, len(prompts)), **settings}
    config = validated(EvalConfig, settings, "eval")
    name = target_of(str(head)) if target is None else str(target)
    questions = eval_prompts(prompts, config) if prompts is not None else ()
    source = Features(Artifact(str(features)), "held_out") if features is not None else None
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory()) if output is None else str(output)
        artifact = Artifact(folder)
        track = stack.enter_context(stage("eval", artifact)) if progress else quiet
        measure(config, name, str(head), artifact, source, questions, track)
        result = artifact.read_json("eval.json")
    ends = result["tau_interval"]
    return Evaluation(result["tau"], ends and tuple(ends), result["accept_hist"], result)


def eval_prompts(
    prompts: str | os.PathLike[str] | Sequence[str | Messages], config: EvalConfig
) -> list[EvalPrompt]:
    """Prompts of a list, or those that `eyas bench` draws from a file by the same seed."""
    if isinstance(prompts, str | os.PathLike):
        tasks = read_tasks(str(prompts), config.num_prompts, config.seed)
    else:
        rows = [{"turns": [one]} if isinstance(one, str) else {"messages": one} for one in prompts]
        tasks = [task_of(row, number, "prompts") for number, row in enumerate(rows)]
    return [EvalPrompt(task.prompt_id, task.category, task.messages) for task in tasks]


def judge(result: dict[str, Any], config: EvalConfig) -> None:
    """Raise WorseHeadError for a head that is worse than config.against by config.tolerance."""
    if config.tolerance is not None:
        refuse_worse(result["against"], config.tolerance)


def headline(result: dict[str, Any]) -> dict[str, Any]:
    """tau with its interval, of all and of each tree and temperature."""
    names = "speculation", "temperature", "tau", "tau_interval", "tau_ceiling", "expected_tau"
    return {
        "tau": result["tau"],
        "tau_interval": result["tau_interval"],
        "accept_hist": result["accept_hist"],
        "trees": [
            {name: one[name] for name in names if name in one} for one in result.get("trees", [])
        ],
        "ways": result.get("ways", {}),
        "against": result.get("against"),
    }


def eval_figures(result: dict[str, Any]) -> dict[str, Any]:
    """tau of the first tree with its interval, for a run's last line."""
    first = (result.get("trees") or [result])[0]
    return {"tau_eval": first["tau"], "tau_interval": first["tau_interval"]}


def in_one_line(result: dict[str, Any]) -> str:
    """`eval_figures`, for people."""
    first = (result.get("trees") or [result])[0]
    how = first.get("speculation", f"a chain of {result['num_draft_steps']}")
    return f"eval, before serving: tau {first['tau']:.2f} ({_interval(first)}) with {how}"


def show_table(result: dict[str, Any]) -> None:
    """Print tau of all that was measured, and of parts."""
    out = Console()
    measured = Table(
        *("", "tau", "95 %", "ceiling", "acceptance by position", "answers"),
        title="tokens per round",
    )
    if "tau_by_num_draft_steps" in result:
        measured.add_row(f"chain of {result['num_draft_steps']}, on features", *_cells(result))
    for one in result.get("trees", []):
        drawn = one["temperature"]
        how = "as sampled" if drawn is None else f"temperature {drawn:g}"
        measured.add_row(f"{one['speculation']}, {how}", *_cells(one))
    out.print(measured)
    expected = [
        f"{one['expected_tau']:.2f} with {one['speculation']} at {one['temperature']:g}"
        for one in result.get("trees", [])
        if "expected_tau" in one
    ]
    if expected:
        out.out(
            "sampled, tau expected over all that the target could have drawn: "
            f"{', '.join(expected)}. So do servers accept that draft the likeliest tokens (SGLang, "
            "vLLM); our own engine guesses the draws and accepts more."
        )
    for what, way in result.get("ways", {}).items():
        out.out(f"{what}: {way}")
    for name in ("source", "language"):
        parts = result[f"by_{name}"]
        if len(parts) < 2:
            continue
        table = Table(name, "tau", "95 %", "answers", "rounds")
        for value, one in parts.items():
            counts = str(one["answers"]), str(one["rounds"])
            table.add_row(value or "-", f"{one['tau']:.2f}", _interval(one), *counts)
        out.print(table)
    out.print(
        f"{result['draft_vocabulary_coverage']:.1%} of the answers' tokens are in the draft "
        f"vocabulary: tau is at most {result['tau_ceiling']:.2f} (with a full vocabulary "
        f"{result['tau_ceiling_full_vocabulary']:.2f})"
    )
    for line in comparison_lines(result):
        out.out(line)


def comparison_lines(result: dict[str, Any]) -> list[str]:
    """The comparison with another head: a line for all answers and one for each source."""
    head, changes = result.get("against_head"), result.get("against", {})
    return [
        f"against {head}, {'all answers' if source == ALL else source}: {described(one)}"
        for source, one in changes.items()
        if source == ALL or len(changes) > 2
    ]


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    positions = " ".join(f"{share:.2f}" for share in one["acceptance_by_position"])
    tau, ceiling = f"{one['tau']:.2f}", f"{one['tau_ceiling']:.2f}"
    return tau, _interval(one), ceiling, positions, str(one["answers"])


def _interval(one: dict[str, Any]) -> str:
    interval = one["tau_interval"]
    return "-" if interval is None else f"{interval[0]:.2f} - {interval[1]:.2f}"
