"""One spelling for texts that look alike, with the way back to the original: full-width or
Devanagari digits, zero-width spaces, Cyrillic letters among Latin ones, which no pattern matches.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import unicodedata
from collections.abc import Callable, Sequence

# Unicode's Default_Ignorable_Code_Point, and the box of keycap emoji.
INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e"
    "\u2060-\u206f\u20e3\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
# What NFKC leaves apart: hyphens and minus signs, quotes, the fraction slash, the blank of Braille.
SIGNS = {
    **dict.fromkeys("\u02d7\u2010\u2011\u2012\u2043\u2212\ufe63\uff0d", "-"),
    **dict.fromkeys("\u00b4\u02b9\u02bc\u2018\u2019\u201b\u2032\uff07", "'"),
    **dict.fromkeys("\u00ab\u00bb\u201c\u201d\u201e\u201f\u2033\uff02", '"'),
    **dict.fromkeys("\u2044\u2215", "/"),
    "\u2800": " ",
}
# An en or em dash in prose parts words; beside a digit it stands for a hyphen.
NUMBER_DASH = re.compile("(?<=[0-9])[\u2013-\u2015]|[\u2013-\u2015](?=[0-9])")
# Letters of other scripts that are drawn as a Latin one in most fonts.
LOOKALIKES = str.maketrans(
    "асԁеҽһіјӏорԛѕԝхуүԍкмтвнАВСЕНІЈКМОРЅТХУҮԌԚԜ"  # Cyrillic
    "αγικνορυχΑΒΕΖΗΙΚΜΝΟΡΤΥΧ"  # Greek
    "օոսցհԼՕՍ"  # Armenian
    "ɑɡɩıʏᴄᴏᴠᴡᴢꜱʜɪ",  # Latin
    "acdeehijlopqswxyygkmtbhABCEHIJKMOPSTXYYGQW"
    "ayikvopuxABEZHIKMNOPTYX"
    "onugh" + "LOU" + "agiiycovwzshi",
)
# Words, e-mail addresses, dotted names; a cue in another script stays ("паспорт:AB1234567").
WORD = re.compile(r"[\w.%+-]+@[\w.-]+|\w+(?:\.\w+)*")
RAISED = re.compile("[\u00b2\u00b3\u00b9\u2070-\u2089]")  # after a digit a power, no further digit
LATIN = re.compile("[A-Za-z]")


@dataclasses.dataclass(frozen=True, slots=True)
class FoldedText:
    """A folded text. Character i stands for [starts[i], ends[i]) of the original; text between two
    characters is invisible.
    """

    text: str
    starts: Sequence[int]
    ends: Sequence[int]

    def span(self, start: int, end: int) -> tuple[int, int]:
        """The whole characters of the original for [start, end), not empty, of the folded text."""
        return self.starts[start], self.ends[end - 1]

    def sub(self, pattern: re.Pattern[str], written: Callable[[re.Match[str]], str]) -> FoldedText:
        """The text with `written` in place of each match; neither is empty."""
        parts, starts, ends, end = list[str](), list[int](), list[int](), 0
        for match in pattern.finditer(self.text):
            new = written(match)
            parts += [self.text[end : match.start()], new]
            starts += [*self.starts[end : match.start()], *[self.starts[match.start()]] * len(new)]
            ends += [*self.ends[end : match.start()], *[self.ends[match.end() - 1]] * len(new)]
            end = match.end()
        if not parts:
            return self
        return FoldedText(
            "".join([*parts, self.text[end:]]),
            [*starts, *self.starts[end:]],
            [*ends, *self.ends[end:]],
        )


def fold(text: str) -> FoldedText:
    """NFKC, ASCII digits, spaces, hyphens and quotes, nothing invisible, and Latin letters for
    lookalikes in words with Latin letters. Case stays. Idempotent.
    """
    if text.isascii():
        return FoldedText(text, range(len(text)), range(1, len(text) + 1))
    foreign = {letter: _letter(letter) for letter in set(text) if letter >= "\x80"}
    if all(len(one) == 1 and not unicodedata.combining(one) for one in foreign.values()) and (
        not RAISED.search(text)
    ):  # each letter stays one letter
        plain = _without_lookalikes(text.translate({ord(one): foreign[one] for one in foreign}))
        return FoldedText(plain, range(len(text)), range(1, len(text) + 1))
    letters: list[str] = []
    places: list[int] = []
    is_power = False
    for place, letter in enumerate(text):
        is_power = bool(RAISED.match(letter)) and (is_power or text[max(place - 1, 0)].isdecimal())
        folded = letter if letter < "\x80" or is_power else _letter(letter)
        letters.append(folded)
        places += [place] * len(folded)
    return _composed(_without_lookalikes("".join(letters)), places)


def _without_lookalikes(text: str) -> str:
    """With hyphens beside digits, and Latin letters in words that have some."""
    text = NUMBER_DASH.sub("-", text)
    if text.isascii():
        return text
    return WORD.sub(lambda word: latin(word[0]) if LATIN.search(word[0]) else word[0], text)


def latin(text: str) -> str:
    """The text with a Latin letter for each lookalike."""
    return text if text.isascii() else text.translate(LOOKALIKES)


@functools.lru_cache(maxsize=1 << 14)
def _letter(letter: str) -> str:
    if INVISIBLE.match(letter):
        return ""
    if letter in SIGNS:
        return SIGNS[letter]
    digit = unicodedata.digit(letter, None)
    if digit is not None:
        return str(digit)
    category = unicodedata.category(letter)
    if category[0] == "Z":
        return " " if category == "Zs" else "\n"
    folded = unicodedata.normalize("NFKC", letter)
    # a fraction after a number would join it; a lone mark would become a space
    if (category == "No" and not folded.isdigit()) or folded[:1] == " ":
        return letter
    return "".join(one if one == letter else _letter(one) for one in folded)


def _composed(text: str, places: Sequence[int]) -> FoldedText:
    letters: list[str] = []
    starts: list[int] = []
    ends: list[int] = []
    for letter, place in zip(text, places, strict=True):
        if letters and letter >= "\u0300" and unicodedata.combining(letter):
            both = unicodedata.normalize("NFC", letters[-1] + letter)
            if len(both) == 1:
                letters[-1], ends[-1] = both, place + 1
                continue
        letters.append(letter)
        starts.append(place)
        ends.append(place + 1)
    return FoldedText("".join(letters), starts, ends)
