"""How many threads the native library computes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from eyas.cores import cores

MOST_THREADS = 512  # fewer than kMaxThreads of cpp/pool.h, in whose rounds a team's size is counted
_chosen: list[int] = []  # what set_num_threads asked for


def num_threads() -> int:
    """As many as were asked for (`set_num_threads`, OMP_NUM_THREADS), else the process's cores. A
    decoder keeps the number that holds when it is made.
    """
    if _chosen:
        return min(_chosen[0], MOST_THREADS)
    stated = os.environ.get("OMP_NUM_THREADS", "")
    asked = int(stated) if stated.isdigit() else 0
    return min(asked or cores(), MOST_THREADS)


def set_num_threads(count: int) -> None:
    """For all decoders that are made from now on."""
    _chosen[:] = [count]


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Decoders made within run on so many; None changes nothing."""
    before = [*_chosen]
    _chosen[:] = before if count is None else [count]
    try:
        yield
    finally:
        _chosen[:] = before
