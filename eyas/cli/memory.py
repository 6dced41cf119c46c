"""`eyas memory`: answers -> a memory of what follows what in them."""

from __future__ import annotations

from eyas.artifact import Artifact
from eyas.cli.options import Answers, Output, Overrides, RunFile, TargetOption, stage_config
from eyas.cli.stage import stage
from eyas.features.memory import MemoryConfig, pack

CONFIG = MemoryConfig


def command(
    answers: Answers,
    target: TargetOption,
    output: Output,
    run_file: RunFile = None,
    overrides: Overrides = None,
) -> None:
    """Pack answers into a memory, from which `eyas serve --memory` drafts, with a head or without.

    It holds which token followed one, two and three tokens most often, and no text seen once.
    """
    config = stage_config(MemoryConfig, "memory", run_file, overrides, target=target)
    artifact = Artifact(output)
    with stage("memory", artifact) as track:
        pack(config, Artifact(answers), artifact, track)
