"""National identity, tax, social security and health numbers of 37 countries: how each is written,
its check (python-stdnum's), and cue words.

A number whose form and check are so loose that ordinary prompts hold it by chance needs a cue word
within CUE_DISTANCE.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stdnum.ar import cuit
from stdnum.au import tfn
from stdnum.be import nn
from stdnum.bg import egn
from stdnum.br import cpf
from stdnum.ca import sin
from stdnum.ch import ssn as ahv
from stdnum.cl import rut
from stdnum.cn import ric
from stdnum.cz import rc
from stdnum.de import idnr as steuer_id
from stdnum.dk import cpr
from stdnum.es import dni, nie
from stdnum.fi import hetu
from stdnum.fr import nir
from stdnum.gb import nhs
from stdnum.gr import amka
from stdnum.hr import oib
from stdnum.ie import pps
from stdnum.il import idnr as teudat_zehut
from stdnum.in_ import aadhaar, pan
from stdnum.it import codicefiscale
from stdnum.jp import in_ as my_number
from stdnum.kr import rrn
from stdnum.mx import curp
from stdnum.nl import bsn
from stdnum.no import fodselsnummer
from stdnum.pl import pesel
from stdnum.pt import nif
from stdnum.ro import cnp
from stdnum.ru import inn
from stdnum.se import personnummer
from stdnum.th import pin
from stdnum.tr import tckimlik
from stdnum.us import itin
from stdnum.za import idnr as za_id

from eyas.privacy.spelling import Span
from eyas.privacy.spelling import cue as spelt_cue

CUE_DISTANCE = 40  # characters between a cue and the number after it
CLOSE = 24  # the same behind the number
SG_WEIGHTS = (2, 7, 6, 5, 4, 3, 2)
SG_LETTERS = {"ST": "JZIHGFEDCBA", "FG": "XWUTRQPNMLK"}

# Five digits so close together (letters and separators may stand between), or India's four.
MAYBE = re.compile(r"\d(?:[A-Za-z]?[ ./+-]?\d){4}|[A-Z]\d{4}[A-Z]")


@dataclass(frozen=True, slots=True)
class Identifier:
    """A kind of number: its form, its check, and the cue words that it needs beside it, if any."""

    name: str
    pattern: re.Pattern[str]
    valid: Callable[[str], bool]
    cue: re.Pattern[str] | None = None


def _kind(name: str, written: str, valid: Callable[[str], bool], words: str = "") -> Identifier:
    pattern = re.compile(rf"(?<![\w./+-])(?:{written})(?![\w/+-]|\.\d)", re.ASCII)
    return Identifier(name, pattern, valid, re.compile(spelt_cue(words), re.I) if words else None)


def is_nric(value: str) -> bool:
    """Singapore's check letter: weighted digits modulo 11, plus 4 for those issued since 2000."""
    series, digits, letter = value[0].upper(), value[1:-1], value[-1].upper()
    total = sum(
        int(digit) * weight for digit, weight in zip(digits, SG_WEIGHTS, strict=True)
    ) + 4 * (series in "TG")
    letters = next((letters for group, letters in SG_LETTERS.items() if series in group), "")
    return bool(letters) and letters[total % 11] == letter


def is_nino(value: str) -> bool:
    """Not a prefix that the UK never issues; there is no check digit."""
    return value[:2].upper() not in ("BG", "GB", "NK", "KN", "TN", "NT", "ZZ")


def is_snils(value: str) -> bool:
    """Russia's insurance number: weighted digits modulo 101, of which 100 is written 00."""
    *digits, tens, ones = (int(sign) for sign in value if sign.isdigit())
    total = sum(digit * weight for digit, weight in zip(digits, range(9, 0, -1), strict=True))
    return total % 101 % 100 == 10 * tens + ones


def is_document(value: str) -> bool:
    """At least four digits: passports and licences have no public check, and need their cue."""
    return sum(letter.isdigit() for letter in value) >= 4


DOCUMENT_CUE = (
    r"passport(?: (?:number|no\.?))?|driv(?:er'?s?|ing) licen[cs]e(?: (?:number|no\.?))?"
    r"|licen[cs]e (?:number|no\.?)|(?:identity|id) card(?: (?:number|no\.?))?"
    r"|national id(?: (?:number|no\.?))?|personalausweis|reisepass|medical record(?: number)?|mrn"
    r"|pasaporte|passaporto|passeport|паспорт\w*|护照号?码?|护照|旅券|パスポート|여권(?:번호)?"
    r"|health (?:insurance|card)(?: (?:number|no\.?))?|medicare(?: (?:number|no\.?))?"
)
IDENTIFIERS = (
    _kind("US ITIN", r"9\d\d-\d\d-\d{4}", itin.is_valid),
    _kind("UK NINO", r"[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z] ?\d\d ?\d\d ?\d\d ?[A-D]", is_nino),
    _kind("UK NHS", r"\d{3}[ -]?\d{3}[ -]?\d{4}", nhs.is_valid, r"nhs|national health"),
    _kind("IE PPS", r"\d{7}[A-W][A-IW]?", pps.is_valid),
    _kind("ES DNI", r"\d{8}-?[A-Z]|\d{1,2}\.\d{3}\.\d{3}-?[A-Z]", dni.is_valid),
    _kind("ES NIE", r"[XYZ]-?\d{7}-?[A-Z]", nie.is_valid),
    _kind(
        "IT codice fiscale",
        r"[A-Za-z]{6}\d\d[A-Za-z]\d\d[A-Za-z]\d{3}[A-Za-z]",
        codicefiscale.is_valid,
    ),
    _kind("FR NIR", r"[12] ?\d\d ?\d\d ?(?:\d\d|2[AB]) ?\d{3} ?\d{3} ?\d\d", nir.is_valid),
    _kind(
        "DE Steuer-ID",
        r"\d\d ?\d{3} ?\d{3} ?\d{3}",
        steuer_id.is_valid,
        r"steuer(?:liche)?[ -]?(?:id|identifikation\w*|nummer)|idnr|tin"
        r"|tax (?:id|number|identification)\w*",
    ),
    _kind("CH AHV", r"756\.?\d{4}\.?\d{4}\.?\d\d", ahv.is_valid),
    _kind(
        "NL BSN",
        r"\d{9}|\d{4}\.\d\d\.\d{3}",
        bsn.is_valid,
        r"bsn|burgerservicenummer|sofinummer|citizen service number",
    ),
    _kind("BE rijksregister", r"\d\d\.\d\d\.\d\d-\d{3}\.\d\d", nn.is_valid),
    _kind("PT NIF", r"\d{3} ?\d{3} ?\d{3}", nif.is_valid, r"nif|contribuinte"),
    _kind("PL PESEL", r"\d{11}", pesel.is_valid, r"pesel"),
    _kind("CZ, SK rodné číslo", r"\d{6}/\d{3,4}", rc.is_valid),
    _kind("SE personnummer", r"(?:19|20)?\d{6}[-+]\d{4}", personnummer.is_valid),
    _kind("FI henkilötunnus", r"\d{6}[-+A-FU-Y]\d{3}[0-9A-Y]", hetu.is_valid),
    _kind("DK CPR", r"\d{6}-?\d{4}", cpr.is_valid, r"cpr|personnummer"),
    _kind("NO fødselsnummer", r"\d{6} ?\d{5}", fodselsnummer.is_valid),
    _kind("RO CNP", r"\d{13}", cnp.is_valid, r"cnp|cod numeric personal"),
    _kind("BG EGN", r"\d{10}", egn.is_valid, r"egn|егн"),
    _kind("HR OIB", r"\d{11}", oib.is_valid, r"oib"),
    _kind("GR AMKA", r"\d{11}", amka.is_valid, r"amka|αμκα"),
    _kind("TR kimlik", r"\d{11}", tckimlik.is_valid, r"t\.?c\.?|kimlik(?: no)?|tckn"),
    _kind(
        "IL teudat zehut", r"\d{9}", teudat_zehut.is_valid, r"teudat zehut|israeli id|תעודת זהות"
    ),
    _kind(
        "ZA ID",
        r"\d{6} ?\d{4} ?\d{3}",
        za_id.is_valid,
        r"id(?: number| no\.?)?|identity(?: number)?",
    ),
    _kind("BR CPF", r"\d{3}\.\d{3}\.\d{3}-\d\d", cpf.is_valid),
    _kind("BR CPF, bare", r"\d{3}(?:[ ./-]?\d{3}){2}[ ./-]?\d\d", cpf.is_valid, r"cpf"),
    _kind("CL RUT", r"\d{1,2}\.\d{3}\.\d{3}-[\dkK]", rut.is_valid),
    _kind("AR CUIT", r"\d\d-\d{8}-\d", cuit.is_valid),
    _kind("MX CURP", r"[A-Z]{4}\d{6}[HMX][A-Z]{5}[0-9A-Z]\d", curp.is_valid),
    _kind(
        "CA SIN", r"\d{3}[ -]?\d{3}[ -]?\d{3}", sin.is_valid, r"sin|social insurance(?: number)?"
    ),
    _kind("AU TFN", r"\d{3} ?\d{3} ?\d{2,3}", tfn.is_valid, r"tfn|tax file(?: number)?"),
    _kind("IN PAN", r"[A-Z]{5}\d{4}[A-Z]", pan.is_valid),
    _kind("IN Aadhaar", r"\d{4}[ -]?\d{4}[ -]?\d{4}", aadhaar.is_valid, r"a?adh?aar|uidai?|आधार"),
    _kind("SG NRIC", r"[STFGstfg]\d{7}[A-Za-z]", is_nric),
    _kind("TH PIN", r"\d-\d{4}-\d{5}-\d\d-\d", pin.is_valid),
    _kind("KR RRN", r"\d{6}-[0-9]\d{6}", rrn.is_valid),
    _kind(
        "KR RRN, any",  # those given since October 2020 have no check digit
        r"\d\d[01]\d[0-3]\d-?[1-8]\d{6}",
        is_document,
        r"주민(?:등록)?번호\w*|rrn|resident registration(?: number)?",
    ),
    _kind("RU SNILS", r"\d{3}-\d{3}-\d{3}[ -]\d\d", is_snils),
    _kind("RU SNILS, bare", r"\d{11}", is_snils, r"снилс|snils"),
    _kind("RU INN", r"\d{12}", inn.is_valid, r"инн|inn"),
    _kind(
        "JP My Number",
        r"\d{4}[ -]?\d{4}[ -]?\d{4}",
        my_number.is_valid,
        r"my ?number|マイナンバー|個人番号",
    ),
    _kind("CN resident ID", r"\d{17}[\dXx]", ric.is_valid),
    _kind("document", r"[A-Z0-9](?:[ -]?[A-Z0-9]){5,14}", is_document, DOCUMENT_CUE),
)


def national_ids(text: str) -> Iterator[Span]:
    """Every national number of a text, of one type for all countries."""
    if not MAYBE.search(text):
        return
    for kind in IDENTIFIERS:
        if kind.cue is not None and not kind.cue.search(text):
            continue
        for match in kind.pattern.finditer(text):
            if _has_cue(kind, text, *match.span()) and kind.valid(match.group()):
                yield match.span()


def _has_cue(kind: Identifier, text: str, start: int, end: int) -> bool:
    cue = kind.cue
    return cue is None or bool(
        cue.search(text, max(0, start - CUE_DISTANCE), start) or cue.search(text, end, end + CLOSE)
    )


def is_national_id(value: str) -> bool:
    """Whether the value, alone, passes the check of some kind."""
    return any(
        kind.pattern.fullmatch(value) and kind.valid(value)
        for kind in IDENTIFIERS
        if kind.name != "document"
    )
