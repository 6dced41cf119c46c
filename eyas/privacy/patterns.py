"""Values that a pattern and a check find: mail, IP and web addresses, cards, accounts, US social
security numbers.

Mail, IBAN and IP are Presidio's recognisers, each behind a cheap look at the text, since most
prompts hold none. Loads no model and opens no connection: the list of public suffixes is the one
that is installed.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import Any

import tldextract
from presidio_analyzer import RecognizerResult
from presidio_analyzer.predefined_recognizers import EmailRecognizer, IbanRecognizer, IpRecognizer

from eyas.privacy.recognizer import Place

# By issuer: Visa 4, Mastercard 51-55 and 2221-2720, American Express 34 and 37, Diners 30, 36, 38
# and 39, JCB 35, 1800 and 2131, Discover, UnionPay and Maestro 6, Maestro 50 and 56-58.
CARD_ISSUER = re.compile(r"4|5[0-8]|2(?:22[1-9]|2[3-9]|[3-6]|7[01]|720)|3[0-9]|6|1800|2131")
# Each layout is tried by itself, since an expiry date or a security code may follow as one more
# group of digits.
CARD_LAYOUTS = {
    "one run": r"\d{12,19}",
    "4-4-4-4": r"\d{4}([ -])\d{4}\1\d{4}\1\d{4}",
    "4-4-4-4-3": r"\d{4}([ -])\d{4}\1\d{4}\1\d{4}\1\d{3}",
    "4-6-5": r"\d{4}([ -])\d{6}\1\d{4,5}",
    "4-4-5": r"\d{4}([ -])\d{4}\1\d{4,5}",
}
CARDS = [
    re.compile(rf"(?<![\w+])(?<!\d[.,-]){digits}(?!\w|[.,]\d)") for digits in CARD_LAYOUTS.values()
]
MAYBE_CARD = re.compile(r"\d{4}[ -]?\d{4}")

SSN = re.compile(r"(?<![\w.-])(\d{3})([- .])(\d{2})\2(\d{4})(?![\w-]|\.\d)")
BARE_SSN = re.compile(r"(?<![\w.-])(\d{3})(\d{2})(\d{4})(?![\w-]|\.\d)")
SSN_CUE = re.compile(r"\bssn\b|\bsocial[ -]security\b", re.I)
WEAKEST = 0.4  # score of Presidio's own patterns
CUE_DISTANCE = 40  # characters between a cue and what it speaks of

URL = re.compile(r"(?<![\w@])(?:(?:https?|ftp|wss?)://[\w\[]|www\.\w)[^\s<>\"'`{}|\\^]*", re.I)
AFTER_URL = ".,;:!?)]*_"  # what ends a sentence or a bracket rather than a link
CREDENTIALS = re.compile(
    r"(?<![\w+.-])[a-z][a-z0-9+.-]{1,20}://[^\s/@:<>\"'`{}]{0,64}:[^\s/@<>{}\"'`]{1,128}@[^\s<>\"'`{}]+",
    re.I,
)
TOKEN_IN_URL = re.compile(
    r"[?&;#](?:(?:access|auth|id|refresh|session|sas)?_?token|api[_-]?key|sig|signature|pass(?:word|wd)?|pwd|secret"
    r"|client_secret|x-amz-signature|code)=(?=[^&\s]*\d)[^&\s]{8,}",
    re.I,
)

MAYBE_IBAN = re.compile(r"[A-Za-z]{2}\d\d")
MAYBE_IP = re.compile(r"\d\.\d{1,3}\.\d{1,3}\.\d|[0-9a-fA-F]?:[0-9a-fA-F]{0,4}:")


def luhn(digits: str) -> bool:
    """Whether the last digit is the check digit of ISO/IEC 7812-1 (mod 10)."""
    doubled = (int(digit) * 2 for digit in digits[-2::-2])
    return (
        sum(int(digit) for digit in digits[-1::-2])
        + sum(value - 9 * (value > 9) for value in doubled)
    ) % 10 == 0


def cards(text: str) -> Iterator[Place]:
    """12 to 19 digits of a known issuer with a right check digit."""
    if not MAYBE_CARD.search(text):
        return
    for layout in CARDS:
        for match in layout.finditer(text):
            digits = re.sub(r"\D", "", match.group())
            if 12 <= len(digits) <= 19 and CARD_ISSUER.match(digits) and luhn(digits):
                yield "CREDIT_CARD", *match.span()


def social_security_numbers(text: str) -> Iterator[Place]:
    """US numbers in three groups, and nine bare digits beside a cue; areas 000, 666 and 9xx were
    never given to anybody.
    """
    cue = SSN_CUE.search(text)
    for pattern in (SSN, BARE_SSN) if cue else (SSN,):
        for match in pattern.finditer(text):
            area, serial = match.group(1), match.groups()[-1]
            group = match.groups()[-2]
            given = (
                area not in ("000", "666") and area[0] != "9" and group != "00" and serial != "0000"
            )
            if given and (
                pattern is SSN
                or SSN_CUE.search(text, max(0, match.start() - CUE_DISTANCE), match.start())
            ):
                yield "US_SSN", *match.span()


def links(text: str) -> Iterator[Place]:
    """Web addresses that say so (a scheme or www), and those that hold a password or a token."""
    if "://" not in text and "www." not in text.lower():
        return
    for match in CREDENTIALS.finditer(text):
        yield "URL_CREDENTIALS", match.start(), match.start() + len(match.group().rstrip(AFTER_URL))
    for match in URL.finditer(text):
        link = match.group().rstrip(AFTER_URL)
        yield (
            "URL_CREDENTIALS" if TOKEN_IN_URL.search(link) else "URL",
            match.start(),
            match.start() + len(link),
        )


def sure(results: list[RecognizerResult]) -> list[RecognizerResult]:
    """Without the patterns that Presidio wants confirmed by words beside them."""
    return [result for result in results if result.score >= WEAKEST]


class Emails(EmailRecognizer):  # type: ignore[misc]
    """Presidio's, with the installed list of public suffixes in place of one fetched and cached."""

    _extract = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)

    def analyze(self, text: str, *args: Any, **kwargs: Any) -> list[RecognizerResult]:
        return sure(super().analyze(text, *args, **kwargs)) if "@" in text else []

    def validate_result(self, pattern_text: str) -> bool:
        return bool(self._extract(pattern_text).suffix)


class Ibans(IbanRecognizer):  # type: ignore[misc]
    """Presidio's, in either case; letters beyond ASCII would make it log the value."""

    def __init__(self) -> None:
        super().__init__(regex_flags=re.IGNORECASE)

    def analyze(self, text: str, *args: Any, **kwargs: Any) -> list[RecognizerResult]:
        return sure(super().analyze(text, *args, **kwargs)) if MAYBE_IBAN.search(text) else []

    def validate_result(self, pattern_text: str) -> bool | None:
        valid: bool | None = (
            super().validate_result(pattern_text) if pattern_text.isascii() else False
        )
        return valid


class IpAddresses(IpRecognizer):  # type: ignore[misc]
    """Presidio's, without private, local and documentation addresses, which are nobody's, and names
    such as `bad::cafe`.
    """

    def analyze(self, text: str, *args: Any, **kwargs: Any) -> list[RecognizerResult]:
        return sure(super().analyze(text, *args, **kwargs)) if MAYBE_IP.search(text) else []

    def invalidate_result(self, pattern_text: str) -> bool:
        if super().invalidate_result(pattern_text) or not re.search(r"\d", pattern_text):
            return True
        return not ipaddress.ip_interface(pattern_text).ip.is_global
