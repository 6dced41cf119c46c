"""Where something was found in a text, and the text with it replaced."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from eyas.privacy.pii import RANK


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Where something was found: characters [start, end) of a turn as it was read, or of the system
    prompt (turn None). hash: equal for equal values under the same key; "" without a key.
    """

    type: str
    start: int
    end: int
    turn: int | None = None
    hash: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class NameSearch:
    """Whether names and places were searched for in the parts of a row in one language.

    by: what searched them, as "eyas" or "cloud_dlp+eyas"; "" if nothing did, for the `reason`
    "code", "fictional", or "policy" (which keeps names).
    """

    language: str
    by: str
    reason: str
    characters: int


def join_overlaps(findings: Iterable[Finding]) -> list[Finding]:
    """Findings by place, overlapping ones joined under the type of the highest rank."""
    joined: list[Finding] = []
    for finding in sorted(findings, key=lambda one: (one.start, one.end, RANK[one.type])):
        if joined and finding.start < joined[-1].end:
            last = joined.pop()
            type = min(last.type, finding.type, key=RANK.__getitem__)
            finding = dataclasses.replace(last, type=type, end=max(last.end, finding.end))
        joined.append(finding)
    return joined


def replace(text: str, findings: Iterable[Finding], values: Iterable[str]) -> str:
    """The text with a value in place of each finding; findings by place, without overlaps."""
    parts, end = [], 0
    for finding, value in zip(findings, values, strict=True):
        parts += [text[end : finding.start], value]
        end = finding.end
    return "".join([*parts, text[end:]])


def mask(text: str, findings: Sequence[Finding]) -> str:
    """The text with each finding replaced by its type, such as <EMAIL_ADDRESS>."""
    return replace(text, findings, (f"<{finding.type}>" for finding in findings))
