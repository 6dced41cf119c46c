"""Runs the application: in this process until a signal, in a thread, or in a process of its own.
Knows uvicorn.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import uvicorn
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.applications import Starlette

from eyas.artifact import Artifact
from eyas.builtin import BUILTIN
from eyas.chat import Chat
from eyas.engine.engine import Engine, EngineConfig
from eyas.errors import ConfigError, EyasError
from eyas.hub import resolve_head, resolve_target
from eyas.model.target import Dtype
from eyas.model.weights import fingerprint
from eyas.serve.app import Extras, Served, create_app
from eyas.serve.connection import guarded
from eyas.serve.consent import CollectConfig
from eyas.serve.drift import DriftConfig
from eyas.serve.limits import LimitsConfig, read_keys
from eyas.serve.reference import Reference, promised, stated
from eyas.serve.vertex import VertexConfig
from eyas.serve.waiting import answering
from eyas.serve.worker import Worker

KEEP_ALIVE_S = 30  # a connection may be idle between two requests
LAST_WORDS_S = 2  # for telling the clients of what has not finished by then

log = logging.getLogger("eyas.serve")


class TrafficConfig(BaseModel):
    """What a server learns from its traffic: whether acceptance falls; and, of who consents,
    prompts for the next head.
    """

    model_config = ConfigDict(extra="forbid")

    drift: DriftConfig = DriftConfig()
    collect: CollectConfig | None = None


class ServeConfig(BaseModel):
    """What is served, how precisely, and where. Port 0 takes a free one. device: cpu, cuda, cuda:1.

    threads: of the engine on a CPU, by default torch's own choice, all cores. On few cores a small
    model is served faster with one thread less: two that wait for each other at every operator are
    held up by the event loop and the clients.
    """

    model_config = ConfigDict(extra="forbid")

    target: str | None = None
    head: str | None = None
    dtype: Dtype = "auto"
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:[0-9]+)?)$")
    model: str | None = None  # the name in requests; by default that of the target's folder
    host: str = "127.0.0.1"
    port: int = 8000
    threads: int | None = Field(None, ge=1)
    limits: LimitsConfig = LimitsConfig()
    engine: EngineConfig = EngineConfig()
    traffic: TrafficConfig = TrafficConfig()
    vertex: VertexConfig | None = None

    @model_validator(mode="after")
    def _has_a_target(self) -> ServeConfig:
        if self.target is None and (self.vertex is None or self.vertex.storage_uri is None):
            raise ConfigError("there is no target to serve", "give one: --target FOLDER")
        return self

    @property
    def served_model(self) -> str:
        if self.model is not None or self.target == BUILTIN:
            return self.model or "eyas"
        if self.target is None:
            assert self.vertex is not None
            return str(self.vertex.storage_uri).rstrip("/").rpartition("/")[2]
        return Path(self.target).resolve().name

    def folders(self) -> tuple[str, str | None]:
        """Of target and head, resolved; from below `vertex.storage_uri` those that are not given.
        Raises what resolving raises.
        """
        target, head = self.target, self.head
        if target is None and self.vertex is not None and self.vertex.storage_uri is not None:
            target, stored_head = (
                f"{self.vertex.storage_uri.rstrip('/')}/{part}" for part in ("target", "head")
            )
            if head is None and Artifact(stored_head).names():
                head = stored_head
        assert target is not None
        return resolve_target(target), None if head is None else resolve_head(head)


def build_app(config: ServeConfig) -> Starlette:
    """Load target, head and tokenizer into an application. Raises InputErrors for what does not fit
    together.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    target, head = config.folders()
    chat = Chat(target)
    engine = Engine.load(
        target,
        head,
        dtype=config.dtype,
        config=config.engine,
        device=config.device,
        tokenizer=chat.tokenizer,
    )
    dtype = str(engine.target.dtype).removeprefix("torch.")
    served = Served(
        config.served_model, dtype, head is not None, engine.max_length, fingerprint(target)
    )
    traffic = config.traffic
    extras = Extras(traffic.drift, _reference(traffic.drift, head), traffic.collect, config.vertex)
    return create_app(Worker(engine), chat, served, config.limits, extras)


def _reference(config: DriftConfig, head: str | None) -> Reference | None:
    """What tau is held against: what was given, else what the head's card says."""
    if config.expect_tau is not None or head is None:
        return None if config.expect_tau is None else stated(config.expect_tau)
    found = promised(head)
    if found is None:
        log.info(
            "the head's card has no tau: give traffic.drift.expect_tau to be warned when it falls"
        )
    return found


def serve(config: ServeConfig, on_ready: Callable[[str], None] = print) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests finish. `on_ready` gets the URL once
    it answers.
    """
    with _bound(config.host, config.port) as listener, _ends_on_sigterm():
        with answering(listener) if config.vertex is not None else nullcontext():
            app = build_app(config)
        is_local = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
        if config.vertex is None and not is_local and not read_keys(config.limits.api_keys):
            log.warning(
                "everybody who reaches %s is served: no API keys are given (--api-keys FILE)",
                config.host,
            )
        server = _Server(app, listener, on_ready)
        # uvicorn raises the signal that ended it once more: an end that was asked for is no
        # failure.
        signal.signal(signal.SIGTERM, lambda *_: None)
        server.run(sockets=[listener])


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """A server that still loads ends at once: the first process of a container ignores the signal
    unless it says otherwise.
    """

    def end(*_: object) -> None:
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def running_app(app: Starlette) -> Iterator[str]:
    """The URL of an application served on the loopback by a thread; it stops, gracefully, on
    leaving.
    """
    ready = threading.Event()
    with _bound("127.0.0.1", 0) as listener:
        server = _Server(app, listener, lambda _: ready.set())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
        thread.start()
        try:
            while not ready.wait(0.05):
                if not thread.is_alive():
                    raise EyasError("the server did not start", "its log says why")
            yield server.url
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def running_server(config: ServeConfig) -> Iterator[str]:
    """The URL of a server in a process of its own, once it answers; it is told to end on leaving.

    Raises EyasError when it does not come up; what it has to say about that is on stderr.
    """
    command = [sys.executable, "-m", "eyas.serve", config.model_dump_json()]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            # Libraries may have something to say first.
            url = next(
                (line.strip() for line in process.stdout if line.startswith("http://")), None
            )
            if url is None:
                code = process.wait()
                raise EyasError(
                    f"the server ended with exit code {code} before it was ready",
                    "its message is above",
                )
            yield url
        finally:
            process.terminate()


class _Server(uvicorn.Server):
    """A uvicorn server on a socket that is bound already, which says when it answers, and ends in
    two steps.

    Told to end, it takes no more requests and lets those that run finish, for shutdown_s. What has
    not finished by then is told so, and fails.
    """

    def __init__(
        self, app: Starlette, listener: socket.socket, on_ready: Callable[[str], None]
    ) -> None:
        self._app, self._limits = app, app.state.limits
        super().__init__(
            uvicorn.Config(
                app,
                http=guarded(self._limits),
                ws="none",
                log_level="error",
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=math.ceil(self._limits.shutdown_s + LAST_WORDS_S),
            )
        )
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info("serving", extra={"data": {"url": self.url}})
        self._on_ready(self.url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        worker = self._app.state.worker
        self._app.state.api.is_draining = True
        log.info("shutting down", extra={"data": {"requests": worker.num_requests}})
        last = asyncio.get_running_loop().call_later(self._limits.shutdown_s, worker.fail_all)
        await super().shutdown(sockets)
        last.cancel()


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket, taken before the model is loaded: a port in use is an error at once, and 0
    becomes a number.

    It does not listen yet, so that until the server answers, clients are refused and not left
    waiting.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sends small packets at once; else a stream's second chunk
    # waits 40 ms for the first's receipt.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            what = f"cannot listen on {host}:{port}: {error.strerror or error}"
            raise ConfigError(
                what, "choose another host or port; port 0 takes any free one"
            ) from error
        yield listener
