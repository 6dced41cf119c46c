"""Answers on their way: server-sent events, JSON in pieces, failures, clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from eyas.engine.request import Update
from eyas.errors import EyasError, InputError
from eyas.log import error_facts
from eyas.serve.limits import ApiError, refused_by_engine
from eyas.serve.metrics import Exchange
from eyas.serve.worker import RequestTimeout, ShuttingDown
from eyas.serve.writers import CompletionWriter

LONG_ECHO = 256  # tokens of a prompt with up to 20 alternatives each: some 10 ms to write
PIECE = 64  # elements of a list
PART = 16  # updates: others write in between where a slow client has many
log = logging.getLogger("eyas.serve")
T = TypeVar("T")


class EventStream(StreamingResponse):
    """Server-sent events. If the client disconnects, or has not read all after timeout_s, the
    source of the events is closed, which cancels its requests.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        timeout_s: float,
        exchange: Exchange,
        on_end: Callable[[Exchange, int], None],
    ) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events, self._timeout_s = events, timeout_s
        self._exchange, self._on_end = exchange, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await super().__call__(scope, receive, send)
        except TimeoutError:  # uvicorn closes the connection of an answer without an end
            self._exchange.failure = "timeout"
        finally:
            await self._events.aclose()
            self._on_end(self._exchange, self.status_code)


async def event_pieces(
    first: list[Update],
    updates: AsyncGenerator[list[Update]],
    exchange: Exchange,
    completion: CompletionWriter,
) -> AsyncGenerator[bytes]:
    """The events of a stream: one piece of bytes for up to PART updates that came together. The
    status has been sent by now, so an error is an event too.
    """

    def write(part: list[Update]) -> str:
        return "".join([completion.chunk(update) for update in part])

    batch = first
    async with aclosing(updates):
        while True:
            part = batch[:PART]
            try:
                if sum(len(update.prompt_logprobs or ()) for update in part) > LONG_ECHO:
                    events = await asyncio.to_thread(write, part)
                else:
                    events = write(part)
            except Exception as error:
                yield internal_error(exchange, error).event()
                return
            if completion.is_over:
                break
            yield events.encode()
            if batch := batch[PART:]:
                await asyncio.sleep(0)
                continue
            try:
                batch = await anext(updates)
            except EyasError as error:
                failed = api_error(error)
                exchange.failure = failed.code or "engine_failure"
                yield failed.event()
                return
    yield (events + completion.end()).encode()


async def while_connected(http: HttpRequest, work: Awaitable[T]) -> T:
    """The result of `work`. Raises what it raises, and ClientDisconnect, which cancels it."""
    task = asyncio.ensure_future(work)
    # the body is read: the next message is the disconnect
    gone = asyncio.ensure_future(http.receive())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def json_pieces(value: Any) -> Iterator[str]:
    """JSON as JSONResponse writes it, in pieces: writing one blocks other threads, and the
    log-probabilities of a long answer are megabytes.
    """
    if isinstance(value, dict) and value:
        for number, (name, one) in enumerate(value.items()):
            yield f"{',' if number else '{'}{_json(name)}:"
            yield from json_pieces(one)
        yield "}"
    elif isinstance(value, list) and 0 < len(value) <= PIECE:
        for number, one in enumerate(value):
            yield "," if number else "["
            yield from json_pieces(one)
        yield "]"
    elif isinstance(value, list) and value:
        for start in range(0, len(value), PIECE):
            yield f"{',' if start else '['}{_json(value[start : start + PIECE])[1:-1]}"
        yield "]"
    else:
        yield _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def api_error(error: EyasError) -> ApiError:
    """The worker's error as the client gets it."""
    if isinstance(error, InputError):
        return refused_by_engine(error)
    if isinstance(error, RequestTimeout):
        return ApiError(504, error.what, code="timeout")
    if isinstance(error, ShuttingDown):
        return ApiError(503, error.what, code="shutting_down", retry_after=1)
    return ApiError(500, error.what, code="engine_failure")


def internal_error(exchange: Exchange, error: Exception) -> ApiError:
    """A fault of the server: logged without its message, which may quote a request."""
    exchange.failure = "internal_error"
    log.error("internal error", extra={"data": {"request_id": exchange.id, **error_facts(error)}})
    return ApiError(500, f"internal error: {type(error).__name__}")
