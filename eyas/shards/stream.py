"""The stream: samples one after the other in a given order, read and decoded ahead by threads.

Knows order and threads. Does not know how a sample is read (reader) nor what becomes of it.

An order is a list of numbers that depends on nothing but its arguments, so any place in it can be returned to: to go on after n
samples is to give the rest of the list.

    world_size 3      [4 0 6 2 5 1 3]  ->  rank 0: [4 2 3]   rank 1: [0 5]   rank 2: [6 1]
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Protocol

import numpy as np

from eyas.shards.sample import Sample

NUM_THREADS = 4  # on two cores as well: while one decodes, others wait for bytes
AHEAD_BYTES = 256 << 20  # of decoded samples


class Source(Protocol):
    """What is read: Features, or anything like it."""

    def __getitem__(self, number: int) -> Sample: ...


def order_of(num_samples: int, seed: int, epoch: int, rank: int = 0, world_size: int = 1) -> list[int]:
    """The samples that one of `world_size` readers takes in an epoch, shuffled by seed and epoch alone.

    The readers of an epoch take each sample once between them, and as many each, give or take one.
    """
    assert 0 <= rank < world_size
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    shuffled = np.random.default_rng(int.from_bytes(digest[:16], "little")).permutation(num_samples)
    order: list[int] = shuffled[rank::world_size].tolist()
    return order


def stream(
    source: Source, numbers: Iterable[int], size_of: Callable[[int], int] | None = None, num_threads: int = NUM_THREADS
) -> Iterator[Sample]:
    """The samples of these numbers, in this order; an error comes out where its sample would have.

    At most AHEAD_BYTES are held, by size_of(number), or, without it, four samples a thread; always one at least.
    """
    bound, weigh = (AHEAD_BYTES, size_of) if size_of else (4 * num_threads, lambda _: 1)
    waiting: deque[tuple[int, Future[Sample]]] = deque()
    held = 0
    todo = iter(numbers)
    with ThreadPoolExecutor(num_threads, "features") as pool:
        try:
            following = next(todo, None)
            while waiting or following is not None:
                while following is not None and (not waiting or held + weigh(following) <= bound):
                    held += weigh(following)
                    waiting.append((following, pool.submit(source.__getitem__, following)))
                    following = next(todo, None)
                number, sample = waiting.popleft()
                yield sample.result()
                held -= weigh(number)
        finally:
            for _, sample in waiting:
                sample.cancel()


def grouped(samples: Iterator[Sample], sizes: Iterable[int]) -> Iterator[list[Sample]]:
    """A stream cut into lists of these sizes: the batches of which it was the order."""
    return (list(islice(samples, size)) for size in sizes)
