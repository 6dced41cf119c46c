"""Texts with their findings masked or replaced by invented values: of the same kind and form, the
same throughout a conversation, and assigned to nobody.

Knows ranges that are set aside or never assigned: telephone numbers of Ofcom, ACMA, ARCEP, BNetzA,
ComReg, PTS and the North American 555-01xx, addresses of RFC 2606, 5737 and 3849, test cards, SSN
areas from 900, banks that do not exist. Where a country sets nothing aside, a number outside its
plan (two zeros after the trunk). Identity numbers and wallets fail their check.

A surrogate is drawn from HMAC-SHA256(key, conversation, type, which of the type it is), never from
the value: it says nothing of what it hides, and texts that differ in their values alone become the
same text.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
import string
from collections.abc import Callable, Iterable, Sequence
from importlib import resources

import phonenumbers
import yaml

from eyas.privacy.attributes import MONTHS
from eyas.privacy.identifiers import is_national_id
from eyas.privacy.key import NUMBERED, canonical, keyed
from eyas.privacy.lexicon import FEMALE, MALE
from eyas.privacy.mentions import WORD, Names, name_key, stays
from eyas.privacy.patterns import BASE58, BECH32, luhn, parse_phone
from eyas.privacy.policy import TYPES, Finding, PrivacyConfig, mask, replace
from eyas.privacy.spelling import plain

_WORDS = yaml.safe_load(
    (resources.files("eyas.privacy") / "pseudonyms.yaml").read_text(encoding="utf-8")
)
FEMALE_GIVEN, MALE_GIVEN, FAMILY, STREETS, CITIES, COUNTRIES, STATES = (
    tuple(_WORDS[kind].split())
    for kind in (
        "given_female", "given_male", "family", "streets", "cities", "countries", "states",
    )
)  # fmt: skip
GIVEN = tuple(sorted(FEMALE_GIVEN + MALE_GIVEN))

BETWEEN = "\x1e"  # record separator
WORDED = ("PERSON", "STREET_ADDRESS", "LOCATION")
EXTENSION = re.compile(r"\s?(?:x|ext)", re.I)
# By country, how fictional national numbers begin, without the trunk 0.
FICTIONAL_PHONES = {
    region: tuple(starts.split()) for region, starts in _WORDS["fictional_phones"].items()
}
ANYWHERE = "55501"  # for a short number of no known country
LONG = 9  # digits of a national number that may have an area code in it
UNUSED = "00"
SEVEN = [f"{ANYWHERE}{last:02d}" for last in range(100)]
TEST_CARDS = {
    "34": "371449",
    "37": "378282",
    "35": "353011",
    "3": "305693",
    "5": "555555",
    "2": "555555",
    "6": "601111",
}
DEFAULT_TEST_CARD = "424242"
DOCUMENTATION = ("192.0.2.", "198.51.100.", "203.0.113.")
RESERVED_MAIL = re.compile(
    r"@(?:[\w-]+\.)*(?:example\.(?:com|org|net)|example|test|invalid|localhost)$", re.I
)
KEY_PREFIX = re.compile(r"sk-(?:proj|ant)-|[A-Za-z]{2,6}[-_]|AKIA|ASIA|AIza|eyJ")
LONG_NUMBER = 4  # digits
MOST_ATTEMPTS = 50  # before two words are joined to make one that is not taken


def clean(
    texts: Sequence[str], found: Sequence[Sequence[Finding]], config: PrivacyConfig, key: bytes
) -> list[str]:
    """Each text of one conversation without its findings, none of which is of a type that drops.

    A value has one surrogate in all the texts, drawn for the conversation as it reads with every
    value masked: conversations that differ in their values alone become the same one, but for the
    gender of given names, and are found to be duplicates.
    """
    conversation = BETWEEN.join(
        mask(text, findings) for text, findings in zip(texts, found, strict=True)
    )
    values = [
        (one.type, text[one.start : one.end])
        for text, findings in zip(texts, found, strict=True)
        for one in findings
    ]
    surrogates = Surrogates(key, conversation, values, texts)

    def replacement(type: str, value: str) -> str:
        action = config.action(type)
        assert action in ("mask", "surrogate"), f"{type} is not to be replaced"
        return f"<{type}>" if action == "mask" else surrogates.of(type, value)

    return [
        replace(
            text, findings, [replacement(one.type, text[one.start : one.end]) for one in findings]
        )
        for text, findings in zip(texts, found, strict=True)
    ]


class KeyedRandom:
    """Numbers from HMAC-SHA256 in counter mode: the same for the same key and seed, anywhere."""

    def __init__(self, key: bytes, *seed: str) -> None:
        blocks = (keyed(key, "surrogate", *seed, str(counter)) for counter in itertools.count())
        self._words = (
            int.from_bytes(block[at : at + 8], "big") for block in blocks for at in range(0, 32, 8)
        )

    def below(self, bound: int) -> int:
        """A number from 0 to bound - 1. Of 64 bits: the bias is below 2^-50 for our bounds."""
        return next(self._words) % bound

    def choice(self, options: Sequence[str]) -> str:
        return options[self.below(len(options))]

    def digits(self, count: int) -> str:
        return "".join(str(self.below(10)) for _ in range(count))

    def like(self, value: str) -> str:
        """A digit for a digit, a letter for a letter of the same case; all else stays."""
        return "".join(self._like(letter) for letter in value)

    def _like(self, letter: str) -> str:
        if letter.isdigit():
            return str(self.below(10))
        if letter.isalpha():
            return self.choice(
                string.ascii_uppercase if letter.isupper() else string.ascii_lowercase
            )
        return letter


class Surrogates:
    """The invented values of one conversation."""

    def __init__(
        self,
        key: bytes,
        conversation: str,
        values: Iterable[tuple[str, str]],
        texts: Sequence[str] = (),
    ) -> None:
        """conversation: tells it from others, such as its text without the values. values: type and
        value of all that will be replaced; none of them is ever invented. texts: where a person's
        gender may show.
        """
        values = list(values)
        self._key, self._conversation = key, conversation
        self._names = Names(texts, [value for type, value in values if type == "PERSON"])
        self._surrogates: dict[tuple[str, str], str] = {}
        self._taken = {
            part.casefold()
            for type, value in values
            for part in (
                canonical(type, value),
                *WORD.findall(value),
                *map(name_key, WORD.findall(value)),
            )
        }
        self._counts: dict[str, int] = {}

    def of(self, type: str, value: str) -> str:
        """The surrogate of this value, here and wherever it comes again."""
        value = plain(value).text
        if type in WORDED:
            return self._worded(type, value)
        invented = self._surrogate(
            type, canonical(type, value), lambda draw: MAKERS[type](value, draw)
        )
        if type in NUMBERED:
            return fill_form(invented, value)
        return f"@{invented}" if type == "HANDLE" and value.startswith("@") else invented

    def _surrogate(self, kind: str, value: str, make: Callable[[KeyedRandom], str]) -> str:
        if (kind, value) not in self._surrogates:
            self._counts[kind] = ordinal = self._counts.get(kind, 0) + 1
            for attempt in itertools.count():
                draw = KeyedRandom(self._key, self._conversation, kind, str(ordinal), str(attempt))
                is_last = attempt >= MOST_ATTEMPTS
                invented = f"{make(draw)}{make(draw).lower()}" if is_last else make(draw)
                if invented.casefold() not in self._taken and (
                    is_last or not self._holds_value(invented)
                ):
                    break
            self._taken.add(invented.casefold())
            self._surrogates[kind, value] = invented
        return self._surrogates[kind, value]

    def _holds_value(self, invented: str) -> bool:
        """Whether a name or a longer number of the conversation is within it, such as the year of
        another date.
        """
        return any(
            self._names.knows(word)
            if word.isalpha()
            else len(word) >= LONG_NUMBER and word in self._taken
            for word in WORD.findall(invented)
        )

    def _worded(self, type: str, value: str) -> str:
        """Word by word, so that "Ada Berg" and, later, "Berg" are the same person; a place by
        itself is replaced whole.
        """
        if type == "LOCATION" and not any(letter.isdigit() for letter in value):
            return self._place(value)
        parts, end = list[str](), 0
        for match in WORD.finditer(value):
            parts += [
                value[end : match.start()],
                self._word(type, match.group(), match.start(), value),
            ]
            end = match.end()
        return "".join([*parts, value[end:]])

    def _place(self, value: str) -> str:
        name = " ".join(value.split())
        if name in STATES:
            return self._surrogate("word", name, lambda draw: draw.choice(STATES))
        pool = COUNTRIES if name.title() in COUNTRIES else CITIES
        return match_case(
            self._surrogate("word", name_key(name), lambda draw: draw.choice(pool)), value
        )

    def _word(self, type: str, word: str, start: int, value: str) -> str:
        if word.isdigit():
            return self._surrogate("number", word, lambda draw: number_like(word, draw))
        # Lane may be a street's kind and somebody's name
        if type == "PERSON" or not self._names.knows(word):
            is_short = type == "STREET_ADDRESS" and len(word) <= 2 and word not in STATES
            if stays(type, word) or is_short:
                return word
        if len(word) == 1:
            is_possessive = word in "sS" and value[:start].endswith("'")
            return word if is_possessive else match_case(self._initial(word.casefold()), word)
        if word in STATES and type == "STREET_ADDRESS":
            return self._surrogate("word", word, lambda draw: draw.choice(STATES))
        if type == "PERSON" or self._names.knows(word):
            return self._name(word)
        inner = bool(re.search(r"[,\n]", value[:start]))
        pool = STREETS if type == "STREET_ADDRESS" and not inner else CITIES
        return match_case(
            self._surrogate("word", name_key(word), lambda draw: draw.choice(pool)), word
        )

    def _name(self, word: str) -> str:
        """Of the name that the word is a form of, with the ending that it adds; given names keep
        their gender where it shows.
        """
        base, ending = self._names.base(word)
        pool = FAMILY
        if base not in self._names.family:
            gender = self._names.gender(base)
            pool = {FEMALE: FEMALE_GIVEN, MALE: MALE_GIVEN}.get(gender, GIVEN)
        name = self._surrogate("word", base, lambda draw: draw.choice(pool))
        return match_case(name + ending, word)

    def _initial(self, letter: str) -> str:
        """Of the word that it may stand for, where one came before."""
        words = (
            invented
            for (kind, value), invented in self._surrogates.items()
            if kind == "word" and value.startswith(letter)
        )
        return next(words, "")[:1] or self._surrogate(
            "initial", letter, lambda draw: draw.choice(string.ascii_uppercase)
        )


def number_like(number: str, draw: KeyedRandom) -> str:
    """A number of as many digits, without a leading zero where there was none."""
    first = str(draw.below(10)) if number[0] == "0" and len(number) > 1 else str(1 + draw.below(9))
    return first + draw.digits(len(number) - 1)


def match_case(invented: str, mention: str) -> str:
    """The invented word in capitals or small letters, as the mention is."""
    if mention.isupper():
        return invented.upper()
    return invented.lower() if mention.islower() else invented


def fill_form(invented: str, mention: str) -> str:
    """The mention with its letters and digits replaced by those of `invented`, in its case.

    invented: as many letters and digits as the mention has, or digits only: then the mention's
    letters stay, such as the "x" of an extension.
    """
    stays = invented.isdigit()
    letters = iter(invented)
    return "".join(
        match_case(next(letters, "0"), one) if (one.isdigit() if stays else one.isalnum()) else one
        for one in mention
    )


def phone(value: str, draw: KeyedRandom) -> str:
    """The digits of a fictional number of the same country and length, its extension's too.

    A number that is valid in several countries counts as the first one's. Prefix and trunk stay;
    where nothing is set aside, two zeros follow them, with which no national number begins.
    """
    number, *extension = EXTENSION.split(value, maxsplit=1)
    digits = re.sub(r"\D", "", number)
    read = next(parse_phone(number), None)
    national = phonenumbers.national_significant_number(read) if read else digits.removeprefix("0")
    kept = digits.removesuffix(national)
    start = draw.choice(
        _set_aside(read) if read and (len(national) >= LONG or number[0] == "+") else (ANYWHERE,)
    )
    invented = (start + draw.digits(max(0, len(digits) - len(kept) - len(start))))[
        : len(digits) - len(kept)
    ]
    return kept + invented + draw.digits(len(re.findall(r"\d", "".join(extension))))


def _set_aside(number: phonenumbers.PhoneNumber) -> tuple[str, ...]:
    """How fictional numbers of its country begin; a small country's are those of the one whose
    prefix it shares.
    """
    main = phonenumbers.region_code_for_country_code(number.country_code or 0)
    return FICTIONAL_PHONES.get(
        phonenumbers.region_code_for_number(number) or main
    ) or FICTIONAL_PHONES.get(main, (UNUSED,))


def card(value: str, draw: KeyedRandom) -> str:
    """A number of the same kind of issuer and length from a range for tests, with a right check
    digit.
    """
    digits = re.sub(r"\D", "", value)
    start = TEST_CARDS.get(digits[:2]) or TEST_CARDS.get(digits[0]) or DEFAULT_TEST_CARD
    invented = start + draw.digits(len(digits) - len(start) - 1)
    return invented + next(check for check in string.digits if luhn(invented + check))


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


def ip_address(value: str, draw: KeyedRandom) -> str:
    """An address for documentation of the same version (RFC 5737, RFC 3849)."""
    if ":" in value:
        return str(
            ipaddress.IPv6Address(int(ipaddress.IPv6Address("2001:db8::")) + draw.below(1 << 62))
        )
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
    """An address of the same form for which no key exists. Its letters are drawn, so that a Base58
    or Bech32 check fails.
    """
    hexadecimal, bech32 = value[:2].lower() == "0x", re.match("(?:bc|tb|ltc)1.", value, re.I)
    start = 2 if hexadecimal else bech32.end() if bech32 else 1
    letters = string.hexdigits[:16] if hexadecimal else BECH32 if bech32 else BASE58
    kept = value[:start].lower() if bech32 else value[:start]
    return kept + "".join(draw.choice(letters) for _ in value[start:])


def birth_date(value: str, draw: KeyedRandom) -> str:
    """A date written the same way, up to five years before or after; day and month in any order."""
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


def _ordinal(number: str, like: str) -> str:
    """The number with the ending of English ordinals, if `like` has one."""
    if like.isdigit():
        return number
    teen = 10 < int(number) < 20
    return number + ("th" if teen else {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th"))


def _shifted(number: int, by: int, bound: int) -> str:
    """The number with `by` taken away, or added where it is smaller; below the bound."""
    return str(number - by if number > by else (number + by) % bound)


def coordinates(value: str, draw: KeyedRandom) -> str:
    """A place one to four degrees away, as exact as the value; other minutes and seconds."""

    def invented(match: re.Match[str]) -> str:
        whole, _, rest = match.group().partition(".")
        is_degrees = len(rest) >= 3 or value[match.end() :].lstrip()[:1] in ("°", "º", "d")
        moved = _shifted(int(whole), 1 + draw.below(4), 90) if is_degrees else str(draw.below(60))
        return moved.zfill(len(whole)) + ("." + draw.digits(len(rest)) if rest else "")

    return re.sub(r"\d+(?:\.\d+)?", invented, value)


def mac_address(value: str, draw: KeyedRandom) -> str:
    """Twelve hexadecimal digits of the locally administered range, which no maker is given."""
    drawn = "".join(draw.choice(string.hexdigits[:16]) for _ in range(10))
    return f"{draw.choice('0123456789abcdef')}{draw.choice('ae')}{drawn}"


def handle(value: str, draw: KeyedRandom) -> str:
    """An invented account name, with a number behind # where there was one."""
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


MAKERS: dict[str, Callable[[str, KeyedRandom], str]] = {
    "PRIVATE_KEY": private_key,
    "URL_CREDENTIALS": link_with_credentials,
    "API_KEY": api_key,
    "PASSWORD": lambda value, draw: draw.like(value),
    "CREDIT_CARD": card,
    "IBAN_CODE": iban,
    "US_SSN": social_security_number,
    "NATIONAL_ID": national_id,
    "CRYPTO": wallet,
    "EMAIL_ADDRESS": mail,
    "IP_ADDRESS": ip_address,
    "PHONE_NUMBER": phone,
    "DATE_OF_BIRTH": birth_date,
    "LICENSE_PLATE": lambda value, draw: draw.like(re.sub(r"[\W_]", "", value)),
    "MAC_ADDRESS": mac_address,
    "COORDINATES": coordinates,
    "HANDLE": handle,
    "URL": link,
}
assert {*MAKERS, *WORDED} == set(TYPES)


def is_fictional(type: str, value: str) -> bool:
    """Whether a value is one of those set aside for examples and tests."""
    value = plain(value).text
    if type == "EMAIL_ADDRESS":
        return RESERVED_MAIL.search(value) is not None
    digits = re.sub(r"\D", "", EXTENSION.split(value, maxsplit=1)[0])
    if type == "CREDIT_CARD":
        return digits.startswith((*TEST_CARDS.values(), DEFAULT_TEST_CARD, "411111"))
    if type == "PHONE_NUMBER":
        number = EXTENSION.split(value, maxsplit=1)[0]
        return digits.endswith(tuple(SEVEN)) or any(
            phonenumbers.national_significant_number(one).startswith(_set_aside(one))
            for one in parse_phone(number)
        )
    return False
