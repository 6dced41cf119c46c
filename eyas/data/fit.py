"""Prompts that resemble the traffic: importance resampling over hashed n-grams, and a report of
before and after.

Knows counts of hashed words and lengths; knows no file, no source and no filter. Of the traffic
nothing is kept but sums over all of its prompts.

After Xie et al., Data Selection for Language Models via Importance Resampling (arXiv 2302.03169),
with two changes that docs/decisions/fit-to-the-traffic.md measures: a row's weight is the mean over
its n-grams, not the sum, and what a selection has too much or too little of is corrected in further
rounds.

Letters: R rows, G n-grams of several rows end to end, B buckets, L classes of length.
"""

from __future__ import annotations

import bisect
import functools
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from eyas.data.rows import Row
from eyas.errors import EmptyInputError

VERSION = 1  # of what selects: hashes, weights, rounds and noise
NUM_BUCKETS = 10_000
# times the mean log-ratio of a row's n-grams, each round, against noise of deviation 1.3
STRENGTH = 2.0
# at twice the strength three would do, and some traffic would swing from one extreme to the other
ROUNDS = 5
# characters at which a class of length begins
LENGTHS = (0, 25, 50, 100, 200, 400, 800, 1600, 3200, 6400)

# One character is a word where words are not set apart: Thai to Lao, Khmer, kana, Han, Hangul.
UNSPACED = "\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s]")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Counts = Ints | Floats
Bools = NDArray[np.bool_]
Hashes = NDArray[np.uint64]
Pick = Callable[[Floats], Bools]


class MatchConfig(BaseModel):
    """What production is asked, and how many prompts to select so that they resemble it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    traffic: str = Field(
        min_length=1,
        description="a file of prompts, of which one half is fitted and the other measures",
    )
    num_prompts: int = Field(
        ge=1, description="how many to select; all there are if they are fewer"
    )


@dataclass(frozen=True, slots=True)
class Block:
    """What the fit needs of some rows: their n-grams' buckets end to end, how many each row has,
    and its characters.
    """

    grams: NDArray[np.uint16]  # [G]
    counts: NDArray[np.int32]  # [R]
    characters: NDArray[np.int32]  # [R]

    def of(self, keep: Bools) -> NDArray[np.uint16]:
        """The n-grams of the rows in `keep` [R]."""
        return self.grams[np.repeat(keep, self.counts)]


Blocks = Callable[[], Iterable[Block]]  # each call goes through the pool anew, in the same order


def buckets(text: str) -> Ints:
    """The buckets of a text's words and of its pairs of words, in [0, B): int64 [n]. The same on
    every machine.
    """
    return _buckets([text])


def digest(rows: Iterable[Row]) -> Block:
    """What the fit needs of rows. The user's turns count, the system prompt does not."""
    turns = [row.turns for row in rows]
    grams = [_buckets(texts) for texts in turns]
    return Block(
        grams=np.concatenate([*grams, np.zeros(0, np.int64)]).astype(np.uint16),
        counts=np.array([len(of_row) for of_row in grams], np.int32),
        characters=np.array([sum(map(len, texts)) for texts in turns], np.int32),
    )


def _buckets(texts: Iterable[str]) -> Ints:
    found = [np.zeros(0, np.uint64)]
    for text in texts:
        words = WORD.findall(text.casefold())
        hashes = scrambled(np.fromiter(map(_word_hash, words), np.uint64, len(words)))
        found += [hashes, scrambled(hashes[:-1] * np.uint64(3) + hashes[1:])]
    return (np.concatenate(found) % np.uint64(NUM_BUCKETS)).astype(np.int64)


@functools.lru_cache(maxsize=1 << 16)
def _word_hash(word: str) -> int:
    return zlib.crc32(word.encode("utf-8", "surrogatepass")) + 1  # 0 scrambles to 0


def scrambled(values: Hashes) -> Hashes:
    """Every bit of each depends on every bit it had: the finaliser of splitmix64 (Steele et al.
    2014).
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# Selection


class Importance:
    """How much more likely an n-gram is in the traffic than in the pool, by bucket; each bucket has
    one count for free.
    """

    def __init__(self, traffic: Counts, pool: Counts) -> None:
        self.log_ratio: Floats = np.log(smoothed(traffic)) - np.log(smoothed(pool))  # [B]

    def log_weight(self, buckets: Ints) -> float:
        """A row's log-weight from its n-grams: STRENGTH times their mean log-ratio, 0 without any."""
        return STRENGTH * float(self.log_ratio[buckets].mean()) if len(buckets) else 0.0

    def log_weights(self, block: Block) -> Floats:
        """`log_weight` of every row of a block: float64 [R]."""
        # Sums of each row by itself: differences of a running sum would depend on the rows before
        # it.
        rows = np.repeat(np.arange(len(block.counts)), block.counts)
        sums = np.bincount(rows, weights=self.log_ratio[block.grams], minlength=len(block.counts))
        weights: Floats = STRENGTH * sums / np.maximum(block.counts, 1)
        return weights


def smoothed(counts: Counts) -> Floats:
    """A distribution over the buckets in which none is impossible (Laplace): float64 [B], sum 1."""
    one_each = counts.astype(np.float64) + 1
    shares: Floats = one_each / one_each.sum()
    return shares


def sample(log_weights: Floats, keys: Hashes, num: int, seed: int) -> Bools:
    """Draw `num` rows without replacement in proportion to their weights: bool [R]. A weight of
    -inf is never drawn.

    The `num` largest of log-weight plus Gumbel noise (Kool et al. 2019, arXiv 1903.06059). A row's
    noise follows from the seed and its key alone, so that the draw depends on no order, and a
    larger one contains the smaller.
    """
    possible = np.flatnonzero(log_weights > -np.inf)
    scores = log_weights[possible] + gumbel(keys[possible], seed)
    chosen = np.zeros(len(log_weights), np.bool_)
    chosen[possible[np.lexsort((keys[possible], -scores))[:num]]] = True
    return chosen


def gumbel(keys: Hashes, seed: int) -> Floats:
    """Standard Gumbel noise of each key: float64 [R]."""
    offset = scrambled(np.array([seed % 2**64], np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    # in (0, 1)
    uniform = ((scrambled(keys ^ offset) >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
    noise: Floats = -np.log(-np.log(uniform))
    return noise


def select(pool: Blocks, alive: Bools, traffic: Ints, pick: Pick) -> Bools:
    """The rows of the pool that resemble the traffic: bool [R].

    `alive` [R] says which rows there are to choose from, `traffic` [B] is what they should
    resemble, and `pick` draws rows by their log-weights [R]. In each round the weights grow by what
    the traffic has more of than the rows picked last; the round that came nearest counts. Goes
    through the pool twice a round, and holds a few numbers a row.
    """
    log_weights = np.where(alive, 0.0, -np.inf)
    counts = gram_counts(pool, alive)
    best, nearest = alive, math.inf
    for _ in range(ROUNDS):
        importance = Importance(traffic, _like(counts, traffic))
        log_weights += np.concatenate([importance.log_weights(block) for block in pool()])
        chosen = pick(log_weights)
        counts = gram_counts(pool, chosen)
        distance = jensen_shannon(traffic, counts)
        if distance < nearest:
            best, nearest = chosen, distance
    return best


def gram_counts(pool: Blocks, keep: Bools) -> Ints:
    """How often each bucket occurs in the rows of the pool in `keep` [R]: int64 [B]."""
    total = np.zeros(NUM_BUCKETS, np.int64)
    for block, kept in _in_step(pool, keep):
        total += np.bincount(block.of(kept), minlength=NUM_BUCKETS)
    return total


def _like(counts: Ints, traffic: Ints) -> Floats:
    """The counts brought down to the traffic's total if they are more, so that smoothing weighs the
    same on both.
    """
    return counts.astype(np.float64) * min(
        1.0, float(traffic.sum()) / max(float(counts.sum()), 1.0)
    )


def _in_step(pool: Blocks, keep: Bools) -> Iterator[tuple[Block, Bools]]:
    """Each block of the pool with its part of `keep`."""
    start = 0
    for block in pool():
        yield block, keep[start : start + len(block.counts)]
        start += len(block.counts)
    assert start == len(keep), f"the pool has {start} rows, not {len(keep)}"


# Report


@dataclass
class Profile:
    """What some rows are like together: counts by bucket [B], by class of length [L], by source and
    by language.
    """

    num_rows: int = 0
    grams: Ints = field(default_factory=lambda: np.zeros(NUM_BUCKETS, np.int64))
    lengths: Ints = field(default_factory=lambda: np.zeros(len(LENGTHS), np.int64))
    sources: Counter[str] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)

    def add(self, block: Block, keep: Bools | None = None) -> None:
        """Count the rows of a block, or those in `keep` [R]."""
        keep = np.ones(len(block.counts), np.bool_) if keep is None else keep
        self.num_rows += int(keep.sum())
        self.grams += np.bincount(block.of(keep), minlength=NUM_BUCKETS)
        self.lengths += np.bincount(length_classes(block.characters[keep]), minlength=len(LENGTHS))


def length_class(characters: int) -> int:
    """The place in LENGTHS of a number of characters."""
    return bisect.bisect_right(LENGTHS, characters) - 1


def length_classes(characters: Sequence[int] | NDArray[np.integer[Any]]) -> Ints:
    """The place in LENGTHS of each number of characters: int64 [n]."""
    return (
        np.searchsorted(LENGTHS, np.asarray(characters, np.int64), side="right").astype(np.int64)
        - 1
    )


def profile(pool: Blocks, keep: Bools) -> Profile:
    """What the rows of the pool in `keep` [R] are like, without sources and languages."""
    made = Profile()
    for block, kept in _in_step(pool, keep):
        made.add(block, kept)
    return made


def traffic_halves(rows: Iterable[Row]) -> tuple[Profile, Profile]:
    """The traffic in two halves, one to fit and one to measure by. Equal prompts fall on the same
    side.

    Raises EmptyInputError (no prompt on one side).
    """
    halves = (Profile(), Profile())
    for row in rows:
        block = digest([row])
        key = np.array(
            [zlib.crc32("\n".join(row.turns).encode("utf-8", "surrogatepass"))], np.uint64
        )
        halves[int(scrambled(key)[0] & np.uint64(1))].add(block)
    if not all(half.num_rows for half in halves):
        count = sum(half.num_rows for half in halves)
        raise EmptyInputError(
            f"the traffic holds too few prompts to fit one half and measure by the other: {count}",
            "give some hundred of them",
        )
    return halves


def report(before: Profile, after: Profile, fitted: Profile, held_out: Profile) -> dict[str, Any]:
    """How near the pool and the selection are to traffic that was not looked at, as plain JSON.

    The floor is how far apart two halves of the traffic are. A larger sample of the very same
    distribution is nearer than that, since it has less noise of its own.
    """
    compared = {"before": before, "after": after, "floor": fitted}
    names = {"before": before, "after": after, "traffic": held_out}
    return {
        "version": VERSION,
        "num_prompts": {
            "traffic_fitted": fitted.num_rows,
            **{name: one.num_rows for name, one in names.items()},
        },
        "kl": {
            name: round(divergence(held_out.grams, one.grams), 4) for name, one in compared.items()
        },
        "js": {
            name: round(jensen_shannon(held_out.grams, one.grams), 4)
            for name, one in compared.items()
        },
        "length_js": {
            name: round(jensen_shannon(held_out.lengths, one.lengths), 4)
            for name, one in compared.items()
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


def divergence(true: Ints, other: Ints) -> float:
    """Kullback-Leibler divergence of `other` [B] from `true` [B], both smoothed, in nats."""
    p, q = smoothed(true), smoothed(other)
    return float((p * np.log(p / q)).sum())


def jensen_shannon(one: Ints, other: Ints) -> float:
    """Jensen-Shannon divergence of two counts, in nats: 0 for the same distribution, log 2 for
    nothing in common or none.
    """
    if not one.sum() or not other.sum():
        return 0.0 if one.sum() == other.sum() else math.log(2)
    p, q = one / one.sum(), other / other.sum()
    middle = (p + q) / 2
    halves = (
        np.log(np.divide(side, middle, out=np.ones_like(side), where=side > 0)) * side
        for side in (p, q)
    )
    return float(sum(half.sum() for half in halves) / 2)
