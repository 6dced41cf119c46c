"""Personal data and secrets in a text: by type and place, without overlaps, with keyed hashes.
Opens no connection unless the config names one.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import phonenumbers

from eyas.fold import fold
from eyas.privacy import entities
from eyas.privacy.dlp import INFO_TYPES, CloudDlp
from eyas.privacy.findings import Finding, NameSearch, join_overlaps
from eyas.privacy.passages import Passage, passages
from eyas.privacy.pii import (
    ANSWER_POLICY,
    BY_NAME,
    NAME_TYPES,
    PII_TYPES,
    PrivacyConfig,
    Search,
    canonical,
    value_hash,
)
from eyas.privacy.spelling import Span, plain

# Characters of a long text that are searched at a time, and that are seen on each side of them:
# more than any value with its cue.
WINDOW, MARGIN = 2000, 400
LIBRARIES = ("python-stdnum", "detect-secrets")
NO_SPACE, DIGIT = re.compile(r"\S"), re.compile(r"\d")
CLOUD, OURS = "cloud_dlp", "eyas"


class Detector:
    """Finds the types that the policy does not keep. It neither keeps nor logs nor
    raises a value.
    """

    def __init__(self, config: PrivacyConfig, key: bytes = b"") -> None:
        """key: for hashes. Raises ConfigError for a service that is not there."""
        self._key = key
        self._cloud = CloudDlp(config) if config.cloud_project is not None else None
        self._wanted = frozenset(config.types)
        self._types = self._wanted.difference(INFO_TYPES.values() if self._cloud else ())
        self._kept_by = "fictional" if config.fictional else "policy"
        self._has_names = not self._types.isdisjoint(NAME_TYPES)
        by = [CLOUD] * bool(self._cloud) + [OURS] * self._has_names
        self._by = "" if self._wanted.isdisjoint(NAME_TYPES) else "+".join(by)

    def find(self, text: str) -> list[Finding]:
        """What is in a text that stands alone."""
        return self.find_all([text])[0]

    def find_all(
        self, texts: Sequence[str], parts: Sequence[Sequence[Passage]] | None = None
    ) -> list[list[Finding]]:
        """What is in each text. parts: the passages of each; None = the texts are one
        conversation.
        """
        if parts is None:  # of use for names alone
            parts = passages(texts) if self._by else [[] for _ in texts]
        found = self._cloud(texts) if self._cloud else [[] for _ in texts]
        prose = [[one for one in of_text if not one.is_code] for of_text in parts]
        names = self._names(texts, prose)
        return [
            self._hashed(
                text, join_overlaps([*within(cloud, spoken), *self._patterns(text), *ours])
            )
            for text, spoken, cloud, ours in zip(texts, prose, found, names, strict=True)
        ]

    def name_searches(self, parts: Iterable[Passage]) -> tuple[NameSearch, ...]:
        """Where names are searched for in a row with these passages."""
        characters = Counter[tuple[str, str, str]]()
        for one in parts:
            by = "" if one.is_code else self._by
            reason = "" if by else "code" if self._by else self._kept_by
            characters[one.language, by, reason] += one.end - one.start
        return tuple(NameSearch(*part, count) for part, count in sorted(characters.items()))

    def _names(
        self, texts: Sequence[str], prose: Sequence[Sequence[Passage]]
    ) -> list[list[Finding]]:
        if not self._has_names:
            return [[] for _ in texts]
        folded = [fold(only(text, spoken)) for text, spoken in zip(texts, prose, strict=True)]
        found = entities.find_entities([one.text for one in folded])
        return [
            [
                Finding(one.type, *text.span(one.start, one.end))
                for one in some
                if one.type in self._types
            ]
            for text, some in zip(folded, found, strict=True)
        ]

    def _patterns(self, text: str) -> Iterator[Finding]:
        spelt = plain(text)
        any_digit = DIGIT.search(spelt.text) is not None
        for kind in PII_TYPES:
            if kind.find and kind.name in self._types and (any_digit or not kind.has_digit):
                search = functools.partial(in_windows, kind.find) if kind.is_windowed else kind.find
                for span in search(spelt.text):
                    yield Finding(kind.name, *spelt.span(*span))

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
    hold: every type that the config does not keep, but for values set aside for examples.
    """

    def __init__(self, config: PrivacyConfig = ANSWER_POLICY) -> None:
        self._detector = Detector(config)

    def __call__(self, before: Sequence[str], answer: str) -> list[Finding]:
        """By place in the answer, without hashes. before: the texts before it."""
        found = [
            (one, value)
            for one in self._detector.find(answer)
            if not BY_NAME[one.type].is_reserved(plain(value := answer[one.start : one.end]).text)
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
            for one, value in found
            if value not in context and canonical(one.type, value) not in known
        ]


def versions() -> dict[str, str]:
    """Of the libraries, patterns and weights that decide what is found."""
    libraries = {name: metadata.version(name) for name in LIBRARIES}
    sources = (path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.[py]*")))
    own = {"patterns": f"{zlib.crc32(b''.join(sources)):08x}", "tagger": entities.version()}
    return {"phonenumbers": phonenumbers.__version__, **libraries, **own}


def recogniser_versions(config: PrivacyConfig) -> dict[str, str]:
    """The version of what finds names under the config, for identities."""
    return {} if set(config.types).isdisjoint(NAME_TYPES) else {OURS: entities.version()}


def in_windows(find: Search, text: str) -> Iterator[Span]:
    """The spans of a search in time linear in the text's length, though some patterns are
    quadratic: long texts are searched in pieces.

        piece k      [margin|  taken  |margin]
        piece k + 1               [margin|  taken  |margin]

    Only a span that begins in the taken part of a piece counts: at its edges a piece may begin or
    end inside a number, or between a value and its cue.
    """
    if len(text) <= WINDOW + MARGIN:
        yield from find(text)
        return
    for start in range(0, len(text), WINDOW):
        edge = max(start - MARGIN, 0)
        for begin, end in find(text[edge : start + WINDOW + MARGIN]):
            if start <= edge + begin < start + WINDOW:
                yield edge + begin, edge + end


def only(text: str, parts: Iterable[Passage]) -> str:
    """The text with spaces outside its passages; line ends stay."""
    made, end = [], 0
    for one in parts:
        made += [NO_SPACE.sub(" ", text[end : one.start]), text[one.start : one.end]]
        end = one.end
    return "".join([*made, NO_SPACE.sub(" ", text[end:])])


def within(findings: Iterable[Finding], parts: Sequence[Passage]) -> Iterator[Finding]:
    """The findings; of names, what lies in the passages."""
    for finding in findings:
        if finding.type not in NAME_TYPES:
            yield finding
            continue
        for one in parts:
            start, end = max(finding.start, one.start), min(finding.end, one.end)
            if start < end:
                yield dataclasses.replace(finding, start=start, end=end)
