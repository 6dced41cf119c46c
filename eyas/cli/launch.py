"""The commands by which `eyas serve` and `eyas run` start SGLang and vLLM. A setting without a flag
of theirs is refused.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from eyas.errors import ConfigError, EyasError, InputError, MissingInputError
from eyas.executor import VISIBLE, visible_gpus
from eyas.export.engines import Launch
from eyas.gguf.checkpoint import whole_folder
from eyas.hub import is_hub_id, resolve_head, resolve_target
from eyas.model.config import read_config
from eyas.model.dialects import uses_window
from eyas.serve.server import ServeConfig

_SETTINGS = {"target", "head", "dtype", "model", "host", "port", "engine"}
_ENGINE_SETTINGS = {"speculation", "max_length", "max_batch"}


class EngineName(StrEnum):
    """An engine that heads are exported for."""

    SGLANG = "sglang"
    VLLM = "vllm"

    @property
    def label(self) -> str:
        return "SGLang" if self is EngineName.SGLANG else "vLLM"

    def version(self, python: str) -> tuple[int, ...] | None:
        """Of the package in that environment; None where it is not there."""
        code = f"from importlib.metadata import version as v; print(v({self.value!r}))"
        read = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", read.stdout)
        return tuple(int(part or 0) for part in found.groups()) if found else None


def engine_command(
    engine: EngineName,
    config: ServeConfig,
    extra: str = "",
    gpus: Sequence[int] = (),
    python: str = sys.executable,
) -> list[str]:
    """The words of the command. extra: flags of the engine, as in a shell. gpus: of its tensor
    parallelism; none leaves them to it. python: of the engine's environment. Raises ConfigError,
    InputError, MissingInputError.
    """
    given, sized = config.model_fields_set, config.engine.model_fields_set
    refuse_flagless(engine, config)
    if config.target is None:
        raise ConfigError("there is no target to serve", "give --target")
    sizes = config.engine.parsed()
    target, family = config.target, None
    if not is_hub_id(target):
        target = str(whole_folder(resolve_target(target)).absolute())
        family = read_config(target).get("model_type")
    launch = Launch(
        *(target, sizes.num_draft_steps, sizes.tree_topk, sizes.num_verify_tokens),
        dtype=config.dtype if "dtype" in given else None,
        max_length=config.engine.max_length if "max_length" in sized else None,
        family=family,
        num_gpus=max(1, len(gpus)),
    )
    head = None
    if config.head is not None:
        folder = exported_head(engine, Path(resolve_head(config.head)).absolute())
        settings, head = read_config(folder), str(folder)
        window = settings.get("sliding_window") if uses_window(settings) else None
        launch = replace(launch, draft_window=window)
    words = launch.arguments(engine.value, head)
    words += ["--host", config.host, "--port", str(config.port)]
    words += ["--served-model-name", config.served_model]
    if "max_batch" in sized:
        flag = "--max-running-requests" if engine is EngineName.SGLANG else "--max-num-seqs"
        words += [flag, str(config.engine.max_batch)]
    if engine is EngineName.SGLANG:
        words.append("--enable-metrics")  # for `eyas watch`; vLLM always counts
    return on_gpus([*words, *shlex.split(extra)], gpus, python)


def refuse_flagless(engine: EngineName, config: ServeConfig) -> None:
    """Raise ConfigError for settings that the engine has no flag for."""
    unknown = sorted(config.model_fields_set - _SETTINGS)
    sized = config.engine.model_fields_set - _ENGINE_SETTINGS
    unknown += sorted(f"engine.{name}" for name in sized)
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: {engine.label} has no known flag for it",
            "leave it out, or use --engine-args",
        )
    if config.dtype == "packed":
        raise ConfigError(
            "only our own engine has dtype packed", f"leave it out, or serve without {engine.label}"
        )
    sizes = config.engine.parsed()
    if sizes.mode == "off":
        raise ConfigError(
            "speculation is off", f"for {engine.label} leave out the head, or --speculation"
        )
    steps = sizes.num_draft_steps
    is_chain = sizes.tree_topk == 1 and sizes.num_verify_tokens == steps + 1
    # without sizes the tree is our default, not the user's wish
    if engine is EngineName.VLLM and "(" in config.engine.speculation and not is_chain:
        raise ConfigError(
            f"vLLM drafts chains: {sizes} is a tree",
            f"ask for a chain of as many steps: fixed({steps},1,{steps + 1})",
        )


def on_gpus(words: Sequence[str], gpus: Sequence[int], python: str) -> list[str]:
    """A command of that environment which sees these of this process's GPUs; none: all. Raises
    ConfigError.
    """
    beside = Path(python).with_name("vllm")
    own = {"python": python, "vllm": str(beside) if beside.exists() else "vllm"}
    words = [own.get(word, word) for word in words]
    if not gpus:
        return words
    names = visible_gpus(max(gpus) + 1)
    if max(gpus) >= len(names):
        seen = os.environ.get(VISIBLE)
        raise ConfigError(f"GPU {max(gpus)} is not there: {VISIBLE}={seen}", "name others")
    shown = [f"{VISIBLE}={','.join(names[one] for one in gpus)}", "CUDA_DEVICE_ORDER=PCI_BUS_ID"]
    return ["env", *shown, *(words[1:] if words[0] == "env" else words)]


def become(engine: EngineName, command: list[str], python: str = sys.executable) -> None:
    """Replace this process by the engine's. Raises EyasError where it is not installed."""
    if engine.version(python) is None:
        raise EyasError(
            f"{engine.label} is not installed in the environment of {python}",
            f"name its Python by --engine-python, or install {engine.value} there; --print-command "
            "shows the command",
        )
    os.execvp(command[0], command)  # does not return


def exported_head(engine: EngineName, folder: Path) -> Path:
    """The folder that the engine loads: its part of an export, or a folder in its form. Raises
    InputError, MissingInputError.
    """
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
