"""SGLang and vLLM as `eyas serve` and `eyas run` start them: the words of their commands, the GPUs
that they see, what a machine lacks for them, and servers that run while a stage needs them.

They get the settings of our server as flags, those of speculation from eyas.export.engines.Launch.
A setting that has no flag here is refused, or it would be thought to hold.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx
from pydantic import Field, model_validator

from eyas.errors import ConfigError, EyasError, InputError, MissingInputError
from eyas.export.engines import Launch, engine_of
from eyas.gguf.checkpoint import whole_folder
from eyas.hub import is_hub_id, resolve_head, resolve_target
from eyas.log import size_text
from eyas.model.config import read_config
from eyas.model.dialects import uses_window
from eyas.serve.server import ServeConfig
from eyas.settings import Settings

_SETTINGS = {"target", "head", "dtype", "model", "host", "port", "engine"}
_ENGINE_SETTINGS = {"speculation", "max_length", "max_batch"}
SHARED = 0.88  # of a GPU's memory, for all servers that share it
FULL = 0.9  # of a GPU's memory that the weights of one process may take
POLL_S, PATIENCE_S, STOP_S = 0.5, 1800.0, 30.0  # a large model loads for minutes
LOG_TAIL = 2000  # characters shown of the log of a server that ended
PR_SET_PDEATHSIG = 1  # of Linux' prctl: the signal for a process whose parent ends


class EngineName(StrEnum):
    """An engine that heads are exported for."""

    SGLANG = "sglang"
    VLLM = "vllm"

    @property
    def label(self) -> str:
        """The name for people."""
        return "SGLang" if self is EngineName.SGLANG else "vLLM"

    @property
    def is_installed(self) -> bool:
        """SGLang is started as a module, vLLM as a program."""
        if self is EngineName.SGLANG:
            return importlib.util.find_spec("sglang") is not None
        return shutil.which("vllm") is not None


class GpusConfig(Settings):
    """The GPUs of a run, and what serves on them: `generate` asks a server on each group of
    per_server GPUs, capture and train have a process on each GPU, bench and verify ask servers with
    and without the head.
    """

    engine: EngineName = Field(description="sglang or vllm, installed beside eyas")
    ids: tuple[int, ...] = Field((0,), min_length=1, description="as nvidia-smi numbers them")
    per_server: int = Field(1, ge=1, description="GPUs of one server (tensor parallelism)")
    args: str = Field("", description="more flags of the engine, as in a shell")

    @model_validator(mode="after")
    def _groups_are_whole(self) -> GpusConfig:
        if len(set(self.ids)) < len(self.ids) or len(self.ids) % self.per_server:
            raise ValueError(
                f"ids: {list(self.ids)}: name each GPU once, a multiple of per_server "
                f"({self.per_server})"
            )
        return self

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The GPUs of each server."""
        each = self.per_server
        return [self.ids[at : at + each] for at in range(0, len(self.ids), each)]


# Commands


def engine_command(
    engine: EngineName,
    config: ServeConfig,
    extra: str = "",
    gpus: Sequence[int] = (),
    memory: float | None = None,
) -> list[str]:
    """The words of the command that serves the same with another engine; plainly, where there is no
    head. extra: flags of its own, as in a shell. gpus: those that it sees and shares a model over;
    none leaves them to it. memory: the share of them that it takes.

    Raises ConfigError for settings without a flag, InputError for a head that the engine cannot
    load, MissingInputError.
    """
    given = config.model_fields_set
    refuse_flagless(engine, config)
    if config.target is None:
        raise ConfigError("there is no target to serve", "give --target")
    sizes = config.engine.parsed()
    target, family = config.target, None
    if not is_hub_id(target):
        target = str(whole_folder(resolve_target(target)).absolute())
        family = read_config(target).get("model_type")
    launch = Launch(
        target,
        sizes.num_draft_steps,
        sizes.tree_topk,
        sizes.num_verify_tokens,
        config.dtype if "dtype" in given else None,
        config.engine.max_length if "max_length" in config.engine.model_fields_set else None,
        family=family,
        num_gpus=max(1, len(gpus)),
        memory=memory,
    )
    head = None
    if config.head is not None:
        folder = _exported_head(engine, Path(resolve_head(config.head)).absolute())
        settings, head = read_config(folder), str(folder)
        window = settings.get("sliding_window") if uses_window(settings) else None
        launch = replace(launch, draft_window=window)
    words = launch.arguments(engine.value, head)
    words += ["--host", config.host, "--port", str(config.port)]
    words += ["--served-model-name", config.served_model]
    if "max_batch" in config.engine.model_fields_set:
        flag = "--max-running-requests" if engine is EngineName.SGLANG else "--max-num-seqs"
        words += [flag, str(config.engine.max_batch)]
    if engine is EngineName.SGLANG:
        words.append("--enable-metrics")  # for `eyas watch`; vLLM always counts
    return on_gpus([*words, *shlex.split(extra)], gpus)


def refuse_flagless(engine: EngineName, config: ServeConfig) -> None:
    """Raise ConfigError for settings of which the engine has no flag."""
    unknown = sorted(config.model_fields_set - _SETTINGS)
    unknown += sorted(
        f"engine.{name}" for name in config.engine.model_fields_set - _ENGINE_SETTINGS
    )
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: no flag of {engine.label} is known for it",
            "leave it out, or use --engine-args",
        )
    if config.dtype == "packed":
        raise ConfigError(
            "only our own engine has dtype packed", f"leave it out, or serve without {engine.label}"
        )
    sizes = config.engine.parsed()
    if sizes.mode == "off":
        raise ConfigError(
            "speculation is off",
            f"for {engine.label} leave out the head, or --speculation",
        )
    steps = sizes.num_draft_steps
    is_chain = sizes.tree_topk == 1 and sizes.num_verify_tokens == steps + 1
    # without sizes those of the chain hold: the tree is our default, not the user's wish
    if engine is EngineName.VLLM and "(" in config.engine.speculation and not is_chain:
        raise ConfigError(
            f"vLLM drafts chains: {sizes} is a tree",
            f"ask for a chain of as many steps: fixed({steps},1,{steps + 1})",
        )


def on_gpus(words: Sequence[str], gpus: Sequence[int]) -> list[str]:
    """A command that sees these GPUs alone; none: as it is. `python` becomes this process's own."""
    words = [sys.executable if word == "python" else word for word in words]
    seen = [f"CUDA_VISIBLE_DEVICES={','.join(map(str, gpus))}"] if gpus else []
    if words[0] == "env":
        return ["env", *seen, *words[1:]]
    return ["env", *seen, *words] if seen else words


def become(engine: EngineName, command: list[str]) -> None:
    """Replace this process by the engine's. Raises EyasError where it is not installed."""
    if not engine.is_installed:
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


# What a machine lacks


def refuse_lacking(
    gpus: GpusConfig, serve: ServeConfig, capture_map: str | None, num_heads: int
) -> None:
    """Raise ConfigError with everything that this machine lacks for a run on these GPUs.

    serve: with the target. capture_map: capture's device_map, None: each process holds the whole
    target. num_heads: that are served beside the plain target in the end.
    """
    engine, lacks = gpus.engine, list[str]()
    if not engine.is_installed:
        lacks.append(f"{engine.label} is not installed: pip install {engine.value}")
    if importlib.util.find_spec("openai") is None:
        lacks.append("openai, by which servers are asked, is not installed: pip install openai")
    try:
        refuse_flagless(engine, serve)
    except ConfigError as error:
        lacks.append(f"serve: {error.what}: {error.hint}")
    folder = Path(resolve_target(str(serve.target)))
    family = str(read_config(whole_folder(folder)).get("model_type"))
    if not engine_of(engine.value).serves(family):
        lacks.append(
            f"{engine_of(engine.value).release} serves no {family} with a head: take the other "
            "engine (docs/architectures.md), or the stages one by one"
        )
    lacks += _lacking_memory(gpus, folder, capture_map, num_heads)
    if lacks:
        raise ConfigError(
            "\n     ".join(["this machine lacks what the run needs:", *lacks]),
            "nothing was begun; what each stage needs is in docs/gpu.md",
        )


def _lacking_memory(
    gpus: GpusConfig, target: Path, capture_map: str | None, num_heads: int
) -> Iterator[str]:
    sizes, highest = gpu_bytes(), max(gpus.ids)
    if highest >= len(sizes):
        yield f"GPU {highest} is not there: PyTorch sees {len(sizes)} (gpus.ids)"
        return
    weights = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    smallest = min(sizes[one] for one in gpus.ids)
    text = f"weights of {size_text(weights)}, GPUs of {size_text(smallest)}"
    sharing = -(-(1 + num_heads) // len(gpus.groups))
    if weights / gpus.per_server * sharing > FULL * smallest:
        yield f"{text}: {sharing} servers on {gpus.per_server}: raise gpus.per_server"
    if capture_map is None and weights > FULL * smallest:
        yield f"{text}: capture holds the target on one: capture: {{device_map: auto}}"


def gpu_bytes() -> list[int]:
    """The memory of each GPU, read by a process of its own, so that this one holds none of it."""
    code = (
        "import torch; c = torch.cuda; n = c.device_count() if c.is_available() else 0; "
        "print(*(c.get_device_properties(i).total_memory for i in range(n)))"
    )
    seen = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    read = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=seen, check=False
    )
    return [int(word) for word in read.stdout.split()]


# Servers that run while a stage needs them


@dataclass(frozen=True, slots=True)
class Served:
    """A server to start. name: of its log."""

    name: str
    head: str | None
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def to_serve(heads: Mapping[str, str | None]) -> list[Served]:
    """Servers of these heads (None: plain), each at a free port."""
    with ExitStack() as stack:
        found = []
        for name, head in heads.items():
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            found.append(Served(name, head, listener.getsockname()[1]))
        return found


@contextmanager
def running_engines(
    gpus: GpusConfig, config: ServeConfig, servers: Sequence[Served], logs: str
) -> Iterator[None]:
    """These servers answer within the block; the groups of GPUs take them in turns. logs: folder of
    what they print.

    They start one after the other: SGLang's share of a GPU is one of what was free when it started.
    Raises EyasError for one that ends, with the end of its log.
    """
    groups = gpus.groups
    with ExitStack() as stack:
        for number, server in enumerate(servers):
            place = number % len(groups)
            sharing, before = len(servers[place :: len(groups)]), number // len(groups)
            share = SHARED / sharing if sharing > 1 else None
            if share is not None and gpus.engine is EngineName.SGLANG:
                share = round(share / (1 - share * before), 3)
            served = config.model_copy(
                update={"head": server.head, "host": "127.0.0.1", "port": server.port}
            )
            words = engine_command(gpus.engine, served, gpus.args, groups[place], share)
            stack.enter_context(_running(words, server, Path(logs, f"server-{server.name}.log")))
        yield


@contextmanager
def _running(words: Sequence[str], server: Served, log: Path) -> Iterator[None]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as printed:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process, which ends it below
            preexec_fn=_end_with_parent(),
        )
    try:
        _wait_for(process, server, log)
        yield
    finally:
        for number, seconds in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)


def _end_with_parent() -> Callable[[], Any]:
    """For a new process: to get SIGTERM when this one is killed, so that no server keeps a GPU."""
    library = ctypes.CDLL(None)
    return lambda: library.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_for(process: subprocess.Popen[bytes], server: Served, log: Path) -> None:
    """Until the server answers. Raises EyasError."""
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends:
        if (code := process.poll()) is not None:
            tail = log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
            raise EyasError(
                f"the server {server.name!r} ended with exit code {code} before it answered:\n"
                f"{tail}",
                f"all of its log: {log}",
            )
        with suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        time.sleep(POLL_S)
    raise EyasError(f"the server {server.name!r} did not answer in {PATIENCE_S:g} s", f"see {log}")
