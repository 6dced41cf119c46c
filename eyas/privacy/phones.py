"""Telephone numbers: international, national of many countries, and short ones beside a word such
as "call".

Knows how numbers are written and which are valid where. Knows no other kind of number but to stay
away from it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import phonenumbers

from eyas.privacy.recognizer import Place

# Countries whose national numbering is tried; any country's number is found in international form
# or beside a cue.
PHONE_REGIONS = (
    "US",
    "GB",
    "IE",
    "AU",
    "NZ",
    "ZA",
    "IN",
    "DE",
    "AT",
    "CH",
    "FR",
    "BE",
    "NL",
    "ES",
    "IT",
    "SE",
    "BR",
    "MX",
)
# Most texts hold no seven digits that stand together.
ENOUGH_DIGITS = re.compile(r"\d(?:\D{0,3}\d){6}")
PHONE = re.compile(
    r"(?<![\w#$€£+])(?<!\d[.,:/-])[+(]?\d(?:[ \u00a0().-]{0,2}\d){6,63}(?:\s?(?:x|ext\.?)\s?\d{1,6})?(?![\w%/]|[.,:-]\d)",
    re.I,
)
PHONE_CUE = re.compile(
    r"\b(?:(?:tele)?phone|tel|mobile|cell|landline|fax|office|my number"
    r"|call(?:ing|ed)?|dial|ring|text|sms|whatsapp|reach|answering)\b",
    re.I,
)
# Written without a cue, a national number shows itself by a trunk 0, by North America's 3-3-4, or
# by four groups or more.
PHONE_FORM = re.compile(r"\(?0.*|(?:1[ .-]?)?\(?\d{3}\)?[ .-]?\d{3}[ .-]?\d{4}|\d+(?:[.-]\d+){3,}")
# Runs of digits that are something else: dates (with a time), spans of years, dotted quads, ISBN.
NO_PHONE = re.compile(
    r"(?:19|20)\d\d[-. ]\d{1,2}[-. ]\d{1,2}(?: .*)?|\d{1,2}[-. ]\d{1,2}[-. ](?:19|20)\d\d(?: .*)?"
    r"|\(?(?:1\d|20)\d\d(?: |-| - )(?:1\d|20)\d\d|\d{1,3}(?:\.\d{1,3}){3}|97[89][ -].*"
)
# Where one number of a run may end and the next begin.
PHONE_BREAK = re.compile(r"\d[).-]?[ \u00a0]|\d(?=[(+])")
NEAR_BEFORE, NEAR_AFTER = 32, 12  # characters in which a cue counts


def phones(text: str) -> Iterator[Place]:
    """Every telephone number of a text."""
    if ENOUGH_DIGITS.search(text):
        for run in PHONE.finditer(text):
            for start, end in phones_in(text, *run.span()):
                yield "PHONE_NUMBER", start, end


def phones_in(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """The telephone numbers in the run of digits at [start, end): from the left, the longest each
    time.

    One begins where the run does, after a space, or with a bracket or plus; it ends where the next
    could begin.
    """
    starts = [start, *(match.end() for match in PHONE_BREAK.finditer(text, start, end))]
    ends = [*(len(text[:begin].rstrip(" \u00a0.-")) for begin in starts[1:]), end]
    found: list[tuple[int, int]] = []
    for first, begin in enumerate(starts):
        if not found or begin >= found[-1][1]:
            longest = (last for last in reversed(ends[first:]) if is_phone(text, begin, last))
            found += [(begin, last) for last in longest][:1]
    return found


def is_phone(text: str, start: int, end: int) -> bool:
    """Whether the digits at [start, end) are a telephone number.

    Yes if written internationally (`+` and 8 to 15 digits), if a word such as "call" stands beside
    them (7 to 15 digits), or if they look like a number and are a valid one in some country of
    PHONE_REGIONS; bare ten digits count as American only.
    """
    value = re.split(r"\s?(?:x|ext)", text[start:end], flags=re.I)[0]
    num_digits = len(re.findall(r"\d", value))
    if value.startswith("+"):
        return 8 <= num_digits <= 15
    if NO_PHONE.fullmatch(value):
        return False
    if PHONE_CUE.search(
        f"{text[max(0, start - NEAR_BEFORE) : start]} {text[end : end + NEAR_AFTER]}"
    ):
        return 7 <= num_digits <= 15
    return (
        8 <= num_digits <= 15
        and PHONE_FORM.fullmatch(value) is not None
        and next(readings(value), None) is not None
    )


def readings(value: str) -> Iterator[phonenumbers.PhoneNumber]:
    """The numbers that a value may be: by its prefix alone, else each valid one of PHONE_REGIONS."""
    if value.startswith("+"):
        number = _parsed("", value)
        if number is not None:
            yield number
        return
    for region in ("US",) if value.isdigit() and value[0] != "0" else PHONE_REGIONS:
        number = _parsed(region, value)
        if number is not None and phonenumbers.is_valid_number(number):
            yield number


@functools.lru_cache(maxsize=1 << 10)
def _parsed(region: str, value: str) -> phonenumbers.PhoneNumber | None:
    try:
        return phonenumbers.parse(value, region or None)
    except phonenumbers.NumberParseException:
        return None
