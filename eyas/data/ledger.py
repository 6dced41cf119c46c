"""Where every row went: rows in = rows out + drops, per source and reason, with a redacted line for each dropped row.

Knows no filter. What was found in a row is kept by type and place only; what is kept of its text has all personal data
masked, whatever the policy.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

from eyas.data.personal import excerpt
from eyas.data.rows import Damaged, Drop, Row

EXCERPT_TURNS = 4  # of a dropped row that are kept for people to read


@dataclasses.dataclass
class Account:
    """One source's counts. `masked` counts values by type; `rows_masked` the rows out that had any."""

    rows_in: int = 0
    rows_out: int = 0
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    masked: Counter[str] = dataclasses.field(default_factory=Counter)
    rows_masked: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "rows_in": self.rows_in,
            "rows_out": self.rows_out,
            "dropped": dict(sorted(self.dropped.items())),
            "rows_masked": self.rows_masked,
            "masked": dict(sorted(self.masked.items())),
        }


class Ledger:
    """Counts rows in, out and dropped, and gathers the lines of dropped.jsonl."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._lines: list[bytes] = []

    def came_in(self, row: Row | Damaged) -> None:
        """Count a row read, readable or not."""
        self._account(row.source).rows_in += 1

    def went_out(self, row: Row) -> None:
        """Count a row kept, and what was masked in it."""
        account = self._account(row.source)
        account.rows_out += 1
        account.rows_masked += bool(row.masked)
        account.masked.update(finding.type for finding in row.masked)

    def dropped(self, row: Row | Damaged, drop: Drop) -> None:
        """Count a row that goes, and keep its place, reason and redacted beginning."""
        self._account(row.source).dropped[drop.reason] += 1
        line: dict[str, Any] = {"source": row.source, "where": row.where, "reason": drop.reason, "note": drop.note}
        if drop.found:
            line["found"] = [dataclasses.asdict(finding) for finding in drop.found]
        if isinstance(row, Row):
            line["turns"] = [excerpt(turn) for turn in row.turns[:EXCERPT_TURNS]]
        self._lines.append(json.dumps(line, ensure_ascii=False).encode() + b"\n")

    @property
    def total(self) -> Account:
        """The sum over all sources."""
        total = Account()
        for account in self._accounts.values():
            total.rows_in += account.rows_in
            total.rows_out += account.rows_out
            total.dropped += account.dropped
            total.rows_masked += account.rows_masked
            total.masked += account.masked
        return total

    def check(self) -> None:
        """Our own invariant: no row vanished and none was made up, in any source."""
        for name, account in self._accounts.items():
            assert account.rows_in == account.rows_out + account.dropped.total(), f"{name} is out of balance: {account}"

    def to_json(self) -> dict[str, Any]:
        """What ledger.json holds: the total, then each source."""
        self.check()
        sources = {name: account.to_json() for name, account in self._accounts.items()}
        return {**self.total.to_json(), "sources": sources}

    def dropped_jsonl(self) -> bytes:
        """What dropped.jsonl holds: a line per dropped row, in the order of the sources."""
        return b"".join(self._lines)

    def _account(self, source: str) -> Account:
        return self._accounts.setdefault(source, Account())
