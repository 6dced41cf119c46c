"""Personal data that patterns and checksums can find: found, masked by the name of its type, or the row dropped.

Knows Presidio's pattern recognisers and adds cards of every issuer and telephone numbers of many countries. Knows no names
and no places, which no pattern finds. Loads no model and opens no connection: Presidio runs on its built-in engine that
does nothing, and the list of public suffixes is the one that is installed.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import re
from collections.abc import Iterable
from typing import Any, Literal

import phonenumbers
import tldextract
from presidio_analyzer import AnalyzerEngine, LocalRecognizer, Pattern, RecognizerRegistry, RecognizerResult
from presidio_analyzer.nlp_engine import NoOpNlpEngine
from presidio_analyzer.predefined_recognizers import (
    CreditCardRecognizer,
    EmailRecognizer,
    IbanRecognizer,
    IpRecognizer,
    UsSsnRecognizer,
)
from pydantic import BaseModel, ConfigDict

from eyas.data.rows import Drop, Row
from eyas.privacy.finding import Finding

Action = Literal["mask", "drop", "keep"]


class PersonalPolicy(BaseModel):
    """What to do with each type: replace the value by <TYPE>, drop the row, or leave it.

    Whoever writes down an account or a card writes a name and an address beside it, which no pattern finds: those rows go.
    The fields' order is a rank: where findings overlap, they become one of the type that comes first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    email_address: Action = "mask"
    iban_code: Action = "drop"
    credit_card: Action = "drop"
    us_ssn: Action = "drop"
    ip_address: Action = "mask"
    phone_number: Action = "mask"

    def action(self, type: str) -> Action:
        chosen: Action = getattr(self, type.lower())
        return chosen


TYPES = tuple(name.upper() for name in PersonalPolicy.model_fields)
WEAKEST = 0.4  # Presidio's score; its bare nine digits taken for an SSN have .05
EXCERPT = 240  # characters
WINDOW, OVERLAP = 2000, 250  # characters; long texts are searched in pieces that share more than any value needs

# Nothing of TYPES is written without one of these, so most prompts need no closer look.
SUSPICIOUS = re.compile(r"[\d@]")

# By issuer: Visa 4, Mastercard 51-55 and 2221-2720, American Express 34 and 37, Diners 30, 36, 38 and 39, JCB 35, 1800 and
# 2131, Discover, UnionPay and Maestro 6, Maestro 50 and 56-58.
CARD_ISSUER = re.compile(r"4|5[0-8]|2(?:22[1-9]|2[3-9]|[3-6]|7[01]|720)|3[0-9]|6|1800|2131")
# Each layout is tried by itself, since an expiry date or a security code may follow as one more group of digits.
CARD_LAYOUTS = {
    "one run": r"\d{12,19}",
    "4-4-4-4": r"\d{4}([ -])\d{4}\1\d{4}\1\d{4}",
    "4-4-4-4-3": r"\d{4}([ -])\d{4}\1\d{4}\1\d{4}\1\d{3}",
    "4-6-5": r"\d{4}([ -])\d{6}\1\d{4,5}",
    "4-4-5": r"\d{4}([ -])\d{4}\1\d{4,5}",
}
CARD_PATTERNS = [
    Pattern(name, rf"(?<![\w+])(?<!\d[.,-]){digits}(?!\w|[.,]\d)", WEAKEST) for name, digits in CARD_LAYOUTS.items()
]

# Countries whose national numbering is tried; any country's number is found in international form or beside a cue.
PHONE_REGIONS = ("US", "GB", "IE", "AU", "NZ", "ZA", "IN", "DE", "AT", "CH", "FR", "BE", "NL", "ES", "IT", "SE", "BR", "MX")
PHONE = re.compile(
    r"(?<![\w#$€£+])(?<!\d[.,:/-])[+(]?\d(?:[ \u00a0().-]{0,2}\d){6,63}(?:\s?(?:x|ext\.?)\s?\d{1,6})?(?![\w%/]|[.,:-]\d)", re.I
)
PHONE_CUE = re.compile(
    r"\b(?:(?:tele)?phone|tel|mobile|cell|landline|fax|office|my number"
    r"|call(?:ing|ed)?|dial|ring|text|sms|whatsapp|reach|answering)\b",
    re.I,
)
# Written without a cue, a national number shows itself by a trunk 0, by North America's 3-3-4, or by four groups or more.
PHONE_FORM = re.compile(r"\(?0.*|(?:1[ .-]?)?\(?\d{3}\)?[ .-]?\d{3}[ .-]?\d{4}|\d+(?:[.-]\d+){3,}")
# Runs of digits that are something else: dates (with a time), spans of years, dotted quads, ISBN.
NO_PHONE = re.compile(
    r"(?:19|20)\d\d[-. ]\d{1,2}[-. ]\d{1,2}(?: .*)?|\d{1,2}[-. ]\d{1,2}[-. ](?:19|20)\d\d(?: .*)?"
    r"|\(?(?:1\d|20)\d\d(?: |-| - )(?:1\d|20)\d\d|\d{1,3}(?:\.\d{1,3}){3}|97[89][ -].*"
)
# Where one number of a run may end and the next begin.
PHONE_BREAK = re.compile(r"\d[).-]?[ \u00a0]|\d(?=[(+])")
NEAR_BEFORE, NEAR_AFTER = 32, 12  # characters in which a cue counts


def luhn(digits: str) -> bool:
    """Whether the last digit is the check digit of ISO/IEC 7812-1 (mod 10)."""
    doubled = (int(digit) * 2 for digit in digits[-2::-2])
    return (sum(int(digit) for digit in digits[-1::-2]) + sum(value - 9 * (value > 9) for value in doubled)) % 10 == 0


def is_phone(text: str, start: int, end: int) -> bool:
    """Whether the digits at [start, end) are a telephone number.

    Yes if written internationally (`+` and 8 to 15 digits), if a word such as "call" stands beside them (7 to 15 digits), or
    if they look like a number and are a valid one in some country of PHONE_REGIONS; bare ten digits count as American only.
    """
    value = re.split(r"\s?(?:x|ext)", text[start:end], flags=re.I)[0]
    num_digits = len(re.findall(r"\d", value))
    if value.startswith("+"):
        return 8 <= num_digits <= 15
    if NO_PHONE.fullmatch(value):
        return False
    if PHONE_CUE.search(f"{text[max(0, start - NEAR_BEFORE) : start]} {text[end : end + NEAR_AFTER]}"):
        return 7 <= num_digits <= 15
    if num_digits < 8 or not PHONE_FORM.fullmatch(value):
        return False
    regions = ("US",) if value.isdigit() and value[0] != "0" else PHONE_REGIONS
    return any(_is_valid(value, region) for region in regions)


def phones(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """The telephone numbers in the run of digits at [start, end): from the left, the longest each time.

    One begins where the run does, after a space, or with a bracket or plus; it ends where the next could begin.
    """
    starts = [start, *(match.end() for match in PHONE_BREAK.finditer(text, start, end))]
    ends = [*(len(text[:begin].rstrip(" \u00a0.-")) for begin in starts[1:]), end]
    found: list[tuple[int, int]] = []
    for first, begin in enumerate(starts):
        if not found or begin >= found[-1][1]:
            longest = (last for last in reversed(ends[first:]) if is_phone(text, begin, last))
            found += [(begin, last) for last in longest][:1]
    return found


def _is_valid(number: str, region: str) -> bool:
    try:
        return phonenumbers.is_valid_number(phonenumbers.parse(number, region))
    except phonenumbers.NumberParseException:
        return False


class _Emails(EmailRecognizer):  # type: ignore[misc]
    """Presidio's, with the installed list of public suffixes in place of one fetched and cached."""

    _extract = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)

    def validate_result(self, pattern_text: str) -> bool:
        return bool(self._extract(pattern_text).suffix)


class _Ibans(IbanRecognizer):  # type: ignore[misc]
    """Presidio's, in either case; letters beyond ASCII would make it log the value."""

    def __init__(self) -> None:
        super().__init__(regex_flags=re.IGNORECASE)

    def validate_result(self, pattern_text: str) -> bool | None:
        valid: bool | None = super().validate_result(pattern_text) if pattern_text.isascii() else False
        return valid


class _IpAddresses(IpRecognizer):  # type: ignore[misc]
    """Presidio's, without private, local and documentation addresses, which are nobody's, and names such as `bad::cafe`."""

    def invalidate_result(self, pattern_text: str) -> bool:
        if super().invalidate_result(pattern_text) or not SUSPICIOUS.search(pattern_text):
            return True
        return not ipaddress.ip_interface(pattern_text).ip.is_global


class _Cards(CreditCardRecognizer):  # type: ignore[misc]
    """12 to 19 digits of a known issuer with a right check digit."""

    def __init__(self) -> None:
        super().__init__(patterns=CARD_PATTERNS)

    def validate_result(self, pattern_text: str) -> bool:
        digits = re.sub(r"\D", "", pattern_text)
        return 12 <= len(digits) <= 19 and CARD_ISSUER.match(digits) is not None and luhn(digits)


class _Phones(LocalRecognizer):  # type: ignore[misc]
    """Telephone numbers by `is_phone`."""

    def __init__(self) -> None:
        super().__init__(supported_entities=["PHONE_NUMBER"])

    def load(self) -> None:
        """Nothing to load."""

    def analyze(self, text: str, entities: list[str], nlp_artifacts: Any = None) -> list[RecognizerResult]:
        spans = (span for run in PHONE.finditer(text) for span in phones(text, *run.span()))
        return [RecognizerResult("PHONE_NUMBER", start, end, WEAKEST) for start, end in spans]


@functools.cache
def _analyzer() -> AnalyzerEngine:
    # Given both, it neither looks for a model to download nor brings recognisers that were not asked for.
    recognizers = [_Emails(), _Ibans(), _Cards(), UsSsnRecognizer(), _IpAddresses(), _Phones()]
    nothing = NoOpNlpEngine([{"lang_code": "en", "model_name": "none"}])
    return AnalyzerEngine(registry=RecognizerRegistry(recognizers), nlp_engine=nothing)


def find(text: str) -> list[Finding]:
    """All personal data of TYPES in a text, by place, without overlaps.

    In pieces, so that time grows with the length only: Presidio's patterns can take its square, and past a minute it gives
    a pattern up with no more than a line in the log.
    """
    if not SUSPICIOUS.search(text):
        return []
    findings = []
    for start in range(0, max(len(text) - OVERLAP, 1), WINDOW):
        piece = text[start : start + WINDOW + OVERLAP]
        results = _analyzer().analyze(piece, language="en", entities=list(TYPES), score_threshold=WEAKEST)
        findings += [Finding(result.entity_type, start + result.start, start + result.end) for result in results]
    return merged(findings)


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings by place, overlapping ones joined, so that masking leaves no rest of either."""
    joined: list[Finding] = []
    for finding in sorted(findings, key=lambda one: (one.start, one.end)):
        if joined and finding.start < joined[-1].end:
            last = joined.pop()
            type = min(last.type, finding.type, key=TYPES.index)
            finding = dataclasses.replace(last, type=type, end=max(last.end, finding.end))
        joined.append(finding)
    return joined


def mask(text: str, findings: Iterable[Finding]) -> str:
    """The text with each finding replaced by its type, such as <EMAIL_ADDRESS>."""
    for finding in sorted(findings, key=lambda one: one.start, reverse=True):
        text = f"{text[: finding.start]}<{finding.type}>{text[finding.end :]}"
    return text


def excerpt(text: str) -> str:
    """The beginning of a text with all personal data masked, whatever the policy: for people who read what was dropped."""
    findings = [finding for finding in find(text[:WINDOW]) if finding.start < EXCERPT]
    end = max([EXCERPT, *(finding.end for finding in findings)])
    return mask(text[:end], findings) + ("..." if end < len(text) else "")


class PersonalData:
    """Masks what the policy masks; drops a row that holds anything the policy drops."""

    def __init__(self, policy: PersonalPolicy) -> None:
        self._policy = policy

    def __call__(self, row: Row) -> Row | Drop:
        texts: list[tuple[int | None, str]] = [(None, row.system or ""), *enumerate(row.turns)]
        found = {turn: [dataclasses.replace(one, turn=turn) for one in find(text)] for turn, text in texts}
        every = tuple(finding for findings in found.values() for finding in findings)
        if not every:
            return row
        if any(self._policy.action(finding.type) == "drop" for finding in every):
            return Drop("personal_data", note="the policy drops rows with what was found", found=every)
        masks = {turn: [one for one in findings if self._policy.action(one.type) == "mask"] for turn, findings in found.items()}
        return dataclasses.replace(
            row,
            system=mask(row.system, masks[None]) if row.system else row.system,
            turns=tuple(mask(text, masks[turn]) for turn, text in enumerate(row.turns)),
            masked=row.masked + tuple(finding for findings in masks.values() for finding in findings),
        )
