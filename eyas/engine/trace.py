"""When the device worked and when it waited: the idle share between jobs. Knows no job."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Trace:
    """Seconds busy in jobs and idle between them. A gap counts while there was work to do: `rest`
    ends such a stretch.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.idle_s = 0.0
        self._ended: float | None = None

    @contextmanager
    def job(self) -> Iterator[None]:
        """Around one job, on the thread that runs it."""
        started = time.perf_counter()
        if self._ended is not None:
            self.idle_s += started - self._ended
        try:
            yield
        finally:
            self._ended = time.perf_counter()
            self.busy_s += self._ended - started

    def rest(self) -> None:
        """There is nothing to do: the time until the next job is nobody's."""
        self._ended = None
