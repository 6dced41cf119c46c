"""Values that a pattern and a check find: mail and IP addresses, cards, accounts, US social
security numbers, telephone numbers, wallets, links.

Each function takes a text as `spelling.plain` gives it and yields spans [start, end). A cheap look
comes first, since most prompts hold none.
"""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import re
from collections.abc import Iterator

import phonenumbers
from stdnum import bitcoin, iban, luhn

from eyas.language import spoken_language
from eyas.privacy.attributes import LOG
from eyas.privacy.spelling import LISTS, Span, cue, joined

CUE_DISTANCE = 40  # characters between a cue word and the value behind it

# Generic top-level domains that need no word such as "mail" before the address, as others do:
# `self.w@layer.weight` is code. Those of the countries are added.
DOMAINS = [*LISTS["domains"].split(), *map(str.lower, sorted(phonenumbers.SUPPORTED_REGIONS))]
_LOCAL = r"\w.!#$%&'*+=?^`{}~-"  # characters of an address before the @


def _mail(domains: str) -> re.Pattern[str]:
    start = rf"(?<![{_LOCAL}])[^\w\s@]*(?P<address>\w[{_LOCAL}]*@(?:\w[\w-]*\.)+"
    return re.compile(
        rf"{start}(?:{domains}|xn--[\w-]+|(?=\w*[^\W\d_a-z])[^\W\d_]{{2,24}}))(?!\w)", re.I
    )


MAIL, ANY_MAIL = _mail("|".join(DOMAINS)), _mail("[a-z]{2,24}")
MAIL_CUE = re.compile(cue(joined("mail")), re.I)

IPV4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?:/\d{1,2})?(?!\w|\.\d)")
IPV6 = re.compile(
    r"(?<![\w:.])(?=[0-9a-f:.]*\d)(?:[0-9a-f]{0,4}:){2,8}(?:[0-9a-f]{1,4}|\d{1,3}(?:\.\d{1,3}){3})?"
    r"(?:%\w{1,16})?(?:/\d{1,3})?(?![\w:])",
    re.I,
)

# By issuer: Visa 4, Mastercard 51-55 and 2221-2720, American Express 34 and 37, Diners 30, 36, 38
# and 39, JCB 35, 1800 and 2131, Mir 2200-2204, Discover, UnionPay and Maestro 6, UnionPay 81,
# Maestro 50 and 56-58.
CARD_ISSUER = re.compile(
    r"4|5[0-8]|81|2(?:20[0-4]|22[1-9]|2[3-9]|[3-6]|7[01]|720)|3[0-9]|6|1800|2131"
)
# Each layout is tried by itself, since an expiry date or a security code may follow as one more
# group of digits.
CARD_LAYOUTS = {
    "one run": r"\d{12,19}",
    "4-4-4-4": r"\d{4}([ -])\d{4}\1\d{4}\1\d{4}",
    "4-4-4-4-3": r"\d{4}([ -])\d{4}\1\d{4}\1\d{4}\1\d{3}",
    "6-13": r"\d{6} \d{13}",
    "4-6-5": r"\d{4}([ -])\d{6}\1\d{4,5}",
    "4-4-5": r"\d{4}([ -])\d{4}\1\d{4,5}",
}
CARDS = [
    re.compile(rf"(?<![\w+])(?<!\d[.-]){digits}(?!\w|\.\d)") for digits in CARD_LAYOUTS.values()
]
MAYBE_CARD = re.compile(r"\d(?:[\W_]{0,7}\d){11}")
# The same between separators of any kind; a line of a column has more of its like beside it.
CARD_SEPARATOR = r"(?:[^\w$€£,%]{1,7}|_{1,3})"
LOOSE_CARDS = [
    re.compile(
        r"(?<![\w+])(?<!\d[.-])(?<![-*•] )"
        + CARD_SEPARATOR.join(rf"\d{{{count}}}" for count in layout)
        + r"(?!\w|\.\d)"
    )
    for layout in ((4, 4, 4, 4), (4, 6, 5), (4, 6, 4), (4, 4, 5))
]
ONE_MORE = re.compile(rf"{CARD_SEPARATOR}\d{{4}}(?!\d)")
ONE_BEFORE = re.compile(rf"(?<!\d)\d{{4}}{CARD_SEPARATOR}$")
SINGLE_DIGITS = re.compile(r"(?<![\w.,-])\d([ ._/-])\d(?:\1\d){13,14}(?!\w|\1\d)")
# Beside a word for a card, any separators and groups do.
CARD_CUE = re.compile(cue(rf"(?:{joined('card')})(?: (?:number|no|num|nummer))?"), re.I)
CARD_RUN = re.compile(r"(?<![\w$€£])\d(?:[^\w$€£]{0,3}_?\d){12,26}(?!\d)")
CARD_LENGTHS = (16, 15, 19, 14, 13)

ACCOUNT = re.compile(
    r"(?<![A-Za-z0-9])(?=([A-Za-z]{2}[\W_]{0,3}\d[\W_]{0,3}\d(?:[\W_]{0,3}[A-Za-z0-9]){11,30}))"
)
ACCOUNT_NUMBER = re.compile(
    r"\b(?:account|acct|konto|cuenta)[ -]?(?:number|num|no\.?|nr\.?|nummer|#)(?!\w)[^\n\d]{0,16}?"
    r"(?<![\w$€£])(?P<value>\d[\d -]{4,18}\d)(?![\w-])",
    re.I,
)
SHORTEST_ACCOUNT = 15  # letters and digits; Norway's

SSN = re.compile(r"(?<![\w./-])(\d{3})([- ./_]|  )(\d{2})\2(\d{4})(?![\w/-]|\.\d)")
# beside a cue word: bare, or with any separators
LOOSE_SSN = re.compile(r"(?<![\w./-])\d(?:[^\w$]{0,3}_?\d){8}(?![\w/-]|\.\d)")
SSN_CUE = re.compile(r"\bssn\b|\bsocial[ -]security\b", re.I)

# Countries whose national numbering is tried; any country's number is found in international form
# or beside a cue word, and those of the text's language or script as their people write them.
PHONE_REGIONS = (
    "US", "GB", "IE", "AU", "NZ", "ZA", "IN", "DE", "AT",
    "CH", "FR", "BE", "NL", "ES", "IT", "SE", "BR", "MX",
)  # fmt: skip
LANGUAGE_REGIONS = {code: regions.split() for code, regions in LISTS["regions"].items()}
# Scripts that tell the language, before the detector is asked.
SCRIPTS = (
    (re.compile("[\u3040-\u30ff]"), "ja"),
    (re.compile("[\uac00-\ud7ff]"), "ko"),
    (re.compile("[\u4e00-\u9fff]"), "zh"),
    (re.compile("[\u0e00-\u0e7f]"), "th"),
    (re.compile("[\u0900-\u097f]"), "hi"),
    (re.compile("[\u0600-\u06ff]"), "ar"),
    (re.compile("[\u0400-\u04ff]"), "ru"),
)
MAYBE_PHONE = re.compile(r"\d(?:\D{0,3}\d){6}")  # seven digits that stand together
PHONE = re.compile(
    r"(?<![\w#$€£+])(?<!\d[.:/-])[+(]?\d(?:(?:[ ().·•-]{0,2}|[/_\n]| [-/] )\d){6,63}"
    r"(?:\s?(?:x|ext\.?)\s?\d{1,6})?(?![\w%/]|[.:-]\d)",
    re.I,
)
PHONE_CUE = re.compile(cue(joined("phone")) + r"|电话|手机|電話|携帯|전화|연락처|โทร|เบอร์", re.I)
# Written without a cue, a national number shows itself by a trunk 0, by North America's 3-3-4, or
# by four groups or more.
PHONE_FORM = re.compile(
    r"\(?0.*|(?:1[ ./_-]?)?\(?\d{3}\)?[ ./_·•-]{0,3}\d{3}[ ./_·•-]{0,3}\d{4}|\d+(?:[.-]\d+){3,}"
)
# Runs of digits that are something else: dates (with a time), spans of years, dotted quads, ISBN.
NO_PHONE = re.compile(
    r"(?:19|20)\d\d[-./_ ]\d{1,2}[-./_ ]\d{1,2}(?: .*)?"
    r"|\d{1,2}[-./_ ]\d{1,2}[-./_ ](?:19|20)\d\d(?:[ -].*)?|\d{1,2}/\d{1,2}/\d\d(?:[ -].*)?"
    r"|\d{1,2}\.\d+|\d-\d{2,6}-\d{2,6}-\d"
    r"|\(?(?:1\d|20)\d\d(?: |-| - )(?:1\d|20)\d\d|\d{1,3}(?:\.\d{1,3}){3}|97[89][ -].*"
)
ONE_DIGIT = re.compile(r"(?<!\d)\d(?!\d)")
HEADER = re.compile(r"[A-Za-z_]\w*,[A-Za-z_]")  # of CSV
MOST_OF_LINE = 1000  # characters of a line that are looked at
# Where one number of a run may end and the next begin.
PHONE_BREAK = re.compile(r"\d[).-]?[ \n]|\d(?=[(+])")
NEAR_BEFORE, NEAR_AFTER = 32, 12  # characters in which a telephone's cue counts

BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
BECH32 = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
BECH32_CONST, BECH32M_CONST = 1, 0x2BC830A3  # BIP 173, BIP 350
# Bitcoin 1 and 3, Litecoin L and M, Dogecoin D, Tron T, Zcash t.
BASE58_ADDRESS = re.compile(rf"(?<![\w+/])[13LMDTt][{BASE58}]{{24,34}}(?![\w+/])")
BECH32_ADDRESS = re.compile(r"(?<!\w)(?:bc|tb|ltc)1[02-9ac-hj-np-z]{11,87}(?!\w)", re.I)
ETHEREUM_ADDRESS = re.compile(r"(?<!\w)0x[0-9a-fA-F]{40}(?!\w)")

URL = re.compile(r"(?<![\w@])(?:(?:https?|ftp|wss?)://[\w\[]|www\.\w)[^\s<>\"'`{}|\\^]*", re.I)
AFTER_URL = ".,;:!?)]*_"  # what ends a sentence or a bracket rather than a link
CREDENTIALS = re.compile(
    r"(?<![\w+.-])[a-z][a-z0-9+.-]{1,20}://[^\s/@:<>\"'`{}]{0,64}:[^\s/@<>{}\"'`]{1,128}"
    r"@[^\s<>\"'`{}]+",
    re.I,
)
TOKEN_IN_URL = re.compile(
    r"[?&;#](?:(?:access|auth|id|refresh|session|sas)?_?token|api[_-]?key|sig|signature"
    r"|pass(?:word|wd)?|pwd|secret|client_secret|x-amz-signature|code)=(?=[^&\s]*\d)[^&\s]{8,}",
    re.I,
)


def mails(text: str) -> Iterator[Span]:
    """Mail addresses under a country's or a common top-level domain; under any behind a word such
    as "mail".
    """
    if "@" in text:
        for match in MAIL.finditer(text):
            yield match.span("address")
        for match in ANY_MAIL.finditer(text) if MAIL_CUE.search(text) else ():
            if MAIL_CUE.search(text, max(0, match.start() - CUE_DISTANCE), match.start()):
                yield match.span("address")


def ip_addresses(text: str) -> Iterator[Span]:
    """Addresses of both versions, with a network's length too. Private, local and documentation
    addresses identify nobody.
    """
    for pattern, sign in ((IPV4, "."), (IPV6, ":")):
        for match in pattern.finditer(text) if sign in text else ():
            try:
                address = ipaddress.ip_interface(match.group()).ip
            except ValueError:
                continue
            if address.is_global:
                yield match.span()


def cards(text: str) -> Iterator[Span]:
    """12 to 19 digits of a known issuer with a right check digit, in the groups of a card; in any
    groups beside a word for one.
    """
    if not MAYBE_CARD.search(text):
        return
    for match in (match for layout in CARDS for match in layout.finditer(text)):
        if is_card(re.sub(r"\D", "", match.group())):
            yield match.span()
    for match in (match for layout in LOOSE_CARDS for match in layout.finditer(text)):
        if (
            is_card(re.sub(r"\D", "", match.group()))
            and not ONE_MORE.match(text, match.end())
            and not ONE_BEFORE.search(text, max(0, match.start() - 12), match.start())
        ):
            yield match.span()
    for match in SINGLE_DIGITS.finditer(text):
        if is_card(re.sub(r"\D", "", match.group())):
            yield match.span()
    if CARD_CUE.search(text):
        for match in CARD_RUN.finditer(text):
            if CARD_CUE.search(text, max(0, match.start() - CUE_DISTANCE), match.start()):
                yield from _card_at_start(text, *match.span())


def is_card(digits: str) -> bool:
    """Whether the digits are as many as a card's, of a known issuer, with a right check digit."""
    return (
        12 <= len(digits) <= 19 and CARD_ISSUER.match(digits) is not None and luhn.is_valid(digits)
    )


def _card_at_start(text: str, start: int, end: int) -> Iterator[Span]:
    """The card that a run of digits begins with; an expiry date may follow."""
    places = [place for place in range(start, end) if text[place].isdigit()]
    for length in CARD_LENGTHS:
        ends_group = length == len(places) or (
            length < len(places) and places[length] > places[length - 1] + 1
        )
        if ends_group and is_card("".join(text[place] for place in places[:length])):
            yield start, places[length - 1] + 1
            return


def accounts(text: str) -> Iterator[Span]:
    """IBANs: the form of their country and right check digits, between separators of any kind; the
    digits behind "account number".
    """
    for match in ACCOUNT.finditer(text):
        start, end = match.span(1)
        places = [place for place in range(start, end) if text[place].isalnum()]
        for length in range(len(places), SHORTEST_ACCOUNT - 1, -1):
            last = places[length - 1] + 1
            if text[last : last + 1].isalnum():
                continue
            if iban.is_valid("".join(text[place] for place in places[:length]), False):
                yield start, last
                break
    for match in ACCOUNT_NUMBER.finditer(text):
        yield match.span("value")


def social_security_numbers(text: str) -> Iterator[Span]:
    """US numbers in three groups, and in any form behind a cue word. Areas 000, 666 and 9xx
    are never given.
    """
    for pattern in (SSN, LOOSE_SSN) if SSN_CUE.search(text) else (SSN,):
        for match in pattern.finditer(text):
            digits = re.sub(r"\D", "", match.group())
            area, group, serial = digits[:3], digits[3:5], digits[5:]
            if area in ("000", "666") or area[0] == "9" or group == "00" or serial == "0000":
                continue
            before = max(0, match.start() - CUE_DISTANCE)
            if pattern is SSN or SSN_CUE.search(text, before, match.start()):
                yield match.span()


def phones(text: str) -> Iterator[Span]:
    """Telephone numbers: international, national of many countries, and short ones beside a word
    such as "call".
    """
    if MAYBE_PHONE.search(text):
        place = 0
        while run := PHONE.search(text, place):
            found = _phones_in(text, *run.span())
            yield from found
            place = found[-1][1] if found else run.end()  # a run may be cut within a number


def _phones_in(text: str, start: int, end: int) -> list[Span]:
    """The telephone numbers in the run of digits at [start, end): from the left, the longest each
    time.

    One begins where the run does, after a space, or with a bracket or plus; it ends where the next
    could begin.
    """
    starts = [start, *(match.end() for match in PHONE_BREAK.finditer(text, start, end))]
    ends = [*(len(text[:begin].rstrip(" .-/\n")) for begin in starts[1:]), end]
    found: list[Span] = []
    for first, begin in enumerate(starts):
        if not found or begin >= found[-1][1]:
            longest = (last for last in reversed(ends[first:]) if _is_phone(text, begin, last))
            found += [(begin, last) for last in longest][:1]
    return found


def _is_phone(text: str, start: int, end: int) -> bool:
    """Whether the digits at [start, end) are a telephone number.

    Yes if written internationally (`+` and 8 to 15 digits), if a cue word stands beside them (7 to
    15 digits), or if they look like a number and are a valid one in some country of PHONE_REGIONS;
    bare ten digits count as American only.
    """
    value = re.split(r"\s?(?:x|ext)", text[start:end], flags=re.I)[0]
    num_digits = len(re.findall(r"\d", value))
    lines = [re.sub(r"\D", "", line) for line in value.split("\n")]
    if len(lines) > 1:  # a broken line rather than a column, behind a cue on its first line
        before = text[max(0, start - NEAR_BEFORE) : start].rpartition("\n")[2]
        if max(map(len, lines)) >= 7 or ONE_DIGIT.search(value) or not PHONE_CUE.search(before):
            return False
    if value.startswith("+"):
        return 8 <= num_digits <= 15
    has_form = PHONE_FORM.fullmatch(value) is not None
    if NO_PHONE.fullmatch(value) or ("/" in value and not has_form):
        return False
    if not _is_field(text, start, end):
        return False
    has_form = has_form and " / " not in value  # a division
    beside = f"{text[max(0, start - NEAR_BEFORE) : start]} {text[end : end + NEAR_AFTER]}"
    if num_digits == 7 and len(re.findall(r"\d+", value)) > 3:
        return False
    if PHONE_CUE.search(beside):
        return 7 <= num_digits <= 15
    if not 8 <= num_digits <= 15 or (value[0].isdigit() and _is_in_log(text, start)):
        return False
    return (has_form and next(parse_phone(value), None) is not None) or _is_local(text, value)


def _is_field(text: str, start: int, end: int) -> bool:
    """Whether a comma between the digits and others, if there is one, parts fields of CSV: there is
    one behind it, several before it, or names of columns above; else it is a decimal one.
    """
    if not (re.match(r",\d", text[end:]) or re.search(r"\d,$", text[:start])):
        return True
    if HEADER.search(text, 0, start) or text[end : end + 1] == "," or not text[start].isdigit():
        return True
    return re.search(r"(?<![\w,.-])\d{1,3},$", text[max(0, start - 8) : start]) is None


def _is_in_log(text: str, start: int) -> bool:
    line = text[text.rfind("\n", 0, start) + 1 :].partition("\n")[0]
    return LOG.search(line[:MOST_OF_LINE]) is not None


def _is_local(text: str, value: str) -> bool:
    """Whether it is a number of a country where the text's language is spoken, in the groups in
    which it is written there, or ten digits or more in one.
    """
    language = next((code for script, code in SCRIPTS if script.search(text)), "")
    groups = re.findall(r"\d+", value)
    for region in LANGUAGE_REGIONS.get(language or spoken_language(text), ()):
        number = _parsed(region, value)
        if number is None or not phonenumbers.is_valid_number(number):
            continue
        if len(groups) == 1:
            return len(groups[0]) > 9
        written = phonenumbers.format_number(number, phonenumbers.PhoneNumberFormat.NATIONAL)
        usual = re.findall(r"\d+", written)
        kind = phonenumbers.number_type(number)
        is_mobile = kind == phonenumbers.PhoneNumberType.MOBILE
        if groups in (usual, usual[1:]) or (is_mobile and {*map(len, groups)} == {3}):
            return True
    return False


def parse_phone(value: str) -> Iterator[phonenumbers.PhoneNumber]:
    """The numbers that a value may be: by its prefix, else each valid one of PHONE_REGIONS."""
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
        return phonenumbers.parse(re.sub("[_·•]", " ", value), region or None)
    except phonenumbers.NumberParseException:
        return None


def wallets(text: str) -> Iterator[Span]:
    """Wallet addresses: Base58Check and Bech32 with a right check, Ethereum's by its form alone
    (its check is in the case of letters, and needs Keccak-256).
    """
    for pattern, valid in (
        (BASE58_ADDRESS, is_base58check),
        (BECH32_ADDRESS, is_bech32),
        (ETHEREUM_ADDRESS, None),
    ):
        for match in pattern.finditer(text):
            if valid is None or valid(match.group()):
                yield match.span()


def is_base58check(address: str) -> bool:
    """Whether it is a version, 20 bytes of hash, and four bytes of their double SHA-256."""
    data = bitcoin.b58decode(address)
    check = hashlib.sha256(hashlib.sha256(data[:-4]).digest()).digest()[:4]
    return len(data) in (25, 26) and check == data[-4:]


def is_bech32(address: str) -> bool:
    """Whether the last six letters are the check of BIP 173 or of BIP 350."""
    if address not in (address.lower(), address.upper()):
        return False
    prefix, _, data = address.lower().rpartition("1")
    if not prefix or len(data) < 6 or set(data) - set(BECH32):
        return False
    expanded = [*(ord(letter) >> 5 for letter in prefix), 0, *(ord(one) & 31 for one in prefix)]
    check = bitcoin.bech32_checksum([*expanded, *map(BECH32.index, data)])
    return check in (BECH32_CONST, BECH32M_CONST)


def links(text: str) -> Iterator[Span]:
    """Web addresses with a scheme or www."""
    if "://" in text or "www." in text.lower():
        for match in URL.finditer(text):
            yield match.start(), match.start() + len(match.group().rstrip(AFTER_URL))


def links_with_credentials(text: str) -> Iterator[Span]:
    """Links that hold a password or a token."""
    if "://" in text:
        for match in CREDENTIALS.finditer(text):
            yield match.start(), match.start() + len(match.group().rstrip(AFTER_URL))
    for start, end in links(text):
        if TOKEN_IN_URL.search(text, start, end):
            yield start, end
