"""Rows that say what an earlier row says: exactly after normalisation, or nearly so by MinHash and
then exact Jaccard.

Knows rows one at a time, to make their digests, and then digests only; of the texts themselves a
few are asked for again, to verify what the digests suggest. Knows neither benchmarks nor sources. R
rows, B bands, P permutations, S shingles.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from eyas.data.rows import Row
from eyas.data.shingles import Hashes, jaccard, mixed, normalised, shingles

Places = NDArray[np.int64]  # [R]: an earlier row's index, or NONE
NONE = -1

# words and signs: pairs outlast sentences in another order, and at .85 forgive no more than triples
# at .8
SHINGLE = 2
# rows of Jaccard .85 share two bands or more with probability .99999, of .8 with .999, of .7 with
# .90
BANDS, BAND_SIZE = 32, 6
SCALE, SHIFT = mixed(np.arange(2 * BANDS * BAND_SIZE)).reshape(2, -1)  # [P]
SCALE = SCALE | np.uint64(1)  # odd: multiplication permutes the 64-bit numbers
PIECE = 1024  # shingles or rows at a time, so that no long text and no large set needs much memory

CANDIDATES = 4  # that are remembered for each row: those which share most bands
LEAST_SHARED = 2  # bands: of rows of Jaccard .5 nine in ten share fewer
REMEMBERED = 1024  # texts whose shingles are kept while candidates are verified
SYSTEM_END = "\x1e"  # between system prompt and turns in what a row said


class DuplicatesConfig(BaseModel):
    """How much alike two rows may be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    near: float | None = Field(
        default=0.85,
        ge=0.7,
        le=1,
        description="Jaccard of word pairs from which the later row goes; None: only exact ones go",
    )


def fingerprint(row: Row) -> str:
    """SHA-256 (hex) over the normalised turns and system prompt: equal for duplicates, independent
    of all other rows.
    """
    said = [normalised(row.system or ""), *map(normalised, row.turns)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def key(fingerprint: str) -> Hashes:
    """The first 128 bits of a fingerprint, uint64 [2]: what `exact` compares."""
    return np.frombuffer(bytes.fromhex(fingerprint[:32]), ">u8").astype(np.uint64)


def said(row: Row) -> str:
    """The text of a row that `near` asks for: system prompt and turns, told apart."""
    return f"{(row.system or '').replace(SYSTEM_END, ' ')}{SYSTEM_END}{chr(10).join(row.turns)}"


def signature(row: Row) -> Hashes:
    """MinHash of the turns in bands, uint64 [B]: two rows of Jaccard J share a band with
    probability J ** BAND_SIZE.

    The system prompt is left out: where all rows of a source have the same long one, it would make
    them all alike. Broder 1997; bands after Leskovec, Rajaraman and Ullman, Mining of Massive
    Datasets, 3.4.
    """
    members = shingles("\n".join(row.turns), SHINGLE)
    least = np.full(BANDS * BAND_SIZE, np.iinfo(np.uint64).max, np.uint64)
    for start in range(0, len(members), PIECE):
        permuted = members[start : start + PIECE, None] * SCALE + SHIFT  # [S, P]
        np.minimum(least, permuted.min(axis=0), out=least)
    bands = np.zeros(BANDS, np.uint64)
    for column in least.reshape(BANDS, BAND_SIZE).T:
        bands = mixed(bands ^ column)
    return bands


def exact(fingerprints: Hashes) -> Places:
    """For each of the keys uint64 [R, 2] the first row with the same, else NONE."""
    # stable: equal keys stay in the order of rows
    order = np.lexsort((fingerprints[:, 1], fingerprints[:, 0]))
    same = np.zeros(len(order), bool)
    same[1:] = (fingerprints[order[1:]] == fingerprints[order[:-1]]).all(axis=1)
    places = np.full(len(order), NONE, np.int64)
    places[order[same]] = order[_firsts(same)[same]]
    return places


def near(
    bands: Hashes, text: Callable[[int], str], alive: NDArray[np.bool_], threshold: float = 0.85
) -> Places:
    """For each row an earlier one that is kept and is like it, else NONE.

    bands: signatures uint64 [R, B], a memmap where they are many; text: what row i said (see
    `said`); alive: bool [R], rows that are not dropped for another reason. A row goes if its turns
    and its system prompt each have a Jaccard of at least `threshold` with the kept row's. In each
    bucket a row meets its first member and the one before it, so time is linear in R (but for
    sorting) however many rows share a bucket. Memory: about 60 bytes a row besides the texts'
    shingles.
    """
    candidates = _candidates(bands, alive)
    places = np.full(len(bands), NONE, np.int64)
    parts = functools.lru_cache(REMEMBERED)(lambda index: _parts(text(index)))
    for index in np.flatnonzero((candidates != NONE).any(axis=1)).tolist():
        for earlier in _kept(candidates[index].tolist(), places):
            if all(
                jaccard(*pair) >= threshold
                for pair in zip(parts(earlier), parts(index), strict=True)
            ):
                places[index] = earlier
                break
    return places


def _parts(text: str) -> tuple[Hashes, Hashes]:
    """The shingles of what a row said: of the system prompt, and of the turns."""
    system, _, turns = text.partition(SYSTEM_END)
    return shingles(system, SHINGLE), shingles(turns, SHINGLE)


def _kept(candidates: list[int], places: Places) -> Iterator[int]:
    """The candidates, each once; one that goes itself is stood for by the row it is like."""
    stand_ins = (
        int(places[one]) if places[one] != NONE else one for one in candidates if one != NONE
    )
    return iter(dict.fromkeys(stand_ins))


def _candidates(bands: Hashes, alive: NDArray[np.bool_]) -> NDArray[np.int32]:
    """For each row the earlier rows that share most bands with it, of those it meets in its
    buckets: int32 [R, CANDIDATES].
    """
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
    bands: Hashes,
    candidates: NDArray[np.int32],
    shared: NDArray[np.uint8],
    rows: NDArray[np.int32],
    met: NDArray[np.int32],
) -> None:
    """Remember the row that each row met, in place of the weakest candidate, if it shares more
    bands.
    """
    new = (candidates[rows] != met[:, None]).all(axis=1)
    rows, met = rows[new], met[new]
    count = (bands[rows] == bands[met]).sum(axis=1)
    weakest = shared[rows].argmin(axis=1)
    better = count > shared[rows, weakest]
    candidates[rows[better], weakest[better]] = met[better]
    shared[rows[better], weakest[better]] = count[better]


def _firsts(same: NDArray[np.bool_]) -> Places:
    """Of a sorted column, where `same` says which members equal the one before: the index of the
    first equal one, [R].
    """
    return np.maximum.accumulate(np.where(same, 0, np.arange(len(same))))
