"""A client of OpenAI-compatible servers: models, pages, and streamed answers with arrival times."""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import httpx

from eyas.errors import ConfigError

KEY_VARIABLE = "EYAS_API_KEY"
CONNECT_S = 10.0
ASIDE_S = 10.0  # for pages that are not answers
MAX_BODY = 32 << 20  # bytes of a whole answer
# busy: ask later. lost: no connection, or it broke. broken: no answer in OpenAI's form.
# refused: this request, for good. unfit: any request, for good (a key or model is missing, ...).
FailureKind = Literal["busy", "lost", "broken", "refused", "unfit"]
# The errors of an idle connection that the server closed just when it was used again.
STALE = ("RemoteProtocolError", "ReadError", "WriteError")
StreamPiece = tuple[float, bytes]  # ms since the request was sent, bytes as they came


class RequestFailure(Exception):
    """A request without an answer. `what` can be shown: it holds no part of prompt or answer."""

    def __init__(self, kind: FailureKind, what: str, retry_after_s: float | None = None) -> None:
        super().__init__(what)
        self.kind, self.what, self.retry_after_s = kind, what, retry_after_s


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """A streamed answer. sent: perf_counter, in seconds."""

    sent: float
    pieces: list[StreamPiece]
    error: str = ""


def server_url(url: str) -> str:
    """The address without /v1. Raises ConfigError."""
    if "://" not in url:
        raise ConfigError(
            f"{url!r} is not the address of a server: it has no scheme", f"write http://{url}"
        )
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # brackets or a port that are none
        is_address = False
    if not is_address:
        raise ConfigError(
            f"{url!r} is not the address of a server", "write e.g. http://10.0.0.5:8000"
        )
    if parts.username or parts.password or parts.query:
        raise ConfigError(
            f"the address of {parts.hostname} holds a password or a query",
            f"give the key in the environment variable {KEY_VARIABLE}",
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def api_key() -> str | None:
    """The key in EYAS_API_KEY, and nowhere else: settings and command lines end up in manifests and
    reports. Raises ConfigError for one that no header can carry.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"the API key in {KEY_VARIABLE} has characters that no header takes",
            "set it again, without line breaks",
        )
    return key or None


class Client:
    """A connection pool to one server; an async context. Methods raise RequestFailure."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """timeout_s: for a whole answer, or between two pieces of a streamed one; comments do not
        count. Raises ConfigError.
        """
        self.url, self._timeout_s = server_url(url), timeout_s
        headers = {"accept-encoding": "identity"}
        if key := api_key():
            headers["authorization"] = f"Bearer {key}"
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def cards(self) -> list[dict[str, Any]]:
        """The cards of the models that the server lists, at least one; `id` is a model's name."""
        content = await self.request("/v1/models")
        cards = []
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            cards = [{**card, "id": str(card["id"])} for card in json.loads(content)["data"]]
        if not cards:
            raise RequestFailure("broken", "lists no models")
        return cards

    async def page(self, path: str) -> str:
        """The text of a page, "" where the server has none."""
        try:
            content = await self.request(path, timeout_s=ASIDE_S)
        except RequestFailure:
            return ""
        return content.decode(errors="replace")

    async def num_tokens(self, model: str, text: str) -> int | None:
        """Tokens of a text by the server's /tokenize, in vLLM's and SGLang's form or llama.cpp's;
        None without one.
        """
        of_vllm = {"model": model, "prompt": text, "add_special_tokens": False}
        for body in (of_vllm, {"content": text}):
            try:
                tokens = json.loads(await self.request("/tokenize", body, ASIDE_S))["tokens"]
            except (RequestFailure, ValueError, LookupError, TypeError, RecursionError):
                continue
            if tokens or not text:  # llama.cpp takes the other form for an empty text
                return len(tokens)
        return None

    async def stream(self, body: dict[str, Any]) -> StreamRecord:
        """A streamed answer of at most MAX_BODY bytes. A failure is in the record. Pieces are not
        parsed here, as the server may be on the same machine.
        """
        record = await self._streamed(body)
        is_stale = record.error.startswith(STALE) and not record.pieces
        return await self._streamed(body) if is_stale else record

    async def _streamed(self, body: dict[str, Any]) -> StreamRecord:
        pieces: list[StreamPiece] = []
        sent, last_ms, num_bytes = time.perf_counter(), 0.0, 0
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                async for piece in response.aiter_raw():
                    at = 1000 * (time.perf_counter() - sent)
                    pieces.append((at, piece))
                    num_bytes += len(piece)
                    last_ms = at if b"data:" in piece else last_ms
                    if num_bytes > MAX_BODY:
                        return StreamRecord(sent, [], f"more than {MAX_BODY >> 20} MiB")
                    if at - last_ms > 1000 * self._timeout_s:
                        silent = f"nothing but comments for {self._timeout_s:g} s"
                        return StreamRecord(sent, [], silent)
        except httpx.TransportError as error:
            return StreamRecord(sent, pieces, f"{type(error).__name__}: {error}")
        if response.status_code != httpx.codes.OK:
            message = error_message(b"".join(piece for _, piece in pieces))
            return StreamRecord(sent, pieces, f"HTTP {response.status_code}: {message}")
        return StreamRecord(sent, pieces)

    async def request(
        self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> bytes:
        """The content of a 200, of at most MAX_BODY bytes."""
        limit_s = timeout_s or self._timeout_s
        try:
            async with (
                asyncio.timeout(limit_s),
                self._http.stream("GET" if body is None else "POST", path, json=body) as response,
            ):
                content = bytearray()
                async for piece in response.aiter_bytes():
                    content += piece
                    if len(content) > MAX_BODY:
                        raise RequestFailure("broken", f"answers more than {MAX_BODY >> 20} MiB")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise RequestFailure("lost", "takes no connection") from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise RequestFailure("broken", f"does not answer within {limit_s:g} s") from error
        except httpx.TransportError as error:
            what = f"breaks the connection ({type(error).__name__})"
            raise RequestFailure("lost", what) from error
        except httpx.RequestError as error:
            what = f"sends what cannot be read ({type(error).__name__})"
            raise RequestFailure("broken", what) from error
        if response.status_code != httpx.codes.OK:
            after = response.headers.get("retry-after")
            raise status_failure(response.status_code, bytes(content), after)
        return bytes(content)


def unbroken(value: Any) -> Any:
    """A JSON value whose text UTF-8 can hold: pairs of surrogates become a character, a lone one
    U+FFFD. Raises RecursionError.
    """
    content = json.dumps(value, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
    return json.loads(content.decode("utf-16-le", "replace"))


def error_message(content: bytes) -> str:
    """The message of an error in OpenAI's form or vLLM's older one, else the body's beginning."""
    try:
        body = json.loads(content)
        error = body.get("error", body)
        return str(unbroken(error if isinstance(error, str) else error["message"]))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return content[:200].decode(errors="replace")


def status_failure(status: int, content: bytes, retry_after: str | None) -> RequestFailure:
    """The failure behind a status other than 200, with the error's code and not its message, which
    may quote the prompt. retry_after: the header, in seconds.
    """
    wait_s = float(retry_after) if retry_after and retry_after.strip().isdigit() else None
    what = f"answers HTTP {status}{_error_code(content)}"
    if status == 429:
        return RequestFailure("busy", what, wait_s)
    if status in (408, 502, 503, 504):
        return RequestFailure("lost", what, wait_s)
    if status >= 500:
        return RequestFailure("broken", what)
    return RequestFailure("refused" if status in (400, 413, 422) else "unfit", what)


def _error_code(content: bytes) -> str:
    try:
        body = json.loads(content)
        error = body.get("error", body)
        code = error.get("code") or error.get("type")
    except (ValueError, AttributeError, RecursionError):
        return ""
    is_code = isinstance(code, str) and len(code) <= 64 and code.replace("_", "").isalnum()
    return f" ({code})" if is_code else ""
