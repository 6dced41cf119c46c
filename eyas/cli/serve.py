"""`eyas serve`: target + head -> OpenAI-compatible server."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated

import typer

from eyas.cli.options import Overrides, RunFile, Target, stage_config
from eyas.log import log_to_stderr
from eyas.serve.server import ServeConfig, serve

CONFIG = ServeConfig


def command(
    target: Target,
    head: Annotated[str | None, typer.Option(help="folder of a head in any form; without one, plain decoding")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on (127.0.0.1)")] = None,
    port: Annotated[int | None, typer.Option(help="port; 0 takes a free one (8000)")] = None,
    speculation: Annotated[str | None, typer.Option(help="off, auto, or fixed(steps,branches,nodes) (auto)")] = None,
    api_keys: Annotated[str | None, typer.Option(help="file with a key a line; EYAS_API_KEYS adds to it")] = None,
    run_file: RunFile = None,
    overrides: Overrides = None,
) -> None:
    """Serve OpenAI's API until interrupted; the output is the target's own, with a head or without.

    /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics, /openapi.json; a line of log for each request. Queue,
    sizes, rates and times: --set limits.max_queue=64, and so on.
    """
    if speculation is not None:
        overrides = [*(overrides or []), f"engine.speculation='{speculation}'"]
    if api_keys is not None:
        overrides = [*(overrides or []), f"limits.api_keys={json.dumps(api_keys)}"]
    config = stage_config(ServeConfig, "serve", run_file, overrides, target=target, head=head, host=host, port=port)
    log_to_stderr()
    with suppress(KeyboardInterrupt):  # how a server ends: running requests were finished before it is raised
        serve(config, on_ready=lambda url: print(f"serving {config.served_model} at {url}/v1", flush=True))
