"""Quality: unanswerable text goes for the right reason, and ordinary questions stay."""

import base64
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.filters import quality
from eyas.data.ledger import Drop
from eyas.data.quality import ENOUGH, QUALITY_CHECKS, QUALITY_LIMITS
from tests.source_rows import real_rows, row

RNG = random.Random(0)
NOISE = base64.b64encode(RNG.randbytes(900)).decode()
WORDS = [f"{chr(97 + index % 26)}{index}" for index in range(300)]
PROSE = (
    "What is wrong with this heading, and how do I make one in Markdown that every reader "
    "shows as it is meant to be? "
)
REFRAIN = "the cat sat on the mat and the dog sat on the log "

ORDINARY = {
    "a word": "Hi",
    "CJK": "你好",
    "French": "Où est le café « Élysée », à côté de l\u2019hôtel ? Il coûte 25 €\u2026",
    "German": "Schöne Grüße – „Äpfel\u201c und Öl",
    "Czech": "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "Hindi": "शरद ऋतु पर एक छोटी कविता लिखो। " * 8,
    "emoji": "What does \U0001f937\u200d\u2642\ufe0f mean?",
    "code": "Why does this fail?\n```\n"
    + "".join(f"    if (x[{i}] != y[{i + 1}]) {{ return {{}}; }}\n" for i in range(12))
    + "```",
    "a table of numbers": "Add these:\n"
    + "\n".join(", ".join(str(RNG.randrange(1000)) for _ in range(12)) for _ in range(40)),
    "a grid": "What comes next?\n"
    + "\n".join(" ".join(str(RNG.randrange(4)) for _ in range(12)) for _ in range(12)),
    "a rule": "Title\n" + "=" * 100 + "\n" + PROSE,
    "a key": f"Is this a valid certificate?\n{NOISE[:64]}\n{NOISE[64:128]}\n"
    + " ".join(WORDS[:60]),
    "coloured log": "\x1b[31mERROR\x1b[0m disk full\n" * 3 + "What does this mean?",
    "a refrain": "Continue this song, please, in the same tone and with a second verse:\n"
    + "la la la la la la\n" * 12,
}
UNFIT = {
    "length": ("?", " . \n"),
    "encoding": (
        "half a pair \ud83d",
        "What is \ufffd\ufffd\ufffd?",
        "Où est le café déjà?".encode().decode("latin-1"),
        "\u201cquoted\u201d it\u2019s – ok".encode().decode("cp1252", "replace"),
        "Напиши стихи".encode().decode("latin-1"),
        "你好，请写诗".encode().decode("cp1252", "replace"),
        "PK\x03\x04\x00\x00\x08 some archive",
    ),
    "non_text": (
        "\u2593\u2591-|" * 100,
        NOISE,
        "\n".join(NOISE[start : start + 76] for start in range(0, 1140, 76)),
        RNG.randbytes(200).hex(),
    ),
    "repetition": (
        "buy now " * 100,
        "哈" * 300,
        "abcdefgh, " * 100,
        REFRAIN * 40,
        "So " + "é" * 600,
    ),
}


@pytest.mark.parametrize("text", ORDINARY.values(), ids=ORDINARY)
def test_what_people_ask_stays(text):
    assert quality(row(text)) == row(text)


@pytest.mark.parametrize(
    ("check", "text"), [(check, text) for check in QUALITY_CHECKS for text in UNFIT[check]]
)
def test_what_is_unfit_goes_for_its_reason(check, text):
    found = quality(row(text))
    assert isinstance(found, Drop)
    assert found.reason == f"quality.{check}"
    assert text[:12].strip() not in found.note


@pytest.mark.parametrize(
    ("setting", "strict", "text"),
    [
        ("min_characters", 10, "Hi there"),
        ("max_damaged", 0, f"One \ufffd in {PROSE}"),
        ("min_words", 0.9, " - ".join(WORDS)),
        ("max_encoded", 0.1, f"{NOISE[:300]} " + " ".join(WORDS)),
        ("max_same", 0.1, PROSE * 6 + "=" * 400),
        ("max_repeated", 0.5, " ".join(WORDS[:40]) + " la la la la la la" * 40),
        ("max_compression", 3, "".join(f"row {index % 7} of the table\n" for index in range(40))),
    ],
)
def test_each_limit_is_heeded(monkeypatch, setting, strict, text):
    assert quality(row(text)) == row(text)
    monkeypatch.setitem(QUALITY_LIMITS, setting, strict)
    assert isinstance(quality(row(text)), Drop)


def test_short_texts_are_not_judged_by_shares():
    assert len("ha" * 90) < ENOUGH
    assert quality(row("ha" * 90)) == row("ha" * 90)
    assert quality(row("!?" * 90)) == row("!?" * 90)


def test_the_turns_are_judged_together():
    assert quality(row("a", "b")) == row("a", "b")
    found = quality(row("Go on.", *["More of the same, please."] * 40))
    assert found.reason == "quality.repetition"


def test_a_system_prompt_must_be_writable_too():
    assert quality(row("Hi there", system="\udc80")).reason == "quality.encoding"


@given(st.lists(st.text(st.characters(), max_size=400), max_size=4))
def test_any_row_is_kept_as_it_is_or_dropped(turns):
    found = quality(row(*turns))
    if isinstance(found, Drop):
        assert found.reason.startswith("quality.")
    else:
        assert found == row(*turns)
        "".join(found.turns).encode()


@pytest.mark.parametrize("name", ["gsm8k_train", "tldr", "sgd_dev", "self_dialogue"])
def test_real_prompts_stay(name):
    assert [one for one in real_rows(name, 1000) if isinstance(quality(one), Drop)] == []
