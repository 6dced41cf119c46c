"""`eyas train`: features -> head."""

from __future__ import annotations

from typing import Annotated

import typer

from eyas.artifact import Artifact
from eyas.cli.options import Output, Overrides, RunFile, Target, stage_config
from eyas.cli.stage import perform
from eyas.train.trainer import TrainConfig, train

CONFIG = TrainConfig


def command(
    features: Annotated[str, typer.Argument(help="output of `eyas capture`")],
    target: Target,
    output: Output,
    run_file: RunFile = None,
    overrides: Overrides = None,
) -> None:
    """Train a head on captured features; interrupted, it resumes from its last checkpoint."""
    config = stage_config(TrainConfig, "train", run_file, overrides)
    perform("train", Artifact(output), lambda artifact, track: train(config, target, Artifact(features), artifact, track))
