"""What word lists say of a word: a given name, a family name, a city, a country, and how common it
is in English.

Knows the packed lists beside it (weights/gazetteer.txt.gz, from recipes/entities.py: Faker's
locales, US census, GeoNames, an English word count) and how words are folded before they are looked
up. Knows no context: what a word is in a text the tagger decides.
"""

from __future__ import annotations

import functools
import gzip
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from eyas.errors import CorruptError

# Bits of a word.
GIVEN, GIVEN_COMMON, FAMILY, FAMILY_COMMON, CITY, CITY_LARGE, REGION, COUNTRY, DEMONYM, FOREIGN = (
    1 << bit for bit in range(10)
)
MAX_PHRASE = 4  # words
# limits of the classes of English words by how common they are; 0 = none of them
RANKS = (300, 1500, 6000, 20_000, 90_000)

CONTRACTED = ("n't", "'ll", "'re", "'ve", "'d", "'m")  # don't, you'll
_LETTERS = str.maketrans(
    {
        "ø": "o",
        "ł": "l",
        "đ": "d",
        "ð": "d",
        "þ": "th",
        "æ": "ae",
        "œ": "oe",
        "ı": "i",
        "’": "'",
        "ə": "e",
    }
)


@functools.lru_cache(1 << 16)
def fold(word: str) -> str:
    """A word as it is looked up: lower case, without accents."""
    if word.isascii():
        return word.lower()
    plain = unicodedata.normalize("NFKD", word.casefold().translate(_LETTERS))
    return "".join(letter for letter in plain if not unicodedata.combining(letter))


@dataclass(frozen=True, slots=True)
class Gazetteer:
    """`words`: folded word -> (bits, rank class); `phrases`: bits of places of two to MAX_PHRASE
    words, joined by spaces; `starts`: their first words."""

    words: Mapping[str, tuple[int, int]]
    phrases: Mapping[str, int]
    starts: frozenset[str]

    def look_up(self, word: str) -> tuple[int, int]:
        """Bits and rank class (1 = the most common, 0 = not among them) of a word; of Anne-Marie,
        those of its parts.
        """
        folded = fold(word)
        found = self.words.get(folded)
        if found is None and "-" in folded:
            parts = [self.words.get(part, (0, 0)) for part in folded.split("-")]
            found = (parts[0][0] & parts[-1][0], max(part[1] for part in parts))
        if found is None and folded.endswith(CONTRACTED):
            return 0, 1
        return found or (0, 0)

    def phrase_at(self, words: Sequence[str]) -> tuple[int, int]:
        """How many of the given words, from the first, name one place, the longest such, and its
        bits; (0, 0) = none.
        """
        folded = [fold(word) for word in words[:MAX_PHRASE]]
        for length in range(len(folded), 1, -1):
            bits = self.phrases.get(" ".join(folded[:length]))
            if bits is not None:
                return length, bits
        return 0, 0


def read_gazetteer(packed: bytes) -> Gazetteer:
    """From gzip text, one entry a line: word or phrase, bits in hexadecimal, rank class; tabs
    between.

    Raises CorruptError if it is not that.
    """
    words, phrases = {}, {}
    try:
        lines = gzip.decompress(packed).decode().splitlines()
        for line in lines or [""]:
            entry, bits, rank = line.split("\t")
            if " " in entry:
                phrases[entry] = int(bits, 16)
            else:
                words[entry] = (int(bits, 16), int(rank))
    except (OSError, EOFError, ValueError) as error:
        raise CorruptError(
            "the packed word lists of eyas.privacy cannot be read", "install eyas again"
        ) from error
    return Gazetteer(words, phrases, frozenset(phrase.split(" ")[0] for phrase in phrases))


@functools.cache
def gazetteer() -> Gazetteer:
    """The lists that come with eyas, read once a process."""
    return read_gazetteer(
        (resources.files("eyas.privacy") / "weights" / "gazetteer.txt.gz").read_bytes()
    )
