"""Measured recall of the search for personal data, by type, and the values that a run is expected
to have missed. `python benchmarks/privacy.py --write` makes recall.json from labelled texts.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).with_name("recall.json")
Z = 1.959964  # 95 %


def wilson(num: int, of: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927)."""
    if of == 0:
        return 0.0, 1.0
    share = num / of
    middle = (share + Z * Z / (2 * of)) / (1 + Z * Z / of)
    half = Z * math.sqrt(share * (1 - share) / of + Z * Z / (4 * of * of)) / (1 + Z * Z / of)
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True, slots=True)
class Recall:
    """found of `of` labelled values; share with Wilson's 95 % interval."""

    found: int
    of: int

    @property
    def share(self) -> float:
        return self.found / self.of

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.found, self.of)

    def remaining(self, found: int) -> tuple[float, float, float]:
        """Values that a search which found so many is expected to have missed, found * (1 - recall)
        / recall, and the least and the most by the interval. Infinite for a recall of 0.
        """
        low, high = self.interval
        if not found:
            return 0.0, 0.0, 0.0
        expected, least, most = (
            found * (1 - recall) / recall if recall > 0 else math.inf
            for recall in (self.share, high, low)
        )
        return expected, least, most


@functools.cache
def measured() -> Mapping[str, Any]:
    """recall.json: "types" (counts by type in `languages`), "scripts" (the same by language), and
    what they were measured on and with.
    """
    table: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return table


def recall_of(type: str) -> Recall | None:
    """The measured recall of a type of personal data; None if it was not measured."""
    counts = measured()["types"].get(type)
    return Recall(counts["found"], counts["of"]) if counts else None


def recall_in(language: str) -> Mapping[str, Recall]:
    """The measured recall of each type in a language of `eyas.language`; empty: not measured there.
    In languages of other scripts than Latin, of values with a form, touching their letters.
    """
    table = measured()
    types = table["types"] if language in table["languages"] else {}
    types = types or table["scripts"].get(language, {})
    return {type: Recall(counts["found"], counts["of"]) for type, counts in types.items()}
