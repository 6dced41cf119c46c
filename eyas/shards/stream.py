"""The stream: what is read one after the other in a given order, read and decoded ahead by threads.

Knows order and threads. Does not know what a sample is, nor what becomes of it.

An order is a list of numbers that depends on nothing but its arguments, so any place in it can be
returned to: to go on after n samples is to give the rest of the list.

    world_size 3      [4 0 6 2 5 1 3]  ->  rank 0: [4 2 3]   rank 1: [0 5]   rank 2: [6 1]
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

Read = TypeVar("Read")
AHEAD_BYTES = 256 << 20  # of decoded samples


def order_of(
    num_samples: int, seed: int, epoch: int, rank: int = 0, world_size: int = 1
) -> list[int]:
    """The samples that one of `world_size` readers takes in an epoch, shuffled by seed and epoch
    alone.

    The readers of an epoch take each sample once between them, and as many each, give or take one.
    """
    assert 0 <= rank < world_size
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    shuffled = np.random.default_rng(int.from_bytes(digest[:16], "little")).permutation(num_samples)
    order: list[int] = shuffled[rank::world_size].tolist()
    return order


def ahead(
    read: Callable[[int], Read],
    numbers: Iterable[int],
    size_of: Callable[[int], int],
    num_threads: int,
) -> Iterator[Read]:
    """read(number) for these numbers, in this order, by threads; an error comes out where its
    result would have.

    At most AHEAD_BYTES of results by size_of(number) are held, those being made and the one just
    given out among them; one is held always.
    """
    waiting: deque[tuple[int, Future[Read]]] = deque()
    held = 0
    todo = iter(numbers)
    with ThreadPoolExecutor(num_threads, "features") as pool:
        try:
            following = next(todo, None)
            while waiting or following is not None:
                while following is not None and (
                    not waiting or held + size_of(following) <= AHEAD_BYTES
                ):
                    held += size_of(following)
                    waiting.append((following, pool.submit(read, following)))
                    following = next(todo, None)
                number, result = waiting.popleft()
                yield result.result()
                held -= size_of(number)
        finally:
            for _, result in waiting:
                result.cancel()
