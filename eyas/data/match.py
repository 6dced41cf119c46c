"""Prompts that resemble the traffic: importance resampling over hashed n-grams (Xie et al., arXiv
2302.03169), and a report. Of the traffic only sums over all of its prompts are kept.

Two changes, measured in docs/decisions/prompts.md: a row's weight is the mean over its n-grams, not
the sum, and further rounds correct what a selection has too much or too little of.
Letters: R rows, G n-grams of several rows end to end, B buckets, L classes of length.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from eyas.data.duplicates import GOLDEN, HashArray, scrambled
from eyas.data.ledger import LENGTHS, SourceRow
from eyas.errors import EmptyInputError
from eyas.language import tokens
from eyas.settings import Settings

VERSION = 2  # of hashes, weights, rounds and noise
NUM_BUCKETS = 10_000
STRENGTH = 2.0  # times the mean log-ratio of a row's n-grams, against noise of deviation 1.3
# At twice the strength three would do, and some traffic would swing from one extreme to the other.
ROUNDS = 5

CountArray = NDArray[np.int64]
WeightArray = NDArray[np.float64]
RowMask = NDArray[np.bool_]  # [R]
PickRows = Callable[[WeightArray], RowMask]


class MatchConfig(Settings):
    """A sample of production prompts, and how many prompts to select so that they resemble it."""

    traffic: str = Field(
        min_length=1,
        description="prompts or a server's log, as a source's path: one half is fitted, the other "
        "half measures",
    )
    num_prompts: int = Field(ge=1, description="number to select; all if there are fewer")


@dataclass(frozen=True, slots=True)
class GramBlock:
    """The buckets of the n-grams of rows, and how many n-grams and characters each row has."""

    grams: NDArray[np.uint16]  # [G]
    counts: NDArray[np.int32]  # [R]
    characters: NDArray[np.int32]  # [R]


def buckets(*texts: str) -> CountArray:
    """The buckets of the texts' words and pairs of words, in [0, B): int64 [n]."""
    found = [np.zeros(0, np.uint64)]
    for text in texts:
        words = tokens(text.casefold())
        hashes = scrambled(np.fromiter(map(_word_hash, words), np.uint64, len(words)))
        found += [hashes, scrambled(hashes[:-1] * np.uint64(3) + hashes[1:])]
    return (np.concatenate(found) % np.uint64(NUM_BUCKETS)).astype(np.int64)


def gram_digest(rows: Iterable[SourceRow]) -> GramBlock:
    """The digest of the rows' turns."""
    turns = [row.turns for row in rows]
    grams = [buckets(*texts) for texts in turns]
    return GramBlock(
        grams=np.concatenate([*grams, np.zeros(0, np.int64)]).astype(np.uint16),
        counts=np.array([len(of_row) for of_row in grams], np.int32),
        characters=np.array([sum(map(len, texts)) for texts in turns], np.int32),
    )


@functools.lru_cache(maxsize=1 << 16)
def _word_hash(word: str) -> int:
    return zlib.crc32(word.encode("utf-8", "surrogatepass")) + 1  # `scrambled` leaves 0 as it is


# Selection.


def log_ratio(traffic: NDArray[Any], pool: NDArray[Any]) -> WeightArray:
    """The log-ratio of each n-gram's smoothed shares of traffic and pool: float64 [B]."""
    return np.asarray(np.log(smoothed(traffic)) - np.log(smoothed(pool)))


def log_weights(block: GramBlock, ratio: WeightArray) -> WeightArray:
    """STRENGTH times the mean `log_ratio` of each row's n-grams, 0 without any: float64 [R]."""
    # Row by row: differences of a running sum would depend on earlier rows.
    rows = np.repeat(np.arange(len(block.counts)), block.counts)
    sums = np.bincount(rows, weights=ratio[block.grams], minlength=len(block.counts))
    return np.asarray(STRENGTH * sums / np.maximum(block.counts, 1))


def smoothed(counts: NDArray[Any]) -> WeightArray:
    """The shares of the buckets, smoothed after Laplace: float64 [B]."""
    one_each = counts.astype(np.float64) + 1
    return np.asarray(one_each / one_each.sum())


def sample(weights: WeightArray, keys: HashArray, num: int, seed: int) -> RowMask:
    """Draw `num` rows without replacement in proportion to their weights: bool [R]. A log-weight of
    -inf is never drawn.

    The `num` largest of log-weight plus Gumbel noise (Kool et al. 2019, arXiv 1903.06059), which
    follows from the seed and the row's key alone: a larger draw contains the smaller.
    """
    possible = np.flatnonzero(weights > -np.inf)
    scores = weights[possible] + gumbel(keys[possible], seed)
    chosen = np.zeros(len(weights), np.bool_)
    chosen[possible[np.lexsort((keys[possible], -scores))[:num]]] = True
    return chosen


def gumbel(keys: HashArray, seed: int) -> WeightArray:
    """Standard Gumbel noise of each key: float64 [R]."""
    offset = scrambled(np.array([seed % 2**64], np.uint64) + GOLDEN)
    # in (0, 1)
    uniform = ((scrambled(keys ^ offset) >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    return np.asarray(-np.log(-np.log(uniform)))


def select_like(pool: GramBlock, alive: RowMask, traffic: CountArray, pick: PickRows) -> RowMask:
    """The rows of the pool that resemble the traffic: bool [R].

    alive: [R], the rows to choose from; traffic: counts [B]; pick: draws rows by log-weights [R].
    Each round adds to the weights what the last rows picked lack; the nearest round counts.
    """
    weights = np.where(alive, 0.0, -np.inf)
    counts = gram_counts(pool, alive)
    best, nearest = alive, math.inf
    for _ in range(ROUNDS):
        # No more n-grams than the traffic has, so that smoothing weighs the same on both.
        scale = min(1.0, float(traffic.sum()) / max(float(counts.sum()), 1.0))
        weights += log_weights(pool, log_ratio(traffic, counts.astype(np.float64) * scale))
        chosen = pick(weights)
        counts = gram_counts(pool, chosen)
        distance = jensen_shannon(traffic, counts)
        if distance < nearest:
            best, nearest = chosen, distance
    return best


def gram_counts(pool: GramBlock, keep: RowMask) -> CountArray:
    """How often each bucket occurs in the rows of the pool in `keep`: int64 [B]."""
    return np.bincount(pool.grams[np.repeat(keep, pool.counts)], minlength=NUM_BUCKETS)


# Report.


@dataclass
class Profile:
    """Counts over some rows: by bucket [B], by class of length [L], by source and by language."""

    num_rows: int = 0
    grams: CountArray = field(default_factory=lambda: np.zeros(NUM_BUCKETS, np.int64))
    lengths: CountArray = field(default_factory=lambda: np.zeros(len(LENGTHS), np.int64))
    sources: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)

    def add(self, block: GramBlock, keep: RowMask | None = None) -> None:
        """Count the rows of a block, or those in `keep`."""
        keep = np.ones(len(block.counts), np.bool_) if keep is None else keep
        self.num_rows += int(keep.sum())
        self.grams += gram_counts(block, keep)
        classes = np.searchsorted(LENGTHS, block.characters[keep], side="right") - 1
        self.lengths += np.bincount(classes, minlength=len(LENGTHS))


def traffic_halves(rows: Iterable[SourceRow]) -> tuple[Profile, Profile]:
    """The traffic in two halves, one to fit and one to measure by; equal prompts in the same one.
    Raises EmptyInputError (no prompt in one).
    """
    halves = (Profile(), Profile())
    for row in rows:
        block = gram_digest([row])
        said = "\n".join(row.turns).encode("utf-8", "surrogatepass")
        key = np.array([zlib.crc32(said)], np.uint64)
        halves[int(scrambled(key)[0] & np.uint64(1))].add(block)
    if not all(half.num_rows for half in halves):
        count = sum(half.num_rows for half in halves)
        what = "the traffic holds too few prompts to fit one half and measure by the other"
        raise EmptyInputError(f"{what}: {count}", "give some hundred of them")
    return halves


def match_report(
    before: Profile, after: Profile, fitted: Profile, held_out: Profile
) -> dict[str, Any]:
    """How near the pool and the selection are to the held-out half of the traffic, as plain JSON:
    Jensen-Shannon divergences of words (`js`) and lengths (`length_js`), in nats. The floor is that
    between the halves; a selection larger than a half may come nearer.
    """
    compared = {"before": before, "after": after, "floor": fitted}
    names = {"before": before, "after": after, "traffic": held_out}
    return {
        "version": VERSION,
        "num_prompts": {
            "traffic_fitted": fitted.num_rows,
            **{name: one.num_rows for name, one in names.items()},
        },
        **{
            key: {
                name: round(jensen_shannon(getattr(held_out, counts), getattr(one, counts)), 4)
                for name, one in compared.items()
            }
            for key, counts in (("js", "grams"), ("length_js", "lengths"))
        },
        "lengths": {
            "from": list(LENGTHS),
            **{name: one.lengths.tolist() for name, one in names.items()},
        },
        "sources": _side_by_side(
            {name: one.sources for name, one in names.items() if one is not held_out}
        ),
        "languages": _side_by_side({name: one.languages for name, one in names.items()}),
    }


def _side_by_side(counters: Mapping[str, Counter[str]]) -> dict[str, dict[str, int]]:
    names = sorted(set().union(*counters.values()))
    return {name: {which: counts[name] for which, counts in counters.items()} for name in names}


def jensen_shannon(one: CountArray, other: CountArray) -> float:
    """Jensen-Shannon divergence of two counts, in nats, from 0 to log 2 (one side is empty)."""
    if not one.sum() or not other.sum():
        return 0.0 if one.sum() == other.sum() else math.log(2)
    p, q = one / one.sum(), other / other.sum()
    middle = (p + q) / 2
    halves = (
        np.log(np.divide(side, middle, out=np.ones_like(side), where=side > 0)) * side
        for side in (p, q)
    )
    return float(sum(half.sum() for half in halves) / 2)
