"""The GPUs of `eyas run`: what the machine lacks, and servers of SGLang or vLLM."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from pydantic import Field, model_validator

from eyas.chat import Chat
from eyas.cli.launch import EngineName, engine_command, exported_head, refuse_flagless
from eyas.errors import ConfigError, EyasError
from eyas.executor import VISIBLE, visible_gpus
from eyas.export.engines import engine_of
from eyas.features.capture import CaptureConfig
from eyas.features.generate import GenerateConfig
from eyas.gguf.checkpoint import whole_folder
from eyas.hub import resolve_head, resolve_target
from eyas.log import size_text
from eyas.model.config import read_config
from eyas.operators.shape import target_shape
from eyas.operators.ttt import refuse_no_compiler
from eyas.serve.server import ServeConfig
from eyas.settings import Settings
from eyas.train.trainer import TrainConfig

SHARED = 0.88  # of a GPU's memory, for all servers on it
FULL = 0.8  # of the free memory, for weights; the rest is cache and graphs
POLL_S, PATIENCE_S, STOP_S = 0.5, 1800.0, 90.0  # a large model loads for minutes
LOG_TAIL = 2000  # characters
PR_SET_PDEATHSIG = 1  # of prctl: the signal to a process whose parent ends
# the first that give token ids of answers
LEAST_VERSIONS = {EngineName.SGLANG: (0, 5, 17), EngineName.VLLM: (0, 11, 0)}


class GpusConfig(Settings):
    """The GPUs of a run, and what serves on them (docs/gpu.md)."""

    engine: EngineName = Field(description="sglang or vllm")
    ids: tuple[int, ...] = Field((0,), min_length=1, description="of the GPUs that eyas sees")
    per_server: int = Field(1, ge=1, description="GPUs of one server (tensor parallelism)")
    args: str = Field("", description="more flags of the engine, as in a shell")
    python: str | None = Field(
        None, description="of the engine's environment (SGLang needs its own); null: this one"
    )

    @model_validator(mode="after")
    def _groups_are_whole(self) -> GpusConfig:
        if len(set(self.ids)) < len(self.ids) or len(self.ids) % self.per_server:
            raise ValueError(
                f"ids: {list(self.ids)}: name each GPU once, a multiple of per_server "
                f"({self.per_server})"
            )
        return self

    @property
    def engine_python(self) -> str:
        return self.python or sys.executable

    @property
    def groups(self) -> list[tuple[int, ...]]:
        each = self.per_server
        return [self.ids[at : at + each] for at in range(0, len(self.ids), each)]


def refuse_lacking(
    gpus: GpusConfig,
    serve: ServeConfig,
    generate: GenerateConfig,
    capture: CaptureConfig,
    train: TrainConfig,
) -> None:
    """Raise ConfigError with everything that this machine lacks for a run on these GPUs."""
    engine, lacks = gpus.engine, list[str]()
    if train.start:
        try:
            exported_head(engine, Path(resolve_head(train.start.head)))
        except EyasError as error:
            lacks.append(f"train.start, which is served too: {error.what}: {error.hint}")
    version, least = engine.version(gpus.engine_python), LEAST_VERSIONS[engine]
    if version is None:
        lacks.append(f"{engine.label} is not installed in the environment of {gpus.engine_python}")
    elif version < least:
        lacks.append(f"{engine.label} gives token ids from {'.'.join(map(str, least))} on")
    for package, what in {"openai": "servers are asked", "accelerate": "device_map works"}.items():
        if (package == "openai" or capture.device_map) and not importlib.util.find_spec(package):
            lacks.append(f"{package}, by which {what}, is not installed: pip install {package}")
    for refuse in (partial(refuse_flagless, engine, serve), refuse_no_compiler):
        try:
            refuse()
        except ConfigError as error:
            lacks.append(f"{error.what}: {error.hint}")
    folder = Path(resolve_target(str(serve.target)))
    family = str(read_config(whole_folder(folder)).get("model_type"))
    if not engine_of(engine.value).serves(family):
        lacks.append(
            f"{engine_of(engine.value).release} serves no {family} with a head: take the other "
            "engine (docs/architectures.md), or the stages one by one"
        )
    context = target_shape(folder).max_position_embeddings
    wanted = min(generate.max_length, context)
    if (serve.engine.max_length or context) < wanted:
        lacks.append(f"serve.engine.max_length is below generate.max_length, {wanted}")
    if generate.client.send == "messages" and Chat(str(folder)).needs_a_date:
        lacks.append("servers' template prints another date: generate.client: {send: tokens}")
    num_servers = 2 if train.start is None else 3
    lacks += _lacking_memory(gpus, folder, capture.device_map is None, num_servers)
    if lacks:
        raise ConfigError(
            "\n     ".join(["this machine lacks what the run needs:", *lacks]),
            "nothing was started; docs/gpu.md lists the needs of each stage",
        )


def _lacking_memory(
    gpus: GpusConfig, target: Path, is_whole: bool, num_servers: int
) -> Iterator[str]:
    try:
        sizes = gpu_bytes()
    except EyasError as error:
        yield error.what
        return
    if max(gpus.ids) >= len(sizes):
        yield f"GPU {max(gpus.ids)} is not there: PyTorch sees {len(sizes)} (gpus.ids)"
        return
    weights = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    free = min(sizes[one] for one in gpus.ids)
    text = f"weights of {size_text(weights)}, {size_text(free)} free on a GPU"
    sharing = -(-num_servers // len(gpus.groups))
    if weights / gpus.per_server > FULL * free / sharing:
        yield f"{text}: {sharing} servers on {gpus.per_server}: raise gpus.per_server"
    if is_whole and weights > FULL * free:
        yield f"{text}: capture holds the target on one: capture: {{device_map: auto}}"


def gpu_bytes() -> list[int]:
    """Free bytes of each GPU, read by another process, as CUDA takes some. Raises EyasError."""
    code = (
        "import torch; c = torch.cuda; n = c.device_count() if c.is_available() else 0; "
        "print(*(c.mem_get_info(i)[0] for i in range(n)))"
    )
    read = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if read.returncode:
        raise EyasError(f"PyTorch cannot read the GPUs' memory: {read.stderr.strip()[-LOG_TAIL:]}")
    return [int(word) for word in read.stdout.split()]


@contextmanager
def seeing(gpus: GpusConfig) -> Iterator[GpusConfig]:
    """Processes that start in the block see only these GPUs, numbered from 0 as in the config that
    it gets.
    """
    before = os.environ.get(VISIBLE)
    names = visible_gpus(max(gpus.ids) + 1)
    os.environ[VISIBLE] = ",".join(names[one] for one in gpus.ids)
    try:
        yield gpus.model_copy(update={"ids": tuple(range(len(gpus.ids)))})
    finally:
        if before is None:
            del os.environ[VISIBLE]
        else:
            os.environ[VISIBLE] = before


# Servers that run while a stage needs them


@dataclass(frozen=True, slots=True)
class Served:
    name: str
    head: str | None
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def to_serve(heads: Mapping[str, str | None]) -> list[Served]:
    """Servers of heads (None: plain), each at a free port."""
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
    """Servers for the block, spread over the groups of GPUs. Those of one group start one after the
    other: SGLang takes a share of the free memory. logs: a folder. Raises EyasError for a server
    that ends.
    """
    groups, running, engine = gpus.groups, list[RunningServer](), gpus.engine
    try:
        for first in range(0, len(servers), len(groups)):
            begun = []
            for place, server in enumerate(servers[first : first + len(groups)]):
                where = {"head": server.head, "host": "127.0.0.1", "port": server.port}
                served, sharing = config.model_copy(update=where), servers[place :: len(groups)]
                words = engine_command(engine, served, gpus.args, groups[place], gpus.engine_python)
                words += share_of_memory(engine, len(sharing), first // len(groups))
                log = Path(logs, f"server-{server.name}.log")
                begun.append(RunningServer(server, words, log))
            running += begun
            for one in begun:
                one.wait()
        yield
    except Exception:
        for one in running:
            one.refuse_ended()  # which may be the cause
        raise
    finally:
        for one in running:
            one.process.terminate()  # the engine ends its own processes, and frees the GPU
        for one in running:
            one.end()


def share_of_memory(engine: EngineName, sharing: int, before: int) -> list[str]:
    """The flag that leaves room for other servers on the same GPUs, of which `before` run."""
    if sharing == 1:
        return []
    share = SHARED / sharing
    if engine is EngineName.SGLANG:
        return ["--mem-fraction-static", str(round(share / (1 - share * before), 3))]
    return ["--gpu-memory-utilization", str(round(share, 3))]


class RunningServer:
    """A server's process, with its log."""

    def __init__(self, server: Served, words: Sequence[str], log: Path) -> None:
        self._server, self._log = server, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as printed:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # not ended by Ctrl-C, but by this process
                preexec_fn=_end_with_parent(),
            )

    def wait(self) -> None:
        """Wait until it answers. Raises EyasError."""
        ends = time.monotonic() + PATIENCE_S
        with httpx.Client(trust_env=False, timeout=5) as client:
            while time.monotonic() < ends:
                self.refuse_ended()
                with suppress(httpx.HTTPError):
                    if client.get(f"{self._server.url}/health").status_code == 200:
                        return
                time.sleep(POLL_S)
        raise EyasError(f"{self._server.name}: no answer in {PATIENCE_S:g} s", f"see {self._log}")

    def refuse_ended(self) -> None:
        """Raise EyasError, with the end of the log, where the process has ended."""
        if (code := self.process.poll()) is not None:
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
            raise EyasError(
                f"the server {self._server.name!r} ended with exit code {code}:\n{tail}",
                f"the whole log: {self._log}",
            )

    def end(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _end_with_parent() -> Callable[[], Any]:
    """Let a new process get SIGTERM when this one is killed."""
    library = ctypes.CDLL(None)
    return lambda: library.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
