"""A client of OpenAI-compatible servers that notes when each piece of an answer arrived. Knows HTTP
and no engine.

While answers stream, their pieces are only stored with the time; they are read when nothing is
being measured, so that the client takes as little as possible from a server on the same machine.
"""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import Any, Self

import httpx

from eyas.bench.stream import Piece, Received, message
from eyas.errors import EyasError, MissingInputError

API_KEY = "EYAS_BENCH_API_KEY"  # of the environment: a key on a command line would be in the report
ASIDE_S = 10.0  # for what is asked besides answers
STALE = tuple(
    kind.__name__ for kind in (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
)


class Client:
    """A connection pool to one server; use it as an async context."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        headers = {"accept-encoding": "identity"}
        if key := os.environ.get(API_KEY):
            headers["authorization"] = f"Bearer {key}"
        self._http = httpx.AsyncClient(
            base_url=self.url, timeout=timeout_s, limits=limits, headers=headers, trust_env=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def card(self) -> dict[str, Any]:
        """What the server says of the (first) model that it lists; `id` is its name. Raises
        MissingInputError, EyasError.
        """
        try:
            listed = await self._http.get("/v1/models")
            card = listed.raise_for_status().json()["data"][0]
            return {**card, "id": str(card["id"])}
        except httpx.TransportError as error:
            hint = "start it first, e.g. `eyas serve`, or check the address"
            raise MissingInputError(f"no server at {self.url}: {error}", hint) from error
        except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
            hint = (
                "give the address of an OpenAI-compatible server; a key, if it wants one, in "
                f"{API_KEY}"
            )
            raise EyasError(f"{self.url}/v1/models does not list a model: {error}", hint) from error

    async def text(self, path: str) -> str:
        """The body of a page, "" where the server has none or does not tell."""
        try:
            got = await self._http.get(path, timeout=ASIDE_S)
        except httpx.TransportError:
            return ""
        return got.text if got.status_code == httpx.codes.OK else ""

    async def num_tokens(self, model: str, text: str) -> int | None:
        """How many tokens a text has, by the server's /tokenize (vLLM's and SGLang's form,
        llama.cpp's); None without one.
        """
        for body in (
            {"model": model, "prompt": text, "add_special_tokens": False},
            {"content": text},
        ):
            try:
                got = await self._http.post("/tokenize", json=body, timeout=ASIDE_S)
                tokens = got.raise_for_status().json()["tokens"]
            except (httpx.HTTPError, ValueError, LookupError, TypeError):
                continue
            if tokens or not text:  # llama.cpp takes the other form for an empty text
                return len(tokens)
        return None

    async def complete(self, body: dict[str, Any]) -> Received:
        """Stream one answer. A request that fails is a result too: nothing is raised."""
        received = await self._stream(body)
        # A server may close an idle connection just when it is taken: nothing was asked yet, so it
        # is asked again. Whether that reads as an end or as a reset is up to the kernel.
        stale = received.error.startswith(STALE) and not received.pieces
        return await self._stream(body) if stale else received

    async def _stream(self, body: dict[str, Any]) -> Received:
        pieces: list[Piece] = []
        sent = time.perf_counter()
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                async for piece in response.aiter_raw():
                    pieces.append((1000 * (time.perf_counter() - sent), piece))
        except httpx.TransportError as error:
            return Received(sent, pieces, f"{type(error).__name__}: {error}")
        if response.status_code != httpx.codes.OK:
            return Received(
                sent,
                pieces,
                f"HTTP {response.status_code}: {message(b''.join(piece for _, piece in pieces))}",
            )
        return Received(sent, pieces)
