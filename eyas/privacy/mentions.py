"""Every mention of the values that were found in a conversation, and which names are one person's.

A detector judges each place by itself: a name that it knows in one sentence it may miss in the
next, in capitals, in a file's name or in the possessive. Here the values are known, and their
places are looked for. The same search over what took their place shows whether one is left.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from importlib import resources

import yaml

from eyas.fold import fold
from eyas.privacy import lexicon
from eyas.privacy.findings import Finding, join_overlaps
from eyas.privacy.lexicon import FAMILY_COMMON, FEMALE, FOREIGN, GIVEN_COMMON, MALE, gazetteer
from eyas.privacy.pii import BY_NAME, canonical
from eyas.privacy.spelling import plain

_WORDS = yaml.safe_load(
    (resources.files("eyas.privacy") / "mentions.yaml").read_text(encoding="utf-8")
)
KEPT, TITLES, FORMAL, FEMALE_CUES, MALE_CUES = (
    frozenset(_WORDS[kind].split()) for kind in ("kept", "titles", "formal", "female", "male")
)
ENDINGS = ("", "s", "es")  # of a name: the Bergs, Annas

WORD = re.compile(r"[^\W\d_]+|\d+")
WORD_BEFORE = re.compile(r"([^\W\d_]+)[.,]?\s+$")
SENTENCE_START = re.compile(r"(?:\A|[.!?:\n]|[.!?][\"')])\s*[\"'(]?$")
SHE = re.compile(r"\b(?:she|hers?|herself)\b", re.I)
HE = re.compile(r"\b(?:he|him|his|himself)\b", re.I)
BESIDE = 24  # characters before a name in which a word for its gender counts
SHORTEST_STEM = 3  # letters of a name that its forms share
SHORTEST_VALUE = 4  # letters and digits; less is in too many texts by chance
SEPARATOR = r"[\W_]{0,3}"  # between the letters and digits of a number
# Classes of frequency of words that may be no name at a sentence's start, and of those that may be
# none even where they are a common given name, before such a word: "Will the ...", "May I ...".
COMMON, MOST_COMMON = 2, 1
SUBJECT = re.compile(
    r"\s+(?:he|she|it|they|you|we|i|the|there|this|that|these|those|his|her|its|their|my|your|our"
    r"|an?|any|all|be|not)\b",
    re.I,
)


def name_key(word: str) -> str:
    """The form in which two spellings of a word are equal: folded, small letters, no accents."""
    return lexicon.bare_word(fold(word).text)


def stays(type: str, word: str) -> bool:
    """Whether a word of a name or an address says only of which kind it is."""
    if type == "PERSON":
        return word.casefold() in TITLES or (word.islower() and word in KEPT)
    return word.casefold() in KEPT or word.casefold() in TITLES


def name_words(value: str) -> Iterator[str]:
    """The words of a person's name that are the name: no title, no particle, no initial, no
    possessive ending.
    """
    for match in WORD.finditer(fold(value).text):
        word = match.group()
        if len(word) > 1 and word.isalpha() and not stays("PERSON", word):
            yield word


class Mentions:
    """The values of a conversation, and their places in any text."""

    def __init__(self, texts: Sequence[str], found: Sequence[Sequence[Finding]]) -> None:
        """found: in each text, by place, without overlaps."""
        values = [
            (one, text[one.start : one.end])
            for text, findings in zip(texts, found, strict=True)
            for one in findings
        ]
        people = [(one, value) for one, value in values if one.type == "PERSON"]
        self.names = Names(texts, [value for _, value in people])
        self._hashes = {
            self.names.base(word)[0]: one.hash
            for one, value in reversed(people)
            for word in name_words(value)
        }
        self._written = {
            written: one
            for one, value in reversed(values)
            if one.type != "PERSON" and (written := _written(one.type, value))
        }

    def complete(
        self, texts: Sequence[str], found: Sequence[Sequence[Finding]]
    ) -> list[list[Finding]]:
        """The findings in each text, and every other mention of their values."""
        completed = []
        for text, findings in zip(texts, found, strict=True):
            taken = {place for one in findings for place in range(one.start, one.end)}
            more = [one for one in self.find(text) if taken.isdisjoint(range(one.start, one.end))]
            completed.append(join_overlaps([*findings, *more]))
        return completed

    def find(self, text: str) -> Iterator[Finding]:
        """The mentions in a text; they may overlap."""
        if self._written:
            spelt = plain(text)
            for written, one in self._written.items():
                for match in re.finditer(written, spelt.text):
                    start, end = spelt.span(*match.span())
                    yield dataclasses.replace(one, start=start, end=end)
        if self._hashes:
            folded = fold(text)
            for start, end in self.names.find(folded.text):
                base, _ = self.names.base(folded.text[start:end])
                yield Finding("PERSON", *folded.span(start, end), hash=self._hashes[base])


def _written(type: str, value: str) -> str:
    """A pattern of a value as it may be written elsewhere, "" for one that is too short."""
    # Reading and reading are two words
    key = fold(value).text if type == "LOCATION" else canonical(type, value)
    if type == "STREET_ADDRESS" and not any(
        word.isdigit() or (len(word) > 2 and not stays(type, word)) for word in WORD.findall(key)
    ):
        return ""
    if sum(map(str.isalnum, key)) < SHORTEST_VALUE:
        return ""
    if BY_NAME[type].is_numbered:
        between = SEPARATOR.join(map(re.escape, key))
        if type == "PHONE_NUMBER":  # with its country's or its trunk's digits, and without
            between = rf"(?:\+?\d{{1,3}}{SEPARATOR})?{between}"
    else:
        between = r"\s+".join(map(re.escape, key.split()))
    between = between if type == "LOCATION" else f"(?i:{between})"
    return rf"(?<![^\W_]){between}(?![^\W_])"


class Names:
    """The names of the people of one conversation: which words are forms of one name, which are
    family names, and what shows of their gender.
    """

    def __init__(self, texts: Sequence[str], values: Sequence[str]) -> None:
        """values: names as they were found, such as "Ada Berg" and "Ms. Berg's"."""
        self._text, self._values = "\n".join(texts), values
        self._bases: dict[str, str] = {}
        self._stems: dict[str, str] = {}
        words = [list(name_words(value)) for value in values]
        keys = {name_key(word) for some in words for word in some}
        for key in sorted(keys, key=lambda one: (len(one), one)):
            base = self._bases[key] = self._same_stem(key) or key
            for stem in _stems_of(key):
                self._stems.setdefault(stem, base)
        first = {self.base(some[0])[0] for some in words if len(some) > 1}
        last = {
            self.base(some[-1])[0]
            for some, value in zip(words, values, strict=True)
            if len(some) > 1 or (some and FORMAL.intersection(WORD.findall(value.casefold())))
        }
        self.family = last - first

    def base(self, word: str) -> tuple[str, str]:
        """The key of the name that a word is a form of, else its own; and the ending that it adds
        to that name.
        """
        key = name_key(word)
        base = self._bases.get(key) or self._same_stem(key) or key
        return base, key.removeprefix(base) if key.startswith(base) else ""

    def knows(self, word: str) -> bool:
        """Whether a word is one of the names, in any form."""
        key = name_key(word)
        return key in self._bases or bool(self._same_stem(key))

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """Where the names stand in a folded text: in any form with a capital, in small letters if
        they are no ordinary words.
        """
        for match in WORD.finditer(text):
            key = name_key(match.group())
            if key in self._bases:
                is_name = self._is_name(text, match, *_listed(key))
            else:
                is_name = match.group()[0].isupper() and self._is_form(text, match, key)
            if is_name:
                yield match.span()

    @staticmethod
    def _is_name(text: str, match: re.Match[str], bits: int, rank: int) -> bool:
        """Whether a word that is written like a name is one here."""
        if not match.group()[0].isupper():
            return not rank and not bits & FOREIGN and len(match.group()) > SHORTEST_STEM
        if not 0 < rank <= COMMON or not _starts_sentence(text, match):
            return True
        if not bits & GIVEN_COMMON:
            return False
        return rank > MOST_COMMON or not SUBJECT.match(text, match.end())

    def _is_form(self, text: str, match: re.Match[str], key: str) -> bool:
        """Whether a word with a capital is a form of a name, rather than a word of the language."""
        if not self._same_stem(key):
            return False
        bits, rank = _listed(key)
        is_word = 0 < rank <= COMMON and _starts_sentence(text, match)
        return not bits & FOREIGN and not is_word

    def gender(self, base: str) -> int:
        """FEMALE or MALE where it shows, else 0: by a title or a word such as "sister" before the
        name, by the word lists, by the pronouns of a conversation that has those of one gender.
        """
        listed = _listed(base)[0] & (FEMALE | MALE)
        return self._cued.get(base) or listed or self._by_pronouns

    @functools.cached_property
    def _cued(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for value in dict.fromkeys(self._values):
            cues = {word.casefold() for word in WORD.findall(value)}
            for place in re.finditer(rf"(?<!\w){re.escape(value)}", self._text):
                near = WORD_BEFORE.search(self._text, max(0, place.start() - BESIDE), place.start())
                cues |= {near[1].casefold()} if near else set()
            bits = FEMALE * bool(cues & FEMALE_CUES) | MALE * bool(cues & MALE_CUES)
            if bits in (FEMALE, MALE):
                found |= {self.base(word)[0]: bits for word in name_words(value)}
        return found

    @functools.cached_property
    def _by_pronouns(self) -> int:
        bits = FEMALE * bool(SHE.search(self._text)) | MALE * bool(HE.search(self._text))
        return bits if bits in (FEMALE, MALE) else 0

    def _same_stem(self, key: str) -> str:
        """The name with which a word shares a stem, or ""; a common name such as Roberts is no form
        of another.
        """
        if _listed(key)[0] & (GIVEN_COMMON | FAMILY_COMMON):
            return ""
        return next((self._stems[stem] for stem in _stems_of(key) if stem in self._stems), "")


def _stems_of(key: str) -> Iterator[str]:
    for ending in ENDINGS:
        stem = key.removesuffix(ending)
        if key.endswith(ending) and len(stem) >= SHORTEST_STEM:
            yield stem


def _listed(key: str) -> tuple[int, int]:
    """The bits of a word, and its class by how common it is in English; 0 = not listed."""
    return gazetteer().words.get(key, (0, 0))


def _starts_sentence(text: str, match: re.Match[str]) -> bool:
    return SENTENCE_START.search(text[max(0, match.start() - 8) : match.start()]) is not None
