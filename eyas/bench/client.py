"""A streaming client of OpenAI's chat completions that notes when each piece arrived. Knows HTTP and no engine.

While answers stream, their pieces are only stored with the time; they are read when nothing is being measured, so that
the client takes as little as possible from a server on the same machine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

from eyas.bench import metrics
from eyas.errors import EyasError, MissingInputError

Piece = tuple[float, bytes]  # ms since the request was sent, bytes as they came


@dataclass(frozen=True, slots=True)
class Received:
    """One answer as it came: when it was asked for (perf_counter, seconds), its pieces, and what went wrong."""

    sent: float
    pieces: list[Piece]
    error: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer, read. Times are ms since it was asked for; with an `error`, all figures are zero.

    accept_hist is what the server tells under usage.eyas, and empty where it tells nothing.
    """

    ttft_ms: float = 0.0
    e2e_ms: float = 0.0
    itl_ms: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str = ""
    text: str = ""
    accept_hist: list[int] = field(default_factory=list)
    error: str = ""


class Client:
    """A connection pool to one server; use it as an async context."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        headers = {"accept-encoding": "identity"}
        self._http = httpx.AsyncClient(base_url=self.url, timeout=timeout_s, limits=limits, headers=headers, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """The id of the (first) model that the server lists. Raises MissingInputError, EyasError."""
        try:
            listed = await self._http.get("/v1/models")
            return str(listed.raise_for_status().json()["data"][0]["id"])
        except httpx.TransportError as error:
            hint = "start it first, e.g. `eyas serve`, or check the address"
            raise MissingInputError(f"no server at {self.url}: {error}", hint) from error
        except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
            hint = "give the address of an OpenAI-compatible server"
            raise EyasError(f"{self.url}/v1/models does not list a model: {error}", hint) from error

    async def complete(self, body: dict[str, Any]) -> Received:
        """Stream one answer. A request that fails is a result too: nothing is raised."""
        pieces: list[Piece] = []
        sent = time.perf_counter()
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                async for piece in response.aiter_raw():
                    pieces.append((1000 * (time.perf_counter() - sent), piece))
        except httpx.TransportError as error:
            return Received(sent, pieces, f"{type(error).__name__}: {error}")
        if response.status_code != httpx.codes.OK:
            return Received(sent, pieces, f"HTTP {response.status_code}: {_message(b''.join(piece for _, piece in pieces))}")
        return Received(sent, pieces)


def read_reply(received: Received) -> Reply:
    """The reply in a stream of server-sent events. The first token is timed by the first text, not by the first chunk."""
    if received.error:
        return Reply(error=received.error)
    try:
        return _reply(list(events(received.pieces)))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return Reply(error=f"not a stream of chat completions: {type(error).__name__}: {error}")


def _reply(timed_events: list[tuple[float, dict[str, Any]]]) -> Reply:
    times, texts, finish_reason, usage = [], [], "", None
    for at, event in timed_events:
        if "error" in event:
            return Reply(error=_message(json.dumps(event).encode()))
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            text = choice["delta"].get("content") or ""
            finish_reason = choice.get("finish_reason") or finish_reason
            if text or choice.get("finish_reason"):
                times.append(at)
                texts.append(text)
    if not finish_reason:
        return Reply(error="the stream ended before the answer did")
    if usage is None:
        return Reply(error="the server tells no usage, so tokens cannot be counted")
    return Reply(
        ttft_ms=times[0],
        e2e_ms=times[-1],
        itl_ms=metrics.itl_ms([at for at, text in zip(times, texts, strict=True) if text]),
        num_prompt_tokens=usage["prompt_tokens"],
        num_output_tokens=usage["completion_tokens"],
        finish_reason=finish_reason,
        text="".join(texts),
        accept_hist=(usage.get("eyas") or {}).get("accept_hist", []),
    )


def events(pieces: Iterable[Piece]) -> Iterator[tuple[float, dict[str, Any]]]:
    """The JSON of each `data:` line but [DONE], with the time of the piece that completed the line."""
    rest = b""
    for at, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if len(data) < len(line.strip()) and data != b"[DONE]":
                yield at, json.loads(data)


def _message(body: bytes) -> str:
    """The message of an error in OpenAI's shape, or the beginning of whatever came."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode(errors="replace")
