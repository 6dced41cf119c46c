"""Any number of servers as one backend: who is asked next, who is well, and when to ask again.

    healthy    is asked, up to `concurrency` requests at once, fewer while it says that it has too many (429)
    failing    is not asked; it is looked at again and again, with pauses that double, until it answers as it did at the start
    retired    is not asked any more: failing for patience_s, or serving something else

A request that came to nothing goes to the front of the queue, for whoever is free. It is given up
only where it is the request that fails: refused for good, or failing again and again at servers
that answer others. Without a server left the run ends, and everything that was answered is kept.

Knows health and order. Does not know HTTP (servers) or what is asked.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from eyas.errors import EyasError, MismatchError, MissingInputError
from eyas.features.backend import Asked, Failure, Replied, Unanswered
from eyas.features.servers import (
    ClientConfig,
    Expected,
    Kind,
    Server,
    Trouble,
    Written,
    api_key,
    server_urls,
)

State = Literal["healthy", "failing", "retired"]
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
LOOK_S = 1.0  # that `wait` waits at most
# A request is given up at so many strikes: five answers that are none, or 25 connections that broke
# under it.
BROKEN_STRIKES, LOST_STRIKES, MOST_STRIKES = 5, 1, 25

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Job:
    """A request, since when it is asked for, how often it was, and what speaks against it."""

    asked: Asked
    started: float
    attempts: int = 0
    strikes: int = 0
    last: Member | None = None  # who failed it


@dataclass(eq=False)
class Member:
    """A server and how it is. allowed: requests at once, which follows what the server takes."""

    server: Server
    allowed: float
    state: State = "failing"
    reason: str = ""
    last_kind: Kind | None = None  # of trouble, when it was looked at
    since: float = field(default_factory=time.monotonic)  # it is what it is
    last_good: float = field(default_factory=time.monotonic)
    not_before: float = 0.0  # by its own wish
    num_running: int = 0
    num_answers: int = 0
    num_busy: int = 0
    num_failures: int = 0

    def become(self, state: State, reason: str = "") -> None:
        """Change state, and say so in the log."""
        if state != self.state:
            self.state, self.since = state, time.monotonic()
            data = {"server": self.server.url, "state": state, "reason": reason}
            log.log(
                logging.INFO if state == "healthy" else logging.WARNING,
                "a server is %s",
                state,
                extra={"data": data},
            )
        self.reason = reason

    @property
    def is_free(self) -> bool:
        return (
            self.state == "healthy"
            and self.num_running < int(self.allowed)
            and time.monotonic() >= self.not_before
        )


class Fleet:
    """The servers. Everything of theirs runs on a loop of this object's own, while `wait` waits."""

    def __init__(self, urls: Sequence[str], config: ClientConfig, expected: Expected) -> None:
        """Look at all of them. Raises ConfigError, MissingInputError (nobody answers),
        MismatchError (one serves something else: a mistake that somebody has to mend)."""
        key = api_key(config.api_key_env)
        addresses = server_urls(urls)
        self.capacity = len(addresses) * config.concurrency
        self._config, self._expected = config, expected
        self._pending: deque[Job] = deque()
        self._done: list[Replied | Unanswered] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._bug: BaseException | None = None
        self._news = asyncio.Event()
        self._runner = asyncio.Runner()
        self._members = [Member(Server(url, config, key), config.concurrency) for url in addresses]
        try:
            self._runner.run(self._muster())
        except BaseException:
            self.close()
            raise

    def add(self, asked: Asked) -> None:
        """Ask for a turn."""
        self._pending.append(Job(asked, time.perf_counter()))

    def wait(self) -> list[Replied | Unanswered]:
        """What has come since, after a second at the latest. Raises EyasError when no server is
        left.
        """
        return self._runner.run(self._wait())

    def status(self) -> str:
        """How many are well, and since when others are not."""
        now = time.monotonic()
        ill = [
            f"{one.server.url} {one.state} for {now - one.since:.0f} s"
            for one in self._members
            if one.state != "healthy"
        ]
        well = len(self._members) - len(ill)
        told = "; ".join(ill[:3] + ["..."] * (len(ill) > 3))
        return f"{well} of {len(self._members)} servers" + (f" ({told})" if ill else "")

    def facts(self) -> dict[str, Any]:
        """Every server with what it is and how it went."""
        return {"servers": [self._facts(one) for one in self._members]}

    def close(self) -> None:
        """Stop asking and close all connections."""
        self._runner.run(self._stop())
        self._runner.close()

    # On the loop

    async def _muster(self) -> None:
        """The first look at everybody."""
        await asyncio.gather(*(self._look(one) for one in self._members))
        unfit = [
            f"{one.server.url} {one.reason}" for one in self._members if one.state == "retired"
        ]
        if unfit:
            raise MismatchError(
                "; ".join(unfit),
                "give servers of this target, with its own tokenizer and chat template",
            )
        if all(one.state == "failing" and one.last_kind != "busy" for one in self._members):
            hint = "start one, e.g. with `eyas serve`, or check the address"
            raise MissingInputError(f"no server answers: {self._reasons()}", hint)
        for one in self._members:
            if one.state == "failing":
                self._start(self._revive(one))

    async def _wait(self) -> list[Replied | Unanswered]:
        self._hand_out()
        if not self._done and self._bug is None:
            self._news.clear()
            try:
                async with asyncio.timeout(LOOK_S):
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
                f"no server is left: {self._reasons()}",
                "all that was answered is kept: see to the servers and run the same command again",
            )
        return done

    def _hand_out(self) -> None:
        """Give what waits to those that are free: the least busy first, somebody else than who
        failed it if there is one.
        """
        while self._pending:
            free = [one for one in self._members if one.is_free]
            if not free:
                return
            job = self._pending.popleft()
            free.sort(key=lambda one: (one is job.last, one.num_running / one.allowed))
            free[0].num_running += 1
            self._start(self._ask(free[0], job))

    async def _ask(self, member: Member, job: Job) -> None:
        job.attempts += 1
        try:
            written = await member.server.answer(job.asked)
        except Trouble as trouble:
            self._trouble(member, job, trouble)
        else:
            self._good(member, job, written)
        finally:
            member.num_running -= 1
            self._hand_out()
            self._news.set()

    def _good(self, member: Member, job: Job, written: Written) -> None:
        member.num_answers += 1
        member.last_good = time.monotonic()
        member.allowed = min(self._config.concurrency, member.allowed + 1 / member.allowed)
        latency_ms = 1000 * (time.perf_counter() - job.started)
        server = member.server
        self._done.append(
            Replied(
                job.asked.id,
                written.text,
                written.finish_reason,
                written.num_tokens,
                server.engine,
                server.url,
                latency_ms,
                job.attempts,
            )
        )

    def _trouble(self, member: Member, job: Job, trouble: Trouble) -> None:
        """What becomes of the request, and what of the server."""
        if trouble.kind in ("refused", "other_tokens"):
            reason: Failure = (
                "server_refused" if trouble.kind == "refused" else "server_saw_other_tokens"
            )
            self._done.append(
                Unanswered(job.asked.id, reason, f"{member.server.url} {trouble.what}")
            )
            return
        if trouble.kind == "busy":
            self._be_patient(member, trouble)
        else:
            member.num_failures += 1
            if trouble.was_heard:
                job.strikes += BROKEN_STRIKES if trouble.kind == "broken" else LOST_STRIKES
            self._distrust(member, trouble)
        job.last = member
        if job.strikes >= MOST_STRIKES:
            self._done.append(
                Unanswered(
                    job.asked.id,
                    "server_failed",
                    f"{job.attempts} attempts; the last: {trouble.what}",
                )
            )
        else:
            self._pending.appendleft(job)

    def _be_patient(self, member: Member, trouble: Trouble) -> None:
        """A server that has too much to do gets less, later."""
        member.num_busy += 1
        member.allowed = max(1, min(member.allowed, member.num_running - 1))
        pause = (
            FIRST_PAUSE_S
            if trouble.retry_after_s is None
            else min(trouble.retry_after_s, self._config.patience_s)
        )
        member.not_before = time.monotonic() + pause
        asyncio.get_running_loop().call_later(pause, self._hand_out)
        if (
            time.monotonic() - member.last_good > self._config.patience_s
            and member.num_running == 1
        ):
            member.become("retired", f"{trouble.what} for {self._config.patience_s:g} s")

    def _distrust(self, member: Member, trouble: Trouble) -> None:
        if trouble.kind == "unfit":
            member.become("retired", trouble.what)
        elif member.state == "healthy":
            member.become("failing", trouble.what)
            self._start(self._revive(member, trouble.retry_after_s or 0.0))

    async def _revive(self, member: Member, pause: float = FIRST_PAUSE_S) -> None:
        """Look at a failing server until it is well, or given up."""
        await asyncio.sleep(min(pause, LONGEST_PAUSE_S))
        pause = FIRST_PAUSE_S
        while await self._look(member) == "failing":
            if time.monotonic() - member.since > self._config.patience_s:
                member.become("retired", f"{member.reason}, for {self._config.patience_s:g} s")
                break
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))
            pause = min(2 * pause, LONGEST_PAUSE_S)
        self._hand_out()
        self._news.set()

    async def _look(self, member: Member) -> State:
        """The state in which it shows itself."""
        try:
            await member.server.look(self._expected)
        except Trouble as trouble:
            member.last_kind = trouble.kind
            member.become("retired" if trouble.kind == "unfit" else "failing", trouble.what)
        else:
            member.become("healthy")
            member.last_good = time.monotonic()
        return member.state

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(one.server.close() for one in self._members))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that raises is a fault of ours, which is not to be lost."""
        self._tasks.discard(task)
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._bug = bug
            self._news.set()

    def _reasons(self) -> str:
        return "; ".join(f"{one.server.url} {one.reason}" for one in self._members)

    @staticmethod
    def _facts(member: Member) -> dict[str, Any]:
        return {
            "url": member.server.url,
            "model": member.server.model,
            "engine": member.server.engine,
            "state": member.state,
            "for_s": round(time.monotonic() - member.since),
            "reason": member.reason,
            "answers": member.num_answers,
            "busy": member.num_busy,
            "failures": member.num_failures,
        }
