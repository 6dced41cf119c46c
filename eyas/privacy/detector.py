"""Personal data and secrets in a text: by type and place, without overlaps, each value with a keyed
hash.

Knows what searches a text: our functions, Presidio's recognisers of mail and IP, an installed
recogniser of names, Google Cloud DLP. The only file that loads Presidio, and with it spaCy. Loads
no model and opens no connection unless the config names one. Knows nothing of what is done about a
finding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import spacy
import tldextract
from presidio_analyzer import EntityRecognizer
from presidio_analyzer.predefined_recognizers import (
    EmailRecognizer,
    GLiNERRecognizer,
    HuggingFaceNerRecognizer,
    IpRecognizer,
)

from eyas.errors import ConfigError
from eyas.fold import fold
from eyas.language import codes
from eyas.privacy import entities
from eyas.privacy.attributes import (
    birth_dates,
    coordinates,
    handles,
    mac_addresses,
    number_plates,
)
from eyas.privacy.cloud import INFO_TYPES, CloudDlp
from eyas.privacy.identifiers import national_ids
from eyas.privacy.key import canonical, value_hash
from eyas.privacy.passages import Passage, passages
from eyas.privacy.patterns import (
    accounts,
    cards,
    links,
    phones,
    social_security_numbers,
    wallets,
)
from eyas.privacy.policy import (
    ANSWER_POLICY,
    ANY_LANGUAGE,
    NAME_TYPES,
    Finding,
    NameSearch,
    PrivacyConfig,
    join_overlaps,
)
from eyas.privacy.secrets import api_keys, passwords, private_keys
from eyas.privacy.spelling import plain
from eyas.privacy.surrogates import is_fictional

# Characters: patterns search long texts in pieces that overlap by more than any value is long.
WINDOW, OVERLAP = 2000, 250
LIBRARIES = ("presidio-analyzer", "phonenumbers", "python-stdnum", "detect-secrets", "tldextract")

MAYBE_MAIL = re.compile("@")
MAYBE_IP = re.compile(r"\d\.\d{1,3}\.\d{1,3}\.\d|[0-9a-fA-F]?:[0-9a-fA-F]{0,4}:")
ANY_TEXT = re.compile("")
WEAKEST = 0.4  # Presidio's score below which it wants a pattern confirmed by words beside it
NO_SPACE = re.compile(r"\S")
CLOUD = "cloud_dlp"
NER_SCORE = 0.5  # least score of a transformers model

# Labels of the usual models (OntoNotes, CoNLL, WikiNER, OpenAI's Privacy Filter, and sets made for
# personal data). Others are ignored: what has a form is found by patterns.
NER_LABELS = {
    "PERSON": "PERSON",
    "PER": "PERSON",
    "NAME": "PERSON",
    "GIVENNAME": "PERSON",
    "SURNAME": "PERSON",
    "LOCATION": "LOCATION",
    "LOC": "LOCATION",
    "GPE": "LOCATION",
    "FAC": "LOCATION",
    "CITY": "LOCATION",
    "COUNTRY": "LOCATION",
    "STREET_ADDRESS": "STREET_ADDRESS",
    "STREET": "STREET_ADDRESS",
    "ADDRESS": "STREET_ADDRESS",
    "FIRSTNAME": "PERSON",
    "LASTNAME": "PERSON",
    "MIDDLENAME": "PERSON",
    "PRIVATE_PERSON": "PERSON",
    "PERSNAME": "PERSON",  # Polish pipelines of spaCy
    "PLACENAME": "LOCATION",
    "GEOGNAME": "LOCATION",
    "PRS": "PERSON",  # Swedish ones
    "STATE": "LOCATION",
    "PRIVATE_ADDRESS": "STREET_ADDRESS",
    "BUILDINGNUM": "STREET_ADDRESS",
    "ZIPCODE": "STREET_ADDRESS",
}
# What a GLiNER model is asked for, in the words that its PII models are trained on.
GLINER_LABELS = {
    "person": "PERSON",
    "name": "PERSON",
    "address": "STREET_ADDRESS",
    "street address": "STREET_ADDRESS",
    "city": "LOCATION",
    "location": "LOCATION",
}

Search = Callable[[str], Iterable[Finding]]


class Detector:
    """Finds the types that the policy does not keep. Never keeps, logs or raises what it found."""

    def __init__(self, config: PrivacyConfig, key: bytes = b"") -> None:
        """key: for the findings' hashes; without one they have none. Raises ConfigError for a
        recogniser or a service that is not there.
        """
        self._key = key
        self._cloud = CloudDlp(config) if config.cloud_project is not None else None
        known_there = INFO_TYPES.values() if self._cloud else ()
        self._wanted = frozenset(config.types)
        self._types = self._wanted - frozenset(known_there)
        self._not_searched = "fictional" if config.fictional else "policy"
        self._searches = [
            search for search in searches() if not self._types.isdisjoint(search.types)
        ]
        self._recognisers = recognisers(config.recognisers)

    def find(self, text: str) -> list[Finding]:
        """What is in a text that stands alone, by place."""
        return self.find_all([text])[0]

    def find_all(
        self, texts: Sequence[str], parts: Sequence[Sequence[Passage]] | None = None
    ) -> list[list[Finding]]:
        """What is in each text. Cloud DLP is sent many texts in one request.

        parts: the passages of each text; None = the texts are one conversation.
        """
        parts = passages(texts) if parts is None else parts
        found = self._cloud(texts) if self._cloud else [[] for _ in texts]
        return [
            self._hashed(text, join_overlaps(self._find_here(text, of_text, findings)))
            for text, of_text, findings in zip(texts, parts, found, strict=True)
        ]

    def name_searches(self, parts: Iterable[Passage]) -> tuple[NameSearch, ...]:
        """Where names are searched for in a row with these passages, the same for each."""
        characters = Counter[tuple[str, str, str]]()
        for one in parts:
            by = self._searched_by(one)
            characters[one.language, by, "" if by else self._reason(one)] += one.end - one.start
        return tuple(NameSearch(*part, count) for part, count in sorted(characters.items()))

    def _searched_by(self, part: Passage) -> str:
        if part.is_code or self._wanted.isdisjoint(NAME_TYPES):
            return ""
        cloud = [CLOUD] if self._cloud else []
        return "+".join([*cloud, *(one.name for one in self._knowing(part.language))])

    def _reason(self, part: Passage) -> str:
        if self._wanted.isdisjoint(NAME_TYPES):
            return self._not_searched
        return "code" if part.is_code else "language"

    def _knowing(self, language: str) -> Iterator[NameRecogniser]:
        if not self._types.isdisjoint(NAME_TYPES):
            yield from (one for one in self._recognisers if one.knows(language))

    def _find_here(
        self, text: str, parts: Sequence[Passage], from_cloud: Sequence[Finding]
    ) -> Iterator[Finding]:
        prose = [one for one in parts if not one.is_code]
        yield from (one for one in from_cloud if one.type not in NAME_TYPES)
        yield from within((one for one in from_cloud if one.type in NAME_TYPES), prose)
        spelt = plain(text)
        for search in self._searches:
            for one in search(spelt.text):
                if one.type in self._types:
                    yield Finding(one.type, *spelt.span(one.start, one.end))
        if self._types.isdisjoint(NAME_TYPES):
            return
        for recogniser in self._recognisers:
            known = [one for one in prose if recogniser.knows(one.language)]
            if known:
                found = recogniser.find(only(text, known))
                yield from within((one for one in found if one.type in self._types), known)

    def _hashed(self, text: str, findings: list[Finding]) -> list[Finding]:
        if not self._key:
            return findings
        return [
            dataclasses.replace(
                one, hash=value_hash(self._key, one.type, text[one.start : one.end])
            )
            for one in findings
        ]


class LeakDetector:
    """Finds personal data and secrets in a model's answer that the conversation before it does not
    hold.

    Every type that the config does not keep counts, whatever its action. Values that are set aside
    for examples (example.com, 555-01xx, test cards) do not count.
    """

    def __init__(self, config: PrivacyConfig = ANSWER_POLICY) -> None:
        self._detector = Detector(config)

    def __call__(self, before: Sequence[str], answer: str) -> list[Finding]:
        """By place in the answer, without hashes. before: the texts of all messages before it."""
        found = [
            one
            for one in self._detector.find(answer)
            if not is_fictional(one.type, answer[one.start : one.end])
        ]
        if not found:
            return []
        context = "\n".join(before)
        known = {
            canonical(one.type, context[one.start : one.end])
            for one in self._detector.find(context)
        }
        return [
            one
            for one in found
            if answer[one.start : one.end] not in context
            and canonical(one.type, answer[one.start : one.end]) not in known
        ]


def versions() -> dict[str, str]:
    """Of the libraries whose patterns and lists decide what is found: they change with time, and
    findings with them.
    """
    return {name: metadata.version(name) for name in LIBRARIES}


# What searches a text in this process


@dataclasses.dataclass(frozen=True, slots=True)
class TextSearch:
    """A function that finds values of these types.

    is_windowed: long texts are searched in pieces, so that time grows with the length only. Some
    patterns take its square, and Presidio gives a pattern up after a minute with no more than a
    line in the log. Keys may be longer than a piece, and names are found again by what else the
    text holds: those see the whole text, in time that grows with the length only.
    """

    find: Search
    types: tuple[str, ...]
    is_windowed: bool = True

    def __call__(self, text: str) -> Iterator[Finding]:
        """Findings in any order; they may overlap, and come twice where pieces do."""
        if not self.is_windowed or len(text) <= WINDOW + OVERLAP:
            yield from self.find(text)
            return
        for start in range(0, len(text) - OVERLAP, WINDOW):
            for one in self.find(text[start : start + WINDOW + OVERLAP]):
                yield Finding(one.type, start + one.start, start + one.end)


@functools.cache
def searches() -> tuple[TextSearch, ...]:
    """The searches for what has a form, in any language, made once a process."""
    return (
        TextSearch(presidio(Emails(), MAYBE_MAIL), ("EMAIL_ADDRESS",)),
        TextSearch(accounts, ("IBAN_CODE",)),
        TextSearch(presidio(IpAddresses(), MAYBE_IP), ("IP_ADDRESS",)),
        TextSearch(cards, ("CREDIT_CARD",)),
        TextSearch(social_security_numbers, ("US_SSN",)),
        TextSearch(national_ids, ("NATIONAL_ID",)),
        TextSearch(phones, ("PHONE_NUMBER",)),
        TextSearch(wallets, ("CRYPTO",)),
        TextSearch(birth_dates, ("DATE_OF_BIRTH",)),
        TextSearch(number_plates, ("LICENSE_PLATE",)),
        TextSearch(mac_addresses, ("MAC_ADDRESS",)),
        TextSearch(coordinates, ("COORDINATES",)),
        TextSearch(handles, ("HANDLE",)),
        TextSearch(links, ("URL", "URL_CREDENTIALS"), is_windowed=False),
        TextSearch(api_keys, ("API_KEY",), is_windowed=False),
        TextSearch(passwords, ("PASSWORD",), is_windowed=False),
        TextSearch(private_keys, ("PRIVATE_KEY",), is_windowed=False),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class NameRecogniser:
    """Finds NAME_TYPES in texts of the languages that it knows; None: all."""

    name: str
    find: Search
    languages: frozenset[str] | None = None

    def knows(self, language: str) -> bool:
        return self.languages is None or language in self.languages


@functools.cache
def recognisers(ner: tuple[tuple[str, str], ...]) -> tuple[NameRecogniser, ...]:
    """Ours, for English, and installed ones. ner: see `PrivacyConfig.recognisers`. Raises
    ConfigError.
    """

    def find_entities(text: str) -> Iterator[Finding]:
        folded = fold(text)
        for one in entities.find_entities(folded.text):
            yield Finding(one.type, *folded.span(one.start, one.end))

    ours = NameRecogniser("eyas", find_entities, frozenset({"en"}))
    unknown = sorted({language for language, _ in ner} - codes() - {ANY_LANGUAGE})
    if unknown:
        raise ConfigError(
            f"`ner` has a recogniser for {unknown[0]!r}, which is no language here",
            f"one of {', '.join(sorted(codes()))}",
        )
    others = (
        installed(name)
        if language == ANY_LANGUAGE
        else dataclasses.replace(installed(name), languages=frozenset({language}))
        for language, name in ner
    )
    return (ours, *others)


def only(text: str, parts: Iterable[Passage]) -> str:
    """The text with spaces in place of what lies outside its passages; line ends stay."""
    made, end = [], 0
    for one in parts:
        made += [NO_SPACE.sub(" ", text[end : one.start]), text[one.start : one.end]]
        end = one.end
    return "".join([*made, NO_SPACE.sub(" ", text[end:])])


def within(findings: Iterable[Finding], parts: Sequence[Passage]) -> Iterator[Finding]:
    """What of the findings lies in the passages."""
    for finding in findings:
        for one in parts:
            start, end = max(finding.start, one.start), min(finding.end, one.end)
            if start < end:
                yield dataclasses.replace(finding, start=start, end=end)


def presidio(recognizer: EntityRecognizer, maybe: re.Pattern[str]) -> Search:
    """A recogniser of Presidio as a search. maybe: a cheap look at the text before it."""

    def find(text: str) -> Iterator[Finding]:
        if maybe.search(text):
            for one in recognizer.analyze(text, recognizer.supported_entities, None):
                if one.score >= WEAKEST:
                    yield Finding(one.entity_type, one.start, one.end)

    return find


class Emails(EmailRecognizer):  # type: ignore[misc]
    """Presidio's, with the installed list of public suffixes in place of one fetched and cached."""

    _extract = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)

    def validate_result(self, pattern_text: str) -> bool:
        return bool(self._extract(pattern_text).suffix)


class IpAddresses(IpRecognizer):  # type: ignore[misc]
    """Presidio's, without private, local and documentation addresses, which identify nobody, and
    without names such as `bad::cafe`.
    """

    def invalidate_result(self, pattern_text: str) -> bool:
        if super().invalidate_result(pattern_text) or not re.search(r"\d", pattern_text):
            return True
        return not ipaddress.ip_interface(pattern_text).ip.is_global


@functools.cache
def installed(name: str) -> NameRecogniser:
    """The installed recogniser that `spacy:NAME`, `transformers:FOLDER` or `gliner:FOLDER` names,
    loaded.

    Downloads nothing: raises ConfigError when it is not installed.
    """
    kind, _, model = name.partition(":")
    if kind not in LOADERS or not model:
        raise ConfigError(
            f"no recogniser is called {name!r}",
            "give spacy:NAME, transformers:FOLDER or gliner:FOLDER",
        )
    find, languages = LOADERS[kind](model)
    return NameRecogniser(name, find, languages)


def _spacy(name: str) -> tuple[Search, frozenset[str] | None]:
    try:
        pipeline: Any = spacy.load(name)
    except OSError as error:
        raise ConfigError(
            f"spaCy has no pipeline {name!r} here",
            "install it (python -m spacy download ...) or give its folder; eyas downloads none",
        ) from error

    def find(text: str) -> Iterator[Finding]:
        for entity in pipeline(text).ents:
            if type := NER_LABELS.get(entity.label_.upper()):
                yield Finding(type, entity.start_char, entity.end_char)

    return find, None if pipeline.lang == "xx" else frozenset({pipeline.lang})


def _transformers(folder: str) -> tuple[Search, None]:
    _require(folder, "config.json", "a token-classification model, such as OpenAI's Privacy Filter")
    labels = NER_LABELS | {label.lower(): type for label, type in NER_LABELS.items()}
    with _loading("transformers", folder):
        recognizer = HuggingFaceNerRecognizer(
            model_name=folder,
            label_mapping=labels,
            label_prefixes=[f"{part}-" for part in "BIESLU"],
            threshold=NER_SCORE,
            device="cpu",
        )
        recognizer.load()
    return presidio(recognizer, ANY_TEXT), None


def _gliner(folder: str) -> tuple[Search, None]:
    _require(folder, "gliner_config.json", "a GLiNER model, such as gliner_multi_pii-v1")
    with _loading("gliner (pip install gliner)", folder):
        recognizer = GLiNERRecognizer(
            model_name=folder,
            entity_mapping=GLINER_LABELS,
            threshold=NER_SCORE,
            map_location="cpu",
            local_files_only=True,
        )
        recognizer.load()
    return presidio(recognizer, ANY_TEXT), None


LOADERS: dict[str, Callable[[str], tuple[Search, frozenset[str] | None]]] = {
    "spacy": _spacy,
    "transformers": _transformers,
    "gliner": _gliner,
}


def _require(folder: str, file: str, what: str) -> None:
    if not (Path(folder) / file).is_file():
        raise ConfigError(
            f"no model at {folder}", f"give the folder of {what}; eyas downloads none"
        )


@contextlib.contextmanager
def _loading(library: str, folder: str) -> Iterator[None]:
    try:
        yield
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"{library} cannot load {folder} for names",
            f"{type(error).__name__}: see its config, and that the library is installed",
        ) from error
