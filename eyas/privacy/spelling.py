"""A text as patterns are matched to it: folded, hidden mail addresses in their usual spelling, long
numbers in digits.
"""

from __future__ import annotations

import itertools
import re
from importlib import resources

import yaml

from eyas.fold import FoldedText, fold

FILES = resources.files("eyas.privacy")
LISTS = yaml.safe_load((FILES / "patterns.yaml").read_text(encoding="utf-8"))
Span = tuple[int, int]  # characters [start, end)

# Mail addresses as people hide them: (at), [dot], "at gmail dot com", spaces
AT_WORD, DOT_WORD = "at|a|@|ät|arroba|arobase|chiocciola", r"dot|\.|punkt|punto|point|ponto"
BRACKETS = r" ?(?:\[ ?(?:{0}) ?\]|\( ?(?:{0}) ?\)|\{{ ?(?:{0}) ?\}}|< ?(?:{0}) ?>) ?"
IN_BRACKETS = "[({<&%"
AT = re.compile(rf"(?<=\w)(?:{BRACKETS.format(AT_WORD)}| ?(?:&#0*64;|&commat;|%40) ?)(?=\w)", re.I)
DOT = re.compile(rf"(?<=\w){BRACKETS.format(DOT_WORD)}(?=\w)", re.I)
AT_ALONE, DOT_ALONE = (
    "at|arroba|arobase|chiocciola|małpa|собака",
    "dot|punto|ponto|punkt|kropka|точка",
)
DOMAIN_WORDS = rf"[\w-]+(?:[ _-](?:{DOT_ALONE})[ _-][\w-]+)+"
FREE_MAIL = rf"(?:{LISTS['free_mail'][0]})\.[a-z]{{2,3}}\b"
DOMAINS = LISTS["spaced_domains"][0]
BEFORE_PLACE = "".join(rf"(?<!\b{word})" for word in LISTS["no_local_part"].split())
AT_SPELT = re.compile(
    rf"(?<=\w)[ _-](?:{AT_ALONE})[ _-](?={DOMAIN_WORDS})"
    r"|(?<=\w) arobase (?=[\w-]+ point [a-z])"
    rf"|(?<=\w){BEFORE_PLACE} at (?={FREE_MAIL})"
    rf"|(?<=\w\w) ?@ ?(?=[\w-]{{2,}} ?\. ?(?:{DOMAINS})\b)",
    re.I,
)
DOT_SPELT = re.compile(
    rf"(?<=\w)[ _-](?:{DOT_ALONE}|point)[ _-](?=[a-z])"
    rf"|(?<=\w)(?: \. ?|\. )(?=(?:{DOMAINS})\b)",
    re.I,
)
MAYBE_SPELT = re.compile(rf"[ _-](?:{AT_ALONE})[ _-]|@", re.I)
# a n n a @ w e b . d e; bounded for linear time
APART = re.compile(r"(?<!\w)\w(?: [\w.]){2,40} ?@ ?\w(?: [\w.]){4,60}(?!\w)")
# Letters of scripts without spaces, or whose particles touch a word: beside a Latin letter or a
# digit a value may begin or end, where \w sees no boundary. NFKC folds Latin first.
OTHER = "\u0530-\u1cff\u2e80-\ua4cf\ua840-\uabff\uac00-\ud7ff\uf900-\ufaff\ufb1d-\ufefc"
TOUCHING = re.compile(
    rf"[{OTHER}](?=[A-Za-z0-9\u00c0-\u024f+(])|[A-Za-z0-9\u00c0-\u024f](?=[{OTHER}])"
)
# Its mark is no part of the value before it.
FOOTNOTE = re.compile(r"(?<=\d)[²³¹⁰⁴-⁹]+|(?<=[A-Za-z])[²³¹⁰⁴-⁹]{1,2}(?![\w-])")
AT_CAPITAL = re.compile("(?<=[a-z0-9])AT(?=[a-z0-9-]+DOT[a-z])")
DOT_CAPITAL = re.compile("(?<=[a-z0-9])DOT(?=[a-z])")
NUMBER_DOT = re.compile(r"(?<=\d) dot (?=\d)", re.I)
# Digits in words, or in words and figures.
NUMERALS = {
    word: str(digit)
    for words in LISTS["numerals"]
    for digit, names in enumerate(words.split())
    for word in names.split("|")
}
_NUMERAL = "|".join(sorted(NUMERALS, key=len, reverse=True))
_NEXT = r"(?:[ ,.-]{1,2}|[ ,]{1,2}(?:dash|hyphen|space|then|strich|tiret)[ ,]{1,2})"
_MORE = rf"(?:{_NEXT}(?:(?:double|triple) )?(?:{_NUMERAL}|\d{{1,4}}))"
SPELT_NUMBER = re.compile(
    rf"(?<!\w)(?:(?:\d{{1,4}}[ ,.-]{{1,2}}){{0,6}}(?:{_NUMERAL}){_MORE}{{3}}"
    rf"|(?:double|triple) (?:{_NUMERAL}){_MORE}){_MORE}+(?!\w)",
    re.I,
)
WITHIN_NUMBER = re.compile(rf"(?<=\d)(?:{_NUMERAL})(?=\d)", re.I)
# 3-3-4 with letters for the digits that they look like
MISREAD = re.compile(
    r"(?<!\w)(?=[\d() .-]{0,14}[OoIl])(?=(?:[OoIl() .-]{0,4}\d){5})"
    r"\(?[\dOoIl]{3}\)?[-. ]{1,2}[\dOoIl]{3}[-. ][\dOoIl]{4}(?!\w)"
)
DIGIT, WORD = re.compile(r"\d"), re.compile(r"\w+")
TIMES = {"double": 2, "triple": 3}
HYPHENS = dict.fromkeys(("dash", "hyphen", "strich", "tiret"), "-")
AS_DIGITS = str.maketrans("OoIl", "0011")


def cue(words: str) -> str:
    """A pattern of cue words that are no part of a longer word, in any script."""
    letter = rf"[^\W{OTHER}]"
    return rf"(?<!{letter})(?:{words})(?!{letter})"


def joined(name: str) -> str:
    """A list of patterns.yaml as one pattern."""
    return "|".join(LISTS[name])


def plain(text: str) -> FoldedText:
    """The text as patterns are matched to it; a space is put between scripts."""
    folded = fold(text if text.isascii() else FOOTNOTE.sub(lambda mark: "^" * len(mark[0]), text))
    if not folded.text.isascii():
        folded = folded.sub(TOUCHING, lambda match: f"{match[0]} ")
    if any(sign in folded.text for sign in IN_BRACKETS):
        folded = folded.sub(AT, lambda _: "@").sub(DOT, lambda _: ".")
    if MAYBE_SPELT.search(folded.text):
        if "@" in folded.text:
            folded = folded.sub(APART, lambda match: match[0].replace(" ", ""))
        folded = folded.sub(AT_SPELT, lambda _: "@")
        if "@" in folded.text:
            folded = folded.sub(DOT_SPELT, lambda _: ".")
    if "DOT" in folded.text:
        spelt = folded.sub(AT_CAPITAL, lambda _: "@")
        folded = spelt.sub(DOT_CAPITAL, lambda _: ".") if spelt is not folded else folded
    if has_numerals(folded.text):
        folded = folded.sub(SPELT_NUMBER, _in_digits)
    if not DIGIT.search(folded.text):
        return folded
    if WITHIN_NUMBER.search(folded.text):
        folded = folded.sub(WITHIN_NUMBER, _in_digits)
    folded = folded.sub(MISREAD, lambda match: match[0].translate(AS_DIGITS))
    return folded.sub(NUMBER_DOT, lambda _: ".")


def has_numerals(text: str) -> bool:
    """Whether two of its words may be digits."""
    words = WORD.findall(text.lower())
    return not NUMERALS.keys().isdisjoint(words) and any(
        word in NUMERALS
        and (after in NUMERALS or after[0].isdigit() or after in HYPHENS or after in TIMES)
        for word, after in itertools.pairwise(words)
    )


def _in_digits(match: re.Match[str]) -> str:
    digits, times = list[str](), 1
    for word in re.findall(r"\w+", match[0].lower()):
        sign = word if word.isdigit() else HYPHENS.get(word, "")
        digits.append(NUMERALS.get(word, sign) * times)
        times = TIMES.get(word, 1)
    return "".join(digits)
