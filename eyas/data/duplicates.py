"""Exact duplicates after normalisation. Knows neither near-duplicates nor benchmarks."""

from __future__ import annotations

import hashlib
import json
import unicodedata

from eyas.data.rows import Drop, Row


def normalised(text: str) -> str:
    """One spelling for texts that differ in case, white space or compatible Unicode forms only."""
    return " ".join(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).split())


def fingerprint(row: Row) -> str:
    """SHA-256 (hex) over the normalised turns and system prompt: equal for duplicates, independent of all other rows."""
    said = [normalised(row.system or ""), *map(normalised, row.turns)]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


class Duplicates:
    """Drops a row that says the same as an earlier one, in whatever source. Remembers 16 bytes and a place per row."""

    def __init__(self) -> None:
        self._first: dict[bytes, str] = {}

    def __call__(self, row: Row) -> Row | Drop:
        key = bytes.fromhex(fingerprint(row)[:32])
        if key in self._first:
            return Drop("duplicate", note=f"the same as {self._first[key]}")
        self._first[key] = f"{row.where} of {row.source}"
        return row
