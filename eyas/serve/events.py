"""Sending and waiting while the client is there: streams that end, and work that is cancelled, when
it goes away.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


class EventStream(Response):
    """Server-sent events whose source is closed, and its request cancelled, as soon as the client
    goes away.
    """

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
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            async for events in self._events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(http: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. Raises ClientDisconnect
    and what `work` raises.
    """
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
