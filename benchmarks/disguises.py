"""What is found of values in disguise, by type and disguise, and names that survive in masked rows.

    python benchmarks/disguises.py [--quick] [--prompts FILE]

Values are invented with a fixed seed, put into sentences of each type, and disguised. A value
counts as found when none of it is left: the row goes through the filter with a surrogate for every
type, and the letters and digits of the value, read as a person reads them, are not in what comes
out, nor is the disguise. With Wilson's 95 % intervals.

Names, in word problems: of the rows in which a name was replaced, those in which a word of it is
still there, those in which one word became two, and the share of given names that kept their
gender. The last line of stdout is one JSON.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import re
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import phonenumbers
from stdnum import luhn
from stdnum.iban import calc_check_digits

from eyas.data.filters import PersonalData
from eyas.data.ledger import Drop, SourceRow
from eyas.data.recall import wilson
from eyas.privacy import lexicon
from eyas.privacy.pii import TYPES, PrivacyConfig

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
PROMPTS = DATA / "gsm8k_train.jsonl.gz"
KEY = b"benchmark"
VALUES, QUICK_VALUES = 60, 20
QUICK_ROWS = 1000
NAMES_KEPT = {"person": "keep", "street_address": "keep", "location": "keep"}

Draw = random.Random
Maker = Callable[[Draw], str]
Disguise = Callable[[str], str]


# Values


def card(draw: Draw) -> str:
    """Groups between spaces, with a right check digit."""
    start, sizes = draw.choice(
        [("4", (4, 4, 4, 4)), ("51", (4, 4, 4, 4)), ("6011", (4, 4, 4, 4)), ("37", (4, 6, 5))]
    )
    digits = start + "".join(str(draw.randrange(10)) for _ in range(sum(sizes) - 1 - len(start)))
    digits += luhn.calc_check_digit(digits)
    ends = list(itertools.accumulate(sizes))
    return " ".join(digits[end - size : end] for end, size in zip(ends, sizes, strict=True))


def account(draw: Draw) -> str:
    """German and British IBANs in groups of four."""
    if draw.random() < 0.5:
        country, rest = "DE", "".join(str(draw.randrange(10)) for _ in range(18))
    else:
        country, rest = "GB", "NWBK" + "".join(str(draw.randrange(10)) for _ in range(14))
    whole = country + calc_check_digits(f"{country}00{rest}") + rest
    return " ".join(whole[at : at + 4] for at in range(0, len(whole), 4))


def social_security_number(draw: Draw) -> str:
    """In three groups."""
    area = draw.choice([one for one in range(1, 900) if one != 666])
    return f"{area:03d}-{draw.randint(1, 99):02d}-{draw.randint(1, 9999):04d}"


def phone(draw: Draw) -> str:
    """American, British and German numbers as their people write them."""
    region = draw.choice(("US", "GB", "DE"))
    while True:
        start = {"US": draw.choice(("212", "415", "617")), "GB": "20", "DE": "30"}[region]
        digits = start + "".join(
            str(draw.randrange(10)) for _ in range({"US": 7, "GB": 8, "DE": 8}[region])
        )
        number = phonenumbers.parse(digits, region)
        if phonenumbers.is_valid_number(number):
            form = phonenumbers.PhoneNumberFormat
            style = draw.choice((form.NATIONAL, form.INTERNATIONAL))
            return str(phonenumbers.format_number(number, style))


def word(draw: Draw, letters: str = "abcdefghijklmnoprstuvw") -> str:
    """Five to eight letters."""
    return "".join(draw.choice(letters) for _ in range(draw.randint(5, 8)))


def mail(draw: Draw) -> str:
    """At a provider or a company."""
    host = draw.choice(
        ("gmail.com", "yahoo.com", "web.de", f"{word(draw)}.com", f"{word(draw)}.org")
    )
    return f"{word(draw)}{draw.choice(('', '.', '_'))}{word(draw)}@{host}"


def ip_address(draw: Draw) -> str:
    """A public one."""
    return ".".join(
        str(one) for one in (draw.choice((8, 52, 93, 185)), *draw.choices(range(1, 255), k=3))
    )


def cpf(draw: Draw) -> str:
    """Brazil's number of a person, with right check digits."""
    digits = [draw.randrange(10) for _ in range(9)]
    for _ in range(2):
        weights = range(len(digits) + 1, 1, -1)
        rest = sum(one * weight for one, weight in zip(digits, weights, strict=True)) * 10 % 11
        digits.append(rest % 10)
    text = "".join(map(str, digits))
    return f"{text[:3]}.{text[3:6]}.{text[6:9]}-{text[9:]}"


def password(draw: Draw) -> str:
    """Letters and digits."""
    return f"{word(draw).title()}{draw.randint(10, 999)}{draw.choice(('', '!', '#x', '&'))}"


def key(draw: Draw) -> str:
    """In GitHub's layout."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    return "ghp_" + "".join(draw.choice(letters) for _ in range(36))


def birth_date(draw: Draw) -> str:
    """In one of four forms."""
    year, month, day = draw.randint(1930, 2010), draw.randint(1, 12), draw.randint(1, 28)
    name = "January February March April May June July August September October November December"
    return draw.choice(
        (
            f"{year}-{month:02d}-{day:02d}",
            f"{day:02d}/{month:02d}/{year}",
            f"{name.split()[month - 1]} {day}, {year}",
            f"{day}.{month}.{year}",
        )
    )


def plate(draw: Draw) -> str:
    """American, British or German."""
    some = lambda count: "".join(draw.choice("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(count))  # noqa: E731
    return draw.choice(
        (
            f"{draw.randint(1, 9)}{some(3)}{draw.randint(100, 999)}",
            f"{some(2)}{draw.randint(10, 72)} {some(3)}",
            f"{some(1)}-{some(2)} {draw.randint(100, 9999)}",
        )
    )


def mac_address(draw: Draw) -> str:
    """Six bytes."""
    return ":".join(f"{draw.randrange(256):02x}" for _ in range(6)).replace("00", "a0", 1)


def place(draw: Draw) -> str:
    """Latitude and longitude."""
    return f"{draw.uniform(30, 60):.5f}, {draw.uniform(-120, 40):.5f}"


def handle(draw: Draw) -> str:
    """With @."""
    return f"@{word(draw)}_{draw.randint(1, 99)}"


MADE: dict[str, tuple[Maker, tuple[str, ...]]] = {
    "CREDIT_CARD": (card, ("My card is {}, thanks.", "{}", "pay with {} please")),
    "IBAN_CODE": (account, ("Send it to {}, please.", "IBAN: {}")),
    "US_SSN": (social_security_number, ("My SSN is {}.", "social security number {} ok")),
    "PHONE_NUMBER": (phone, ("Call me at {} today.", "phone: {}")),
    "NATIONAL_ID": (cpf, ("Meu CPF: {}.", "his number is {} .")),
    "IP_ADDRESS": (ip_address, ("The server {} is down.", "ping {}")),
    "EMAIL_ADDRESS": (mail, ("Write to {} today.", "my address: {}", "contact {}, please")),
    "PASSWORD": (password, ("My password is {}", "password: {} ok")),
    "API_KEY": (key, ("export TOKEN={}", "it says {} is wrong")),
    "DATE_OF_BIRTH": (birth_date, ("I was born on {}.", "date of birth: {}", "DOB {}")),
    "LICENSE_PLATE": (plate, ("My license plate is {}.", "the car with plate number {}")),
    "MAC_ADDRESS": (mac_address, ("The device {} is offline.", "MAC: {}")),
    "COORDINATES": (place, ("Meet me at the coordinates {}.", "GPS: {}")),
    "HANDLE": (handle, ("Follow me on Instagram {}.", "my Twitter handle is {}")),
}
SENTENCES = {
    "password, no sign": ("Log in with password {}", "use the password {} now"),
    "credentials a / b": ("The credentials are ana / {}", "login: bob:{}"),
}


# Disguises


def digits_of(zero: str) -> Disguise:
    """Its digits in another script."""
    table = str.maketrans("0123456789", "".join(chr(ord(zero) + one) for one in range(10)))
    return lambda value: value.translate(table)


def between(sign: str) -> Disguise:
    """Another sign between its groups."""
    return lambda value: re.sub(r"(?<=\w)[ -](?=\w)", lambda _: sign, value)


def inside(sign: str) -> Disguise:
    """A sign behind every letter and digit but the last."""
    return lambda value: re.sub(r"(?<=\w)(?=\w)", sign, value)


def full_width(value: str) -> str:
    """All that ASCII has."""
    return "".join(chr(ord(one) + 0xFEE0) if "!" <= one <= "~" else one for one in value)


def lookalikes(value: str) -> str:
    """Cyrillic letters among the Latin ones."""
    return value.translate(str.maketrans("aceopxyi", "асеорхуі"))


NUMBERS = ("CREDIT_CARD", "IBAN_CODE", "US_SSN", "PHONE_NUMBER", "NATIONAL_ID")
DIGITS = (*NUMBERS, "IP_ADDRESS", "DATE_OF_BIRTH", "COORDINATES")
GROUPS = ("CREDIT_CARD", "IBAN_CODE", "US_SSN", "PHONE_NUMBER")
ANY = tuple(MADE)
DISGUISES: dict[str, tuple[Disguise, tuple[str, ...]]] = {
    "plain": (str, ANY),
    "full-width": (full_width, (*DIGITS, "EMAIL_ADDRESS", "MAC_ADDRESS", "HANDLE")),
    "Arabic-Indic digits": (digits_of("٠"), DIGITS),
    "Devanagari digits": (digits_of("०"), DIGITS),
    "mathematical bold digits": (digits_of("𝟎"), DIGITS),
    "zero-width space inside": (inside("\u200b"), ANY),
    "soft hyphen inside": (inside("\u00ad"), ANY),
    "no-break space": (between("\u00a0"), GROUPS),
    "dots": (between("."), GROUPS),
    "slashes": (between("/"), GROUPS),
    "underscores": (between("_"), GROUPS),
    "en dashes": (between("–"), GROUPS),
    "em dashes": (between("—"), GROUPS),
    "double spaces": (between("  "), GROUPS),
    "line breaks": (between("\n"), GROUPS),
    "spaced hyphens": (between(" - "), GROUPS),
    "a space after each digit": (
        lambda value: " ".join(one for one in value if one.isalnum()),
        ("CREDIT_CARD",),
    ),
    "Cyrillic lookalikes": (lookalikes, ("EMAIL_ADDRESS", "HANDLE")),
    "[at]": (lambda value: value.replace("@", " [at] "), ("EMAIL_ADDRESS",)),
    "(at) (dot)": (
        lambda value: value.replace("@", " (at) ").replace(".", " (dot) "),
        ("EMAIL_ADDRESS",),
    ),
    "at ... dot": (
        lambda value: value.replace("@", " at ").replace(".", " dot "),
        ("EMAIL_ADDRESS",),
    ),
    "spaces around @": (lambda value: value.replace("@", " @ "), ("EMAIL_ADDRESS",)),
    "password, no sign": (str, ("PASSWORD",)),
    "credentials a / b": (str, ("PASSWORD",)),
    "[.]": (lambda value: value.replace(".", "[.]"), ("IP_ADDRESS",)),
}


def read(text: str) -> str:
    """What a person reads: letters and digits, in small letters of one alphabet."""
    seen = unicodedata.normalize("NFKC", text).translate(str.maketrans("асеорхуі", "aceopxyi"))
    digits = (str(unicodedata.digit(one)) if one.isdigit() else one for one in seen)
    return "".join(one for one in digits if one.isalnum()).casefold()


def disguised(count: int) -> dict[str, dict[str, dict[str, float]]]:
    """Recall by type and disguise."""
    actions = {**{type.lower(): "surrogate" for type in TYPES}, **NAMES_KEPT}
    search = PersonalData(PrivacyConfig(actions=actions), KEY)
    report: dict[str, dict[str, dict[str, float]]] = {}
    for name, (disguise, types) in DISGUISES.items():
        for type in types:
            make, sentences = MADE[type]
            draw, gone = Draw(f"{type} of {name}"), 0
            for number in range(count):
                value = disguise(make(draw))
                some = SENTENCES.get(name, sentences)
                text = some[number % len(some)].format(value)
                made = search(SourceRow("", "", "", None, (text,)))
                after = made.turns[0] if isinstance(made, SourceRow) else ""
                gone += value not in after and read(value) not in read(after)
            low, high = wilson(gone, count)
            report.setdefault(name, {})[type] = {
                "found": gone,
                "of": count,
                "share": round(gone / count, 3),
                "low": round(low, 3),
                "high": round(high, 3),
            }
    return report


# Names


def names_in_rows(path: Path, limit: int | None) -> dict[str, Any]:
    """What becomes of names in rows: question and answer are the two turns of a conversation."""
    search = PersonalData(PrivacyConfig(), KEY)
    counts = dict.fromkeys(
        ("rows", "masked", "dropped", "survives", "two_people", "gender_shown", "gender_kept"), 0
    )
    examples: list[str] = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in itertools.islice(lines, limit):
            turns = tuple(one["content"] for one in json.loads(line)["messages"])
            made = search(SourceRow("", "", "", None, turns))
            counts["rows"] += 1
            if isinstance(made, Drop):
                counts["dropped"] += 1
                continue
            pairs = replaced_names(turns, made)
            if not pairs:
                continue
            counts["masked"] += 1
            left = surviving({one for one, _ in pairs}, "\n".join(made.turns))
            counts["survives"] += bool(left)
            examples += sorted(left)[:1]
            words: dict[str, set[str]] = {}
            for before, after in pairs:
                olds, news = name_words(before), name_words(after)
                if len(olds) == len(news):
                    for old, new in zip(olds, news, strict=True):
                        words.setdefault(old.casefold(), set()).add(new.casefold())
            counts["two_people"] += any(len(new) > 1 for new in words.values())
            for old, news_of in words.items():
                for shown, kept in genders(old, news_of):
                    counts["gender_shown"] += shown
                    counts["gender_kept"] += kept
    return {**counts, "examples": examples[:10]}


def name_words(name: str) -> list[str]:
    """Words of three letters or more."""
    return re.findall(r"[^\W\d_]{3,}", name)


def replaced_names(turns: tuple[str, ...], made: SourceRow) -> list[tuple[str, str]]:
    """Each name that was replaced, and by what."""
    pairs = []
    for number, (before, after) in enumerate(zip(turns, made.turns, strict=True)):
        found = [one for one in made.masked if one.turn == number]
        ends = [0, *(one.end for one in found)]
        starts = [*(one.start for one in found), len(before)]
        kept = [before[end:start] for end, start in zip(ends, starts, strict=True)]
        match = re.fullmatch("(.*?)".join(map(re.escape, kept)), after, re.S)
        if match is None:
            continue
        pairs += [
            (before[one.start : one.end], new)
            for one, new in zip(found, match.groups(), strict=True)
            if one.type == "PERSON"
        ]
    return pairs


def surviving(names: set[str], text: str) -> set[str]:
    """The words of names that are still in a text with a capital, alone or with an ending."""
    words = {
        one
        for name in names
        for one in name_words(name)
        if one[0].isupper() and one.lower() not in ("mrs", "miss", "and", "the")
    }
    return {
        one
        for one in words
        if re.search(rf"(?<![^\W_])(?:{one}|{one.upper()})(?:s|es)?(?![^\W_])", text)
    }


def genders(old: str, news: set[str]) -> list[tuple[bool, bool]]:
    """For each surrogate, whether the name's gender is listed, and whether the surrogate has it."""
    female, male = getattr(lexicon, "FEMALE", 1 << 10), getattr(lexicon, "MALE", 1 << 11)
    words = lexicon.gazetteer().words
    shown = words.get(lexicon.bare_word(old), (0, 0))[0] & (female | male)
    listed = [words.get(lexicon.bare_word(new), (0, 0))[0] & (female | male) for new in news]
    return [(True, one == shown) for one in listed if shown and one]


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a part of the values and rows")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="gzip JSON lines, `messages`")
    args = parser.parse_args()
    if not args.prompts.exists():
        sys.exit(
            f"error: no file at {args.prompts}\n  -> give word problems with --prompts (gzip JSON "
            "lines with `messages`)"
        )
    found = disguised(QUICK_VALUES if args.quick else VALUES)
    types = [type for type in MADE if any(type in of for of in found.values())]
    print("| disguise | " + " | ".join(types) + " |\n|---" * 1 + "|---" * len(types) + "|")
    for name, of in found.items():
        cells = (f"{of[type]['share']:.2f}" if type in of else "" for type in types)
        print(f"| {name} | " + " | ".join(cells) + " |")
    names = names_in_rows(args.prompts, QUICK_ROWS if args.quick else None)
    print(f"\nnames in {args.prompts.name}: {names}")
    print(json.dumps({"quick": args.quick, "values": found, "names": names}))


if __name__ == "__main__":
    main()
