"""The same work on Ray: a fixed number of actors, here or on a cluster, each with the same worker as a local process.

Knows Ray, an optional extra. Uses neither Ray's checkpoints nor its data sets: what is finished is what the stage wrote, so a
run that was cut here may be ended on processes and the other way round.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from collections.abc import Generator, Iterable
from importlib.util import find_spec
from typing import Any

from eyas.data.executor import IN_FLIGHT, Job, Result, Work, Worker, accepted, worker_died
from eyas.errors import ConfigError

if find_spec("ray") is not None:
    # Ray asks for these when it is imported: it is not to report to anyone, nor to hide accelerators from other programs.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray


class RayExecutor:
    """Actors of the cluster at RAY_ADDRESS, or of one started on this machine for as long as there are jobs."""

    def __init__(self, workers: int) -> None:
        if find_spec("ray") is None:
            raise ConfigError("executor: ray is not installed", "pip install 'eyas[ray]', or take `executor: local`")
        self._workers = workers

    def map(self, work: Work[Job, Result], jobs: Iterable[Job]) -> Generator[Result]:
        """Results in the order of the jobs. Raises the first EyasError of a job, and EyasError when an actor dies."""
        started_here = not ray.is_initialized()
        if started_here:
            _connect(self._workers)
        try:
            yield from self._on_actors(work, jobs)
        finally:
            if started_here:
                ray.shutdown()

    def _on_actors(self, work: Work[Job, Result], jobs: Iterable[Job]) -> Generator[Result]:
        actor = ray.remote(num_cpus=1)(Worker)
        actors = [actor.remote(work) for _ in range(self._workers)]
        running: deque[Any] = deque()
        try:
            for job, worker in zip(jobs, itertools.cycle(actors), strict=False):
                running.append(worker.perform.remote(job))
                if len(running) == self._workers * IN_FLIGHT:
                    yield accepted(ray.get(running.popleft()))
            while running:
                yield accepted(ray.get(running.popleft()))
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            raise worker_died(error) from error
        finally:
            for one in actors:
                ray.kill(one)


def _connect(workers: int) -> None:
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False)
    else:
        ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
