"""Contamination: evaluation items are found in any disguise, and what only resembles them stays."""

import dataclasses
import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.data.contamination import MANY, Contamination
from eyas.data.ledger import Drop
from eyas.data.sources import SourceConfig
from eyas.errors import CorruptError, MissingInputError
from tests.source_rows import real_rows, row, shared, written

TRAINS = (
    "Two trains leave towns that are 300 miles apart and meet after 2 hours; how fast is the "
    "second if the first goes 60?"
)
PIRATE = "Tell the story of a pirate who is afraid of water, in four short lines that rhyme."
WHALES = "Why do whales sing?"
PASSAGE = (
    "The old lighthouse on the northern cape was built by fishermen in the winter of 1843 after "
    "three of their boats had been lost on the rocks. For sixty years its lamp was fed with whale "
    "oil, which a keeper carried up one hundred and ninety steps every evening. When electric "
    "light came, the keeper's daughter refused to leave, and the council let her stay in the tower "
    "as a painter. Her pictures of storms hang in the town hall today. Who stayed in the tower?"
)
ITEMS = [
    {"question_id": 7, "turns": [TRAINS, "And if the first goes 70?"]},
    {"question_id": 8, "turns": [PIRATE, WHALES]},
    {"question_id": 9, "turns": [PASSAGE]},
    {"question_id": 10, "turns": ["Hi there!", "Go on."]},
]
BENIGN = [
    "Two trains leave a station. How long is the first one if it passes a pole in 8 seconds at 90 "
    "kilometres an hour?",
    "Tell me a story about a dog who is afraid of cats.",
    "How fast is the second hand of a clock, and how fast is the first?",
    "Hi there! Can you help me to plan a trip to the northern cape?",
    "Why do birds sing in the morning? Do whales sing too?",
    "Who painted the pictures that hang in the town hall?",
    "And if the first goes away, what happens to the others?",
]
LIKES = str.maketrans("aceiopxysBHKMT", "асеіорхуѕВНКМТ")  # Latin letters and Cyrillic ones
SIGNS = str.maketrans({"'": "\u2019", ",": " \u2014", ".": "!", "?": "..."})
DISGUISES = {
    "verbatim": lambda text: text,
    "upper case": str.upper,
    "spacing": lambda text: " \n\t " + text.replace(" ", "  \r\n "),
    "no punctuation": lambda text: "".join(letter if letter.isalnum() else " " for letter in text),
    "other punctuation": lambda text: text.translate(SIGNS),
    "markdown": lambda text: "# **" + "** _".join(text.split(" ", 1)) + "_",
    "HTML": lambda text: (
        "<p class='x'>" + text.replace("'", "&#39;").replace(" ", "&nbsp;<b>", 1) + "</b></p>"
    ),
    "full width": lambda text: "".join(
        chr(ord(letter) + 0xFEE0) if "!" <= letter <= "~" else letter for letter in text
    ),
    "zero width": lambda text: "\u200b".join(text),
    "punctuation stripped": lambda text: re.sub(r"[^\w\s]", "", text),
    "signs within words": lambda text: re.sub(r"(?<=\w\w)(?=\w\w)", "-", text),
    "homoglyphs": lambda text: text.translate(LIKES),
    "some homoglyphs": lambda text: "".join(
        letter.translate(LIKES) if place % 3 else letter for place, letter in enumerate(text)
    ),
    "accents": lambda text: re.sub("[aeiou]", lambda found: f"{found[0]}\u0301", text),
    "no white space": lambda text: re.sub(r"\s", "", text),
    "mathematical letters": lambda text: "".join(
        chr(0x1D41A + ord(letter) - ord("a")) if "a" <= letter <= "z" else letter for letter in text
    ),
    "in a longer prompt": lambda text: (
        f"I found this question and would like your view. {text} Thank you very much in advance!"
    ),
}


def write(path, items):
    return SourceConfig(path=written(path, items))


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    return Contamination([write(tmp_path_factory.mktemp("sets") / "exam.jsonl", ITEMS)])


def exam(folder, *items):
    return Contamination([write(folder / "exam.jsonl", items)])


def dropped(found):
    return isinstance(found, Drop)


@pytest.mark.parametrize("disguise", DISGUISES.values(), ids=DISGUISES)
def test_every_turn_is_found_in_every_dress(clean, disguise):
    for text in (TRAINS, PIRATE, WHALES, PASSAGE):
        assert clean(row(disguise(text))).reason == "contamination.exam", text
        beside = row("Good morning.", disguise(text), "Thanks.")
        assert clean(beside).reason == "contamination.exam", text


def test_letters_apart_hide_nothing(clean):
    found = clean(row("Good morning.", " ".join(re.sub(r"\s", "", PASSAGE))))
    assert found == Drop("contamination.exam", "says a turn of exam.jsonl:3 (id 9)")


@pytest.mark.parametrize("number", ["7", "41,500", "2.75", "nineteen", "forty-two"])
def test_other_numbers_hide_nothing(clean, number):
    other = re.sub(r"\d+", number, TRAINS)
    found = clean(row("Good morning.", f"Please: {other}"))
    assert re.fullmatch(r"holds \d+% of the 4-grams of exam.jsonl:1 \(id 7\)", found.note)


def test_other_numbers_prove_nothing_by_themselves(clean):
    text = (
        "Two trains leave towns that are 90 miles apart and 3 hours later one of them breaks down; "
        "what does its repair cost if the garage asks 60 an hour and takes two days?"
    )
    assert clean(row(text)) == row(text)
    assert clean(row("And if the first goes 80?")) == row("And if the first goes 80?")


@pytest.mark.parametrize("text", BENIGN)
def test_what_only_resembles_an_item_stays(clean, text):
    assert clean(row(text)) == row(text)


OIL = "whale oil, which a keeper carried up one hundred and ninety steps every evening"
EDITED = " ".join("other" if at % 10 == 5 else word for at, word in enumerate(PASSAGE.split()))
EDITS = {
    "over two turns": row(*TRAINS.split("; ")),
    "as system prompt": row("Answer my question.", system=PIRATE),
    "turns as one": row(f"{PIRATE} {WHALES}"),
    "numbers": row(TRAINS.replace("300", "450").replace("60", "55")),
    "words": row(TRAINS.replace("Two trains", "Three buses")),
    "every tenth word": row(EDITED),
    "half a passage": row(PASSAGE.split(" When ")[0]),
    "13 words of it": row(f"Is it true that {OIL}, smells?"),
}


@pytest.mark.parametrize("found", EDITS.values(), ids=EDITS)
def test_parts_and_light_edits_are_found(clean, found):
    assert dropped(clean(found))


def test_turns_of_a_few_words_count_as_a_whole_conversation_only(clean):
    assert dropped(clean(row("hi, there", "GO on")))
    assert dropped(clean(row("Hi there! Go on.")))
    assert not dropped(clean(row("Hi there!")))
    assert not dropped(clean(row("Hi there!", "Go on.", "What is a lemma?")))


def test_the_note_names_the_item_and_quotes_nothing(clean):
    notes = {
        row(TRAINS): "holds 100% of the 4-grams of exam.jsonl:1 (id 7)",
        row("Hi there!", "Go on."): "says the same as exam.jsonl:4 (id 10)",
        row(" ".join(PASSAGE.split()[:20])): "holds 13 words in a row of exam.jsonl:3 (id 9)",
    }
    for one, note in notes.items():
        assert clean(one) == Drop("contamination.exam", note)


def test_several_sets_are_told_apart(tmp_path):
    first = write(tmp_path / "a.jsonl", [{"prompt": TRAINS}])
    second = write(tmp_path / "b.jsonl", [{"prompt": PASSAGE}, {"prompt": TRAINS}])
    clean = Contamination([first, second.model_copy(update={"name": "reading"})])
    assert clean(row(PASSAGE)).reason == "contamination.reading"
    assert clean(row(TRAINS)).reason == "contamination.a"


def test_without_evaluation_sets_all_rows_stay():
    assert Contamination([])(row(TRAINS)) == row(TRAINS)
    assert Contamination([])(row("Why", system="Because")) == row("Why", system="Because")


def test_what_many_items_share_is_no_trace_of_one(tmp_path):
    form = (
        "The following is a multiple choice question about the subject that is named below; "
        "answer with one letter only."
    )
    names = ("ants", "bees", "cats", "dogs", "eels", "frogs", "goats", "hens", "ibis", "jays")
    things = [f"{name} have {count} legs" for count, name in enumerate(names)]
    assert len(things) > MANY
    last = "Now write your answer as a JSON object."
    items = [{"turns": [f"{form} Is it true that {one}?", last]} for one in things]
    clean = exam(tmp_path, *items)
    assert not dropped(clean(row(f"{form} Which of these planets is the largest?", last)))
    assert all(dropped(clean(row(f"{form} Is it true that {one}?"))) for one in things)


def test_items_that_are_all_form_are_found_all_the_same(tmp_path):
    clean = exam(tmp_path, *[{"prompt": PIRATE}] * (2 * MANY))
    assert clean(row(PIRATE)).note == "says the same as exam.jsonl:1"
    assert dropped(clean(row(f"Please. {PIRATE}")))


def test_numbers_in_a_row_are_no_trace(tmp_path):
    question = "Which number comes next: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20"
    clean = exam(tmp_path, {"prompt": question})
    assert dropped(clean(row(question.lower())))
    sums = "Add these up: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20"
    assert not dropped(clean(row(sums)))


def test_a_script_without_spaces_is_read_by_the_character(tmp_path):
    question = "请用一句话说明为什么天空在傍晚是红色的"
    clean = exam(tmp_path, {"prompt": question})
    assert dropped(clean(row(f"你好!{question}。谢谢")))
    assert not dropped(clean(row("请用一句话说明什么是水")))


def test_a_text_without_words_is_compared_as_it_is(tmp_path):
    clean = exam(tmp_path, {"prompt": "\U0001f600 \U0001f680 ?"})
    assert dropped(clean(row("\U0001f600  \U0001f680 ?")))
    assert not dropped(clean(row("\U0001f680 ?")))


def test_a_set_that_cannot_be_read_whole_is_an_error(tmp_path):
    path = tmp_path / "exam.jsonl"
    path.write_text(json.dumps({"prompt": PIRATE}) + "\n{not JSON\n")
    with pytest.raises(CorruptError, match=r"exam\.jsonl:2") as error:
        Contamination([SourceConfig(path=str(path))])
    assert "pirate" not in str(error.value)
    with pytest.raises(MissingInputError):
        Contamination([SourceConfig(path=str(tmp_path / "none.jsonl"))])


WORDS = st.lists(st.sampled_from([f"word{index}" for index in range(500)]), min_size=4, max_size=40)


@settings(max_examples=30)
@given(st.lists(WORDS, min_size=1, max_size=6), WORDS, WORDS, st.data())
def test_whatever_was_planted_is_found(tmp_path_factory, items, before, after, data):
    path = tmp_path_factory.mktemp("sets") / "exam.jsonl"
    clean = Contamination([write(path, [{"prompt": " ".join(words)} for words in items])])
    planted = data.draw(st.sampled_from(items))
    assert dropped(clean(row(" ".join([*before, *planted, *after]))))


# Real sets, where they lie beside the checkout.


@pytest.fixture(scope="module")
def spec_bench():
    path = shared("prompts/spec_bench.jsonl")
    with path.open(encoding="utf-8") as lines:
        rows = [row(*json.loads(line)["turns"]) for line in lines]
    return rows, Contamination([SourceConfig(path=str(path))])


@pytest.mark.parametrize("name", DISGUISES)
def test_all_of_spec_bench_is_found(spec_bench, name):
    """Every row as it is, and a third of them in each disguise."""
    rows, clean = spec_bench
    assert (len(rows), sum(len(one.turns) for one in rows)) == (480, 560)
    disguise, third = DISGUISES[name], list(DISGUISES).index(name) % 3
    rows = rows if name == "verbatim" else rows[third::3]
    for one in rows:
        turns = tuple(map(disguise, one.turns))
        assert dropped(clean(dataclasses.replace(one, turns=turns)))
        assert all(dropped(clean(row(turn))) for turn in turns)


def test_gsm8k_is_not_dropped_for_its_style(spec_bench):
    """Spec-Bench's mathematics is GSM8K's test half, of the same style."""
    _, clean = spec_bench
    rows = random.Random(0).sample(real_rows("gsm8k_train", 10_000), 2000)
    assert [one for one in rows if dropped(clean(one))] == []
