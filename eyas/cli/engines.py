"""`eyas serve --engine`: the command that starts SGLang or vLLM with the settings of our server.
Imports neither.

The flags of speculation are those of the exported head's card (eyas.export.launch.Launch). A
setting that has no flag here is refused, or it would be thought to hold.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import sys
from enum import StrEnum
from pathlib import Path

from eyas.errors import ConfigError, EyasError, InputError, MissingInputError
from eyas.export.launch import Launch
from eyas.hub import is_hub_id, resolve_head, resolve_target
from eyas.serve.server import ServeConfig


class EngineName(StrEnum):
    """An engine that heads are exported for."""

    SGLANG = "sglang"
    VLLM = "vllm"

    @property
    def label(self) -> str:
        """The name for people."""
        return "SGLang" if self is EngineName.SGLANG else "vLLM"


_SETTINGS = {"target", "head", "dtype", "model", "host", "port", "engine"}
_ENGINE_SETTINGS = {"speculation", "max_length", "max_batch"}


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
    launch = Launch(
        config.target
        if is_hub_id(config.target)
        else str(Path(resolve_target(config.target)).absolute()),
        sizes.num_draft_steps,
        sizes.tree_topk,
        sizes.num_verify_tokens,
        config.dtype if "dtype" in given else None,
        config.engine.max_length if "max_length" in sizes_given else None,
    )
    head = _exported_head(engine, Path(resolve_head(config.head)).absolute())
    words = launch.arguments(engine.value, str(head))
    words += ["--host", config.host, "--port", str(config.port)]
    words += ["--served-model-name", config.served_model]
    if "max_batch" in sizes_given:
        flag = "--max-running-requests" if engine is EngineName.SGLANG else "--max-num-seqs"
        words += [flag, str(config.engine.max_batch)]
    if words[0] == "python":
        words[0] = sys.executable
    return [*words, *shlex.split(extra)]


def become(engine: EngineName, command: list[str]) -> None:
    """Replace this process by the engine's. Raises EyasError where it is not installed."""
    if engine is EngineName.SGLANG:
        is_installed = importlib.util.find_spec("sglang") is not None
    else:
        is_installed = shutil.which("vllm") is not None
    if not is_installed:
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
        raise InputError(
            f"{folder} holds no head that {engine.label} loads",
            "write one: eyas export HEAD -o FOLDER",
        )
    try:
        is_speculators = "speculators_model_type" in json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MissingInputError(f"{config} cannot be read", "export the head again") from error
    if is_speculators != (engine is EngineName.VLLM):
        other = EngineName.VLLM if is_speculators else EngineName.SGLANG
        raise InputError(
            f"{folder} is in {other.label}'s form",
            f"give the folder of the whole export, or its {engine.value}/",
        )
    return folder
