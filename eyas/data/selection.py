"""Which of the rows that passed the filters are taken, and what they are called: all that depends
on other rows.

Knows numbers and hashes of rows, and how to look one up; knows no filter and no file.

Letters: R rows that are left, in the order of the sources; a row is known by its number among them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import itertools
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from eyas.data import fit
from eyas.data.blocks import Blocks, Digests
from eyas.data.duplicates import BANDS, NONE, exact, fingerprint, key, near, said, signature
from eyas.data.mix import Draw, counts_for
from eyas.data.rows import Drop, Row

REASONS = ("", "duplicate.exact", "duplicate.near", "match", "mix", "limit")  # "": taken
TAKEN, EXACT, NEAR, MATCH, MIX, LIMIT = range(len(REASONS))
NOTES = {
    "duplicate.exact": "the same as",
    "duplicate.near": "nearly the same as",
    "match": "others resemble the traffic more",
    "mix": "its source has its share",
    "limit": "there are enough",
}
ID_DIGITS = 16  # of the fingerprint, in hex
NO_ID = 0
HASH_ID = re.compile(rf"[0-9a-f]{{{ID_DIGITS}}}")

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Hashes = NDArray[np.uint64]


def row_digests(rows: Sequence[Row]) -> Digests:
    """What the decisions need of rows: fingerprints [R, 2], signatures [R, B], and hashes of the
    ids they came with [R].
    """
    return {
        "fingerprint": _stacked([key(fingerprint(row)) for row in rows], 2),
        "bands": _stacked([signature(row) for row in rows], BANDS),
        "id": np.array(
            [NO_ID if row.id is None else id_hash(row.id) for row in rows], dtype=np.uint64
        ),
    }


def _stacked(rows: Sequence[Hashes], width: int) -> Hashes:
    return np.array(rows, dtype=np.uint64).reshape(-1, width)


def id_hash(id: str) -> int:
    """64 bits for an id, never NO_ID: its own digits, if it looks like one that was made from a
    fingerprint.
    """
    if HASH_ID.fullmatch(id):
        return int(id, 16) or 1
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest(), "big") or 1


class Rows:
    """The rows that are left in the first `count` blocks: their digests as one, and each by its
    number.
    """

    def __init__(self, blocks: Blocks, count: int) -> None:
        self.num_blocks = count
        self.blocks = blocks
        digests = [
            blocks.digests(number, "id", "place", "fingerprint", "source")
            for number in range(count)
        ]
        self._ends = np.cumsum([len(one["id"]) for one in digests])
        self._places = np.concatenate([one["place"] for one in digests])
        self.fingerprints: Hashes = np.concatenate([one["fingerprint"] for one in digests])
        self.ids: Hashes = np.concatenate([one["id"] for one in digests])
        self.sources: NDArray[np.uint16] = np.concatenate([one["source"] for one in digests])

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, block: int) -> int:
        """The number of a block's first row."""
        return int(self._ends[block - 1]) if block else 0

    def row(self, number: int) -> Row:
        """A row by its number, read from its block."""
        block = int(np.searchsorted(self._ends, number, side="right"))
        start, end = self._places[number]
        return self.blocks.row(block, int(start), int(end))

    @contextmanager
    def bands(self) -> Iterator[Hashes]:
        """The signatures [R, B], in a temporary file, since they are large."""
        with tempfile.TemporaryFile() as file:
            for number in range(self.num_blocks):
                file.write(self.blocks.digests(number, "bands")["bands"].tobytes())
            file.flush()
            yield (
                np.memmap(file, np.uint64, "r", shape=(len(self), BANDS))
                if len(self)
                else np.empty((0, BANDS), np.uint64)
            )

    def grams(self) -> Iterator[fit.Block]:
        """What the fit to the traffic needs of the rows, block by block."""
        for number in range(self.num_blocks):
            yield fit.Block(**self.blocks.digests(number, "grams", "counts", "characters"))

    def profile(self, labels: Sequence[str], keep: Bools) -> fit.Profile:
        """What the rows in `keep` [R] are like together. labels: names of the sources."""
        made = fit.profile(self.grams, keep)
        made.sources.update(
            {
                labels[place]: count
                for place, count in enumerate(np.bincount(self.sources[keep]).tolist())
            }
        )
        for number in range(self.num_blocks):
            languages = self.blocks.digests(number, "language")["language"]
            made.languages.update(languages[keep[self.first(number) :][: len(languages)]].tolist())
        return made


@dataclasses.dataclass(frozen=True)
class Selection:
    """What was decided on each row.

    reason [R]: its place in REASONS. same_as [R]: the earlier row that it is a duplicate of, or
    NONE. keeps_id [R]: whether it is called as in its source; else by its fingerprint, or by its
    name in `names` where that is taken.
    """

    num_blocks: int
    reason: NDArray[np.uint8]
    same_as: Ints
    keeps_id: Bools
    names: Mapping[int, str]

    def to_bytes(self) -> bytes:
        """As it is kept on disk."""
        stream = io.BytesIO()
        np.savez(
            stream,
            num_blocks=self.num_blocks,
            reason=self.reason,
            same_as=self.same_as,
            keeps_id=self.keeps_id,
            named=np.array(list(self.names), dtype=np.int64),
            names=np.array(list(self.names.values()), dtype=np.str_),
        )
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Selection:
        """As it was kept."""
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            names = dict(zip(arrays["named"].tolist(), arrays["names"].tolist(), strict=True))
            return cls(
                int(arrays["num_blocks"]),
                arrays["reason"],
                arrays["same_as"],
                arrays["keeps_id"],
                names,
            )

    @functools.cached_property
    def taken(self) -> Bools:
        """Which rows are taken: [R]."""
        return np.equal(self.reason, TAKEN)

    @property
    def unrepeated(self) -> Bools:
        """Which rows there are to take from: [R]."""
        return ~np.isin(self.reason, (EXACT, NEAR))

    @property
    def num_taken(self) -> int:
        return int(self.taken.sum())

    def drop(self, number: int, rows: Rows) -> Drop | None:
        """Why a row goes, or None if it is taken."""
        reason = REASONS[self.reason[number]]
        if not reason:
            return None
        if self.same_as[number] == NONE:
            return Drop(reason, note=NOTES[reason])
        earlier = rows.row(int(self.same_as[number]))
        return Drop(reason, note=f"{NOTES[reason]} {earlier.where} of {earlier.source}")

    def id(self, number: int, row: Row) -> str:
        """What a row that is taken is called."""
        if self.keeps_id[number]:
            assert row.id is not None, "a row without an id keeps none"
            return row.id
        return self.names.get(number) or fingerprint(row)[:ID_DIGITS]


@dataclasses.dataclass(frozen=True)
class Match:
    """Take `num_prompts` rows whose n-grams are distributed as in `traffic`, counts [B]."""

    traffic: Ints
    num_prompts: int


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What to take of the rows. labels: the sources' names, by the numbers that `Rows.sources` has.
    near: a Jaccard.
    """

    labels: Sequence[str]
    near: float | None = None
    match: Match | None = None
    mix: Mapping[str, float] | None = None
    limit: int | None = None
    seed: int = 0


def select(rows: Rows, wanted: Wanted) -> Selection:
    """Decide on every row. Raises ConfigError and EmptyInputError (a mix that cannot be)."""
    same_as = exact(rows.fingerprints) if len(rows) else np.empty(0, np.int64)
    reason = np.where(same_as == NONE, TAKEN, EXACT).astype(np.uint8)
    if wanted.near is not None:
        with rows.bands() as bands:
            like = near(bands, lambda number: said(rows.row(number)), reason == TAKEN, wanted.near)
        reason[like != NONE] = NEAR
        same_as = np.where(like == NONE, same_as, like)
    if wanted.match is not None or wanted.mix is not None:
        _draw(rows, wanted, reason)
    reason[np.flatnonzero(reason == TAKEN)[wanted.limit :] if wanted.limit is not None else []] = (
        LIMIT
    )
    keeps_id, names = named(rows.ids, rows.fingerprints, reason == TAKEN)
    return Selection(rows.num_blocks, reason, same_as, keeps_id, names)


def _draw(rows: Rows, wanted: Wanted, reason: NDArray[np.uint8]) -> None:
    """Draw the rows that resemble the traffic, or have the sources' shares, or both; the reasons of
    the others are put in.
    """
    alive = reason == TAKEN
    keys = rows.fingerprints[:, 0]
    limits = [wanted.match.num_prompts] if wanted.match else []
    limits += [wanted.limit] if wanted.limit is not None else []
    if wanted.mix is None:
        pick: fit.Pick = functools.partial(fit.sample, keys=keys, num=min(limits), seed=wanted.seed)
    else:
        available = np.bincount(rows.sources[alive], minlength=len(wanted.labels))
        counts = counts_for(
            wanted.mix,
            dict(zip(wanted.labels, available.tolist(), strict=True)),
            min(limits, default=None),
        )
        pick = Draw(wanted.labels, rows.sources, keys, counts, wanted.seed)
        reason[
            alive & ~np.isin(rows.sources, [wanted.labels.index(name) for name in wanted.mix])
        ] = MIX
    if wanted.match is None:
        chosen = pick(np.where(alive, 0.0, -np.inf))
    else:
        chosen = fit.select(rows.grams, alive, wanted.match.traffic, pick)
    reason[(reason == TAKEN) & ~chosen] = MIX if wanted.match is None else MATCH


def named(ids: Hashes, fingerprints: Hashes, taken: Bools) -> tuple[Bools, dict[int, str]]:
    """Unique names for the rows taken: which keep the id that they came with [R], the first row of
    each id, and names for those that cannot be called by their fingerprint's first digits.
    """
    keeps = np.zeros(len(ids), np.bool_)
    with_id = np.flatnonzero(taken & (ids != NO_ID))
    keeps[with_id[np.unique(ids[with_id], return_index=True)[1]]] = True
    others = np.flatnonzero(taken & ~keeps)
    made = fingerprints[others, 0]
    first = np.zeros(len(others), np.bool_)
    first[np.unique(made, return_index=True)[1]] = True
    clashing = others[~first | np.isin(made, ids[keeps])]
    used = set(ids[keeps].tolist()) if len(clashing) else set()
    names: dict[int, str] = {}
    for number in clashing.tolist():
        longer = "".join(f"{half:0{ID_DIGITS}x}" for half in fingerprints[number].tolist())
        names[number] = next(
            name for count in itertools.count() if id_hash(name := f"{longer}.{count}") not in used
        )
        used.add(id_hash(names[number]))
    return keeps, names
