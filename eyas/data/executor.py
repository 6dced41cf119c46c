"""Where work runs: one function over many jobs, in this process or in several, its results in the
order of the jobs.

Knows processes. Knows nothing of the work: a job and its result are whatever can be pickled. A
fixed number of jobs is on its way at a time, so memory does not grow with their number, and the
jobs are made as they are needed.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol, Self, TypeVar

from eyas.errors import EyasError

JobIn = TypeVar("JobIn", contravariant=True)
ResultOut = TypeVar("ResultOut", covariant=True)

IN_FLIGHT = 2  # jobs per worker: one that it does, one that waits for it


class Work(Protocol[JobIn, ResultOut]):
    """Something to do, small enough to be sent to a process; `ready` builds there, once, what all
    jobs need.

    without: modules that a worker's process is to be spared, though a library would load them where
    they are installed.
    """

    @property
    def without(self) -> Sequence[str]: ...

    def ready(self) -> Callable[[JobIn], ResultOut]: ...


class Executor(Protocol):
    """A place for one work, open while it is used as a context. What it gives depends on the work
    and the jobs alone.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def map(self, jobs: Iterable[Any]) -> Generator[Any]:
        """Results in the order of the jobs. Raises the first EyasError of a job, and EyasError when
        a worker dies.
        """
        ...


class Worker:
    """What stays in a process between two jobs. An error meant for the user is a result: it reaches
    them as it was raised.
    """

    def __init__(self, work: Work[Any, Any]) -> None:
        self._work = work
        self._function: Callable[[Any], Any] | None = None

    def perform(self, job: Any) -> Any:
        """The result of a job, or the EyasError that it ended in."""
        try:
            self._function = self._function or self._work.ready()
            return self._function(job)
        except EyasError as error:
            return error


def worker_died(error: BaseException) -> EyasError:
    """The error for a process that ended amid its work, whichever executor it belonged to."""
    return EyasError(
        f"a worker process ended amid its work ({type(error).__name__}): it was killed, or there "
        "was no memory left",
        "run the same command again: finished blocks are kept; fewer `workers` need less memory",
    )


def accepted(result: Any) -> Any:
    """A worker's result; raises it where it is an error."""
    if isinstance(result, EyasError):
        raise result
    return result


class Sent:
    """A work on its way to a process of its own, where modules that it does without are kept out
    before any other is loaded.
    """

    def __init__(self, work: Work[Any, Any]) -> None:
        self._without, self._work = tuple(work.without), pickle.dumps(work)

    def unpacked(self) -> Worker:
        """The worker, in its process."""
        for name in self._without:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # as Python has it: an import of it fails
        return Worker(pickle.loads(self._work))


class LocalExecutor:
    """Processes of this machine, started when there is more than one job for them; with one worker,
    this process itself.
    """

    def __init__(self, work: Work[Any, Any], workers: int) -> None:
        self._work, self._workers = work, workers
        self._here = Worker(work)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def map(self, jobs: Iterable[Any]) -> Generator[Any]:
        """Results in the order of the jobs. Raises the first EyasError of a job, and EyasError when
        a worker dies.
        """
        waiting = iter(jobs)
        first = list(itertools.islice(waiting, 2))
        every = itertools.chain(first, waiting)
        if self._workers == 1 or len(first) < 2:
            return (accepted(self._here.perform(job)) for job in every)
        # Spawned, not forked: what threads and locks this process holds stays out of the workers.
        spawn = multiprocessing.get_context("spawn")
        self._pool = self._pool or ProcessPoolExecutor(
            self._workers, spawn, initializer=_begin, initargs=(Sent(self._work),)
        )
        return self._in_processes(self._pool, every)

    def _in_processes(self, pool: ProcessPoolExecutor, jobs: Iterable[Any]) -> Generator[Any]:
        running: deque[Future[Any]] = deque()
        try:
            for job in jobs:
                running.append(pool.submit(_perform, job))
                if len(running) == self._workers * IN_FLIGHT:
                    yield accepted(running.popleft().result())
            while running:
                yield accepted(running.popleft().result())
        except BrokenProcessPool as error:
            raise worker_died(error) from error
        finally:
            for future in running:
                future.cancel()


_worker: list[Worker] = []  # in a worker process, the one that it is


def _begin(sent: Sent) -> None:
    """The beginning of a worker process: it leaves Ctrl-C to its parent, and ends when its parent
    does, however that ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker.append(sent.unpacked())


def _perform(job: Any) -> Any:
    return _worker[0].perform(job)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker process watches its parent"
    parent.join()
    os._exit(1)
