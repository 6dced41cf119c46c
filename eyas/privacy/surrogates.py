"""Texts with their findings masked or replaced by invented values, the same throughout a
conversation. A surrogate is drawn from HMAC-SHA256(key, conversation, type, which of the type it
is), never from the value: it says nothing of what it hides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from eyas.privacy.findings import Finding, mask, replace
from eyas.privacy.invented import (
    KeyedRandom,
    fill_form,
    match_case,
    name_word,
    person,
    phone_parts,
)
from eyas.privacy.mentions import WORD, Names, is_single, name_key, stays
from eyas.privacy.pii import BY_NAME, PrivacyConfig, canonical
from eyas.privacy.spelling import plain

BETWEEN = "\x1e"  # record separator
LONG_NUMBER = 4  # digits
MOST_ATTEMPTS = 50  # before words are joined to make one that is not taken


def clean(
    texts: Sequence[str], found: Sequence[Sequence[Finding]], config: PrivacyConfig, key: bytes
) -> list[str]:
    """Each text of one conversation without its findings, none of which drops the row.

    A surrogate is drawn for the conversation with every value masked: conversations that differ in
    their values alone become the same one, and are found to be duplicates.
    """
    conversation = BETWEEN.join(
        mask(text, findings) for text, findings in zip(texts, found, strict=True)
    )
    values = [
        (one.type, text[one.start : one.end])
        for text, findings in zip(texts, found, strict=True)
        for one in findings
    ]
    surrogates = Surrogates(key, conversation, values)

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

    def __init__(self, key: bytes, conversation: str, values: Iterable[tuple[str, str]]) -> None:
        """conversation: tells it from others. values: type and value of all that will be replaced;
        none of them is ever invented.
        """
        values = list(values)
        self._key, self._conversation = key, conversation
        self._names = Names([value for type, value in values if type == "PERSON"])
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
        """The surrogate of a value, the same wherever it comes again."""
        value, kind = plain(value).text, BY_NAME[type]
        make = kind.surrogate
        if make is None:
            return self._person(value)
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
                # from there on one more word each time, so that no pool is exhausted
                joined = max(0, attempt - MOST_ATTEMPTS + 1)
                invented = make(draw) + "".join(make(draw).lower() for _ in range(joined))
                if invented.casefold() not in self._taken and (
                    joined or not self._holds_value(invented)
                ):
                    break
            self._taken.add(invented.casefold())
            self._surrogates[kind, value] = invented
        return self._surrogates[kind, value]

    def _holds_value(self, invented: str) -> bool:
        """Whether it holds a name or a longer number of the conversation, as the year of a date."""
        return any(
            len(word) >= LONG_NUMBER and word in self._taken
            if word.isdigit()
            else self._names.knows(word)
            for word in WORD.findall(invented)
        )

    def _person(self, value: str) -> str:
        """Word by word, so that "Ada Berg" and, later, "Berg" are the same person."""
        if is_single(value):
            return self._surrogate("word", value, lambda draw: person(value, draw))
        parts, end = list[str](), 0
        for match in WORD.finditer(value):
            parts += [value[end : match.start()], self._word(match.group(), value[: match.start()])]
            end = match.end()
        return "".join([*parts, value[end:]])

    def _word(self, word: str, before: str) -> str:
        if stays(word) or (word in "sS" and before.endswith("'")):
            return word
        if word.isdigit():
            return self._surrogate("number", word, lambda draw: draw.like(word))
        if is_single(word):
            return self._surrogate("word", word, lambda draw: person(word, draw))
        base, ending = self._names.base(word)
        is_family = base in self._names.family
        name = self._surrogate("word", base, lambda draw: name_word(word, is_family, draw))
        return name[:1].upper() if len(word) == 1 else match_case(name + ending, word)
