"""SGLang and vLLM as `eyas serve --engine` starts them: their commands, from the same settings as
ours. Imports neither.

The flags of speculation are those of the exported head's card (eyas.export.launch.Launch). A
setting that an engine is not told of is refused, since it would be thought to hold; so is a tree
for vLLM. The model has the name that ours serves it by.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from eyas.engine.tree import Speculation
from eyas.errors import ConfigError, EyasError, InputError, MissingInputError
from eyas.export.launch import Launch
from eyas.hub import is_hub_id, resolve_head, resolve_target
from eyas.serve.server import ServeConfig


class EngineName(StrEnum):
    """An engine that somebody else makes."""

    SGLANG = "sglang"
    VLLM = "vllm"


# Our settings and their flags; of EngineConfig's behind the dot.
FLAGS = {
    EngineName.SGLANG: {
        "host": "--host",
        "port": "--port",
        "served_model": "--served-model-name",
        "engine.max_batch": "--max-running-requests",
    },
    EngineName.VLLM: {
        "host": "--host",
        "port": "--port",
        "served_model": "--served-model-name",
        "engine.max_batch": "--max-num-seqs",
    },
}
_ALWAYS = ("host", "port", "served_model")
_SIZES = ("speculation", "max_length")
_IN_LAUNCH = {"target", "head", "dtype", "model", *(f"engine.{name}" for name in _SIZES)}
_TITLES = {EngineName.SGLANG: "SGLang", EngineName.VLLM: "vLLM"}


@dataclass(frozen=True, slots=True)
class Started:
    """What is to be run."""

    arguments: list[str]

    @property
    def shown(self) -> str:
        """For a shell."""
        return shlex.join(self.arguments)


def engine_command(engine: EngineName, config: ServeConfig, extra: str = "") -> Started:
    """The command that serves the same with another engine; extra: flags of its own, as a shell has
    them.

    Raises ConfigError for settings that it is not told of, InputError for a head that it cannot
    load, MissingInputError.
    """
    given = set(_given(config))
    unknown = sorted(given - _IN_LAUNCH - FLAGS[engine].keys())
    if unknown:
        raise ConfigError(
            f"{_TITLES[engine]} is not told of {', '.join(unknown)}",
            "leave it out, or use --engine-args",
        )
    if config.head is None:
        raise ConfigError(
            "there is no head to speculate with", "give an exported one: --head FOLDER"
        )
    assert config.target is not None
    target = (
        config.target
        if is_hub_id(config.target)
        else str(Path(resolve_target(config.target)).absolute())
    )
    sizes = config.engine.parsed()
    if sizes.mode == "off":
        raise ConfigError(
            "speculation is off", f"run {_TITLES[engine]} by itself, or leave --speculation out"
        )
    if engine is EngineName.VLLM:
        _refuse_tree(config, sizes)
    launch = Launch(
        target,
        sizes.num_draft_steps,
        sizes.tree_topk,
        sizes.num_verify_tokens,
        config.dtype if "dtype" in given else None,
        config.engine.max_length if "engine.max_length" in given else None,
    )
    head = _exported(engine, Path(resolve_head(config.head)).absolute())
    arguments = launch.arguments(engine.value, str(head))
    for name, flag in FLAGS[engine].items():
        if name in given or name in _ALWAYS:
            section = config.engine if name.startswith("engine.") else config
            arguments += [flag, str(getattr(section, name.removeprefix("engine.")))]
    if arguments[0] == "python":
        arguments[0] = sys.executable
    return Started([*arguments, *shlex.split(extra)])


def start(engine: EngineName, started: Started) -> None:
    """Become the engine's process. Raises EyasError where it is not installed."""
    is_there = (
        importlib.util.find_spec("sglang") if engine is EngineName.SGLANG else shutil.which("vllm")
    )
    if not is_there:
        raise EyasError(
            f"{_TITLES[engine]} is not installed here",
            f"install {engine.value} into this environment, or see what would be run with "
            "--print-command",
        )
    os.execvp(started.arguments[0], started.arguments)  # does not come back


def _refuse_tree(config: ServeConfig, sizes: Speculation) -> None:
    """Raises ConfigError for a tree that was asked for; those that are our defaults were not."""
    given = config.engine.model_fields_set
    is_stated = "speculation" in given and "(" in config.engine.speculation
    steps = sizes.num_draft_steps
    if is_stated and (sizes.tree_topk > 1 or sizes.num_verify_tokens != steps + 1):
        chain = f"fixed({steps},1,{steps + 1})"
        raise ConfigError(
            f"vLLM drafts chains: {sizes} is a tree", f"ask for a chain of as many steps: {chain}"
        )


def _given(config: ServeConfig) -> Iterator[str]:
    for name in config.model_fields_set:
        if name == "engine":
            yield from (f"engine.{field}" for field in config.engine.model_fields_set)
        else:
            yield name


def _exported(engine: EngineName, folder: Path) -> Path:
    """The folder that the engine loads: the export's part for it, or a folder in its form."""
    if (folder / engine.value / "config.json").is_file():
        return folder / engine.value
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{folder} holds no head that {_TITLES[engine]} loads",
            "write one: eyas export HEAD -o FOLDER",
        )
    try:
        is_speculators = "speculators_model_type" in json.loads(
            (folder / "config.json").read_text(encoding="utf-8")
        )
    except (OSError, ValueError) as error:
        raise MissingInputError(
            f"{folder}/config.json cannot be read", "export the head again"
        ) from error
    if is_speculators != (engine is EngineName.VLLM):
        other = EngineName.VLLM if is_speculators else EngineName.SGLANG
        raise InputError(
            f"{folder} is in {_TITLES[other]}'s form",
            f"give the folder of the whole export, or its {engine.value}/",
        )
    return folder
