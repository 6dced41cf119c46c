"""What is found of labelled personal data and of values in disguise, and what of texts without any
is changed.

    python benchmarks/privacy.py [--quick] [--write] [--labelled FILE]

By type: recall over the labelled spans (found when all of its letters and digits lie in findings of
any type) and precision over the findings (right when one overlaps a labelled span of its type),
with Wilson's 95 % intervals. --write puts the recall under the default policy into
eyas/data/recall.json.

Disguises: values are invented with a fixed seed, put into sentences and disguised; one is found
when a filter with a surrogate for every type leaves neither it, as a person reads it, nor its
disguise.

Names by language: recall and precision of persons in the held-back third of the labelled sentences
(`recipes/entities.py`), and recall of held-back names in introductions (`natural.yaml`).

Forms: rows without personal data that the default policy changes (`natural.py`), values found that
touch letters of other scripts, precision and recall on natural prompts that were read.

The last line of stdout is one JSON.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import itertools
import json
import random
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import phonenumbers
from stdnum import luhn
from stdnum.br import cpf as brazil
from stdnum.iban import calc_check_digits

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import natural
from eyas.artifact import VERSION
from eyas.data.filters import PersonalData
from eyas.data.ledger import Drop, SourceRow
from eyas.data.recall import MEASURED, wilson
from eyas.privacy import detector
from eyas.privacy.detector import Detector
from eyas.privacy.findings import Finding
from eyas.privacy.passages import passages
from eyas.privacy.pii import EVERY_TYPE, NAME_TYPES, TYPES, PrivacyConfig
from recipes import entities

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
LABELLED = DATA / "pii" / "presidio_synth_v2.json.gz"
QUICK_TEXTS = 300
VALUES, QUICK_VALUES = 60, 20
KEY = b"benchmark"
# The set's names for our types.
OURS = {"GPE": "LOCATION", "ZIP_CODE": "STREET_ADDRESS", "DOMAIN_NAME": "URL"}
OURS["US_DRIVER_LICENSE"] = "NATIONAL_ID"
PATTERNS = ("EMAIL_ADDRESS", "CREDIT_CARD", "IBAN_CODE", "PHONE_NUMBER", "US_SSN", "IP_ADDRESS")
GROUPS = {
    "by patterns": (*PATTERNS, "DOMAIN_NAME"),
    "names": ("PERSON",),
    "addresses and places": ("STREET_ADDRESS", "GPE"),
}
EVERY = itertools.chain.from_iterable(GROUPS.values())
GROUPS["all that we look for"] = (*EVERY, "ZIP_CODE", "US_DRIVER_LICENSE")
# either is right
WITHIN = {
    "STREET_ADDRESS": ("LOCATION", "STREET_ADDRESS"),
    "LOCATION": ("LOCATION", "STREET_ADDRESS"),
}


def search(texts: list[dict[str, Any]], config: PrivacyConfig) -> list[list[Finding]]:
    """What is found in texts that stand alone."""
    said = [text["full_text"] for text in texts]
    return Detector(config).find_all(said, [passages([one])[0] for one in said])


def is_covered(text: str, start: int, end: int, findings: Iterable[Finding]) -> bool:
    """Whether no letter or digit of the span is left."""
    hidden = {
        place for one in findings for place in range(max(one.start, start), min(one.end, end))
    }
    return all(place in hidden for place in range(start, end) if text[place].isalnum())


def is_right(finding: Finding, spans: list[dict[str, Any]]) -> bool:
    """Whether it overlaps a labelled span of its type."""
    types = WITHIN.get(finding.type, (finding.type,))
    return any(
        span["start_position"] < finding.end
        and finding.start < span["end_position"]
        and OURS.get(span["entity_type"], span["entity_type"]) in types
        for span in spans
    )


def judge(texts: list[dict[str, Any]], every: list[list[Finding]]) -> dict[str, Any]:
    """Recall by labelled type and group, and precision by found type."""
    labelled, masked, found, right = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for text, findings in zip(texts, every, strict=True):
        spans = text["spans"]
        covered = [
            is_covered(text["full_text"], span["start_position"], span["end_position"], findings)
            for span in spans
        ]
        for span, is_gone in zip(spans, covered, strict=True):
            labelled[span["entity_type"]] += 1
            masked[span["entity_type"]] += is_gone
        for finding in findings:
            found[finding.type] += 1
            right[finding.type] += is_right(finding, spans)
    recall = {type: share(masked[type], labelled[type]) for type in sorted(labelled)}
    for name, types in {**GROUPS, "all spans of the set": tuple(labelled)}.items():
        recall[name] = share(
            sum(masked[type] for type in types), sum(labelled[type] for type in types)
        )
    known = {OURS.get(type, type) for type in labelled}
    precision = {type: share(right[type], found[type]) for type in sorted(found) if type in known}
    return {
        "recall": recall,
        "precision": precision,
        "unlabelled": {type: count for type, count in sorted(found.items()) if type not in known},
    }


def share(num: int, of: int) -> dict[str, float]:
    """A share as counts, value and interval."""
    low, high = wilson(num, of)
    value = round(num / of, 4) if of else 0.0
    return {"num": num, "of": of, "share": value, "low": round(low, 4), "high": round(high, 4)}


def show(name: str, judged: dict[str, Any]) -> None:
    print(
        f"\n{name}\n{'':24}{'recall':>8}{'95 %':>16}{'spans':>7}"
        f"{'precision':>12}{'95 %':>16}{'found':>7}"
    )
    for type, recall in judged["recall"].items():
        precision = judged["precision"].get(OURS.get(type, type)) if type.isupper() else None
        print(f"{type:24}{column(recall)}" + (f"    {column(precision)}" if precision else ""))
    print(f"unlabelled: {judged['unlabelled'] or 'none'}")


def column(one: dict[str, float]) -> str:
    return f"{one['share']:8.3f}{one['low']:10.3f}-{one['high']:.3f}{one['of']:7}"


Draw = random.Random
Maker = Callable[[Draw], str]
Disguise = Callable[[str], str]


def card(draw: Draw) -> str:
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
    return "".join(draw.choice(letters) for _ in range(draw.randint(5, 8)))


def mail(draw: Draw) -> str:
    company = f"{word(draw)}.com"
    host = draw.choice(("gmail.com", "yahoo.com", "web.de", company, f"{word(draw)}.org"))
    return f"{word(draw)}{draw.choice(('', '.', '_'))}{word(draw)}@{host}"


def ip_address(draw: Draw) -> str:
    return ".".join(
        str(one) for one in (draw.choice((8, 52, 93, 185)), *draw.choices(range(1, 255), k=3))
    )


def cpf(draw: Draw) -> str:
    """Brazil's number of a person, with right check digits."""
    digits = "".join(str(draw.randrange(10)) for _ in range(9))
    return str(brazil.format(digits + brazil._calc_check_digits(digits)))


def password(draw: Draw) -> str:
    return f"{word(draw).title()}{draw.randint(10, 999)}{draw.choice(('', '!', '#x', '&'))}"


def key(draw: Draw) -> str:
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    return "ghp_" + "".join(draw.choice(letters) for _ in range(36))


def birth_date(draw: Draw) -> str:
    year, month, day = draw.randint(1930, 2010), draw.randint(1, 12), draw.randint(1, 28)
    name = "January February March April May June July August September October November December"
    iso, slashes = f"{year}-{month:02d}-{day:02d}", f"{day:02d}/{month:02d}/{year}"
    in_words = f"{name.split()[month - 1]} {day}, {year}"
    return draw.choice((iso, slashes, in_words, f"{day}.{month}.{year}"))


def plate(draw: Draw) -> str:
    some = lambda count: "".join(draw.choice("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(count))  # noqa: E731
    return draw.choice(
        (
            f"{draw.randint(1, 9)}{some(3)}{draw.randint(100, 999)}",
            f"{some(2)}{draw.randint(10, 72)} {some(3)}",
            f"{some(1)}-{some(2)} {draw.randint(100, 9999)}",
        )
    )


def mac_address(draw: Draw) -> str:
    return ":".join(f"{draw.randrange(256):02x}" for _ in range(6)).replace("00", "a0", 1)


def place(draw: Draw) -> str:
    return f"{draw.uniform(30, 60):.5f}, {draw.uniform(-120, 40):.5f}"


def handle(draw: Draw) -> str:
    return f"@{word(draw)}_{draw.randint(1, 99)}"


MADE: dict[str, Maker] = {
    "CREDIT_CARD": card,
    "IBAN_CODE": account,
    "US_SSN": social_security_number,
    "PHONE_NUMBER": phone,
    "NATIONAL_ID": cpf,
    "IP_ADDRESS": ip_address,
    "EMAIL_ADDRESS": mail,
    "PASSWORD": password,
    "API_KEY": key,
    "DATE_OF_BIRTH": birth_date,
    "LICENSE_PLATE": plate,
    "MAC_ADDRESS": mac_address,
    "COORDINATES": place,
    "HANDLE": handle,
}
TOUCHING_TYPES = (*natural.CSV_TYPES, "NATIONAL_ID", "API_KEY", "MAC_ADDRESS")


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
    return "".join(chr(ord(one) + 0xFEE0) if "!" <= one <= "~" else one for one in value)


def lookalikes(value: str) -> str:
    """Cyrillic letters among the Latin ones."""
    return value.translate(str.maketrans("aceopxyi", "асеорхуі"))


NUMBERS = ("CREDIT_CARD", "IBAN_CODE", "US_SSN", "PHONE_NUMBER", "NATIONAL_ID")
DIGITS = (*NUMBERS, "IP_ADDRESS", "DATE_OF_BIRTH", "COORDINATES")
GROUPED = ("CREDIT_CARD", "IBAN_CODE", "US_SSN", "PHONE_NUMBER")
ANY = tuple(MADE)
DISGUISES: dict[str, tuple[Disguise, tuple[str, ...]]] = {
    "plain": (str, ANY),
    "full-width": (full_width, (*DIGITS, "EMAIL_ADDRESS", "MAC_ADDRESS", "HANDLE")),
    "Arabic-Indic digits": (digits_of("٠"), DIGITS),
    "Devanagari digits": (digits_of("०"), DIGITS),
    "mathematical bold digits": (digits_of("𝟎"), DIGITS),
    "zero-width space inside": (inside("\u200b"), ANY),
    "soft hyphen inside": (inside("\u00ad"), ANY),
    "no-break space": (between("\u00a0"), GROUPED),
    "dots": (between("."), GROUPED),
    "slashes": (between("/"), GROUPED),
    "underscores": (between("_"), GROUPED),
    "en dashes": (between("–"), GROUPED),
    "em dashes": (between("—"), GROUPED),
    "double spaces": (between("  "), GROUPED),
    "line breaks": (between("\n"), GROUPED),
    "spaced hyphens": (between(" - "), GROUPED),
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
    actions = {**dict.fromkeys(TYPES, "surrogate"), **dict.fromkeys(NAME_TYPES, "keep")}
    search = PersonalData(PrivacyConfig(actions=actions), KEY)
    report: dict[str, dict[str, dict[str, float]]] = {}
    for name, (disguise, types) in DISGUISES.items():
        for type in types:
            sentences = natural.TEXTS["disguised"]
            some = sentences.get(name) or sentences[type]
            draw, gone = Draw(f"{type} of {name}"), 0
            for number in range(count):
                value = disguise(MADE[type](draw))
                text = some[number % len(some)].format(value)
                made = search(SourceRow("", "", "", None, (text,)))
                after = made.turns[0] if isinstance(made, SourceRow) else ""
                gone += value not in after and read(value) not in read(after)
            report.setdefault(name, {})[type] = share(gone, count)
    return report


def names_by_language(most: int | None) -> dict[str, dict[str, dict[str, float]]]:
    """Of the held-back third of each labelled set: recall of persons, precision of findings."""
    find, report = Detector(PrivacyConfig()).find, {}
    texts: dict[str, list[entities.Text]] = {}
    for name, language, text in entities.gold(DATA / "ner", held_back=True):
        texts.setdefault(f"{language}, {name}", []).append(text)
    for name, some in texts.items():
        of = covered = found = right = 0
        for text in some[:most]:
            people = [(start, end) for start, end, type in text.spans if type == "PERSON"]
            findings = [one for one in find(text.text) if one.type == "PERSON"]
            of, found = of + len(people), found + len(findings)
            covered += sum(is_covered(text.text, *span, findings) for span in people)
            right += sum(
                any(start < one.end and one.start < end for start, end in people)
                for one in findings
            )
        report[name] = {"recall": share(covered, of), "precision": share(right, found)}
    return report


def introduced(count: int) -> dict[str, dict[str, float]]:
    """By locale, recall of names that training never saw, in sentences that introduce them."""
    find, writer = Detector(PrivacyConfig()).find, entities.Writer(4711, held_back=True)
    report = {}
    for locale, sentences in natural.TEXTS["introductions"].items():
        gone = 0
        for number in range(count):
            country, sentence = writer.country(locale), sentences[number % len(sentences)]
            name = country.full() if number % 4 else country.given()
            text, start = sentence.format(name), sentence.index("{")
            gone += is_covered(text, start, start + len(name), find(text))
        report[locale] = share(gone, count)
    return report


def recall_by_type(texts: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Recall by our types under the default policy, as the data card states it."""
    policy = PrivacyConfig()
    found, of = Counter[str](), Counter[str]()
    for text, findings in zip(texts, search(texts, policy), strict=True):
        for span in text["spans"]:
            type = OURS.get(span["entity_type"], span["entity_type"])
            if type in TYPES and policy.action(type) != "keep":
                start, end = span["start_position"], span["end_position"]
                of[type] += 1
                found[type] += is_covered(text["full_text"], start, end, findings)
    return {type: {"found": found[type], "of": of[type]} for type in sorted(of)}


def written_recall(texts: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of recall.json."""
    return {
        "set": "presidio_synth_v2: made-up English sentences",
        "texts": len(texts),
        "languages": ["en"],
        "policy": "the default: surrogates, places and links kept",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {"eyas": VERSION, **detector.versions()},
        "types": recall_by_type(texts),
        "scripts": touching_recall(VALUES),
    }


def harmed(texts: list[str]) -> dict[str, Any]:
    """Of texts that hold no personal data besides IP addresses, those that the default policy
    changes or drops.
    """
    search, count, types = PersonalData(PrivacyConfig(), KEY), 0, Counter[str]()
    for text in texts:
        made = search(SourceRow("", "", "", None, (text,)))
        found = made.found if isinstance(made, Drop) else made.masked
        kinds = {one.type for one in found} - {"IP_ADDRESS"}
        count += bool(kinds)
        types.update(kinds)
    return {**share(count, len(texts)), "types": dict(types)}


def show_natural(title: str, judged: dict[str, Any]) -> None:
    print(f"\nnatural prompts, {title}\n{'':16}   found  right      private  of them found")
    for type, one in judged["types"].items():
        print(
            f"{type:16}{one['found']:8}{one['right'] / max(1, one['found']):7.3f}"
            f"{one['private']:13}{one['covered'] / max(1, one['private']):8.3f}"
        )
    for form, one in judged["forms"].items():
        print(
            f"{form:24}{one['rows']:5} rows,{one['changed']:4} changed,{one['wrongly']:4} wrongly; "
            f"{one['stay']} of {one['named']} public and invented persons stay"
        )


def touching_recall(count: int) -> dict[str, dict[str, dict[str, int]]]:
    """By language and type, values found of those that touch its letters."""
    makers = {type: MADE[type] for type in TOUCHING_TYPES}
    search = PersonalData(PrivacyConfig(), KEY)
    found: dict[str, dict[str, dict[str, int]]] = {}
    for script, type, text, value in natural.touching(makers, count):
        made = search(SourceRow("", "", "", None, (text,)))
        is_gone = isinstance(made, Drop) or value not in made.turns[0]
        if script not in natural.LANGUAGES:
            continue
        counts = found.setdefault(natural.LANGUAGES[script], {}).setdefault(
            type, {"found": 0, "of": 0}
        )
        counts["of"] += 1
        counts["found"] += is_gone
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a part of the texts and rows")
    parser.add_argument("--write", action="store_true", help=f"into {MEASURED.name}")
    parser.add_argument("--labelled", type=Path, default=LABELLED, help="presidio_synth_v2.json.gz")
    args = parser.parse_args()
    if not args.labelled.exists():
        sys.exit(f"error: no file at {args.labelled}\n  -> give it with --labelled")
    most, count = (QUICK_TEXTS, QUICK_VALUES) if args.quick else (None, VALUES)
    texts = json.loads(gzip.decompress(args.labelled.read_bytes()))[:most]
    result: dict[str, Any] = {"texts": len(texts), "quick": args.quick}
    result["eyas"] = judge(texts, search(texts, EVERY_TYPE))  # whatever the policy
    show(f"eyas, {len(texts)} texts", result["eyas"])
    result["languages"] = names_by_language(most)
    for name, one in result["languages"].items():
        print(f"{name:16} recall{column(one['recall'])}   precision{column(one['precision'])}")
    result["introduced"] = introduced(count)
    for locale, one in result["introduced"].items():
        print(f"introduced, {locale:8}{column(one)}")
    if args.write:
        table = json.dumps(written_recall(texts), indent=1)
        MEASURED.write_text(f"{table}\n", encoding="utf-8")
    found = result["disguises"] = disguised(count)
    types = [type for type in MADE if any(type in of for of in found.values())]
    print("\n| disguise | " + " | ".join(types) + " |\n|---" + "|---" * len(types) + "|")
    for name, of in found.items():
        cells = (f"{of[type]['share']:.2f}" if type in of else "" for type in types)
        print(f"| {name} | " + " | ".join(cells) + " |")
    forms = natural.forms(count if args.quick else natural.ROWS)
    result["harmless"] = {name: harmed(some) for name, some in forms}
    for name, one in result["harmless"].items():
        print(f"{name:26}{one['share']:.3f} changed of {one['of']}: {one['types'] or 'none'}")
    result["touching"] = touching_recall(count)
    print(f"found of values that touch letters: {result['touching']}")
    read_rows = natural.labelled(DATA)
    for is_tuned, title in ((True, "the half that is trained on"), (False, "the other half")):
        half = [one for one in read_rows if one.is_tuned == is_tuned]
        result[title] = natural.judge(half, Detector(PrivacyConfig()).find)
        show_natural(title, result[title])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
