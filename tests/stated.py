"""What a run file states of a source, for the licence gate: no path is looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """What the gate reads of a source."""

    licence: str | None = None
    prompts_by: str | None = None
    answers_by: str | None = None
    name: str | None = None
    path: str = "/raw/mine.jsonl"
    overrule: Mapping[str, str] = field(default_factory=dict)
    log: object = None
    shape: str | None = None

    @property
    def label(self) -> str:
        return self.name or Path(self.path).stem
