"""`eyas serve`: target + head -> OpenAI-compatible server, ours or an installed SGLang or vLLM."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from eyas.cli.engines import EngineName, engine_command, start
from eyas.cli.options import Overrides, RunFile, stage_config
from eyas.errors import ConfigError
from eyas.log import log_to_stderr
from eyas.serve.server import ServeConfig, serve
from eyas.serve.vertex import from_environment

CONFIG = ServeConfig


def command(
    target: Annotated[
        str | None, typer.Option("--target", "-t", help='folder of the target, or "builtin"')
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="folder of a head in any form; without one, plain decoding")
    ] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on (127.0.0.1)")] = None,
    port: Annotated[int | None, typer.Option(help="port; 0 takes a free one (8000)")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 (cpu)")] = None,
    speculation: Annotated[
        str | None, typer.Option(help="off, auto, or fixed(steps,branches,nodes) (auto)")
    ] = None,
    api_keys: Annotated[
        str | None, typer.Option(help="file with a key a line; EYAS_API_KEYS adds to it")
    ] = None,
    expect_tau: Annotated[
        float | None, typer.Option(help="warn when tau falls under it, in place of the head's card")
    ] = None,
    collect: Annotated[
        str | None, typer.Option(help="folder for prompts of requests that consent, cleaned first")
    ] = None,
    licence: Annotated[
        str | None, typer.Option(help="of what --collect keeps, for `eyas prompts`")
    ] = None,
    engine: Annotated[
        EngineName | None, typer.Option(help="an installed engine that serves in place of ours")
    ] = None,
    engine_args: Annotated[str, typer.Option(help="more flags for it")] = "",
    print_command: Annotated[
        bool, typer.Option("--print-command", help="show what --engine runs, and run nothing")
    ] = False,
    run_file: RunFile = None,
    overrides: Overrides = None,
) -> None:
    """Serve OpenAI's API until interrupted; the output is the target's own, with a head or without.
    At / is a page to try it.

    /v1/chat/completions, /v1/completions, /v1/models, SGLang's /generate, /health, /metrics,
    /drift, /openapi.json; a line of log for each request. Queue, sizes, rates and times: --set
    limits.max_queue=64, and so on. In a container of Vertex AI its environment says the rest
    (AIP_HTTP_PORT, AIP_HEALTH_ROUTE, AIP_PREDICT_ROUTE, AIP_STORAGE_URI).
    """
    settings = {
        "engine.speculation": speculation,
        "limits.api_keys": api_keys,
        "traffic.drift.expect_tau": expect_tau,
        "traffic.collect.folder": collect and str(Path(collect).absolute()),
        "traffic.collect.licence": licence,
    }
    overrides = [
        *(overrides or []),
        *(f"{name}={json.dumps(value)}" for name, value in settings.items() if value is not None),
    ]
    given = {"target": target, "head": head, "host": host, "port": port, "device": device}
    options = from_environment() | {
        name: value for name, value in given.items() if value is not None
    }
    config = stage_config(ServeConfig, "serve", run_file, overrides, **options)
    if engine is not None:
        started = engine_command(engine, config, engine_args)
        print(started.shown, flush=True)
        return None if print_command else start(engine, started)
    if print_command or engine_args:
        raise ConfigError(
            "--print-command and --engine-args are for another engine",
            "name it: --engine sglang or vllm",
        )
    log_to_stderr()
    # how a server ends: running requests were finished before it is raised
    with suppress(KeyboardInterrupt):
        serve(
            config,
            on_ready=lambda url: print(f"serving {config.served_model} at {url}/v1", flush=True),
        )
