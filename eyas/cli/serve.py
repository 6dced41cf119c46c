"""`eyas serve`: target + head -> OpenAI-compatible server, ours or an installed SGLang or vLLM.

Other engines get the settings of our server as flags, those of speculation from
eyas.export.engines.Launch. A setting that has no flag here is refused, or it would be thought to
hold.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import sys
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from eyas.cli.options import Overrides, RunFile, stage_config
from eyas.cli.stage import advise_gpu
from eyas.errors import ConfigError, EyasError, InputError, MissingInputError
from eyas.export.engines import Launch
from eyas.gguf.checkpoint import whole_folder
from eyas.hub import is_hub_id, resolve_head, resolve_target
from eyas.log import log_to_stderr
from eyas.model.config import read_config
from eyas.model.dialects import uses_window
from eyas.serve.server import ServeConfig, serve
from eyas.serve.vertex import from_environment

CONFIG = ServeConfig
MODEL, ADDRESS, OTHER = "Model and head", "Address and keys", "Another engine"  # panels of the help
_SETTINGS = {"target", "head", "dtype", "model", "host", "port", "engine"}
_ENGINE_SETTINGS = {"speculation", "max_length", "max_batch"}


class EngineName(StrEnum):
    """An engine that heads are exported for."""

    SGLANG = "sglang"
    VLLM = "vllm"

    @property
    def label(self) -> str:
        """The name for people."""
        return "SGLang" if self is EngineName.SGLANG else "vLLM"


def command(
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            help='its folder, a GGUF file, a hub id, or "smollm2"',
            rich_help_panel=MODEL,
        ),
    ] = None,
    head: Annotated[
        str | None, typer.Option(help="in any form; none: plain decoding", rich_help_panel=MODEL)
    ] = None,
    speculation: Annotated[
        str | None,
        typer.Option(help="off, auto, fixed(steps,branches,nodes) (auto)", rich_help_panel=MODEL),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="to listen on (127.0.0.1)", rich_help_panel=ADDRESS)
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="0 takes a free one (8000)", rich_help_panel=ADDRESS)
    ] = None,
    api_keys: Annotated[
        str | None,
        typer.Option(help="file, a key a line; EYAS_API_KEYS adds to it", rich_help_panel=ADDRESS),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="also answer to this Host; may be repeated", rich_help_panel=ADDRESS),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="web pages there may ask (CORS), https://HOST",
            rich_help_panel=ADDRESS,
        ),
    ] = None,
    engine: Annotated[
        EngineName | None,
        typer.Option(help="installed here, in place of ours", rich_help_panel=OTHER),
    ] = None,
    engine_args: Annotated[str, typer.Option(help="more flags for it", rich_help_panel=OTHER)] = "",
    print_command: Annotated[
        bool,
        typer.Option("--print-command", help="show it, and run nothing", rich_help_panel=OTHER),
    ] = False,
    run_file: RunFile = None,
    overrides: Overrides = None,
) -> None:
    """Serve OpenAI's API until interrupted; the output is the target's own, with or without a head.

    A page to try it is at /, the endpoints are in /openapi.json, counters at /metrics. One line of
    log per request. In a container of Vertex AI, address, routes and model come from its AIP_
    variables.
    """
    settings = {
        "engine.speculation": speculation,
        "limits.api_keys": api_keys,
        "limits.allowed_hosts": allowed_host,
        "limits.allowed_origins": allowed_origin,
    }
    overrides = [
        *(overrides or []),
        *(f"{name}={json.dumps(value)}" for name, value in settings.items() if value is not None),
    ]
    given = {"target": target, "head": head, "host": host, "port": port}
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
    words = ["eyas", "serve", "--engine", "vllm", "--target", config.target or "TARGET"]
    advise_gpu(shlex.join([*words, "--head", config.head or "HEAD"]), "or sglang")
    log_to_stderr()
    # the normal end of a server: it is raised after running requests have finished
    with suppress(KeyboardInterrupt):
        serve(
            config,
            on_ready=lambda url: print(f"serving {config.served_model} at {url}/v1", flush=True),
        )


def engine_command(engine: EngineName, config: ServeConfig, extra: str = "") -> list[str]:
    """The words of the command that serves the same with another engine. extra: flags of its own,
    as in a shell.

    Raises ConfigError for settings without a flag, InputError for a head that the engine cannot
    load, MissingInputError.
    """
    given, sizes_given = config.model_fields_set, config.engine.model_fields_set
    unknown = sorted(given - _SETTINGS)
    unknown += sorted(f"engine.{name}" for name in sizes_given - _ENGINE_SETTINGS)
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: no flag of {engine.label} is known for it",
            "leave it out, or use --engine-args",
        )
    if config.head is None or config.target is None:
        raise ConfigError("there is no head to speculate with", "give both: --target and --head")
    if config.dtype == "packed":
        raise ConfigError(
            "only our own engine has dtype packed", f"leave it out, or serve without {engine.label}"
        )
    sizes = config.engine.parsed()
    if sizes.mode == "off":
        raise ConfigError(
            "speculation is off", f"run {engine.label} by itself, or leave --speculation out"
        )
    steps = sizes.num_draft_steps
    is_chain = sizes.tree_topk == 1 and sizes.num_verify_tokens == steps + 1
    # without sizes those of the chain hold: the tree is our default, not the user's wish
    if engine is EngineName.VLLM and "(" in config.engine.speculation and not is_chain:
        raise ConfigError(
            f"vLLM drafts chains: {sizes} is a tree",
            f"ask for a chain of as many steps: fixed({steps},1,{steps + 1})",
        )
    target, family = config.target, None
    if not is_hub_id(target):
        target = str(whole_folder(resolve_target(target)).absolute())
        family = read_config(target).get("model_type")
    head = _exported_head(engine, Path(resolve_head(config.head)).absolute())
    settings = read_config(head)
    launch = Launch(
        target,
        steps,
        sizes.tree_topk,
        sizes.num_verify_tokens,
        config.dtype if "dtype" in given else None,
        config.engine.max_length if "max_length" in sizes_given else None,
        settings.get("sliding_window") if uses_window(settings) else None,
        family=family,
    )
    words = launch.arguments(engine.value, str(head))
    words += ["--host", config.host, "--port", str(config.port)]
    words += ["--served-model-name", config.served_model]
    if "max_batch" in sizes_given:
        flag = "--max-running-requests" if engine is EngineName.SGLANG else "--max-num-seqs"
        words += [flag, str(config.engine.max_batch)]
    if engine is EngineName.SGLANG:
        words.append("--enable-metrics")  # for `eyas watch`; vLLM always counts
    if words[0] == "python":
        words[0] = sys.executable
    return [*words, *shlex.split(extra)]


def become(engine: EngineName, command: list[str]) -> None:
    """Replace this process by the engine's. Raises EyasError where it is not installed."""
    # SGLang is started as a module, vLLM as a program
    is_module = engine is EngineName.SGLANG
    if (importlib.util.find_spec("sglang") if is_module else shutil.which("vllm")) is None:
        raise EyasError(
            f"{engine.label} is not installed here",
            f"install {engine.value} into this environment, or see the command with "
            "--print-command",
        )
    os.execvp(command[0], command)  # does not return


def _exported_head(engine: EngineName, folder: Path) -> Path:
    """The folder that the engine loads: its part of an export, or a folder in its form."""
    if (folder / engine.value / "config.json").is_file():
        return folder / engine.value
    config = folder / "config.json"
    if not config.is_file():
        what = f"{folder} holds no head that {engine.label} loads"
        raise InputError(what, "write one: eyas export HEAD -o FOLDER")
    try:
        is_speculators = "speculators_model_type" in json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MissingInputError(f"{config} cannot be read", "export the head again") from error
    form = EngineName.VLLM if is_speculators else EngineName.SGLANG
    if form is not engine:
        hint = f"give the folder of the whole export, or its {engine.value}/"
        raise InputError(f"{folder} is in {form.label}'s form", hint)
    return folder
