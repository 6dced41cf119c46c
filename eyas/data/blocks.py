"""Blocks: rows in portions of a fixed size, and the finished ones on disk, each whole or absent.

Knows how a block is cut, kept and found again. Knows no filter.

    work/block-00000.npz     arrays over the rows that are left, in order: what global decisions are made from
    work/block-00000.jsonl   a line per row in: {"row": ...} as the filters changed it, or {"drop": ...} as it is entered in
                             the ledger, redacted; written last, so that a block is there when this
                             file is

A row that is left is known by its number among all that are left.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.artifact import WORK, Artifact
from eyas.data.rows import Damaged, Row
from eyas.privacy.finding import Finding

BLOCK_ROWS = 500
# a block ends early at so many, or a few rows of megabytes each would fill the memory
BLOCK_CHARACTERS = 4_000_000

Digests = dict[str, NDArray[Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Rows that follow each other, across sources where one ends."""

    number: int
    rows: tuple[Row | Damaged, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Sifted:
    """What became of a block. lines: JSON lines, one per row in. digests: arrays [rows left, ...]
    by name.
    """

    number: int
    lines: bytes
    digests: Digests


def cut(rows: Iterable[Row | Damaged]) -> Iterator[Block]:
    """The rows as blocks; where they are cut depends on the rows alone."""
    number, held, characters = 0, list[Row | Damaged](), 0
    for row in rows:
        held.append(row)
        characters += (
            sum(map(len, row.turns)) + len(row.system or "") if isinstance(row, Row) else 0
        )
        if len(held) == BLOCK_ROWS or characters >= BLOCK_CHARACTERS:
            yield Block(number, tuple(held))
            number, held, characters = number + 1, [], 0
    if held:
        yield Block(number, tuple(held))


class Lines:
    """The lines of a block as it is written: one per row in, and the places of those that are left."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._places: list[tuple[int, int]] = []
        self._size = 0

    def keep(self, row: Row) -> None:
        """Add a row that is left."""
        start = self._size
        self._add({"row": dataclasses.asdict(row)})
        self._places.append((start, self._size))

    def drop(self, entry: dict[str, Any]) -> None:
        """Add a row that goes: its entry in the ledger."""
        self._add({"drop": entry})

    def text(self) -> bytes:
        return b"".join(self._lines)

    def places(self) -> NDArray[np.uint32]:
        """First and last byte [rows left, 2] of each row that is left, the last one excluded."""
        return np.array(self._places, dtype=np.uint32).reshape(-1, 2)

    def _add(self, value: dict[str, Any]) -> None:
        self._lines.append(json.dumps(value, ensure_ascii=False).encode() + b"\n")
        self._size += len(self._lines[-1])


def _row(value: dict[str, Any]) -> Row:
    masked = tuple(Finding(**finding) for finding in value["masked"])
    return Row(**{**value, "turns": tuple(value["turns"]), "masked": masked})


class Blocks:
    """The finished blocks of an artifact."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact

    def has(self, number: int) -> bool:
        """Whether a block is finished."""
        return self._artifact.exists(_name(number, "jsonl"))

    def write(self, sifted: Sifted) -> None:
        """Keep a finished block."""
        stream = io.BytesIO()
        np.savez(stream, allow_pickle=False, **sifted.digests)
        self._artifact.write(_name(sifted.number, "npz"), stream.getvalue())
        self._artifact.write(_name(sifted.number, "jsonl"), sifted.lines)

    def digests(self, number: int, *names: str) -> Digests:
        """Arrays of a finished block."""
        with np.load(
            io.BytesIO(self._artifact.read(_name(number, "npz"))), allow_pickle=False
        ) as arrays:
            return {name: arrays[name] for name in names}

    def entries(self, number: int) -> Iterator[Row | dict[str, Any]]:
        """A finished block row by row: the row if it is left, else its entry in the ledger."""
        for line in self._artifact.read(_name(number, "jsonl")).splitlines():
            value = json.loads(line)
            yield _row(value["row"]) if "row" in value else value["drop"]

    def row(self, number: int, start: int, end: int) -> Row:
        """The row whose line is bytes [start, end) of a finished block."""
        return _row(
            json.loads(self._artifact.read_range(_name(number, "jsonl"), start, end))["row"]
        )


def _name(number: int, kind: str) -> str:
    return f"{WORK}/block-{number:05d}.{kind}"
