"""Drops prompts that overlap evaluation sets, and names the item that they overlap.

A row is dropped if it holds half of the word 4-grams of a turn of an item, or 13 words of one in a
row, or most of a turn with other numbers. Case, white space, punctuation, Unicode form, simple
markup and the order of turns make no difference (docs/decisions/prompts.md compares other rules).
Letters: G grams of the index, T words of a text.
"""

from __future__ import annotations

import functools
import hashlib
import html
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from eyas.data.duplicates import TAG, HashArray, hashed, normalised, runs
from eyas.data.ledger import DamagedRow, Drop, SourceRow
from eyas.data.sources import SourceConfig, read_source
from eyas.errors import CorruptError
from eyas.fold import fold, latin
from eyas.language import words

GRAM, RUN = 4, 13  # words
SHARE = 0.5  # of a turn's 4-grams
LEAST = 4  # 4-grams, or all of a shorter turn: fewer prove nothing
LETTERS = 12  # of a turn that is known by itself, without a gram
MANY = 8  # items: a gram in more of them is the form of the benchmark, not an item
# Different words of a gram that are no number and no single letter: runs of digits or of one word
# are in many texts.
DISTINCTIVE = {GRAM: 1, RUN: 5}

# With masked numbers more must agree: problems of one kind differ in their numbers alone.
NUMBERLESS_SHARE, NUMBERLESS_LEAST = 0.75, 8
NUMBER = "\u01c2"  # a letter that is rare in texts stands for a run of numbers
NUMBERS = re.compile(
    r"(?:(?:\d+|\b(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|"
    r"(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|"
    r"hundred|thousand|million|dozen)\b)[\W_]*)+"
)
SIGN = re.compile(r"[^\w\s]|_")
INNER_SIGN = re.compile(r"\w(?:[^\w\s]|_)+(?=\w)")
# Share of a text's words with a sign in them: each spoils five 4-grams, so that with more of them
# half of the grams may be spoiled.
INNER_SIGNS = 1 / 12
MARKS = re.compile("[\u0300-\u036f]")  # accents, apart from their letters

NO_GRAMS: HashArray = np.zeros(0, np.uint64)


@dataclass(frozen=True, slots=True)
class TurnGrams:
    """The grams of a turn in one spelling, by size, each once. A row with `share` of those of size
    GRAM, and at least `least`, holds the turn.
    """

    by_size: dict[int, HashArray]
    share: float
    least: int


@dataclass(frozen=True, slots=True)
class EvaluationItem:
    """A row of an evaluation set: digests of its turns together and of each long one, and the grams
    of each turn in each spelling.
    """

    set: str
    where: str
    id: str | None
    digests: tuple[bytes, ...]
    turns: tuple[TurnGrams, ...]

    def drop(self, note: str) -> Drop:
        """The drop of a row that overlaps it."""
        place = f"{self.where} (id {self.id})" if self.id else self.where
        return Drop(f"contamination.{self.set}", f"{note} {place}")


class Postings:
    """Which turns hold which gram: turns[starts[g]:starts[g + 1]] hold gram g of uint64 [G]."""

    def __init__(self, grams_of_turns: Sequence[HashArray]) -> None:
        sizes = [len(grams) for grams in grams_of_turns]
        every = np.concatenate([NO_GRAMS, *grams_of_turns])
        order = np.argsort(every, kind="stable")
        self._turns = np.repeat(np.arange(len(sizes)), sizes)[order]
        self._grams, starts = np.unique(every[order], return_index=True)
        self._starts = np.append(starts, len(every))

    def found(self, grams: HashArray) -> NDArray[np.int64]:
        """The turns that hold grams of a text, once for each different gram."""
        nothing = np.zeros(0, np.int64)
        if not len(self._grams):
            return nothing
        places = np.minimum(np.searchsorted(self._grams, grams), len(self._grams) - 1)
        places = np.unique(places[self._grams[places] == grams])
        spans = zip(self._starts[places], self._starts[places + 1], strict=True)
        return np.concatenate([nothing, *(self._turns[start:end] for start, end in spans)])


class Contamination:
    """Drops a row that overlaps an item of the evaluation sets: `contamination.<set>`."""

    def __init__(self, sets: Sequence[SourceConfig]) -> None:
        """Read the sets and build the index: about 30 bytes a word. Raises as `read_source`, and
        CorruptError for a damaged row: a set that is read in part protects in part.
        """
        items = _without_common([item for source in sets for item in _items(source)])
        turns = [turn for item in items for turn in item.turns]
        self._postings = {
            size: Postings([turn.by_size[size] for turn in turns]) for size in (GRAM, RUN)
        }
        self._size = np.array([len(turn.by_size[GRAM]) for turn in turns], np.int64)
        shares = np.array([turn.share for turn in turns])
        least = np.array([turn.least for turn in turns])
        self._needed = np.maximum(np.ceil(shares * self._size), np.minimum(self._size, least))
        self._item = [item for item in items for _ in item.turns]
        counts = Counter(digest for item in items for digest in item.digests)
        backwards = items[::-1]  # so that of several items the first counts
        self._whole = {item.digests[0]: item for item in backwards}
        every = ((digest, item) for item in backwards for digest in item.digests)
        self._alone = {digest: item for digest, item in every if counts[digest] <= MANY}

    def __call__(self, row: SourceRow) -> SourceRow | Drop:
        turns = [Spelling(turn) for turn in row.turns]
        texts = [[word for turn in turns for word in turn.words]]
        digests = list(_digests(turns))
        if item := self._whole.get(digests[0]):
            return item.drop("says the same as")
        if row.system:
            turns.append(Spelling(row.system))
            texts.append(turns[-1].words)
        if any(turn.has_inner_signs for turn in turns):
            texts += [turn.joined for turn in turns]
        hashes = [hashed(words) for words in texts]
        found = self._found(hashes, GRAM)
        # With other numbers too, once some words agree.
        if len(found) and any(turn.numberless != turn.words for turn in turns):
            numberless = [hashed(turn.numberless) for turn in turns]
            found = self._found([*hashes, *numberless], GRAM)
        if drop := self._shared(found):
            return drop
        if len(turns_with_run := self._found(hashes, RUN)):
            return self._item[int(turns_with_run.min())].drop(f"holds {RUN} words in a row of")
        if item := next((self._alone[one] for one in digests if one in self._alone), None):
            return item.drop("says a turn of")
        return row

    def _shared(self, found: NDArray[np.int64]) -> Drop | None:
        turns, counts = np.unique(found, return_counts=True)
        enough = counts >= self._needed[turns]
        if not enough.any():
            return None
        shares = np.where(enough, counts / self._size[turns], 0)
        best = int(shares.argmax())
        note = f"holds {shares[best]:.0%} of the {GRAM}-grams of"
        return self._item[int(turns[best])].drop(note)

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
            spelled = [Spelling(turn) for turn in row.turns]
            turns = tuple(grams for turn in spelled for grams in _turn_grams(turn))
            yield EvaluationItem(row.source, row.where, row.id, tuple(_digests(spelled)), turns)


class Spelling:
    """The words of a text, of letters and digits, told apart in several ways. A text without words
    is one word.
    """

    def __init__(self, text: str) -> None:
        plain = normalised(latin(fold(html.unescape(text)).text))
        if not plain.isascii():
            decomposed = unicodedata.normalize("NFD", plain)
            plain = unicodedata.normalize("NFC", MARKS.sub("", decomposed))
        self._plain = TAG.sub(" ", plain)
        self.words: list[str] = words(self._plain) or [plain]

    @property
    def has_inner_signs(self) -> bool:
        """Whether `joined` may find what `words` does not."""
        return len(INNER_SIGN.findall(self._plain)) > INNER_SIGNS * len(self.words)

    @functools.cached_property
    def joined(self) -> list[str]:
        """Apart at white space alone: "well-known" is "wellknown"."""
        return words(SIGN.sub("", self._plain)) or self.words

    @functools.cached_property
    def numberless(self) -> list[str]:
        """The words with NUMBER for each run of numbers."""
        return words(NUMBERS.sub(f" {NUMBER} ", self._plain)) or self.words


def _turn_grams(turn: Spelling) -> Iterator[TurnGrams]:
    yield TurnGrams(_grams(turn.words), SHARE, LEAST)
    if turn.joined != turn.words:
        yield TurnGrams(_grams(turn.joined), SHARE, LEAST)
    if turn.numberless != turn.words:
        grams = {**_grams(turn.numberless), RUN: NO_GRAMS}
        if len(grams[GRAM]) >= NUMBERLESS_LEAST:
            yield TurnGrams(grams, NUMBERLESS_SHARE, NUMBERLESS_LEAST)


def _digests(turns: Sequence[Spelling]) -> Iterator[bytes]:
    """Of the letters and digits of all turns together, and of each turn with enough of them."""
    letters = ["".join(turn.words) for turn in turns]
    known = [text for text in letters if len(text) >= LETTERS]
    for text in {"".join(letters): None, **dict.fromkeys(known)}:
        yield hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _grams(words: Sequence[str]) -> dict[int, HashArray]:
    """The distinctive grams of a turn by size; all of size GRAM, if none is distinctive."""
    hashes = hashed(words)
    is_distinctive = [
        not word.isdecimal() and word != NUMBER and (len(word) > 1 or not word.isascii())
        for word in words
    ]
    distinct = np.where(is_distinctive, hashes, 0)
    found = {}
    for size, least in DISTINCTIVE.items():
        grams = runs(hashes, size)
        if len(grams):
            windows = np.sort(np.lib.stride_tricks.sliding_window_view(distinct, size), axis=1)
            before = np.zeros((len(windows), 1), np.uint64)
            num_distinct = (np.diff(windows, axis=1, prepend=before) != 0).sum(axis=1)
            chosen = grams[num_distinct >= least]
            grams = grams if size == GRAM and not len(chosen) else chosen
        found[size] = np.unique(grams)
    return found


def _without_common(items: list[EvaluationItem]) -> list[EvaluationItem]:
    """The items without grams that many items share. A turn of such grams is left out, unless its
    item has no other.
    """
    common = {
        size: _common([[turn.by_size[size] for turn in item.turns] for item in items])
        for size in (GRAM, RUN)
    }
    kept = []
    for item in items:
        enough = []
        for turn in item.turns:
            own = {
                size: np.setdiff1d(grams, common[size], assume_unique=True)
                for size, grams in turn.by_size.items()
            }
            if len(own[GRAM]) >= min(turn.least, len(turn.by_size[GRAM])) > 0:
                enough.append(replace(turn, by_size=own))
        kept.append(replace(item, turns=tuple(enough) or item.turns))
    return kept


def _common(items: list[list[HashArray]]) -> HashArray:
    of_items = (np.unique(np.concatenate(turns)) for turns in items)
    grams, counts = np.unique(np.concatenate([NO_GRAMS, *of_items]), return_counts=True)
    return grams[counts > MANY]
