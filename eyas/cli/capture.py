"""`eyas capture`: conversations -> feature shards."""

from __future__ import annotations

from typing import Annotated

import typer

from eyas.artifact import Artifact
from eyas.cli.options import Output, Overrides, RunFile, TargetOption, stage_config
from eyas.cli.stage import stage
from eyas.features.capture import CaptureConfig, capture

CONFIG = CaptureConfig


def command(
    answers: Annotated[str, typer.Argument(help="output of `eyas generate`")],
    target: TargetOption,
    output: Output,
    server: Annotated[
        list[str] | None,
        typer.Option(
            help="address of a vLLM or SGLang server that gives hidden states of the target; "
            "several may be given"
        ),
    ] = None,
    run_file: RunFile = None,
    overrides: Overrides = None,
) -> None:
    """Store the target's three taps and last hidden state for every token of finished answers.

    Any causal language model that transformers knows can be captured; those that eyas serves, by
    its own decoder; or by servers (vLLM, SGLang), which are proved on some of the samples first.
    Workers on a Ray cluster share the work: -s executor=ray -s workers=10.
    vLLM's files of states are read from a folder that it shares with this process.
    """
    options = {"target": target, "servers": server or None}
    config = stage_config(CaptureConfig, "capture", run_file, overrides, **options)
    artifact = Artifact(output)
    with stage("capture", artifact) as track:
        capture(config, Artifact(answers), artifact, track)
