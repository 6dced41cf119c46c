"""The row filters in their order, and what they make of a block of rows. A filter is one entry of
FILTERS. It depends on no other row, so a block can be cleaned in any process; no note quotes a row.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from eyas.data.contamination import Contamination
from eyas.data.ledger import DamagedRow, Drop, RowFilter, SourceRow, dropped_line
from eyas.data.match import gram_digest
from eyas.data.quality import QUALITY_CHECKS, QUALITY_LIMITS, SURROGATE
from eyas.data.selection import BlockResult, RowBlock, block_lines, row_digests
from eyas.data.sources import SourceConfig
from eyas.errors import ConfigError, EyasError
from eyas.language import UNKNOWN, codes, language
from eyas.privacy.detector import Detector
from eyas.privacy.findings import Finding, mask
from eyas.privacy.mentions import Mentions
from eyas.privacy.passages import Passage, passages
from eyas.privacy.pii import EVERY_TYPE, PrivacyConfig
from eyas.privacy.surrogates import clean

LateDrops = tuple[tuple[SourceRow, Drop], ...]  # rows that passed the filters and are dropped later


def empty(row: SourceRow) -> SourceRow | Drop:
    """Drops a row in which the user says nothing."""
    return row if row.turns else Drop("empty", "no user turn with text")


def too_long(limit: int) -> RowFilter:
    """Drops a row of more than `limit` characters."""

    def keep(row: SourceRow) -> SourceRow | Drop:
        count = row.all_characters
        note = f"{count} characters, allowed are {limit}"
        return row if count <= limit else Drop("too_long", note)

    return keep


def quality(row: SourceRow) -> SourceRow | Drop:
    """Drops a row for the first of QUALITY_CHECKS that its turns together fail."""
    text = "\n".join(row.turns)
    for name, check in QUALITY_CHECKS.items():
        if note := check(text):
            return Drop(f"quality.{name}", note)
    if row.system and SURROGATE.search(row.system):
        return Drop("quality.encoding", "half of a surrogate pair in the system prompt")
    return row


def in_languages(keep: Sequence[str]) -> RowFilter:
    """Drops a row in a language other than `keep` (ISO 639-1); an undetermined one stays. Raises
    ConfigError for an unknown code.
    """
    known = sorted(codes())
    unknown = [code for code in keep if code not in known]
    if unknown:
        raise ConfigError(
            f"no language has the code {unknown[0]!r} here", f"one of {', '.join(known)}"
        )

    def filter(row: SourceRow) -> SourceRow | Drop:
        found = row_language(row)
        is_kept = found in keep or found == UNKNOWN
        return row if is_kept else Drop("language", f"it is in {found!r}")

    return filter


def row_language(row: SourceRow) -> str:
    """The language of a row's turns together."""
    return language("\n".join(row.turns))


class PersonalData:
    """Replaces personal data and secrets as the policy says, or drops the row: by the row, the
    config and the key alone.
    """

    def __init__(self, config: PrivacyConfig, key: bytes) -> None:
        """key: of hashes and surrogates. Raises ConfigError (a missing backend)."""
        self._config, self._key = config, key
        self._detector = Detector(config, key)

    def __call__(self, row: SourceRow) -> SourceRow | Drop:
        return self.many([row])[0]

    def many(self, rows: Sequence[SourceRow]) -> list[SourceRow | Drop]:
        """The result of each row. A remote service is asked about all in one call."""
        texts = [[row.system or "", *row.turns] for row in rows]
        parts = [passages(of_row) for of_row in texts]
        every_text, every_part = itertools.chain(*texts), itertools.chain(*parts)
        found = iter(self._detector.find_all(list(every_text), list(every_part)))
        results = []
        for row, of_row, parts_of_row in zip(rows, texts, parts, strict=True):
            names = self._detector.name_searches(itertools.chain(*parts_of_row))
            row = replace(row, names=names)
            results.append(self._result(row, of_row, [next(found) for _ in of_row]))
        return results

    def _result(
        self, row: SourceRow, texts: list[str], found: list[list[Finding]]
    ) -> SourceRow | Drop:
        # Text 0 is the system prompt.
        every = self._placed(found)
        if not every:
            return row
        values = (
            (one.type, text, one.start, one.end)
            for text, findings in zip(texts, found, strict=True)
            for one in findings
        )
        if dropping := self._config.first_that_drops(values):
            note = "the policy drops rows that hold this type"
            return Drop(f"pii.{dropping.lower()}", note, every)
        mentions = Mentions(texts, found)
        found = mentions.complete(texts, found)
        every = self._placed(found)
        system, *turns = clean(texts, found, self._config, self._key)
        if left := next((one for text in (system, *turns) for one in mentions.find(text)), None):
            note = "a value of this type is still there after it was replaced"
            return Drop(f"pii.{left.type.lower()}", note, every)
        return replace(
            row,
            system=system if row.system is not None else None,
            turns=tuple(turns),
            masked=row.masked + every,
            compared=tuple(map(mask, texts[1:], found[1:])),
        )

    @staticmethod
    def _placed(found: Sequence[Sequence[Finding]]) -> tuple[Finding, ...]:
        return tuple(
            replace(one, turn=number - 1 if number else None)
            for number, findings in enumerate(found)
            for one in findings
        )


_default_detector = functools.cache(lambda: Detector(EVERY_TYPE))


def find_all_types(texts: Sequence[str]) -> list[list[Finding]]:
    """The findings of every type in the texts of a conversation, and every mention of their values,
    without hashes, as if all of it were prose.
    """
    prose = [[Passage(0, len(text), "en")] for text in texts]
    found = _default_detector().find_all(texts, prose)
    return Mentions(texts, found).complete(texts, found)


@dataclass(frozen=True)
class CleaningTask:
    """The work on rows, as it is sent to a process. key: of eyas.privacy; personal: the policy of
    each source in `labels`; grams: whether rows are matched to traffic.
    """

    labels: tuple[str, ...]
    key: bytes = field(repr=False)
    max_characters: int
    languages: tuple[str, ...] | None
    evaluation: tuple[SourceConfig, ...]
    personal: tuple[PrivacyConfig, ...]
    grams: bool

    def ready(self) -> RowCleaner:
        """The function on blocks and on late drops."""
        return RowCleaner(self)


@dataclass(frozen=True, slots=True)
class FilterEntry:
    """A filter of rows. name: how the reasons of its drops begin; build: makes it for a task, or
    None (off); meaning: of its drops, for the card; limits: constants, for the ledger and the
    identity.
    """

    name: str
    build: Callable[[CleaningTask], RowFilter | None]
    meaning: str
    limits: Mapping[str, float] = field(default_factory=dict)


# The first that drops a row is counted, so cheap ones come first, and long rows go before the text
# is searched. A row that passes them all is searched for personal data.
FILTERS = (
    FilterEntry("empty", lambda task: empty, "the user says nothing in it"),
    FilterEntry(
        "too_long", lambda task: too_long(task.max_characters), "longer than `max_characters`"
    ),
    FilterEntry(
        "quality",
        lambda task: quality,
        "no usable text: repetition, broken encoding, or hardly a letter",
        QUALITY_LIMITS,
    ),
    FilterEntry(
        "language",
        lambda task: None if task.languages is None else in_languages(task.languages),
        "taken for a language that is not one of those to keep",
    ),
    FilterEntry(
        "contamination",
        lambda task: Contamination(task.evaluation) if task.evaluation else None,
        "found to overlap an evaluation set, which must not be trained on",
    ),
)
PRIVACY_REASONS = {
    "pii": "something was found in it of a type that the policy drops, or that was still there "
    "after it was replaced"
}


class RowCleaner:
    """The filters, built. The result of a block depends on the block alone."""

    def __init__(self, task: CleaningTask) -> None:
        self._task = task
        self._personal = {
            label: PersonalData(policy, task.key)
            for label, policy in zip(task.labels, task.personal, strict=True)
        }
        built = {entry.name: entry.build(task) for entry in FILTERS}
        self._filters = {name: one for name, one in built.items() if one is not None}

    def __call__(self, job: RowBlock | LateDrops) -> BlockResult | list[dict[str, Any]]:
        """A cleaned block and the digests of its remaining rows; or the lines of late drops."""
        if not isinstance(job, RowBlock):
            return [dropped_line(row, drop, find_all_types) for row, drop in job]
        results: list[SourceRow | Drop] = []
        languages: list[str] = []
        for row in job.rows:
            result = row.drop if isinstance(row, DamagedRow) else filtered(row, self._filters)
            results.append(result)
            # At once: `language` remembers its last texts, and the filter has just asked for this.
            languages.append(row_language(result) if isinstance(result, SourceRow) else "")
        searched = self._searched([one for one in results if isinstance(one, SourceRow)])
        results = [next(searched) if isinstance(one, SourceRow) else one for one in results]
        lines, places = block_lines(
            dropped_line(row, one, find_all_types) if isinstance(one, Drop) else one
            for row, one in zip(job.rows, results, strict=True)
        )
        remaining = [one for one in results if isinstance(one, SourceRow)]
        rows = zip(results, languages, strict=True)
        spoken = [code for one, code in rows if isinstance(one, SourceRow)]
        counts = Counter(row.source for row in job.rows)
        labels = self._task.labels
        arrays = {
            **row_digests(remaining),
            "source": np.array([labels.index(row.source) for row in remaining], np.uint16),
            "language": np.array(spoken, dtype=np.str_),
            "place": places,
            "rows_in": np.array([counts[label] for label in labels], np.int64),
        }
        if self._task.grams:
            arrays |= asdict(gram_digest(remaining))
        return BlockResult(job.number, lines, arrays)

    def _searched(self, rows: list[SourceRow]) -> Iterator[SourceRow | Drop]:
        for label, of_source in itertools.groupby(rows, key=lambda row: row.source):
            together = list(of_source)
            first, last = together[0].where, together[-1].where
            with without_quotes(f"PersonalData failed between {first} and {last} of {label}"):
                results = self._personal[label].many(together)
            yield from results


def filtered(row: SourceRow, filters: Mapping[str, RowFilter]) -> SourceRow | Drop:
    """What filters, by name, make of a row, up to the first drop."""
    result: SourceRow | Drop = row
    for name, keep in filters.items():
        if isinstance(result, Drop):
            break
        with without_quotes(f"the filter {name} failed on {row.where} of {row.source}"):
            result = keep(result)
    return result


@contextlib.contextmanager
def without_quotes(what: str) -> Iterator[None]:
    """Turn a failure, whose message may quote a row, into an EyasError with its place."""
    try:
        yield
    except EyasError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise EyasError(
            f"{what}: {type(error).__name__} at {frame.filename}:{frame.lineno}",
            "a bug of eyas or of a library: leave the row out and run again; finished work is kept",
        ) from None
