"""The row filters in their order, and what they make of a block of rows.

Filters drop or change one row at a time: empty, too long, no usable text, another language, overlap
with an evaluation set, personal data. None depends on other rows, so a block can be cleaned in any
process. The quality limits are wide: ordinary prompts, code, tables of numbers and pasted logs
pass. No note of a drop quotes the row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from eyas.data.contamination import Contamination
from eyas.data.duplicates import hashed, plain_words, runs
from eyas.data.fit import gram_digest
from eyas.data.ledger import DamagedRow, Drop, RowFilter, SourceRow, dropped_line
from eyas.data.selection import BlockArrays, BlockResult, RowBlock, block_lines, row_digests
from eyas.data.sources import SourceConfig
from eyas.errors import ConfigError, EyasError
from eyas.language import UNKNOWN, codes, language
from eyas.privacy.detector import Detector
from eyas.privacy.findings import Finding
from eyas.privacy.mentions import Mentions
from eyas.privacy.passages import Passage, passages
from eyas.privacy.pii import EVERY_TYPE, PrivacyConfig
from eyas.privacy.surrogates import clean

LateDrops = tuple[tuple[SourceRow, Drop], ...]  # rows that passed the filters and are dropped later


class Empty:
    """Drops a row in which the user says nothing."""

    def __call__(self, row: SourceRow) -> SourceRow | Drop:
        return row if row.turns else Drop("empty", note="no user turn with text")


class TooLong:
    """Drops a row of more than `limit` characters. First of the filters that search the text."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def __call__(self, row: SourceRow) -> SourceRow | Drop:
        count = row.all_characters
        if count <= self._limit:
            return row
        return Drop("too_long", note=f"{count} characters, allowed are {self._limit}")


# Quality.

ENOUGH = 200  # characters: a share of less says little
REPEATED_RUN = 5  # words
# Prose of 1,000 characters compresses 2 times, code 3 times: only more is looked at closely.
SUSPICIOUS_COMPRESSION = 4

SURROGATE = re.compile("[\ud800-\udfff]")
# The replacement character, controls other than white space and escape, and UTF-8 read as Latin-1
# or Windows-1252: the letter that a lead byte becomes, before as many signs as it has continuation
# bytes.
LOST = "\ufffd\ufffe\uffff\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f"
SIGN = f"[\x80-\xbf{bytes(range(0x80, 0xC0)).decode('cp1252', 'ignore')}]"
DAMAGED = re.compile(rf"[\xc2-\xdf]{SIGN}|[\xe0-\xef]{SIGN}{{2}}|[\xf0-\xf4]{SIGN}{{3}}|[{LOST}]")
MAYBE_DAMAGED = re.compile(rf"[\xc2-\xf4{LOST}]")
# Lines of base64 have 64 or 76 characters; a drawn line and a strand of DNA have fewer different
# ones.
ENCODED, ENCODED_ALPHABET = re.compile(r"[A-Za-z0-9+/_=-]{60,}"), 10
SAME = re.compile(r"(.)\1{19,}", re.S)


# Limits on what is no usable text; shares are of the characters that are not white space. Of 75,805
# real prompts none is dropped: docs/decisions/duplicates-and-contamination.md.
QUALITY_LIMITS = {
    "min_characters": 2,  # that are not white space, in all user turns together
    "max_damaged": 0.02,  # share in broken encoding; lone surrogates are always dropped
    "min_words": 0.25,  # share of letters and digits
    "max_encoded": 0.5,  # share in unbroken runs such as base64 and hexadecimal have
    "max_repeated": 0.9,  # share of REPEATED_RUN-word runs that repeat an earlier one
    "max_same": 0.5,  # share in runs of 20 or more of one character
    "max_compression": 20,  # length over length compressed by zlib
}


def length(text: str) -> str | None:
    """What is wrong with the length, or None."""
    count = len("".join(text.split()))
    if count >= QUALITY_LIMITS["min_characters"]:
        return None
    return f"{count} characters, needed are {QUALITY_LIMITS['min_characters']}"


def encoding(text: str) -> str | None:
    """What is wrong with the encoding, or None."""
    if SURROGATE.search(text):
        return "half of a surrogate pair, which UTF-8 cannot hold"
    share = _share(DAMAGED, text) if MAYBE_DAMAGED.search(text) else 0
    return (
        f"{share:.0%} of its characters are damaged"
        if share > QUALITY_LIMITS["max_damaged"]
        else None
    )


def non_text(text: str) -> str | None:
    """Why it is no text, or None."""
    if len(text) < ENOUGH:
        return None
    if (share := sum(map(str.isalnum, text)) / _solid(text)) < QUALITY_LIMITS["min_words"]:
        return f"{share:.0%} of its characters are letters or digits"
    unbroken = (
        match[0] for match in ENCODED.finditer(text) if len(set(match[0])) >= ENCODED_ALPHABET
    )
    if (share := sum(map(len, unbroken)) / _solid(text)) > QUALITY_LIMITS["max_encoded"]:
        return f"{share:.0%} of its characters are in unbroken runs such as base64 has"
    return None


def repetition(text: str) -> str | None:
    """What it repeats too much, or None."""
    raw = text.encode("utf-8", "surrogatepass")
    ratio = len(raw) / len(zlib.compress(raw, 1))
    if len(text) < ENOUGH or ratio < min(SUSPICIOUS_COMPRESSION, QUALITY_LIMITS["max_compression"]):
        return None
    if ratio > QUALITY_LIMITS["max_compression"]:
        return f"it compresses to 1/{ratio:.0f}"
    if (share := _share(SAME, text)) > QUALITY_LIMITS["max_same"]:
        return f"{share:.0%} of its characters are in runs of one character"
    found = runs(hashed(plain_words(text)), REPEATED_RUN)
    share = 1 - len(np.unique(found)) / max(1, len(found))
    if share <= QUALITY_LIMITS["max_repeated"]:
        return None
    return f"{share:.0%} of its {REPEATED_RUN}-word runs were there before"


QUALITY_CHECKS: dict[str, Callable[[str], str | None]] = {
    "length": length,
    "encoding": encoding,
    "non_text": non_text,
    "repetition": repetition,
}


class Quality:
    """Drops a row for the first check that its turns, taken as one text, fail: reason
    `quality.<check>`.
    """

    def __call__(self, row: SourceRow) -> SourceRow | Drop:
        text = "\n".join(row.turns)
        for name, check in QUALITY_CHECKS.items():
            if note := check(text):
                return Drop(f"quality.{name}", note)
        if row.system and SURROGATE.search(row.system):
            return Drop("quality.encoding", "half of a surrogate pair in the system prompt")
        return row


def _solid(text: str) -> int:
    """The number of characters that are not white space, at least 1."""
    return max(1, len("".join(text.split())))


def _share(pattern: re.Pattern[str], text: str) -> float:
    """The share of a text's characters, white space aside, that a pattern matches."""
    return sum(_solid(match[0]) for match in pattern.finditer(text)) / _solid(text)


# Language.


class Language:
    """Drops a row in a language that is not kept; one in an undetermined language stays."""

    def __init__(self, keep: Sequence[str] | None) -> None:
        """keep: codes of ISO 639-1; None keeps all. Raises ConfigError for an unknown one."""
        known = sorted(codes())
        unknown = [code for code in keep or () if code not in known]
        if unknown:
            raise ConfigError(
                f"no language has the code {unknown[0]!r} here", f"one of {', '.join(known)}"
            )
        self._keep = keep and frozenset(keep)

    def __call__(self, row: SourceRow) -> SourceRow | Drop:
        if self._keep is None or (found := row_language(row)) in self._keep or found == UNKNOWN:
            return row
        return Drop("language", f"it is in {found!r}")


def row_language(row: SourceRow) -> str:
    """The language of a row's turns taken together: see `eyas.language.language`."""
    return language("\n".join(row.turns))


# Personal data. What is found and how it is replaced is eyas.privacy's.


class PersonalData:
    """Replaces personal data and secrets as the policy says, or drops the row.

    The result of a row depends on the row, the config and the key alone.
    """

    def __init__(self, config: PrivacyConfig, key: bytes) -> None:
        """key: of hashes and surrogates. Raises ConfigError (a missing backend or recogniser)."""
        self._config, self._key = config, key
        self._detector = Detector(config, key)

    def __call__(self, row: SourceRow) -> SourceRow | Drop:
        return self.many([row])[0]

    def many(self, rows: Sequence[SourceRow]) -> list[SourceRow | Drop]:
        """The result of each row. A remote service is asked about all of them in one call."""
        texts = [[row.system or "", *row.turns] for row in rows]
        parts = [passages(of_row) for of_row in texts]
        every_text, every_part = itertools.chain(*texts), itertools.chain(*parts)
        found = iter(self._detector.find_all(list(every_text), list(every_part)))
        results = []
        for row, of_row, parts_of_row in zip(rows, texts, parts, strict=True):
            names = self._detector.name_searches(itertools.chain(*parts_of_row))
            row = dataclasses.replace(row, names=names)
            results.append(self._result(row, of_row, [next(found) for _ in of_row]))
        return results

    def _result(
        self, row: SourceRow, texts: list[str], found: list[list[Finding]]
    ) -> SourceRow | Drop:
        # Text 0 is the system prompt.
        every = self._placed(found)
        if not every:
            return row
        if dropping := self._config.first_that_drops(one.type for one in every):
            return Drop(
                f"pii.{dropping.lower()}",
                note="the policy drops rows that hold this type",
                found=every,
            )
        mentions = Mentions(texts, found)
        found = mentions.complete(texts, found)
        every = self._placed(found)
        system, *turns = clean(texts, found, self._config, self._key)
        for text in (system, *turns):
            for left in mentions.find(text):
                return Drop(
                    f"pii.{left.type.lower()}",
                    note="a value of this type is still there after it was replaced",
                    found=every,
                )
        return dataclasses.replace(
            row,
            system=system if row.system is not None else None,
            turns=tuple(turns),
            masked=row.masked + every,
        )

    @staticmethod
    def _placed(found: Sequence[Sequence[Finding]]) -> tuple[Finding, ...]:
        return tuple(
            dataclasses.replace(one, turn=number - 1 if number else None)
            for number, findings in enumerate(found)
            for one in findings
        )


@functools.cache
def _default_detector() -> Detector:
    return Detector(EVERY_TYPE)


def find_all_types(text: str) -> list[Finding]:
    """The findings of every type, by place, without hashes: for excerpts that people read, in which
    names are searched for whatever the language.
    """
    return _default_detector().find_all([text], [[Passage(0, len(text), "en")]])[0]


# All filters on a block.


@dataclasses.dataclass(frozen=True)
class CleaningTask:
    """The work on rows, as it is sent to a process.

    labels: names of the sources; key: of eyas.privacy; personal: the policy of each source; grams:
    whether rows are matched to traffic.
    """

    labels: tuple[str, ...]
    key: bytes = dataclasses.field(repr=False)
    max_characters: int
    languages: tuple[str, ...] | None
    evaluation: tuple[SourceConfig, ...]
    personal: tuple[PrivacyConfig, ...]
    grams: bool

    @property
    def without(self) -> tuple[str, ...]:
        """Presidio loads both where they are installed, for recognisers that are not used: 400 MB a
        process.
        """
        has_ner = any(policy.ner for policy in self.personal)
        return () if has_ner else ("torch", "transformers")

    def ready(self) -> RowCleaner:
        """The function on blocks and on late drops, with its filters built."""
        return RowCleaner(self)


class RowCleaner:
    """The filters, built. The result of a block depends on the block alone."""

    def __init__(self, task: CleaningTask) -> None:
        """Raises what a broken evaluation set, backend or recogniser raises."""
        self._task = task
        self._personal = {
            label: PersonalData(policy, task.key)
            for label, policy in zip(task.labels, task.personal, strict=True)
        }
        self._filters: list[RowFilter] = [
            Empty(),
            TooLong(task.max_characters),
            Quality(),
            Language(task.languages),
        ]
        self._filters += [Contamination(task.evaluation)] if task.evaluation else []

    def __call__(self, job: RowBlock | LateDrops) -> BlockResult | list[dict[str, Any]]:
        """A cleaned block; or the lines of late drops."""
        if isinstance(job, RowBlock):
            return self.clean(job)
        return [dropped_line(row, drop, find_all_types) for row, drop in job]

    def clean(self, block: RowBlock) -> BlockResult:
        """What becomes of each row of a block, and the digests of the rows that remain."""
        results: list[SourceRow | Drop] = []
        languages: list[str] = []
        for row in block.rows:
            result = row.drop if isinstance(row, DamagedRow) else filtered(row, self._filters)
            results.append(result)
            # At once: `language` remembers the last texts, and the filter has just asked for this.
            languages.append(row_language(result) if isinstance(result, SourceRow) else "")
        passed = [one for one in results if isinstance(one, SourceRow)]
        searched: Iterator[SourceRow | Drop] = iter(())
        if passed:
            first, last = passed[0], passed[-1]
            with without_quotes(
                f"PersonalData failed between {first.where} and {last.where} of {last.source}"
            ):
                by_source = itertools.groupby(passed, key=lambda row: row.source)
                searched = iter(
                    [
                        result
                        for label, rows in by_source
                        for result in self._personal[label].many(list(rows))
                    ]
                )
        cleaned: list[SourceRow | dict[str, Any]] = []
        remaining: list[tuple[SourceRow, str]] = []
        for row, so_far, spoken in zip(block.rows, results, languages, strict=True):
            result = next(searched) if isinstance(so_far, SourceRow) else so_far
            if isinstance(result, Drop):
                cleaned.append(dropped_line(row, result, find_all_types))
            else:
                cleaned.append(result)
                remaining.append((result, spoken))
        lines, places = block_lines(cleaned)
        rows_in, untaken = Counter[str](), Counter[str]()
        for row in block.rows:
            rows_in[row.source] += 1
            untaken[row.source] += row.untaken if isinstance(row, SourceRow) else 0
        labels = self._task.labels
        arrays = {
            **self._digests(remaining),
            "place": places,
            "rows_in": np.array([rows_in[label] for label in labels], dtype=np.int64),
            "untaken": np.array([untaken[label] for label in labels], dtype=np.int64),
        }
        return BlockResult(block.number, lines, arrays)

    def _digests(self, remaining: list[tuple[SourceRow, str]]) -> BlockArrays:
        """The arrays over rows with their languages that decisions and ledger need."""
        rows = [row for row, _ in remaining]
        digests = row_digests(rows)
        digests["source"] = np.array(
            [self._task.labels.index(row.source) for row in rows], dtype=np.uint16
        )
        digests["language"] = np.array([spoken for _, spoken in remaining], dtype=np.str_)
        if self._task.grams:
            grams = gram_digest(rows)
            digests |= {
                "grams": grams.grams,
                "counts": grams.counts,
                "characters": grams.characters,
            }
        return digests


def filtered(row: SourceRow, filters: Sequence[RowFilter]) -> SourceRow | Drop:
    """What the filters make of a row; the first drop ends it. Raises EyasError where a filter
    fails.
    """
    result: SourceRow | Drop = row
    for keep in filters:
        if isinstance(result, Drop):
            break
        with without_quotes(f"{type(keep).__name__} failed on {row.where} of {row.source}"):
            result = keep(result)
    return result


@contextlib.contextmanager
def without_quotes(what: str) -> Iterator[None]:
    """Turn a failure into an EyasError with its place in the code only: the message of the
    exception may quote a row.
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
