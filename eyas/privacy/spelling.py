"""A text as patterns are matched to it: folded, with mail addresses that people hide from programs
in their usual spelling, and long numbers in digits.
"""

from __future__ import annotations

import re
from importlib import resources

import yaml

from eyas.fold import FoldedText, fold

FILES = resources.files("eyas.privacy")
LISTS = yaml.safe_load((FILES / "patterns.yaml").read_text(encoding="utf-8"))
Span = tuple[int, int]  # characters [start, end)

# Mail addresses as people hide them from programs: (at), [dot], "at gmail dot com", spaces.
AT_WORD, DOT_WORD = "at|@|ät|arroba|arobase|chiocciola", r"dot|\.|punkt|punto|point|ponto"
BRACKETS = r" ?(?:\[ ?(?:{0}) ?\]|\( ?(?:{0}) ?\)|\{{ ?(?:{0}) ?\}}|< ?(?:{0}) ?>) ?"
IN_BRACKETS = "[({<&%"
AT = re.compile(rf"(?<=\w)(?:{BRACKETS.format(AT_WORD)}| ?(?:&#0*64;|&commat;|%40) ?)(?=\w)", re.I)
DOT = re.compile(rf"(?<=\w){BRACKETS.format(DOT_WORD)}(?=\w)", re.I)
AT_ALONE, DOT_ALONE = "at|arroba|arobase|chiocciola", "dot|punto|ponto"
DOMAIN_WORDS = rf"[\w-]+(?:[ _-](?:{DOT_ALONE})[ _-][\w-]+)+"
FREE_MAIL = (
    r"(?:gmail|googlemail|yahoo|hotmail|outlook|icloud|protonmail|proton|gmx|aol|msn|web|yandex"
    r"|qq|163)\.[a-z]{2,3}\b"
)
# beside a spaced @, which is an operator too
DOMAINS = "com|org|net|edu|gov|info|eu|de|fr|es|it|nl|uk|pl|se|ch|ru|jp|cn|br"
# "look at gmail.com" is no address
NO_LOCAL_PART = """
    look looked is are was be me us mail email emails address account accounts arrive user users up
    in on here only found available login anything not it them you and or
"""
BEFORE_PLACE = "".join(rf"(?<!\b{word})" for word in NO_LOCAL_PART.split())
AT_SPELT = re.compile(
    rf"(?<=\w)[ _-](?:{AT_ALONE})[ _-](?={DOMAIN_WORDS})|(?<=\w){BEFORE_PLACE} at (?={FREE_MAIL})"
    rf"|(?<=\w\w) ?@ ?(?=[\w-]{{2,}} ?\. ?(?:{DOMAINS})\b)",
    re.I,
)
DOT_SPELT = re.compile(
    rf"(?<=\w)[ _-](?:{DOT_ALONE})[ _-](?=[a-z])"
    rf"|(?<=\w)(?: \. ?|\. )(?=(?:{DOMAINS})\b)",
    re.I,
)
MAYBE_SPELT = re.compile(rf"[ _-](?:{AT_ALONE})[ _-]|@", re.I)
# Letters of scripts without spaces, or whose particles stand close to a word: where they touch a
# Latin letter or a digit a value may begin or end, and \w sees no boundary. NFKC folds Latin first.
OTHER = "\u0530-\u1cff\u2e80-\ua4cf\ua840-\uabff\uac00-\ud7ff\uf900-\ufaff\ufb1d-\ufefc"
TOUCHING = re.compile(
    rf"[{OTHER}](?=[A-Za-z0-9\u00c0-\u024f+(])|[A-Za-z0-9\u00c0-\u024f](?=[{OTHER}])"
)
AT_CAPITAL = re.compile("(?<=[a-z0-9])AT(?=[a-z0-9-]+DOT[a-z])")
DOT_CAPITAL = re.compile("(?<=[a-z0-9])DOT(?=[a-z])")
NUMBER_DOT = re.compile(r"(?<=\d) dot (?=\d)", re.I)
# Seven digits or more in words, or in words and digits.
NUMERALS = {
    word: str(digit)
    for digit, words in enumerate(
        ("zero oh", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    )
    for word in words.split()
}
_NUMERAL = "|".join(NUMERALS)
SPELT_NUMBER = re.compile(
    rf"(?<!\w)(?:{_NUMERAL})(?:[ ,.-]{{1,2}}(?:{_NUMERAL}|\d{{1,4}})){{6,}}(?!\w)"
    rf"|(?<!\w)(?:(?:{_NUMERAL})[ ,.-]{{1,2}}){{3,}}(?:(?:{_NUMERAL})|\d{{1,4}})"
    rf"(?:[ ,.-]{{1,2}}(?:{_NUMERAL}|\d{{1,4}}))+(?!\w)",
    re.I,
)
MAYBE_NUMBER = re.compile(rf"(?:{_NUMERAL})[ ,.-]{{1,2}}(?:{_NUMERAL})[ ,.-]", re.I)


def cue(words: str) -> str:
    """A pattern of cue words that are no part of a longer word, in any script."""
    letter = rf"[^\W{OTHER}]"
    return rf"(?<!{letter})(?:{words})(?!{letter})"


def joined(name: str) -> str:
    """A list of patterns.yaml as one pattern."""
    return "|".join(LISTS[name])


def plain(text: str) -> FoldedText:
    """The text as patterns are matched to it: folded, a space between scripts, mail addresses in
    their usual spelling, long numbers in digits.
    """
    folded = fold(text)
    if not folded.text.isascii():
        folded = folded.sub(TOUCHING, lambda match: f"{match[0]} ")
    if any(sign in folded.text for sign in IN_BRACKETS):
        folded = folded.sub(AT, lambda _: "@").sub(DOT, lambda _: ".")
    if MAYBE_SPELT.search(folded.text):
        folded = folded.sub(AT_SPELT, lambda _: "@")
        if "@" in folded.text:
            folded = folded.sub(DOT_SPELT, lambda _: ".")
    if "DOT" in folded.text:
        spelt = folded.sub(AT_CAPITAL, lambda _: "@")
        folded = spelt.sub(DOT_CAPITAL, lambda _: ".") if spelt is not folded else folded
    if MAYBE_NUMBER.search(folded.text):
        folded = folded.sub(SPELT_NUMBER, _in_digits)
    return folded.sub(NUMBER_DOT, lambda _: ".")


def _in_digits(match: re.Match[str]) -> str:
    return "".join(NUMERALS.get(word, word) for word in re.findall(r"\w+", match[0].lower()))
