"""`eyas capture`: conversations -> feature shards."""

from __future__ import annotations

from typing import Annotated

import typer

from eyas.artifact import Artifact
from eyas.cli.options import Output, StageOptions, TargetOption, with_flags
from eyas.cli.stage import stage
from eyas.features.capture import CaptureConfig, capture

CONFIG = CaptureConfig


@with_flags(CONFIG)
def command(
    answers: Annotated[str, typer.Argument(help="output of `eyas generate`")],
    target: TargetOption,
    output: Output,
    *,
    stated: StageOptions,
) -> None:
    """Store the target's three taps and last hidden state for every token of finished answers.

    Any causal language model that transformers knows can be captured; those that eyas serves, by
    its own decoder; or by servers (vLLM, SGLang), which are proved on some of the samples first.
    Workers on a Ray cluster share the work: -s executor=ray -s workers=10.
    vLLM's files of states are read from a folder that it shares with this process.
    """
    config = stated.config(CaptureConfig, "capture", target=target)
    artifact = Artifact(output)
    with stage("capture", artifact) as track:
        capture(config, Artifact(answers), artifact, track)
