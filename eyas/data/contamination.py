"""Drops prompts that overlap evaluation sets, and names the item that they overlap.

A row is dropped if it holds half of the word 4-grams of a turn of an item, or 13 words of one in a
row, whatever the order of turns, case, white space, punctuation, Unicode form or simple markup.
docs/decisions/duplicates-and-contamination.md compares other rules. Knows no particular benchmark.

Letters: G grams of the index, T words of a text.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

from eyas.data.duplicates import HashArray, hashed, normalised, plain_words, runs
from eyas.data.ledger import DamagedRow, Drop, SourceRow
from eyas.data.sources import SourceConfig, read_source
from eyas.errors import CorruptError

GRAM, RUN = 4, 13  # words
SHARE = 0.5  # of a turn's 4-grams
LEAST = 4  # 4-grams, or all of a shorter turn: a few words prove no contamination
MANY = 8  # items: a gram in more of them is the form of the benchmark, not an item
# Runs of digits or of one repeated word are in many texts: so many words of a gram must be
# distinctive (no number, no single letter) and different.
DISTINCTIVE = {GRAM: 1, RUN: 5}

TurnGrams = dict[int, HashArray]  # by size, each once
NO_GRAMS: HashArray = np.zeros(0, np.uint64)


@dataclasses.dataclass(frozen=True, slots=True)
class EvaluationItem:
    """A row of an evaluation set: its place, a digest of all its turns, the grams of each turn."""

    set: str
    where: str
    id: str | None
    digest: bytes
    turns: tuple[TurnGrams, ...]

    def __str__(self) -> str:
        return f"{self.where} (id {self.id})" if self.id else self.where


@dataclasses.dataclass(frozen=True, slots=True)
class Postings:
    """Which turns hold which gram: `grams` sorted, uint64 [G]; gram g is in
    turns[starts[g]:starts[g + 1]].
    """

    grams: HashArray
    starts: NDArray[np.int64]
    turns: NDArray[np.int64]

    @classmethod
    def of(cls, grams_of_turns: Sequence[HashArray]) -> Self:
        """The postings of turns 0, 1, ... with these grams, each gram once a turn."""
        sizes = [len(grams) for grams in grams_of_turns]
        every = np.concatenate([NO_GRAMS, *grams_of_turns])
        turns = np.repeat(np.arange(len(sizes)), sizes)
        order = np.argsort(every, kind="stable")
        grams, starts = np.unique(every[order], return_index=True)
        return cls(grams, np.append(starts, len(every)), turns[order])

    def found(self, grams: HashArray) -> NDArray[np.int64]:
        """The turns that hold grams of a text, repeated for each different gram."""
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
    """Drops a row that overlaps an item of the evaluation sets: reason `contamination.<set>`, with
    the item in the note.
    """

    def __init__(self, sets: Sequence[SourceConfig]) -> None:
        """Read the sets and build the index: about 30 bytes for each of their words.

        Raises MissingInputError, EmptyInputError, CorruptError (a damaged row too: a set that is
        read in part protects in part), InputError.
        """
        items = _without_common([item for source in sets for item in _items(source)])
        turns = [turn for item in items for turn in item.turns]
        self._postings = {size: Postings.of([turn[size] for turn in turns]) for size in (GRAM, RUN)}
        self._size = np.array([len(turn[GRAM]) for turn in turns], np.int64)
        self._needed = np.maximum(np.ceil(SHARE * self._size), np.minimum(self._size, LEAST))
        self._item = [item for item in items for _ in item.turns]
        self._whole = {item.digest: item for item in reversed(items)}

    def __call__(self, row: SourceRow) -> SourceRow | Drop:
        said = hashed(_words(row.turns))
        if item := self._whole.get(_digest(said)):
            return Drop(f"contamination.{item.set}", f"says the same as {item}")
        texts = [said, hashed(plain_words(row.system))] if row.system else [said]
        return self._shared(texts) or self._run(texts) or row

    def _shared(self, texts: Iterable[HashArray]) -> Drop | None:
        """The drop for the turn with the largest share found in the texts, if large enough."""
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

    def _run(self, texts: Iterable[HashArray]) -> Drop | None:
        """The drop for the first turn that shares a run of RUN words with the texts."""
        turns = self._found(texts, RUN)
        if not len(turns):
            return None
        item = self._item[turns.min()]
        return Drop(f"contamination.{item.set}", f"holds {RUN} words in a row of {item}")

    def _found(self, texts: Iterable[HashArray], size: int) -> NDArray[np.int64]:
        return self._postings[size].found(
            np.concatenate([NO_GRAMS, *(runs(text, size) for text in texts)])
        )


def _items(source: SourceConfig) -> Iterator[EvaluationItem]:
    for row in read_source(source):
        if isinstance(row, DamagedRow):
            raise CorruptError(
                f"the evaluation set {row.source} cannot be read whole: {row.where}: "
                f"{row.drop.note or row.drop.reason}",
                "mend or remove that row: a set that is read in part would protect in part",
            )
        if row.turns:
            digest = _digest(hashed(_words(row.turns)))
            yield EvaluationItem(
                row.source,
                row.where,
                row.id,
                digest,
                tuple(_grams(_words([turn])) for turn in row.turns),
            )


def _words(turns: Sequence[str]) -> list[str]:
    """The words of all turns as one text; where it has none, the text itself."""
    text = "\n".join(turns)
    return plain_words(text) or [normalised(text)]


def _digest(text: HashArray) -> bytes:
    return hashlib.blake2b(text.tobytes(), digest_size=16).digest()


def _grams(words: Sequence[str]) -> TurnGrams:
    """The distinctive grams of a turn; all short ones, if none of them is distinctive."""
    hashes = hashed(words)
    distinct = np.where(
        [not word.isdecimal() and (len(word) > 1 or not word.isascii()) for word in words],
        hashes,
        0,
    )
    found = {}
    for size, least in DISTINCTIVE.items():
        grams = runs(hashes, size)
        if len(grams):
            windows = np.sort(np.lib.stride_tricks.sliding_window_view(distinct, size), axis=1)
            num_distinct = (
                np.diff(windows, axis=1, prepend=np.zeros((len(windows), 1), np.uint64)) != 0
            ).sum(axis=1)
            chosen = grams[num_distinct >= least]
            grams = grams if size == GRAM and not len(chosen) else chosen
        found[size] = np.unique(grams)
    return found


def _without_common(items: list[EvaluationItem]) -> list[EvaluationItem]:
    """The items without grams that many items share. Turns made of such grams are left out, unless
    their item has no other.
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


def _common(items: list[list[HashArray]]) -> HashArray:
    """The grams that more than MANY items have."""
    grams, counts = np.unique(np.concatenate([NO_GRAMS, *map(_union, items)]), return_counts=True)
    return grams[counts > MANY]


def _union(sets: list[HashArray]) -> HashArray:
    return np.unique(np.concatenate(sets))
