"""`eyas bench URL`: a running server -> TTFT, TPOT, throughput per arm, and a report."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from eyas import lineage
from eyas.artifact import Artifact, Manifest
from eyas.bench.bench import EAGLE, PLAIN, ArmConfig, BenchConfig, bench, bench_identity
from eyas.bench.claims import headlines, quotable
from eyas.bench.report import Contents, cut_note, show_table, write_reports
from eyas.bench.server import ServerFacts, ask_facts
from eyas.cli.options import AsJson, OutputIfAny, StageOptions, print_json, with_flags
from eyas.cli.stage import IDENTITY_DIGITS, stage
from eyas.client import Client
from eyas.errors import InputError, MismatchError
from eyas.log import console

CONFIG = BenchConfig
HEADS = ("export", "train")  # stages whose output a server can run


@with_flags(CONFIG)
def command(
    url: Annotated[
        str | None, typer.Argument(help="server to measure (http://127.0.0.1:8000)")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="another server, the baseline of the comparison")
    ] = None,
    output: OutputIfAny = None,
    head: Annotated[
        str | None,
        typer.Option(help="output of `eyas export` or `eyas train`, for the lineage"),
    ] = None,
    as_json: AsJson = False,
    *,
    stated: StageOptions,
) -> None:
    """Request the same answers from OpenAI-compatible servers in turns, and compare. Prompts: rows
    of `eyas prompts`, OpenAI's messages or Spec-Bench.

    Without --against, a server of eyas is measured with its head and without, any other by itself.
    Writes rows.jsonl, summary.json, report.html and report.md, by default into out/bench-IDENTITY.
    EYAS_API_KEY is the servers' key.
    """
    only_rates = {"concurrencies": ()} if "rates" in stated.flags else {}
    config = stated.config(BenchConfig, "bench", url=url, **only_rates)
    if against is not None or "arms" not in config.model_fields_set:
        config = config.model_copy(update={"arms": arms_for(config.url, against)})
    made = None if head is None else Artifact(head).manifest()
    if made is not None and made.stage not in HEADS:
        raise InputError(
            f"{head} is an output of {made.stage!r}, not a head",
            "give the output of `eyas export` or `eyas train`",
        )
    folder = output or f"out/bench-{bench_identity(config, {})[:IDENTITY_DIGITS]}"
    measured = Artifact(folder)
    with stage("bench", measured) as track:
        bench(config, measured, track)
    summary = measured.read_json("summary.json")
    show_table(summary)
    warnings = [cut_note(cut)] if (cut := summary["num_cut_prompts"]) else []
    differences = summary["differences"]
    warnings += [f"{one['arm']} and {one['baseline']}: {one['text']}" for one in differences]
    for warning in warnings:
        console.out(warning, style="yellow", highlight=False)
    manifest = measured.manifest("bench")
    if made is not None:
        manifest = with_head(manifest, made, summary["servers"])
    commands = [shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), *_asked(config)]
    ledgers = (one.facts.get("ledger") for one in lineage.stages(manifest))
    ledger = next(filter(None, ledgers), None)  # of the prompts that made the head
    contents = Contents(summary, None, ledger, manifest, commands)
    print(f"report: {write_reports(measured, contents)}")
    sentences = [one["sentence"] for one in headlines(summary)]
    compared = [quotable(one) for one in summary["comparisons"]]
    print_json({"headlines": sentences, "comparisons": compared, "output": folder}, as_json)


def arms_for(url: str, against: str | None) -> dict[str, ArmConfig]:
    """The arms: two servers, one of eyas with and without its head, or one alone."""

    async def facts_of(url: str) -> ServerFacts:
        async with Client(url, 30) as client:
            return await ask_facts(client)

    if against is not None:
        return {"baseline": ArmConfig(url=against), "server": ArmConfig(url=url)}
    facts = asyncio.run(facts_of(url))
    if facts.kind == "eyas" and facts.has_head:
        return {PLAIN: ArmConfig(speculation=False), EAGLE: ArmConfig(speculation=True)}
    return {"server": ArmConfig()}


def _asked(config: BenchConfig) -> list[str]:
    remarks = []
    for name, arm in config.arms.items():
        body = dict(arm.fields)
        if arm.speculation is not None:
            body["speculation"] = arm.speculation
        with_it = f" with {json.dumps(body)}" if body else ", as the server speculates"
        remarks.append(f"# {name}: {arm.url or config.url}{with_it}")
    return remarks


def with_head(
    manifest: Manifest, made: Manifest, servers: Mapping[str, Mapping[str, Any]]
) -> Manifest:
    """A benchmark's manifest with its servers' head as an input. Raises MismatchError."""
    targets = {
        stage.config["target_fingerprint"]
        for stage in lineage.stages(made)
        if "target_fingerprint" in stage.config
    }
    served = {server.get("target_fingerprint") for server in servers.values()} - {None}
    if targets and served - targets:
        raise MismatchError(
            "--head was made for another target than the servers run", "give the head that they run"
        )
    return manifest.model_copy(update={"inputs": {**manifest.inputs, "head": made}})
