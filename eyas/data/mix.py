"""A mix of sources by exact shares. Knows counts and how to draw rows; knows no text.

Letters: R rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.data.fit import Bools, Floats, Hashes, sample
from eyas.errors import ConfigError, EmptyInputError

VERSION = 1


def counts_for(
    mix: Mapping[str, float], available: Mapping[str, int], limit: int | None = None
) -> dict[str, int]:
    """How many rows of each source the mix takes: the largest total, of `limit` at most, of which
    no source has too few.

    The shares are proportions and need not sum to 1: a third is best written 1 to 2. A total is cut
    by largest remainders, ties by name, so that no source is a whole row off its share.

    Raises ConfigError (a share that is not above zero, no share, or a name that is not a source's)
    and EmptyInputError (a share of a source without a row).
    """
    _check(mix, available)
    exact = {name: Fraction(str(share)) for name, share in mix.items()}
    shares = {name: share / sum(exact.values()) for name, share in exact.items()}
    # One more row than this and some source would need at least one more than it has.
    total = min(math.floor((available[name] + 1) / share) for name, share in shares.items())
    total = total if limit is None else min(total, limit)
    # Not by halves: by largest remainders a smaller total may need more of some source.
    while True:
        counts = _cut(total, shares)
        if all(counts[name] <= available[name] for name in counts):
            return counts
        total -= 1


def _check(mix: Mapping[str, float], available: Mapping[str, int]) -> None:
    if not mix:
        raise ConfigError(
            "the mix names no source", "give each source its share, such as {chat: 0.7, code: 0.3}"
        )
    for name, share in mix.items():
        if not (math.isfinite(share) and share > 0):
            raise ConfigError(
                f"the mix gives {name!r} a share of {share}",
                "shares are above zero; for none, leave it out",
            )
        if name not in available:
            known = ", ".join(sorted(available))
            raise ConfigError(
                f"the mix gives a share to {name!r}, which is no source", f"the sources are {known}"
            )
    empty = [name for name in sorted(mix) if not available[name]]
    if empty:
        raise EmptyInputError(
            f"the mix gives a share to {', '.join(map(repr, empty))}, of which no row is left",
            "leave it out of the mix, or see the ledger for why its rows went",
        )


def _cut(total: int, shares: Mapping[str, Fraction]) -> dict[str, int]:
    """`total` in whole numbers near its shares: Hamilton's method."""
    counts = {name: math.floor(total * share) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: (counts[name] - total * shares[name], name))
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


@dataclass(frozen=True)
class Draw:
    """Draws so many rows of each source by log-weight; what `fit.select` picks with.

    `sources` [R] are places in `names`; `keys` [R] tell rows apart; `counts` is by name, and a
    source without one gives no row.
    """

    names: Sequence[str]
    sources: NDArray[np.integer[Any]]
    keys: Hashes
    counts: Mapping[str, int]
    seed: int

    def __call__(self, log_weights: Floats) -> Bools:
        """The rows drawn: bool [R]. A weight of -inf is never drawn."""
        chosen = np.zeros(len(log_weights), np.bool_)
        for place, name in enumerate(self.names):
            rows = np.flatnonzero(self.sources == place)
            chosen[rows] = sample(
                log_weights[rows], self.keys[rows], self.counts.get(name, 0), self.seed
            )
        return chosen
