"""The measured recall of the search for personal data, and how many values a run is expected to
have missed. `python benchmarks/privacy.py --write` makes recall.json from labelled texts.
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
    """`found` of `of` labelled values."""

    found: int
    of: int

    @property
    def share(self) -> float:
        return self.found / self.of

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.found, self.of)

    def remaining(self, found: int) -> tuple[float, float, float]:
        """How many values a search that found `found` is expected to have missed, found * (1 -
        recall) / recall, with the bounds by the interval. Infinite for a recall of 0.
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
    what was measured.
    """
    table: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return table


def recall_of(type: str) -> Recall | None:
    """The measured recall of a type of personal data, or None."""
    counts = measured()["types"].get(type)
    return Recall(counts["found"], counts["of"]) if counts else None


def recall_in(language: str) -> Mapping[str, Recall]:
    """The measured recall by type in a language of `eyas.language`, if any. In scripts other than
    Latin: of values with a form that touch the script's letters.
    """
    table = measured()
    types = table["types"] if language in table["languages"] else {}
    types = types or table["scripts"].get(language, {})
    return {type: Recall(counts["found"], counts["of"]) for type, counts in types.items()}
