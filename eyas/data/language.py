"""The filter by language, and what a row's language is. Knows rows; `eyas.language` knows
languages.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eyas.data.rows import Drop, Row
from eyas.errors import ConfigError
from eyas.language import UNKNOWN, codes, language


class LanguageConfig(BaseModel):
    """Which languages to keep."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keep: tuple[str, ...] | None = Field(
        default=None, description="ISO 639-1 codes, such as [en, de]; None keeps all"
    )

    @model_validator(mode="after")
    def _are_known(self) -> LanguageConfig:
        known = sorted(codes())
        unknown = [code for code in self.keep or () if code not in known]
        if unknown:
            raise ConfigError(
                f"no language has the code {unknown[0]!r} here", f"one of {', '.join(known)}"
            )
        return self


class Language:
    """Drops a row in a language that is not to be kept; one whose language cannot be told stays."""

    def __init__(self, config: LanguageConfig) -> None:
        self._keep = config.keep and frozenset(config.keep)

    def __call__(self, row: Row) -> Row | Drop:
        if self._keep is None or (found := spoken(row)) in self._keep or found == UNKNOWN:
            return row
        return Drop("language", f"it is in {found!r}")


def spoken(row: Row) -> str:
    """The language of a row's turns taken together: see `language`."""
    return language("\n".join(row.turns))
