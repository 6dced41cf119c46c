"""What is known of each token of a text by itself: its form, what word lists say of it, cue words.
What it is in its text is the tagger's to decide.

weights/gazetteer.txt.gz has names, places, and how common a word is in English; recipes/entities.py
writes it. cues.yaml has the words that say what stands beside them.
"""

from __future__ import annotations

import functools
import gzip
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

import yaml

from eyas.errors import CorruptError

FILES = resources.files("eyas.privacy")

GIVEN, GIVEN_COMMON, FAMILY, FAMILY_COMMON, CITY, CITY_LARGE, REGION, COUNTRY, DEMONYM, FOREIGN = (
    1 << bit for bit in range(10)
)
FEMALE, MALE = 1 << 10, 1 << 11  # of given names that are clearly of one gender
MAX_PHRASE = 4  # words of a place such as "Salt Lake City"
# Limits of the classes of English words by how common they are; class 0 is none of them.
RANKS = (300, 1500, 6000, 20_000, 90_000)
CONTRACTIONS = ("n't", "'ll", "'re", "'ve", "'d", "'m")  # don't, you'll
_LETTERS = str.maketrans(
    {"ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th",
     "æ": "ae", "œ": "oe", "ı": "i", "’": "'", "ə": "e"}
)  # fmt: skip

_WORDS = yaml.safe_load((FILES / "cues.yaml").read_text(encoding="utf-8"))
CUES = {word: kind for kind in reversed(_WORDS["cues"]) for word in _WORDS["cues"][kind].split()}
UPPER_CODES = frozenset(_WORDS["codes"].split())
# Kinds of streets that are written as one word with the name: Hauptstrasse, Kerkstraat, Storgatan.
STREET_END = re.compile(
    r"(?:strasse|str|stra|weg|platz|gasse|allee|damm|ufer|ring|straat|laan|plein|kade|gracht|dijk"
    r"|singel|gata|gatan|gaten|vagen|vegen|veien|vej|gade|katu|tie|kuja|polku|vagur|gotu|gasse"
    r"|steig|chaussee|ulitsa|svingen|stien|gränd|grand|kaari|raitti)$"
)

SIGNS = (
    {sign: sign for sign in ",.:;-()/#\"'%?!"}
    | dict.fromkeys("$€£", "money")
    | dict.fromkeys("+*=<>^~", "maths")
    | dict.fromkeys("`|{[", "code")
    | {"\n": "newline", "'s": "'s", "’s": "'s", "–": "-", "—": "-"}
)
TOKEN = re.compile(
    r"(?:https?://|www\.)\S+|[\w.+-]+@[\w-]+\.[\w.-]+|\n|['’]s\b|\d+(?:[.,:]\d+)+"
    r"|[^\W_]+(?:(?:['’](?!s\b)|[-_])[^\W_]+)*|[^\w\s]|_"
)


# Word lists


@functools.lru_cache(1 << 16)
def bare_word(word: str) -> str:
    """A word as it is looked up: lower case, without accents."""
    if word.isascii():
        return word.lower()
    plain = unicodedata.normalize("NFKD", word.casefold().translate(_LETTERS))
    return "".join(letter for letter in plain if not unicodedata.combining(letter))


@dataclass(frozen=True, slots=True)
class Gazetteer:
    """Word lists.

    words: folded word -> (bits, rank class). phrases: bits of places of two to MAX_PHRASE words,
    joined by spaces. starts: the first words of phrases.
    """

    words: Mapping[str, tuple[int, int]]
    phrases: Mapping[str, int]
    starts: frozenset[str]

    def look_up(self, word: str) -> tuple[int, int]:
        """Bits and rank class (1 = the most common, 0 = not listed); of Anne-Marie, those of its
        parts.
        """
        folded = bare_word(word)
        found = self.words.get(folded)
        if found is None and "-" in folded:
            parts = [self.words.get(part, (0, 0)) for part in folded.split("-")]
            found = (parts[0][0] & parts[-1][0], max(part[1] for part in parts))
        if found is None and folded.endswith(CONTRACTIONS):
            return 0, 1
        return found or (0, 0)

    def phrase_at(self, words: Sequence[str]) -> tuple[int, int]:
        """How many of the words, from the first, name one place (the longest), and its bits;
        (0, 0) where none do.
        """
        folded = [bare_word(word) for word in words[:MAX_PHRASE]]
        for length in range(len(folded), 1, -1):
            bits = self.phrases.get(" ".join(folded[:length]))
            if bits is not None:
                return length, bits
        return 0, 0


def read_gazetteer(packed: bytes) -> Gazetteer:
    """From gzip text, one entry a line: word or phrase, bits in hexadecimal, rank class; tabs
    between. Raises CorruptError for anything else.
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
    return read_gazetteer((FILES / "weights" / "gazetteer.txt.gz").read_bytes())


# Tokens


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a text, described wherever it stands.

    group: one of some fifty kinds, for rules over neighbours. word: folded, or the shape of a
    number. facts: features by name. active: may be part of a name, an address or a place.
    """

    group: str
    word: str
    facts: tuple[str, ...]
    active: bool


def tokenize(text: str) -> list[tuple[str, int, int]]:
    """Tokens with their characters [start, end): words, numbers, links, mail addresses, line
    breaks, and every other sign by itself.
    """
    return [(match.group(), match.start(), match.end()) for match in TOKEN.finditer(text)]


def phrase_parts(words: Sequence[str], lists: Gazetteer) -> dict[int, tuple[int, str]]:
    """For each token, by index, that is within a listed place of several words: the place's bits,
    and "begin" or "in".
    """
    found: dict[int, tuple[int, str]] = {}
    for index, word in enumerate(words):
        if bare_word(word) in lists.starts and index not in found:
            length, bits = lists.phrase_at(words[index : index + MAX_PHRASE])
            for inner in range(length):
                found[index + inner] = (bits, "in" if inner else "begin")
    return found


def describe(word: str, phrase_bits: int, part: str, lists: Gazetteer) -> Token:
    """A token described with the word lists. part: see `phrase_parts`, "" = in no phrase."""
    token = _describe_form(word, *(lists.look_up(word) if word[0].isalpha() else (0, 0)))
    if not part:
        return token
    place = f"{_places(phrase_bits)}{token.group.partition(':')[0]}"
    facts = (*token.facts, f"phrase={part}", f"phrase={part}{place}")
    return Token(token.group, token.word, facts, active=True)


def _describe_form(token: str, bits: int, rank: int) -> Token:
    first = token[0]
    if first.isdigit() or (token.isalnum() and not token.isalpha()):
        if any(sign in token for sign in ".,:"):
            return Token("amount", "amount", ("group=amount",), False)
        shape = re.sub(r"[^\W\d_]", "a", re.sub(r"\d", "9", token))
        group = f"{min(len(token), 6)}d" if token.isdigit() else "number+"
        return Token(group, shape[:8], (f"number={shape[:8]}", f"group={group}"), False)
    word = bare_word(token)
    if not first.isalpha():
        kind = SIGNS.get(token, "sign")
        return Token(kind, token if token != "\n" else "newline", (f"group={kind}",), False)
    if "@" in token or "://" in token or "_" in token or word.startswith("www."):
        return Token("code", "code", ("group=code",), False)
    return _describe_word(token, word, bits, rank)


def _describe_word(token: str, word: str, bits: int, rank: int) -> Token:
    case, cue, names, places = _case(token), CUES.get(word, ""), _names(bits), _places(bits)
    common = "top" if rank in (1, 2) else "known" if rank else "rare"
    if not cue and case not in ("X", "UP") and len(word) > 6 and STREET_END.search(word):
        cue = "street+"
    kind = "both" if names and places else "name" if names else "place" if places else "word"
    group = f"{cue}^" if cue and case != "low" else cue
    if not group:
        group = f"{case}:{kind if common != 'top' else 'top'}" if case != "X" else "X"
    if case == "UP" and token in UPPER_CODES:
        group = "CODE"
    facts = [
        f"group={group}",
        f"case={case}",
        f"listed={names}/{places}/{common}/{case}",
        f"cue={cue}",
        f"rank={rank}{case}",
    ]
    if bits & FOREIGN:
        facts.append(f"foreign={case}{'+' if names or places else ''}{'+' if rank else ''}")
    if case != "low" or names or places:
        facts += [
            f"end={word[-3:]}",
            f"end2={word[-2:]}",
            f"begin={word[:2]}",
            f"names={names}",
            f"places={places}",
        ]
    listed = common != "top" and bool(names or places)
    capital = case != "low" and (rank == 0 or bool(names or places))
    active = listed or capital or cue in ("street+", "box", "unit", "name", "postcode")
    active = active or (cue == "street" and (case != "low" or len(word) <= 4))
    return Token(group, word, tuple(facts), active)


def _case(token: str) -> str:
    if token.isupper():
        return "X" if len(token) == 1 else "UP"
    if token[0].isupper():
        return "Cap" if token[1:].islower() or not token.isalpha() else "Mix"
    return "low" if token.islower() else "mix"


def _names(bits: int) -> str:
    given = "G" if bits & GIVEN_COMMON else "g" if bits & GIVEN else ""
    return given + ("F" if bits & FAMILY_COMMON else "f" if bits & FAMILY else "")


def _places(bits: int) -> str:
    kinds = ((COUNTRY, "k"), (REGION, "r"), (CITY_LARGE, "C"), (CITY, "c"), (DEMONYM, "d"))
    return next((letter for bit, letter in kinds if bits & bit), "")
