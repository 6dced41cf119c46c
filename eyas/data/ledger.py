"""Rows, and where each one went: rows in = rows out + drops, per source and reason. A value found
in a row is kept as type, place and keyed hash alone; excerpts of dropped rows have all types
masked.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

from eyas.privacy.findings import Finding, NameSearch

LENGTHS = (0, 25, 50, 100, 200, 400, 800, 1600, 3200, 6400)  # characters where a class begins
MOST_MALFORMED = 0.03  # of a source's rows: more is a warning
EXCERPT_TURNS = 4  # turns of a dropped row that are kept for people to read
EXCERPT = 240  # characters of each
# Characters searched for what begins inside an excerpt: a private key has 3,000, and a name is
# easier to find when it occurs again later.
LOOK = 8000
# Of these rows nothing is quoted: no search knows a key without its heading.
NOT_QUOTED = ("quality.non_text", "quality.encoding", "pii.private_key")

PLACEHOLDER = re.compile(r"\b(?:NAME|EMAIL|PHONE|LOCATION|ORG|PERSON)_\d+\b|\[(?:NAME|REDACTED)\]")

FindPersonalData = Callable[[Sequence[str]], Sequence[Iterable[Finding]]]


@dataclass(frozen=True, slots=True)
class SourceRow:
    """The user's side of one conversation.

    where: name and line of its file; masked: what filters replaced in it; names: where names were
    searched for. compared: the turns as they are compared with other rows, with types in place of
    what was replaced, since invented values would hide what two rows share.
    """

    source: str
    licence: str
    where: str
    id: str | None
    turns: tuple[str, ...]
    system: str | None = None
    masked: tuple[Finding, ...] = ()
    names: tuple[NameSearch, ...] = ()
    compared: tuple[str, ...] = ()

    @property
    def text_compared(self) -> str:
        return "\n".join(self.compared or self.turns)

    @property
    def characters(self) -> int:
        return sum(map(len, self.turns))

    @property
    def all_characters(self) -> int:
        """Of the turns and of the system prompt."""
        return self.characters + len(self.system or "")


@dataclass(frozen=True, slots=True)
class Drop:
    """Why a row is dropped. reason: what is counted; note: for people, quotes nothing of it."""

    reason: str
    note: str = ""
    found: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class DamagedRow:
    """A row that cannot be read. Only its place is kept."""

    source: str
    where: str
    drop: Drop


class RowFilter(Protocol):
    """Drops or changes rows for one reason. Depends on the row alone."""

    def __call__(self, row: SourceRow) -> SourceRow | Drop: ...


def length_class(characters: int) -> int:
    """The index in LENGTHS of a number of characters."""
    return bisect.bisect_right(LENGTHS, characters) - 1


def dropped_line(row: SourceRow | DamagedRow, drop: Drop, find: FindPersonalData) -> dict[str, Any]:
    """The line of a dropped row: place, id, reason, what was found, and its redacted beginning.
    find: must find every type, whatever the policy.
    """
    line: dict[str, Any] = {
        "source": row.source,
        "where": row.where,
        "id": row.id if isinstance(row, SourceRow) else None,
        "reason": drop.reason,
        "note": drop.note,
    }
    if drop.found:
        line["found"] = [asdict(finding) for finding in drop.found]
    if isinstance(row, SourceRow):
        line["characters"] = row.characters
        quoted = () if drop.reason.startswith(NOT_QUOTED) else row.turns[:EXCERPT_TURNS]
        found = find([turn[:LOOK] for turn in quoted])
        line["turns"] = [*map(excerpt, quoted, found)]
    return line


def excerpt(text: str, findings: Iterable[Finding]) -> str:
    """The beginning of a text, each finding replaced by its type, such as <EMAIL_ADDRESS>."""
    found = (one for one in findings if one.start < EXCERPT)
    parts, at = [], 0
    for finding in sorted(found, key=lambda one: (one.start, one.end)):
        # An overlapping finding needs no mark of its own: the one before masks its beginning.
        if finding.start >= at:
            parts += [text[at : finding.start], f"<{finding.type}>"]
        at = max(at, finding.end)
    end = max(EXCERPT, at)
    return "".join([*parts, text[at:end], "..." if end < len(text) else ""])


@dataclass
class SourceCounts:
    """The counts of one source.

    rows_masked: rows out with a replaced value; masked: these values, by type. placeholders: rows
    out in which the publisher wrote NAME_1 and the like. found_in_dropped: values in rows dropped
    for them. lengths_in, lengths_out: readable rows by class of LENGTHS. names_rows,
    names_characters: of rows out, by language, searcher and reason of a `NameSearch`; a row of
    several languages counts for each.
    """

    rows_in: int = 0
    rows_out: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    rows_masked: int = 0
    placeholders: int = 0
    masked: Counter[str] = field(default_factory=Counter)
    found_in_dropped: Counter[str] = field(default_factory=Counter)
    lengths_in: Counter[int] = field(default_factory=Counter)
    lengths_out: Counter[int] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)
    names_rows: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    names_characters: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def facts(self) -> dict[str, Any]:
        """The counts that go into the manifest."""
        names = "rows_in rows_out dropped rows_masked placeholders masked found_in_dropped"
        found = ((name, getattr(self, name)) for name in names.split())
        return {
            name: dict(sorted(one.items())) if isinstance(one, Counter) else one
            for name, one in found
        }

    def to_json(self) -> dict[str, Any]:
        """All counts. Lengths as a list, by class."""
        return {
            **self.facts(),
            "lengths_in": [self.lengths_in[place] for place in range(len(LENGTHS))],
            "lengths_out": [self.lengths_out[place] for place in range(len(LENGTHS))],
            "languages": dict(sorted(self.languages.items())),
            "names": [
                {
                    **dict(zip(("language", "by", "reason"), part, strict=True)),
                    "rows": rows,
                    "characters": self.names_characters[part],
                }
                for part, rows in sorted(self.names_rows.items())
            ],
        }


class Ledger:
    """Counts rows in, out and dropped, by source and reason."""

    def __init__(
        self,
        versions: Mapping[str, Any] | None = None,
        policies: Mapping[str, Any] | None = None,
        verdicts: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """versions: of filters and libraries; policies: by filter; verdicts: of the gate."""
        self._about = {
            "versions": dict(versions or {}),
            "policies": dict(policies or {}),
            "licences": list(verdicts),
        }
        self._sources = defaultdict[str, SourceCounts](SourceCounts)

    def came_in(self, source: str, count: int = 1) -> None:
        """Count rows read, readable or not."""
        self._sources[source].rows_in += count

    def went_out(self, row: SourceRow, language: str = "") -> None:
        """Count a kept row."""
        counts = self._sources[row.source]
        counts.rows_out += 1
        counts.rows_masked += bool(row.masked)
        counts.placeholders += any(map(PLACEHOLDER.search, row.turns))
        counts.masked.update(finding.type for finding in row.masked)
        for part in row.names:
            counts.names_rows[part.language, part.by, part.reason] += 1
            counts.names_characters[part.language, part.by, part.reason] += part.characters
        place = length_class(row.characters)
        counts.lengths_in[place] += 1
        counts.lengths_out[place] += 1
        if language:
            counts.languages[language] += 1

    def dropped(self, line: Mapping[str, Any]) -> None:
        """Count a dropped row by its `dropped_line`."""
        counts = self._sources[line["source"]]
        counts.dropped[line["reason"]] += 1
        counts.found_in_dropped.update(finding["type"] for finding in line.get("found", ()))
        if "characters" in line:
            counts.lengths_in[length_class(line["characters"])] += 1

    @property
    def total(self) -> SourceCounts:
        """The sum over all sources."""
        total = SourceCounts()
        for name in (one.name for one in fields(SourceCounts)):
            for counts in self._sources.values():
                setattr(total, name, getattr(total, name) + getattr(counts, name))
        return total

    def warnings(self) -> list[str]:
        """A line for each source that lost a part, or of which more than MOST_MALFORMED of the rows
        could not be read.
        """
        lines = []
        for name, counts in self._sources.items():
            cut, malformed = counts.dropped["cut"], counts.dropped["malformed"]
            if cut:
                lines.append(
                    f"{name}: cut or damaged in {cut} {'place' if cut == 1 else 'places'}; how "
                    "many rows were lost there is not known"
                )
            if malformed > MOST_MALFORMED * counts.rows_in:
                lines.append(
                    f"{name}: {malformed:,} of {counts.rows_in:,} rows "
                    f"({malformed / counts.rows_in:.1%}) could not be read"
                )
        return lines

    def placeholders(self) -> list[str]:
        """A line for each source with prompts whose publisher replaced names."""
        counts = ((name, one.placeholders) for name, one in self._sources.items())
        says = "prompts hold placeholders such as NAME_1"
        return [f"{name}: {count:,} {says}" for name, count in counts if count]

    def check(self) -> None:
        """Assert that in no source a row is lost or invented."""
        for name, counts in self._sources.items():
            gone = counts.dropped.total()
            assert counts.rows_in == counts.rows_out + gone, (
                f"{name} is out of balance: {counts.rows_in} rows in, {counts.rows_out} out, "
                f"{gone} dropped"
            )

    def to_json(self) -> dict[str, Any]:
        """The content of ledger.json."""
        self.check()
        sources = {name: counts.to_json() for name, counts in self._sources.items()}
        return {
            **self.total.to_json(),
            "warnings": self.warnings(),
            "lengths_from": list(LENGTHS),
            "sources": sources,
            **self._about,
        }

    def facts(self) -> dict[str, Any]:
        """What this manifest and those of later stages hold: no larger for more rows."""
        self.check()
        sources = {name: counts.facts() for name, counts in self._sources.items()}
        return {**self.total.facts(), "sources": sources, **self._about}


def show_dropped(lines: Iterable[Mapping[str, Any]], reason: str) -> Iterator[str]:
    """Dropped rows whose reason begins with `reason` ("pii", "pii.phone"; "" for all), as printable
    text, one at a time, with a count at the end.
    """
    wanted = reason.strip().lower()
    shown, others = Counter[str](), Counter[str]()
    for line in lines:
        if line["reason"].startswith(wanted):
            shown[line["reason"]] += 1
            yield from map(printable, _described(line))
        else:
            others[line["reason"]] += 1
    last = f"{shown.total()} rows: {_pairs(shown)}"
    none = f"no dropped row has a reason that begins with {reason!r}; there are: "
    yield printable(last if shown else none + (_pairs(others) or "none"))


def _described(line: Mapping[str, Any]) -> Iterator[str]:
    id = f" (id {line['id']})" if line.get("id") else ""
    note = f": {line['note']}" if line["note"] else ""
    yield f"{line['where']} of {line['source']}{id}: {line['reason']}{note}"
    for finding in line.get("found", ()):
        place = "the system prompt" if finding["turn"] is None else f"turn {finding['turn'] + 1}"
        known_as = f", hash {finding['hash']}" if finding.get("hash") else ""
        yield (
            f"    {finding['type']} in {place}, characters {finding['start']} to "
            f"{finding['end']}{known_as}"
        )
    yield from (f"    > {turn}" for turn in line.get("turns", ()))


def _pairs(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def printable(text: str) -> str:
    """The text with spaces for characters that control a terminal."""
    return "".join(sign if sign.isprintable() else " " for sign in text)
