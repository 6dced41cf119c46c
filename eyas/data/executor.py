"""Where work runs: one function over many jobs, in this process, in several, or on Ray, with the
results in the order of the jobs.

Knows processes and actors, not the work: jobs and results are anything that can be pickled. A fixed
number of jobs is in flight, so memory does not grow with their number. Ray is an optional extra;
its checkpoints and data sets are not used, because the stage itself records what is finished: a run
that was killed on Ray can be finished by local processes, and the other way round.
"""

from __future__ import annotations

import importlib
import itertools
import logging
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
from importlib.util import find_spec
from typing import Any, Protocol, Self, TypeVar

from eyas.errors import ConfigError, EyasError

JobIn = TypeVar("JobIn", contravariant=True)
ResultOut = TypeVar("ResultOut", covariant=True)

IN_FLIGHT = 2  # jobs per worker: one in work, one waiting


class WorkerTask(Protocol[JobIn, ResultOut]):
    """A task small enough to send to a process; `ready` builds there, once, what all jobs need.

    without: modules that must not be loaded in the worker, even if a library would import them.
    """

    @property
    def without(self) -> Sequence[str]: ...

    def ready(self) -> Callable[[JobIn], ResultOut]: ...


class Executor(Protocol):
    """Runs one task; a context manager. Results depend on the task and the jobs alone."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def map(self, jobs: Iterable[Any]) -> Generator[Any]:
        """Results in the order of the jobs. Raises the first EyasError of a job, and EyasError when
        a worker dies.
        """
        ...


class JobRunner:
    """The state of a worker between jobs. An EyasError is a result: it reaches the parent as it
    was raised.
    """

    def __init__(self, task: WorkerTask[Any, Any]) -> None:
        self._task = task
        self._function: Callable[[Any], Any] | None = None

    def perform(self, job: Any) -> Any:
        """The result of a job, or its EyasError."""
        try:
            self._function = self._function or self._task.ready()
            return self._function(job)
        except EyasError as error:
            return error


class TaskPickle:
    """A task for a worker process. There, `without` is blocked before any other import."""

    def __init__(self, task: WorkerTask[Any, Any]) -> None:
        self._without, self._task = tuple(task.without), pickle.dumps(task)

    def runner(self) -> JobRunner:
        """The runner, in the worker's process."""
        for name in self._without:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # None makes an import fail
        return JobRunner(pickle.loads(self._task))


def _result(result: Any) -> Any:
    if isinstance(result, EyasError):
        raise result
    return result


def _worker_died(error: BaseException) -> EyasError:
    return EyasError(
        f"a worker process ended amid its work ({type(error).__name__}): it was killed, or there "
        "was no memory left",
        "run the same command again: finished blocks are kept; fewer `workers` need less memory",
    )


class LocalExecutor:
    """Processes of this machine, started for the second job; with one worker, this process."""

    def __init__(self, task: WorkerTask[Any, Any], workers: int) -> None:
        self._task, self._workers = task, workers
        self._here = JobRunner(task)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def map(self, jobs: Iterable[Any]) -> Generator[Any]:
        """As Executor.map."""
        waiting = iter(jobs)
        first = list(itertools.islice(waiting, 2))
        every = itertools.chain(first, waiting)
        if self._workers == 1 or len(first) < 2:
            return (_result(self._here.perform(job)) for job in every)
        # Spawned, not forked: threads and locks of this process stay out of the workers.
        spawn = multiprocessing.get_context("spawn")
        self._pool = self._pool or ProcessPoolExecutor(
            self._workers, spawn, initializer=_begin, initargs=(TaskPickle(self._task),)
        )
        return self._in_processes(self._pool, every)

    def _in_processes(self, pool: ProcessPoolExecutor, jobs: Iterable[Any]) -> Generator[Any]:
        running: deque[Future[Any]] = deque()
        try:
            for job in jobs:
                running.append(pool.submit(_perform, job))
                if len(running) == self._workers * IN_FLIGHT:
                    yield _result(running.popleft().result())
            while running:
                yield _result(running.popleft().result())
        except BrokenProcessPool as error:
            raise _worker_died(error) from error
        finally:
            for future in running:
                future.cancel()


_runner: list[JobRunner] = []  # in a worker process: its own


def _begin(task: TaskPickle) -> None:
    """Start of a worker process: Ctrl-C is left to the parent, and the worker ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _runner.append(task.runner())


def _perform(job: Any) -> Any:
    return _runner[0].perform(job)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker process watches its parent"
    parent.join()
    os._exit(1)


class RayExecutor:
    """Actors of the cluster at RAY_ADDRESS, or of a local one that runs while this is open."""

    def __init__(self, task: WorkerTask[Any, Any], workers: int) -> None:
        if find_spec("ray") is None:
            raise ConfigError(
                "executor: ray is not installed",
                "pip install 'eyas[ray]', or take `executor: local`",
            )
        # Ray reads these at import: report to no one, hide no accelerator from other programs.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Only here: half a second and 55 MB for a run that does not use it.
        self._ray = importlib.import_module("ray")
        self._task, self._workers = task, workers
        self._actors: list[Any] = []
        self._started_ray = False

    def __enter__(self) -> Self:
        if not self._ray.is_initialized():
            self._connect()
            self._started_ray = True
        actor = self._ray.remote(num_cpus=1)(RayActor)
        self._actors = [actor.remote(TaskPickle(self._task)) for _ in range(self._workers)]
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._started_ray:
            self._ray.shutdown()

    def map(self, jobs: Iterable[Any]) -> Generator[Any]:
        """As Executor.map."""
        running: deque[Any] = deque()
        try:
            for job, actor in zip(jobs, itertools.cycle(self._actors), strict=False):
                running.append(actor.perform.remote(job))
                if len(running) == self._workers * IN_FLIGHT:
                    yield _result(self._ray.get(running.popleft()))
            while running:
                yield _result(self._ray.get(running.popleft()))
        except (
            self._ray.exceptions.RayActorError,
            self._ray.exceptions.OutOfMemoryError,
        ) as error:
            raise _worker_died(error) from error

    def _connect(self) -> None:
        if "RAY_ADDRESS" in os.environ:
            self._ray.init(log_to_driver=False)
        else:
            self._ray.init(
                num_cpus=self._workers,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )


class RayActor:
    """A runner as Ray keeps it."""

    def __init__(self, task: TaskPickle) -> None:
        self._runner = task.runner()

    def perform(self, job: Any) -> Any:
        """As JobRunner.perform."""
        return self._runner.perform(job)
