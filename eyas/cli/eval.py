"""`eyas eval`: head + held-out features -> tau per position, before any server runs."""

from __future__ import annotations

from typing import Annotated

import typer

from eyas.artifact import Artifact, Manifest
from eyas.cli.options import Output, Overrides, RunFile, Target, stage_config
from eyas.cli.stage import perform
from eyas.evaluate import EvalConfig, evaluate
from eyas.log import Track

CONFIG = EvalConfig


def command(
    head: Annotated[str, typer.Argument(help="output of `eyas train`")],
    features: Annotated[str, typer.Option(help="output of `eyas capture`")],
    target: Target,
    output: Output,
    run_file: RunFile = None,
    overrides: Overrides = None,
) -> None:
    """Measure on held-out features what a head would have accepted, per draft position."""
    config = stage_config(EvalConfig, "eval", run_file, overrides)

    def work(artifact: Artifact, track: Track) -> Manifest:
        return evaluate(config, target, Artifact(head), Artifact(features), artifact, track)

    perform("eval", Artifact(output), work)
