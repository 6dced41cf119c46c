"""Texts that look like personal data and are none, in the forms in which prompts arrive, and values
that touch what stands beside them; a part of `benchmarks/privacy.py`.

`FORMS`: questions with options in five layouts, logs of sixteen systems, mathematics and science,
code in six languages and under a request. Made with a fixed seed from lists of our own; a row is
harmed when the default policy changes or drops it. `TOUCHING`: values beside letters of scripts
that are written without spaces, and in the fields of CSV; one passes when it is still in the text.

`labelled`: 1,448 prompts of public sets (the data folder beside the checkout), read twice.
natural.json.gz holds no text: by set and row the SHA-256 of what was read (its first 900
characters; of rows marked "o" with options put behind them) and the places, types and kinds of what
they found.
Rows are r (drawn by chance), e (rows in which the search of 2026-11-25 found something) or o.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Draw = random.Random
TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
ROWS = 200

# Options and questions

LAYOUTS = {"A. x": "{}. {}", "A) x": "{}) {}", "(A) x": "({}) {}", "1. x": "{}. {}", "- x": "- {1}"}


def options(layout: str) -> Callable[[Draw], str]:
    def make(draw: Draw) -> str:
        kind = draw.choice(sorted(TEXTS["lists"]))
        some = [one.replace("_", " ") for one in TEXTS["lists"][kind].split()]
        if draw.random() < 0.35:
            first = draw.choice(
                (draw.randint(2, 90), draw.randint(100, 9999), draw.randint(1500, 2020))
            )
            some = [str(first + step) for step in range(9)]
            if draw.random() < 0.3:
                some = [
                    f"{one} {draw.choice(('m/s', 'kg', 'J', 'N', 'K', 'years', 'cm', '%'))}"
                    for one in some
                ]
            elif draw.random() < 0.2:
                some = [f"{one}/{int(one) + draw.randint(1, 9)}" for one in some]
        marks = "1234" if layout == "1. x" else "ABCD"
        made = [
            LAYOUTS[layout].format(mark, one)
            for mark, one in zip(marks, draw.sample(some, min(4, len(some))), strict=False)
        ]
        question = draw.choice(TEXTS["asked"]).format(kind)
        between = draw.choice(("\n", "\n", " "))
        ends = draw.choice(("", "", "\nAnswer:", "\nAnswer with the letter only."))
        return f"{question}{draw.choice((chr(10), ' ', chr(10)))}{between.join(made)}{ends}"

    return make


# Logs: the lines of a system, with slots


def fill(template: str, draw: Draw) -> str:
    """The slots of a line of a log: d1, d2 and nK are digits."""

    def digits(count: int) -> str:
        return str(draw.randint(10 ** (count - 1), 10**count - 1))

    def hexadecimal(count: int) -> str:
        return "".join(draw.choice("0123456789abcdef") for _ in range(count))

    out = template.replace("{{", "\x01").replace("}}", "\x02")
    clock = lambda sign: sign.join(f"{draw.randrange(limit):02d}" for limit in (24, 60, 60))  # noqa: E731
    makers: dict[str, Callable[[], str]] = {
        "t": lambda: clock(":"),
        "t2": lambda: clock(":")[:5],
        "uuid": lambda: "-".join(hexadecimal(count) for count in (8, 4, 4, 4, 12)),
        "d1": lambda: str(draw.randint(1, 9)),
        "d2": lambda: str(draw.randint(10, 28)),
        **{f"n{count}": lambda count=count: digits(count) for count in range(2, 19)},
        **{f"hex{count}": lambda count=count: hexadecimal(count) for count in (8, 32)},
    }
    for slot, make in makers.items():
        while f"{{{slot}}}" in out:
            out = out.replace(f"{{{slot}}}", make(), 1)
    return out.replace("\x01", "{").replace("\x02", "}")


def log(draw: Draw) -> str:
    """Three to eight lines of one system."""
    lines = TEXTS["logs"][draw.choice(sorted(TEXTS["logs"]))]
    made = [fill(draw.choice(lines), draw) for _ in range(draw.randint(3, 8))]
    return draw.choice(TEXTS["above"]) + "\n".join(made)


# Mathematics and science


def science(draw: Draw) -> str:
    """A question of mathematics, physics, chemistry, biology."""
    text = draw.choice(TEXTS["science"]).replace("{{", "\x01").replace("}}", "\x02")
    while "{n}" in text:
        text = text.replace(
            "{n}", str(draw.choice((draw.randint(100, 9999), draw.randint(10**4, 10**7)))), 1
        )
    while "{s}" in text:
        text = text.replace("{s}", str(draw.randint(2, 99)), 1)
    return text.replace("\x01", "{").replace("\x02", "}")


# Code


def code(draw: Draw) -> str:
    text = draw.choice(TEXTS["code"]).replace("VAR", draw.choice(TEXTS["names"]))
    while "NUM" in text:
        text = text.replace(
            "NUM", str(draw.choice((draw.randint(1, 99), draw.randint(100, 99999)))), 1
        )
    return text


def asked_code(draw: Draw) -> str:
    return draw.choice(TEXTS["requests"]).replace("{}", code(draw))


FORMS: dict[str, Callable[[Draw], str]] = {
    **{f"options, {layout}": options(layout) for layout in LAYOUTS},
    "logs": log,
    "mathematics and science": science,
    "code": code,
    "code under a request": asked_code,
}

# Values that touch what stands beside them

LANGUAGES = dict(zip(TEXTS["beside"], ("zh", "ja", "th", "ar", "ko", "hi"), strict=False))
CSV_TYPES = ("CREDIT_CARD", "PHONE_NUMBER", "EMAIL_ADDRESS", "IP_ADDRESS", "IBAN_CODE", "US_SSN")


def touching(
    makers: dict[str, Callable[[Draw], str]], count: int
) -> Iterator[tuple[str, str, str, str]]:
    """Script, type, text and value. makers: by type, a value."""
    for script, sentences in TEXTS["beside"].items():
        for type, make in makers.items():
            if script == "CSV" and type not in CSV_TYPES:
                continue
            draw = Draw(f"{script} {type}")
            for number in range(count):
                value = make(draw)
                sentence = sentences[number % len(sentences)]
                yield script, type, sentence.format(what="号码", value=value), value


def forms(count: int = ROWS) -> Iterator[tuple[str, list[str]]]:
    for name, make in FORMS.items():
        draw = Draw(name)
        yield name, [make(draw) for _ in itertools.repeat(None, count)]


# Natural prompts

LABELS = Path(__file__).with_suffix(".json.gz")
MOST = 900  # characters of a prompt that were read
OPTION_MARKS = ("{}. ", "{}) ", "({}) ", "- ", "{}: ")
FORM_OF = {one: form for form, some in TEXTS["sources"].items() for one in some.split()}


@dataclass(frozen=True)
class Natural:
    """A prompt that was read. is_tuned: of the half on which rules were made; spans: (type, start,
    end, who).
    """

    form: str
    stratum: str
    is_tuned: bool
    text: str
    spans: tuple[tuple[str, int, int, str], ...]


def user_rows(data: Path, name: str) -> list[tuple[str, str]]:
    """The user's turns of each row of a set, joined, and its source."""
    if name == "spec_bench":
        lines = (data / "prompts" / "spec_bench.jsonl").read_text(encoding="utf-8").splitlines()
        return [("\n".join(json.loads(line)["turns"]), "spec_bench") for line in lines]
    with gzip.open(data / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [
        (
            "\n".join(one["content"] for one in row["messages"] if one["role"] == "user"),
            row.get("source") or name,
        )
        for row in rows
    ]


def with_options(text: str, number: int, book: str) -> str:
    """A question with four options of numbers or of capitals out of a book, by the row's number."""
    draw = Draw(number)
    layout, marks = OPTION_MARKS[number % 5], "1234" if number // 5 % 3 == 0 else "ABCD"
    if draw.random() < 0.5:
        first = draw.randrange(5, 400)
        some = [str(first + step) for step in draw.sample(range(-4, 60), 4)]
    else:
        words = sorted(set(re.findall(r"[A-Z][a-z]{3,}(?: [A-Z][a-z]{3,})?", book)))
        some = draw.sample(words, min(4, len(words)))
    lines = [layout.format(mark) + one for mark, one in zip(marks, some, strict=False)]
    return text[:600] + "\n" + (" " if number % 4 == 0 else "\n").join(lines)


def labelled(data: Path) -> list[Natural]:
    """The prompts that were read, rebuilt. Raises ValueError for a set that is another one."""
    found = []
    rows = {"instructions": user_rows(data, "instructions")}
    books = [
        text
        for text, source in rows["instructions"]
        if source in ("classic-books", "digitalgov-news")
    ]
    for name, labels in json.loads(gzip.decompress(LABELS.read_bytes())).items():
        texts = rows.get(name) or user_rows(data, name)
        for number, (stratum, digest, marks) in labels.items():
            text, source = texts[int(number)]
            text = text[:MOST]
            key = f"{name}:{number}"
            if stratum == "o":
                text, key = (
                    with_options(text, int(number), books[int(number) % len(books)]),
                    f"{key}:options",
                )
            if hashlib.sha256(text.encode()).hexdigest()[:8] != digest:
                raise ValueError(f"row {number} of {name} is not the one that was read")
            form = (
                "options"
                if stratum == "o"
                else FORM_OF.get(source, "Spec-Bench" if name == "spec_bench" else "dialogues")
            )
            spans = tuple(
                (TEXTS["types"][kind[0]], start, end, TEXTS["who"][kind[1]])
                for kind, start, end in marks
            )
            is_tuned = int(hashlib.sha256(key.encode()).hexdigest(), 16) % 2 == 0
            found.append(Natural(form, stratum, is_tuned, text, spans))
    return found


def judge(rows: Iterable[Natural], find: Callable[[str], list[Any]]) -> dict[str, Any]:
    """By type: findings, of those right (they overlap a value of the type that the readers saw);
    private values, and of those found whole. By form, over rows drawn by chance and options: rows,
    those with a finding, those with one that is not private; public and invented persons, and those
    that stay.
    """
    found, right, private, covered = (Counter[str]() for _ in range(4))
    forms: dict[str, list[int]] = {}
    for row in rows:
        places: set[int] = set()
        wrong = False
        findings = find(row.text)
        for one in findings:
            kind = TEXTS["same"].get(one.type, one.type)
            over = [
                who
                for type, start, end, who in row.spans
                if type == kind and start < one.end and one.start < end
            ]
            found[kind] += 1
            right[kind] += bool(over)
            wrong |= "private" not in over
            places.update(range(one.start, one.end))
        for type, start, end, who in row.spans:
            if who == "private":
                private[type] += 1
                covered[type] += all(
                    at in places for at in range(start, end) if row.text[at].isalnum()
                )
        if row.stratum != "e":
            counts = forms.setdefault(row.form, [0, 0, 0, 0, 0])
            counts[0] += 1
            counts[1] += bool(findings)
            counts[2] += wrong
            named = [span for span in row.spans if span[0] == "PERSON" and span[3] != "private"]
            counts[3] += len(named)
            counts[4] += sum(places.isdisjoint(range(start, end)) for _, start, end, _ in named)
    return {
        "types": {
            type: {
                "found": found[type],
                "right": right[type],
                "private": private[type],
                "covered": covered[type],
            }
            for type in sorted({*found, *private})
        },
        "forms": {
            form: dict(zip(("rows", "changed", "wrongly", "named", "stay"), counts, strict=True))
            for form, counts in sorted(forms.items())
        },
    }
