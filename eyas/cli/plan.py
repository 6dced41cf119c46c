"""`eyas plan`: what a run needs before anything runs: tokens, bytes and room. With --forecast: the
tau of more data, from runs on shares of it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from eyas.artifact import Artifact
from eyas.cli.options import read_run_file
from eyas.cli.run import RunConfig, refuse_target
from eyas.errors import ConfigError
from eyas.log import size_text
from eyas.plan.forecast import CurvePoint, TauForecast, forecast, read_runs
from eyas.plan.needs import (
    Plan,
    filler_prompts,
    plan_run,
    read_prompts,
    refuse_without_room,
    source_prompts,
)
from eyas.settings import validated

MULTIPLES = (2, 4, 8, 16)  # of the largest run's data


def command(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="RUN_FILE | RUN...", help="run file; with --forecast, runs"),
    ],
    prompts: Annotated[
        str | None,
        typer.Option(help="finished prompts artifact, counted through the target's template"),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            min=1, help="filler prompts of one turn in place of those of the run file's sources"
        ),
    ] = None,
    characters: Annotated[int, typer.Option(min=1, help="in a filler prompt")] = 400,
    answer_tokens: Annotated[
        int | None, typer.Option(min=1, help="mean of an answer, if known; else max_tokens")
    ] = None,
    foresee: Annotated[
        bool,
        typer.Option(
            "--forecast",
            help="tau of more data, from outputs of `eyas train -s data_share=...`, three or more",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, and nothing else")] = False,
) -> None:
    """Count what a run file will need; exit code 2 when its output has no room for it, or when
    `eyas run` cannot serve its target (the stages one by one may do without).

    With --forecast: what tau becomes with 2 to 16 times the data, from runs that differ only in
    data_share; exit code 2 when these allow no forecast.
    """
    if foresee:
        points = read_runs(paths)
        most = max(one.answer_tokens for one in points)
        show_forecast(points, forecast(points, [most * times for times in MULTIPLES]), as_json)
        return
    if len(paths) > 1:
        raise ConfigError("a plan is of one run file", "give one, or --forecast with runs")
    config = validated(RunConfig, read_run_file(Path(paths[0])), paths[0])
    if prompts:
        count, sample = read_prompts(Artifact(prompts))
    elif num_prompts:
        count, sample = num_prompts, filler_prompts(num_prompts, characters)
    else:
        count, sample = source_prompts(config.prompts)
    plan = plan_run(config.planned(config.output), count, sample, answer_tokens)
    if as_json:
        print(json.dumps(plan.to_json(), indent=1))
    else:
        show(plan, paths[0])
        if num_prompts and not prompts:
            print(f"of filler prompts of {characters} characters")
        elif not prompts:
            print("of all rows of the sources; --prompts counts those that `eyas prompts` kept")
    refuse_without_room(plan.room, config.output)
    refuse_target(config.target)


def show(plan: Plan, title: str) -> None:
    """Print the plan as a table."""
    table = Table("needed at most", "", title=title)
    for name in ("prompts", "answers", "prompt_tokens", "answer_tokens", "feature_tokens"):
        table.add_row(name.replace("_", " "), f"{getattr(plan.needs, name):,}")
    for name in ("answers", "features", "head"):
        table.add_row(f"bytes of {name}", size_text(getattr(plan.room, name)))
    for codec, size in plan.bytes_by_codec.items():
        own = " (this run's)" if codec == plan.codec else ""
        table.add_row(f"features with codec {codec}{own}", size_text(size))
    free = plan.room.free
    table.add_row("free", "not known (an object store)" if free is None else size_text(free))
    Console().print(table)


def show_forecast(points: list[CurvePoint], foreseen: list[TauForecast], as_json: bool) -> None:
    """Print the runs and what more data brings."""
    if as_json:
        runs = [
            {"run": one.url, "answer_tokens": one.answer_tokens, "tau": one.tau} for one in points
        ]
        forecasts = [dataclasses.asdict(one) for one in foreseen]
        print(json.dumps({"runs": runs, "forecasts": forecasts}, indent=1))
        return
    table = Table("", "answer tokens", "tau (95 %)", "gain (95 %)", title="tau by data")
    for run in points:
        interval = run.interval or (run.tau, run.tau)
        table.add_row("measured", f"{run.answer_tokens:,}", _within(run.tau, interval), "")
    for one in foreseen:
        table.add_row(
            "forecast",
            f"{one.answer_tokens:,}",
            _within(one.tau, one.interval),
            _within(one.gain, one.gain_interval),
        )
    Console().print(table)
    print("for more data of the same kind and the same settings; chains, held-out conversations")
    if len(foreseen) < len(MULTIPLES):
        print("beyond, the range of tau is wider than the rise of all runs")


def _within(value: float, interval: tuple[float, float]) -> str:
    return f"{value:.2f} ({interval[0]:.2f} to {interval[1]:.2f})"
