"""The thread that owns the engine, and how requests and updates pass to and from it.

    event loop                                   engine's thread
    updates(requests) ── add, cancel ─▶ inbox ─▶ engine.add, engine.cancel
    inspect(look)     ── look ────────▶          look(engine), between two rounds
           └──── one queue per call ◀─ deliver ◀─ engine.step, once per round

After an error in a step all requests fail with EngineFailure, now and later. An error before any of
a request runs fails only that request.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from eyas.engine.engine import Engine
from eyas.engine.grammar import Grammar
from eyas.engine.request import Request, Update
from eyas.errors import EyasError, InputError, MismatchError
from eyas.log import error_facts

GRAMMARS_AT_ONCE = 2  # compiled, each in a process of lower priority than the engine's threads
log = logging.getLogger("eyas.serve")

Event = Update | EyasError
T = TypeVar("T")


class EngineFailure(EyasError):
    """The engine has raised or has been stopped; the request gets no (further) answer."""

    def again(self) -> EngineFailure:
        """A copy: an exception that is raised twice keeps both tracebacks."""
        return type(self)(self.what, self.hint)


class ShuttingDown(EngineFailure):
    """The server ends; the request may be sent again later."""


class RequestTimeout(EyasError):
    """The answer took longer than it may."""


class QueueFull(EyasError):
    """Too many samples would wait: num_waiting, with this request."""

    def __init__(self, num_waiting: int) -> None:
        super().__init__("too many requests wait already", "send the request again later")
        self.num_waiting = num_waiting


# A request to add with its grammar, the id of one to cancel, or a look.
Command = tuple[Request, Grammar | None] | str | Callable[[Engine], object]


class EngineWorker:
    """Runs an engine in a thread of its own for the event loop that calls `start`."""

    def __init__(self, engine: Engine) -> None:
        self.failure: EngineFailure | None = None
        self.max_batch = engine.config.max_batch
        self.num_samples = 0  # running or waiting; only the event loop uses this and the queues
        self._engine = engine
        self._condition = threading.Condition()  # guards the two below
        self._inbox: list[Command] = []
        self._stopping = False
        self._looks: set[asyncio.Future[Any]] = set()  # results of looks that are waited for
        # by request id; the requests of one call of `updates` share a queue
        self._queues: dict[str, asyncio.Queue[Event]] = {}
        self._compiler = ThreadPoolExecutor(GRAMMARS_AT_ONCE, "grammars")
        self._thread: threading.Thread | None = None

    @property
    def num_requests(self) -> int:
        return len(self._queues)

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and self.failure is None

    @property
    def speculation(self) -> str:
        return str(self._engine.speculation)

    @property
    def draft_failure(self) -> str | None:
        """Why the head is off, if it failed."""
        return self._engine.draft_failure

    def start(self) -> None:
        """Start the thread; updates go to the running event loop."""
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its current round; waiting requests get ShuttingDown."""
        assert self._thread is not None, "stop before start"
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._compiler.shutdown(wait=False, cancel_futures=True)
        try:
            await asyncio.to_thread(self._thread.join)
        except RuntimeError:  # the interpreter ends: no thread can be started any more
            self._thread.join()
        self.fail_all()

    def fail_all(self) -> None:
        """Fail all running and waiting requests with ShuttingDown."""
        self._fail(ShuttingDown("the server is shutting down", "send the request again later"))

    async def inspect(self, look: Callable[[Engine], T]) -> T:
        """What `look` returns for the engine between two rounds. Raises EngineFailure."""
        if not self.is_running:
            raise (self.failure or EngineFailure("the engine is not running")).again()
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        self._looks.add(result)
        result.add_done_callback(self._looks.discard)

        def settle(found: T) -> None:
            if not result.done():  # else it failed, or its caller was cancelled
                result.set_result(found)

        self._post(lambda engine: loop.call_soon_threadsafe(settle, look(engine)))
        return await result

    async def swap_head(self, head: str) -> None:
        """Draft with the head in a folder from the next round on; running requests continue. Raises
        what reading it raises, MismatchError where it takes a restart, EngineFailure.
        """
        draft = await asyncio.to_thread(self._engine.read_draft, head)
        if not await self.inspect(lambda engine: engine.swap_draft(draft)):
            raise MismatchError("the served head was switched off", "restart the server")

    async def updates(
        self, requests: Sequence[Request], timeout_s: float, max_queue: int
    ) -> AsyncGenerator[list[Update]]:
        """The updates of requests in batches, as they come, until all have ended. Closing the
        iterator cancels the requests that still run.

        Raises QueueFull if more than max_queue samples would wait, InputError when the engine
        refuses a request, EngineFailure when it fails, RequestTimeout after timeout_s.
        """
        if self.failure is not None:
            raise self.failure.again()
        queue: asyncio.Queue[Event] = asyncio.Queue()
        open_samples = {request.id: request.params.n for request in requests}
        # no await between this check and the new count
        num_waiting = self.num_samples + sum(open_samples.values()) - self.max_batch
        if num_waiting > max_queue:
            raise QueueFull(num_waiting)
        self.num_samples += sum(open_samples.values())
        self._queues |= dict.fromkeys(open_samples, queue)
        late = RequestTimeout(f"the answer took more than {timeout_s:g} s", "ask for fewer tokens")
        timer = asyncio.get_running_loop().call_later(timeout_s, queue.put_nowait, late)
        try:
            # before any is added: until then the queue holds only what ends the request
            grammars = [await self._grammar_of(request, queue) for request in requests]
            for command in zip(requests, grammars, strict=True):
                self._post(command)
            while open_samples:
                events = [await queue.get()]
                while not queue.empty():
                    events.append(queue.get_nowait())
                for event in events:
                    if isinstance(event, EyasError):
                        raise event
                    if event.finish_reason is not None:
                        request_id = event.request_id
                        self.num_samples -= 1
                        open_samples[request_id] -= 1
                        if open_samples[request_id] == 0:
                            del open_samples[request_id], self._queues[request_id]
                yield [event for event in events if isinstance(event, Update)]
        finally:
            timer.cancel()
            self.num_samples -= sum(open_samples.values())
            for request_id in open_samples:
                del self._queues[request_id]
                self._post(request_id)

    async def _grammar_of(self, request: Request, queue: asyncio.Queue[Event]) -> Grammar | None:
        """Raises InputError, and what ends the request while its grammar is compiled."""
        if not request.params.has_grammar:
            return None
        loop = asyncio.get_running_loop()
        compiling = loop.run_in_executor(self._compiler, self._compiled, request)
        ended = asyncio.ensure_future(queue.get())
        try:
            await asyncio.wait((compiling, ended), return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                failure = ended.result()
                assert isinstance(failure, EyasError), "an update of a request that was not added"
                raise failure
            return compiling.result()
        finally:
            compiling.cancel()
            ended.cancel()

    def _compiled(self, request: Request) -> Grammar | None:
        try:
            return self._engine.compile_grammar(request.params)
        except EyasError:
            raise
        except Exception as error:
            raise _not_run(error) from None

    def _post(self, command: Command) -> None:
        with self._condition:
            self._inbox.append(command)
            self._condition.notify()

    # Event loop: called through call_soon_threadsafe

    def _deliver(self, events: Sequence[tuple[str, Event]]) -> None:
        for request_id, event in events:
            if queue := self._queues.get(request_id):  # else cancelled in the meantime
                queue.put_nowait(event)

    def _fail(self, failure: EngineFailure) -> None:
        self.failure = self.failure or failure
        self._deliver([(request_id, self.failure.again()) for request_id in self._queues])
        for result in self._looks:
            if not result.done():
                result.set_exception(self.failure.again())

    # Engine's thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        engine = self._engine
        try:
            while self._carry_out_commands(loop):
                if engine.has_work and (updates := engine.step()):
                    loop.call_soon_threadsafe(
                        self._deliver, [(one.request_id, one.error or one) for one in updates]
                    )
        # native libraries raise other BaseExceptions, and clients must still get an answer
        except BaseException as error:
            # without the message, which may quote a request
            log.error("the engine failed", extra={"data": error_facts(error)})
            what = f"the engine failed: {type(error).__name__}"
            loop.call_soon_threadsafe(
                self._fail, EngineFailure(what, "restart the server; its log has more")
            )

    def _carry_out_commands(self, loop: asyncio.AbstractEventLoop) -> bool:
        with self._condition:
            self._condition.wait_for(lambda: self._inbox or self._stopping or self._engine.has_work)
            if self._stopping:
                return False
            commands, self._inbox = self._inbox, []
        for command in commands:
            if isinstance(command, str):
                self._engine.cancel(command)
            elif not isinstance(command, tuple):
                command(self._engine)
            elif error := self._add(*command):
                loop.call_soon_threadsafe(self._deliver, [(command[0].id, error)])
        return True

    def _add(self, request: Request, grammar: Grammar | None) -> EyasError | None:
        try:
            self._engine.add(request, grammar)
        except InputError as error:
            return error
        except Exception as error:
            self._engine.cancel(request.id)
            return _not_run(error)
        return None


def _not_run(error: BaseException) -> EngineFailure:
    log.error("a request could not be added", extra={"data": error_facts(error)})
    return EngineFailure(f"the request could not be run: {type(error).__name__}")
