"""Invented values of the kind and form of real ones, assigned to nobody: from ranges set aside for
examples or, where there are none, outside a number's plan or with a wrong check.

A maker takes a value of `spelling.plain` and the draws of its conversation. It takes nothing but
the form from the value, which may be any text, since overlapping findings are joined.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
import string
from collections.abc import Sequence
from importlib import resources

import phonenumbers
import yaml
from stdnum import luhn

from eyas.privacy.attributes import MONTHS
from eyas.privacy.identifiers import is_national_id
from eyas.privacy.key import keyed
from eyas.privacy.patterns import BASE58, BECH32, parse_phone

_WORDS = yaml.safe_load(
    (resources.files("eyas.privacy") / "pseudonyms.yaml").read_text(encoding="utf-8")
)
GIVEN, FAMILY, STREETS, CITIES, COUNTRIES = (
    tuple(_WORDS[kind].split()) for kind in ("given", "family", "streets", "cities", "countries")
)
# Names of scripts without spaces, by a pattern of their characters
SCRIPTS = {script: tuple(names.split()) for script, names in _WORDS["scripts"].items()}
OWN = {script: [*map(str.split, pools)] for script, pools in _WORDS["own"].items()}

EXTENSION = re.compile(r"\s?(?:x|ext)", re.I)
FICTIONAL = "55501"  # North America's 555-01xx
AREAS = ("202", "303", "404", "512", "617", "713")
UNUSED = "00"  # with which no national number begins
LONG = 9  # digits of a national number that may hold an area code
TEST_CARDS = {"34": "371449", "37": "378282", "35": "353011", "3": "305693", "5": "555555"}
TEST_CARDS |= {"2": "555555", "6": "601111"}
DEFAULT_TEST_CARD = "424242"
DOCUMENTATION = ("192.0.2.", "198.51.100.", "203.0.113.")
RESERVED_MAIL = re.compile(
    r"@(?:[\w-]+\.)*(?:example\.(?:com|org|net)|example|test|invalid|localhost)$", re.I
)
KEY_PREFIX = re.compile(r"sk-(?:proj|ant)-|[A-Za-z]{2,6}[-_]|AKIA|ASIA|AIza|eyJ")


class KeyedRandom:
    """Numbers from HMAC-SHA256 in counter mode, the same for the same key and seed."""

    def __init__(self, key: bytes, *seed: str) -> None:
        blocks = (keyed(key, "surrogate", *seed, str(counter)) for counter in itertools.count())
        self._words = (
            int.from_bytes(block[at : at + 8], "big") for block in blocks for at in range(0, 32, 8)
        )

    def below(self, bound: int) -> int:
        """A number in [0, bound), of 64 bits: the bias is below 2^-50 for our bounds."""
        return next(self._words) % bound

    def choice(self, options: Sequence[str]) -> str:
        return options[self.below(len(options))]

    def digits(self, count: int) -> str:
        return "".join(str(self.below(10)) for _ in range(count))

    def like(self, value: str) -> str:
        """A digit for a digit, a letter for a letter of the same case; all else stays."""
        return "".join(map(self._like, value))

    def _like(self, letter: str) -> str:
        if letter.isdigit():
            return str(self.below(10))
        upper, lower = string.ascii_uppercase, string.ascii_lowercase
        return self.choice(upper if letter.isupper() else lower) if letter.isalpha() else letter


def person(value: str, draw: KeyedRandom) -> str:
    """A name of the value's script, if that has no spaces, else a given name."""
    return draw.choice(next((SCRIPTS[one] for one in SCRIPTS if re.search(one, value)), GIVEN))


def name_word(word: str, is_family: bool, draw: KeyedRandom) -> str:
    """A given or family name in the word's script."""
    pools = next((OWN[one] for one in OWN if re.search(one, word)), (GIVEN, FAMILY))
    return draw.choice(pools[is_family])


LONGEST_POSTCODE = 10  # characters


def address(value: str, draw: KeyedRandom) -> str:
    """A number and a street; for each further part, between commas and line ends, digits like its
    own and a town for its words. For a postcode alone one of its form.
    """
    if len(value) <= LONGEST_POSTCODE and not re.search(r"[^\W\d_]{3}", value):
        return same_form(value, draw)
    rest = re.split(r"([,\n]+\s*)", value)[1:]
    made = [f"{1 + draw.below(899)} {draw.choice(STREETS)} Street"]
    for part in rest:
        number = re.sub(r"\d", lambda _: draw.digits(1), " ".join(re.findall(r"\d+", part)))
        town = draw.choice(CITIES) if re.search(r"[^\W\d_]{3}", part) else ""
        made.append(" ".join(filter(None, (town, number))) or re.sub(r"\w", "", part))
    return "".join(made)


def place(value: str, draw: KeyedRandom) -> str:
    """A country for a listed country, a town for any other place."""
    return match_case(draw.choice(COUNTRIES if value.title() in COUNTRIES else CITIES), value)


def match_case(invented: str, mention: str) -> str:
    """The invented word in capitals or small letters, as the mention."""
    if mention.isupper():
        return invented.upper()
    return invented.lower() if mention.islower() else invented


def fill_form(invented: str, mention: str) -> str:
    """The mention with its letters and digits replaced by those of `invented`, in its case. Where
    these are digits alone the mention's letters stay, such as the "x" of an extension.
    """
    stays = invented.isdigit()
    letters = filter(str.isalnum, invented)
    return "".join(
        match_case(next(letters, "0"), one) if (one.isdigit() if stays else one.isalnum()) else one
        for one in mention
    )


def phone_parts(value: str) -> tuple[str, str, str]:
    """The digits of a telephone number's country or trunk, of the number within its country, and of
    its extension. A number that is valid in several countries counts as the first one's.
    """
    number, *extension = EXTENSION.split(value, maxsplit=1)
    digits = re.sub(r"\D", "", number)
    read = next(parse_phone(number), None)
    national = phonenumbers.national_significant_number(read) if read else digits.removeprefix("0")
    if not digits.endswith(national):  # some countries write more than they dial
        national = digits
    return digits.removesuffix(national), national, re.sub(r"\D", "", "".join(extension))


def phone(value: str, draw: KeyedRandom) -> str:
    """The digits within its country, and of its extension, of a number of the same length that
    reaches nobody: 555-01xx in North America, two zeros behind the prefix or trunk elsewhere.
    """
    _, national, extension = phone_parts(value)
    read, start = next(parse_phone(EXTENSION.split(value)[0]), None), FICTIONAL
    if read and (len(national) >= LONG or value[0] == "+"):
        start = draw.choice(AREAS) + FICTIONAL if read.country_code == 1 else UNUSED
    drawn = (start + draw.digits(max(0, len(national) - len(start))))[: len(national)]
    return drawn + draw.digits(len(extension))


def is_fictional_phone(value: str) -> bool:
    """Whether it is one of North America's numbers for fiction."""
    digits = re.sub(r"\D", "", EXTENSION.split(value, maxsplit=1)[0])
    return digits[:-2].endswith(FICTIONAL)


def card(value: str, draw: KeyedRandom) -> str:
    """A number of the same issuer and length from a range for tests, with a right check digit."""
    digits = re.sub(r"\D", "", value)
    start = TEST_CARDS.get(digits[:2]) or TEST_CARDS.get(digits[0]) or DEFAULT_TEST_CARD
    invented = start + draw.digits(len(digits) - len(start) - 1)
    return invented + str(luhn.calc_check_digit(invented))


def is_test_card(value: str) -> bool:
    """Whether it is from a range for tests."""
    return re.sub(r"\D", "", value).startswith((*TEST_CARDS.values(), DEFAULT_TEST_CARD, "411111"))


def iban(value: str, draw: KeyedRandom) -> str:
    """The same country, a bank that does not exist (XXXX or 0000), invented digits, right check
    digits (ISO 7064 mod 97).
    """
    letters = re.sub(r"[\W_]", "", value).upper()
    country, bank, account = letters[:2], letters[4:8], letters[8:]
    invented = "".join("0" if letter.isdigit() else "X" for letter in bank) + draw.like(account)
    rearranged = "".join(str(int(letter, 36)) for letter in f"{invented}{country}00")
    return f"{country}{98 - int(rearranged) % 97:02d}{invented}"


def social_security_number(value: str, draw: KeyedRandom) -> str:
    """An area from 900, which is no SSN's, and a group below 50, which is no ITIN's."""
    return f"9{draw.digits(2)}{1 + draw.below(49):02d}{draw.digits(4)}"


def national_id(value: str, draw: KeyedRandom) -> str:
    """A number of the same form that fails every check."""
    letters = "".join(letter for letter in value if letter.isalnum())
    invented = (draw.like(letters) for _ in itertools.count())
    return next(one for one in invented if not is_national_id(fill_form(one, value)))


def mail(value: str, draw: KeyedRandom) -> str:
    """An invented name at one of RFC 2606's domains."""
    host = draw.choice(("example.com", "example.org", "example.net"))
    return f"{draw.choice(GIVEN)}.{draw.choice(FAMILY)}{draw.digits(2)}@{host}".lower()


def is_example_mail(value: str) -> bool:
    """Whether it is at a domain of RFC 2606."""
    return RESERVED_MAIL.search(value) is not None


def ip_address(value: str, draw: KeyedRandom) -> str:
    """An address for documentation of the same version (RFC 5737, RFC 3849)."""
    if ":" in value:
        first = int(ipaddress.IPv6Address("2001:db8::"))
        return str(ipaddress.IPv6Address(first + draw.below(1 << 62)))
    return f"{draw.choice(DOCUMENTATION)}{1 + draw.below(254)}"


def link(value: str, draw: KeyedRandom) -> str:
    """A page below example.com (RFC 2606) with the value's scheme."""
    scheme, separator, _ = value.partition("://")
    start = f"{scheme}://{draw.choice(STREETS).lower()}" if separator else "www"
    return f"{start}.example.com/{draw.choice(STREETS).lower()}{draw.digits(3)}"


def link_with_credentials(value: str, draw: KeyedRandom) -> str:
    """The same with an invented user and password."""
    scheme = value.partition("://")[0] if "://" in value else "https"
    user, password = draw.choice(GIVEN).lower(), draw.like("aaaa0000aaaa")
    return f"{scheme}://{user}:{password}@{draw.choice(STREETS).lower()}.example.com/"


def wallet(value: str, draw: KeyedRandom) -> str:
    """An address of the same form for which no key exists: its letters are drawn, so a
    check fails.
    """
    hexadecimal, bech32 = value[:2].lower() == "0x", re.match("(?:bc|tb|ltc)1.", value, re.I)
    start = 2 if hexadecimal else bech32.end() if bech32 else 1
    letters = string.hexdigits[:16] if hexadecimal else BECH32 if bech32 else BASE58
    kept = value[:start].lower() if bech32 else value[:start]
    return kept + "".join(draw.choice(letters) for _ in value[start:])


def birth_date(value: str, draw: KeyedRandom) -> str:
    """A date written the same way, up to five years away; day and month in any order."""
    words = {month: line.split() for line in reversed(MONTHS) for month in line.split()}
    named = re.search(r"[^\W\d_]{3,}", value) is not None
    parts = re.split(r"(\d+(?:st|nd|rd|th)?|[^\W\d_]{3,})", value)
    numbers = [place for place, part in enumerate(parts) if part[:1].isdigit()]
    for place, part in enumerate(parts):
        if part.lower() in words:
            parts[place] = match_case(draw.choice(words[part.lower()]).title(), part)
        elif place in numbers:
            count = len(re.sub(r"\D", "", part))
            if count == 4 or (place == numbers[-1] and not named):
                parts[place] = _shifted(int(part), 1 + draw.below(5), 10**count).zfill(count)
            else:
                limit = 9 if count == 1 else 28 if named else 12
                parts[place] = _ordinal(str(1 + draw.below(limit)).zfill(count), part)
    return "".join(parts)


def date_parts(value: str) -> list[str]:
    """The numbers of a date in digits without leading zeros, the year last; [] for another."""
    parts = [part.lstrip("0") for part in re.findall(r"[^\W_]+", value)]
    if len(parts) != 3 or not all(map(str.isdigit, parts)):
        return []
    return parts[::-1] if len(parts[0]) == 4 else parts


def _ordinal(number: str, like: str) -> str:
    if like.isdigit():
        return number
    teen = 10 < int(number) < 20
    return number + ("th" if teen else {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th"))


def _shifted(number: int, by: int, bound: int) -> str:
    return str(number - by if number > by else (number + by) % bound)


def coordinates(value: str, draw: KeyedRandom) -> str:
    """A place one to four degrees away, as exact as the value."""

    def invented(match: re.Match[str]) -> str:
        whole, _, rest = match.group().partition(".")
        is_degrees = len(rest) >= 3 or value[match.end() :].lstrip()[:1] in ("°", "º", "d")
        moved = _shifted(int(whole), 1 + draw.below(4), 90) if is_degrees else str(draw.below(60))
        return moved.zfill(len(whole)) + ("." + draw.digits(len(rest)) if rest else "")

    return re.sub(r"\d+(?:\.\d+)?", invented, value)


def mac_address(value: str, draw: KeyedRandom) -> str:
    """Twelve hexadecimal digits of the locally administered range."""
    drawn = "".join(draw.choice(string.hexdigits[:16]) for _ in range(10))
    return f"{draw.choice('0123456789abcdef')}{draw.choice('ae')}{drawn}"


def same_form(value: str, draw: KeyedRandom) -> str:
    """A digit for a digit, a letter for a letter."""
    return draw.like(value)


def handle(value: str, draw: KeyedRandom) -> str:
    """An account name, with a number behind # where there was one."""
    _, _, number = value.partition("#")
    name = f"{draw.choice(GIVEN)}_{draw.choice(STREETS)}{draw.digits(3)}".lower()
    return name + (f"#{draw.digits(4)}" if number else "")


def api_key(value: str, draw: KeyedRandom) -> str:
    """The maker's prefix, and letters and digits like the rest."""
    prefix = KEY_PREFIX.match(value)
    kept = prefix.end() if prefix else 0
    return value[:kept] + draw.like(value[kept:])


def private_key(value: str, draw: KeyedRandom) -> str:
    """The heading and the end, and lines like the rest."""
    return "\n".join(line if "-----" in line else draw.like(line) for line in value.split("\n"))
