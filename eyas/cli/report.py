"""`eyas report FOLDER`: the report of a benchmark again, from what it left, with more beside it where it is given."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from eyas import lineage
from eyas.artifact import Artifact, Manifest
from eyas.bench.report import Contents, write_reports


def command(
    folder: Annotated[str, typer.Argument(help="output of `eyas bench`")],
    evaluation: Annotated[str | None, typer.Option(help="output of `eyas eval`: what was predicted, beside what came")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="folder of the report (FOLDER)")] = None,
    title: Annotated[str, typer.Option(help="its heading")] = "eyas report",
) -> None:
    """Write report.html, report.md and report.csv of a finished benchmark. The page needs nothing beside it, and no network."""
    measured = Artifact(folder)
    manifest = measured.manifest("bench")
    contents = Contents(
        bench=measured.read_json("summary.json"),
        evaluation=None if evaluation is None else Artifact(evaluation).read_json("eval.json"),
        ledger=ledger_of(manifest),
        manifest=manifest,
        commands=[f"eyas report {folder}"],
        title=title,
    )
    print(write_reports(Artifact(output or folder), contents))


def ledger_of(manifest: Manifest) -> dict[str, Any] | None:
    """The ledger of the prompts stage that an artifact comes from, if it comes from one."""
    ledgers = (stage.facts.get("ledger") for stage in lineage.stages(manifest))
    return next((ledger for ledger in ledgers if ledger), None)
