"""`eyas serve`: target + head -> OpenAI-compatible server, ours or an installed SGLang or vLLM."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from typing import Annotated

import typer

from eyas.cli.engines import EngineName, become, engine_command
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
        str | None, typer.Option(help="file with one key per line; EYAS_API_KEYS adds to it")
    ] = None,
    engine: Annotated[
        EngineName | None, typer.Option(help="serve with an installed engine in place of ours")
    ] = None,
    engine_args: Annotated[str, typer.Option(help="more flags for it")] = "",
    print_command: Annotated[
        bool, typer.Option("--print-command", help="show the command of --engine, and run nothing")
    ] = False,
    run_file: RunFile = None,
    overrides: Overrides = None,
) -> None:
    """Serve OpenAI's API until interrupted; the output is the target's own, with or without a head.

    Endpoints: /v1/chat/completions, /v1/completions, /v1/models, SGLang's /generate, /health,
    /metrics, /openapi.json, and a page to try it at /. One line of log per request. Queue, sizes,
    rates and times: --set limits.max_queue=64, and so on. In a container of Vertex AI, address,
    routes and model come from its environment (AIP_HTTP_PORT, AIP_HEALTH_ROUTE, AIP_PREDICT_ROUTE,
    AIP_STORAGE_URI).
    """
    settings = {
        "engine.speculation": speculation,
        "limits.api_keys": api_keys,
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
        words = engine_command(engine, config, engine_args)
        print(shlex.join(words), flush=True)
        return None if print_command else become(engine, words)
    if print_command or engine_args:
        raise ConfigError(
            "--print-command and --engine-args are for another engine",
            "name it: --engine sglang or vllm",
        )
    log_to_stderr()
    # the normal end of a server: it is raised after running requests have finished
    with suppress(KeyboardInterrupt):
        serve(
            config,
            on_ready=lambda url: print(f"serving {config.served_model} at {url}/v1", flush=True),
        )
