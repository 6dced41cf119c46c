"""Every mention of the values that were found in a conversation, and which names are one name.

A detector may miss in one sentence a name that it knows in the next: in capitals, in a file's name,
in the possessive. The same search over what took their place shows whether one is left.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from importlib import resources

import yaml

from eyas.fold import fold
from eyas.privacy.findings import Finding, join_overlaps
from eyas.privacy.invented import date_parts
from eyas.privacy.pii import BY_NAME, canonical
from eyas.privacy.spelling import plain
from eyas.privacy.tagger import IS_SINGLE, MARKS, SINGLE, tagger

_WORDS = yaml.safe_load(
    (resources.files("eyas.privacy") / "mentions.yaml").read_text(encoding="utf-8")
)
KEPT, TITLES, FORMAL, WORDS = (
    frozenset(_WORDS[kind].split()) for kind in ("kept", "titles", "formal", "words")
)
LETTERS = str.maketrans(
    {"ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th",
     "æ": "ae", "œ": "oe", "ı": "i", "’": "'", "ə": "e"}
)  # fmt: skip
# Of a name: the Bergs, Annas; of cases, as `_bare` spells them
ENDINGS = ("", "s", "es", *"аеуыия", *["ои", "ою", "ом", "ым", "ем", "еи", "ею"])

# Of a script without spaces all that stands together is a word.
WORD = re.compile(rf"[{SINGLE}]+|[^\W\d_{SINGLE}](?:[^\W\d_{SINGLE}]|[{MARKS}])*|\d+")
SENTENCE_START = re.compile(r"(?:\A|[.!?:\n]|[.!?][\"')])\s*[\"'(]?$")
SHORTEST_STEM = 3  # letters of a name that its forms share
SHORTEST_VALUE = 4  # letters and digits; less is in texts by chance
SHORTEST_SINGLE = 2  # characters of a script without spaces
SEPARATOR = r"[\W_]{0,3}"  # between the letters and digits of a number
DATE_SIGN = r"[\W_]{1,3}"  # between the numbers of a date
SUBJECT = re.compile(
    r"\s+(?:he|she|it|they|you|we|i|the|there|this|that|these|those|his|her|its|their|my|your|our"
    r"|an?|any|all|be|not)\b",
    re.I,
)


@functools.lru_cache(1 << 16)
def _bare(word: str) -> str:
    if word.isascii():
        return word.lower()
    plain = unicodedata.normalize("NFKD", word.casefold().translate(LETTERS))
    return "".join(letter for letter in plain if not unicodedata.combining(letter))


def name_key(word: str) -> str:
    """The form in which two spellings of a word are equal: folded, small letters, no accents."""
    return _bare(fold(word).text)


def stays(word: str) -> bool:
    """Whether a word of a name is a title or a particle."""
    return word.casefold() in TITLES or (word.islower() and word in KEPT)


def is_single(value: str) -> bool:
    """Whether a name is of scripts without spaces alone, and found as a whole."""
    return all(map(IS_SINGLE.match, WORD.findall(value) or " "))


def name_words(value: str) -> Iterator[str]:
    """The words of a person's name without titles, particles, initials, possessive endings and what
    is of a script without spaces.
    """
    for match in WORD.finditer(fold(value).text):
        word = match.group()
        if len(word) > 1 and not (word.isdigit() or IS_SINGLE.match(word) or stays(word)):
            yield word


def whole_parts(type: str, value: str) -> Sequence[str]:
    """What of a value is found as a whole: of a name what no `Names` holds."""
    if type != "PERSON" or is_single(value):
        return [value]
    return [word for word in WORD.findall(value) if IS_SINGLE.match(word)]


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
        self.names = Names([value for _, value in people])
        self._hashes = {
            self.names.base(word)[0]: one.hash
            for one, value in reversed(people)
            for word in name_words(value)
        }
        self._written = {
            written: one
            for one, value in reversed(values)
            for part in whole_parts(one.type, value)
            if (written := _written(one.type, part))
        }

    def complete(
        self, texts: Sequence[str], found: Sequence[Sequence[Finding]]
    ) -> list[list[Finding]]:
        """The findings in each text and every other mention of their values."""
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
        word.isdigit() or (len(word) > 2 and word.casefold() not in KEPT)
        for word in WORD.findall(key)
    ):
        return ""
    if IS_SINGLE.search(key):
        return re.escape(key) if len(key) >= SHORTEST_SINGLE else ""
    if sum(map(str.isalnum, key)) < SHORTEST_VALUE:
        return ""
    if type == "DATE_OF_BIRTH" and (parts := date_parts(value)):
        numbers = [f"0?{one}" for one in parts]
        one, other, year = numbers
        orders = (numbers, (other, one, year), numbers[::-1])  # the year first, or as in the US
        between = f"(?:{'|'.join(map(DATE_SIGN.join, orders))})"
    elif BY_NAME[type].is_numbered:
        between = SEPARATOR.join(map(re.escape, key))
        if type == "PHONE_NUMBER":  # with its country's or its trunk's digits, and without
            between = rf"(?:\+?\d{{1,3}}{SEPARATOR})?{between}"
    else:
        between = r"\s+".join(map(re.escape, key.split()))
    between = between if type == "LOCATION" else f"(?i:{between})"
    if type == "HANDLE" and key.isalpha():  # /home/work: a word too, where it stands alone
        return rf"(?<=[/\\@]){between}(?![^\W_])|(?<![^\W_]){between}(?=@)"
    return rf"(?<![^\W_]){between}(?![^\W_])"


class Names:
    """The names of the people of one conversation: which words are forms of one name, which are
    family names.
    """

    def __init__(self, values: Sequence[str]) -> None:
        """values: names as they were found, such as "Ada Berg" and "Ms. Berg's"."""
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
        """The key of the name that a word is a form of, else its own; and the ending it adds."""
        key = name_key(word)
        base = self._bases.get(key) or self._same_stem(key) or key
        return base, key.removeprefix(base) if key.startswith(base) else ""

    def knows(self, word: str) -> bool:
        """Whether a word is a form of a name."""
        key = name_key(word)
        return key in self._bases or bool(self._same_stem(key))

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """Where the names stand in a folded text: in any form with a capital, in small letters if
        they are no ordinary words.
        """
        for match in WORD.finditer(text):
            key = name_key(match.group())
            if key in self._bases:
                is_name = self._is_name(text, match, key)
            else:
                is_name = match.group()[0].isupper() and self._is_form(text, match, key)
            if is_name:
                yield match.span()

    @staticmethod
    def _is_name(text: str, match: re.Match[str], key: str) -> bool:
        if match.group()[0].islower():
            return len(key) > SHORTEST_STEM and key not in WORDS and looks_like_name(key)
        if key not in WORDS or not _starts_sentence(text, match):
            return True
        return not SUBJECT.match(text, match.end())

    def _is_form(self, text: str, match: re.Match[str], key: str) -> bool:
        is_word = key in WORDS or self._same_stem(key) in WORDS
        return bool(self._same_stem(key)) and not (is_word and _starts_sentence(text, match))

    def _same_stem(self, key: str) -> str:
        return next((self._stems[stem] for stem in _stems_of(key) if stem in self._stems), "")


def _stems_of(key: str) -> Iterator[str]:
    for ending in ENDINGS:
        stem = key.removesuffix(ending)
        if key.endswith(ending) and len(stem) >= SHORTEST_STEM:
            yield stem


@functools.lru_cache(1 << 12)
def looks_like_name(word: str) -> bool:
    """Whether a word that stands alone may be a person's name, as the tagger sees it."""
    probabilities_L = tagger().probabilities([[word]])[0][0]
    return bool(4 * probabilities_L[1:3].sum() > probabilities_L[0])


def _starts_sentence(text: str, match: re.Match[str]) -> bool:
    return SENTENCE_START.search(text[max(0, match.start() - 8) : match.start()]) is not None
