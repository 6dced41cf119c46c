"""Personal data and secrets in a text: by type and place, without overlaps, each value with a keyed
hash.

Knows which recognisers Presidio's engine runs and how long texts are cut for it. Knows no
recogniser's way of working, and nothing of what is done about a finding. No model is loaded and no
connection opened unless the config names one: Presidio runs on its built-in engine that does
nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Protocol

from presidio_analyzer import AnalyzerEngine, EntityRecognizer, RecognizerRegistry
from presidio_analyzer.nlp_engine import NoOpNlpEngine

from eyas.privacy import entities
from eyas.privacy.cloud import INFO_TYPES, CloudDlp
from eyas.privacy.finding import Finding
from eyas.privacy.identifiers import national_ids
from eyas.privacy.key import value_hash
from eyas.privacy.ner import ner_recognizer
from eyas.privacy.patterns import Emails, Ibans, IpAddresses, cards, links, social_security_numbers
from eyas.privacy.phones import phones
from eyas.privacy.policy import RANK, TYPES, PrivacyConfig
from eyas.privacy.recognizer import Recognizer
from eyas.privacy.secrets import api_keys, passwords, private_keys
from eyas.privacy.wallets import wallets

# characters; long texts are searched in pieces that share more than any value needs
WINDOW, OVERLAP = 2000, 250
WHOLE_TYPES = (
    "PRIVATE_KEY",
    "API_KEY",
    "PASSWORD",
    "URL_CREDENTIALS",
    "URL",
    "STREET_ADDRESS",
    "PERSON",
    "LOCATION",
)
LIBRARIES = ("presidio-analyzer", "phonenumbers", "python-stdnum", "detect-secrets", "tldextract")


class Search(Protocol):
    """What finds: our own recognisers or a service."""

    def __call__(self, texts: Sequence[str]) -> list[list[Finding]]:
        """Places by type for each text, in any order; they may overlap."""
        ...


class Detector:
    """Finds what the policy wants found. Never keeps, logs or raises what it found."""

    def __init__(self, config: PrivacyConfig, key: bytes = b"") -> None:
        """key: for the findings' hashes; without one they have none. Raises ConfigError for a
        backend that is not there.
        """
        self._key = key
        local = LocalSearch(config.types, config)
        self._search: Search = local
        if config.backend == "cloud":
            rest = tuple(type for type in config.types if type not in INFO_TYPES.values())
            self._search = Both(CloudDlp(config), LocalSearch(rest, config))
        self._every = LocalSearch(TYPES, config)

    def find(self, text: str) -> list[Finding]:
        """What is in a text, by place."""
        return self.find_all([text])[0]

    def find_all(self, texts: Sequence[str]) -> list[list[Finding]]:
        """What is in each text; many at once are what a service is asked about in one request."""
        found = self._search(texts)
        return [
            self._hashed(text, merged(findings))
            for text, findings in zip(texts, found, strict=True)
        ]

    def find_every(self, text: str) -> list[Finding]:
        """All types whatever the policy, found in this process: for what people are shown of a
        text.
        """
        return merged(self._every([text])[0])

    def _hashed(self, text: str, findings: list[Finding]) -> list[Finding]:
        if not self._key:
            return findings
        return [
            dataclasses.replace(
                one, hash=value_hash(self._key, one.type, text[one.start : one.end])
            )
            for one in findings
        ]


class LocalSearch:
    """Presidio's engine with our recognisers, in this process."""

    def __init__(self, types: Sequence[str], config: PrivacyConfig) -> None:
        self._types = list(types)
        self._engine = _engine(config.names, config.ner, config.ner_score)

    def __call__(self, texts: Sequence[str]) -> list[list[Finding]]:
        return [self._find(text) for text in texts]

    def _find(self, text: str) -> list[Finding]:
        """In pieces, so that time grows with the length only: Presidio's patterns can take its
        square, and past a minute it gives a pattern up with no more than a line in the log. Keys
        may be longer than a piece, and names are found again by what else the text holds; what
        finds them takes time that grows with the length only.
        """
        if len(text) <= WINDOW + OVERLAP:
            return self._run(text, 0, self._types)
        findings = self._run(text, 0, [type for type in self._types if type in WHOLE_TYPES])
        rest = [type for type in self._types if type not in WHOLE_TYPES]
        for start in range(0, len(text) - OVERLAP, WINDOW):
            findings += self._run(text[start : start + WINDOW + OVERLAP], start, rest)
        return findings

    def _run(self, piece: str, offset: int, types: list[str]) -> list[Finding]:
        if not types or not piece:
            return []
        results = self._engine.analyze(piece, language="en", entities=types, score_threshold=0.0)
        return [
            Finding(result.entity_type, offset + result.start, offset + result.end)
            for result in results
        ]


class Both:
    """Two searches as one."""

    def __init__(self, first: Search, second: Search) -> None:
        self._first, self._second = first, second

    def __call__(self, texts: Sequence[str]) -> list[list[Finding]]:
        return [
            [*one, *other]
            for one, other in zip(self._first(texts), self._second(texts), strict=True)
        ]


@functools.cache
def _engine(names: float, ner: str | None, ner_score: float) -> AnalyzerEngine:
    """One for all that ask alike. Given both parts, it neither looks for a model to download nor
    brings recognisers along.
    """
    recognizers: list[EntityRecognizer] = [
        Emails(),
        Ibans(),
        IpAddresses(),
        Recognizer(cards, "CREDIT_CARD"),
        Recognizer(social_security_numbers, "US_SSN"),
        Recognizer(national_ids, "NATIONAL_ID"),
        Recognizer(phones, "PHONE_NUMBER"),
        Recognizer(wallets, "CRYPTO"),
        Recognizer(links, "URL", "URL_CREDENTIALS"),
        Recognizer(api_keys, "API_KEY"),
        Recognizer(passwords, "PASSWORD"),
        Recognizer(private_keys, "PRIVATE_KEY"),
    ]
    recognizers += entities.recognizers(names)
    if ner is not None:
        recognizers.append(ner_recognizer(ner, ner_score))
    nothing = NoOpNlpEngine([{"lang_code": "en", "model_name": "none"}])
    return AnalyzerEngine(registry=RecognizerRegistry(recognizers), nlp_engine=nothing)


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings by place, overlapping ones joined under the type of the highest rank, so that no
    rest of either is left.
    """
    joined: list[Finding] = []
    for finding in sorted(findings, key=lambda one: (one.start, one.end, RANK[one.type])):
        if joined and finding.start < joined[-1].end:
            last = joined.pop()
            type = min(last.type, finding.type, key=RANK.__getitem__)
            finding = dataclasses.replace(last, type=type, end=max(last.end, finding.end))
        joined.append(finding)
    return joined


def replaced(text: str, findings: Iterable[Finding], values: Iterable[str]) -> str:
    """The text with a value in place of each finding; findings by place, without overlaps."""
    parts, end = [], 0
    for finding, value in zip(findings, values, strict=True):
        parts += [text[end : finding.start], value]
        end = finding.end
    return "".join([*parts, text[end:]])


def mask(text: str, findings: Sequence[Finding]) -> str:
    """The text with each finding replaced by its type, such as <EMAIL_ADDRESS>."""
    return replaced(text, findings, (f"<{finding.type}>" for finding in findings))


def versions() -> dict[str, str]:
    """Of the libraries whose patterns and lists decide what is found: they change with time, and
    findings with them.
    """
    return {name: metadata.version(name) for name in LIBRARIES}
