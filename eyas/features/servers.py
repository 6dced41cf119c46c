"""One OpenAI-compatible server (SGLang, vLLM, ours): asks it for an assistant turn, and whether it
serves the target.

Knows HTTP, OpenAI's form and what can go wrong with one request. Does not know other servers, nor
when to ask again.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import email.utils
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eyas.engine.request import SamplingParams
from eyas.errors import ConfigError
from eyas.features.backend import Asked

KEY_VARIABLE = "EYAS_API_KEY"
MAX_BODY = 32 << 20  # bytes of an answer, which holds one turn
CONNECT_S = 10.0
# Where an engine tells its version, by what it calls itself in /v1/models.
VERSION_PATHS = {"vllm": "/version", "sglang": "/get_server_info", "eyas": "/openapi.json"}

# busy: come again later. lost: no connection, or it broke. broken: an answer that is none. refused:
# this request, for good. other_tokens: the server's prompt is not ours. unfit: serves something
# else, or not us.
Kind = Literal["busy", "lost", "broken", "refused", "other_tokens", "unfit"]


class ClientConfig(BaseModel):
    """How servers are asked. concurrency: requests at once, of each. timeout_s: for a whole answer.
    patience_s: a server that has not been well for so long is given up.

    model: its name at the servers; by default the only one that they list. api_key_env: the
    environment variable that holds the key. send: `messages` (/v1/chat/completions: the server
    renders its own template, and its token counts must be ours), or `tokens` (/v1/completions with
    token ids, which SGLang, vLLM and eyas take: the server sees our tokens, whatever they say).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    concurrency: int = Field(default=32, ge=1)
    timeout_s: float = Field(default=600.0, gt=0)
    patience_s: float = Field(default=300.0, ge=0)
    model: str | None = None
    api_key_env: str = KEY_VARIABLE
    send: Literal["messages", "tokens"] = "messages"


class Trouble(Exception):
    """A request that came to nothing. `what` may be shown: it holds nothing that was said."""

    def __init__(
        self, kind: Kind, what: str, retry_after_s: float | None = None, was_heard: bool = True
    ) -> None:
        """was_heard: the server may have begun with the request."""
        super().__init__(what)
        self.kind, self.what, self.retry_after_s, self.was_heard = (
            kind,
            what,
            retry_after_s,
            was_heard,
        )


@dataclass(frozen=True, slots=True)
class Written:
    """What a server wrote. num_tokens counts its end token."""

    text: str
    finish_reason: Literal["stop", "length"]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Expected:
    """What a server must show before it is asked: the target's fingerprint, room for max_length
    tokens, and on each of `probes` our own number of prompt tokens."""

    fingerprint: str
    max_length: int
    probes: tuple[Asked, ...]


def server_urls(urls: Sequence[str]) -> list[str]:
    """The addresses without /v1. Raises ConfigError for what is no address, holds a password, or is
    there twice.
    """
    found = []
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"servers: {url!r} is no address of a server", "write e.g. http://10.0.0.5:8000"
            )
        if parts.username or parts.password or parts.query:
            raise ConfigError(
                f"servers: the address of {parts.hostname} holds a password or a query",
                f"give the key by the environment variable {KEY_VARIABLE}",
            )
        found.append(url.rstrip("/").removesuffix("/v1").rstrip("/"))
    if len({*found}) < len(found):
        raise ConfigError(
            "servers: one address is there twice",
            "raise client.concurrency to ask a server more at once",
        )
    return found


def api_key(variable: str) -> str | None:
    """The key in an environment variable. Raises ConfigError for one that was named and is not set,
    or that is no key.
    """
    key = os.environ.get(variable, "").strip()
    if not key and variable != KEY_VARIABLE:
        raise ConfigError(
            f"client.api_key_env: the variable {variable} is not set",
            f"export {variable}=... first",
        )
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"the API key in {variable} has characters that no header takes",
            "set it again, without line breaks",
        )
    return key or None


class _Message(BaseModel):
    content: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None


class _Choice(BaseModel):
    finish_reason: str | None
    message: _Message | None = None
    text: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1, max_length=1)
    usage: _Usage


class Server:
    """A connection pool to one server. model and engine are known once it has been looked at."""

    def __init__(self, url: str, config: ClientConfig, key: str | None) -> None:
        self.url, self.model, self.engine = url, config.model or "", "unknown"
        self._config = config
        self._timeout = httpx.Timeout(config.timeout_s, connect=min(CONNECT_S, config.timeout_s))
        headers = {"authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=self._timeout,
            limits=limits,
            trust_env=False,
            follow_redirects=False,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def look(self, expected: Expected) -> None:
        """See that the target is served and answers. Raises Trouble, "unfit" where something else
        is served.
        """
        card = await self._card()
        await self._learn_version(str(card.get("owned_by", "")))
        own = card.get("eyas") if isinstance(card.get("eyas"), dict) else {}
        served = (own or {}).get("target_fingerprint")
        if served and served != expected.fingerprint:
            raise Trouble("unfit", f"serves another target ({served}, not {expected.fingerprint})")
        room = card.get("max_model_len")
        if isinstance(room, int) and room < expected.max_length:
            raise Trouble(
                "unfit",
                f"holds {room} tokens a request, fewer than max_length {expected.max_length}",
            )
        for probe in expected.probes:
            try:
                await self.answer(probe)
            except Trouble as trouble:
                if trouble.kind in ("refused", "other_tokens"):
                    raise Trouble("unfit", f"{trouble.what}, when asked to say a word") from trouble
                raise

    async def answer(self, asked: Asked) -> Written:
        """The answer to one turn. Raises Trouble."""
        body: dict[str, Any] = {"model": self.model, **_sampling(asked.params)}
        if self._config.send == "tokens":
            content = await self._ask("/v1/completions", {**body, "prompt": list(asked.prompt_ids)})
        else:
            content = await self._ask(
                "/v1/chat/completions", {**body, "messages": list(asked.messages)}
            )
        return _written(content, len(asked.prompt_ids))

    async def _card(self) -> dict[str, Any]:
        """What the server says of its model, which is known by name from here on."""
        listed = _json(await self._ask("/v1/models"))
        cards = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(cards, list) or not all(
            isinstance(one, dict) and isinstance(one.get("id"), str) for one in cards
        ):
            raise Trouble("broken", "lists no models")
        wanted = self._config.model
        found = [one for one in cards if one["id"] == wanted] if wanted else cards
        if len(found) != 1:
            names = ", ".join(str(one["id"])[:80] for one in cards[:5])
            several = f"serves {len(cards)} models ({names}): name one as client.model"
            raise Trouble("unfit", f"does not serve {wanted}, only {names}" if wanted else several)
        self.model = found[0]["id"]
        card: dict[str, Any] = found[0]
        return card

    async def _learn_version(self, engine: str) -> None:
        """The engine's name and version, as far as the server tells."""
        version: Any = None
        if engine in VERSION_PATHS:
            with contextlib.suppress(Trouble):
                told = _json(await self._ask(VERSION_PATHS[engine]))
                told = told.get("info", told) if isinstance(told, dict) else {}
                version = told.get("version") if isinstance(told, dict) else None
        name = engine[:40] if engine.isprintable() and engine else "unknown"
        self.engine = f"{name} {version[:40]}" if isinstance(version, str) else name

    async def _ask(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The body of a 200. Raises Trouble for everything else."""
        try:
            async with (
                asyncio.timeout(self._config.timeout_s),
                self._http.stream("GET" if body is None else "POST", path, json=body) as response,
            ):
                content = bytearray()
                async for piece in response.aiter_bytes():
                    content += piece
                    if len(content) > MAX_BODY:
                        raise Trouble("broken", f"answers more than {MAX_BODY >> 20} MiB")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Trouble("lost", "takes no connection", was_heard=False) from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise Trouble(
                "broken", f"does not answer within {self._config.timeout_s:g} s"
            ) from error
        except httpx.TransportError as error:
            raise Trouble("lost", f"breaks the connection ({type(error).__name__})") from error
        except httpx.RequestError as error:
            raise Trouble(
                "broken", f"sends what cannot be read ({type(error).__name__})"
            ) from error
        if response.status_code != httpx.codes.OK:
            raise _refusal(response, bytes(content))
        return bytes(content)


def _refusal(response: httpx.Response, content: bytes) -> Trouble:
    """What a status other than 200 means. Of its text only a code is told: a message may quote what
    was said.
    """
    status = response.status_code
    what = f"answers HTTP {status}{_code(content)}"
    if status == 429:
        return Trouble("busy", what, _retry_after_s(response))
    if status in (408, 502, 503, 504):
        return Trouble("lost", what, _retry_after_s(response))
    if status >= 500:
        return Trouble("broken", what)
    return Trouble("refused" if status in (400, 413, 422) else "unfit", what)


def _code(content: bytes) -> str:
    """The code or type of an error in OpenAI's form, in brackets."""
    try:
        told = json.loads(content)
        error = told.get("error", told)
        code = error.get("code") or error.get("type")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return (
        f" ({code})"
        if isinstance(code, str) and len(code) <= 64 and code.replace("_", "").isalnum()
        else ""
    )


def _retry_after_s(response: httpx.Response) -> float | None:
    """Seconds of a Retry-After, given as a number or as a date."""
    told = response.headers.get("retry-after", "").strip()
    if not told:
        return None
    try:
        if told.isdigit():
            return float(told)
        until = email.utils.parsedate_to_datetime(told)
        return max(0.0, (until - datetime.datetime.now(datetime.UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Trouble("broken", "answers what is no JSON") from error


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """In OpenAI's form, without what changes nothing: a server may not know every field."""
    body: dict[str, Any] = {"temperature": params.temperature, "max_tokens": params.max_tokens}
    if params.temperature > 0:
        body["seed"] = params.seed
        body |= {"top_p": params.top_p} if params.top_p < 1 else {}
        body |= {"top_k": params.top_k} if params.top_k > 0 else {}
    return body


def _written(content: bytes, num_prompt_tokens: int) -> Written:
    try:
        completion = _Completion.model_validate_json(content)
    except ValidationError as error:
        raise Trouble("broken", "answers what is no completion with its usage") from error
    choice, usage = completion.choices[0], completion.usage
    message = choice.message or _Message(content=choice.text)
    if message.reasoning or message.reasoning_content or message.tool_calls:
        raise Trouble(
            "unfit", "takes answers apart: start it without a parser for reasoning or tool calls"
        )
    text = message.content
    if text is None or choice.finish_reason not in ("stop", "length") or not _is_text(text):
        raise Trouble("broken", "answers without a text, or without an end")
    if usage.prompt_tokens != num_prompt_tokens:
        what = (
            f"saw {usage.prompt_tokens} prompt tokens where the target's template gives "
            f"{num_prompt_tokens}"
        )
        raise Trouble("other_tokens", what)
    return Written(
        text, "stop" if choice.finish_reason == "stop" else "length", usage.completion_tokens
    )


def _is_text(text: str) -> bool:
    """Halves of a surrogate pair can be written in JSON and are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
