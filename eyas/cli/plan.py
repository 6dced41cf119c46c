"""`eyas plan`: what a run needs before anything runs: tokens, bytes by codec, room, hours by stage,
and what a store costs. With --forecast: the tau of more data, from runs on shares of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from eyas.artifact import Artifact
from eyas.cli.options import read_run_file, validated
from eyas.cli.run import RunConfig
from eyas.errors import ConfigError, EmptyInputError
from eyas.figure import color, svg_file
from eyas.plan.estimate import SECONDS, Estimate, Planner, refuse_without_room
from eyas.plan.learning_curve import (
    FURTHEST,
    LEVEL,
    CurvePoint,
    LearningCurve,
    learning_curve,
    read_runs,
)
from eyas.plan.needs import filler_prompts, read_prompts
from eyas.plan.speeds import DEVICES, Speeds, stated

MULTIPLES = (2, 4, 8, 16)  # of the largest run's data
FOR_FORECAST = {"paths", "forecast", "picture", "as_json"}
COUNTED = {"generate": "of answers", "capture": "of samples", "train": "of samples, every epoch"}


def command(
    context: typer.Context,
    paths: Annotated[
        list[str],
        typer.Argument(metavar="RUN_FILE | RUN...", help="run file; with --forecast, runs"),
    ],
    prompts: Annotated[
        str | None,
        typer.Option(help="finished prompts artifact, counted through the target's template"),
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="without one: how many prompts, of one turn each")
    ] = 1000,
    characters: Annotated[
        int, typer.Option(min=1, help="without one: characters in a prompt")
    ] = 400,
    answer_tokens: Annotated[
        int | None, typer.Option(min=1, help="mean of an answer, if known; else max_tokens")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="measure every stage on this machine for some seconds")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help=f"estimate for these: {', '.join(DEVICES)}")
    ] = None,
    devices: Annotated[int, typer.Option(min=1, help="how many of them")] = 1,
    speed: Annotated[
        list[str] | None,
        typer.Option(metavar="STAGE=N", help="tokens a second, e.g. capture=20000"),
    ] = None,
    price: Annotated[
        float | None, typer.Option(min=0, help="of a GB a month in the store, e.g. 0.023")
    ] = None,
    forecast: Annotated[
        bool,
        typer.Option(
            "--forecast",
            help="tau of more data, from outputs of `eyas train -s data_share=...`, three or more",
        ),
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="with --forecast: the curve, drawn")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, and nothing else")] = False,
) -> None:
    """Tell what a run file will need; exit code 2 when its output has no room for it.

    Stated speeds come before measured ones, and these before estimates from published peaks.

    With --forecast: what tau becomes with 2 to 16 times the data, from runs that differ in
    data_share alone (or folders of them); exit code 2 when these allow no forecast.
    """
    if forecast:
        refuse_other_options(context)
        show_forecast(read_runs(paths), picture, as_json)
        return
    if picture is not None or len(paths) > 1:
        raise ConfigError(
            "a plan is of one run file, and draws no picture",
            "give --forecast with runs of `eyas train`, or one run file",
        )
    run_file = Path(paths[0])
    config = validated(RunConfig, read_run_file(run_file), str(run_file))
    planner = Planner(config.planned(config.output))
    given = stated(speed or [])
    count, sample = (
        read_prompts(Artifact(prompts))
        if prompts
        else (num_prompts, filler_prompts(num_prompts, characters))
    )
    needs = planner.needs(count, sample, answer_tokens)
    speeds: Speeds = {}
    notes: list[str] = [] if prompts else [f"filler prompts of {characters} characters"]
    if prompts and len(sample) < count:
        notes.append(f"{len(sample):,} of {count:,} prompts were counted")
    if device is not None:
        speeds, more = planner.published(device, devices)
        notes += more
    if measure:
        measured, more = planner.measured(sample, needs, SECONDS)
        speeds, notes = {**speeds, **measured}, [*notes, *more]
    estimate = planner.estimate(needs, {**speeds, **given}, notes)
    if as_json:
        cost = {} if price is None else {"cost_per_month": costs(estimate, price)}
        print(json.dumps(estimate.to_json() | cost, indent=1))
    else:
        show(estimate, price, str(run_file))
    refuse_without_room(estimate.room, config.output)


def costs(estimate: Estimate, price: float) -> dict[str, float]:
    """What each codec's features cost in a store for a month, in the price's currency."""
    return {codec: size / 1e9 * price for codec, size in estimate.bytes_by_codec.items()}


def show(estimate: Estimate, price: float | None, title: str) -> None:
    """Print the plan as tables."""
    console, needs, room = Console(), estimate.needs, estimate.room
    table = Table("needed at most", "", title=title)
    for name in ("prompts", "answers", "prompt_tokens", "answer_tokens", "feature_tokens"):
        table.add_row(name.replace("_", " "), f"{getattr(needs, name):,}")
    for name in ("answers", "features", "head"):
        table.add_row(f"bytes of {name}", f"{getattr(room, name) / 1e9:,.3f} GB")
    free = "not known (an object store)" if room.free is None else f"{room.free / 1e9:,.1f} GB"
    table.add_row("free where it writes", free)
    console.print(table)
    codecs = Table("features by codec", "GB", *(["a month"] if price is not None else []))
    for codec, size in estimate.bytes_by_codec.items():
        cost = [f"{costs(estimate, price)[codec]:,.2f}"] if price is not None else []
        codecs.add_row(
            f"{codec} (this run's)" if codec == estimate.codec else codec,
            f"{size / 1e9:,.3f}",
            *cost,
        )
    console.print(codecs)
    times = Table("stage", "hours", "tokens/s", "from")
    for stage, hours in estimate.hours.items():
        known = estimate.speeds[stage]  # type: ignore[index]
        times.add_row(
            stage, f"{hours:,.3g}", f"{known.tokens_per_s:,.0f} {COUNTED[stage]}", known.how
        )
    if estimate.hours:
        console.print(times)
    else:
        console.print("hours: --measure, --device NAME or --speed STAGE=TOKENS_PER_SECOND")
    for note in estimate.notes:
        console.print(f"note: {note}")


# The forecast


def refuse_other_options(context: typer.Context) -> None:
    """Raise ConfigError for options that a forecast has no use for."""
    others = [
        f"--{name.replace('_', '-')}"
        for name in context.params
        if name not in FOR_FORECAST
        and (source := context.get_parameter_source(name)) is not None
        and source.name == "COMMANDLINE"
    ]
    if others:
        raise ConfigError(
            f"--forecast has no use for {', '.join(others)}", "leave it out, or plan a run file"
        )


def show_forecast(points: list[CurvePoint], picture: Path | None, as_json: bool) -> None:
    """Print the runs and what more data will bring, and draw it. Raises EmptyInputError, after the
    runs are printed, when they allow no forecast.
    """
    most = max(one.answer_tokens for one in points)
    curve = learning_curve(points, [most * times for times in MULTIPLES])
    if as_json:
        print(json.dumps(curve.to_json(), indent=1))
    else:
        show_curve(curve)
    if curve.problem:
        raise EmptyInputError(f"no forecast: {curve.problem}", curve.hint)
    if picture is not None:
        least = min(one.answer_tokens for one in points)
        amounts = np.geomspace(least, most * FURTHEST, 48).astype(int).tolist()
        drawn = learning_curve(points, amounts)
        picture.write_text(svg_file(lambda axes: draw(axes, drawn), "tau by answer tokens"))


def show_curve(curve: LearningCurve) -> None:
    """Print the curve as a table."""
    percent = f"{LEVEL:.0%}"
    table = Table("", "answer tokens", "tau", percent, "gain", percent, title="tau by data")
    for one in curve.points:
        low, high = one.interval or (float("nan"), float("nan"))
        table.add_row(
            "measured", f"{one.answer_tokens:,}", f"{one.tau:.2f}", f"{low:.2f} - {high:.2f}"
        )
    largest = max(one.answer_tokens for one in curve.points)
    for foreseen in curve.forecasts:
        (low, high), (least, most) = foreseen.interval, foreseen.gain_interval
        table.add_row(
            f"forecast, {foreseen.answer_tokens // largest} x",
            f"{foreseen.answer_tokens:,}",
            f"{foreseen.tau:.2f}",
            f"{low:.2f} - {high:.2f}",
            f"{foreseen.gain:+.2f}",
            f"{least:+.2f} - {most:+.2f}",
        )
    console = Console()
    console.print(table)
    if curve.forecasts:
        console.print(
            f"in chains of {curve.points[0].num_draft_steps}, on the "
            f"{len(curve.points[0].rounds)} held-out conversations that training measures on; for "
            "more data of the same kind and the same settings"
        )
        if len(curve.forecasts) < len(MULTIPLES):
            console.print("beyond, the range of tau is wider than the rise of all runs")


def draw(axes: Axes, curve: LearningCurve) -> None:
    """Paint the measured runs, and the curve with its interval."""
    most = max(one.answer_tokens for one in curve.points)
    amounts = [one.answer_tokens for one in curve.forecasts]
    axes.set_xscale("log")
    axes.fill_between(
        amounts,
        [one.interval[0] for one in curve.forecasts],
        [one.interval[1] for one in curve.forecasts],
        color=color("series-1"),
        alpha=0.2,
        linewidth=0,
    )
    axes.plot(amounts, [one.tau for one in curve.forecasts], color=color("series-1"))
    axes.plot(
        [one.answer_tokens for one in curve.points],
        [one.tau for one in curve.points],
        "o",
        color=color("series-2"),
    )
    axes.axvline(most, color=color("muted"), linewidth=0.8, linestyle=":")
    axes.set_xlabel("answer tokens")
    axes.set_ylabel("tau")
