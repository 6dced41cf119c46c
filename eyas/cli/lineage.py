"""`eyas lineage`: from an artifact back to every stage, source, licence and filter that made it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from eyas.artifact import IDENTITY, MANIFEST, Artifact
from eyas.hub import locate, resolve_head
from eyas.lineage import DIGITS, head_manifest, lines
from eyas.model.checkpoint import open_checkpoint


def command(
    artifact: Annotated[
        str, typer.Argument(help='an artifact of eyas, or a head: a folder, a hub id, or "smollm2"')
    ],
) -> None:
    """Print what made an artifact: a line for each stage, the last first, with its sources."""
    url = locate(artifact)
    above = os.path.dirname(url.rstrip("/")) or "."  # an export, of whose forms this may be one
    for folder in map(Artifact, (url, above)):
        if folder.exists(MANIFEST) or folder.exists(IDENTITY):
            print("\n".join(lines(folder.manifest())))
            return
    head = head_manifest(artifact, {})
    local = Path(resolve_head(artifact))
    open_checkpoint(local)  # refuses a target
    card = f"; what is known is in {head.url}/README.md"
    has_card = (local / "README.md").exists()
    print(f"head {head.identity[:DIGITS]}: no stages{card if has_card else ''}")
