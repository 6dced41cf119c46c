"""`eyas lineage`: from an artifact back to every stage, source and licence that made it. Reads manifests, nothing else."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from eyas.artifact import Artifact, Manifest


def command(artifact: Annotated[str, typer.Argument(help="a head, or any other artifact of eyas")]) -> None:
    """Print the tree of what made an artifact: each stage's identity, counts, config and facts, down to the sources."""
    Console().print(tree(Artifact(artifact).manifest()))


def tree(manifest: Manifest, label: str = "") -> Tree:
    """One node per artifact, its inputs below it."""
    node = Tree(f"[bold]{label or manifest.stage}[/bold] {manifest.identity}  {manifest.created}  {escape(manifest.url)}")
    node.add("counts: " + ", ".join(f"{name} {count}" for name, count in manifest.counts.items()))
    for title, values in (("config", manifest.config), ("facts", manifest.facts)):
        if values:
            lines = node.add(title)
            for name, value in values.items():
                lines.add(escape(f"{name}: {value}"))
    for name, made in manifest.inputs.items():
        node.add(tree(made, label=name))
    return node
