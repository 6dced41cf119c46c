"""`eyas plan`: what a run needs before anything runs: tokens, bytes by codec, room, hours by stage,
and what a store costs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from eyas.artifact import Artifact
from eyas.cli.options import read_run_file, validated
from eyas.cli.run import RunConfig
from eyas.plan.estimate import SECONDS, Estimate, Planner, refuse_without_room
from eyas.plan.needs import filler_prompts, read_prompts
from eyas.plan.speeds import DEVICES, Speeds, stated

COUNTED = {"generate": "of answers", "capture": "of samples", "train": "of samples, every epoch"}


def command(
    run_file: Annotated[Path, typer.Argument(help="run file")],
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
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, and nothing else")] = False,
) -> None:
    """Tell what a run file will need; exit code 2 when its output has no room for it.

    Stated speeds come before measured ones, and these before estimates from published peaks.
    """
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
