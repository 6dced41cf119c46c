"""Personal data and secrets in a text: by type and place, without overlaps, each value with a keyed
hash.

Knows what searches a text: our functions, Presidio's recognisers of mail, IBAN and IP, an installed
recogniser of names, Google Cloud DLP. The only file that loads Presidio, and with it spaCy. Loads
no model and opens no connection unless the config names one. Knows nothing of what is done about a
finding.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import spacy
import tldextract
from presidio_analyzer import EntityRecognizer
from presidio_analyzer.predefined_recognizers import (
    EmailRecognizer,
    HuggingFaceNerRecognizer,
    IbanRecognizer,
    IpRecognizer,
)

from eyas.errors import ConfigError
from eyas.privacy import entities
from eyas.privacy.cloud import INFO_TYPES, CloudDlp
from eyas.privacy.identifiers import national_ids
from eyas.privacy.key import canonical, value_hash
from eyas.privacy.patterns import cards, links, phones, social_security_numbers, wallets
from eyas.privacy.policy import ANSWER_POLICY, Finding, PrivacyConfig, join_overlaps
from eyas.privacy.secrets import api_keys, passwords, private_keys
from eyas.privacy.surrogates import is_fictional

# Characters: patterns search long texts in pieces that overlap by more than any value is long.
WINDOW, OVERLAP = 2000, 250
LIBRARIES = ("presidio-analyzer", "phonenumbers", "python-stdnum", "detect-secrets", "tldextract")

MAYBE_MAIL = re.compile("@")
MAYBE_IBAN = re.compile(r"[A-Za-z]{2}\d\d")
MAYBE_IP = re.compile(r"\d\.\d{1,3}\.\d{1,3}\.\d|[0-9a-fA-F]?:[0-9a-fA-F]{0,4}:")
ANY_TEXT = re.compile("")
WEAKEST = 0.4  # Presidio's score below which it wants a pattern confirmed by words beside it
NER_SCORE = 0.5  # least score of a transformers model

# Labels of the usual models (OntoNotes, CoNLL, WikiNER, and sets made for personal data). Others
# are ignored.
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
        self._types = frozenset(config.types) - frozenset(known_there)
        self._searches = [
            search for search in searches(config.ner) if not self._types.isdisjoint(search.types)
        ]

    def find(self, text: str) -> list[Finding]:
        """What is in a text, by place."""
        return self.find_all([text])[0]

    def find_all(self, texts: Sequence[str]) -> list[list[Finding]]:
        """What is in each text. Cloud DLP is sent many texts in one request."""
        found = self._cloud(texts) if self._cloud else [[] for _ in texts]
        return [
            self._hashed(text, join_overlaps([*findings, *self._find_here(text)]))
            for text, findings in zip(texts, found, strict=True)
        ]

    def _find_here(self, text: str) -> Iterator[Finding]:
        for search in self._searches:
            yield from (one for one in search(text) if one.type in self._types)

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
def searches(ner: str | None) -> tuple[TextSearch, ...]:
    """All searches, made once a process for each setting. ner: see PrivacyConfig."""

    def find_entities(text: str) -> Iterator[Finding]:
        return (Finding(one.type, one.start, one.end) for one in entities.find_entities(text))

    found = [
        TextSearch(presidio(Emails(), MAYBE_MAIL), ("EMAIL_ADDRESS",)),
        TextSearch(presidio(Ibans(), MAYBE_IBAN), ("IBAN_CODE",)),
        TextSearch(presidio(IpAddresses(), MAYBE_IP), ("IP_ADDRESS",)),
        TextSearch(cards, ("CREDIT_CARD",)),
        TextSearch(social_security_numbers, ("US_SSN",)),
        TextSearch(national_ids, ("NATIONAL_ID",)),
        TextSearch(phones, ("PHONE_NUMBER",)),
        TextSearch(wallets, ("CRYPTO",)),
        TextSearch(links, ("URL", "URL_CREDENTIALS"), is_windowed=False),
        TextSearch(api_keys, ("API_KEY",), is_windowed=False),
        TextSearch(passwords, ("PASSWORD",), is_windowed=False),
        TextSearch(private_keys, ("PRIVATE_KEY",), is_windowed=False),
        TextSearch(find_entities, entities.TYPES, is_windowed=False),
    ]
    if ner is not None:
        found.append(TextSearch(ner_search(ner), entities.TYPES, is_windowed=False))
    return tuple(found)


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


class Ibans(IbanRecognizer):  # type: ignore[misc]
    """Presidio's, in either case; letters beyond ASCII would make it log the value."""

    def __init__(self) -> None:
        super().__init__(regex_flags=re.IGNORECASE)

    def validate_result(self, pattern_text: str) -> bool | None:
        valid: bool | None = (
            super().validate_result(pattern_text) if pattern_text.isascii() else False
        )
        return valid


class IpAddresses(IpRecognizer):  # type: ignore[misc]
    """Presidio's, without private, local and documentation addresses, which identify nobody, and
    without names such as `bad::cafe`.
    """

    def invalidate_result(self, pattern_text: str) -> bool:
        if super().invalidate_result(pattern_text) or not re.search(r"\d", pattern_text):
            return True
        return not ipaddress.ip_interface(pattern_text).ip.is_global


def ner_search(name: str) -> Search:
    """The installed recogniser that `spacy:NAME` or `transformers:FOLDER` names, loaded.

    Downloads nothing: raises ConfigError when it is not installed.
    """
    kind, _, model = name.partition(":")
    if kind == "spacy" and model:
        return _spacy(model)
    if kind == "transformers" and model:
        return _transformers(model)
    raise ConfigError(f"no recogniser is called {name!r}", "give spacy:NAME or transformers:FOLDER")


def _spacy(name: str) -> Search:
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

    return find


def _transformers(folder: str) -> Search:
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(
            f"no model at {folder}",
            "give the folder of a token-classification model; eyas downloads none",
        )
    try:
        recognizer = HuggingFaceNerRecognizer(
            model_name=folder, label_mapping=NER_LABELS, threshold=NER_SCORE, device="cpu"
        )
        recognizer.load()
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(
            f"transformers cannot load {folder} for names",
            f"{type(error).__name__}: see its config.json",
        ) from error
    return presidio(recognizer, ANY_TEXT)
