"""Values that lead to one person, car, device or place: birth dates, number plates, MAC addresses,
coordinates, account names. Most have the form of ordinary dates, codes and numbers, and need a cue.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from eyas.privacy.spelling import LISTS, Span, cue, joined

MONTHS = LISTS["months"]
_MONTH = "|".join(sorted({one for line in MONTHS for one in line.split()}, key=len, reverse=True))
YEAR = r"(?:19|20)\d\d"
_DAY = r"\d{1,2}(?:st|nd|rd|th|er|\.|º)?"
DATE = (
    rf"{YEAR}[-./ ]\d{{1,2}}[-./ ]\d{{1,2}}|{YEAR} ?[年년] ?\d{{1,2}} ?[月월] ?\d{{1,2}} ?[日일]"
    rf"|\d{{1,2}}(?P<sign>[-./ ])\d{{1,2}}(?P=sign)(?:{YEAR}|\d\d)"
    rf"|{_DAY}[ -](?:of |de |d')?(?:{_MONTH})\.?,?[ -](?:de |del )?{YEAR}"
    rf"|(?:{_MONTH})\.? {_DAY},? {YEAR}"
)
BIRTH_DATES = (
    re.compile(
        cue(joined("birth"))
        + rf"[^\n.;?!\d]{{0,24}}?[\s:=\"'(]{{1,3}}(?P<value>{DATE})(?!\w|[-/.]\d)",
        re.I,
    ),
    re.compile(
        rf"(?<![\w-])(?<!\d[./])(?P<value>{DATE})\s?"
        rf"(?:{joined('born')})",
        re.I,
    ),
)
BORN = re.compile("geboren|生|출생|태어|doğ|जन्म|हुआ", re.I)  # any that stands behind a date

# Two or three groups of letters and digits
_PLATE = r"[A-Z0-9ÄÖÜА-Я]{1,4}[ ·-]{0,3}[A-Z0-9А-Я]{1,4}(?:[ ·-]{0,3}[A-Z0-9А-Я]{1,4})?"
PLATE = re.compile(
    cue(joined("plate")) + r"[^\n.;?!]{0,16}?[\s:=\"'(#是为]{1,3}"
    rf"(?P<value>(?-i:(?:[\u4e00-\u9fff] ?)?{_PLATE}))(?![\w-])",
    re.I,
)
PLATE_LENGTHS = range(5, 10)

MAC = re.compile(
    r"(?<![\w:.-])(?:[0-9A-F]{2}(?:([:-])[0-9A-F]{2}(?:\1[0-9A-F]{2}){4}"
    r"| [0-9A-F]{2}(?: [0-9A-F]{2}){4})|[0-9A-F]{4}\.[0-9A-F]{4}\.[0-9A-F]{4}|[0-9A-F]{12})"
    r"(?![\w:-]|\.\w)",
    re.I,
)
MAC_CUE = re.compile(r"\b(?:mac|hardware address|bssid|physical address|hwaddr)\b", re.I)

_NUMBER = r"[+-]?\d{1,3}\.\d{3,}"
_DEGREES = (
    r"[+-]?\d{1,3}(?:\.\d+)? ?(?:°|º|deg(?:rees)?) ?"
    r"(?:\d{1,2}(?:\.\d+)? ?['m] ?)?(?:\d{1,2}(?:\.\d+)? ?[\"s] ?)?"
)
COORDINATES = re.compile(
    rf"(?<![\w.])(?:{_DEGREES}[NS],? {{0,2}}{_DEGREES}[EWO]"
    rf"|[NS] ?{_DEGREES},? {{0,2}}[EW] ?{_DEGREES}"
    r"|\d{1,2}\.\d{3,} ?[NS],? {0,2}\d{1,3}\.\d{3,} ?[EW])(?!\w)",
    re.I,
)
PAIR = re.compile(
    rf"(?<![\w.])(?:{joined('place')})(?!\w)[^\n;?!]{{0,24}}?[\s:=@(\[\"']{{1,3}}"
    rf"(?P<value>{_NUMBER}[°,; ]{{1,3}}{_NUMBER})(?![\w]|\.\d)",
    re.I,
)
IN_MAP = re.compile(
    r"(?:[?&](?:q|ll|sll|center|query|daddr|saddr|destination|origin)=|/@|^@| @)"
    rf"(?P<value>{_NUMBER},{_NUMBER})(?![\w]|\.\d)"
)
LATITUDE = re.compile(
    rf"(?<![A-Za-z])lat(?:itude)?[\"']?\s?(?:is|[:=])?\s?[\"']?(?P<first>{_NUMBER})[\"'°]?[^\d\n]{{1,8}}"
    rf"(?<![A-Za-z])(?:lon|lng|long)(?:itude)?[\"']?\s?(?:is|[:=])?\s?[\"']?(?P<last>{_NUMBER})",
    re.I,
)

NETWORKS, NAME_CUE = joined("networks"), joined("account_name")
ACCOUNT_NAME = r"[A-Za-z0-9_](?:[\w.-]{1,30}\w)?"
AT_HANDLE = re.compile(
    rf"(?<![\w.@/`\"'#}}])(?<!\w\()@(?=[\w.-]*[A-Za-z])(?=[\w.-]{{3}}){ACCOUNT_NAME}(?![\w@(/-]|\.\w)"
)
HANDLE_CUE = re.compile(
    rf"(?<![\w-])(?:{NETWORKS}|{NAME_CUE}|follow(?:ing|ed|s)?|dms?|tag(?:ged)?|tweet(?:ed|s)?"
    r"|find me)(?!\w)",
    re.I,
)
# The user's name in a path that begins there, unless it is one that many machines have.
HOME = re.compile(
    r"(?:(?<![\w.~}/-])(?:file://)?(?:(?:/mnt)?/[a-z]|/var|/usr|/export)?/(?:home|Users)/"
    rf"|\b[A-Z]:\\{{1,2}}Users\\{{1,2}})(?!(?:{joined('users')})(?![\w.-]))"
    r"(?P<value>[A-Za-z][\w.-]{1,30}\w)(?=[/\\\s\"']|$)"
)
DISCORD = re.compile("discord", re.I)  # elsewhere name#1234 is an issue of a repository
HANDLE_NEAR = 40  # characters before a handle in which its cue counts; half of them behind it
NAMED_HANDLE = re.compile(
    rf"(?<![\w-])(?:{NAME_CUE}|(?:{NETWORKS})(?:[ '-](?:{NAME_CUE}|user|id|account|profile|name))?)"
    rf"(?: is| was|:| =| called| named)\s{{1,2}}[\"']?@?(?P<name>(?=[\w.-]*[A-Za-z]){ACCOUNT_NAME})"
    r"(?![\w@(/=#-]|\.\w)"
    r"|(?<![\w.])(?:t\.me|(?:instagram|twitter|x|facebook|tiktok|linkedin|snapchat)\.com"
    rf"(?:/in|/add)?)/@?(?P<profile>(?!(?:{joined('pages')})\b)[\w.]{{3,30}}\b)"
    r"|(?:微信|QQ)(?:号[:是]?|[:是]) ?(?P<chat>[A-Za-z\d_-]{5,20})"
    r"|(?<![\w/])u/(?P<reddit>[\w-]{3,20})(?![\w/])"
    r"|(?<![\w#])(?P<discord>[A-Za-z0-9_.]{2,32}#\d{4})(?!\w)",
    re.I,
)
# What the pattern above needs, in small letters
MAYBE_HANDLE = re.compile(
    rf"(?:{NETWORKS}|name|handle|nick|alias|gamertag|user|id|account|profile)"
    r"['\w -]{0,20}(?: is| was|:| =| called| named)\s|t\.me|\.com|u/|\w#\d|微信|qq"
)


LOG = re.compile(joined("log line"))


def birth_dates(text: str) -> Iterator[Span]:
    """Dates behind a word for birth, or before one where the language puts it last."""
    for pattern in BIRTH_DATES if BORN.search(text) else BIRTH_DATES[:1]:
        for match in pattern.finditer(text):
            yield match.span("value")


def plates(text: str) -> Iterator[Span]:
    """Letters and digits behind a word for a number plate, as many as one has."""
    for match in PLATE.finditer(text):
        letters = [*filter(str.isalnum, match["value"])]
        if len(letters) in PLATE_LENGTHS and len({*map(str.isdigit, letters)}) == 2:
            yield match.span("value")


def mac_addresses(text: str) -> Iterator[Span]:
    """Six bytes in hexadecimal; of digits alone, between spaces or without signs only
    with a cue.
    """
    for match in MAC.finditer(text):
        value = match.group()
        is_plain = value.isalnum() or " " in value or not re.search("[A-Fa-f]", value)
        digits = set(re.sub(r"\W", "", value).lower())
        if len(digits) > 1 and (not is_plain or MAC_CUE.search(text)):
            yield match.span()


def coordinates(text: str) -> Iterator[Span]:
    """Latitude and longitude: with degrees or hemispheres, behind their names or a cue."""
    for match in COORDINATES.finditer(text):
        yield match.span()
    for match in (*PAIR.finditer(text), *IN_MAP.finditer(text)):
        if is_place(*re.findall(_NUMBER, match["value"])[:2]):
            yield match.span("value")
    for match in LATITUDE.finditer(text):
        if is_place(match["first"], match["last"]):
            yield match.start("first"), match.end("last")


def is_place(latitude: str, longitude: str) -> bool:
    """Whether two numbers are within the bounds, in degrees."""
    return abs(float(latitude)) <= 90 and abs(float(longitude)) <= 180


def handles(text: str) -> Iterator[Span]:
    """Account names: @name near a network's name or a word such as "follow"; names with a digit or
    sign behind "my username is"; u/name, name#1234; the user of a home folder.
    """
    if "/" in text or "\\" in text:
        yield from (match.span("value") for match in HOME.finditer(text))
    if "@" in text and HANDLE_CUE.search(text):
        for match in AT_HANDLE.finditer(text):
            start, end = match.span()
            before = HANDLE_CUE.search(text, max(0, start - HANDLE_NEAR), start)
            if before or HANDLE_CUE.search(text, end, end + HANDLE_NEAR // 2):
                yield start, end
    for match in NAMED_HANDLE.finditer(text) if MAYBE_HANDLE.search(text.lower()) else ():
        kind = match.lastgroup
        assert kind is not None, "each alternative has a group"
        value = match[kind]
        if kind == "discord" and not DISCORD.search(text):
            continue
        if kind != "name" or re.search(r"[\d_.-]", value):
            yield match.span(kind)
