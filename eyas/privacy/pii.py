"""The types of personal data and secrets, one entry each, and what a run does about each.

    drop        the row goes, and is counted
    surrogate   an invented value of the same kind takes its place, the same one throughout a
                conversation
    mask        its type takes its place, such as <EMAIL_ADDRESS>
    keep        the type is not searched for

A row with an account, a card or a key often holds more that no detector finds: those rows go. Else
surrogates are the default: the text stays like the traffic that the head will see, and a name that
was missed is hidden among invented ones (Carrell et al., "Hiding in plain sight", JAMIA 2013). A
place or a link alone identifies nobody.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from eyas.errors import ConfigError
from eyas.privacy import invented
from eyas.privacy.attributes import (
    birth_dates,
    coordinates,
    handles,
    mac_addresses,
    plates,
)
from eyas.privacy.identifiers import is_named, national_ids
from eyas.privacy.invented import KeyedRandom
from eyas.privacy.key import keyed
from eyas.privacy.patterns import (
    CARD_CUE,
    SSN_CUE,
    accounts,
    cards,
    ip_addresses,
    links,
    links_with_credentials,
    mails,
    phones,
    says,
    social_security_numbers,
    wallets,
)
from eyas.privacy.secrets import api_keys, passwords, private_keys
from eyas.privacy.spelling import Span, plain

Action = Literal["drop", "surrogate", "mask", "keep"]
Search = Callable[[str], Iterator[Span]]
HASH_DIGITS = 16


@dataclass(frozen=True, slots=True)
class PiiType:
    """A type of personal data or secret.

    action: by default; None: as `policy` says. example: a text with a value between ⟨ and ⟩. find:
    the places of values in a text of `spelling.plain`; None: a name, found by `entities`.
    surrogate: an invented value in place of one; None: a person's, word by word (`surrogates`).
    is_numbered: case and separators do not tell two values apart, and a surrogate keeps them. sign:
    may stand before the value. is_named: whether a word beside [start, end) of a text says what it
    is; if none does, `policy` says what is done. is_reserved: whether a value is set aside for
    examples. is_windowed: long texts are searched in pieces (`detector.in_windows`); not so keys,
    which may be longer, numbers, whose column has its heading at the top, and links, found in
    linear time. has_digit: a text without digits is not searched.
    """

    name: str
    action: Action | None
    example: str
    find: Search | None = None
    surrogate: Callable[[str, KeyedRandom], str] | None = None
    is_numbered: bool = False
    sign: str = ""
    is_named: Callable[[str, int, int], bool | None] | None = None
    is_reserved: Callable[[str], bool] = lambda value: False
    is_windowed: bool = True
    has_digit: bool = False


Number = functools.partial(PiiType, is_numbered=True, has_digit=True)

# The order is a rank: overlapping findings become one of the first type, under which a dropped row
# is counted. A new type is an entry here: nothing else names it.
PII_TYPES = (
    PiiType(
        "PRIVATE_KEY",
        "drop",
        "⟨-----BEGIN PRIVATE KEY-----\nMIIEvgIBADANBgkqhkiG9w0BAQEFAASC\nBKgwggSkAgEAAoIBAQC7\n"
        "-----END PRIVATE KEY-----⟩",
        private_keys,
        invented.private_key,
        is_windowed=False,
    ),
    PiiType(
        "URL_CREDENTIALS",
        "drop",
        "⟨postgres://bob:hunter22@db.internal:5432/shop⟩",
        links_with_credentials,
        invented.link_with_credentials,
        is_windowed=False,
    ),
    PiiType(
        "API_KEY",
        "drop",
        "⟨sk-ant-api03-AbCd1234efGH5678ijKL⟩",
        api_keys,
        invented.api_key,
        is_windowed=False,
    ),
    PiiType(
        "PASSWORD",
        "drop",
        "password: ⟨Tr0ub4dor&3⟩",
        passwords,
        invented.same_form,
        is_windowed=False,
    ),
    Number(
        "CREDIT_CARD",
        "drop",
        "⟨4242-4242-4242-4242⟩",
        cards,
        invented.card,
        is_named=functools.partial(says, cue=CARD_CUE),
        is_windowed=False,
        is_reserved=invented.is_test_card,
    ),
    Number(
        "IBAN_CODE",
        "drop",
        "⟨GB29 NWBK 6016 1331 9268 19⟩",
        accounts,
        invented.iban,
    ),
    Number(
        "US_SSN",
        "drop",
        "⟨219-45-9876⟩",
        social_security_numbers,
        invented.social_security_number,
        is_named=functools.partial(says, cue=SSN_CUE),
        is_windowed=False,
    ),
    Number(
        "NATIONAL_ID",
        "drop",
        "⟨54362315K⟩",
        national_ids,
        invented.national_id,
        is_named=is_named,
        is_windowed=False,
    ),
    PiiType("CRYPTO", None, "⟨1A1zP1eP5QGefi2DMPTfTL5SLmv7DivfNa⟩", wallets, invented.wallet),
    PiiType(
        "EMAIL_ADDRESS",
        None,
        "⟨Ana.Lee@mail.python.org⟩",
        mails,
        invented.mail,
        is_reserved=invented.is_example_mail,
    ),
    PiiType(
        "IP_ADDRESS", None, "⟨93.184.215.14⟩", ip_addresses, invented.ip_address, has_digit=True
    ),
    Number(
        "PHONE_NUMBER",
        None,
        "⟨(212) 736-5000⟩",
        phones,
        invented.phone,
        is_windowed=False,
        is_reserved=invented.is_fictional_phone,
    ),
    PiiType(
        "DATE_OF_BIRTH",
        None,
        "born ⟨March 5th, 1984⟩",
        birth_dates,
        invented.birth_date,
        has_digit=True,
    ),
    Number(
        "LICENSE_PLATE",
        None,
        "license plate: ⟨7ABC-123⟩",
        plates,
        invented.same_form,
    ),
    PiiType(
        "MAC_ADDRESS",
        None,
        "⟨3c:22:fb:9a:10:7e⟩",
        mac_addresses,
        invented.mac_address,
        is_numbered=True,
    ),
    PiiType(
        "COORDINATES",
        None,
        "gps: ⟨40.712776, -74.005974⟩",
        coordinates,
        invented.coordinates,
        has_digit=True,
    ),
    PiiType("HANDLE", None, "Instagram ⟨@ana_lee.84⟩", handles, invented.handle, sign="@"),
    PiiType(
        "URL",
        "keep",
        "⟨https://www.python.org/downloads?x=1⟩",
        links,
        invented.link,
        is_windowed=False,
    ),
    PiiType(
        "STREET_ADDRESS",
        None,
        "send it to ⟨6750 Koskikatu 25 Apt. 864\nArtilleros, CO\nUruguay 64677⟩",
        surrogate=invented.address,
    ),
    PiiType("PERSON", None, "My name is ⟨Ada M. Berg⟩."),
    PiiType("LOCATION", "keep", "I live in ⟨New Delhi⟩", surrogate=invented.place),
)
BY_NAME = {one.name: one for one in PII_TYPES}
TYPES = tuple(BY_NAME)
RANK = {type: rank for rank, type in enumerate(TYPES)}
NAME_TYPES = tuple(one.name for one in PII_TYPES if one.find is None)


def canonical(type: str, value: str) -> str:
    """The form in which two mentions of a value are equal: folded, without case; of numbers without
    separators and, of telephone numbers, without the country's or the trunk's digits; of dates in
    digits the numbers, the year last.
    """
    value = plain(value).text.casefold()
    if type == "PHONE_NUMBER":
        return "x".join(filter(None, invented.phone_parts(value)[1:]))
    if type == "DATE_OF_BIRTH" and (parts := invented.date_parts(value)):
        return "/".join(parts)
    if BY_NAME[type].is_numbered:
        return "".join(letter for letter in value if letter.isalnum())
    return " ".join(value.removeprefix(BY_NAME[type].sign).split())


def value_hash(key: bytes, type: str, value: str) -> str:
    """16 hex digits, equal for equal values of a type under one key."""
    return keyed(key, "value", type, canonical(type, value)).hex()[:HASH_DIGITS]


def _by_default() -> str:
    actions: dict[str, list[str]] = {}
    for one in PII_TYPES:
        actions.setdefault(one.action or "as `policy` says", []).append(one.name.lower())
    return "; ".join(f"{action}: {', '.join(names)}" for action, names in actions.items())


class PrivacyConfig(BaseModel):
    """What to do with personal data and secrets, and what finds them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: Literal["surrogate", "mask", "drop"] = Field(
        default="surrogate", description="action for types that `actions` does not name"
    )
    actions: Mapping[str, Action] = Field(
        default={}, description=f"by type, in place of its default. {_by_default()}"
    )
    fictional: bool = Field(
        default=False, description="the people are invented: names and places are not searched for"
    )
    cloud_project: str | None = Field(
        default=None,
        description="ask Google Cloud DLP, paid by this project, in place of our own detectors: "
        "the texts leave this machine",
    )
    cloud_location: str = Field(default="global", description="where Cloud DLP runs")

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

    def action(self, type: str, has_cue: bool = True) -> Action:
        """What is done about a value. has_cue: whether a word beside it says what it is."""
        if self.fictional and type in NAME_TYPES:
            return "keep"
        by_default = BY_NAME[type].action if has_cue else None
        return self.actions.get(type) or by_default or self.policy

    @property
    def types(self) -> tuple[str, ...]:
        """What is searched for, by rank."""
        return tuple(type for type in TYPES if self.action(type) != "keep")

    def first_that_drops(self, values: Iterable[tuple[str, str, int, int]]) -> str | None:
        """The highest type that drops the row. values: type, text, and characters [start, end)."""
        dropping = [
            type
            for type, text, start, end in values
            if self.action(type) == "drop" == self.action(type, _has_cue(type, text, start, end))
        ]
        return min(dropping, key=RANK.__getitem__, default=None)


def _has_cue(type: str, text: str, start: int, end: int) -> bool:
    is_named = BY_NAME[type].is_named
    return is_named is None or bool(is_named(text, start, end))


EVERY_TYPE = PrivacyConfig(actions=dict.fromkeys(TYPES, "mask"))
# Answers may name public people and places; an address or a number that the conversation does not
# hold is real somewhere.
ANSWER_POLICY = PrivacyConfig(policy="drop", actions=dict.fromkeys(NAME_TYPES, "keep"))
