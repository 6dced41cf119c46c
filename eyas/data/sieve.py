"""The filters in their order, and what they make of a block of rows, wherever that is asked for.

Knows one row at a time, and neither what other rows hold nor where blocks come from and go to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.data import fit
from eyas.data.blocks import Block, Digests, Lines, Sifted
from eyas.data.contamination import Contamination
from eyas.data.language import Language, LanguageConfig, spoken
from eyas.data.ledger import entry
from eyas.data.personal import PersonalData, find
from eyas.data.quality import Quality, QualityConfig
from eyas.data.rows import Damaged, Drop, Filter, Row
from eyas.data.selection import row_digests
from eyas.data.sources import SourceConfig
from eyas.errors import EyasError
from eyas.privacy.policy import PrivacyConfig

Gone = tuple[tuple[Row, Drop], ...]  # rows that passed the filters, and why they go all the same


class Empty:
    """Drops a row in which the user says nothing."""

    def __call__(self, row: Row) -> Row | Drop:
        return row if row.turns else Drop("empty", note="no user turn with text")


class TooLong:
    """Drops a row of more than `limit` characters. Stands before all that searches the text."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def __call__(self, row: Row) -> Row | Drop:
        count = sum(map(len, row.turns)) + len(row.system or "")
        return (
            row
            if count <= self._limit
            else Drop("too_long", note=f"{count} characters, allowed are {self._limit}")
        )


@dataclasses.dataclass(frozen=True)
class Cleaning:
    """The work on rows, as it is sent to a process. labels: the sources' names; key: see
    eyas.privacy.key; grams: whether the rows are to be fitted to a traffic.
    """

    labels: tuple[str, ...]
    key: bytes = dataclasses.field(repr=False)
    max_characters: int
    quality: QualityConfig
    language: LanguageConfig
    evaluation: tuple[SourceConfig, ...]
    personal: PrivacyConfig
    grams: bool

    @property
    def without(self) -> tuple[str, ...]:
        """Presidio loads both where they are installed, for recognisers that nobody asked for: 400
        MB a process.
        """
        return () if self.personal.ner else ("torch", "transformers")

    def ready(self) -> Sieve:
        """The function on blocks and on rows to redact, with its filters built."""
        return Sieve(self)


class Sieve:
    """The filters, built. A block's result depends on the block alone."""

    def __init__(self, work: Cleaning) -> None:
        """Raises what a broken evaluation set, backend or recogniser raises."""
        self._work = work
        self._personal = PersonalData(work.personal, work.key)
        self._filters: list[Filter] = [
            Empty(),
            TooLong(work.max_characters),
            Quality(work.quality),
            Language(work.language),
        ]
        self._filters += [Contamination(work.evaluation)] if work.evaluation else []

    def __call__(self, job: Block | Gone) -> Sifted | list[dict[str, Any]]:
        """A block sifted; or the entries of rows that passed the filters and go all the same."""
        return (
            self.sift(job)
            if isinstance(job, Block)
            else [entry(row, drop, find) for row, drop in job]
        )

    def sift(self, block: Block) -> Sifted:
        """What becomes of each row of a block, and the digests of those that are left."""
        results: list[Row | Drop] = []
        # of those that have passed so far, while what the filter found is still remembered
        languages: list[str] = []
        for row in block.rows:
            results.append(row.drop if isinstance(row, Damaged) else passed(row, self._filters))
            languages += [spoken(row) for row in results[-1:] if isinstance(row, Row)]
        rows = [one for one in results if isinstance(one, Row)]
        searched = iter(zip(without_personal_data(rows, self._personal), languages, strict=True))
        lines = Lines()
        left: list[tuple[Row, str]] = []
        for row, so_far in zip(block.rows, results, strict=True):
            result, language = next(searched) if isinstance(so_far, Row) else (so_far, "")
            if isinstance(result, Drop):
                lines.drop(entry(row, result, find))
            else:
                lines.keep(result)
                left.append((result, language))
        return Sifted(
            block.number,
            lines.text(),
            {**self._digests(left), "place": lines.places(), "rows_in": self._counts(block)},
        )

    def _digests(self, left: list[tuple[Row, str]]) -> Digests:
        """Of rows with their languages: what decisions and ledger need."""
        rows = [row for row, _ in left]
        digests = row_digests(rows)
        digests["source"] = np.array(
            [self._work.labels.index(row.source) for row in rows], dtype=np.uint16
        )
        digests["language"] = np.array([language for _, language in left], dtype=np.str_)
        if self._work.grams:
            grams = fit.digest(rows)
            digests |= {
                "grams": grams.grams,
                "counts": grams.counts,
                "characters": grams.characters,
            }
        return digests

    def _counts(self, block: Block) -> NDArray[np.int64]:
        """How many rows came in, by source."""
        counts = Counter(row.source for row in block.rows)
        return np.array([counts[label] for label in self._work.labels], dtype=np.int64)


def passed(row: Row, filters: Sequence[Filter]) -> Row | Drop:
    """What the filters make of a row; the first drop ends it. Raises EyasError where a filter
    fails.
    """
    result: Row | Drop = row
    for keep in filters:
        if isinstance(result, Drop):
            break
        with quoting_nothing(f"{type(keep).__name__} failed on {row.where} of {row.source}"):
            result = keep(result)
    return result


def without_personal_data(rows: list[Row], personal: PersonalData) -> list[Row | Drop]:
    """What the search for personal data makes of rows. Raises EyasError where it fails."""
    if not rows:
        return []
    with quoting_nothing(
        f"{type(personal).__name__} failed between {rows[0].where} and {rows[-1].where} of "
        f"{rows[-1].source}"
    ):
        return personal.many(rows)


@contextlib.contextmanager
def quoting_nothing(what: str) -> Iterator[None]:
    """Turn a failure into an EyasError that tells it by its place in the code: what it says itself
    may quote a row.
    """
    try:
        yield
    except EyasError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise EyasError(
            f"{what}: {type(error).__name__} at {frame.filename}:{frame.lineno}",
            "a bug of eyas or of a library: leave the row out, and run again: what is finished is "
            "kept",
        ) from None
