"""What makes a text unusable: too short, broken encoding, no text, or repetition. Ordinary prompts,
code, tables and logs pass: of 75,805 real prompts none is dropped (docs/decisions/prompts.md).
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable

import numpy as np

from eyas.data.duplicates import hashed, plain_words, runs

# Shares are of the characters that are not white space.
QUALITY_LIMITS = {
    "min_characters": 2,  # that are not white space, in all user turns together
    "max_damaged": 0.02,  # share in broken encoding; lone surrogates are always dropped
    "min_words": 0.25,  # share of letters and digits
    "max_encoded": 0.5,  # share in unbroken runs such as base64 and hexadecimal have
    "max_repeated": 0.9,  # share of REPEATED_RUN-word runs that repeat an earlier one
    "max_same": 0.5,  # share in runs of 20 or more of one character
    "max_compression": 20,  # length over length compressed by zlib
}
ENOUGH = 200  # characters: a share of less says little
REPEATED_RUN = 5  # words
# Prose of 1,000 characters compresses 2 times, code 3 times: only more is looked at closely.
SUSPICIOUS_COMPRESSION = 4

SURROGATE = re.compile("[\ud800-\udfff]")
# The replacement character, controls other than white space and escape, and UTF-8 read as Latin-1
# or Windows-1252: a lead byte's letter before as many signs as it has continuation bytes.
LOST = "\ufffd\ufffe\uffff\x00-\x08\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f"
SIGN = f"[\x80-\xbf{bytes(range(0x80, 0xC0)).decode('cp1252', 'ignore')}]"
DAMAGED = re.compile(rf"[\xc2-\xdf]{SIGN}|[\xe0-\xef]{SIGN}{{2}}|[\xf0-\xf4]{SIGN}{{3}}|[{LOST}]")
MAYBE_DAMAGED = re.compile(rf"[\xc2-\xf4{LOST}]")
# Lines of base64 have 64 or 76 characters; a drawn line and DNA have fewer different ones.
ENCODED, ENCODED_ALPHABET = re.compile(r"[A-Za-z0-9+/_=-]{60,}"), 10
SAME = re.compile(r"(.)\1{19,}", re.S)


def length(text: str) -> str | None:
    """What is wrong with the length, or None."""
    count = len("".join(text.split()))
    if count >= QUALITY_LIMITS["min_characters"]:
        return None
    return f"{count} characters, needed are {QUALITY_LIMITS['min_characters']}"


def encoding(text: str) -> str | None:
    """What is wrong with the encoding, or None."""
    if SURROGATE.search(text):
        return "half of a surrogate pair, which UTF-8 cannot hold"
    share = _share(DAMAGED, text) if MAYBE_DAMAGED.search(text) else 0
    if share <= QUALITY_LIMITS["max_damaged"]:
        return None
    return f"{share:.0%} of its characters are damaged"


def non_text(text: str) -> str | None:
    """Why it is no text, or None."""
    if len(text) < ENOUGH:
        return None
    if (share := sum(map(str.isalnum, text)) / _solid(text)) < QUALITY_LIMITS["min_words"]:
        return f"{share:.0%} of its characters are letters or digits"
    unbroken = (
        match[0] for match in ENCODED.finditer(text) if len(set(match[0])) >= ENCODED_ALPHABET
    )
    if (share := sum(map(len, unbroken)) / _solid(text)) > QUALITY_LIMITS["max_encoded"]:
        return f"{share:.0%} of its characters are in unbroken runs such as base64 has"
    return None


def repetition(text: str) -> str | None:
    """What it repeats too much, or None."""
    raw = text.encode("utf-8", "surrogatepass")
    ratio = len(raw) / len(zlib.compress(raw, 1))
    if len(text) < ENOUGH or ratio < min(SUSPICIOUS_COMPRESSION, QUALITY_LIMITS["max_compression"]):
        return None
    if ratio > QUALITY_LIMITS["max_compression"]:
        return f"it compresses to 1/{ratio:.0f}"
    if (share := _share(SAME, text)) > QUALITY_LIMITS["max_same"]:
        return f"{share:.0%} of its characters are in runs of one character"
    found = runs(hashed(plain_words(text)), REPEATED_RUN)
    share = 1 - len(np.unique(found)) / max(1, len(found))
    if share <= QUALITY_LIMITS["max_repeated"]:
        return None
    return f"{share:.0%} of its {REPEATED_RUN}-word runs were there before"


QUALITY_CHECKS: dict[str, Callable[[str], str | None]] = {
    "length": length,
    "encoding": encoding,
    "non_text": non_text,
    "repetition": repetition,
}


def _solid(text: str) -> int:
    return max(1, len("".join(text.split())))


def _share(pattern: re.Pattern[str], text: str) -> float:
    return sum(_solid(match[0]) for match in pattern.finditer(text)) / _solid(text)
