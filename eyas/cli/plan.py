"""`eyas plan`: what a run needs before anything runs: tokens, bytes and room."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from eyas.artifact import Artifact
from eyas.cli.options import JsonAlone, read_run_file
from eyas.cli.run import RunConfig, refuse_target
from eyas.log import size_text
from eyas.plan.needs import (
    Plan,
    filler_prompts,
    plan_run,
    read_prompts,
    refuse_without_room,
    source_prompts,
)
from eyas.settings import validated


def command(
    run_file: Annotated[Path, typer.Argument(help="run file")],
    prompts: Annotated[
        str | None,
        typer.Option(help="output of `eyas prompts`, counted through the target's template"),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="count this many filler prompts of one turn, and no sources"),
    ] = None,
    characters: Annotated[int, typer.Option(min=1, help="length of a filler prompt")] = 400,
    answer_tokens: Annotated[
        int | None, typer.Option(min=1, help="mean tokens of an answer; else max_tokens")
    ] = None,
    as_json: JsonAlone = False,
) -> None:
    """Count the tokens and bytes of a run; exit code 2 when the disk is too small, or when `eyas
    run` cannot serve the target (single stages may not need to).
    """
    config = validated(RunConfig, read_run_file(run_file), str(run_file))
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
        _show(plan, str(run_file))
        if num_prompts and not prompts:
            print(f"of filler prompts of {characters} characters")
        elif not prompts:
            print("of all rows of the sources; --prompts counts those that `eyas prompts` kept")
    refuse_without_room(plan.room, config.output)
    refuse_target(config)


def _show(plan: Plan, title: str) -> None:
    table = Table("needed at most", "", title=title)
    for name in ("prompts", "answers", "prompt_tokens", "answer_tokens", "feature_tokens"):
        label = name.replace("_tokens", "s, tokens").replace("_", " ")
        table.add_row(label, f"{getattr(plan.needs, name):,}")
    for name in ("answers", "features", "head"):
        label = "head and its checkpoints" if name == "head" else name
        table.add_row(f"{label} on disk", size_text(getattr(plan.room, name)))
    for codec, size in plan.bytes_by_codec.items():
        own = " (this run's)" if codec == plan.codec else ""
        table.add_row(f"features by codec {codec}{own}", size_text(size))
    free = plan.room.free
    shown = "not known (an object store)" if free is None else size_text(free)
    table.add_row("free on disk", shown)
    Console().print(table)
