"""`eyas capture`: conversations -> feature shards."""

from __future__ import annotations

from eyas.artifact import Artifact
from eyas.cli.options import Answers, Output, Overrides, RunFile, TargetOption, stage_config
from eyas.cli.stage import stage
from eyas.features.capture import CaptureConfig, capture

CONFIG = CaptureConfig


def command(
    answers: Answers,
    target: TargetOption,
    output: Output,
    run_file: RunFile = None,
    overrides: Overrides = None,
) -> None:
    """Store the target's three taps and last hidden state for every token of finished answers.

    Any causal language model that transformers knows can be captured; those that eyas serves, by
    its own decoder.
    """
    config = stage_config(CaptureConfig, "capture", run_file, overrides, target=target)
    artifact = Artifact(output)
    with stage("capture", artifact) as track:
        capture(config, Artifact(answers), artifact, track)
