"""Any number of servers (SGLang, vLLM, ours) as one backend: which one is asked next, which ones
are healthy, and when to ask again. `generate` asks for answers, `capture` for hidden states.

    healthy    is asked, up to `concurrency` requests at once, fewer while it answers 429
    failing    is not asked; it is checked again, with pauses that double, until it passes
    retired    is not asked any more: failing for PATIENCE_S, or serving something else

A request that failed goes to the front of the queue, for any free server. It is given up only where
the request itself fails: refused for good, or failing again and again at servers that answer
others. Without a server left the run ends, and every answer is kept.

Knows health and order, and what a server of answers must show (one of states: features/states).
Does not know HTTP (eyas/client.py) or conversations.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from eyas.client import Client, Completion, FailureKind, RequestFailure, server_url
from eyas.engine.request import SamplingParams
from eyas.errors import ConfigError, EyasError, MismatchError, MissingInputError
from eyas.features.conversation import TurnAnswer, TurnFailure, TurnRequest

ServerState = Literal["healthy", "failing", "retired"]
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
WAIT_S = 1.0  # of `wait`, at most
PATIENCE_S = 300.0  # with a failing server: a restart with a large model takes minutes
# A request is given up at so many strikes: five answers in no form, or 25 connections that broke
# under it.
BROKEN_STRIKES, LOST_STRIKES, MOST_STRIKES = 5, 1, 25
# Where an engine tells its version, by the `owned_by` of its model card.
VERSION_PATHS = {"vllm": "/version", "sglang": "/get_server_info", "eyas": "/openapi.json"}

log = logging.getLogger(__name__)


class FleetConfig(BaseModel):
    """How servers are asked. concurrency: requests at once, of each. timeout_s: for a whole answer.
    model: its name at the servers; by default the only one that they list.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    concurrency: int = Field(default=32, ge=1)
    timeout_s: float = Field(default=600.0, gt=0)
    model: str | None = None


class ClientConfig(FleetConfig):
    """How servers are asked for answers. send: `messages` (/v1/chat/completions: the server renders
    its own template, and its token counts must be ours), or `tokens` (/v1/completions with token
    ids, which SGLang, vLLM and eyas take: the server sees our tokens, whatever they spell).
    """

    send: Literal["messages", "tokens"] = "messages"


@dataclass(frozen=True, slots=True)
class TargetProof:
    """What a server must show before it is asked: the target's fingerprint, room for max_length
    tokens, and on each of `probes` our own number of prompt tokens.
    """

    fingerprint: str
    max_length: int
    probes: tuple[TurnRequest, ...]


class PromptMismatch(RequestFailure):
    """The server counts other prompt tokens than the target's template gives."""

    def __init__(self, theirs: int, ours: int) -> None:
        what = f"saw {theirs} prompt tokens where the target's template gives {ours}"
        super().__init__("refused", what)


class FleetRequest(Protocol):
    """What a server is asked for."""

    @property
    def id(self) -> str:
        """Of the request; its reply has the same."""


Asked = TypeVar("Asked", bound=FleetRequest)
Reply = TypeVar("Reply")
Given = TypeVar("Given", covariant=True)


@dataclass(slots=True)
class FleetJob(Generic[Asked]):
    """A request with its history. started: perf_counter, seconds."""

    request: Asked
    started: float
    attempts: int = 0
    strikes: int = 0
    last: object = None  # the member where it failed


class FleetServer(Protocol[Asked, Given]):
    """A server as the fleet knows it. model and engine are known once `check` has passed."""

    url: str
    model: str
    engine: str
    client: Client

    async def check(self) -> None:
        """Raises RequestFailure, "unfit" where something else than the target is served."""

    async def reply(self, job: FleetJob[Asked]) -> Given:
        """What the fleet hands out. Raises RequestFailure."""


class TargetServer:
    """A server of the target that answers turns."""

    def __init__(
        self, url: str, config: ClientConfig, proof: TargetProof, names_tokens: bool = False
    ) -> None:
        """names_tokens: answers are to hold the names of control tokens."""
        self.url, self.model, self.engine = url, config.model or "", "unknown"
        self._proof, self._names_tokens = proof, names_tokens
        self._config, self.client = config, Client(url, config.timeout_s)

    async def check(self) -> None:
        """Raises RequestFailure, "unfit" where something else than the target is served."""
        proof = self._proof
        card = await model_card(self.client, self._config.model)
        self.model = card["id"]
        self.engine = await engine_name(self.client, str(card.get("owned_by", "")))
        own = card.get("eyas")
        served = own.get("target_fingerprint") if isinstance(own, dict) else None
        if served and served != proof.fingerprint:
            what = f"serves another target ({served}, not {proof.fingerprint})"
            raise RequestFailure("unfit", what)
        room = card.get("max_model_len")
        if isinstance(room, int) and room < proof.max_length:
            what = f"holds {room} tokens a request, fewer than max_length {proof.max_length}"
            raise RequestFailure("unfit", what)
        for probe in proof.probes:
            try:
                await self.answer(probe)
            except RequestFailure as failure:
                if failure.kind != "refused":
                    raise
                what = f"{failure.what}, when asked to say a word"
                raise RequestFailure("unfit", what) from failure

    async def answer(self, request: TurnRequest) -> Completion:
        """The answer to one turn. Raises RequestFailure."""
        body: dict[str, Any] = {"model": self.model, **_openai_fields(request.params)}
        if self._config.send == "tokens":
            body["prompt"] = list(request.prompt_ids)
            if self._names_tokens:
                body["skip_special_tokens"] = False
        else:
            body["messages"] = list(request.messages)
        completion = await self.client.complete(body)
        if completion.num_prompt_tokens != len(request.prompt_ids):
            raise PromptMismatch(completion.num_prompt_tokens, len(request.prompt_ids))
        return completion

    async def reply(self, job: FleetJob[TurnRequest]) -> TurnAnswer:
        """The answer with how it came. Raises RequestFailure."""
        completion = await self.answer(job.request)
        return TurnAnswer(
            job.request.id,
            completion.text,
            completion.finish_reason,
            completion.num_tokens,
            self.engine,
            self.url,
            latency_ms=1000 * (time.perf_counter() - job.started),
            attempts=job.attempts,
        )


async def model_card(client: Client, wanted: str | None) -> dict[str, Any]:
    """The model card of the target, by its name or as the only one. Raises RequestFailure."""
    cards = await client.cards()
    found = [card for card in cards if wanted in (None, card["id"])]
    if len(found) != 1:
        names = ", ".join(card["id"][:80] for card in cards[:5])
        several = f"serves {len(cards)} models ({names}): name one as client.model"
        what = f"does not serve {wanted}, only {names}" if wanted else several
        raise RequestFailure("unfit", what)
    return found[0]


async def engine_name(client: Client, owner: str) -> str:
    """The engine's name and version, as far as the server tells. owner: `owned_by` of a card."""
    version: Any = None
    if owner in VERSION_PATHS:
        with contextlib.suppress(ValueError, AttributeError, RecursionError):
            facts = json.loads(await client.page(VERSION_PATHS[owner]))
            version = facts.get("info", facts).get("version")
    name = owner[:40] if owner.isprintable() and owner else "unknown"
    return f"{name} {version[:40]}" if isinstance(version, str) else name


def server_urls(urls: Sequence[str]) -> list[str]:
    """The addresses without /v1. Raises ConfigError for what is no address, holds a password, or is
    there twice.
    """
    found = [server_url(url) for url in urls]
    if len({*found}) < len(found):
        raise ConfigError(
            "servers: one address is there twice",
            "raise client.concurrency to send a server more at once",
        )
    return found


def _openai_fields(params: SamplingParams) -> dict[str, Any]:
    """In OpenAI's form, without what changes nothing: a server may not know every field."""
    fields: dict[str, Any] = {"temperature": params.temperature, "max_tokens": params.max_tokens}
    if params.temperature > 0:
        fields["seed"] = params.seed
        fields |= {"top_p": params.top_p} if params.top_p < 1 else {}
        fields |= {"top_k": params.top_k} if params.top_k > 0 else {}
    return fields


@dataclass(eq=False)
class Member(Generic[Asked, Reply]):
    """A server and its health. allowed: requests at once, which follows what the server takes."""

    server: FleetServer[Asked, Reply]
    allowed: float
    state: ServerState = "failing"
    reason: str = ""
    last_kind: FailureKind | None = None  # at the last check
    since: float = field(default_factory=time.monotonic)  # in this state
    last_good: float = field(default_factory=time.monotonic)
    not_before: float = 0.0  # as it asked for by Retry-After
    num_running: int = 0
    num_answers: int = 0
    num_busy: int = 0
    num_failures: int = 0

    def become(self, state: ServerState, reason: str = "") -> None:
        """Change state, with a line in the log."""
        if state != self.state:
            self.state, self.since = state, time.monotonic()
            data = {"server": self.server.url, "state": state, "reason": reason}
            level = logging.INFO if state == "healthy" else logging.WARNING
            log.log(level, "a server is %s", state, extra={"data": data})
        self.reason = reason

    @property
    def is_free(self) -> bool:
        has_room = self.num_running < int(self.allowed)
        return self.state == "healthy" and has_room and time.monotonic() >= self.not_before

    def facts(self) -> dict[str, Any]:
        """What it is and how it went, for the manifest."""
        return {
            "url": self.server.url,
            "model": self.server.model,
            "engine": self.server.engine,
            "state": self.state,
            "for_s": round(time.monotonic() - self.since),
            "reason": self.reason,
            "answers": self.num_answers,
            "busy": self.num_busy,
            "failures": self.num_failures,
        }


class Fleet(Generic[Asked, Reply]):
    """The servers as a backend. All requests run on an event loop of this object, which runs while
    `wait` waits.
    """

    def __init__(
        self,
        servers: Sequence[FleetServer[Asked, Reply]],
        config: FleetConfig,
        start_hint: str = "start one, e.g. with `eyas serve`, or check the address",
        fit_hint: str = "give servers of this target, with its own tokenizer and chat template",
    ) -> None:
        """Check all servers. start_hint, fit_hint: what to do where none answers, and where one
        serves something else. Raises MissingInputError (none answers), MismatchError (one serves
        something else: a mistake in the settings).
        """
        self.capacity = len(servers) * config.concurrency
        self._config, self._hints = config, (start_hint, fit_hint)
        self._pending: deque[FleetJob[Asked]] = deque()
        self._done: list[Reply | TurnFailure] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._bug: BaseException | None = None
        self._news = asyncio.Event()
        self._members = [Member(server, config.concurrency) for server in servers]
        self._runner = asyncio.Runner()
        try:
            self._runner.run(self._check_all())
        except BaseException:
            self.close()
            raise

    def add(self, request: Asked) -> None:
        """Ask for a reply to this."""
        self._pending.append(FleetJob(request, time.perf_counter()))

    def wait(self) -> list[Reply | TurnFailure]:
        """What is ready, after a second at most. Raises EyasError when no server is left."""
        return self._runner.run(self._wait())

    def status(self) -> str:
        """How many are healthy, and since when others are not."""
        now = time.monotonic()
        ill = [
            f"{one.server.url} {one.state} for {now - one.since:.0f} s"
            for one in self._members
            if one.state != "healthy"
        ]
        shown = "; ".join(ill[:3] + ["..."] * (len(ill) > 3))
        healthy = f"{len(self._members) - len(ill)} of {len(self._members)} servers"
        return healthy + (f" ({shown})" if ill else "")

    def facts(self) -> dict[str, Any]:
        """Every server with what it is and how it went."""
        return {"servers": [one.facts() for one in self._members]}

    def close(self) -> None:
        """Stop all requests and close all connections."""
        self._runner.run(self._stop())
        self._runner.close()

    # On the loop

    async def _check_all(self) -> None:
        await asyncio.gather(*(self._check(one) for one in self._members))
        unfit = [one for one in self._members if one.state == "retired"]
        if unfit:
            raise MismatchError(_reasons(unfit), self._hints[1])
        if all(one.state == "failing" and one.last_kind != "busy" for one in self._members):
            raise MissingInputError(f"no server answers: {_reasons(self._members)}", self._hints[0])
        for one in self._members:
            if one.state == "failing":
                self._start(self._revive(one))

    async def _wait(self) -> list[Reply | TurnFailure]:
        self._hand_out()
        if not self._done and self._bug is None:
            self._news.clear()
            try:
                async with asyncio.timeout(WAIT_S):
                    await self._news.wait()
            except TimeoutError:
                self._hand_out()
        if self._bug is not None:
            raise self._bug
        done, self._done = self._done, []
        if not done and all(
            one.state == "retired" and not one.num_running for one in self._members
        ):
            raise EyasError(
                f"no server is left: {_reasons(self._members)}",
                "every answer is kept: repair the servers and run the same command again",
            )
        return done

    def _hand_out(self) -> None:
        """Give pending requests to free servers: the least busy first, and another one than where
        the request failed, if there is one.
        """
        while self._pending:
            free = [one for one in self._members if one.is_free]
            if not free:
                return
            job = self._pending.popleft()
            member = min(free, key=lambda one: (one is job.last, one.num_running / one.allowed))
            member.num_running += 1
            self._start(self._ask(member, job))

    async def _ask(self, member: Member[Asked, Reply], job: FleetJob[Asked]) -> None:
        job.attempts += 1
        try:
            reply = await member.server.reply(job)
        except RequestFailure as failure:
            self._fail(member, job, failure)
        else:
            self._finish(member, reply)
        finally:
            member.num_running -= 1
            self._hand_out()
            self._news.set()

    def _finish(self, member: Member[Asked, Reply], reply: Reply) -> None:
        member.num_answers += 1
        member.last_good = time.monotonic()
        member.allowed = min(self._config.concurrency, member.allowed + 1 / member.allowed)
        self._done.append(reply)

    def _fail(
        self, member: Member[Asked, Reply], job: FleetJob[Asked], failure: RequestFailure
    ) -> None:
        """Decide on the request, and on the server."""
        if failure.kind == "refused":
            self._done.append(
                TurnFailure(
                    job.request.id,
                    "server_saw_other_tokens"
                    if isinstance(failure, PromptMismatch)
                    else "server_refused",
                    f"{member.server.url} {failure.what}",
                )
            )
            return
        if failure.kind == "busy":
            self._slow_down(member, failure)
        else:
            member.num_failures += 1
            if failure.was_received:
                job.strikes += BROKEN_STRIKES if failure.kind == "broken" else LOST_STRIKES
            if failure.kind == "unfit":
                member.become("retired", failure.what)
            elif member.state == "healthy":
                member.become("failing", failure.what)
                self._start(self._revive(member, failure.retry_after_s or 0.0))
        job.last = member
        if job.strikes >= MOST_STRIKES:
            detail = f"{job.attempts} attempts; the last: {failure.what}"
            self._done.append(TurnFailure(job.request.id, "server_failed", detail))
        else:
            self._pending.appendleft(job)

    def _slow_down(self, member: Member[Asked, Reply], failure: RequestFailure) -> None:
        """A server that answers 429 gets fewer requests, later."""
        member.num_busy += 1
        member.allowed = max(1, min(member.allowed, member.num_running - 1))
        asked_s = failure.retry_after_s
        pause = FIRST_PAUSE_S if asked_s is None else min(asked_s, PATIENCE_S)
        member.not_before = time.monotonic() + pause
        asyncio.get_running_loop().call_later(pause, self._hand_out)
        if time.monotonic() - member.last_good > PATIENCE_S and member.num_running == 1:
            member.become("retired", f"{failure.what} for {PATIENCE_S:g} s")

    async def _revive(self, member: Member[Asked, Reply], pause: float = FIRST_PAUSE_S) -> None:
        """Check a failing server until it passes, or is given up."""
        await asyncio.sleep(min(pause, LONGEST_PAUSE_S))
        pause = FIRST_PAUSE_S
        while await self._check(member) == "failing":
            if time.monotonic() - member.since > PATIENCE_S:
                member.become("retired", f"{member.reason}, for {PATIENCE_S:g} s")
                break
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))
            pause = min(2 * pause, LONGEST_PAUSE_S)
        self._hand_out()
        self._news.set()

    async def _check(self, member: Member[Asked, Reply]) -> ServerState:
        try:
            await member.server.check()
        except RequestFailure as failure:
            member.last_kind = failure.kind
            member.become("retired" if failure.kind == "unfit" else "failing", failure.what)
        else:
            member.become("healthy")
            member.last_good = time.monotonic()
        return member.state

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(one.server.client.close() for one in self._members))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """An exception in a task is a fault of ours: `wait` raises it."""
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._bug = bug
            self._news.set()


def _reasons(members: Sequence[Member[Asked, Reply]]) -> str:
    return "; ".join(f"{one.server.url} {one.reason}" for one in members)
