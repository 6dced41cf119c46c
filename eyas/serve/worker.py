"""The thread that owns the engine, and how requests and updates cross to and from the event loop. Knows no HTTP.

    event loop                                     worker thread
    updates(request) ── add, cancel ─▶ inbox ─▶ engine.add, engine.cancel
           ▲                                       engine.step  (without work: waits on the condition)
           └────── one queue a request ◀─ deliver ◀── call_soon_threadsafe, once for all the updates of a round

An engine that raises is not trusted again: all requests fail with EngineFailure, now and later, and `failure` says why.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator

from eyas.engine.engine import Engine
from eyas.engine.request import Request, Update
from eyas.errors import EyasError, InputError

log = logging.getLogger("eyas.serve")

Command = Request | str  # a request to add; the id of one to cancel
Event = Update | EyasError


class EngineFailure(EyasError):
    """The engine has raised or has been stopped; the request gets no (further) answer."""

    def again(self) -> EngineFailure:
        """The same failure to raise once more: an exception that is raised twice keeps both tracebacks."""
        return EngineFailure(self.what, self.hint)


class Worker:
    """Runs an engine in a thread of its own for the event loop that calls `start`."""

    def __init__(self, engine: Engine) -> None:
        self.failure: EngineFailure | None = None
        self._engine = engine
        self._condition = threading.Condition()  # guards the two below
        self._inbox: list[Command] = []
        self._stopping = False
        self._queues: dict[str, asyncio.Queue[Event]] = {}  # touched by the event loop only
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
        self._fail(EngineFailure("the server is shutting down", "send the request again later"))

    async def updates(self, request: Request) -> AsyncGenerator[Update]:
        """The updates of one request to its end; leaving earlier (close the iterator) cancels it.

        Raises InputError when the engine refuses the request, EngineFailure when it fails.
        """
        if self.failure is not None:
            raise self.failure.again()
        queue = self._queues[request.id] = asyncio.Queue()
        self._post(request)
        is_over = False
        try:
            while not is_over:
                event = await queue.get()
                is_over = isinstance(event, EyasError) or event.finish_reason is not None
                if isinstance(event, EyasError):
                    raise event
                yield event
        finally:
            del self._queues[request.id]
            if not is_over:
                self._post(request.id)

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

    # Worker thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while self._serve_round(loop):
                pass
        except Exception as error:  # whatever it is, those who wait must hear of it
            log.exception("the engine failed")
            what = f"the engine failed: {type(error).__name__}: {error}"
            loop.call_soon_threadsafe(self._fail, EngineFailure(what, "restart the server; its log has more"))

    def _serve_round(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Take in what came, take one step, hand out what that gave. False when it is time to stop."""
        with self._condition:
            self._condition.wait_for(lambda: self._inbox or self._stopping or self._engine.has_work)
            if self._stopping:
                return False
            commands, self._inbox = self._inbox, []
        refused = [event for command in commands for event in self._obey(command)]
        self._hand_out(loop, refused)
        self._hand_out(loop, [(update.request_id, update) for update in self._engine.step()])
        return True

    def _hand_out(self, loop: asyncio.AbstractEventLoop, events: list[tuple[str, Event]]) -> None:
        if events:
            loop.call_soon_threadsafe(self._deliver, events)

    def _obey(self, command: Command) -> list[tuple[str, Event]]:
        if isinstance(command, str):
            self._engine.cancel(command)
            return []
        try:
            self._engine.add(command)
        except InputError as error:
            return [(command.id, error)]
        return []
