"""The HTTP side: OpenAI's endpoints, health and metrics as a starlette application. Knows the worker, not the engine's inside.

    enter (key, rate) -> body (size, time) -> form -> engine's terms -> queue -> updates -> events or one object

What goes wrong on the way is an ApiError. Every request ends in one line of log and in the metrics, and neither has any of its
text.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import traceback
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from eyas.chat import Chat
from eyas.engine.request import Update
from eyas.errors import EyasError, InputError
from eyas.serve.chat_request import ChatRequest
from eyas.serve.completion import Answer, Piece
from eyas.serve.fields import SamplingFields, parse_body
from eyas.serve.limits import Door, LimitsConfig
from eyas.serve.metrics import CONTENT_TYPE, EngineState, Metrics
from eyas.serve.openapi import document
from eyas.serve.refusal import ApiError, refused_by_engine
from eyas.serve.text_request import TextRequest
from eyas.serve.translation import Served, Translator, Work
from eyas.serve.worker import EngineFailure, Stopped, TimedOut, Worker
from eyas.serve.writer import DONE, error_event

__all__ = ["Served", "create_app"]

CLIENT_GONE = 499  # what access logs call this; nobody reads it
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_HEARD_OUT = 4  # a body up to so many times too long is read to its end: a client that is cut off sees no answer
T = TypeVar("T")
log = logging.getLogger("eyas.serve")


def create_app(worker: Worker, chat: Chat, served: Served, limits: LimitsConfig | None = None) -> Starlette:
    """The application; it starts the worker when it starts and stops it when it ends. Raises what reading API keys raises."""
    limits = limits or LimitsConfig()
    api = _Api(worker, chat, served, limits)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await worker.start()
        await api.start()
        yield
        await worker.stop()

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", api.endpoint(api.chat_completions), methods=["POST"]),
            Route("/v1/completions", api.endpoint(api.completions), methods=["POST"]),
            Route("/v1/models", api.endpoint(api.models)),
            Route("/v1/models/{model:path}", api.endpoint(api.model)),
            Route("/health", api.health),
            Route("/metrics", api.metrics_page),
            Route("/openapi.json", api.openapi),
        ],
        exception_handlers={HTTPException: _http_error},
        lifespan=lifespan,
    )
    app.state.worker, app.state.limits, app.state.api = worker, limits, api
    return app


@dataclass
class Exchange:
    """One HTTP request, for the log and the metrics. id: the client's own, if it sent one that can be logged."""

    http: HttpRequest
    endpoint: str
    id: str
    client: str = ""
    answer: Answer | None = None
    failure: str | None = None  # in one word
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, http: HttpRequest) -> Exchange:
        """Of a request that has a route."""
        sent = http.headers.get("x-request-id", "")
        return cls(http, http.scope["route"].path, sent if _REQUEST_ID.fullmatch(sent) else uuid.uuid4().hex)

    def facts(self, status: int) -> dict[str, Any]:
        """What the log tells: who, what, how long; no text."""
        facts: dict[str, Any] = {
            "request_id": self.id,
            "endpoint": self.endpoint,
            "status": status,
            "client": self.client,
            "ms": round(1000 * (time.perf_counter() - self.started), 1),
        }
        if self.failure is not None:
            facts["failure"] = self.failure
        answer = self.answer
        if answer is not None:
            facts |= {
                "num_prompt_tokens": answer.num_prompt_tokens,
                "num_output_tokens": answer.num_tokens,
                "finish_reasons": answer.endings,
                "tau": None if answer.tau is None else round(answer.tau, 3),
                "ttft_ms": None if answer.first_at is None else round(1000 * (answer.first_at - answer.started), 1),
            }
        return facts


Handler = Callable[[HttpRequest, Exchange], Awaitable[Response]]


class _Api:
    """The endpoints."""

    def __init__(self, worker: Worker, chat: Chat, served: Served, limits: LimitsConfig) -> None:
        self.is_draining = False
        self._worker = worker
        self._served = served
        self._limits = limits
        self._door = Door(limits)
        self._translator = Translator(chat, served)
        self._metrics = Metrics(served.model, 1)
        self._started = int(time.time())
        self._usual_s = 1.0  # an answer takes, lately

    async def start(self) -> None:
        """Once the worker runs, and nothing else does yet: all pages are there to be counted."""
        state = await self._worker.look(EngineState.of)
        self._metrics = Metrics(self._served.model, state.counters["pages_available"])

    def endpoint(self, handle: Handler) -> Callable[[HttpRequest], Awaitable[Response]]:
        """A handler for those who have been let in; whatever it raises becomes an answer."""

        async def answered(http: HttpRequest) -> Response:
            exchange = Exchange.of(http)
            try:
                exchange.client = self._door.enter(
                    http.headers.get("authorization", ""), http.client.host if http.client else ""
                )
                response = await handle(http, exchange)
            except ApiError as error:
                exchange.failure = exchange.failure or error.code or "bad_request"
                response = JSONResponse(error.body(), error.status, error.headers)
            except ClientDisconnect:
                exchange.failure = "client_gone"
                response = Response(status_code=CLIENT_GONE)
            except Exception as error:
                exchange.failure = "internal_error"
                _log_bug(exchange, error)
                response = JSONResponse(ApiError(500, f"internal error: {type(error).__name__}").body(), 500)
            response.headers["x-request-id"] = exchange.id
            if not isinstance(response, EventStream):
                self._over(exchange, response.status_code)
            return response

        return answered

    # Endpoints

    async def health(self, _: HttpRequest) -> Response:
        """200 while the engine can take requests, else 503 with the reason."""
        if self.is_draining:
            return JSONResponse({"status": "draining", "requests": self._worker.num_requests}, 503)
        if self._worker.is_running:
            return JSONResponse({"status": "ok", "requests": self._worker.num_requests})
        failure = self._worker.failure
        return JSONResponse({"status": "failed", "error": failure.what if failure else "the engine is not running"}, 503)

    async def metrics_page(self, _: HttpRequest) -> Response:
        """What Prometheus scrapes; of an engine that has failed, the server's own part."""
        try:
            state = await self._worker.look(EngineState.of)
        except EngineFailure:
            state = EngineState({}, [])
        return Response(self._metrics.page(state, self._worker.num_samples), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, _: HttpRequest) -> Response:
        return JSONResponse(document(self._served.model))

    async def models(self, http: HttpRequest, exchange: Exchange) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, http: HttpRequest, exchange: Exchange) -> Response:
        if http.path_params["model"] != self._served.model:
            raise ApiError(404, f"no such model here, only {self._served.model!r}", "model", "model_not_found")
        return JSONResponse(self._card)

    async def chat_completions(self, http: HttpRequest, exchange: Exchange) -> Response:
        asked = parse_body(ChatRequest, await _body(http, self._limits))
        return await self._answer(exchange, asked, self._translator.chat(asked))

    async def completions(self, http: HttpRequest, exchange: Exchange) -> Response:
        asked = parse_body(TextRequest, await _body(http, self._limits))
        return await self._answer(exchange, asked, self._translator.text(asked))

    @property
    def _card(self) -> dict[str, Any]:
        served = self._served
        card = {"id": served.model, "object": "model", "created": self._started, "owned_by": "eyas"}
        return {**card, "max_model_len": served.max_length, "eyas": asdict(served)}

    # Answers

    async def _answer(self, exchange: Exchange, asked: SamplingFields, work: Work) -> Response:
        self._admit(work.num_samples)
        answer = exchange.answer = Answer.to(work.requests, self._translator.tokenizer, work.reading)
        answer.started = exchange.started
        updates = self._worker.updates(work.requests, self._limits.request_timeout_s)
        with _refusals():
            if not asked.stream:
                pieces = await _while_connected(exchange.http, _collect(updates, answer))
                return JSONResponse(work.writer.whole(pieces, answer.usage()))
            # The first update decides between an error status and 200, so headers wait for it.
            first = await _while_connected(exchange.http, anext(updates))
        events = self._events(first, updates, exchange, work, asked.usage_in)
        return EventStream(events, lambda: self._over(exchange, 200))

    def _admit(self, num_samples: int) -> None:
        """Raises ApiError for more than may wait: now, or ever."""
        most = self._worker.max_batch + self._limits.max_queue
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=1)
        if num_samples > most:
            raise ApiError(400, f"{num_samples} samples are more than this server holds at once, {most}", "n")
        waiting = self._worker.num_samples + num_samples - self._worker.max_batch
        if waiting > self._limits.max_queue:
            wait = min(max(1, round(self._usual_s * waiting / self._worker.max_batch)), 60)
            raise ApiError(429, "too many requests wait already", code="queue_full", retry_after=wait)

    async def _events(
        self, first: list[Update], updates: AsyncGenerator[list[Update]], exchange: Exchange, work: Work, usage_in: str
    ) -> AsyncGenerator[bytes]:
        """The events of an answer, those of all updates that came together in one piece; its end goes with the last."""
        answer = exchange.answer
        assert answer is not None
        batch = first
        async with aclosing(updates):
            while True:
                events = []
                for update in batch:
                    piece = answer.push(update)
                    events.append(work.writer.chunk(piece, answer.usage() if usage_in == "all" else None))
                if answer.is_over:
                    break
                yield "".join(events).encode()
                try:
                    batch = await anext(updates)
                except EyasError as error:
                    refusal = _refusal(error)
                    exchange.failure = refusal.code or "engine_failure"
                    yield error_event(refusal.body())
                    return
        if usage_in != "none":
            events.append(work.writer.usage_chunk(answer.usage()))
        yield "".join(events).encode() + DONE

    def _over(self, exchange: Exchange, status: int) -> None:
        """Of every request, once: its line of log, and its part in the metrics."""
        self._metrics.responded(exchange.endpoint, status)
        answer = exchange.answer
        if answer is not None:
            if exchange.failure is None and not answer.is_over:
                exchange.failure = "client_gone"
            self._metrics.ended(answer, exchange.failure)
            if exchange.failure is None:
                self._usual_s += 0.1 * (time.perf_counter() - answer.started - self._usual_s)
        log.info("request", extra={"data": exchange.facts(status)})


class EventStream(Response):
    """Server-sent events whose source is closed, and its request cancelled, as soon as the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], on_end: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending, gone = asyncio.ensure_future(self._send(send)), asyncio.ensure_future(receive())
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            for future in (sending, gone):
                future.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            self._on_end()

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for events in self._events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _collect(updates: AsyncGenerator[list[Update]], answer: Answer) -> list[Piece]:
    """All of an answer."""
    async with aclosing(updates):
        return [answer.push(update) async for batch in updates for update in batch]


async def _while_connected(http: HttpRequest, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. Raises ClientDisconnect and what `work` raises."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(http.receive())  # the body is read: the next message is the disconnect
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


@contextmanager
def _refusals() -> Iterator[None]:
    """What the worker raises, as ApiErrors."""
    try:
        yield
    except EyasError as error:
        raise _refusal(error) from error


def _refusal(error: EyasError) -> ApiError:
    if isinstance(error, InputError):
        return refused_by_engine(error)
    if isinstance(error, TimedOut):
        return ApiError(504, error.what, code="timeout")
    if isinstance(error, Stopped):
        return ApiError(503, error.what, code="shutting_down", retry_after=1)
    return ApiError(500, error.what, code="engine_failure")


async def _body(http: HttpRequest, limits: LimitsConfig) -> bytes:
    """The body of a JSON request. Raises ApiError for another type, more than max_body_bytes, or one that comes too slowly."""
    # A page in a browser may send text/plain to a loopback address unasked, but not this type.
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "send content-type: application/json")
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(limits.read_timeout_s):
            async for piece in http.stream():
                size += len(piece)
                if size <= limits.max_body_bytes:
                    body += piece
                elif size > _HEARD_OUT * limits.max_body_bytes:
                    break
    except TimeoutError as error:
        raise ApiError(408, f"the body took more than {limits.read_timeout_s:g} s", code="timeout") from error
    if size > limits.max_body_bytes:
        raise ApiError(413, f"the body is over {limits.max_body_bytes} bytes")
    return bytes(body)


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = ApiError(error.status_code, f"{http.method} {http.url.path[:256]}: {error.detail}")
    return JSONResponse(what.body(), error.status_code, headers=error.headers)


def _log_bug(exchange: Exchange, error: Exception) -> None:
    """Where it happened, not what it says: a message may quote what a client wrote."""
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    data = {"request_id": exchange.id, "error": type(error).__name__, "places": places[-12:]}
    log.error("internal error", extra={"data": data})
