"""Rows that no one would answer: too short, in broken encoding, no text at all, or one thing over
and over.

Each check looks at one text and says what is wrong in numbers, never quoting it. The limits are
wide: ordinary prompts, code, tables of numbers and pasted logs pass. Knows neither language nor
meaning.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from eyas.data.rows import Drop, Row
from eyas.data.shingles import hashed, plain_words, runs

ENOUGH = 200  # characters; of less, no share says much
REPEATED_RUN = 5  # words
# prose of 1,000 characters has 2, code 3: only what has more is looked at closely
SUSPICIOUS_COMPRESSION = 4

SURROGATE = re.compile("[\ud800-\udfff]")
# The replacement character, controls other than white space and escape, and UTF-8 that was read as
# Latin-1 or Windows-1252: the letter that a lead byte becomes, before as many signs as it has
# continuation bytes.
LOST = "\ufffd\ufffe\uffff\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f"
SIGN = f"[\x80-\xbf{bytes(range(0x80, 0xC0)).decode('cp1252', 'ignore')}]"
DAMAGED = re.compile(rf"[\xc2-\xdf]{SIGN}|[\xe0-\xef]{SIGN}{{2}}|[\xf0-\xf4]{SIGN}{{3}}|[{LOST}]")
MAYBE_DAMAGED = re.compile(rf"[\xc2-\xf4{LOST}]")
# Base64's lines have 64 or 76 characters; a drawn line and a strand of DNA have fewer different
# ones.
ENCODED, ENCODED_ALPHABET = re.compile(r"[A-Za-z0-9+/_=-]{60,}"), 10
SAME = re.compile(r"(.)\1{19,}", re.S)


class QualityConfig(BaseModel):
    """How much of what a row may have before it goes; shares are of its characters that are not
    white space.

    Texts of less than ENOUGH characters are judged by length and encoding only, and repetition is
    looked at closely only in what zlib makes SUSPICIOUS_COMPRESSION times shorter.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_characters: int = Field(
        default=2, ge=1, description="that are not white space, in all user turns together"
    )
    max_damaged: float = Field(
        default=0.02, ge=0, le=1, description="share in broken encoding; lone surrogates always go"
    )
    min_words: float = Field(default=0.25, ge=0, le=1, description="share of letters and digits")
    max_encoded: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="share in unbroken runs such as base64 and hexadecimal have",
    )
    max_repeated: float = Field(
        default=0.9, ge=0, le=1, description="share of 5-word runs that were in the row before"
    )
    max_same: float = Field(
        default=0.5, ge=0, le=1, description="share in runs of 20 or more of one character"
    )
    max_compression: float = Field(
        default=20, ge=1, description="length over length compressed by zlib"
    )


def length(text: str, config: QualityConfig) -> str | None:
    """What is wrong with a text's length, or None."""
    count = len("".join(text.split()))
    return (
        f"{count} characters, needed are {config.min_characters}"
        if count < config.min_characters
        else None
    )


def encoding(text: str, config: QualityConfig) -> str | None:
    """What is wrong with a text's encoding, or None."""
    if SURROGATE.search(text):
        return "half of a surrogate pair, which UTF-8 cannot hold"
    share = _share(DAMAGED, text) if MAYBE_DAMAGED.search(text) else 0
    return f"{share:.0%} of its characters are damaged" if share > config.max_damaged else None


def non_text(text: str, config: QualityConfig) -> str | None:
    """What makes a text none, or None."""
    if len(text) < ENOUGH:
        return None
    if (share := sum(map(str.isalnum, text)) / _black(text)) < config.min_words:
        return f"{share:.0%} of its characters are letters or digits"
    unbroken = (
        match[0] for match in ENCODED.finditer(text) if len(set(match[0])) >= ENCODED_ALPHABET
    )
    if (share := sum(map(len, unbroken)) / _black(text)) > config.max_encoded:
        return f"{share:.0%} of its characters are in unbroken runs such as base64 has"
    return None


def repetition(text: str, config: QualityConfig) -> str | None:
    """What a text repeats too much, or None."""
    raw = text.encode("utf-8", "surrogatepass")
    ratio = len(raw) / len(zlib.compress(raw, 1))
    if len(text) < ENOUGH or ratio < min(SUSPICIOUS_COMPRESSION, config.max_compression):
        return None
    if ratio > config.max_compression:
        return f"it compresses to 1/{ratio:.0f}"
    if (share := _share(SAME, text)) > config.max_same:
        return f"{share:.0%} of its characters are in runs of one character"
    found = runs(hashed(plain_words(text)), REPEATED_RUN)
    share = 1 - len(np.unique(found)) / max(1, len(found))
    return (
        f"{share:.0%} of its {REPEATED_RUN}-word runs were there before"
        if share > config.max_repeated
        else None
    )


Check = Callable[[str, QualityConfig], str | None]
CHECKS: dict[str, Check] = {
    "length": length,
    "encoding": encoding,
    "non_text": non_text,
    "repetition": repetition,
}


class Quality:
    """Drops a row for the first check that its turns fail, taken as one text: reason
    `quality.<check>`.
    """

    def __init__(self, config: QualityConfig) -> None:
        self._config = config

    def __call__(self, row: Row) -> Row | Drop:
        text = "\n".join(row.turns)
        for name, check in CHECKS.items():
            if note := check(text, self._config):
                return Drop(f"quality.{name}", note)
        if row.system and SURROGATE.search(row.system):
            return Drop("quality.encoding", "half of a surrogate pair in the system prompt")
        return row


def _black(text: str) -> int:
    """The number of characters that are not white space, at least 1."""
    return max(1, len("".join(text.split())))


def _share(pattern: re.Pattern[str], text: str) -> float:
    """The share of a text's characters, white space aside, that a pattern matches."""
    return sum(_black(match[0]) for match in pattern.finditer(text)) / _black(text)
