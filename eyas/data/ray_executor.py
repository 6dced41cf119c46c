"""The same work on Ray: a fixed number of actors, here or on a cluster, each with the same worker
as a local process.

Knows Ray, an optional extra. Uses neither Ray's checkpoints nor its data sets: what is finished is
what the stage wrote, so a run that was cut here may be ended on processes and the other way round.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from collections.abc import Generator, Iterable
from importlib.util import find_spec
from typing import Any, Self

from eyas.data.executor import IN_FLIGHT, Sent, Work, accepted, worker_died
from eyas.errors import ConfigError

if find_spec("ray") is not None:
    # Ray asks for these when it is imported: it is not to report to anyone, nor to hide
    # accelerators from other programs.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray


class Actor:
    """A worker as Ray keeps it."""

    def __init__(self, sent: Sent) -> None:
        self._worker = sent.unpacked()

    def perform(self, job: Any) -> Any:
        """As Worker.perform."""
        return self._worker.perform(job)


class RayExecutor:
    """Actors of the cluster at RAY_ADDRESS, or of one that is started on this machine for as long
    as this is open.
    """

    def __init__(self, work: Work[Any, Any], workers: int) -> None:
        if find_spec("ray") is None:
            raise ConfigError(
                "executor: ray is not installed",
                "pip install 'eyas[ray]', or take `executor: local`",
            )
        self._work, self._workers = work, workers
        self._actors: list[Any] = []
        self._started_ray = False

    def __enter__(self) -> Self:
        if not ray.is_initialized():
            _connect(self._workers)
            self._started_ray = True
        actor = ray.remote(num_cpus=1)(Actor)
        self._actors = [actor.remote(Sent(self._work)) for _ in range(self._workers)]
        return self

    def __exit__(self, *error: object) -> None:
        for actor in self._actors:
            ray.kill(actor)
        if self._started_ray:
            ray.shutdown()

    def map(self, jobs: Iterable[Any]) -> Generator[Any]:
        """Results in the order of the jobs. Raises the first EyasError of a job, and EyasError when
        an actor dies.
        """
        running: deque[Any] = deque()
        try:
            for job, actor in zip(jobs, itertools.cycle(self._actors), strict=False):
                running.append(actor.perform.remote(job))
                if len(running) == self._workers * IN_FLIGHT:
                    yield accepted(ray.get(running.popleft()))
            while running:
                yield accepted(ray.get(running.popleft()))
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            raise worker_died(error) from error


def _connect(workers: int) -> None:
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False)
    else:
        ray.init(
            num_cpus=workers,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
