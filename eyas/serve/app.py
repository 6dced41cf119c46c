"""The endpoints as a starlette application: OpenAI's, Vertex AI's, health and metrics.

Threads parse, render and tokenize bodies, so the event loop never waits. Every failure is an
ApiError. Every request adds a line to the log and counts to the metrics, without any of its text.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from eyas.artifact import VERSION
from eyas.card import CardTau
from eyas.chat import Chat
from eyas.engine.engine import Engine
from eyas.engine.grammar_process import KINDS
from eyas.engine.request import Update
from eyas.errors import ConfigError, EyasError, InputError
from eyas.serve.answers import (
    EventStream,
    api_error,
    event_pieces,
    internal_error,
    json_pieces,
    while_connected,
)
from eyas.serve.fields import parse_body
from eyas.serve.limits import AccessControl, ApiError, LimitsConfig, refused_by_engine
from eyas.serve.metrics import CONTENT_TYPE, Exchange, Metrics, card_figures
from eyas.serve.openapi import document
from eyas.serve.page import page_routes
from eyas.serve.protocol import (
    ChatRequest,
    DetokenizeRequest,
    HeadRequest,
    TextRequest,
    TokenizeRequest,
)
from eyas.serve.responses import ResponsesRequest
from eyas.serve.translation import Body, ModelInfo, Translator, check_logprobs
from eyas.serve.vertex import VertexConfig, error_body, instances, located, openai_body
from eyas.serve.worker import EngineFailure, EngineWorker, QueueFull
from eyas.serve.writers import CompletionWriter

# The endpoint here for a path of another server.
ELSEWHERE = {
    path: what
    for what, paths in {
        "ask at /v1/chat/completions": "/api/chat /chat/completions",
        "ask at /v1/completions": "/api/generate /completion /completions /generate",
        "ask at /v1/models": "/api/tags /models /props",
        "ask at /v1/responses": "/responses",
        "ask at /v1/chat/completions, or let a gateway translate (litellm)": "/v1/messages",
        "ask at /tokenize": "/v1/messages/count_tokens",
        "this server has no embeddings": "/v1/embeddings /embeddings /api/embeddings /api/embed",
    }.items()
    for path in paths.split()
}
CLIENT_GONE = 499  # as access logs call it; no client reads it
LOADING_RETRY_S = 5
# A body up to this many times too long is read to its end: closing with unread bytes resets the
# connection, and the client would see no answer.
MAX_BODY_OVERRUN = 4
SMALL_BODY = 16 << 10  # bytes: tokenized in some 10 ms
LONG_ANSWER = 1024  # tokens: the thread of large bodies writes longer answers
MAX_HELD_BODIES = 16  # of the largest size, in memory before they are translated
log = logging.getLogger("eyas.serve")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelService:
    """A loaded model."""

    info: ModelInfo
    worker: EngineWorker
    translator: Translator
    card: Sequence[CardTau] = ()

    @property
    def info_now(self) -> ModelInfo:
        """`info`, without a head that has failed."""
        has_head = self.info.has_head and self.worker.draft_failure is None
        return replace(self.info, has_head=has_head)

    @classmethod
    def of(
        cls, engine: Engine, chat: Chat, info: ModelInfo, card: Sequence[CardTau] = ()
    ) -> ModelService:
        """The service of an engine that has not started."""
        return cls(info, EngineWorker(engine), Translator(chat, info), card)


def create_app(
    model: str, limits: LimitsConfig | None = None, vertex: VertexConfig | None = None
) -> Starlette:
    """The application; it answers 503 until `app.state.api.open` gives it a model.

    model: the name in requests. Raises what AccessControl raises, and ConfigError.
    """
    api = Api(model, limits or LimitsConfig(), vertex)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await api.close()

    middleware = [Middleware(HostCheck, access=api.access)]
    if origins := api.limits.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_private_network=True,
            expose_headers=["x-request-id", "retry-after"],
        )
        middleware.insert(0, cors)
    app = Starlette(
        routes=api.routes(),
        middleware=middleware,
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.state.api = api
    return app


class HostCheck:
    """Answers 403 where the header Host is not this server's."""

    def __init__(self, app: ASGIApp, access: AccessControl) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        respond = self._app
        if scope["type"] == "http":
            try:
                self._access.check_host(Headers(scope=scope).get("host", ""))
            except ApiError as error:
                respond = JSONResponse(error.body(), error.status, error.headers)
        await respond(scope, receive, send)


def _json_bytes(value: Any) -> bytes:
    return "".join(json_pieces(value)).encode()


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{http.method} {http.url.path[:256]}: {error.detail}"
    if error.status_code == 404:
        known = f"there is {', '.join(http.app.state.api.endpoints)}"
        what += f"; {ELSEWHERE.get(http.url.path, known)}"
    elif allowed := (error.headers or {}).get("Allow"):
        what += f", only {allowed}"
    body = ApiError(error.status_code, what).body()
    return JSONResponse(body, error.status_code, headers=error.headers)


def copy_head(heads: Path, name: str, copy: str) -> None:
    """Copy a head's files: replacing a mapped file would end the process. Raises InputError for
    files that cannot be read or lie elsewhere.
    """
    home = heads.resolve()
    Path(copy).mkdir()
    for path in sorted((home / name).iterdir()):
        if path.is_dir():
            continue
        if not (path.is_file() and path.resolve().is_relative_to(home)):
            raise InputError(
                f"{name}/{path.name} is no file, or a link out of the folder of heads",
                "put the files of a head there themselves",
            )
        try:
            shutil.copyfile(path, Path(copy) / path.name)
        except OSError as error:
            what = f"{name}/{path.name} cannot be read: {error.strerror}"
            raise InputError(what, "copy the head anew") from error


Handler = Callable[[Exchange], Awaitable[Response]]


class Api:
    def __init__(self, model: str, limits: LimitsConfig, vertex: VertexConfig | None) -> None:
        self.limits = limits
        self.access = AccessControl(limits)
        if limits.heads is not None and not self.access.needs_key:
            raise ConfigError(
                "limits.heads lets a request swap the head, and the server has no API keys",
                "give some: --api-keys FILE",
            )
        self._model, self._vertex = model, vertex
        self._metrics = Metrics(model)
        self.probe_paths = {"/health", "/ping", "/metrics"}
        if vertex is not None:
            self.probe_paths.add(vertex.health_route)
        self._service: ModelService  # once it is open
        self._is_open = self._is_draining = False
        self._num_open = 0  # requests that have not ended
        self._started = int(time.time())
        self._recent_e2e_s = 1.0  # moving mean
        self._head: str | None = None  # the last that a request chose
        self._swapping = asyncio.Lock()
        self._held_bytes = 0  # of bodies before they are translated
        self.endpoints: list[str] = []
        self._lanes = ThreadPoolExecutor(1, "small bodies"), ThreadPoolExecutor(1, "large bodies")

    def routes(self) -> list[Route]:
        routes = [
            self._route("/v1/chat/completions", partial(self._complete, ChatRequest), "POST"),
            self._route("/v1/completions", partial(self._complete, TextRequest), "POST"),
            self._route("/v1/responses", partial(self._complete, ResponsesRequest), "POST"),
            self._route("/v1/models", self._models),
            self._route("/v1/models/{model:path}", self._models),
            self._route("/server_info", self._server_info),
            self._route("/get_server_info", self._server_info),
            self._route("/tokenize", partial(self._tokens, TokenizeRequest), "POST"),
            self._route("/detokenize", partial(self._tokens, DetokenizeRequest), "POST"),
            self._route("/v1/head", self._swap_head, "POST"),
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),  # SageMaker's name
            Route("/version", JSONResponse({"version": VERSION}), methods=["GET"]),
            Route("/metrics", self._metrics_page),
            Route("/openapi.json", self._openapi),
        ]
        if (vertex := self._vertex) is not None:
            known = {route.path for route in routes}
            if vertex.predict_route not in known:
                predict = self._route(vertex.predict_route, self._predict, "POST", error_body)
                routes.insert(0, predict)
            if vertex.health_route not in known:
                routes.insert(0, Route(vertex.health_route, self._health))
        self.endpoints = [route.path for route in routes]
        return routes + page_routes()

    # Life

    async def open(self, service: ModelService) -> None:
        """Start the engine and take requests."""
        service.worker.start()
        # nothing runs yet: all pages are available
        counters = await service.worker.inspect(Engine.metrics)
        self._metrics.num_pages = counters["pages_available"]
        self._metrics.card = service.card
        self._service, self._is_open = service, True

    def drain(self) -> None:
        """Take no more requests; those that run have limits.shutdown_s to finish."""
        self._is_draining = True
        if self._is_open:
            worker = self._service.worker
            log.info("shutting down", extra={"data": {"requests": worker.num_requests}})
            asyncio.get_running_loop().call_later(self.limits.shutdown_s, worker.fail_all)

    @property
    def is_drained(self) -> bool:
        """Whether no request runs, and a regular scraper has read the last counters."""
        return self._num_open == 0 and not self._metrics.is_awaited

    async def close(self) -> None:
        for lane in self._lanes:
            lane.shutdown(wait=False, cancel_futures=True)
        if self._is_open:
            await self._service.worker.stop()

    # Every request

    def _route(
        self,
        path: str,
        handle: Handler,
        method: str = "GET",
        error_form: Callable[[ApiError], dict[str, Any]] = ApiError.body,
    ) -> Route:
        """A route that needs a key and a model."""

        async def respond(http: HttpRequest) -> Response:
            exchange = Exchange(http)
            address = exchange.client = http.client.host if http.client else ""
            self._num_open += 1
            try:
                if self._is_draining:
                    what = "the server is shutting down"
                    raise ApiError(503, what, code="shutting_down", retry_after=1)
                key = http.headers.get("authorization", "")
                exchange.client = await self.access.client_name(key, address)
                self.access.count(exchange.client)
                if not self._is_open:
                    what = "the model is being loaded"
                    raise ApiError(503, what, code="loading", retry_after=LOADING_RETRY_S)
                response = await handle(exchange)
            except ApiError as error:
                exchange.failure = exchange.failure or error.code or "bad_request"
                response = JSONResponse(error_form(error), error.status, error.headers)
            except ClientDisconnect:
                exchange.failure = "client_gone"
                response = Response(status_code=CLIENT_GONE)
            except Exception as error:
                response = JSONResponse(error_form(internal_error(exchange, error)), 500)
            response.headers.update({"x-request-id": exchange.id, **exchange.traced})
            if not isinstance(response, EventStream):
                self._end(exchange, response.status_code)
            return response

        return Route(path, respond, methods=[method])

    def _end(self, exchange: Exchange, status: int) -> None:
        if exchange.failure is None and not all(one.is_over for one in exchange.completions):
            exchange.failure = "client_gone"
        self._num_open -= 1
        self._metrics.count(exchange, status)
        if exchange.failure is None and exchange.completions:
            e2e_s = time.perf_counter() - exchange.started
            self._recent_e2e_s += 0.1 * (e2e_s - self._recent_e2e_s)
        log.info("request", extra={"data": exchange.facts(status)})

    # Endpoints

    async def _health(self, _: HttpRequest) -> Response:
        if not self._is_open:
            return JSONResponse({"status": "loading"}, 503, {"retry-after": str(LOADING_RETRY_S)})
        worker = self._service.worker
        if self._is_draining:
            return JSONResponse({"status": "draining", "requests": worker.num_requests}, 503)
        if worker.is_running:
            body = {"status": "ok", "requests": worker.num_requests}
            if worker.draft_failure is not None:
                why = f"{worker.draft_failure}; restart the server to try it again"
                body["warning"] = f"the head failed and is off: {why}"
            return JSONResponse(body)
        error = worker.failure.what if worker.failure else "the engine is not running"
        return JSONResponse({"status": "failed", "error": error}, 503)

    async def _metrics_page(self, _: HttpRequest) -> Response:
        # without a running engine: the server's own part
        counters, num_samples = dict[str, float](), 0
        if self._is_open:
            num_samples = self._service.worker.num_samples
            with suppress(EngineFailure):
                counters = await self._service.worker.inspect(Engine.metrics)
        page = self._metrics.page(counters, num_samples)
        return Response(page, headers={"content-type": CONTENT_TYPE})

    async def _openapi(self, _: HttpRequest) -> Response:
        predict_route = None if self._vertex is None else self._vertex.predict_route
        return JSONResponse(document(self._model, predict_route))

    async def _tokens(
        self, kind: type[TokenizeRequest | DetokenizeRequest], exchange: Exchange
    ) -> Response:
        def answer(text: bytes) -> bytes:
            return _json_bytes(self._service.translator.counted(parse_body(kind, text)))

        found = await self._translated(exchange.http, answer)
        return Response(found, media_type="application/json")

    async def _models(self, exchange: Exchange) -> Response:
        name, info = exchange.http.path_params.get("model"), self._service.info_now
        self._service.translator.check_name(name)
        card = {
            "id": info.model,
            "object": "model",
            "created": self._started,
            "owned_by": "eyas",
            "root": info.model,
            "max_model_len": info.max_length,
            "eyas": asdict(info),
        }
        return JSONResponse({"object": "list", "data": [card]} if name is None else card)

    async def _server_info(self, _: Exchange) -> Response:
        # `sglang.bench_serving` reads tau from it, under both of SGLang's names
        states = [{"avg_spec_accept_length": self._metrics.tau}]
        info = {"served_model_name": self._model, "eyas": asdict(self._service.info_now)}
        return JSONResponse({**info, "internal_states": states})

    async def _swap_head(self, exchange: Exchange) -> Response:
        name = (await self._translated(exchange.http, partial(parse_body, HeadRequest))).head
        heads, worker = self.limits.heads, self._service.worker
        if heads is None:
            message = "this server keeps its head: start it with limits.heads and API keys"
            raise ApiError(403, message, code="head_is_fixed")
        async with self._swapping:
            there = heads.iterdir() if heads.is_dir() else ()
            known = sorted(one.name for one in there if one.is_dir())
            if name not in known:
                named = ", ".join(known) or "none"
                raise ApiError(404, f"no such head here; there is {named}", "head", "no_such_head")
            with TemporaryDirectory() as folder:
                copy = str(Path(folder) / name)
                try:
                    await asyncio.to_thread(copy_head, heads, name, copy)
                    await worker.swap_head(copy)
                except InputError as error:
                    message = refused_by_engine(error).message.replace(copy, name)
                    raise ApiError(400, message, "head", "head_refused") from error
                except EngineFailure as error:
                    raise api_error(error) from error
                before, self._head = self._head, name
                self._metrics.card = await asyncio.to_thread(
                    card_figures, str(heads / name), worker.speculation
                )
        log.info("another head drafts", extra={"data": {"head": name, "before": before}})
        return JSONResponse({"head": name, "before": before})

    async def _predict(self, exchange: Exchange) -> Response:
        def translate(text: bytes) -> tuple[bool, CompletionWriter] | list[CompletionWriter]:
            if (alone := openai_body(text, self._model)) is not None:
                return self._completion(alone)
            completions, bodies = [], instances(text, self._model)
            self._check_answers(bodies)
            for number, body in enumerate(bodies):
                try:
                    completions.append(self._service.translator.completion(body))
                except ApiError as error:
                    raise located(error, number, {}, {}) from error
            check_logprobs([request for one in completions for request in one.requests])
            return completions

        completions = await self._translated(exchange.http, translate)
        if isinstance(completions, tuple):
            return await self._answer(exchange, *completions)
        # one instance that fails fails all
        return await self._whole(
            exchange, completions, lambda: {"predictions": [one.whole() for one in completions]}
        )

    async def _complete(self, kind: type[Body], exchange: Exchange) -> Response:
        def translate(text: bytes) -> tuple[bool, CompletionWriter]:
            return self._completion(parse_body(kind, text))

        return await self._answer(exchange, *await self._translated(exchange.http, translate))

    def _completion(self, body: Body) -> tuple[bool, CompletionWriter]:
        """Whether a body asks for a stream, and its completion."""
        self._check_answers([body])
        completion = self._service.translator.completion(body)
        if not body.stream:
            check_logprobs(completion.requests)
        return body.stream, completion

    def _check_answers(self, bodies: Sequence[Body]) -> None:
        wanted = sum(one.num_answers for one in bodies)
        most = self._service.worker.max_batch + self.limits.max_queue
        if wanted > most:
            raise ApiError(
                400, f"{wanted} samples are more than this server holds at once, {most}", "n"
            )

    # Answers

    async def _answer(
        self, exchange: Exchange, is_stream: bool, completion: CompletionWriter
    ) -> Response:
        if not is_stream:
            return await self._whole(exchange, [completion], completion.whole)
        began = time.monotonic()
        updates = self._submit(exchange, [completion])
        # The first update decides between an error status and 200, so headers wait for it.
        first = await self._done(exchange, anext(updates))
        events = event_pieces(first, updates, exchange, completion)
        left_s = began + self.limits.request_timeout_s - time.monotonic()
        return EventStream(events, left_s, exchange, self._end)

    async def _whole(
        self,
        exchange: Exchange,
        completions: Sequence[CompletionWriter],
        write: Callable[[], Any],
    ) -> Response:
        """Run completions to their ends; `write` makes the answer, in a thread."""
        updates = self._submit(exchange, completions)
        owners = {request.id: one for one in completions for request in one.requests}

        async def keep() -> None:
            async with aclosing(updates):
                async for batch in updates:
                    for update in batch:
                        owners[update.request_id].keep(update)
                    if all(one.is_over for one in completions):
                        break

        await self._done(exchange, keep())
        lane = self._lanes[sum(one.num_written for one in completions) > LONG_ANSWER]
        text = await asyncio.get_running_loop().run_in_executor(lane, lambda: _json_bytes(write()))
        return Response(text, media_type="application/json")

    def _submit(
        self, exchange: Exchange, completions: Sequence[CompletionWriter]
    ) -> AsyncGenerator[list[Update]]:
        exchange.completions = completions
        requests = [request for one in completions for request in one.requests]
        limits = self.limits
        return self._service.worker.updates(requests, limits.request_timeout_s, limits.max_queue)

    async def _done(self, exchange: Exchange, work: Awaitable[T]) -> T:
        try:
            return await while_connected(exchange.http, work)
        except QueueFull as error:
            exchange.completions = ()  # none of them ran
            waited_s = self._recent_e2e_s * error.num_waiting / self._service.worker.max_batch
            wait_s = min(max(1, round(waited_s)), 60)
            raise ApiError(429, error.what, code="queue_full", retry_after=wait_s) from error
        except EyasError as error:
            failed = api_error(error)
            if failed.param in KINDS and any(one.may_call for one in exchange.completions):
                failed.param, failed.message = "tools", f"tools: {failed.message}"
            raise failed from error

    # Bodies

    async def _translated(self, http: HttpRequest, translate: Callable[[bytes], T]) -> T:
        body = bytearray()
        try:
            await self._read_body(http, body)
            lane = self._lanes[len(body) > SMALL_BODY]
            return await asyncio.get_running_loop().run_in_executor(lane, translate, bytes(body))
        finally:
            self._held_bytes -= len(body)

    async def _read_body(self, http: HttpRequest, body: bytearray) -> None:
        # Web pages may send text/plain to a loopback address without asking, but not this type.
        content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise ApiError(415, "send content-type: application/json")
        size, most, is_held = 0, self.limits.max_body_bytes, True
        try:
            async with asyncio.timeout(self.limits.body_timeout_s):
                async for piece in http.stream():
                    size += len(piece)
                    is_full = self._held_bytes + len(piece) > MAX_HELD_BODIES * most
                    is_held = is_held and not (is_full and size > SMALL_BODY)
                    if size <= most and is_held:
                        body += piece
                        self._held_bytes += len(piece)
                    elif size > MAX_BODY_OVERRUN * most:
                        break
        except TimeoutError as error:
            message = f"the body took more than {self.limits.body_timeout_s:g} s"
            raise ApiError(408, message, code="timeout") from error
        if size > most:
            raise ApiError(413, f"the body is over {most} bytes")
        if not is_held:
            message = "too many large bodies at once"
            raise ApiError(429, message, code="queue_full", retry_after=1)
