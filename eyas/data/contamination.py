"""Prompts that overlap evaluation sets go, with the name of the item that they overlap.

A row goes if it holds half of what makes up a turn of an item (word 4-grams), or 13 words of one in
a row; in whatever order of turns, case, white space, punctuation, Unicode form or simple markup.
Knows how to ask for the rows of a file; knows no benchmark.
docs/decisions/duplicates-and-contamination.md says what other rules did. G grams of the index, T
words of a text.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from eyas.data.rows import Damaged, Drop, Row
from eyas.data.shingles import Hashes, hashed, normalised, plain_words, runs
from eyas.data.sources import SourceConfig, read_source
from eyas.errors import CorruptError

GRAM, RUN = 4, 13  # words
SHARE = 0.5  # of a turn's 4-grams
LEAST = 4  # 4-grams, or all of a shorter turn's: a few words are no trace of a benchmark
MANY = 8  # items; what more of them have in common is the benchmark's form, not an item
# A run of digits or of one word repeated is in many texts: so many of a gram's words tell
# something, and differ.
TELLING = {GRAM: 1, RUN: 5}

Grams = dict[int, Hashes]  # by size, each once
NO_GRAMS: Hashes = np.zeros(0, np.uint64)


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """A row of an evaluation set: where it is found, a digest of all that it says, and the grams of
    each of its turns.
    """

    set: str
    where: str
    id: str | None
    digest: bytes
    turns: tuple[Grams, ...]

    def __str__(self) -> str:
        return f"{self.where} (id {self.id})" if self.id else self.where


@dataclasses.dataclass(frozen=True, slots=True)
class Postings:
    """Which turns hold which gram: grams sorted, uint64 [G]; gram g is in turns[starts[g]:starts[g
    + 1]].
    """

    grams: Hashes
    starts: NDArray[np.int64]
    turns: NDArray[np.int64]

    @classmethod
    def of(cls, grams_of_turns: Sequence[Hashes]) -> Self:
        """The postings of turns 0, 1, ... with these grams, each once."""
        sizes = [len(grams) for grams in grams_of_turns]
        every = np.concatenate([NO_GRAMS, *grams_of_turns])
        turns = np.repeat(np.arange(len(sizes)), sizes)
        order = np.argsort(every, kind="stable")
        grams, starts = np.unique(every[order], return_index=True)
        return cls(grams, np.append(starts, len(every)), turns[order])

    def found(self, grams: Hashes) -> NDArray[np.int64]:
        """The turns that hold grams of a text, once for each different gram."""
        if not len(self.grams):
            return np.zeros(0, np.int64)
        places = np.minimum(np.searchsorted(self.grams, grams), len(self.grams) - 1)
        places = np.unique(places[self.grams[places] == grams])
        return np.concatenate(
            [
                np.zeros(0, np.int64),
                *(self.turns[self.starts[one] : self.starts[one + 1]] for one in places),
            ]
        )


class Contamination:
    """Drops a row that overlaps an item of the evaluation sets: reason `contamination.<set>`, the
    item in the note.
    """

    def __init__(self, sets: Sequence[SourceConfig]) -> None:
        """Reads the sets and builds the index: some 30 bytes for each of their words.

        Raises MissingInputError, EmptyInputError, CorruptError, InputError: a set that is read in
        part protects in part.
        """
        items = _distinctive([item for source in sets for item in _items(source)])
        turns = [turn for item in items for turn in item.turns]
        self._postings = {size: Postings.of([turn[size] for turn in turns]) for size in (GRAM, RUN)}
        self._size = np.array([len(turn[GRAM]) for turn in turns], np.int64)
        self._needed = np.maximum(np.ceil(SHARE * self._size), np.minimum(self._size, LEAST))
        self._item = [item for item in items for _ in item.turns]
        self._whole = {item.digest: item for item in reversed(items)}

    def __call__(self, row: Row) -> Row | Drop:
        said = hashed(_words(row.turns))
        if item := self._whole.get(_digest(said)):
            return Drop(f"contamination.{item.set}", f"says the same as {item}")
        texts = [said, hashed(plain_words(row.system))] if row.system else [said]
        return self._shared(texts) or self._run(texts) or row

    def _shared(self, texts: Iterable[Hashes]) -> Drop | None:
        """The drop for the turn of which most is found in the texts, if that is enough."""
        turns, counts = np.unique(self._found(texts, GRAM), return_counts=True)
        enough = counts >= self._needed[turns]
        if not enough.any():
            return None
        shares = np.where(enough, counts / self._size[turns], 0)
        best = int(shares.argmax())
        item = self._item[turns[best]]
        return Drop(
            f"contamination.{item.set}", f"holds {shares[best]:.0%} of the {GRAM}-grams of {item}"
        )

    def _run(self, texts: Iterable[Hashes]) -> Drop | None:
        """The drop for the first turn that has a long run of words in common with the texts, if one
        has.
        """
        turns = self._found(texts, RUN)
        if not len(turns):
            return None
        item = self._item[turns.min()]
        return Drop(f"contamination.{item.set}", f"holds {RUN} words in a row of {item}")

    def _found(self, texts: Iterable[Hashes], size: int) -> NDArray[np.int64]:
        return self._postings[size].found(
            np.concatenate([NO_GRAMS, *(runs(text, size) for text in texts)])
        )


def _items(source: SourceConfig) -> Iterator[Item]:
    for row in read_source(source):
        if isinstance(row, Damaged):
            raise CorruptError(
                f"the evaluation set {row.source} cannot be read whole: {row.where}: "
                f"{row.drop.note or row.drop.reason}",
                "mend or remove that row: a set that is read in part would protect in part",
            )
        if row.turns:
            digest = _digest(hashed(_words(row.turns)))
            yield Item(
                row.source,
                row.where,
                row.id,
                digest,
                tuple(_grams(_words([turn])) for turn in row.turns),
            )


def _words(turns: Sequence[str]) -> list[str]:
    """The words of the turns one after the other, as if they were one, or what they have instead."""
    text = "\n".join(turns)
    return plain_words(text) or [normalised(text)]


def _digest(text: Hashes) -> bytes:
    return hashlib.blake2b(text.tobytes(), digest_size=16).digest()


def _grams(words: Sequence[str]) -> Grams:
    """The grams of a turn that could tell it from other texts; if none of the short ones could, all
    of those.
    """
    hashes = hashed(words)
    told = np.where(
        [not word.isdecimal() and (len(word) > 1 or not word.isascii()) for word in words],
        hashes,
        0,
    )
    found = {}
    for size, least in TELLING.items():
        grams = runs(hashes, size)
        if len(grams):
            windows = np.sort(np.lib.stride_tricks.sliding_window_view(told, size), axis=1)
            num_told = (
                np.diff(windows, axis=1, prepend=np.zeros((len(windows), 1), np.uint64)) != 0
            ).sum(axis=1)
            telling = grams[num_told >= least]
            grams = grams if size == GRAM and not len(telling) else telling
        found[size] = np.unique(grams)
    return found


def _distinctive(items: list[Item]) -> list[Item]:
    """The items without the grams that many share; turns made of such are left out, unless their
    item has no other.
    """
    common = {
        size: _common([[turn[size] for turn in item.turns] for item in items])
        for size in (GRAM, RUN)
    }
    kept = []
    for item in items:
        own = [
            {size: np.setdiff1d(turn[size], common[size], assume_unique=True) for size in common}
            for turn in item.turns
        ]
        sizes = [min(LEAST, len(turn[GRAM])) for turn in item.turns]
        enough = tuple(
            turn for turn, size in zip(own, sizes, strict=True) if len(turn[GRAM]) >= size > 0
        )
        kept.append(dataclasses.replace(item, turns=enough or item.turns))
    return kept


def _common(items: list[list[Hashes]]) -> Hashes:
    """The grams that more than MANY items have."""
    grams, counts = np.unique(np.concatenate([NO_GRAMS, *map(_union, items)]), return_counts=True)
    return grams[counts > MANY]


def _union(sets: list[Hashes]) -> Hashes:
    return np.unique(np.concatenate(sets))
