"""Texts with their findings masked or replaced by invented values, the same throughout a
conversation.

A surrogate is drawn from HMAC-SHA256(key, conversation, type, which of the type it is), never from
the value: it says nothing of what it hides, and texts that differ in their values alone become the
same text.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Callable, Iterable, Sequence

from eyas.privacy.findings import Finding, mask, replace
from eyas.privacy.invented import (
    CITIES,
    COUNTRIES,
    FAMILY,
    FEMALE_GIVEN,
    GIVEN,
    MALE_GIVEN,
    STATES,
    STREETS,
    KeyedRandom,
    fill_form,
    match_case,
    number_like,
    phone_parts,
)
from eyas.privacy.lexicon import FEMALE, MALE
from eyas.privacy.mentions import WORD, Names, name_key, stays
from eyas.privacy.pii import BY_NAME, PrivacyConfig, canonical
from eyas.privacy.spelling import plain

BETWEEN = "\x1e"  # record separator
LONG_NUMBER = 4  # digits
MOST_ATTEMPTS = 50  # before two words are joined to make one that is not taken


def clean(
    texts: Sequence[str], found: Sequence[Sequence[Finding]], config: PrivacyConfig, key: bytes
) -> list[str]:
    """Each text of one conversation without its findings, none of which is of a type that drops.

    A value has one surrogate in all the texts, drawn for the conversation as it reads with every
    value masked: conversations that differ in their values alone become the same one, but for the
    gender of given names, and are found to be duplicates.
    """
    conversation = BETWEEN.join(
        mask(text, findings) for text, findings in zip(texts, found, strict=True)
    )
    values = [
        (one.type, text[one.start : one.end])
        for text, findings in zip(texts, found, strict=True)
        for one in findings
    ]
    surrogates = Surrogates(key, conversation, values, texts)

    def replacement(type: str, value: str) -> str:
        action = config.action(type)
        if action == "drop":  # a number without a word that says what it is
            action = config.action(type, has_cue=False)
        assert action in ("mask", "surrogate"), f"{type} is not to be replaced"
        return f"<{type}>" if action == "mask" else surrogates.of(type, value)

    return [
        replace(
            text, findings, [replacement(one.type, text[one.start : one.end]) for one in findings]
        )
        for text, findings in zip(texts, found, strict=True)
    ]


class Surrogates:
    """The invented values of one conversation."""

    def __init__(
        self,
        key: bytes,
        conversation: str,
        values: Iterable[tuple[str, str]],
        texts: Sequence[str] = (),
    ) -> None:
        """conversation: tells it from others, such as its text without the values. values: type and
        value of all that will be replaced; none of them is ever invented. texts: where a person's
        gender may show.
        """
        values = list(values)
        self._key, self._conversation = key, conversation
        self._names = Names(texts, [value for type, value in values if type == "PERSON"])
        self._surrogates: dict[tuple[str, str], str] = {}
        self._taken = {
            part.casefold()
            for type, value in values
            for part in (
                canonical(type, value),
                *WORD.findall(value),
                *map(name_key, WORD.findall(value)),
            )
        }
        self._counts: dict[str, int] = {}

    def of(self, type: str, value: str) -> str:
        """The surrogate of this value, here and wherever it comes again."""
        value, kind = plain(value).text, BY_NAME[type]
        make = kind.surrogate
        if make is None:
            return self._worded(type, value)
        invented = self._surrogate(type, canonical(type, value), lambda draw: make(value, draw))
        if kind.is_numbered:
            stays = phone_parts(value)[0] if type == "PHONE_NUMBER" else ""
            return fill_form(stays + invented, value)
        return kind.sign + invented if kind.sign and value.startswith(kind.sign) else invented

    def _surrogate(self, kind: str, value: str, make: Callable[[KeyedRandom], str]) -> str:
        if (kind, value) not in self._surrogates:
            self._counts[kind] = ordinal = self._counts.get(kind, 0) + 1
            for attempt in itertools.count():
                draw = KeyedRandom(self._key, self._conversation, kind, str(ordinal), str(attempt))
                is_last = attempt >= MOST_ATTEMPTS
                invented = f"{make(draw)}{make(draw).lower()}" if is_last else make(draw)
                if invented.casefold() not in self._taken and (
                    is_last or not self._holds_value(invented)
                ):
                    break
            self._taken.add(invented.casefold())
            self._surrogates[kind, value] = invented
        return self._surrogates[kind, value]

    def _holds_value(self, invented: str) -> bool:
        """Whether a name or a longer number of the conversation is within it, such as the year of
        another date.
        """
        return any(
            self._names.knows(word)
            if word.isalpha()
            else len(word) >= LONG_NUMBER and word in self._taken
            for word in WORD.findall(invented)
        )

    def _worded(self, type: str, value: str) -> str:
        """Word by word, so that "Ada Berg" and, later, "Berg" are the same person; a place by
        itself is replaced whole.
        """
        if type == "LOCATION" and not any(letter.isdigit() for letter in value):
            return self._place(value)
        parts, end = list[str](), 0
        for match in WORD.finditer(value):
            parts += [
                value[end : match.start()],
                self._word(type, match.group(), match.start(), value),
            ]
            end = match.end()
        return "".join([*parts, value[end:]])

    def _place(self, value: str) -> str:
        name = " ".join(value.split())
        if name in STATES:
            return self._surrogate("word", name, lambda draw: draw.choice(STATES))
        pool = COUNTRIES if name.title() in COUNTRIES else CITIES
        return match_case(
            self._surrogate("word", name_key(name), lambda draw: draw.choice(pool)), value
        )

    def _word(self, type: str, word: str, start: int, value: str) -> str:
        if word.isdigit():
            return self._surrogate("number", word, lambda draw: number_like(word, draw))
        # Lane may be a street's kind and somebody's name
        if type == "PERSON" or not self._names.knows(word):
            is_short = type == "STREET_ADDRESS" and len(word) <= 2 and word not in STATES
            if stays(type, word) or is_short:
                return word
        if len(word) == 1:
            is_possessive = word in "sS" and value[:start].endswith("'")
            return word if is_possessive else match_case(self._initial(word.casefold()), word)
        if word in STATES and type == "STREET_ADDRESS":
            return self._surrogate("word", word, lambda draw: draw.choice(STATES))
        if type == "PERSON" or self._names.knows(word):
            return self._name(word)
        inner = bool(re.search(r"[,\n]", value[:start]))
        pool = STREETS if type == "STREET_ADDRESS" and not inner else CITIES
        return match_case(
            self._surrogate("word", name_key(word), lambda draw: draw.choice(pool)), word
        )

    def _name(self, word: str) -> str:
        """Of the name that the word is a form of, with the ending that it adds; given names keep
        their gender where it shows.
        """
        base, ending = self._names.base(word)
        pool = FAMILY
        if base not in self._names.family:
            gender = self._names.gender(base)
            pool = {FEMALE: FEMALE_GIVEN, MALE: MALE_GIVEN}.get(gender, GIVEN)
        name = self._surrogate("word", base, lambda draw: draw.choice(pool))
        return match_case(name + ending, word)

    def _initial(self, letter: str) -> str:
        """Of the word that it may stand for, where one came before."""
        words = (
            invented
            for (kind, value), invented in self._surrogates.items()
            if kind == "word" and value.startswith(letter)
        )
        return next(words, "")[:1] or self._surrogate(
            "initial", letter, lambda draw: draw.choice(string.ascii_uppercase)
        )
