"""What flows through the cleaning: a row as read, what was found in it, why it was dropped, and
what a filter is.

Knows no file format and no filter in particular.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from eyas.privacy.finding import Finding


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """The user's side of one conversation. `where` is its file's name and line; `masked` what
    filters replaced in it.
    """

    source: str
    licence: str
    where: str
    id: str | None
    turns: tuple[str, ...]
    system: str | None = None
    masked: tuple[Finding, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """Why a row goes: a reason to count by, a note for the reader that quotes nothing of the row,
    and what was found.
    """

    reason: str
    note: str = ""
    found: tuple[Finding, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Damaged:
    """A row that could not be read; nothing of it is kept but its place."""

    source: str
    where: str
    drop: Drop


class Filter(Protocol):
    """One reason for rows to go, or to be changed. May remember earlier rows; sees them in the
    order of the sources.
    """

    def __call__(self, row: Row) -> Row | Drop: ...
