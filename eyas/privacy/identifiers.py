"""National identity, tax, social security and health numbers (identifiers.yaml): the form of each,
its check (python-stdnum's), and the cue words that one needs whose form and check are loose.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import yaml

from eyas.privacy.patterns import is_part, says
from eyas.privacy.spelling import FILES, Span, cue, joined, plain

SG_WEIGHTS = (2, 7, 6, 5, 4, 3, 2)
SG_LETTERS = {"ST": "JZIHGFEDCBA", "FG": "XWUTRQPNMLK"}

# Where a number with a check may begin: six digits close together, letters before or among them, or
# India's PAN, with four.
START = re.compile(
    r"(?<![\w./+-])(?=(?:[A-Za-zÑ&]{1,6}[ -]?)?\d(?:[A-Za-z]{0,5}[ ./+-]?\d){5}|[A-Z]{5}\d{4})",
    re.ASCII,
)
FOUR_DIGITS = re.compile(r"\d(?:[A-Z /.-]{0,12}\d){3}")  # of one without


@dataclass(frozen=True, slots=True)
class Identifier:
    """A kind of number. cue: words that it needs beside it."""

    name: str
    example: str
    pattern: re.Pattern[str]
    valid: Callable[[str], bool]
    cue: re.Pattern[str] | None = None

    @property
    def is_checked(self) -> bool:
        """Whether its check is more than a count of digits."""
        return self.valid not in (is_document, is_vin)


def is_nric(value: str) -> bool:
    """Singapore's check letter: weighted digits modulo 11, plus 4 for those issued since 2000."""
    series, digits, letter = value[0].upper(), value[1:-1], value[-1].upper()
    total = sum(
        int(digit) * weight for digit, weight in zip(digits, SG_WEIGHTS, strict=True)
    ) + 4 * (series in "TG")
    letters = next((letters for group, letters in SG_LETTERS.items() if series in group), "")
    return bool(letters) and letters[total % 11] == letter


def is_nino(value: str) -> bool:
    """Not a prefix that the UK never issues; it has no check digit."""
    return value[:2].upper() not in ("BG", "GB", "NK", "KN", "TN", "NT", "ZZ")


def is_snils(value: str) -> bool:
    """Russia's insurance number: weighted digits modulo 101, of which 100 is written 00."""
    *digits, tens, ones = (int(sign) for sign in value if sign.isdigit())
    total = sum(digit * weight for digit, weight in zip(digits, range(9, 0, -1), strict=True))
    return total % 101 % 100 == 10 * tens + ones


def is_document(value: str) -> bool:
    """At least four digits: passports and licences have no public check."""
    return sum(letter.isdigit() for letter in value) >= 4


def is_vin(value: str) -> bool:
    """Letters and digits: its check digit is North America's alone."""
    return any(map(str.isalpha, value)) and is_document(value)


CHECKS = {one.__name__: one for one in (is_nric, is_nino, is_snils, is_document, is_vin)}


def _read() -> Iterator[Identifier]:
    for one in yaml.safe_load((FILES / "identifiers.yaml").read_text(encoding="utf-8")):
        form, check = one["form"], one["check"]
        words = joined("document") if one["name"] == "document" else one.get("cue")
        yield Identifier(
            one["name"],
            one["example"],
            re.compile(rf"(?<![\w./+-])(?:{form})(?![\w/+-]|\.\d)", re.ASCII),
            CHECKS.get(check) or importlib.import_module(f"stdnum.{check}").is_valid,
            re.compile(cue(words), re.I) if words else None,
        )


IDENTIFIERS = tuple(_read())


DOCUMENT_CUE = re.compile(cue(f"{joined('document')}|{joined('national')}"), re.I)


def is_named(text: str, start: int, end: int) -> bool:
    """Whether a word beside the number says what it is: one for any document, or for a kind whose
    form it has. The words of all kinds would not do: "ein" is among them.
    """
    value = plain(text[start:end]).text
    cues = [one.cue for one in IDENTIFIERS if one.cue and one.pattern.fullmatch(value)]
    return any(says(text, start, end, one) for one in (DOCUMENT_CUE, *cues))


def national_ids(text: str) -> Iterator[Span]:
    """Every national number of a text."""
    starts = [match.start() for match in START.finditer(text)]
    for kind in IDENTIFIERS:
        for match in _written(kind, text, starts):
            if kind.valid(match.group()):
                said = says(text, *match.span(), kind.cue or DOCUMENT_CUE, holds=kind.is_checked)
                is_alone = said is None and not kind.cue and not is_part(text, match.start())
                if said or is_alone:
                    yield match.span()


def _written(kind: Identifier, text: str, starts: list[int]) -> Iterator[re.Match[str]]:
    if not kind.is_checked:
        assert kind.cue, "without a check a number needs a cue"
        if FOUR_DIGITS.search(text) and kind.cue.search(text):
            yield from kind.pattern.finditer(text)
        return
    end = 0
    for start in starts:
        if start >= end and (match := kind.pattern.match(text, start)):
            end = match.end()
            yield match


def is_national_id(value: str) -> bool:
    """Whether the value passes the check of some kind that has one."""
    return any(
        kind.is_checked and kind.pattern.fullmatch(value) and kind.valid(value)
        for kind in IDENTIFIERS
    )
