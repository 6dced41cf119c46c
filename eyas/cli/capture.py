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

    eyas' own decoder computes them for the models that eyas serves, transformers for any other
    causal language model. Or servers compute them (vLLM), after a proof on some samples;
    vLLM shares a folder of states with this process. On a Ray cluster: -s executor=ray -s
    workers=10.
    """
    config = stated.config(CaptureConfig, "capture", target=target)
    artifact = Artifact(output)
    with stage("capture", artifact) as track:
        capture(config, Artifact(answers), artifact, track)
