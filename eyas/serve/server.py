"""Runs the application: in this process until a signal, in a thread, or in a process of its own.

main thread     bind, start the event loop -> load the model -> open the API, wait for a signal
event loop      answers 503 .............................. -> serves
"""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import json
import logging
import math
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, cast

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from eyas.artifact import Artifact
from eyas.builtin import BUILTIN
from eyas.chat import Chat
from eyas.engine.engine import MODEL, Engine, EngineConfig
from eyas.errors import ConfigError, EyasError
from eyas.hub import is_hub_id, resolve_head, resolve_target
from eyas.model.architecture import TargetConfig
from eyas.model.target import Dtype
from eyas.model.threads import set_num_threads
from eyas.model.weights import fingerprint
from eyas.serve.app import Api, ModelService, create_app
from eyas.serve.limits import ADDRESS, ApiError, LimitsConfig
from eyas.serve.metrics import card_figures
from eyas.serve.translation import ModelInfo
from eyas.serve.vertex import VertexConfig
from eyas.settings import Flag

KEEP_ALIVE_S = 30  # a connection may be idle between two requests
LAST_ANSWERS_S = 2  # after shutdown_s, for the answers to requests that have not finished
TICK_S = 0.02  # between two checks whether all requests have finished
MAX_HEAD = 64 << 10  # bytes of a request outside its body
MAX_LINES = 256  # of headers
TOO_LONG = f"the headers are over {MAX_HEAD} bytes"
LINGER_S = 1.0  # how long a refused connection is still read
MAX_SURPLUS = 2048  # connections beyond max_connections that get 503, or are probes
IDLE_S, LOOK_S = 2.0, 0.05  # before an idle one may be closed; between two searches for such
SWITCH_S = 0.0005  # a thread's turn while others wait; Python's default, 5 ms, delays the engine

log = logging.getLogger("eyas.serve")


class ServeConfig(BaseModel):
    """The served model, its precision, and the address."""

    model_config = ConfigDict(extra="forbid")

    target: Annotated[str | None, Flag("--target -t", MODEL)] = Field(
        None, description='folder of the model, a GGUF file, a hub id, or "smollm2"'
    )
    head: Annotated[str | None, Flag(panel=MODEL)] = Field(
        None, description="the same, in any form; none: drafts from text alone"
    )
    dtype: Dtype = Field(
        "auto", description="of the weights; auto: as stored (a GGUF file: packed)"
    )
    model: str | None = Field(None, description="name in requests; null: that of the folder")
    host: Annotated[str, Flag(panel=ADDRESS)] = Field(
        "127.0.0.1", description="address to listen on"
    )
    port: Annotated[int, Flag(panel=ADDRESS)] = Field(
        8000, ge=0, le=65535, description="0 takes a free one"
    )
    threads: int | None = Field(
        None, ge=1, description="of the engine on a CPU; null: all that this process has"
    )
    limits: LimitsConfig = LimitsConfig()
    engine: EngineConfig = EngineConfig()
    vertex: VertexConfig | None = Field(None, description="Vertex AI's, from its environment")

    @model_validator(mode="after")
    def _has_a_target(self) -> ServeConfig:
        if self.target is None and self._storage_uri is None:
            raise ConfigError("there is no target to serve", "give one: --target FOLDER")
        return self

    @property
    def _storage_uri(self) -> str | None:
        uri = self.vertex.storage_uri if self.vertex is not None else None
        return uri.rstrip("/") if uri is not None else None

    @property
    def served_model(self) -> str:
        """The name in requests."""
        if self.model is not None or self.target == BUILTIN:
            return self.model or "eyas"
        if self.target is None:
            return str(self._storage_uri).rpartition("/")[2]
        return Path(self.target).resolve().name

    @property
    def head_place(self) -> str | None:
        """`head`, or its URL where Vertex AI's store holds one."""
        stored = f"{self._storage_uri}/head"
        is_stored = self.target is None and self.head is None and bool(Artifact(stored).names())
        return stored if is_stored else self.head

    def folders(self) -> tuple[str, str | None]:
        """Local folders of target and head. Raises what resolving them raises."""
        target, head = self.target or f"{self._storage_uri}/target", self.head_place
        return resolve_target(target), None if head is None else resolve_head(head)


def load(config: ServeConfig) -> ModelService:
    """Load target, head and tokenizer. Raises InputError where they do not fit together."""
    if config.threads is not None:
        set_num_threads(config.threads)
    target, head = config.folders()
    chat = Chat(target)
    context = TargetConfig.from_folder(target).max_position_embeddings
    asked = config.engine.max_length
    if asked is not None and asked > context:
        raise ConfigError(
            f"engine.max_length={asked} is more than the model's context of {context} tokens",
            f"give {context} or less, or leave it out",
        )
    engine = Engine.load(
        target, head, dtype=config.dtype, config=config.engine, tokenizer=chat.tokenizer
    )
    engine.prepare_grammars()
    info = ModelInfo(
        config.served_model,
        engine.target.precision,
        engine.draft is not None,
        engine.max_length,
        fingerprint(target),
        engine.text_drafts,
        context,
        config.target if config.target and is_hub_id(config.target) else None,
    )
    if info.max_length < context and asked is None:
        log.warning(
            "half of the free memory holds %d tokens a request, the model reads %d: give the "
            "process more memory, or engine.max_length",
            info.max_length,
            context,
        )
    place = config.head_place
    card = [] if place is None else card_figures(place, str(engine.speculation))
    return ModelService.of(engine, chat, info, card)


def serve(config: ServeConfig, on_ready: Callable[[str], None] = print) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests finish. on_ready: gets the URL."""
    sys.setswitchinterval(SWITCH_S)
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.limits.max_connections + 2 * MAX_SURPLUS
    if most_files != resource.RLIM_INFINITY:
        wanted = min(wanted, most_files)
    if files != resource.RLIM_INFINITY and files < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most_files))
    app = create_app(config.served_model, config.limits, config.vertex)
    api: Api = app.state.api
    with _exits_on_signals() as signalled, _listening(app, config.host, config.port) as server:
        server.open(load(config))
        gc.collect()
        is_local = ipaddress.ip_address(server.host).is_loopback
        try:
            # These objects are permanent: exclude them from collections, which take tens of ms.
            gc.freeze()
            if config.vertex is None and not is_local and not api.access.needs_key:
                log.warning(
                    "no API keys are given: every client that reaches %s is served (--api-keys "
                    "FILE)",
                    config.host,
                )
            on_ready(server.url)
            while not server.ended.wait(1):
                if signalled.is_set():
                    raise SystemExit(0)
        finally:
            gc.unfreeze()  # else libraries report uncollected objects at exit


@contextmanager
def _exits_on_signals() -> Iterator[threading.Event]:
    """The first SIGTERM or SIGINT ends the block by SystemExit(0); later ones are ignored. Handlers
    are set before the model is loaded: a container's first process ignores signals that have none.
    The event is set too: Python drops an exception in the collection of a weak reference.
    """
    signalled = threading.Event()

    def end(*_: object) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        signalled.set()
        raise SystemExit(0)

    before = {one: signal.signal(one, end) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signalled
    finally:
        if not signalled.is_set():
            for one, handler in before.items():
                signal.signal(one, handler)


@contextmanager
def running_app(app: Starlette, service: ModelService) -> Iterator[str]:
    """The URL of an application that serves a loaded model from a thread, on the loopback."""
    with _listening(app, "127.0.0.1", 0) as server:
        server.open(service)
        yield server.url


@contextmanager
def running_server(config: ServeConfig) -> Iterator[str]:
    """The URL of a server in a process of its own, once it answers. Leaving ends it by SIGTERM; if
    this process is killed, the end of its standard input does. Raises EyasError when it does not
    start; its own message is on stderr.
    """
    command = [sys.executable, "-m", "eyas.serve", config.model_dump_json(), "ends-with-input"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
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
            process.wait()  # before its input is closed, which would end it at once


class Connection(HttpToolsProtocol):
    """A connection with limits of size and time for headers and trailers, and for silence.

    Beyond max_connections, silent connections are closed, else the one that has been idle longest.
    Further ones get 503, except for health probes: a refused probe would restart a server that is
    well.
    """

    searched_at = 0.0  # the last search for idle ones, which costs as much as an answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.idle_since = now = self.loop.time()
        self._is_in_head, self._is_refused, self._head_bytes = True, False, 0
        self._refusal = ApiError(400, "this is no HTTP request")
        self._api: Api = self.config.app.state.api  # type: ignore[union-attr]
        self._head_s, most = self._api.limits.body_timeout_s, self._api.limits.max_connections
        self._late: asyncio.TimerHandle | None = self.loop.call_later(self._head_s, transport.close)
        if len(self.connections) > most + MAX_SURPLUS:
            transport.abort()
        elif len(self.connections) > most and now > Connection.searched_at + LOOK_S:
            Connection.searched_at = now
            others = cast(set[Connection], self.connections)
            idle = [one for one in others if one.is_idle and one.idle_since < now - IDLE_S]
            silent = [one for one in idle if one.cycle is None or not one._is_in_head]
            for one in silent or sorted(idle, key=lambda one: one.idle_since)[:1]:
                one.transport.close()
                self.connections.discard(one)  # counts no longer, though its end comes later
        self._is_surplus = len(self.connections) > most

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_late()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD and not self._is_refused:
            self._refusal = ApiError(431, TOO_LONG)
            self.send_400_response("")
        elif self._is_in_head and self._head_bytes and self._late is None:
            self._late = self.loop.call_later(self._head_s, self.transport.close)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = max(self._head_bytes, 1)

    def on_header(self, name: bytes, value: bytes) -> None:
        # an exception here or below ends in `send_400_response`
        if len(self.headers) == MAX_LINES:
            self._refusal = ApiError(431, f"the headers are over {MAX_LINES} lines")
            raise ValueError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD:
            self._refusal = ApiError(431, TOO_LONG)
            raise ValueError
        path = self.url.partition(b"?")[0].decode("latin-1")
        if self._is_surplus and path not in self._api.probe_paths:
            what = f"more than {self._api.limits.max_connections} connections at once"
            self._refusal = ApiError(503, what, code="too_many_connections", retry_after=1)
            raise ValueError
        self._cancel_late()
        self._is_in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._cancel_late()
        self._is_in_head, self._head_bytes = True, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        if not self._is_in_head and self._late is None:  # the rest of the body is not needed
            self._late = self.loop.call_later(self._head_s, self.transport.close)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request and read on for a moment: a client that still sends would lose the
        answer if the connection closed at once. Where another answer has begun, only close.
        """
        if self.cycle is not None and not (self._is_in_head and self.cycle.response_complete):
            self.cycle.disconnected = True
            if self.cycle.response_started:
                self._is_refused = True
                return self.transport.close()
        error, body = self._refusal, json.dumps(self._refusal.body()).encode()
        headers = error.headers | {"content-type": "application/json", "connection": "close"}
        headers["content-length"] = str(len(body))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + f"{lines}\r\n".encode() + body)
        self._is_refused = True
        self.connections.discard(self)
        self.loop.call_later(LINGER_S, self.transport.close)

    def _cancel_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    @property
    def is_idle(self) -> bool:
        return not self.transport.is_closing() and (
            self.cycle is None or self.cycle.response_complete
        )


class UvicornServer(uvicorn.Server):
    """A uvicorn server in a thread, on a bound socket. It ends in two steps: for shutdown_s,
    running requests finish and only /health and /metrics are answered; then what still runs fails
    with a message.
    """

    def __init__(self, app: Starlette, listener: socket.socket) -> None:
        self._api: Api = app.state.api
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                log_level="critical",  # errors are in our own log, without what clients wrote
                access_log=False,
                server_header=False,
                proxy_headers=False,  # a client could write X-Forwarded-For itself
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self.host, port = listener.getsockname()[:2]
        self._api.access.checks_hosts |= ipaddress.ip_address(self.host).is_loopback
        self.url = f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{port}"
        self.thread = threading.Thread(target=self.run, args=([listener],), name="server")
        self.listens = threading.Event()
        # the state of `thread.join` is wrong after a signal's exception
        self.ended = threading.Event()

    def open(self, service: ModelService) -> None:
        asyncio.run_coroutine_threadsafe(self._api.open(service), self.loop).result()
        log.info("serving", extra={"data": {"url": self.url}})

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets)
        finally:
            self.ended.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()
        self.listens.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._api.drain()
        end = self.loop.time() + self._api.limits.shutdown_s
        while not (self._api.is_drained or self.force_exit) and self.loop.time() < end:
            await asyncio.sleep(TICK_S)
        # answers on their way have the rest of the time
        left_s = max(0.0, end - self.loop.time()) + LAST_ANSWERS_S
        self.config.timeout_graceful_shutdown = math.ceil(left_s)
        await super().shutdown(sockets)


@contextmanager
def _listening(app: Starlette, host: str, port: int) -> Iterator[UvicornServer]:
    with _bound(host, port) as listener:
        server = UvicornServer(app, listener)
        server.thread.start()
        try:
            while not server.listens.wait(0.05):
                if not server.thread.is_alive():
                    raise EyasError("the server did not start", "its log says why")
            yield server
        finally:
            server.should_exit = True
            server.ended.wait()
            server.thread.join()


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    # Bound before the model is loaded: a port in use is an error at once.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY; else a stream's second chunk waits 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            what = f"cannot listen on {host}:{port}: {error.strerror or error}"
            hint = "choose another host or port; port 0 takes any free one"
            raise ConfigError(what, hint) from error
        yield listener
