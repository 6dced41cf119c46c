"""Where every row went: rows in = rows out + drops, per source and reason, with a redacted line for
each dropped row.

Knows no filter, and holds counts alone: the lines are for whoever writes them. What was found in a
row is kept by type, place and keyed hash only; what is kept of its text has all personal data
masked, whatever the policy.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from eyas.data.fit import LENGTHS, length_class
from eyas.data.rows import Damaged, Drop, Row
from eyas.privacy.finding import Finding

EXCERPT_TURNS = 4  # of a dropped row that are kept for people to read
EXCERPT = 240  # characters of a turn
LOOK = (
    # characters searched for what begins in an excerpt: a private key has three thousand, and later
    # names tell of earlier
    8000
)

Find = Callable[[str], Iterable[Finding]]


def entry(row: Row | Damaged, drop: Drop, find: Find) -> dict[str, Any]:
    """The line of a dropped row: its place and id, the reason, what was found, and its redacted
    beginning.

    `find` looks for every type that there is, whatever the policy says of it. Depends on the row
    and the drop alone.
    """
    line: dict[str, Any] = {
        "source": row.source,
        "where": row.where,
        "id": row.id if isinstance(row, Row) else None,
        "reason": drop.reason,
        "note": drop.note,
    }
    if drop.found:
        line["found"] = [dataclasses.asdict(finding) for finding in drop.found]
    if isinstance(row, Row):
        line["characters"] = characters(row)
        line["turns"] = [excerpt(turn, find) for turn in row.turns[:EXCERPT_TURNS]]
    return line


def characters(row: Row) -> int:
    """What the user says in a row, in characters."""
    return sum(map(len, row.turns))


def excerpt(text: str, find: Find) -> str:
    """The beginning of a text with all that `find` finds replaced by its type, such as
    <EMAIL_ADDRESS>.
    """
    found = sorted(
        (one for one in find(text[:LOOK]) if one.start < EXCERPT),
        key=lambda one: (one.start, one.end),
    )
    shown, at = [], 0
    for finding in found:
        # else it lies in one before it, of which at least the beginning is masked
        if finding.start >= at:
            shown += [text[at : finding.start], f"<{finding.type}>"]
        at = max(at, finding.end)
    shown += [text[at : max(EXCERPT, at)], "..." if max(EXCERPT, at) < len(text) else ""]
    return "".join(shown)


@dataclasses.dataclass
class Account:
    """One source's counts.

    masked: values replaced in rows out, by type; rows_masked: the rows out that had any.
    found_in_dropped: values in rows that were dropped for such. lengths_in, lengths_out: readable
    rows by classes of fit.LENGTHS. languages: of rows out.
    """

    rows_in: int = 0
    rows_out: int = 0
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    rows_masked: int = 0
    masked: Counter[str] = dataclasses.field(default_factory=Counter)
    found_in_dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    lengths_in: Counter[int] = dataclasses.field(default_factory=Counter)
    lengths_out: Counter[int] = dataclasses.field(default_factory=Counter)
    languages: Counter[str] = dataclasses.field(default_factory=Counter)

    def __iadd__(self, other: Account) -> Account:
        for one in dataclasses.fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))
        return self

    def to_json(self) -> dict[str, Any]:
        """All counts. Lengths as a list, by classes."""
        return {
            **self.facts(),
            "lengths_in": [self.lengths_in[place] for place in range(len(LENGTHS))],
            "lengths_out": [self.lengths_out[place] for place in range(len(LENGTHS))],
            "languages": dict(sorted(self.languages.items())),
        }

    def facts(self) -> dict[str, Any]:
        """What a manifest holds of it."""
        return {
            "rows_in": self.rows_in,
            "rows_out": self.rows_out,
            "dropped": dict(sorted(self.dropped.items())),
            "rows_masked": self.rows_masked,
            "masked": dict(sorted(self.masked.items())),
            "found_in_dropped": dict(sorted(self.found_in_dropped.items())),
        }


class Ledger:
    """Counts rows in, out and dropped. Its size depends on the sources and reasons, not on the
    rows.

    `versions` by filter and library, `policies` by filter, and the licence gate's `verdicts` stand
    in it as they are given.
    """

    def __init__(
        self,
        versions: Mapping[str, Any] | None = None,
        policies: Mapping[str, Any] | None = None,
        verdicts: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._about = {
            "versions": dict(versions or {}),
            "policies": dict(policies or {}),
            "licences": list(verdicts),
        }
        self._accounts: dict[str, Account] = {}

    def came_in(self, source: str, count: int = 1) -> None:
        """Count rows read, readable or not. To be told by whoever reads them, or `check` compares a
        count with itself.
        """
        self._account(source).rows_in += count

    def went_out(self, row: Row, language: str = "") -> None:
        """Count a row kept, what was masked in it, its length, and its language if it is known."""
        account = self._account(row.source)
        account.rows_out += 1
        account.rows_masked += bool(row.masked)
        account.masked.update(finding.type for finding in row.masked)
        place = length_class(characters(row))
        account.lengths_in[place] += 1
        account.lengths_out[place] += 1
        if language:
            account.languages[language] += 1

    def dropped(self, line: Mapping[str, Any]) -> None:
        """Count a row that goes, by its `entry`."""
        account = self._account(line["source"])
        account.dropped[line["reason"]] += 1
        account.found_in_dropped.update(finding["type"] for finding in line.get("found", ()))
        if "characters" in line:
            account.lengths_in[length_class(line["characters"])] += 1

    @property
    def total(self) -> Account:
        """The sum over all sources."""
        total = Account()
        for account in self._accounts.values():
            total += account
        return total

    def check(self) -> None:
        """Our own invariant: no row vanished and none was made up, in any source."""
        for name, account in self._accounts.items():
            gone = account.dropped.total()
            assert account.rows_in == account.rows_out + gone, (
                f"{name} is out of balance: {account.rows_in} rows in, {account.rows_out} out, "
                f"{gone} dropped"
            )

    def to_json(self) -> dict[str, Any]:
        """What ledger.json holds: the total, then each source, then what decided."""
        self.check()
        sources = {name: account.to_json() for name, account in self._accounts.items()}
        return {
            **self.total.to_json(),
            "lengths_from": list(LENGTHS),
            "sources": sources,
            **self._about,
        }

    def facts(self) -> dict[str, Any]:
        """What a manifest holds of it, and those of all later stages: as much for a million rows as
        for ten.
        """
        self.check()
        sources = {name: account.facts() for name, account in self._accounts.items()}
        return {**self.total.facts(), "sources": sources, **self._about}

    def _account(self, source: str) -> Account:
        return self._accounts.setdefault(source, Account())


def show_dropped(lines: Iterable[Mapping[str, Any]], reason: str) -> Iterator[str]:
    """The dropped rows whose reason begins so ("pii", "pii.phone"; "" for all), as text for people;
    a count at the end.

    Signs that steer a terminal are left out. Holds one row at a time.
    """
    wanted = reason.strip().lower()
    shown, others = Counter[str](), Counter[str]()
    for line in lines:
        if line["reason"].startswith(wanted):
            shown[line["reason"]] += 1
            yield from map(_printable, _described(line))
        else:
            others[line["reason"]] += 1
    if shown:
        yield _printable(f"{shown.total()} rows: {_pairs(shown)}")
    else:
        yield _printable(
            f"no dropped row has a reason that begins with {reason!r}; there are: "
            f"{_pairs(others) or 'none'}"
        )


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


def _printable(text: str) -> str:
    return "".join(sign if sign.isprintable() else " " for sign in text)
