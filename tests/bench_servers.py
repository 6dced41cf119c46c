"""Servers in threads, and some without a model, whose answers are written here."""

from __future__ import annotations

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from time import sleep


@contextmanager
def running(server):
    with server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def web_server(handler):
    """The URL of a server whose requests a BaseHTTPRequestHandler answers."""
    with running(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


class JsonHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else what follows a header waits 40 ms for its receipt

    def send_json(self, content, status=200):
        self.reply(status, json.dumps(content).encode(), "application/json")

    def reply(self, status, body, kind="text/plain"):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Nothing on the terminal."""


class Scripted(JsonHandler):
    """An OpenAI-compatible server: a prompt has as many tokens as words, and is answered by its
    words, one a chunk.
    """

    owner, card, info = "other", {}, None  # what it tells about itself
    tells_usage, extra_prompt_tokens = True, 0
    gap_s = 0.002
    bodies = None  # a list, to keep what was asked

    def do_GET(self):
        pages = {
            "/v1/models": {"data": [{"id": "m", "owned_by": self.owner, **self.card}]},
            "/server_info": self.info,
        }
        page = pages.get(self.path)
        self.send_json(page, 404 if page is None else 200)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.bodies is not None:
            self.bodies.append(asked)
        words = asked["messages"][-1]["content"].split()
        said = words[: asked["max_tokens"]]
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for word in said:
            self.event(
                {"choices": [{"index": 0, "delta": {"content": f"{word} "}, "finish_reason": None}]}
            )
            sleep(self.gap_s)
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if self.tells_usage:
            count = len(words) + self.extra_prompt_tokens
            usage = {"prompt_tokens": count, "completion_tokens": len(said)}
            self.event({"choices": [], "usage": usage})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, value):
        self.chunk(f"data: {json.dumps(value)}\n\n".encode())

    def chunk(self, data):
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@contextmanager
def scripted(**changes):
    """The URL of a Scripted server with other attributes."""
    with web_server(type("Changed", (Scripted,), changes)) as url:
        yield url
