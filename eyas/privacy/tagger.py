"""What each token of a text is, in any language: the probabilities of a person's name, a street
address, a place, an organisation.

A token is a word, a number, a sign, or one character of a script without spaces. The vectors of its
hashed features (the word, its form, its parts) are summed, and kept for tokens that come again.
Three small convolutions look at the neighbours, and at a mean and a maximum over the whole text,
which tell a story from a letter. recipes/tagger.py trains the weights. Inference is NumPy.
"""

from __future__ import annotations

import functools
import io
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from eyas.errors import CorruptError

Floats = NDArray[np.float32]
Token = tuple[str, int, int]
FILES = resources.files("eyas.privacy")

TYPES = ("PERSON", "STREET_ADDRESS", "LOCATION", "ORGANIZATION")
# O, then for each type its first token and the tokens after it
LABELS = ("O", *(f"{place}-{type}" for type in TYPES for place in "BI"))
LISTS = ("given", "family", "town")  # hashes of words in small letters
NUM_BUCKETS = 1 << 16
DILATIONS = (1, 2, 4)  # of the three convolutions over five tokens
GAP = 2 * DILATIONS[-1]
MOST_WORDS = 1 << 16  # whose vectors are kept

# Scripts without spaces, or whose particles touch a name: a token is a character.
SINGLE = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
)
# Vowel signs and accents, which `\w` leaves out
MARKS = (
    "\u0300-\u036f\u0591-\u05c7\u064b-\u0670\u0900-\u0903\u093a-\u094f\u0981-\u0983"
    "\u09bc-\u09cd\u0b82\u0bbe-\u0bcd\u0a01-\u0a4d\u0a81-\u0acd\u0b01-\u0b4d\u0c00-\u0c4d"
    "\u0d00-\u0d4d\u0d82-\u0ddf"
)
TOKEN = re.compile(
    rf"\n|(?:https?://|www\.)\S+|[\w.+-]+@[\w-]+\.[\w.-]+|[{SINGLE}]"
    rf"|(?:[^\W\d_{SINGLE}]|[{MARKS}])+|\d+|\S"
)
IS_SINGLE = re.compile(rf"[{SINGLE}]")


def tokenize(text: str) -> list[Token]:
    """Tokens with their characters [start, end)."""
    return [(match[0], match.start(), match.end()) for match in TOKEN.finditer(text)]


def keys(words: Sequence[str]) -> Sequence[str]:
    """What each token's vector depends on: the token, or a character with its two neighbours."""
    if not any(IS_SINGLE.match(word) for word in words if not word.isascii()):
        return words
    found = []
    for place, word in enumerate(words):
        if len(word) == 1 and IS_SINGLE.match(word):
            before = words[place - 1][-1] if place else " "
            after = words[place + 1][0] if place + 1 < len(words) else " "
            word = f"\0{before}{word}{after}"
        found.append(word)
    return found


def features(key: str) -> tuple[list[str], list[str]]:
    """The features of a key that count one each, and those that share a weight of one."""
    if len(key) == 4 and key[0] == "\0":
        before, one, after = key[1], key[2], key[3]
        return [f"c{one}", f"l{before}{one}", f"r{one}{after}", "S"], []
    if key.isdigit():
        return [f"d{len(key)}", f"d{key[:3] if len(key) < 4 else key[:2]}"], ["D"]
    first = key[0]
    if not (first.isalpha() or len(key) > 1):
        return [f"s{key}"], ["P"]
    if "@" in key or "://" in key or key.startswith("www."):
        return ["LINK"], ["P"]
    word = key.lower()
    case = (
        "low" if key.islower() else "one" if len(key) == 1 else "up" if key.isupper()
        else "cap" if first.isupper() and key[1:].islower() else "mix" if first.isupper() else "no"
    )  # fmt: skip
    size = min(len(key), 8)
    whole = [f"w{word}", f"k{case}{size}", f"K{case}", f"p{word[:3]}", f"e{word[-3:]}"]
    whole += [f"f{word[-2:]}", f"W{case}{word}"]
    padded = f"<{word[:20]}>"
    parts = [
        padded[start : start + length]
        for length in (3, 4, 5)
        for start in range(len(padded) - length + 1)
    ]
    return whole, parts or [padded]


def buckets(key: str, lists: Mapping[str, frozenset[int]]) -> tuple[list[int], list[float]]:
    """The rows of the table whose weighted sum describes a key."""
    whole, parts = features(key)
    whole = [*listed(key, lists), *whole]
    rows = [hashed(one) % NUM_BUCKETS for one in (*whole, *parts)]
    return rows, [1.0] * len(whole) + [max(len(parts), 1) ** -0.5] * len(parts)


def hashed(text: str) -> int:
    """32 bits, the same everywhere."""
    return zlib.crc32(text.encode("utf-8", "replace"))


def listed(key: str, lists: Mapping[str, frozenset[int]]) -> list[str]:
    """The lists of names that hold a key: the word, or a character alone or with
    either neighbour.
    """
    if len(key) != 4 or key[0] != "\0":
        number = hashed(key.lower())
        return [f"in {name}" for name, one in lists.items() if number in one]
    before, one, after = key[1], key[2], key[3]
    forms = {"": hashed(one), "<": hashed(before + one), ">": hashed(one + after)}
    return [
        f"in {name}{sign}"
        for name, some in lists.items()
        for sign, number in forms.items()
        if number in some
    ]


class Tagger:
    """Weights, and the probabilities that they give.

    table: [NUM_BUCKETS, D] int8, scale: [D]; of each convolution the weight [5 D, H] and the bias;
    pool: [2 H, H], of the mean and the maximum; out: [H + D, labels], and its bias.
    """

    def __init__(self, weights: dict[str, NDArray[np.generic]], version: str = "") -> None:
        self.version = version
        self._table, self._scale = weights["table"], weights["scale"].astype(np.float32)
        self._lists = {name: frozenset(weights[name].tolist()) for name in LISTS}
        self._weights = {
            name: one.astype(np.float32)
            for name, one in weights.items()
            if name not in ("table", "scale", *LISTS)
        }
        self._vector = functools.lru_cache(MOST_WORDS)(self._described)

    def _described(self, key: str) -> Floats:
        rows, shares = buckets(key, self._lists)
        return (np.asarray(shares, np.float32) @ self._table[rows].astype(np.float32)) * self._scale

    def probabilities(self, texts: Sequence[Sequence[str]]) -> list[Floats]:
        """[tokens, labels] of each text. GAP rows of zeros keep the texts apart."""
        ends = np.cumsum([len(words) + GAP for words in texts])
        starts = [end - GAP - len(words) for end, words in zip(ends.tolist(), texts, strict=True)]
        if not sum(map(len, texts)):
            return [np.zeros((0, len(LABELS)), np.float32) for _ in texts]
        weights, inputs = self._weights, np.zeros((int(ends[-1]), len(self._scale)), np.float32)
        inside = np.zeros((len(inputs), 1), np.float32)
        for start, words in zip(starts, texts, strict=True):
            if words:
                inputs[start : start + len(words)] = [self._vector(key) for key in keys(words)]
                inside[start : start + len(words)] = 1
        hidden = near(inputs, weights["conv0"], weights["bias0"], DILATIONS[0]) * inside
        bias = weights["bias1"] + self._of_texts(hidden, starts, texts)
        for layer, dilation in enumerate(DILATIONS[1:], start=1):
            more = near(hidden, weights[f"conv{layer}"], bias, dilation)
            hidden = (hidden + more) * inside
            bias = weights["bias2"]
        scores = np.concatenate([hidden, inputs], axis=1) @ weights["out"] + weights["bias_out"]
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
        return [
            scores[start : start + len(words)] for start, words in zip(starts, texts, strict=True)
        ]

    def _of_texts(
        self, hidden: Floats, starts: Sequence[int], texts: Sequence[Sequence[str]]
    ) -> Floats:
        """What the mean and the maximum over its text add to each row."""
        added = np.zeros((len(hidden), len(self._weights["bias1"])), np.float32)
        for start, words in zip(starts, texts, strict=True):
            if words:
                rows = hidden[start : start + len(words)]
                pooled = np.concatenate([rows.mean(axis=0), rows.max(axis=0)])
                added[start : start + len(words)] = pooled @ self._weights["pool"]
        return added


def near(inputs: Floats, weight: Floats, bias: Floats, dilation: int) -> Floats:
    """A convolution over five tokens, `dilation` apart, zeros at the edges; its positive part."""
    tokens, size = inputs.shape
    padded = np.zeros((tokens + 4 * dilation, size), np.float32)
    padded[2 * dilation : 2 * dilation + tokens] = inputs
    beside = [padded[place * dilation : place * dilation + tokens] for place in range(5)]
    return np.asarray(np.maximum(np.concatenate(beside, axis=1) @ weight + bias, 0), np.float32)


def read_weights(packed: bytes) -> Tagger:
    """Raises CorruptError for anything else than the packed arrays."""
    try:
        with np.load(io.BytesIO(packed)) as arrays:
            return Tagger(dict(arrays), f"{zlib.crc32(packed):08x}")
    except (OSError, EOFError, ValueError, KeyError, zlib.error, zipfile.BadZipFile) as error:
        raise CorruptError(
            "the packed weights of eyas.privacy cannot be read", "install eyas again"
        ) from error


@functools.cache
def tagger() -> Tagger:
    """The weights that come with eyas."""
    return read_weights((FILES / "weights" / "tagger.npz").read_bytes())
