"""`eyas lineage`: from an artifact back to every stage, source, licence and filter that made it."""

from __future__ import annotations

from typing import Annotated

import typer

from eyas.artifact import Artifact
from eyas.lineage import lines


def command(
    artifact: Annotated[str, typer.Argument(help="a head, or any other artifact of eyas")],
) -> None:
    """Print what made an artifact, the artifact first and its inputs indented below it."""
    for line in lines(Artifact(artifact).manifest()):
        print(line)
