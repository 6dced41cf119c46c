"""Rows that repeat an earlier row: exactly after normalisation, or nearly, by MinHash and then the
exact Jaccard of word pairs. Decisions are made from digests; only rows that look alike are read.

Letters: R rows, B bands, P permutations, S shingles, T words.
"""

from __future__ import annotations

import functools
import hashlib
import html
import json
import re
import unicodedata
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.data.ledger import SourceRow
from eyas.language import tokens, words

HashArray = NDArray[np.uint64]
IndexArray = NDArray[np.int64]  # [R]: the index of an earlier row, or NONE
NONE = -1

# Words and signs a shingle. Pairs find sentences in another order; at .85 they forgive no more than
# triples at .8.
SHINGLE = 2
# Rows of Jaccard .85 share two bands or more with probability .99999, of .8 with .999, of .7 with
# .90.
BANDS, BAND_SIZE = 32, 6
PIECE = 1024  # shingles or rows at a time, which bounds the memory

CANDIDATES = 4  # remembered for each row: those that share most bands
LEAST_SHARED = 2  # bands: of rows of Jaccard .5 nine in ten share fewer
REMEMBERED = 1024  # texts whose shingles are kept while candidates are verified


# Words and their hashes.

# Sentence punctuation says little; code and formulas differ in operators and brackets.
PUNCTUATION = frozenset(".,;:!?'\"`\u2018\u2019\u201c\u201d")
TAG = re.compile(r"</?[a-z][^<>]{0,200}>")
INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")

# Between a digit and what is raised behind it
POWER = re.compile("(?<=[0-9)])(?=[\u00b2\u00b3\u00b9\u2070\u2074-\u207b])")

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def normalised(text: str) -> str:
    """One spelling for texts that differ in case, white space or compatible Unicode forms alone; a
    power, 10², becomes 10^2.
    """
    text = text if text.isascii() else POWER.sub("^", text)
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())


def signs(text: str) -> list[str]:
    """The normalised words of a text, and its signs other than sentence punctuation."""
    return [token for token in tokens(normalised(text)) if token not in PUNCTUATION]


def plain_words(text: str) -> list[str]:
    """The normalised words of a text: no punctuation, HTML tags or invisible characters."""
    return words(TAG.sub(" ", INVISIBLE.sub("", normalised(html.unescape(text)))))


def scrambled(values: HashArray) -> HashArray:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014); 0 stays 0."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def mixed(values: NDArray[Any]) -> HashArray:
    """One step of splitmix64."""
    return scrambled(values.astype(np.uint64) + GOLDEN)


def hashed(words: Sequence[str]) -> HashArray:
    """A hash for each word, uint64 [T]. CRC-32 will do: a forged word gains nothing."""
    parts = "\n".join(words).encode("utf-8", "surrogatepass").split(b"\n") if words else []
    return mixed(np.fromiter(map(zlib.crc32, parts), np.uint64, len(parts)))


def runs(hashes: HashArray, size: int) -> HashArray:
    """A hash for each run of `size` words in order: uint64 [T - size + 1], or empty."""
    num_runs = max(0, len(hashes) - size + 1)
    total = np.zeros(num_runs, np.uint64)
    for offset in range(size):
        total = total * GOLDEN + hashes[offset : offset + num_runs]
    return mixed(total)


def shingles(text: str) -> HashArray:
    """The set of a text's runs of SHINGLE words and signs: sorted uint64 [S]. Both ends are padded,
    so that the first and the last word are in as many runs as the others.
    """
    words = hashed(signs(text) or [normalised(text)])  # sentence punctuation alone is one word
    edge = np.zeros(SHINGLE - 1, np.uint64)
    return np.unique(runs(np.concatenate([edge, words, edge]), SHINGLE))


def jaccard(one: HashArray, other: HashArray) -> float:
    """Shared members of two sorted sets over all members; 0 where both are empty."""
    both = len(np.intersect1d(one, other, assume_unique=True))
    return both / max(1, len(one) + len(other) - both)


# Digests of a row.

SCALE, SHIFT = mixed(np.arange(2 * BANDS * BAND_SIZE)).reshape(2, -1)  # [P]
SCALE = SCALE | np.uint64(1)  # odd: multiplication permutes the 64-bit numbers


def text_hash(row: SourceRow) -> str:
    """SHA-256 (hex) of the normalised turns and system prompt: equal for exact duplicates."""
    return _hash_of(_said(row))


def beginning_keys(row: SourceRow) -> list[HashArray]:
    """The `text_key`s of the conversations that this one goes on from: its first turns, not all."""
    said = _said(row)
    return [text_key(_hash_of(said[:end])) for end in range(2, len(said))]


def _said(row: SourceRow) -> list[str]:
    return [normalised(row.system or ""), *map(normalised, row.turns)]


def _hash_of(said: list[str]) -> str:
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def text_key(text_hash: str) -> HashArray:
    """The first 128 bits of a text hash, uint64 [2]."""
    return np.frombuffer(bytes.fromhex(text_hash[:32]), ">u8").astype(np.uint64)


def signature(row: SourceRow) -> HashArray:
    """MinHash of the turns in bands, uint64 [B]: two rows of Jaccard J share a band with
    probability J ** BAND_SIZE. Without the system prompt, which may make a whole source alike.

    Broder 1997; bands after Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, 3.4.
    """
    members = shingles(row.text_compared)
    least = np.full(BANDS * BAND_SIZE, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(members), PIECE):
        permuted = members[start : start + PIECE, None] * SCALE + SHIFT  # [S, P]
        np.minimum(least, permuted.min(axis=0), out=least)
    bands = np.zeros(BANDS, np.uint64)
    for column in least.reshape(BANDS, BAND_SIZE).T:
        bands = mixed(bands ^ column)
    return bands


# Decisions on all rows.


def exact(keys: HashArray) -> IndexArray:
    """For each of the keys uint64 [R, 2] the first row with the same key, else NONE."""
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: equal keys stay in the order of rows
    same = np.zeros(len(order), bool)
    same[1:] = (keys[order[1:]] == keys[order[:-1]]).all(axis=1)
    places = np.full(len(order), NONE, np.int64)
    places[order[same]] = order[_firsts(same)[same]]
    return places


def beginnings(
    keys: HashArray, sources: NDArray[np.uint16], parts: HashArray, owners: IndexArray
) -> IndexArray:
    """For each of the keys uint64 [R, 2] the last row of its source that goes on from it, or NONE.

    parts: `beginning_keys` of all rows, [S, 2]; owners: the row of each, [S].
    """
    goes_on = {
        (int(sources[owner]), *part): owner
        for part, owner in zip(parts.tolist(), owners.tolist(), strict=True)
    }
    rows = zip(sources.tolist(), keys.tolist(), strict=True)
    return np.array([goes_on.get((source, *key), NONE) for source, key in rows], np.int64)


def near(
    bands: HashArray, row: Callable[[int], SourceRow], alive: NDArray[np.bool_], threshold: float
) -> IndexArray:
    """For each row an earlier, kept row that is similar, else NONE: the Jaccard of their turns and
    that of their system prompts are each at least `threshold`.

    bands: signatures uint64 [R, B]; row: reads row i; alive: bool [R], rows not dropped before. In
    each bucket a row meets the first member and the one before it, so time is linear in R but for
    sorting; memory is about 60 bytes a row and the shingles of REMEMBERED rows.
    """

    @functools.lru_cache(REMEMBERED)
    def parts(number: int) -> tuple[HashArray, HashArray]:
        one = row(number)
        return shingles(one.system or ""), shingles(one.text_compared)

    candidates = _candidates(bands, alive)
    places = np.full(len(bands), NONE, np.int64)
    for index in np.flatnonzero((candidates != NONE).any(axis=1)).tolist():
        found = [one for one in candidates[index].tolist() if one != NONE]
        # In place of a dropped candidate the row that it repeats.
        kept = [one if places[one] == NONE else int(places[one]) for one in found]
        for earlier in dict.fromkeys(kept):
            pairs = zip(parts(earlier), parts(index), strict=True)
            if all(jaccard(*pair) >= threshold for pair in pairs):
                places[index] = earlier
                break
    return places


def _candidates(bands: HashArray, alive: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Of the earlier rows that a row meets, those that share most bands: int32 [R, CANDIDATES]."""
    candidates = np.full((len(bands), CANDIDATES), NONE, np.int32)
    shared = np.full((len(bands), CANDIDATES), LEAST_SHARED - 1, np.uint8)
    rows = np.flatnonzero(alive).astype(np.int32)
    for band in range(bands.shape[1]):
        column = bands[rows, band]
        order = np.argsort(column, kind="stable")
        same = np.zeros(len(order), bool)
        same[1:] = column[order[1:]] == column[order[:-1]]
        first, later, members = _firsts(same), np.flatnonzero(same), rows[order]
        for earlier in (first[later], later - 1):
            for start in range(0, len(later), PIECE):
                piece = slice(start, start + PIECE)
                _offer(bands, candidates, shared, members[later[piece]], members[earlier[piece]])
    best = np.argsort(-shared.astype(np.int8), axis=1, kind="stable")
    return np.take_along_axis(candidates, best, axis=1)


def _offer(
    bands: HashArray,
    candidates: NDArray[np.int32],
    shared: NDArray[np.uint8],
    rows: NDArray[np.int32],
    met: NDArray[np.int32],
) -> None:
    """Replace each row's weakest candidate by the row that it met, if that shares more bands."""
    new = (candidates[rows] != met[:, None]).all(axis=1)
    rows, met = rows[new], met[new]
    count = (bands[rows] == bands[met]).sum(axis=1)
    weakest = shared[rows].argmin(axis=1)
    better = count > shared[rows, weakest]
    candidates[rows[better], weakest[better]] = met[better]
    shared[rows[better], weakest[better]] = count[better]


def _firsts(same: NDArray[np.bool_]) -> IndexArray:
    """The index of the first equal member, [R], of a sorted column in which `same` marks members
    equal to the one before.
    """
    return np.maximum.accumulate(np.where(same, 0, np.arange(len(same))))
