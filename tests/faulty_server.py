"""A server in front of a real one that does what servers in the world do: real sockets
and faults.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

# What may be done to a request for an answer. "hang" and "trickle" are for as long as the server
# runs.
FAULTS = ("429", "429 date", "500", "503", "garbage", "half", "reset", "empty")
CANNED: dict[str, tuple[int, bytes, dict[str, str]]] = {
    "429": (
        429,
        b'{"error": {"message": "slow down", "code": "queue_full"}}',
        {"retry_after": "0"},
    ),
    "busy long": (429, b"", {"retry_after": "300"}),
    "400": (400, b'{"error": {"message": "I dislike bob@gnu.org", "code": "no_such_thing"}}', {}),
    "500": (500, b"Traceback (most recent call last): bob@gnu.org", {}),
    "503": (503, b"", {"retry_after": "0"}),
    "garbage": (200, b"<html>\xff\xfe", {}),
    "empty": (200, b'{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 0}}', {}),
    "redirect": (307, b"", {"location": "http://127.0.0.1:9/"}),
}
Choose = Callable[[dict[str, Any]], str | None]


class Faulty(ThreadingHTTPServer):
    """Forwards to `real`, or does what `choose` says of a request's body. pages: its own, by path.
    asked: the bodies that came.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, real: str, choose: Choose, pages: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.choose, self.pages = choose, pages
        self.asked: list[dict[str, Any]] = []
        self.ended = threading.Event()
        self.http = httpx.Client(
            base_url=real, timeout=60, limits=httpx.Limits(max_connections=None)
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None: ...


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Faulty

    def do_GET(self) -> None:
        if self.path in self.server.pages:
            self._send(200, self.server.pages[self.path])
        else:
            self._forward("GET", b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        asked = json.loads(body)
        self.server.asked.append(asked)
        fault = self.server.choose(asked)
        if fault is None:
            self._forward("POST", body)
        elif fault in CANNED:
            status, content, headers = CANNED[fault]
            self._send(status, content, **headers)
        else:
            getattr(self, "_" + fault.replace(" ", "_"))(body)

    def log_message(self, format: str, *args: Any) -> None: ...

    def _forward(self, method: str, body: bytes) -> None:
        names = ("authorization", "content-type")
        kept = {name: self.headers[name] for name in names if name in self.headers}
        try:
            answer = self.server.http.request(method, self.path, content=body, headers=kept)
        except httpx.TransportError:
            self._send(502, b"bad gateway")
            return
        self._send(answer.status_code, answer.content)

    def _send(self, status: int, content: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    # Faults

    def _429_date(self, body: bytes) -> None:
        self._send(429, b"", retry_after=time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime()))

    def _half(self, body: bytes) -> None:
        self._send(200, b'{"choices": [{"message": {"content": "I wo', length=500)
        self.close_connection = True

    def _reset(self, body: bytes) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def _real(self, body: bytes, **changes: Any) -> dict[str, Any]:
        asked = {**json.loads(body), **changes}
        answer: dict[str, Any] = self.server.http.post(self.path, json=asked).json()
        return answer

    def _other_tokens(self, body: bytes) -> None:
        answer = self._real(body)
        answer["prompt_token_ids"][-1] += 1
        self._send(200, json.dumps(answer).encode())

    def _no_ids(self, body: bytes) -> None:
        answer = self._real(body, return_token_ids=False)
        self._send(200, json.dumps(answer).encode())

    def _trimmed(self, body: bytes) -> None:
        answer = self._real(body)
        for choice in answer["choices"]:
            if choice["finish_reason"] == "stop":
                choice["token_ids"].pop()
        self._send(200, json.dumps(answer).encode())

    def _parsed(self, body: bytes) -> None:
        answer = self._real(body)
        answer["choices"][0]["message"]["reasoning_content"] = "Hm."
        self._send(200, json.dumps(answer).encode())

    def _halved(self, body: bytes) -> None:
        answer = self._real(body)
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "\ud83d"}}
        (choice,) = answer["choices"]
        choice["message"] |= {"content": "So \ud83d", "tool_calls": [call]}
        if choice["finish_reason"] == "stop":
            choice["finish_reason"] = "tool_calls"
        self._send(200, json.dumps(answer).encode())

    def _hang(self, body: bytes) -> None:
        self.server.ended.wait()
        self.close_connection = True

    def _trickle(self, body: bytes) -> None:
        self._send(200, b"", length=10_000)
        while not self.server.ended.wait(0.1):
            self.wfile.write(b" ")


@contextmanager
def faulty(real: str, choose: Choose, pages: dict[str, bytes] | None = None) -> Iterator[Faulty]:
    server = Faulty(real, choose, pages or {})
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="faulty", daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()
        server.http.close()
        thread.join()
