"""`eyas generate`: prompts -> conversations answered by the target."""

from __future__ import annotations

from typing import Annotated

import typer

from eyas.artifact import Artifact
from eyas.cli.options import Output, Overrides, RunFile, Target, stage_config
from eyas.cli.stage import perform
from eyas.features.generate import GenerateConfig, generate

CONFIG = GenerateConfig


def command(
    prompts: Annotated[str, typer.Argument(help="output of `eyas prompts`")],
    target: Target,
    output: Output,
    run_file: RunFile = None,
    overrides: Overrides = None,
) -> None:
    """Let the target answer every user turn, with its own chat template; one row per assistant turn."""
    config = stage_config(GenerateConfig, "generate", run_file, overrides, target=target)
    perform("generate", Artifact(output), lambda artifact, track: generate(config, Artifact(prompts), artifact, track))
