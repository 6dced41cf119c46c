"""Where work runs: one function over many jobs, in this process, in several, or on Ray, with the
results in the order of the jobs.

Jobs and results can be pickled; a fixed number is in flight, so memory does not grow with them. The
stage records what is finished, so a run that was killed on Ray can be finished by local processes,
and the other way round.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from typing import Any, Protocol, Self

from eyas.errors import ConfigError, EyasError

IN_FLIGHT = 2  # jobs per worker: one in work, one waiting
# A cluster loses machines: a worker is started anew and its jobs are done again. One that every
# worker dies of ends the run.
RAY_WORKER = {"num_cpus": 1, "max_restarts": 4, "max_task_retries": 2}


class WorkerTask(Protocol):
    """A task small enough to send to a process; `ready` builds there, once, what all jobs need."""

    def ready(self) -> Callable[[Any], Any]: ...


class Executor(Protocol):
    """Runs one task; a context manager. Results depend on the task and the jobs alone."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def map(self, jobs: Iterable[Any]) -> Generator[Any]:
        """Results in the order of the jobs. Raises the first EyasError of a job, and EyasError when
        a worker dies.
        """
        ...


class Worker:
    """A task, built at its first job. An EyasError is a result, so that it reaches the parent."""

    def __init__(self, task: WorkerTask) -> None:
        self._task = task
        self._function: Callable[[Any], Any] | None = None

    def perform(self, job: Any) -> Any:
        """The result of a job, or its EyasError."""
        try:
            self._function = self._function or self._task.ready()
            return self._function(job)
        except EyasError as error:
            return error


def _in_order(
    handles: Iterable[Any], wait: Callable[[Any], Any], most: int, faults: tuple[Any, ...]
) -> Generator[Any]:
    """The results of jobs in order, at most so many in flight. handles: taking one begins its job;
    faults: what `wait` raises where a worker ends.
    """
    running: deque[Any] = deque()
    try:
        for handle in handles:
            running.append(handle)
            if len(running) == most:
                yield _result(wait(running.popleft()))
        while running:
            yield _result(wait(running.popleft()))
    except faults as error:
        raise EyasError(
            f"a worker process ended amid its work ({type(error).__name__}): it was killed, or "
            "there was no memory left",
            "run the same command again: finished blocks are kept; fewer `workers` need less "
            "memory",
        ) from error
    finally:
        for handle in running:
            if isinstance(handle, Future):
                handle.cancel()


def _result(result: Any) -> Any:
    if isinstance(result, EyasError):
        raise result
    return result


class LocalExecutor:
    """Processes of this machine, started for the second job; with one worker, this process."""

    def __init__(self, task: WorkerTask, workers: int) -> None:
        self._task, self._workers = task, workers
        self._here = Worker(task)
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
            self._workers, spawn, initializer=_begin, initargs=(self._task,)
        )
        begun = (self._pool.submit(_perform, job) for job in every)
        most = self._workers * IN_FLIGHT
        return _in_order(begun, Future.result, most, (BrokenProcessPool,))


_worker: list[Worker] = []  # in a worker process: its own


def _begin(task: WorkerTask) -> None:
    """Start of a worker process: Ctrl-C is left to the parent, and the worker ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker.append(Worker(task))


def _perform(job: Any) -> Any:
    return _worker[0].perform(job)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "only a worker process watches its parent"
    parent.join()
    os._exit(1)


class RayExecutor:
    """Actors of the cluster at RAY_ADDRESS, or of a local one that runs while this is open; what a
    dead one had in work is done again.
    """

    def __init__(self, task: WorkerTask, workers: int) -> None:
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
            own: dict[str, Any] = {
                "num_cpus": self._workers,
                "include_dashboard": False,
                "logging_level": logging.ERROR,
            }
            self._ray.init(log_to_driver=False, **({} if "RAY_ADDRESS" in os.environ else own))
            self._started_ray = True
        actor = self._ray.remote(**RAY_WORKER)(Worker)
        self._actors = [actor.remote(self._task) for _ in range(self._workers)]
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._started_ray:
            self._ray.shutdown()

    def map(self, jobs: Iterable[Any]) -> Generator[Any]:
        """As Executor.map."""
        actors = itertools.cycle(self._actors)
        begun = (actor.perform.remote(job) for job, actor in zip(jobs, actors, strict=False))
        ended = (self._ray.exceptions.RayActorError, self._ray.exceptions.OutOfMemoryError)
        return _in_order(begun, self._ray.get, self._workers * IN_FLIGHT, ended)
