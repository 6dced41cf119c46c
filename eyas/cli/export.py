"""`eyas export`: head -> SGLang and vLLM forms."""

from __future__ import annotations

from typing import Annotated

import typer

from eyas.artifact import Artifact
from eyas.cli.options import HeadArgument, Output, StageOptions, TargetOption, with_flags
from eyas.cli.stage import stage
from eyas.export.export import ExportConfig, export, publish
from eyas.hub import locate

CONFIG = ExportConfig


@with_flags(CONFIG)
def command(
    head: HeadArgument,
    target: TargetOption,
    output: Output,
    evaluation: Annotated[
        str | None, typer.Option(help="output of `eyas eval` on this head, for its card")
    ] = None,
    *,
    stated: StageOptions,
) -> None:
    """Write a head in the forms that SGLang and vLLM load, with the commands that launch them."""
    config = stated.config(ExportConfig, "export")
    source = Artifact(locate(head))
    measured = None if evaluation is None else Artifact(evaluation)
    artifact = Artifact(output)
    with stage("export", artifact) as track:
        export(config, target, source, artifact, track, measured)
    if config.publish:
        print(f"published: {publish(artifact, config.publish)}")
