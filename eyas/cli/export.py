"""`eyas export`: head -> SGLang and vLLM forms."""

from __future__ import annotations

from typing import Annotated

import typer

from eyas.artifact import Artifact
from eyas.cli.options import Output, Overrides, RunFile, Target, stage_config
from eyas.cli.stage import perform
from eyas.export.export import ExportConfig, export

CONFIG = ExportConfig


def command(
    head: Annotated[str, typer.Argument(help="output of `eyas train`")],
    target: Target,
    output: Output,
    run_file: RunFile = None,
    overrides: Overrides = None,
) -> None:
    """Write a head in the forms that SGLang and vLLM load, with the commands that launch them."""
    config = stage_config(ExportConfig, "export", run_file, overrides)
    perform("export", Artifact(output), lambda artifact, track: export(config, target, Artifact(head), artifact, track))
