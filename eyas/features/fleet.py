"""Servers (SGLang, vLLM, eyas) as one backend of `generate` and `capture`.

The `openai` client retries; then a request goes to the least busy other server. It is given up when
refused, or after MOST_FAILURES at servers that pass their checks. The run ends when no server has
answered or passed a check for PATIENCE_S.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Generic, Literal, Protocol, TypeVar

from pydantic import Field

from eyas.client import CONNECT_S, Client, RequestFailure, api_key, server_url, status_failure
from eyas.errors import ConfigError, EyasError, MismatchError, MissingInputError, extra
from eyas.features.conversation import TurnFailure
from eyas.settings import Settings

CLIENT_RETRIES = 2  # by the client itself, before another server is asked
PAUSE_S, LONGEST_PAUSE_S = 0.5, 600.0  # after a failure
WAIT_S = 1.0  # of `wait`, at most
POLL_S = 0.1  # while all servers pause
PATIENCE_S = 300.0  # a restart with a large model takes minutes
MOST_FAILURES = 5  # of one request, at servers that pass their checks
PAUSES_S = 120.0  # of the client's retries together: a busy server asks for up to 60 s each
# where an engine (`owned_by` of its model card) reports version and precision
VERSION_PATHS = {"vllm": "/version", "sglang": "/get_server_info", "eyas": "/openapi.json"}
PRECISION = ("dtype", "quantization", "kv_cache_dtype")


class FleetConfig(Settings):
    concurrency: int = Field(default=32, ge=1, description="requests at a time, for each server")
    timeout_s: float = Field(default=600.0, gt=0, description="for one request")
    model: str | None = Field(None, description="name in requests; null: the only one served")


class ClientConfig(FleetConfig):
    """send: `messages` (/v1/chat/completions: the server renders its own template, which must give
    our tokens, and parses thoughts and calls), or `tokens` (/v1/completions with token ids: the
    server sees our tokens, whatever they spell).
    """

    send: Literal["messages", "tokens"] = "messages"


class FleetRequest(Protocol):
    """Its reply has the same id."""

    @property
    def id(self) -> str: ...


RequestT = TypeVar("RequestT", bound=FleetRequest)
ReplyT = TypeVar("ReplyT")


class PromptMismatch(RequestFailure):
    """The server's template gives other tokens than the target's."""

    def __init__(self, theirs: Sequence[int], ours: Sequence[int]) -> None:
        what = f"saw {len(theirs)} prompt tokens where the target's template gives {len(ours)}"
        super().__init__("refused", what + (", or others" if len(theirs) == len(ours) else ""))


@contextmanager
def refused_is_unfit(asked_for: str) -> Iterator[None]:
    """A server that refuses a request of its check is unfit."""
    try:
        yield
    except RequestFailure as failure:
        if failure.kind != "refused":
            raise
        what = f"{failure.what}, when asked for {asked_for}"
        raise RequestFailure("unfit", what) from failure


class FleetServer(Generic[RequestT, ReplyT]):
    """A server and its state. model and engine are known once `check` has passed."""

    def __init__(self, url: str, config: FleetConfig) -> None:
        """Raises ConfigError for the address or the key, or without `openai`."""
        self.url, self.config = url, config
        self.model, self.engine = config.model or "", "unknown"
        self.precision: dict[str, str] = {}  # as stated
        self.client = Client(url, config.timeout_s)
        self.num_running = self.num_answers = self.num_failures = 0
        self.not_before = 0.0
        self.reason = ""  # of the last failure, until the next answer
        self.is_checked = False
        self._failure = RequestFailure("lost", "was not asked yet")
        self._checking = asyncio.Lock()
        try:
            self._openai: Any = importlib.import_module("openai")
        except ImportError as error:
            raise ConfigError(
                "servers are asked by the package openai, which is not installed", extra("servers")
            ) from error
        self._asks = self._openai.AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key=api_key() or "none",
            timeout=self._openai.Timeout(
                config.timeout_s, connect=min(CONNECT_S, config.timeout_s)
            ),
            max_retries=CLIENT_RETRIES,
            http_client=self._openai.DefaultAsyncHttpxClient(
                trust_env=False, follow_redirects=False
            ),
        )

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON of an answer. path: below /v1, or an address. Raises RequestFailure, which holds
        no part of prompt or answer.
        """
        errors = self._openai
        # the client limits each read alone: a server that trickles would hold it for ever
        longest_s = (1 + CLIENT_RETRIES) * self.config.timeout_s + PAUSES_S
        try:
            async with asyncio.timeout(longest_s):
                content = await self._asks.post(path, cast_to=object, body=body)
            # the client parses JSON only by its content type
            return json.loads(content) if isinstance(content, str) else content
        except (errors.APITimeoutError, TimeoutError) as error:
            what = f"does not answer within {self.config.timeout_s:g} s"
            raise RequestFailure("lost", what) from error
        except errors.APIConnectionError as error:
            what = f"breaks the connection ({type(error.__cause__ or error).__name__})"
            raise RequestFailure("lost", what) from error
        except errors.APIStatusError as error:
            after = error.response.headers.get("retry-after")
            raise status_failure(error.status_code, error.response.content, after) from error
        except (errors.APIError, ValueError, RecursionError) as error:
            raise RequestFailure("broken", "answers what is no JSON") from error

    async def describe(self) -> dict[str, Any]:
        """The model's card; sets model, engine and precision. Raises RequestFailure."""
        wanted, cards = self.config.model, await self.client.cards()
        found = [card for card in cards if wanted in (None, card["id"])]
        if len(found) != 1:
            names = ", ".join(card["id"][:80] for card in cards[:5])
            several = f"serves {len(cards)} models ({names}): name one as client.model"
            what = f"does not serve {wanted}, only {names}" if wanted else several
            raise RequestFailure("unfit", what)
        (card,) = found
        owner = str(card.get("owned_by", ""))
        version, facts = None, {}
        if owner in VERSION_PATHS:
            with suppress(ValueError, AttributeError, RecursionError):
                facts = json.loads(await self.client.page(VERSION_PATHS[owner]))
                version = facts.get("info", facts).get("version")
        self.precision = {
            name: place[name][:80]
            for place in (facts, card.get("eyas"))
            for name in PRECISION
            if isinstance(place, dict) and isinstance(place.get(name), str)
        }
        root = card.get("root")
        if isinstance(root, str) and root.endswith(".gguf"):  # its name says how it is quantised
            self.precision["file"] = root.rsplit("/", 1)[-1][:80]
        name = owner[:40] if owner.isprintable() and owner else "unknown"
        self.model = card["id"]
        self.engine = f"{name} {version[:40]}" if isinstance(version, str) else name
        return card

    async def check(self) -> None:
        """Raises RequestFailure, "unfit" for another model than the target."""
        raise NotImplementedError

    async def reply(self, request: RequestT) -> ReplyT:
        raise NotImplementedError

    async def checked(self) -> bool:
        async with self._checking:
            if self.is_checked:
                return False
            if time.monotonic() < self.not_before:
                raise self._failure
            try:
                await self.check()
            except RequestFailure as failure:
                self.fail(failure)
                raise
            self.is_checked, self.reason = True, ""
            return True

    def fail(self, failure: RequestFailure) -> None:
        """Pause the server; the next request checks it first, unless it was only busy."""
        self.num_failures += 1
        self._failure, self.reason = failure, failure.what
        self.is_checked &= failure.kind == "busy"
        pause = PAUSE_S if failure.retry_after_s is None else failure.retry_after_s
        self.not_before = time.monotonic() + min(pause, LONGEST_PAUSE_S)

    def facts(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "model": self.model,
            "engine": self.engine,
            "precision": self.precision or "not stated",
            "answers": self.num_answers,
            "failures": self.num_failures,
            "reason": self.reason,
        }

    async def close(self) -> None:
        await self.client.close()
        await self._asks.close()


class Fleet(Generic[RequestT, ReplyT]):
    """Servers as a backend. Its event loop runs while `wait` waits."""

    def __init__(
        self,
        servers: Sequence[FleetServer[RequestT, ReplyT]],
        config: FleetConfig,
        start_hint: str = "start one, e.g. with `eyas serve`, or check the address",
        fit_hint: str = "give servers of this target, with its own tokenizer and chat template",
    ) -> None:
        """start_hint, fit_hint: of MissingInputError (no server answers) and MismatchError (one is
        unfit).
        """
        self.capacity = len(servers) * config.concurrency
        self._servers, self._config, self._fit_hint = servers, config, fit_hint
        self._waiting: deque[RequestT] = deque()
        self._tasks: set[asyncio.Task[ReplyT | TurnFailure]] = set()
        self._error: BaseException | None = None
        self._freed = asyncio.Event()  # a request has ended
        self._last_good = time.monotonic()
        self._runner = asyncio.Runner()
        try:
            self._runner.run(self._check_all(start_hint))
        except BaseException:
            self.close()
            raise

    def add(self, request: RequestT) -> None:
        self._waiting.append(request)

    def wait(self) -> list[ReplyT | TurnFailure]:
        """The replies so far, after WAIT_S at most. Raises EyasError when no server answers."""
        return self._runner.run(self._wait())

    def status(self) -> str:
        """How many servers answer, and the others' failures."""
        failing = [f"{one.url} {one.reason}" for one in self._servers if one.reason]
        shown = "; ".join(failing[:3] + ["..."] * (len(failing) > 3))
        count = len(self._servers)
        return f"{count - len(failing)} of {count} servers" + (f" ({shown})" if failing else "")

    def facts(self) -> dict[str, Any]:
        return {"servers": [one.facts() for one in self._servers]}

    def precision(self) -> dict[str, str]:
        """What the servers state of how they compute: all the same, or nothing."""
        return next((one.precision for one in self._servers if one.precision), {})

    def computed_by(self) -> dict[str, str]:
        precision = self.precision()
        return {"servers": f"servers with {precision_text(precision)}"} if precision else {}

    def _refuse_another_precision(self, server: FleetServer[RequestT, ReplyT]) -> None:
        first = next((one for one in self._servers if one.precision), server)
        if server.precision not in ({}, first.precision):
            raise MismatchError(
                f"the servers do not compute alike: {first.url} states "
                f"{precision_text(first.precision)}, {server.url} "
                f"{precision_text(server.precision)}",
                "give servers that compute alike: some of their answers would differ",
            )

    def close(self) -> None:
        async def stop() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.gather(*(one.close() for one in self._servers))

        self._runner.run(stop())
        self._runner.close()

    async def _check_all(self, start_hint: str) -> None:
        checks = (one.checked() for one in self._servers)
        found = await asyncio.gather(*checks, return_exceptions=True)
        for server in self._servers:
            self._refuse_another_precision(server)
        for bug in found:
            if isinstance(bug, BaseException) and not isinstance(bug, RequestFailure):
                raise bug
        kinds = [one.kind if isinstance(one, RequestFailure) else "" for one in found]
        rows = zip(self._servers, kinds, strict=True)
        if unfit := [one for one, kind in rows if kind in ("unfit", "refused")]:
            raise MismatchError(_reasons(unfit), self._fit_hint)
        if all(kinds) and {*kinds} != {"busy"}:
            raise MissingInputError(f"no server answers: {_reasons(self._servers)}", start_hint)
        self._last_good = time.monotonic()

    async def _wait(self) -> list[ReplyT | TurnFailure]:
        while self._waiting:
            self._tasks.add(asyncio.create_task(self._ask(self._waiting.popleft())))
        if not self._tasks:
            return []
        done, self._tasks = await asyncio.wait(
            self._tasks, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED
        )
        # good replies are returned, and kept, before an error ends the run
        self._error = next((error for one in done if (error := one.exception())), self._error)
        replies = [one.result() for one in done if one.exception() is None]
        if self._error is not None and not replies:
            raise self._error
        return replies

    async def _ask(self, request: RequestT) -> ReplyT | TurnFailure:
        num_failed = 0
        server: FleetServer[RequestT, ReplyT] | None = None
        while True:
            server = await self._next(server)
            server.num_running += 1
            is_asked = False
            try:
                if await server.checked():
                    self._last_good = time.monotonic()
                    self._refuse_another_precision(server)
                is_asked = True
                reply = await server.reply(request)
            except RequestFailure as failure:
                if failure.kind == "refused":
                    is_mismatch = isinstance(failure, PromptMismatch)
                    reason: Any = "server_saw_other_tokens" if is_mismatch else "server_refused"
                    return TurnFailure(request.id, reason, f"{server.url} {failure.what}")
                if failure.kind == "unfit":
                    raise MismatchError(f"{server.url} {failure.what}", self._fit_hint) from failure
                # a busy server is alive, and so is one that passed its check
                is_dead = failure.kind != "busy" and not is_asked
                if is_dead and time.monotonic() - self._last_good > PATIENCE_S:
                    raise EyasError(
                        f"no server answers: {_reasons(self._servers)}",
                        "every answer is kept: repair the servers and run the same command again",
                    ) from failure
                if server.is_checked:  # else the server fails, whatever the request
                    server.fail(failure)
                    num_failed += failure.kind != "busy"
                if num_failed == MOST_FAILURES:
                    detail = f"{num_failed} failures; the last: {failure.what}"
                    return TurnFailure(request.id, "server_failed", detail)
            else:
                server.num_answers += 1
                server.reason, self._last_good = "", time.monotonic()
                return reply
            finally:
                server.num_running -= 1
                self._freed.set()

    async def _next(
        self, last: FleetServer[RequestT, ReplyT] | None
    ) -> FleetServer[RequestT, ReplyT]:
        """The least busy server that is not paused; if possible not the last one."""
        while True:
            now, most = time.monotonic(), self._config.concurrency
            free = [
                one for one in self._servers if one.num_running < most and one.not_before <= now
            ]
            if free:
                return min(free, key=lambda one: (one is last, one.num_running))
            self._freed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._freed.wait()


def precision_text(precision: dict[str, str]) -> str:
    """In one line."""
    return ", ".join(f"{name} {value}" for name, value in precision.items()) or "nothing"


def server_urls(urls: Sequence[str]) -> list[str]:
    """Without /v1. Raises ConfigError for no address, a password, or a duplicate."""
    found = [server_url(url) for url in urls]
    if len({*found}) < len(found):
        raise ConfigError(
            "servers: one address is there twice",
            "raise client.concurrency to send a server more at once",
        )
    return found


def _reasons(servers: Sequence[FleetServer[Any, Any]]) -> str:
    return "; ".join(f"{one.url} {one.reason}" for one in servers)
