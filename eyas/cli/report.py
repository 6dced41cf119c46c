"""`eyas report FOLDER`: the report of a benchmark again, from what it left, with more beside it
where it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from eyas import lineage
from eyas.artifact import Artifact, Manifest
from eyas.bench.report import Contents, write_reports
from eyas.cli.bench import command_line
from eyas.errors import InputError, MismatchError

HEADS = ("export", "train")  # stages whose output a server can run


def command(
    folder: Annotated[str, typer.Argument(help="output of `eyas bench`")],
    evaluation: Annotated[
        str | None, typer.Option(help="output of `eyas eval`: what was predicted, beside what came")
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="output of `eyas export` or `eyas train`, as served")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="folder of the report (FOLDER)")
    ] = None,
    title: Annotated[str, typer.Option(help="its heading")] = "eyas report",
) -> None:
    """Write report.html, report.md and report.csv of a finished benchmark. The page needs nothing
    beside it, and no network.
    """
    measured = Artifact(folder)
    manifest, summary = measured.manifest("bench"), measured.read_json("summary.json")
    if head is not None:
        manifest = with_head(manifest, Artifact(head), summary["servers"])
    contents = Contents(
        bench=summary,
        evaluation=None if evaluation is None else Artifact(evaluation).read_json("eval.json"),
        ledger=ledger_of(manifest),
        manifest=manifest,
        commands=[command_line()],
        title=title,
        head_is_stated=head is not None,
    )
    print(write_reports(Artifact(output or folder), contents))


def with_head(
    manifest: Manifest, head: Artifact, servers: Mapping[str, Mapping[str, Any]]
) -> Manifest:
    """A benchmark's manifest with the head that its servers ran, and so with all that the head was
    made from.

    Raises InputError for an artifact that is no head, MismatchError for one of another target or of
    another run's benchmark.
    """
    made = head.manifest()
    if made.stage not in HEADS:
        raise InputError(
            f"{head.url} holds {made.stage!r}, no head",
            "give the output of `eyas export` or `eyas train`",
        )
    known = manifest.inputs.get("head")
    if known is not None and known.identity != made.identity:
        raise MismatchError(
            f"{head.url} is not the head that was measured", f"leave --head out: it was {known.url}"
        )
    targets = {
        stage.config["target_fingerprint"]
        for stage in lineage.stages(made)
        if "target_fingerprint" in stage.config
    }
    served = {server.get("target_fingerprint") for server in servers.values()} - {None}
    if targets and served - targets:
        raise MismatchError(
            f"{head.url} was made for another target than the servers run",
            "give the head that they run",
        )
    return manifest.model_copy(update={"inputs": {**manifest.inputs, "head": made}})


def ledger_of(manifest: Manifest) -> dict[str, Any] | None:
    """The ledger of the prompts stage that an artifact comes from, if it comes from one."""
    ledgers = (stage.facts.get("ledger") for stage in lineage.stages(manifest))
    return next((ledger for ledger in ledgers if ledger), None)
