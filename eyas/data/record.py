"""What a person states of a run for its card: who ran it, when, why, on what basis, how long the
prompts are kept and how they are erased. Nothing here changes a prompt.
"""

from __future__ import annotations

import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

# The fields that a data-protection officer signs for, with their headings on the card.
HEADINGS = {
    "operator": "operator",
    "purpose": "purpose",
    "legal_basis": "legal basis",
    "retention": "retention",
    "erasure": "erasure",
    "key_custody": "custody of the key",
}


class RecordConfig(BaseModel):
    """The record of processing: one block of the run file, shown on the card as it is written."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)

    date: datetime.date | None = Field(
        default=None, description="of the run; the day on which it ends, in UTC, if not given"
    )
    operator: str | None = Field(
        default=None, min_length=1, description="who runs it, and who is responsible for the data"
    )
    purpose: str | None = Field(default=None, min_length=1, description="what the prompts are for")
    legal_basis: str | None = Field(
        default=None, min_length=1, description="what allows it, e.g. GDPR Art. 6(1)(f) and why"
    )
    retention: str | None = Field(
        default=None, min_length=1, description="how long prompts and sources are kept, and where"
    )
    erasure: str | None = Field(
        default=None, min_length=1, description="how a person's rows are found and erased on demand"
    )
    key_custody: str | None = Field(
        default=None, min_length=1, description="who holds the privacy key, where, until when"
    )
    samples: Literal["none", "terminal", "encrypted"] = Field(
        default="none",
        description="some changed rows before and after: shown on the terminal alone, or kept "
        "encrypted under the privacy key",
    )

    def facts(self) -> dict[str, Any]:
        """What the manifest keeps."""
        return self.model_dump(mode="json")
