"""A connection that cannot be held for nothing: limits on their number, on heads, and on time.
Knows uvicorn, no application.

uvicorn waits without end for the head of a first request and for a client that takes nothing of
what it is sent. Here

    head of a request    read_timeout_s from its first byte, or from the connection's beginning; MAX_HEAD_BYTES
    body                 the application's to limit
    what is sent         read_timeout_s from the moment that the system's buffers are full, then the connection is cut
    connections          max_connections; a further one takes the place of that which has been idle longest, without a request
                         or between two; where all have one under way it is answered 503 and closed

So silent connections, which cost a stranger nothing, keep nobody out, and no probe of /health. Who
is refused is heard out for LINGER_S: to close on bytes that nobody read resets the connection, and
the client never sees why.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from eyas.serve.limits import LimitsConfig
from eyas.serve.refusal import ApiError

MAX_HEAD_BYTES = 64 << 10
LINGER_S = 1.0


def guarded(limits: LimitsConfig) -> type[asyncio.Protocol]:
    """uvicorn's protocol with these limits, for one server."""
    return type("Connection", (Connection,), {"limits": limits, "idle": {}, "lingering": set()})


class Connection(HttpToolsProtocol):
    """One client's connection, for any number of requests."""

    limits: LimitsConfig
    # of all, those without a whole head of a request, in the order in which they became so
    idle: dict[Connection, None]
    lingering: set[Connection]  # refused, and heard out: no longer counted

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # pause_writing is then called whenever the client takes nothing
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) - len(self.lingering) > self.limits.max_connections:
            if not self.idle:
                self._refuse(_overloaded())
                return
            next(iter(self.idle))._make_room()
        self.idle[self] = None
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if self._head_timer is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(
                    ApiError(431, f"the head of the request is over {MAX_HEAD_BYTES} bytes")
                )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self.idle.pop(self, None)
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # else the next request was here already
        if self.cycle.response_complete and not self._is_refused:
            self.idle[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(
                self.limits.read_timeout_s, self.transport.abort
            )

    def resume_writing(self) -> None:
        self._stop_stalling()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_stalling()
        self.idle.pop(self, None)
        self.lingering.discard(self)
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self.limits.read_timeout_s, self._give_up_waiting)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_stalling(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _give_up_waiting(self) -> None:
        self._head_timer = None
        self._refuse(
            ApiError(
                408,
                f"the head of the request took more than {self.limits.read_timeout_s:g} s",
                code="timeout",
            )
        )

    def _make_room(self) -> None:
        """Close at once: there is no request whose answer could be lost. Between two requests a
        client expects it.
        """
        self.idle.pop(self, None)
        is_first = self.cycle is None
        self._is_refused = True
        self._stop_waiting()
        if is_first and not self.transport.is_closing():
            self._write(_overloaded())
        self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer and close; where an answer is on its way, the client's garbage behind its request
        ends it.

        Of those who linger there are max_connections at most: a flood of more is closed at once.
        """
        if self._is_refused:
            return
        self._is_refused = True
        self._stop_waiting()
        self.idle.pop(self, None)
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        self._write(error)
        if len(self.connections) > 2 * self.limits.max_connections:
            self.transport.close()
            return
        self.transport.write_eof()
        self.lingering.add(self)
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _write(self, error: ApiError) -> None:
        body = json.dumps(error.body()).encode()
        status = HTTPStatus(error.status)
        headers = {
            **(error.headers or {}),
            "content-type": "application/json",
            "content-length": str(len(body)),
        }
        lines = [
            f"HTTP/1.1 {status.value} {status.phrase}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        self.transport.write("\r\n".join([*lines, "connection: close", "", ""]).encode() + body)


def _overloaded() -> ApiError:
    return ApiError(503, "too many connections", code="overloaded", retry_after=1)
