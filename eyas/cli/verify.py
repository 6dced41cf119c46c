"""`eyas verify URL`: a server with speculation, and plainly -> whether its answers are the same."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from eyas.artifact import Artifact
from eyas.bench.verify import VerifyConfig, verified
from eyas.cli.options import AsJson, Output, StageOptions, print_json, with_flags
from eyas.log import progress_bar

CONFIG = VerifyConfig
CODES = {"EXACT": 0, "TIES ONLY": 0, "DIFFERENT": 3, "INCONCLUSIVE": 4}  # 1 and 2 are errors


@with_flags(CONFIG)
def command(
    url: Annotated[str, typer.Argument(help="server that speculates")],
    output: Output = "out/verify",
    as_json: AsJson = False,
    *,
    stated: StageOptions,
) -> None:
    """Test whether speculation changes a server's answers. The server must be OpenAI-compatible and
    return token ids or logprobs.

    Requests the same answers with speculation and without, greedy and with seeds, and writes
    report.md and verify.json. Ends with 0 (EXACT, TIES ONLY), 3 (DIFFERENT) or 4 (INCONCLUSIVE).
    """
    config = stated.config(VerifyConfig, "verify", url=url)
    folder = Artifact(output)
    with progress_bar("verify") as track:
        verdict, why = asyncio.run(verified(config, folder, track))
    print(f"{verdict}: {why}\nreport: {folder.url}/report.md")
    print_json({"verdict": verdict, "why": why, "output": output}, as_json)
    raise typer.Exit(CODES[verdict])
