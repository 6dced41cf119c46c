"""The HTTP side: OpenAI's endpoints, SGLang's and Vertex AI's, health and metrics as a starlette
application. Knows the worker, not the engine's inside.

    enter (key, rate) -> body (size, time) -> form -> engine's terms -> queue -> updates -> events or one object

What goes wrong on the way is an ApiError. Every request ends in one line of log and in the metrics,
and neither has any of its text.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from eyas.chat import Chat
from eyas.engine.engine import Engine
from eyas.engine.request import Update
from eyas.errors import EyasError, InputError
from eyas.serve.chat_request import ChatRequest
from eyas.serve.completion import Answer, Piece
from eyas.serve.consent import CollectConfig, Collector
from eyas.serve.drift import Drift, DriftConfig, Rounds
from eyas.serve.events import EventStream, while_connected
from eyas.serve.exchange import Exchange
from eyas.serve.fields import parse_body
from eyas.serve.generate_request import GenerateRequest
from eyas.serve.limits import Door, LimitsConfig
from eyas.serve.metrics import CONTENT_TYPE, EngineState, Metrics
from eyas.serve.openapi import document
from eyas.serve.playground import routes as page_routes
from eyas.serve.reference import Reference
from eyas.serve.refusal import ApiError, refused_by_engine, unsupported
from eyas.serve.text_request import TextRequest
from eyas.serve.translation import Served, Translator, Work
from eyas.serve.vertex import VertexConfig, error_body, instances, located
from eyas.serve.worker import EngineFailure, Stopped, TimedOut, Worker
from eyas.serve.writer import DONE, error_event

__all__ = ["Extras", "Served", "create_app"]

CLIENT_GONE = 499  # what access logs call this; nobody reads it
# a body up to so many times too long is read to its end: a client that is cut off sees no answer
_HEARD_OUT = 4
_DRIFT_LOOKS = 10  # at the windows, in the time of one
Asked = ChatRequest | TextRequest | GenerateRequest
log = logging.getLogger("eyas.serve")


@dataclass(frozen=True, slots=True)
class Extras:
    """What a server does beside answering. reference: what its head promises; collect, vertex: None
    where that is not done.
    """

    drift: DriftConfig = field(default_factory=DriftConfig)
    reference: Reference | None = None
    collect: CollectConfig | None = None
    vertex: VertexConfig | None = None


def create_app(
    worker: Worker,
    chat: Chat,
    served: Served,
    limits: LimitsConfig | None = None,
    extras: Extras | None = None,
) -> Starlette:
    """The application; it starts the worker when it starts and stops it when it ends. Raises what
    reading API keys raises.
    """
    limits = limits or LimitsConfig()
    api = _Api(worker, chat, served, limits, extras or Extras())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await worker.start()
        await api.start()
        yield
        await worker.stop()
        await api.stop()

    app = Starlette(
        routes=_routes(api), exception_handlers={HTTPException: _http_error}, lifespan=lifespan
    )
    app.state.worker, app.state.limits, app.state.api = worker, limits, api
    return app


def _routes(api: _Api) -> list[Route]:
    """Vertex AI's routes too, but where they are those of an endpoint that is there: then they ask
    for that one.
    """
    routes = [
        Route("/v1/chat/completions", api.endpoint(api.chat_completions), methods=["POST"]),
        Route("/v1/completions", api.endpoint(api.completions), methods=["POST"]),
        Route("/generate", api.endpoint(api.generate), methods=["POST"]),
        Route("/v1/models", api.endpoint(api.models)),
        Route("/v1/models/{model:path}", api.endpoint(api.model)),
        Route("/drift", api.endpoint(api.drift)),
        Route("/server_info", api.endpoint(api.server_info)),
        Route("/get_server_info", api.endpoint(api.server_info)),
        Route("/health", api.health),
        Route("/metrics", api.metrics_page),
        Route("/openapi.json", api.openapi),
    ]
    if (vertex := api.extras.vertex) is not None:
        known = {route.path for route in routes}
        if vertex.predict_route not in known:
            routes.insert(
                0,
                Route(
                    vertex.predict_route, api.endpoint(api.predict, error_body), methods=["POST"]
                ),
            )
        if vertex.health_route not in known:
            routes.insert(0, Route(vertex.health_route, api.health))
    return routes + page_routes()


Handler = Callable[[HttpRequest, Exchange], Awaitable[Response]]


class _Api:
    """The endpoints."""

    def __init__(
        self, worker: Worker, chat: Chat, served: Served, limits: LimitsConfig, extras: Extras
    ) -> None:
        self.is_draining = False
        self.extras = extras
        self._worker = worker
        self._served = served
        self._limits = limits
        self._door = Door(limits)
        self._translator = Translator(chat, served)
        self._metrics = Metrics(served.model, 1)
        self._drift = Drift(extras.drift, extras.reference, served.model)
        self._watching: asyncio.Task[None] | None = None
        self._collector = (
            Collector(extras.collect, served.model) if extras.collect is not None else None
        )
        self._can_draft = False  # whatever a request allows
        self._started = int(time.time())
        self._usual_s = 1.0  # an answer takes, lately

    async def start(self) -> None:
        """Once the worker runs, and nothing else does yet: all pages are there to be counted."""
        state = await self._worker.look(EngineState.of)
        self._can_draft = await self._worker.look(lambda engine: engine.draft is not None)
        self._metrics = Metrics(self._served.model, state.counters["pages_available"])
        self._metrics.also_tell(self._drift)
        if self._collector is not None:
            await self._collector.start()
            self._metrics.also_tell(self._collector)
        self._watching = asyncio.ensure_future(self._watch())

    async def stop(self) -> None:
        """Once the worker has stopped."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._collector is not None:
            await self._collector.stop()

    async def _watch(self) -> None:
        """Close the windows of drift as they are due."""
        while True:
            await asyncio.sleep(self.extras.drift.window_s / _DRIFT_LOOKS)
            if self._drift.is_due:
                try:
                    self._drift.close(await self._worker.look(_drafted_depths))
                except EngineFailure:
                    continue
                # a window that cannot be judged must not end all later ones unseen
                except Exception as error:
                    _log_bug(None, error)

    def endpoint(
        self, handle: Handler, shape: Callable[[ApiError], dict[str, Any]] = ApiError.body
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        """A handler for those who have been let in; whatever it raises becomes an answer. shape: of
        errors.
        """

        async def answered(http: HttpRequest) -> Response:
            exchange = Exchange.of(http)
            try:
                exchange.client = http.client.host if http.client else ""
                exchange.client = self._door.name(
                    http.headers.get("authorization", ""), exchange.client
                )
                self._door.count(exchange.client)
                exchange.read_headers()
                response = await handle(http, exchange)
            except ApiError as error:
                exchange.failure = exchange.failure or error.code or "bad_request"
                response = JSONResponse(shape(error), error.status, error.headers)
            except ClientDisconnect:
                exchange.failure = "client_gone"
                response = Response(status_code=CLIENT_GONE)
            except Exception as error:
                exchange.failure = "internal_error"
                _log_bug(exchange, error)
                response = JSONResponse(
                    shape(ApiError(500, f"internal error: {type(error).__name__}")), 500
                )
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
        return JSONResponse(
            {"status": "failed", "error": failure.what if failure else "the engine is not running"},
            503,
        )

    async def metrics_page(self, _: HttpRequest) -> Response:
        """What Prometheus scrapes; of an engine that has failed, the server's own part."""
        try:
            state = await self._worker.look(EngineState.of)
        except EngineFailure:
            state = EngineState({}, [])
        return Response(
            self._metrics.page(state, self._worker.num_samples),
            headers={"content-type": CONTENT_TYPE},
        )

    async def openapi(self, _: HttpRequest) -> Response:
        vertex = self.extras.vertex
        return JSONResponse(
            document(self._served.model, vertex.predict_route if vertex is not None else None)
        )

    async def models(self, http: HttpRequest, exchange: Exchange) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, http: HttpRequest, exchange: Exchange) -> Response:
        if http.path_params["model"] != self._served.model:
            raise ApiError(
                404, f"no such model here, only {self._served.model!r}", "model", "model_not_found"
            )
        return JSONResponse(self._card)

    async def chat_completions(self, http: HttpRequest, exchange: Exchange) -> Response:
        asked = parse_body(ChatRequest, await _body(http, self._limits))
        return await self._answer(exchange, asked, self._translator.chat(asked))

    async def completions(self, http: HttpRequest, exchange: Exchange) -> Response:
        asked = parse_body(TextRequest, await _body(http, self._limits))
        return await self._answer(exchange, asked, self._translator.text(asked))

    async def generate(self, http: HttpRequest, exchange: Exchange) -> Response:
        """SGLang's own."""
        asked = parse_body(GenerateRequest, await _body(http, self._limits))
        return await self._answer(exchange, asked, self._translator.generate(asked))

    async def predict(self, http: HttpRequest, exchange: Exchange) -> Response:
        """Vertex AI's: all instances at once; one that fails fails all."""
        asked = instances(await _body(http, self._limits), self._served.model)
        works = [self._instance(number, one) for number, one in enumerate(asked)]
        self._admit(sum(work.num_samples for work in works))
        self._keep(exchange, asked)
        answers = [
            Answer.to(work.requests, self._translator.tokenizer, work.reading) for work in works
        ]
        exchange.answers = answers
        owners = {
            request.id: number for number, work in enumerate(works) for request in work.requests
        }
        updates = self._worker.updates(
            [one for work in works for one in work.requests], self._limits.request_timeout_s
        )
        with _refusals():
            pieces = await while_connected(
                http, _collect(updates, {key: answers[number] for key, number in owners.items()})
            )
        predictions = []
        for number, (work, answer) in enumerate(zip(works, answers, strict=True)):
            of_work = [piece for key, piece in pieces if owners[key] == number]
            predictions.append(work.writer.whole(of_work, answer.usage()))
        return JSONResponse({"predictions": predictions})

    def _instance(self, number: int, asked: ChatRequest | TextRequest) -> Work:
        try:
            return (
                self._translator.chat(asked)
                if isinstance(asked, ChatRequest)
                else self._translator.text(asked)
            )
        except ApiError as error:
            raise located(error, number, {}, {}) from error

    async def drift(self, http: HttpRequest, exchange: Exchange) -> Response:
        """Acceptance by slice and window."""
        return JSONResponse(self._drift.told())

    async def server_info(self, http: HttpRequest, exchange: Exchange) -> Response:
        """What `sglang.bench_serving` reads tau from; under both of SGLang's names."""
        served = self._served
        state = {"avg_spec_accept_length": self._metrics.tau}
        return JSONResponse(
            {"served_model_name": served.model, "eyas": asdict(served), "internal_states": [state]}
        )

    @property
    def _card(self) -> dict[str, Any]:
        served = self._served
        card = {
            "id": served.model,
            "object": "model",
            "created": self._started,
            "owned_by": "eyas",
            "root": served.model,
        }
        return {**card, "max_model_len": served.max_length, "eyas": asdict(served)}

    # Answers

    async def _answer(self, exchange: Exchange, asked: Asked, work: Work) -> Response:
        self._admit(work.num_samples)
        self._keep(exchange, [asked])
        answer = Answer.to(work.requests, self._translator.tokenizer, work.reading)
        answer.started = exchange.started
        exchange.answers = [answer]
        updates = self._worker.updates(work.requests, self._limits.request_timeout_s)
        with _refusals():
            if not asked.stream:
                owners = {request.id: answer for request in work.requests}
                pieces = await while_connected(exchange.http, _collect(updates, owners))
                return JSONResponse(
                    work.writer.whole([piece for _, piece in pieces], answer.usage())
                )
            # The first update decides between an error status and 200, so headers wait for it.
            first = await while_connected(exchange.http, anext(updates))
        events = self._events(first, updates, exchange, work)
        return EventStream(events, lambda: self._over(exchange, 200))

    def _keep(self, exchange: Exchange, asked: Sequence[Asked]) -> None:
        """Take the tags, and the prompts where they may be kept. Raises ApiError where that is
        demanded and not done.
        """
        for one in asked:
            exchange.tags.append(one.metadata.tag or exchange.tag)
            if one.store and self._collector is None:
                raise unsupported("store", "nothing is kept here; leave it out (or false)")
        for one in asked:
            consents = exchange.consents if one.store is None else one.store
            if consents and self._collector is not None:
                self._collector.keep(one)

    def _admit(self, num_samples: int) -> None:
        """Raises ApiError for more than may wait: now, or ever."""
        most = self._worker.max_batch + self._limits.max_queue
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=1)
        if num_samples > most:
            raise ApiError(
                400, f"{num_samples} samples are more than this server holds at once, {most}", "n"
            )
        waiting = self._worker.num_samples + num_samples - self._worker.max_batch
        if waiting > self._limits.max_queue:
            wait = min(max(1, round(self._usual_s * waiting / self._worker.max_batch)), 60)
            raise ApiError(
                429, "too many requests wait already", code="queue_full", retry_after=wait
            )

    async def _events(
        self,
        first: list[Update],
        updates: AsyncGenerator[list[Update]],
        exchange: Exchange,
        work: Work,
    ) -> AsyncGenerator[bytes]:
        """The events of an answer, those of all updates that came together in one piece; its end
        goes with the last.
        """
        (answer,) = exchange.answers
        usage_in, batch = work.usage_in, first
        async with aclosing(updates):
            while True:
                events = []
                try:
                    for update in batch:
                        piece = answer.push(update)
                        events.append(
                            work.writer.chunk(piece, answer.usage() if usage_in == "all" else None)
                        )
                # the status is sent: the stream says it, and the log where, not what
                except Exception as error:
                    _log_bug(exchange, error)
                    exchange.failure = "internal_error"
                    yield error_event(
                        ApiError(500, f"internal error: {type(error).__name__}").body()
                    )
                    return
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
        if exchange.failure is None and not all(answer.is_over for answer in exchange.answers):
            exchange.failure = "client_gone"
        # no answers if it was refused
        for answer, tag in zip(exchange.answers, exchange.tags, strict=False):
            self._metrics.ended(answer, exchange.failure)
            rounds = Rounds(answer.accept_hist, answer.plain_rounds if self._can_draft else 0)
            self._drift.count(rounds, exchange.endpoint, tag, answer.num_prompt_tokens)
            if exchange.failure is None:
                self._usual_s += 0.1 * (time.perf_counter() - answer.started - self._usual_s)
        log.info("request", extra={"data": exchange.facts(status)})


def _drafted_depths(engine: Engine) -> Counter[int]:
    """{levels of the tree: samples that drafted}, over the last rounds. To be called on the thread
    that owns the engine.
    """
    depths: Counter[int] = Counter()
    for record in engine.policy.records:
        if record.num_drafting:
            depths[record.depth] += record.num_drafting
    return depths


async def _collect(
    updates: AsyncGenerator[list[Update]], answers: Mapping[str, Answer]
) -> list[tuple[str, Piece]]:
    """All of some answers, each piece with its request's id."""
    async with aclosing(updates):
        return [
            (update.request_id, answers[update.request_id].push(update))
            async for batch in updates
            for update in batch
        ]


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
    """The body of a JSON request. Raises ApiError for another type, more than max_body_bytes, or
    one that comes too slowly.
    """
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
        raise ApiError(
            408, f"the body took more than {limits.read_timeout_s:g} s", code="timeout"
        ) from error
    if size > limits.max_body_bytes:
        raise ApiError(413, f"the body is over {limits.max_body_bytes} bytes")
    return bytes(body)


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = ApiError(error.status_code, f"{http.method} {http.url.path[:256]}: {error.detail}")
    return JSONResponse(what.body(), error.status_code, headers=error.headers)


def _log_bug(exchange: Exchange | None, error: Exception) -> None:
    """Where it happened, not what it says: a message may quote what a client wrote."""
    places = [
        f"{frame.filename}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    data = {
        "request_id": exchange and exchange.id,
        "error": type(error).__name__,
        "places": places[-12:],
    }
    log.error("internal error", extra={"data": data})
