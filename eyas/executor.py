"""One function over many jobs, in this process, in several, or on Ray, with results in order.

Jobs and results are pickled; a fixed number is in flight. A worker that dies is replaced, and its
jobs are done again, MOST_LOSSES times each.
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
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.queues import SimpleQueue
from typing import Any, Literal, Protocol, Self

from eyas.errors import ConfigError, EyasError, extra

log = logging.getLogger(__name__)
Place = Literal["local", "ray"]
VISIBLE = "CUDA_VISIBLE_DEVICES"  # read by CUDA when it is first used
IN_FLIGHT = 2  # jobs per worker: one in work, one waiting
MOST_LOSSES = 2  # workers lost by one job, which may be the cause
RAY_WORKER = {
    "num_cpus": 1,
    "scheduling_strategy": "SPREAD",
    "max_restarts": -1,
    "max_task_retries": MOST_LOSSES,
}


class WorkerTask(Protocol):
    """A small task that is sent to a process; there `ready` builds, once, what all jobs need."""

    def ready(self) -> Callable[[Any], Any]: ...


class Worker:
    """A task, built at its first job. An EyasError is returned, so that it reaches the parent."""

    def __init__(self, task: WorkerTask) -> None:
        self._task = task
        self._function: Callable[[Any], Any] | None = None

    def perform(self, job: Any) -> Any:
        try:
            self._function = self._function or self._task.ready()
            return self._function(job)
        except EyasError as error:
            return error


def _in_order(
    handles: Iterable[Any], wait: Callable[[Any], Any], most: int, faults: tuple[Any, ...]
) -> Generator[Any]:
    """Results in order, at most `most` jobs in flight. Taking a handle begins its job; where a
    worker dies `wait` raises one of faults.
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
            f"a worker process ended amid its work ({type(error).__name__}), and those that did it "
            "again ended too: they were killed, or there was no memory left",
            "run the same command again: finished blocks are kept; fewer `workers` need less "
            "memory",
        ) from error
    finally:
        for handle in running:
            if isinstance(handle, Begun):
                handle.future.cancel()


def _result(result: Any) -> Any:
    if isinstance(result, EyasError):
        raise result
    return result


@dataclass(slots=True)
class Begun:
    job: Any
    pool: ProcessPoolExecutor
    future: Future[Any]


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
        """Results in the order of the jobs. Raises the first EyasError of a job, or one for a job
        that every worker dies of.
        """
        waiting = iter(jobs)
        first = list(itertools.islice(waiting, 2))
        every = itertools.chain(first, waiting)
        if self._workers == 1 or (len(first) < 2 and self._pool is None):
            return (_result(self._here.perform(job)) for job in every)
        begun = (Begun(job, *self._submitted(job)) for job in every)
        return _in_order(begun, self._wait, self._workers * IN_FLIGHT, (BrokenProcessPool,))

    def _submitted(self, job: Any) -> tuple[ProcessPoolExecutor, Future[Any]]:
        while True:
            if self._pool is None:
                # Spawned, not forked: threads and locks of this process stay out of the workers.
                spawn = multiprocessing.get_context("spawn")
                numbers = spawn.SimpleQueue()
                for number in range(self._workers):
                    numbers.put(number)
                self._pool = ProcessPoolExecutor(
                    self._workers, spawn, initializer=_begin, initargs=(self._task, numbers)
                )
            try:
                return self._pool, self._pool.submit(_perform, job)
            except BrokenProcessPool:
                self._pool = None

    def _wait(self, begun: Begun) -> Any:
        for losses in itertools.count():
            try:
                return begun.future.result()
            except BrokenProcessPool:
                if losses == MOST_LOSSES:
                    raise
                log.warning("a worker process ended: what it had in work is done again")
                if self._pool is begun.pool:
                    self._pool = None
                begun.pool, begun.future = self._submitted(begun.job)


_worker: list[Worker] = []  # of this worker process


def visible_gpus(count: int) -> list[str]:
    """CUDA's names of the GPUs that this process sees; the first `count` where none are stated."""
    seen = os.environ.get(VISIBLE)
    return seen.split(",") if seen else list(map(str, range(count)))


def _begin(task: WorkerTask, numbers: SimpleQueue[int]) -> None:
    """Start a worker process, which ends with its parent and sees one of the parent's GPUs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    number = numbers.get()
    if os.environ.get(VISIBLE) != "":  # hidden on purpose
        gpus = visible_gpus(number + 1)
        os.environ[VISIBLE] = gpus[number % len(gpus)]
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
    """Actors of the cluster at RAY_ADDRESS, or of a local one while this is open."""

    def __init__(self, task: WorkerTask, workers: int) -> None:
        if find_spec("ray") is None:
            hint = f"{extra('ray')}, or take `executor: local`"
            raise ConfigError("executor: ray is not installed", hint)
        # Ray reads these at import: no telemetry, and no accelerator hidden from other programs.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        self._ray = importlib.import_module("ray")
        self._task, self._workers = task, workers
        self._actors: list[Any] = []
        self._started_ray = False

    def __enter__(self) -> Self:
        if not self._ray.is_initialized():
            own: dict[str, Any] = {"num_cpus": self._workers, "include_dashboard": False}
            own["logging_level"] = logging.ERROR
            own = {} if "RAY_ADDRESS" in os.environ else own
            try:
                self._ray.init(log_to_driver=False, **own)
            except Exception as error:  # Ray raises many types
                self._ray.shutdown()
                what = f"Ray does not start: {str(error).partition(chr(10))[0]}"
                hint = "`ray start --head`, then RAY_ADDRESS=HOST:6379"
                raise EyasError(what, hint) from error
            self._started_ray = True
        cpus = self._ray.cluster_resources().get("CPU", 0)
        if cpus < self._workers:
            data = {"workers": self._workers, "cpus": cpus}
            log.warning("workers wait until more hosts join the cluster", extra={"data": data})
        actor = self._ray.remote(**RAY_WORKER)(Worker)
        self._actors = [actor.remote(self._task) for _ in range(self._workers)]
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._started_ray:
            self._ray.shutdown()

    def map(self, jobs: Iterable[Any]) -> Generator[Any]:
        actors = itertools.cycle(self._actors)
        begun = (actor.perform.remote(job) for job, actor in zip(jobs, actors, strict=False))
        ended = (self._ray.exceptions.RayActorError, self._ray.exceptions.OutOfMemoryError)
        return _in_order(begun, self._ray.get, self._workers * IN_FLIGHT, ended)


Executor = LocalExecutor | RayExecutor


def open_executor(place: Place, task: WorkerTask, workers: int) -> Executor:
    """The executor of the settings. Raises ConfigError where Ray is asked for and absent."""
    return (LocalExecutor if place == "local" else RayExecutor)(task, workers)
