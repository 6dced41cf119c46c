"""What is searched for in a text, what a finding is, and what is done about each type. Knows no way
of finding anything.

    drop        the row goes, and is counted
    surrogate   an invented value of the same kind takes its place, the same one throughout a
                conversation
    mask        its type takes its place, such as <EMAIL_ADDRESS>
    keep        the type is not searched for

A row that holds an account, a card or a key seldom holds nothing else, and no detector finds all of
the rest: those rows go. Surrogates are the default for what reaches a person: the text stays like
the traffic that the head will see, and a name that was missed is hidden among invented ones
(Carrell et al., "Hiding in plain sight", JAMIA 2013). A place or a link alone identifies nobody.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, field_validator

from eyas.errors import ConfigError

Action = Literal["drop", "surrogate", "mask", "keep"]

# The order is a rank: findings that overlap become one of the type that comes first, and a row that
# is dropped is counted under it.
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
    "DATE_OF_BIRTH": None,
    "LICENSE_PLATE": None,
    "MAC_ADDRESS": None,
    "COORDINATES": None,
    "HANDLE": None,
    "URL": "keep",
    "STREET_ADDRESS": None,
    "PERSON": None,
    "LOCATION": "keep",
}
TYPES = tuple(DEFAULT_ACTIONS)
ANY_LANGUAGE = "*"
NAME_TYPES = ("PERSON", "STREET_ADDRESS", "LOCATION")  # found by language, not by form
RANK = {type: rank for rank, type in enumerate(TYPES)}


class PrivacyConfig(BaseModel):
    """What to do with personal data and secrets, and what finds them.

    `actions` names types that are treated otherwise than by default (any case). `fictional`: the
    people and places of the texts are invented, and names are not searched for. `ner` adds an
    installed recogniser of names and places (`spacy:NAME`, `transformers:FOLDER`, `gliner:FOLDER`)
    for the languages that it knows, or one for each language: `{de: spacy:de_core_news_sm}`;
    without one, names are searched for in English. `cloud_project` asks Google Cloud DLP, paid by
    this project and run at `cloud_location`, in place of our own detectors: the texts leave this
    machine.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Literal["surrogate", "mask", "drop"] = "surrogate"
    actions: Mapping[str, Action] = {}
    fictional: bool = False
    ner: str | Mapping[str, str] | None = None
    cloud_project: str | None = None
    cloud_location: str = "global"

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
        """What is done about a value of this type."""
        if self.fictional and type in NAME_TYPES:
            return "keep"
        return self.actions.get(type) or DEFAULT_ACTIONS[type] or self.policy

    @property
    def recognisers(self) -> tuple[tuple[str, str], ...]:
        """The recognisers of `ner`, each with the language to use it for; ANY_LANGUAGE: whatever it
        knows.
        """
        if self.ner is None:
            return ()
        of_language = {ANY_LANGUAGE: self.ner} if isinstance(self.ner, str) else self.ner
        return tuple(sorted(of_language.items()))

    @property
    def types(self) -> tuple[str, ...]:
        """The types that are searched for, by rank."""
        return tuple(type for type in TYPES if self.action(type) != "keep")

    def first_that_drops(self, types: Iterable[str]) -> str | None:
        """The highest in rank of those types whose action is to drop the row."""
        return min(
            (type for type in types if self.action(type) == "drop"),
            key=RANK.__getitem__,
            default=None,
        )


EVERY_TYPE = PrivacyConfig(actions=dict.fromkeys(TYPES, "mask"))
# Answers name public people and places, as they should; an e-mail address or a number that the
# conversation does not hold is real somewhere.
ANSWER_POLICY = PrivacyConfig(
    policy="drop", actions={"street_address": "keep", "person": "keep", "location": "keep"}
)


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Where something was found: characters [start, end) of a turn as it was read, or of the system
    prompt (turn None).

    hash: equal for equal values under the same key, useless without it; "" where no key was given.
    The value itself is kept nowhere, in no form.
    """

    type: str
    start: int
    end: int
    turn: int | None = None
    hash: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class NameSearch:
    """Whether names and places were searched for in a part of a row.

    language: the part's code, UNKNOWN or CODE_ONLY (`eyas.language`). by: what searched it, as
    "eyas" or "spacy:de_core_news_sm"; "" = nothing did. reason: why nothing did, else "": "code",
    "language" (no recogniser knows it), "fictional", or "policy" (which keeps names). characters:
    of all such parts of the row.
    """

    language: str
    by: str
    reason: str
    characters: int


def join_overlaps(findings: Iterable[Finding]) -> list[Finding]:
    """Findings by place, overlapping ones joined under the type of the highest rank, so that
    replacing them leaves no rest of either.
    """
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
