"""What `eyas check` says of a head. Knows nothing of heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """An error serves wrong or badly for certain; a warning may be meant so; a note needs nothing
    done.

    meanings: of what can be meant in several ways, the name of each and the keys that say it.
    """

    level: Level
    what: str
    hint: str
    meanings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, notes last."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def exit_code(findings: Iterable[Finding]) -> int:
    """0 nothing found but notes, 1 warnings, 2 an error."""
    levels = {finding.level for finding in findings}
    return 2 if "error" in levels else 1 if "warning" in levels else 0
