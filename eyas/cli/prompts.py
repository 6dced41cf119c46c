"""`eyas prompts`: raw conversation sets -> cleaned user prompts and a ledger."""

from __future__ import annotations

from typing import Annotated

import typer

from eyas.artifact import Artifact
from eyas.cli.options import Output, Overrides, RunFile, stage_config
from eyas.cli.stage import perform
from eyas.data.prompts import PromptsConfig, make_prompts
from eyas.errors import ConfigError

CONFIG = PromptsConfig


def command(
    output: Output,
    sources: Annotated[list[str] | None, typer.Argument(help="JSONL files; without any, those of the run file")] = None,
    licence: Annotated[str | None, typer.Option(help="licence of the given files, e.g. CC-BY-4.0")] = None,
    run_file: RunFile = None,
    overrides: Overrides = None,
) -> None:
    """Keep the user turns of conversations, drop duplicates and personal data, and count every dropped row by reason."""
    if sources and not licence:
        raise ConfigError("the files have no licence", "say what allows training on them, e.g. --licence CC-BY-4.0")
    given = [{"path": path, "licence": licence} for path in sources] if sources else None
    config = stage_config(PromptsConfig, "prompts", run_file, overrides, sources=given)
    perform("prompts", Artifact(output), lambda artifact, track: make_prompts(config, artifact, track))
