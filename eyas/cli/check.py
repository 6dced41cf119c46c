"""`eyas check`: lint a head in any of the three forms against its target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from eyas.cli.options import Target
from eyas.errors import MismatchError
from eyas.export.check import Finding, check


def command(head: Annotated[str, typer.Argument(help="folder of a head")], target: Target) -> None:
    """Print what would serve badly, and end with exit code 2 if anything would."""
    report(check(head, target), head)


def report(findings: Iterable[Finding], head: str) -> None:
    """Print the findings of one head to stdout. Raises MismatchError when one of them is an error."""
    console = Console(soft_wrap=True, highlight=False)
    num_errors = 0
    for finding in findings:
        num_errors += finding.level == "error"
        console.print(f"{finding.level}: {escape(finding.what)}\n  -> {escape(finding.hint)}")
    if num_errors:
        raise MismatchError(
            f"{head} would serve badly: {num_errors} errors", "mend what is listed above, or export the head again"
        )
    console.print(f"{escape(head)}: no errors")
