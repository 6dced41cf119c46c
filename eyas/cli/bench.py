"""`eyas bench`: a running server -> TTFT, TPOT, throughput per arm, and what the head changes."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from eyas.artifact import Artifact
from eyas.bench.bench import BenchConfig, bench
from eyas.cli.options import Output, Overrides, RunFile, stage_config
from eyas.cli.results import show_table
from eyas.cli.stage import perform

CONFIG = BenchConfig


def command(
    output: Output,
    prompts: Annotated[str | None, typer.Option(help="JSONL of prompts or conversations, plain or gzip")] = None,
    url: Annotated[str | None, typer.Option(help="server (http://127.0.0.1:8000)")] = None,
    run_file: RunFile = None,
    overrides: Overrides = None,
) -> None:
    """Ask a running server for the same answers arm by arm in turns, and compare. Any OpenAI-compatible server will do."""
    config = stage_config(BenchConfig, "bench", run_file, overrides, prompts=prompts, url=url)
    measured = perform("bench", Artifact(output), lambda artifact, track: bench(config, artifact, track))
    summary = measured.read_json("summary.json")
    show_table(summary)
    print(json.dumps({"comparisons": summary["comparisons"], "output": output}))
