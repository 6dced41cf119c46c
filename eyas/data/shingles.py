"""Texts as sets of hashed runs of words, the same in every process, on every machine and in every
version of a library.

Knows what a word is. Knows no row and no filter. S shingles, T words.
"""

from __future__ import annotations

import html
import re
import unicodedata
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

# Scripts without spaces between words: there a character counts as a word.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
# Sentence punctuation says little; operators and brackets are what code and formulas differ in.
SIGNS = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|[^\w\s.,;:!?'\"`\u2018\u2019\u201c\u201d]")
WORDS = re.compile(rf"[{UNSPACED}]|[^\W_{UNSPACED}]+")
TAG = re.compile(r"</?[a-z][^<>]{0,200}>")
INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")

# The steps of splitmix64 (Steele, Lea and Flood, 2014).
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
LAST_SHIFT = np.uint64(31)


def normalised(text: str) -> str:
    """One spelling for texts that differ in case, white space or compatible Unicode forms only."""
    return " ".join(
        unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).split()
    )


def signs(text: str) -> list[str]:
    """The words of a text and its signs other than sentence punctuation, whatever their case and
    Unicode form.
    """
    return SIGNS.findall(normalised(text))


def plain_words(text: str) -> list[str]:
    """The words of a text alone: no punctuation, no HTML tag, no character that is not seen."""
    return WORDS.findall(TAG.sub(" ", INVISIBLE.sub("", normalised(html.unescape(text)))))


def mixed(values: NDArray[Any]) -> Hashes:
    """Splitmix64's finaliser: 64 bits each, every one of which depends on every bit that went in."""
    state = values.astype(np.uint64) + GOLDEN
    for shift, factor in MIX:
        state = (state ^ (state >> shift)) * factor
    return state ^ (state >> LAST_SHIFT)


def hashed(words: Sequence[str]) -> Hashes:
    """A hash for each word, uint64 [T]. CRC-32 beneath: there is no one who would gain by forging a
    word.
    """
    parts = "\n".join(words).encode("utf-8", "surrogatepass").split(b"\n") if words else []
    return mixed(np.fromiter(map(zlib.crc32, parts), np.uint64, len(parts)))


def runs(hashes: Hashes, size: int) -> Hashes:
    """A hash for each run of `size` words, in the order of the text: uint64 [T - size + 1], none of
    a shorter text.
    """
    num_runs = max(0, len(hashes) - size + 1)
    total = np.zeros(num_runs, np.uint64)
    for offset in range(size):
        total = total * GOLDEN + hashes[offset : offset + num_runs]
    return mixed(total)


def shingles(text: str, size: int) -> Hashes:
    """The set of a text's runs of `size` words and signs, sorted, uint64 [S].

    Both ends are padded, so that every word is in `size` runs: the last word of a question counts
    like any other.
    """
    said = hashed(signs(text) or [normalised(text)])  # nothing but sentence punctuation is one word
    edge = np.zeros(size - 1, np.uint64)
    return np.unique(runs(np.concatenate([edge, said, edge]), size))


def jaccard(one: Hashes, other: Hashes) -> float:
    """Shared members of two sets (sorted, no repeats) over all of theirs; 0 where both are empty."""
    both = len(np.intersect1d(one, other, assume_unique=True))
    return both / max(1, len(one) + len(other) - both)
