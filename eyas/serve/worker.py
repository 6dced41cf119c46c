"""The thread that owns the engine, and how requests and updates cross to and from the event loop.
Knows no HTTP.

    event loop                                     worker thread
    updates(requests) ── add, cancel ─▶ inbox ─▶ engine.add, engine.cancel
    look(question)    ── question ────▶            question(engine), between two rounds
           ▲                                       engine.step  (without work: waits on the condition)
           └────── one queue a caller ◀─ deliver ◀── call_soon_threadsafe, once for all the updates of a round

An engine that raises in a step is not trusted again: all requests fail with EngineFailure, now and
later, and `failure` says why. What it raises for one request alone, before anything of it runs, is
that request's failure.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from eyas.engine.engine import Engine
from eyas.engine.request import Request, Update
from eyas.errors import EyasError, InputError

log = logging.getLogger("eyas.serve")

Event = Update | EyasError
T = TypeVar("T")


class EngineFailure(EyasError):
    """The engine has raised or has been stopped; the request gets no (further) answer."""

    def again(self) -> EngineFailure:
        """The same failure to raise once more: an exception that is raised twice keeps both
        tracebacks.
        """
        return EngineFailure(self.what, self.hint)


class Stopped(EngineFailure):
    """The server ends; the request may be sent to it again later."""

    def again(self) -> Stopped:
        return Stopped(self.what, self.hint)


class TimedOut(EyasError):
    """The answer took longer than it may."""


@dataclass(frozen=True, slots=True)
class _Question:
    ask: Callable[[Engine], Any]
    answer: asyncio.Future[Any]


# a request to add; the id of one to cancel; something to be answered between rounds
Command = Request | str | _Question


class Worker:
    """Runs an engine in a thread of its own for the event loop that calls `start`."""

    def __init__(self, engine: Engine) -> None:
        self.failure: EngineFailure | None = None
        self.max_batch = engine.config.max_batch
        # under way, waiting or running; touched by the event loop only, as the queues
        self.num_samples = 0
        self._engine = engine
        self._condition = threading.Condition()  # guards the two below
        self._inbox: list[Command] = []
        self._stopping = False
        # by request; requests that are asked for together share one
        self._queues: dict[str, asyncio.Queue[Event]] = {}
        self._thread: threading.Thread | None = None

    @property
    def num_requests(self) -> int:
        return len(self._queues)

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self.failure is None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its current round; requests that still wait get EngineFailure."""
        assert self._thread is not None, "stop before start"
        with self._condition:
            self._stopping = True
            self._condition.notify()
        await asyncio.to_thread(self._thread.join)
        self.fail_all()

    def fail_all(self) -> None:
        """What still runs or waits fails, because the server ends."""
        self._fail(Stopped("the server is shutting down", "send the request again later"))

    async def look(self, question: Callable[[Engine], T]) -> T:
        """What a question finds in the engine between two of its rounds. Raises EngineFailure."""
        if not self.is_running:
            raise (self.failure or EngineFailure("the engine is not running")).again()
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._post(_Question(question, answer))
        return await answer

    async def updates(
        self, requests: Sequence[Request], timeout_s: float | None = None
    ) -> AsyncGenerator[list[Update]]:
        """The updates of requests to their end, as many at a time as have come; leaving earlier
        (close the iterator) cancels what still runs.

        Raises InputError when the engine refuses one of the requests, EngineFailure when it fails,
        TimedOut.
        """
        if self.failure is not None:
            raise self.failure.again()
        queue: asyncio.Queue[Event] = asyncio.Queue()
        open_samples = {request.id: request.params.n for request in requests}
        self.num_samples += sum(open_samples.values())
        for request in requests:
            self._queues[request.id] = queue
            self._post(request)
        timer = None
        if timeout_s is not None:
            late = TimedOut(f"the answer took more than {timeout_s:g} s", "ask for fewer tokens")
            timer = asyncio.get_running_loop().call_later(timeout_s, queue.put_nowait, late)
        try:
            while open_samples:
                events = [await queue.get()]
                while not queue.empty():
                    events.append(queue.get_nowait())
                for event in events:
                    if isinstance(event, EyasError):
                        raise event
                    if event.finish_reason is not None:
                        self._close_sample(open_samples, event.request_id)
                yield [event for event in events if isinstance(event, Update)]
        finally:
            if timer is not None:
                timer.cancel()
            self.num_samples -= sum(open_samples.values())
            for request_id in open_samples:
                del self._queues[request_id]
                self._post(request_id)

    def _close_sample(self, open_samples: dict[str, int], request_id: str) -> None:
        self.num_samples -= 1
        open_samples[request_id] -= 1
        if open_samples[request_id] == 0:
            del open_samples[request_id], self._queues[request_id]

    def _post(self, command: Command) -> None:
        with self._condition:
            self._inbox.append(command)
            self._condition.notify()

    # Event loop: from here on, called through call_soon_threadsafe

    def _deliver(self, events: list[tuple[str, Event]]) -> None:
        for request_id, event in events:
            queue = self._queues.get(request_id)
            if queue is not None:  # else cancelled while its update was on the way
                queue.put_nowait(event)

    def _fail(self, failure: EngineFailure) -> None:
        self.failure = self.failure or failure
        self._deliver([(request_id, self.failure.again()) for request_id in self._queues])
        with self._condition:
            inbox, self._inbox = self._inbox, []
        for command in inbox:
            if isinstance(command, _Question):
                _settle(command.answer, self.failure.again())

    # Worker thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while self._serve_round(loop):
                pass
        except (
            BaseException
            # whatever it is, and native libraries raise what is no Exception: those who wait must hear
        ) as error:
            log.exception("the engine failed")
            # its message may quote another's request
            what = f"the engine failed: {type(error).__name__}"
            loop.call_soon_threadsafe(
                self._fail, EngineFailure(what, "restart the server; its log has more")
            )

    def _serve_round(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Take in what came, take one step, hand out what that gave. False when it is time to stop."""
        with self._condition:
            self._condition.wait_for(lambda: self._inbox or self._stopping or self._engine.has_work)
            if self._stopping:
                return False
            commands, self._inbox = self._inbox, []
        try:
            refused = [event for command in commands for event in self._obey(command, loop)]
        except BaseException:
            with self._condition:  # so that those who ask are told of the failure
                self._inbox = commands + self._inbox
            raise
        self._hand_out(loop, refused)
        if self._engine.has_work:
            self._hand_out(loop, [(update.request_id, update) for update in self._engine.step()])
        return True

    def _hand_out(self, loop: asyncio.AbstractEventLoop, events: list[tuple[str, Event]]) -> None:
        if events:
            loop.call_soon_threadsafe(self._deliver, events)

    def _obey(self, command: Command, loop: asyncio.AbstractEventLoop) -> list[tuple[str, Event]]:
        if isinstance(command, str):
            self._engine.cancel(command)
        elif isinstance(command, _Question):
            loop.call_soon_threadsafe(_settle, command.answer, command.ask(self._engine))
        else:
            return self._add(command)
        return []

    def _add(self, request: Request) -> list[tuple[str, Event]]:
        try:
            self._engine.add(request)
        except InputError as error:
            return [(request.id, error)]
        except BaseException as error:  # a panic in the grammar library is no Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            self._engine.cancel(request.id)
            log.error(
                "a request could not be added", extra={"data": {"error": type(error).__name__}}
            )
            return [
                (request.id, EngineFailure(f"the request could not be run: {type(error).__name__}"))
            ]
        return []


def _settle(answer: asyncio.Future[Any], result: Any) -> None:
    if not answer.done():  # else nobody waits any more
        if isinstance(result, BaseException):
            answer.set_exception(result)
        else:
            answer.set_result(result)
