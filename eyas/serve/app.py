"""The HTTP side: /v1/chat/completions, /v1/models and /health as a starlette application. Knows the worker, not the engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from eyas.chat import Chat
from eyas.engine.request import Request, SamplingParams, Update
from eyas.errors import InputError
from eyas.serve.completion import DONE, Completion, Writer, error_event
from eyas.serve.schema import ApiError, ChatRequest, parse_request
from eyas.serve.worker import EngineFailure, Worker

MAX_BODY_BYTES = 8 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Served:
    """What the server tells about itself: name for requests, precision, and the room a request has."""

    model: str
    dtype: str
    has_head: bool
    max_length: int  # tokens of prompt and answer together


def create_app(worker: Worker, chat: Chat, served: Served) -> Starlette:
    """The application; it starts the worker when it starts and stops it when it ends."""
    api = _Api(worker, chat, served)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await worker.start()
        yield
        await worker.stop()

    return Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/health", api.health),
        ],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_gone,
            Exception: _own_error,
        },
        lifespan=lifespan,
    )


class _Api:
    """The endpoints."""

    def __init__(self, worker: Worker, chat: Chat, served: Served) -> None:
        self._worker = worker
        self._chat = chat
        self._served = served
        self._started = int(time.time())

    async def health(self, _: HttpRequest) -> Response:
        """200 while the engine can take requests, else 503 with the reason."""
        if self._worker.is_running:
            return JSONResponse({"status": "ok", "requests": self._worker.num_requests})
        failure = self._worker.failure
        return JSONResponse({"status": "failed", "error": failure.what if failure else "the engine is not running"}, 503)

    async def models(self, _: HttpRequest) -> Response:
        card = {"id": self._served.model, "object": "model", "created": self._started, "owned_by": "eyas"}
        return JSONResponse({"object": "list", "data": [{**card, "eyas": asdict(self._served)}]})

    async def chat_completions(self, http: HttpRequest) -> Response:
        asked = parse_request(await _body(http))
        request = self._engine_request(asked)
        completion = Completion(self._chat.stream(), len(request.prompt_ids), asked.stops)
        writer = Writer(self._served.model, asked.include_usage)
        updates = self._worker.updates(request)
        if not asked.stream:
            text = await _while_connected(http, _collect(updates, completion))
            assert completion.finish_reason is not None
            return JSONResponse(writer.whole(text, completion.finish_reason, completion.usage()))
        # The first update decides between an error status and 200, so headers wait for it.
        first = await _while_connected(http, anext(updates))
        events = _events(first, updates, completion, writer, asked.include_usage)
        return _EventStream(events, headers={"cache-control": "no-cache"})

    def _engine_request(self, asked: ChatRequest) -> Request:
        """The engine's form of a request. Raises ApiError for what this server cannot do."""
        served = self._served
        if asked.model != served.model:
            raise ApiError(404, f"no model {asked.model!r} here, only {served.model!r}", "model", "model_not_found")
        if asked.speculation and not served.has_head:
            raise ApiError(400, "speculation needs a head, and this server has none", "speculation", "unsupported_parameter")
        try:
            prompt_ids = tuple(self._chat.prompt_ids([{"role": turn.role, "content": turn.text} for turn in asked.messages]))
            params = SamplingParams(
                temperature=asked.temperature,
                top_k=asked.top_k,
                top_p=asked.top_p,
                seed=asked.seed,
                max_tokens=self._token_limit(len(prompt_ids), asked),
            )
        except InputError as error:
            raise ApiError(400, error.what, "messages") from error
        return Request(uuid.uuid4().hex, prompt_ids, params, served.has_head and asked.speculation is not False)

    def _token_limit(self, num_prompt_tokens: int, asked: ChatRequest) -> int:
        """Tokens the answer may have: what was asked for, which must fit, or all the room there is."""
        room = self._served.max_length - num_prompt_tokens
        wanted = asked.token_limit or 1
        if wanted > room:
            raise ApiError(
                400,
                f"this server holds {self._served.max_length} tokens a request; the messages have {num_prompt_tokens} and the "
                f"answer may have {wanted}: shorten the messages or lower max_tokens",
                "messages" if room < 1 else "max_tokens",
                "context_length_exceeded",
            )
        return asked.token_limit or room


async def _collect(updates: AsyncGenerator[Update], completion: Completion) -> str:
    """The whole text of an answer; a stop string ends it early, which cancels the request."""
    pieces = []
    async with aclosing(updates):
        async for update in updates:
            pieces.append(completion.push(update))
            if completion.finish_reason is not None:
                break
    return "".join(pieces)


async def _events(
    first: Update, updates: AsyncGenerator[Update], completion: Completion, writer: Writer, with_usage: bool
) -> AsyncGenerator[bytes]:
    """The events of an answer, one per update; the last update's event and all that follows go out together."""
    async with aclosing(updates):
        update = first
        while True:
            event = writer.chunk(completion.push(update))
            if completion.finish_reason is not None:
                break
            yield event
            try:
                update = await anext(updates)
            except EngineFailure as failure:
                yield error_event(ApiError(500, failure.what).body())
                return
    usage = writer.usage_chunk(completion.usage()) if with_usage else b""
    yield event + writer.last_chunk(completion.finish_reason) + usage + DONE


class _EventStream(StreamingResponse):
    """Server-sent events whose source is closed, and its request cancelled, as soon as the client goes away."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)


async def _while_connected(http: HttpRequest, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. Raises ApiError, ClientDisconnect."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(http.receive())  # the body is read: the next message is the disconnect
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    except InputError as error:
        raise ApiError(400, error.what) from error
    except EngineFailure as failure:
        raise ApiError(500, failure.what) from failure
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _body(http: HttpRequest) -> bytes:
    """The body of a JSON request. Raises ApiError for another type or more than MAX_BODY_BYTES."""
    # A page in a browser may send text/plain to a loopback address unasked, but not this type.
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "send content-type: application/json")
    body = bytearray()
    async for piece in http.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is over {MAX_BODY_BYTES} bytes")
    return bytes(body)


async def _api_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status)


async def _http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = ApiError(error.status_code, f"{http.method} {http.url.path}: {error.detail}")
    return JSONResponse(what.body(), error.status_code, headers=error.headers)


async def _client_gone(_: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; 499 is what access logs call this


async def _own_error(_: HttpRequest, error: Exception) -> Response:
    return JSONResponse(ApiError(500, f"internal error: {type(error).__name__}").body(), 500)
