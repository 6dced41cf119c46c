"""`eyas check`: lint a head in any of the three forms against its target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from eyas.cli.options import Target
from eyas.export.check import Finding, check, exit_code


def command(head: Annotated[str, typer.Argument(help="folder of a head, in any form")], target: Target) -> None:
    """Print what would serve badly. Exit code 0: nothing found; 1: warnings; 2: errors."""
    findings = check(head, target)
    show(findings, head)
    raise typer.Exit(exit_code(findings))


def show(findings: Iterable[Finding], head: str) -> None:
    """Print the findings on one head to stdout."""
    console = Console(soft_wrap=True, highlight=False)
    empty = True
    for finding in findings:
        empty = False
        console.print(f"{finding.level}: {escape(finding.what)}\n  -> {escape(finding.hint)}")
    if empty:
        console.print(f"{escape(head)}: nothing found")
