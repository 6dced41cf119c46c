"""`eyas serve`: target + head -> OpenAI-compatible server, ours or an installed SGLang or vLLM."""

from __future__ import annotations

import functools
import importlib
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from eyas.cli.launch import EngineName, become, engine_command, on_gpus, refuse_flagless
from eyas.cli.options import StageOptions, with_flags
from eyas.cli.stage import advise_gpu
from eyas.errors import ConfigError
from eyas.log import log_to_stderr
from eyas.model.target import stored_dtype
from eyas.operators.shape import target_shape
from eyas.serve.server import ServeConfig, serve
from eyas.serve.vertex import from_environment

CONFIG = ServeConfig
_other = functools.partial(typer.Option, rich_help_panel="Another engine")


@with_flags(CONFIG)
def command(
    stated: StageOptions,
    engine: Annotated[EngineName | None, _other(help="engine to use in place of ours")] = None,
    gpus: Annotated[str | None, _other(help="GPUs for its model, e.g. 0,1")] = None,
    hidden_states: Annotated[
        bool,
        _other("--hidden-states", help="serve hidden states, for `eyas capture --server` (vLLM)"),
    ] = False,
    engine_python: Annotated[str | None, _other(help="python of its environment")] = None,
    engine_args: Annotated[str, _other(help="more flags of it")] = "",
    print_command: Annotated[bool, _other("--print-command", help="show the command only")] = False,
) -> None:
    """Serve OpenAI's API until interrupted. A head does not change the output.

    / is a page to try it, /openapi.json lists the endpoints, /metrics has counters. The log has one
    line per request. In a container of Vertex AI, its AIP_ variables give address, routes and
    model.
    """
    config = stated.config(ServeConfig, "serve", **from_environment())
    if engine is not None:
        visible = _gpu_ids(gpus)
        command = states_server if hidden_states else engine_command
        python = engine_python or sys.executable
        words = command(engine, config, engine_args, visible, python)
        print(shlex.join(words), flush=True)
        return None if print_command else become(engine, words, python)
    if print_command or engine_args or gpus or hidden_states:
        raise ConfigError(
            "--gpus, --hidden-states, --print-command and --engine-args need another engine",
            "name it: --engine sglang or vllm",
        )
    words = ["eyas", "serve", "--engine", "vllm", "--target", config.target or "TARGET"]
    advise_gpu(shlex.join([*words, "--head", config.head or "HEAD"]), "or sglang")
    log_to_stderr()
    serve(
        config,
        on_ready=lambda url: print(f"serving {config.served_model} at {url}/v1", flush=True),
    )


def _gpu_ids(text: str | None) -> list[int]:
    words = text.split(",") if text else []
    if not all(word.strip().isdecimal() for word in words):
        raise ConfigError(f"--gpus {text}: no list of numbers", "write e.g. --gpus 0,1")
    return [int(word) for word in words]


def states_server(
    engine: EngineName, config: ServeConfig, extra: str, gpus: Sequence[int], python: str
) -> list[str]:
    """The words of the command for a server of the target's hidden states. Raises ConfigError."""
    if engine is not EngineName.VLLM:
        hint = "take --engine vllm, or `eyas capture` without servers"
        raise ConfigError(f"--hidden-states: eyas does not read {engine.label}'s", hint)
    refuse_flagless(engine, config)
    if config.head is not None:
        raise ConfigError("--hidden-states: a server gives them or drafts", "leave out --head")
    if len(gpus) > 1:
        raise ConfigError("--hidden-states: one GPU a server", "start one on each: --gpus 0")
    # imports torch, which our own server does without
    states = importlib.import_module("eyas.features.states")
    shape = target_shape(config.folders()[0])
    length = config.engine.max_length or shape.max_position_embeddings - states.ANSWER_TOKENS
    dtype = config.dtype if "dtype" in config.model_fields_set else stored_dtype(shape)
    words = states.states_command(str(config.target), shape, dtype, length)
    words += ["--host", config.host, "--port", str(config.port)]
    words += ["--served-model-name", config.served_model, *shlex.split(extra)]
    return on_gpus(words, gpus, python)
