"""A text as patterns are matched to it and mentions of a value compared: folded, and mail addresses
that people hide from programs in their usual spelling.
"""

from __future__ import annotations

import re

from eyas.fold import FoldedText, fold

# Mail addresses as people hide them from programs: (at), [dot], "at gmail dot com", spaces.
AT_WORD, DOT_WORD = "at|@|ät|arroba|arobase|chiocciola", r"dot|\.|punkt|punto|point|ponto"
BRACKETS = r" ?(?:\[ ?(?:{0}) ?\]|\( ?(?:{0}) ?\)|\{{ ?(?:{0}) ?\}}|< ?(?:{0}) ?>) ?"
IN_BRACKETS = "[({<&%"
AT = re.compile(rf"(?<=\w)(?:{BRACKETS.format(AT_WORD)}| ?(?:&#0*64;|&commat;|%40) ?)(?=\w)", re.I)
DOT = re.compile(rf"(?<=\w){BRACKETS.format(DOT_WORD)}(?=\w)", re.I)
DOMAIN_WORDS = r"[\w-]+(?:(?: |_|-)dot(?: |_|-)[\w-]+)+"
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
    rf"(?<=\w)[ _-]at[ _-](?={DOMAIN_WORDS})|(?<=\w){BEFORE_PLACE} at (?={FREE_MAIL})"
    rf"|(?<=\w\w) ?@ ?(?=[\w-]{{2,}} ?\. ?(?:{DOMAINS})\b)",
    re.I,
)
DOT_SPELT = re.compile(
    rf"(?<=\w)[ _-]dot[ _-](?=[a-z])|(?<=\w)(?: \. ?|\. )(?=(?:{DOMAINS})\b)", re.I
)
MAYBE_SPELT = re.compile(r"[ _-]at[ _-]|@ | @", re.I)


def plain(text: str) -> FoldedText:
    """The text as patterns are matched to it: folded, mail addresses in their usual spelling."""
    folded = fold(text)
    if any(sign in folded.text for sign in IN_BRACKETS):
        folded = folded.sub(AT, "@").sub(DOT, ".")
    if MAYBE_SPELT.search(folded.text):
        spelt = folded.sub(AT_SPELT, "@")
        folded = spelt.sub(DOT_SPELT, ".") if spelt is not folded else folded
    return folded
