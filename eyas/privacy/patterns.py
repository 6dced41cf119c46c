"""Values that a pattern and a check find: mail and IP addresses, cards, accounts, US social
security numbers, telephone numbers, wallets, links. Each function takes a text of `spelling.plain`,
yields spans [start, end), and begins with a cheap look, since most prompts hold none.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import phonenumbers
from stdnum import bitcoin, iban, luhn

from eyas.language import spoken_language
from eyas.privacy.attributes import LOG
from eyas.privacy.spelling import LISTS, Span, cue, joined

CUE_DISTANCE = 40  # characters between a cue word and the value behind it

# Top-level domains that need no word such as "mail" before the address:
# `self.w@layer.weight` is code.
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

IP_CUE = re.compile(cue(joined("ip")), re.I)
MOST_OF_SECTION = 30  # four such parts without a cue number a section, or a version
RESOLVERS = frozenset(LISTS["resolvers"].split())

CARD = re.compile(joined("issuers"))
# Each by itself: an expiry date or a security code may follow as one more group.
CARDS = [re.compile(rf"(?<![\w+])(?<!\d[.-]){digits}(?!\w|\.\d)") for digits in LISTS["cards"]]
BARE_CARD = 12  # digits that need a cue: many numbers have them in groups of four
MAYBE_CARD = re.compile(r"\d(?:[\W_]{0,7}\d){11}")
# The same between any separators; a line of a column has more of its like beside it.
CARD_SEPARATOR = r"(?:[^\w$€£,%]{1,7}|_{1,3})"
LOOSE_CARDS = [
    re.compile(
        r"(?<![\w+])(?<!\d[.-])(?<![-*•] )"
        + CARD_SEPARATOR.join(rf"\d{{{count}}}" for count in layout)
        + r"(?!\w|\.\d)"
    )
    for layout in ((4, 4, 4, 4), (4, 6, 5), (4, 6, 4), (4, 4, 5))
]
# Four digits that are no date of expiry
ONE_MORE = re.compile(rf"{CARD_SEPARATOR}(?!(?:0[1-9]|1[0-2])\d\d)\d{{4}}(?!\d)")
ONE_BEFORE = re.compile(rf"(?<!\d)\d{{4}}{CARD_SEPARATOR}$")
# Beside a word for a card any separators and groups will do.
CARD_CUE = re.compile(cue(joined("card")) + r"|^\W{1,3}(?:0[1-9]|1[0-2])/\d\d\b", re.I)
CARD_RUN = re.compile(r"(?<![\w$€£])\d(?:[^\w$€£]{0,3}_?\d){12,26}(?!\d)")
CARD_LENGTHS = (16, 15, 19, 14, 13)

ACCOUNT = re.compile(
    r"(?<![A-Za-z0-9])(?=([A-Za-z]{2}[\W_]{0,3}\d[\W_]{0,3}\d(?:[\W_]{0,3}[A-Za-z0-9]){11,30}))"
)
ACCOUNT_NUMBER = re.compile(
    rf"(?:{cue(joined('account'))}[^\n\d]{{0,24}}?"
    rf"|(?P<word>{cue(joined('account_word'))})"
    r"(?:(?: ?(?:#|[:=]|n[°ºro.]\.?|is|ist|es|è|é)){1,2} ?| (?=\d{8})))"
    r"(?<![\w$€£])(?P<value>[A-Z]{0,5}\d(?:[\d -]|\.(?=\d)){4,32}\d(?:/\d{4})?)(?![\w-])",
    re.I,
)
SIX_DIGITS = re.compile(r"\d(?:[\d -]|\.(?=\d)){4,32}\d")
NO_ACCOUNT = re.compile(joined("no account"), re.I)
ACCOUNT_LENGTHS = range(34, 14, -1)  # letters and digits: Malta has 31, Norway 15

SSN = re.compile(r"(?<![\w./-])(\d{3})([- ./_]|  )(\d{2})\2(\d{4})(?![\w/-]|\.\d)")
# Beside a cue: bare, or with any separators
LOOSE_SSN = re.compile(r"(?<![\w./-])\d(?:[^\w$]{0,3}_?\d){8}(?![\w/-]|\.\d)")
SSN_CUE = re.compile(r"\bssn|\bsocial\b|\bss ?#", re.I)

# Directly before a number: a thing whose part, a program whose version it is. The lists are closed:
# any other word may be a person's.
PART = re.compile(rf"(?<![^\W_])(?:{joined('parts')})[ ]{{1,2}}\(?\Z", re.I)
PROGRAM = re.compile(rf"(?<![^\W_])(?:{joined('programs')})(?:[ ]{{1,2}}\(?|-)\Z", re.I)

PHONE_REGIONS: tuple[str, ...] = tuple(LISTS["countries"].split())
LANGUAGE_REGIONS: dict[str, list[str]] = {
    code: regions.split() for code, regions in LISTS["regions"].items()
}
SCRIPTS = {code: re.compile(f"[{signs}]") for code, signs in LISTS["scripts"].items()}
MAYBE_PHONE = re.compile(r"\d(?:\D{0,3}\d){6}")  # seven digits that stand together
PHONE = re.compile(
    r"(?<![\w#$€£+])(?<!\d[.:/-])[+(]?\d(?:(?:[ ().·•-]{0,2}|[/_\n]| [-/] )\d){6,63}"
    r"(?:\s?(?:x|ext\.?)\s?\d{1,6})?(?![\w%/]|[.:-]\d)",
    re.I,
)
PHONE_CUE = re.compile(cue(joined("phone")) + r"|电话|手机|電話|携帯|전화|연락처|โทร|เบอร์", re.I)
# Without a cue a national number needs its country's own groups: North America's, or those behind a
# trunk 0 in PHONE_REGIONS.
NORTH_AMERICAN = re.compile(r"(?:1[-. ])?(?:\(\d{3}\) ?|\d{3}[-.])\d{3}[-. ]\d{4}")
NO_PHONE = re.compile(joined("no phone"))
ONE_DIGIT = re.compile(r"(?<!\d)\d(?!\d)")
# Two numbers side by side have ten groups at most; more are a row of a table.
ROW = re.compile(r"(?<![\w.,])\d{1,6}(?:[ \t]\d{1,6}){10,}(?![\w/(-]|\.\d)")
MOST_OF_LINE = 1000  # characters of a line that are looked at
LONGEST_PHONE = 48  # characters
PHONE_DIGITS = range(7, 22)  # with an extension
MOST_GROUPS = 6  # of digits, in a number as its country writes it
LONGEST_BARE = 11  # digits of a mobile number that needs no cue where its language is spoken
# Where one number of a run may end and the next begin
PHONE_BREAK = re.compile(r"\d[).-]?[ \n]|\d(?=[(+])")
NEAR_BEFORE, NEAR_AFTER = 40, 12  # characters beside a number in which a cue counts
FAR_BEFORE = 80  # the same within a sentence, for a number that holds
SENTENCE = re.compile(r"[^.!?;\n]*\Z")
JUST_BEHIND = re.compile(rf".{{0,{NEAR_AFTER}}}\w*", re.S)
# "... is my telephone number": farther away
STATED = re.compile(
    r"[\"')\]]?(?:,? (?:that|this|which|it)(?:'s| is| was)| (?:is|was|ist|war|es|est|é|è|är|er)) "
    r"[^\n.;!?\d]{0,32}\w*"
)
# Words that say that a number is no person's; words of any talk
GOODS, TALK = (
    re.compile(rf"(?<![^\W\d_])(?:{joined(kind)})(?![^\W\d_])", re.I) for kind in ("goods", "talk")
)
GOODS_NEXT = re.compile(GOODS.pattern + r"[\W_]*(?:\w+[\W_]+)?\Z", re.I)

BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
RIPPLE = "rpshnaf39wBUDNEGHJKLM4PQRST7VWXYZ2bcdeCg65jkm8oFqi1tuvAxyz"
BECH32 = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"
BECH32_CONST, BECH32M_CONST = 1, 0x2BC830A3  # BIP 173, BIP 350
# Bitcoin 1 and 3, Litecoin L and M, Dogecoin D, Tron T, Zcash t, Ripple r
BASE58_ADDRESS = re.compile(rf"(?<![\w+/])[13LMDTtr][{BASE58}]{{24,34}}(?![\w+/])")
BECH32_ADDRESS = re.compile(joined("bech32"), re.I)
# By their form alone: Ethereum, Stellar, Monero, TON; by a word: Solana.
OTHER_ADDRESS = re.compile(joined("wallets"), re.I)

LONG_WORD = re.compile(r"[\w-]{14}")  # as long as the shortest wallet's address

URL = re.compile(r"(?<![\w@])(?:(?:https?|ftp|wss?)://[\w\[]|www\.\w)[^\s<>\"'`{}|\\^]*", re.I)
AFTER_URL = ".,;:!?)]*_"  # what ends a sentence or a bracket rather than a link
CREDENTIALS = re.compile(
    r"(?<![\w+.-])[a-z][a-z0-9+.-]{1,20}://[^\s/@:<>\"'`{}]{0,64}:[^\s/@<>{}\"'`]{1,128}"
    r"@[^\s<>\"'`{}]+",
    re.I,
)
TOKEN_IN_URL = re.compile(joined("link tokens"), re.I)


def mails(text: str) -> Iterator[Span]:
    """Mail addresses under a country's or a common top-level domain, or behind a word for mail."""
    if "@" in text:
        for match in MAIL.finditer(text):
            if not match["address"].startswith("git@"):  # a host's account for all
                yield match.span("address")
        for match in ANY_MAIL.finditer(text) if MAIL_CUE.search(text) else ():
            if MAIL_CUE.search(text, max(0, match.start() - CUE_DISTANCE), match.start()):
                yield match.span("address")


def ip_addresses(text: str) -> Iterator[Span]:
    """Addresses of both versions, with a network's length too. Private, local and documentation
    addresses and public resolvers identify nobody; four small parts may number a section.
    """
    for pattern, sign in ((IPV4, "."), (IPV6, ":")):
        for match in pattern.finditer(text) if sign in text else ():
            try:
                address = ipaddress.ip_interface(match.group()).ip
            except ValueError:
                continue
            is_small = all(part < MOST_OF_SECTION for part in address.packed)
            is_host = text[match.start() - 1 : match.start()] == "@"  # whoever logs in there
            said = is_host or says(text, *match.span(), IP_CUE)
            before = text[max(0, match.start() - NEAR_BEFORE) : match.start()]
            is_agent = re.search(r"(?:[A-Za-z]/|(?:FROM|image:) [\w./-]+:)$", before)
            if not address.is_global or str(address) in RESOLVERS or is_agent:
                continue
            is_version = (
                sign == "." and int(address.packed[0]) < MOST_OF_SECTION and PROGRAM.search(before)
            )
            if said or (said is None and not is_small and not is_version):
                yield match.span()


def cards(text: str) -> Iterator[Span]:
    """Numbers of an issuer, of its length, with a right check digit: in the groups of a card, or in
    any or none beside a word for one.
    """
    if not MAYBE_CARD.search(text):
        return
    found = ((at, match) for at, one in enumerate(CARDS) for match in one.finditer(text))
    for place, match in found:
        if is_card(re.sub(r"\D", "", match.group())):
            said = says(text, *match.span(), CARD_CUE, holds=True)
            is_long = sum(map(str.isdigit, match[0])) > BARE_CARD
            if said or (said is None and place and is_long):
                yield match.span()
    for match in (match for layout in LOOSE_CARDS for match in layout.finditer(text)):
        if (
            is_card(re.sub(r"\D", "", match.group()))
            and not ONE_MORE.match(text, match.end())
            and not ONE_BEFORE.search(text, max(0, match.start() - 12), match.start())
            and says(text, *match.span(), CARD_CUE, holds=True) is not False
        ):
            yield match.span()
    if CARD_CUE.search(text):
        for match in CARD_RUN.finditer(text):
            if says(text, *match.span(), CARD_CUE, holds=True):  # an expiry date may follow
                yield from _beginning(text, match.span(), str.isdigit, CARD_LENGTHS, is_card)


def is_card(digits: str) -> bool:
    """Whether the digits are of an issuer's length, with a right check digit."""
    return CARD.fullmatch(digits) is not None and luhn.is_valid(digits)


def _beginning(
    text: str,
    span: Span,
    counts: Callable[[str], bool],
    lengths: Iterable[int],
    is_one: Callable[[str], bool],
) -> Iterator[Span]:
    """The beginning of a span with the first of the lengths that ends a group and passes a check.
    counts: which characters do.
    """
    places = [place for place in range(*span) if counts(text[place])]
    for length in (one for one in lengths if one <= len(places)):
        end = places[length - 1] + 1
        ends_group = not counts(text[end : end + 1])
        if ends_group and is_one("".join(text[place] for place in places[:length])):
            yield span[0], end
            return


def is_account(letters: str) -> bool:
    """Whether the letters and digits are an IBAN's."""
    return bool(iban.is_valid(letters, False))


def accounts(text: str) -> Iterator[Span]:
    """IBANs with right check digits, between any separators; the digits behind "account number"."""
    for match in ACCOUNT.finditer(text):
        yield from _beginning(text, match.span(1), str.isalnum, ACCOUNT_LENGTHS, is_account)
    for match in ACCOUNT_NUMBER.finditer(text) if SIX_DIGITS.search(text) else ():
        if not (match["word"] and NO_ACCOUNT.match(text, match.start("value"))):
            yield match.span("value")


def social_security_numbers(text: str) -> Iterator[Span]:
    """US numbers in three groups with hyphens, or in any form beside a cue. Areas 000, 666 and 9xx
    are never given.
    """
    for pattern in (SSN, LOOSE_SSN) if SSN_CUE.search(text) else (SSN,):
        for match in pattern.finditer(text):
            digits = re.sub(r"\D", "", match.group())
            area, group, serial = digits[:3], digits[3:5], digits[5:]
            if area in ("000", "666") or area[0] == "9" or group == "00" or serial == "0000":
                continue
            is_written = match[0][3] == match[0][-5] == "-"
            said = says(text, *match.span(), SSN_CUE, holds=is_written)
            if said or (said is None and is_written and not is_part(text, match.start())):
                yield match.span()


def is_part(text: str, start: int) -> bool:
    """Whether the number at `start` has the groups of an SSN and is a thing's: "filter
    481-29-7730".
    """
    before = text[max(0, start - NEAR_BEFORE) : start]
    return SSN.match(text, start) is not None and PART.search(before) is not None


def phones(text: str) -> Iterator[Span]:
    """Telephone numbers: international, national, and short ones beside a word such as "call"."""
    if MAYBE_PHONE.search(text):
        place, rows = 0, [row.span() for row in ROW.finditer(text)]
        while run := PHONE.search(text, place):
            found = _phones_in(text, *run.span(), rows)
            yield from found
            place = found[-1][1] if found else run.end()  # a run may be cut within a number


def _phones_in(text: str, start: int, end: int, rows: Sequence[Span]) -> list[Span]:
    """The numbers in the run of digits at [start, end): from the left, the longest each time; in
    `rows` only beside a cue. One begins where the run does, after a space, or with a bracket or
    plus; it ends where the next could begin.
    """
    starts = [start, *(match.end() for match in PHONE_BREAK.finditer(text, start, end))]
    breaks = (text[start:begin].rstrip(" .-/\n") for begin in starts[1:])
    ends = [*(start + len(before) for before in breaks), end]
    places = [place for place in range(start, end) if text[place].isdigit()]
    # Without a cue near the run none of its parts has one. A run may cross a line.
    near = text[max(0, start - FAR_BEFORE) : end + FAR_BEFORE].replace("_", " ")
    has_cue = PHONE_CUE.search(near) or any(column(text, begin) for begin in starts)
    found: list[Span] = []
    for first, begin in enumerate(starts):
        if found and begin < found[-1][1]:
            continue
        row = bisect.bisect_right(rows, (begin, len(text))) - 1
        if not has_cue and row >= 0 and begin < rows[row][1]:
            continue
        before = bisect.bisect_left(places, begin)
        for last in reversed(ends[first : first + LONGEST_PHONE]):
            num_digits = bisect.bisect_left(places, last) - before
            if (
                last - begin <= LONGEST_PHONE
                and num_digits in PHONE_DIGITS
                and _is_phone(text, begin, last, bool(has_cue))
            ):
                found.append((begin, last))
                break
    return found


def _is_phone(text: str, start: int, end: int, has_cue: bool) -> bool:
    """Whether the digits are written internationally (`+` and 8 to 15 of them), or the word beside
    them says so (7 to 15), or they are a valid number in its country's groups. has_cue: there may
    be such a word.
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
    if not 7 <= num_digits <= 15 or (not has_cue and len(re.findall(r"\d+", value)) > MOST_GROUPS):
        return False
    if NO_PHONE.fullmatch(value) or not _is_field(text, start, end):
        return False
    if value.lstrip("(")[0] == "0":
        is_own = any(_has_own_groups(one, value) for one in PHONE_REGIONS)
    else:
        is_own = NORTH_AMERICAN.fullmatch(value) is not None and _is_valid("US", value)
    if not (has_cue or is_own or _regions(text)):
        return False
    said = says(text, start, end, PHONE_CUE, holds=is_own)
    if said is not None:
        return said and not (num_digits == 7 and len(re.findall(r"\d+", value)) > 3)
    if (value[0].isdigit() and _is_in_log(text, start)) or num_digits < 8 or "/" in value:
        return False
    if is_own or NORTH_AMERICAN.fullmatch(value):
        return is_own
    if value.isdigit() and num_digits < LONGEST_BARE:
        return False
    return any(_has_own_groups(region, value, is_spoken=True) for region in _regions(text))


@functools.lru_cache(maxsize=8)
def _regions(text: str) -> Sequence[str]:
    language = next((code for code, script in SCRIPTS.items() if script.search(text)), "")
    return LANGUAGE_REGIONS.get(language or spoken_language(text), ())


def _is_field(text: str, start: int, end: int) -> bool:
    """Whether no decimal comma is beside the number: one that parts fields of CSV has another
    behind the number, several before it, or names of columns above.
    """
    before, after = text[max(0, start - 2) : start], text[end : end + 2]
    if not (re.match(r",\d", after) or re.match(r"\d,", before)):
        return True
    if column(text, start) or text[end : end + 1] == "," or not text[start].isdigit():
        return True
    return re.search(r"(?<![\w,.-])\d{1,3},$", text[max(0, start - 8) : start]) is None


def _is_in_log(text: str, start: int) -> bool:
    begin = text.rfind("\n", 0, start) + 1
    return _is_log(text[begin : begin + MOST_OF_LINE].partition("\n")[0])


@functools.lru_cache(maxsize=8)
def _is_log(line: str) -> bool:
    return LOG.search(line) is not None


def _has_own_groups(region: str, value: str, is_spoken: bool = False) -> bool:
    """Whether it is a valid number in the groups of its country; where its language is spoken also
    a mobile number in threes or, of eleven digits, in one group.
    """
    groups = re.findall(r"\d+", value)
    if len(groups) == 1 and not (is_spoken and len(value) >= LONGEST_BARE):
        return False
    if not is_spoken and not _groups_of(region).fullmatch(" ".join(groups)):
        return False
    number = _parsed(region, value)
    if number is None or not phonenumbers.is_valid_number(number):
        return False
    written = phonenumbers.format_number(number, phonenumbers.PhoneNumberFormat.NATIONAL)
    usual = re.findall(r"\d+", written)
    if len(groups) > 1 and (groups == usual or (is_spoken and groups == usual[1:])):
        return True
    is_mobile = phonenumbers.number_type(number) == phonenumbers.PhoneNumberType.MOBILE
    return is_spoken and is_mobile and (len(groups) == 1 or {*map(len, groups)} == {3})


@functools.cache
def _groups_of(region: str) -> re.Pattern[str]:
    """A country's groups, a trunk 0 before the first: cheaper than phonenumbers."""
    country = phonenumbers.PhoneMetadata.metadata_for_region(region)
    forms = {str(one.pattern) for one in country.number_format} if country else set()
    groups = [one.replace(")(", " ").strip("()") for one in sorted(forms) if ")(" in one]
    return re.compile("|".join(f"(?:0 ?)?{one}" for one in groups))


def _is_valid(region: str, value: str) -> bool:
    number = _parsed(region, value)
    return number is not None and phonenumbers.is_valid_number(number)


def says(text: str, start: int, end: int, cue: re.Pattern[str], holds: bool = False) -> bool | None:
    """Whether the number at [start, end) is what `cue` names: by the heading of its column, else by
    the words before it, of which a nearer one for goods counts more, else by a cue behind it.
    False: another kind of number is named; None: nothing is. holds: its check or groups are right,
    so any cue beside it will do; without a table words of talk do not count, those for goods only
    next to it.
    """
    is_named, has_cue, has_goods, has_talk = _before(text, start, cue)
    behind, stated = JUST_BEHIND.match(text, end), STATED.match(text, end)
    is_behind = behind is not None and cue.search(behind[0]) is not None
    is_stated = stated is not None and cue.search(stated[0]) is not None
    if is_named or (holds and (has_cue or is_behind or is_stated)):
        return True
    if holds and not column(text, start):
        near = text[max(0, start - NEAR_BEFORE) : start]
        has_goods, has_talk = GOODS_NEXT.search(near) is not None, False
    if has_goods:
        return False
    return True if is_stated else False if has_talk else True if is_behind else None


@functools.lru_cache(maxsize=64)
def _before(text: str, start: int, cue: re.Pattern[str]) -> tuple[bool, bool, bool, bool]:
    """Of what stands before a number: whether the cue names it, whether there is a cue at all, a
    word for goods, one of talk.
    """
    heading = column(text, start)
    near = text[max(0, start - NEAR_BEFORE) : start].replace("_", " ")
    near = near.rpartition("\n")[2] if heading else near
    named = goods = talk = 0
    for words in (heading, near):
        line = words.rpartition("\n")[2]
        named, goods, talk = (
            max((match.end() for match in one.finditer(of)), default=0)
            for one, of in ((cue, words), (GOODS, words), (TALK, line))
        )
        if named or goods or talk:
            break
    sentence = SENTENCE.search(near if heading else text[max(0, start - FAR_BEFORE) : start])
    assert sentence is not None, "it may be empty"
    has_cue = named > 0 or cue.search(near) is not None or cue.search(sentence[0]) is not None
    return named > 0 and named >= goods, has_cue, goods > 0, talk > 0


def column(text: str, place: int) -> str:
    """The heading of the column of a table in which a place lies, or ""."""
    lines, tops, signs = _tables(text)
    row = bisect.bisect_right(lines, place) - 1
    if tops[row] == row:
        return ""
    top, sign = lines[tops[row]], signs[row]
    heading = text[top : text.index("\n", top)].split(sign)
    return heading[text.count(sign, lines[row], place)].replace("_", " ")


@functools.lru_cache(maxsize=8)
def _tables(text: str) -> tuple[list[int], list[int], list[str]]:
    """Of each line: where it begins; the first line of its table, which all have as many of one
    sign between cells; that sign.
    """
    lines, tops, signs, counts = [0], list[int](), list[str](), list[int]()
    for number, line in enumerate(text.split("\n")):
        lines.append(lines[-1] + len(line) + 1)
        sign = max("|\t;,", key=line.count)
        signs.append(sign)
        counts.append(line.count(sign))
        goes_on = number and counts[-1] and (signs[-2], counts[-2]) == (sign, counts[-1])
        tops.append(tops[-1] if goes_on else number)
    return lines[:-1], tops, signs


def parse_phone(value: str) -> Iterator[phonenumbers.PhoneNumber]:
    """The numbers that a value may be: by its prefix, else of each of PHONE_REGIONS."""
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
    """Wallet addresses: Base58Check and Bech32 by their check, others by their form."""
    if not LONG_WORD.search(text):
        return
    for pattern, valid in ((BASE58_ADDRESS, is_base58check), (BECH32_ADDRESS, is_bech32)):
        for match in pattern.finditer(text):
            if valid(match.group()):
                yield match.span()
    for match in OTHER_ADDRESS.finditer(text):
        yield match.span(match.lastgroup or 0)


def is_base58check(address: str, sizes: tuple[int, ...] = (25, 26)) -> bool:
    """Whether it ends in four bytes of the double SHA-256 of the rest, and has one of the sizes:
    those of an address, in bytes.
    """
    if address[0] == "r":
        address = address.translate(str.maketrans(RIPPLE, BASE58))
    data = bitcoin.b58decode(address)
    check = hashlib.sha256(hashlib.sha256(data[:-4]).digest()).digest()[:4]
    return len(data) in sizes and check == data[-4:]


def is_bech32(address: str) -> bool:
    """Whether the last six letters are the check of BIP 173 or BIP 350."""
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
