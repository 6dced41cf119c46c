"""What is looked for in a text, and what is done about each type of it. Knows no way of finding
anything.

    drop        the row goes, and is counted
    surrogate   the value gives way to an invented one of the same kind, the same one throughout a conversation
    mask        the value gives way to its type, such as <EMAIL_ADDRESS>
    keep        the type is not looked for

Whoever writes down an account, a card or a key seldom leaves it at that, and nothing finds all of
what stands beside it: those rows go. Surrogates are the default for what reaches a person: the text
stays like the traffic that the head will see, and a name that was missed is hidden among invented
ones (Carrell et al., "Hiding in plain sight", JAMIA 2013). A place or a link alone is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from eyas.errors import ConfigError
from eyas.privacy.entities import THRESHOLD

Action = Literal["drop", "surrogate", "mask", "keep"]

# The order is a rank: findings that overlap become one of the type that comes first, and a row that
# goes is counted under it.
DEFAULT_ACTIONS: Mapping[str, Action | None] = {
    "PRIVATE_KEY": "drop",
    "URL_CREDENTIALS": "drop",
    "API_KEY": "drop",
    "PASSWORD": "drop",
    "CREDIT_CARD": "drop",
    "IBAN_CODE": "drop",
    "US_SSN": "drop",
    "NATIONAL_ID": "drop",
    "CRYPTO": None,  # None: as `policy` says
    "EMAIL_ADDRESS": None,
    "IP_ADDRESS": None,
    "PHONE_NUMBER": None,
    "URL": "keep",
    "STREET_ADDRESS": None,
    "PERSON": None,
    "LOCATION": "keep",
}
TYPES = tuple(DEFAULT_ACTIONS)
RANK = {type: rank for rank, type in enumerate(TYPES)}


class PrivacyConfig(BaseModel):
    """What to do with personal data and secrets, and what finds them.

    `actions` names types that are treated otherwise than by default (any case). `names` is the
    least probability at which a word is taken for a name or a part of an address: lower finds more
    and is wrong more often. `ner` is a recogniser that is installed already, `spacy:NAME` or
    `transformers:FOLDER`, which finds names and places besides our own, from `ner_score` on.
    `backend: cloud` asks Google Cloud DLP in place of everything local: the texts leave this
    machine.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Literal["surrogate", "mask", "drop"] = "surrogate"
    actions: Mapping[str, Action] = {}
    backend: Literal["local", "cloud"] = "local"
    names: float = Field(default=THRESHOLD, gt=0, lt=1)
    ner: str | None = None
    ner_score: float = Field(default=0.5, ge=0, le=1)
    cloud_project: str | None = None
    cloud_location: str = "global"
    cloud_url: str = "https://dlp.googleapis.com"
    cloud_likelihood: Literal["UNLIKELY", "POSSIBLE", "LIKELY", "VERY_LIKELY"] = "POSSIBLE"

    @field_validator("actions")
    @classmethod
    def _known_types(cls, actions: Mapping[str, Action]) -> Mapping[str, Action]:
        named = {type.upper(): action for type, action in actions.items()}
        unknown = sorted(set(named) - set(TYPES))
        if unknown:
            raise ConfigError(
                f"no type of personal data is called {', '.join(unknown)}",
                f"known are {', '.join(TYPES)}",
            )
        return dict(sorted(named.items()))

    def action(self, type: str) -> Action:
        """What becomes of a value of this type."""
        return self.actions.get(type) or DEFAULT_ACTIONS[type] or self.policy

    @property
    def types(self) -> tuple[str, ...]:
        """The types that are looked for, by rank."""
        return tuple(type for type in TYPES if self.action(type) != "keep")

    def first_that_drops(self, types: Iterable[str]) -> str | None:
        """The highest in rank of those types whose action is to drop the row."""
        return min(
            (type for type in types if self.action(type) == "drop"),
            key=RANK.__getitem__,
            default=None,
        )
