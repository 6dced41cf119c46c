"""Names, street addresses and places: what is found with the weights that come with eyas, and that
the arithmetic is right.
"""

from __future__ import annotations

import io
import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import CorruptError
from eyas.privacy import entities, invented, tagger
from eyas.privacy.detector import Detector
from eyas.privacy.entities import BOTH, PIECE
from eyas.privacy.invented import KeyedRandom
from eyas.privacy.pii import PrivacyConfig
from tests.marks import marked, unmarked

FILLER = "it is a long and quiet afternoon and nothing happens. " * (3 * PIECE // 54)
FOUND = {
    "PERSON": [
        "my name is ⟨john smith⟩ and I lost my card",
        "Dear Mr. ⟨Okonkwo⟩,\n\nthank you for the invoice.",
        "Dr. ⟨R. J. Patel⟩ will see you on Monday",
        "First name: ⟨Aoife⟩\nLast name: ⟨O'Sullivan⟩",
        "MY NAME IS ⟨CARMEN RODRIGUEZ⟩",
        f"{FILLER}My name is ⟨Katarzyna Nowak⟩. {FILLER}",
        "Guten Abend, ich heiße ⟨Jürgen Falkenberg⟩ und suche das Formular.",
        "Buenas, me llamo ⟨Rocío Quintana⟩.",
        "Добрый день, меня зовут ⟨Иван Петров⟩.",
        "你好，我叫⟨王丽华⟩。",
        "اسمي ⟨محمد العلي⟩ وأحتاج إلى مساعدة.",
        "제 이름은 ⟨김민수⟩입니다.",
        "저는 ⟨김민수⟩라고 합니다. 택배가 늦어요.",
        "Mijn volledige naam is ⟨Jan de Wit⟩.",
        "Το πλήρες όνομά μου είναι ⟨Μαρία Παππά⟩.",
        "השם המלא שלי הוא ⟨דנה כהן⟩.",
        "鍵が届きません。⟨鈴木太郎⟩と申します。",
    ],
    "STREET_ADDRESS": [
        "please ship it to ⟨12 Main St, Springfield, IL 62701⟩",
        "please ship it to ⟨4830 W Oakdale Avenue Apt. 12B\nPhoenix, AZ 85031⟩",
        "please ship it to ⟨Hauptstraße 12a\n10115 Berlin⟩",
        "please ship it to ⟨14 rue de la Paix, 75002 Paris⟩",
        "please ship it to ⟨Via Garibaldi 7, 20121 Milano⟩",
        "my zip code is ⟨10115⟩",
        "Postcode: ⟨SW1A 1AA⟩\nok",
    ],
    "LOCATION": ["book a flight from ⟨Lisbon⟩ to ⟨New York⟩"],
}


def find(text):
    return entities.find_entities([text])[0]


@pytest.mark.parametrize(
    ("type", "text"), [(type, text) for type, texts in FOUND.items() for text in texts]
)
def test_names_addresses_and_places_are_found_whole(type, text):
    assert marked(unmarked(text), find) == (text, {type})


@pytest.mark.parametrize(
    "text",
    [
        "Will it rain in May? Mark the date, and bill me in April.",
        "How do I sort a list of tuples in Python by the second value?",
        "With tar, how do I extract an archive to a folder?",
        "Как приготовить борщ? Расскажи рецепт и сколько времени это займет.",
        "Which of these is a plant?\nA. Lily\nB. Daisy\nC. Violet\nD. Rose",
        "Paris 5, Rome 3",
        "- Oslo: 12\n- Lyon: 9\n- Porto: 31",
        "What is 7 times 3?\n(A) 21 (B) 23\n(C) 58 (D) 12",
        "State Green's theorem, the Gibbs free energy and Bayes' rule.",
        "How many marbles do Martha and Jim have if Jim has 12 more than Martha, who has 30?",
        "Who was Marie Curie?",
    ],
)
def test_what_is_nobodys_stays(text):
    assert Detector(PrivacyConfig()).find(text) == []


def test_a_greek_question_is_no_code_for_its_sign():
    text = "Καλησπέρα, με λένε Μαρία Παππά. Πού είναι το έντυπο;"
    found = Detector(PrivacyConfig()).find(text)
    assert [text[one.start : one.end] for one in found] == ["Μαρία Παππά"]


# The arithmetic


@given(st.text(st.sampled_from("aB1 \n\0.,'-éß漢🙂@"), max_size=200) | st.text(max_size=80))
@settings(max_examples=40, deadline=None)
def test_findings_lie_in_the_text_one_after_the_other(text):
    edges = [edge for one in find(text) for edge in (one.start, one.end)]
    assert edges == sorted(edges)
    assert all(0 <= edge <= len(text) for edge in edges)
    assert [word for word, _, _ in tagger.tokenize(text)] == [
        text[start:end] for _, start, end in tagger.tokenize(text)
    ]


@given(st.lists(st.integers(0, 3 * PIECE), max_size=6), st.integers(0, 3 * PIECE))
@settings(max_examples=40, deadline=None)
def test_pieces_cover_a_text(spaces, length):
    letters = ["x"] * length
    for place in spaces:
        if place < length:
            letters[place] = "\n" if place % 2 else " "
    pieces = list(entities.pieces("".join(letters)))
    covered = {place for start, end in pieces for place in range(start, end)}
    assert all(letters[place].isspace() for place in set(range(length)) - covered)
    assert all(0 < end - start <= PIECE for start, end in pieces)
    for (_, end), (start, _) in itertools.pairwise(pieces):
        assert BOTH <= end - start < PIECE // 2 or letters[end - 1] == "\n"


@pytest.mark.parametrize(
    "text",
    [
        "write an essay about dogs plz 1000 words",
        "zip 4096 bytes at a time",
        "What is the oxidation state of Cr in K2Cr2O7 and of Mn in KMnO4?",
        "error at R17-M1-N9-C and R24-M0",
        "[req-c03b1a7b-aba8 9bd1ef322e0e484ad5444e05e1e8f047 b221c2354a]",
    ],
)
def test_what_only_looks_like_an_address_stays(text):
    assert not [one for one in entities.find_entities([text])[0] if one.type == "STREET_ADDRESS"]


@pytest.mark.parametrize("text", ["my zip code is 10115 and I moved", "zip 90210", "PLZ: 8001"])
def test_a_postcode_behind_its_word_is_found(text):
    assert [one for one in entities.find_entities([text])[0] if one.type == "STREET_ADDRESS"]


def test_a_postcode_alone_gets_one_of_its_form():
    made = invented.address("SW1A 1AA", KeyedRandom(b"key", "address"))
    assert re.fullmatch("[A-Z]{2}[0-9][A-Z] [0-9][A-Z]{2}", made)


def test_an_address_goes_on_in_the_next_line_of_a_quoted_mail(monkeypatch):
    """Elsewhere a ">" stands in code, and nothing is on both sides of it."""
    monkeypatch.setattr(entities, "tagger", Told("STREET_ADDRESS"))
    quoted = "12 Elm Street\n> 62701 Springfield"
    assert [quoted[one.start : one.end] for one in find(quoted)] == [quoted]
    assert find("Elm > 62701 Springfield") == []


class Told:
    """A tagger that takes the tokens among `words` for parts of one type, all if it has none."""

    def __init__(self, type, words=()):
        self._label, self._words, self.sizes = tagger.LABELS.index(f"I-{type}"), words, []

    def __call__(self):
        return self

    def probabilities(self, texts):
        self.sizes.append(sum(map(len, texts)))
        made = [np.zeros((len(one), len(tagger.LABELS)), np.float32) for one in texts]
        for found, words in zip(made, texts, strict=True):
            found[:, self._label] = [not self._words or word in self._words for word in words]
        return made


@pytest.mark.parametrize("before", range(PIECE - 4, PIECE + 2))
def test_a_name_where_a_text_is_cut_is_found_whole(before, monkeypatch):
    monkeypatch.setattr(entities, "tagger", Told("PERSON", "王小明"))
    text = "今天" * (before // 2) + "是" * (before % 2) + "⟨王小明⟩，住在那里" + "今天" * 90
    assert marked(unmarked(text), find) == (text, {"PERSON"})


def test_few_tokens_are_tagged_at_a_time(monkeypatch):
    monkeypatch.setattr(entities, "tagger", told := Told("PERSON", "王"))
    assert entities.find_entities(["今天很好" * 2000] * 10 + [""] * 3) == [[]] * 13
    assert sum(told.sizes) >= 80_000
    assert max(told.sizes) < entities.TOGETHER + PIECE


def test_texts_that_are_tagged_together_do_not_see_each_other():
    texts = [["My", "name", "is", "Ada"], [], ["北", "京"], ["Oslo"] * 30]
    together = tagger.tagger().probabilities(texts)
    for words, found in zip(texts, together, strict=True):
        (alone,) = tagger.tagger().probabilities([words])
        assert found.shape == (len(words), len(tagger.LABELS))
        np.testing.assert_allclose(found, alone, atol=1e-5)
        np.testing.assert_allclose(found.sum(axis=1), np.ones(len(words)), rtol=1e-5)


def test_a_convolution_is_the_sum_over_five_tokens():
    rng = np.random.default_rng(3)
    inputs, bias = rng.normal(size=(7, 3)), rng.normal(size=2)
    weight = rng.normal(size=(15, 2))
    found = tagger.near(*(one.astype(np.float32) for one in (inputs, weight, bias)), 2)
    for place in range(7):
        wanted = bias.copy()
        for step in range(5):
            if 0 <= (at := place + 2 * (step - 2)) < 7:
                wanted += inputs[at] @ weight[3 * step : 3 * step + 3]
        np.testing.assert_allclose(found[place], np.maximum(wanted, 0), rtol=1e-4, atol=1e-5)


def test_a_run_ends_where_another_begins():
    labels = tagger.LABELS
    rows = ["B-PERSON", "I-PERSON", "B-PERSON", "O", "B-LOCATION", "B-STREET_ADDRESS"]
    probabilities_TL = np.full((len(rows), len(labels)), 0.02, np.float32)
    for place, label in enumerate(rows):
        probabilities_TL[place, labels.index(label)] = 0.84
    assert list(entities.runs(probabilities_TL)) == [
        ("PERSON", 0, 1),
        ("PERSON", 2, 2),
        ("LOCATION", 4, 4),
        ("STREET_ADDRESS", 5, 5),
    ]
    assert list(entities.runs(probabilities_TL * 0.28)) == []


PARTS = [
    ("PERSON", "Anna Schmidt", ["Anna Schmidt"]),
    ("PERSON", "[Anna # Schmidt]", ["Anna", "Schmidt"]),
    ("PERSON", "Anna_Schmidt", ["Anna", "Schmidt"]),
    ("PERSON", "1984 | =", []),
    ("LOCATION", "Paris=5", []),
    ("ORGANIZATION", "Acme", []),
    ("STREET_ADDRESS", "| 12 Main St #5, Bonn |", ["12 Main St #5, Bonn"]),
    ("STREET_ADDRESS", "12 Main St | Bonn", ["12 Main St | Bonn"]),
    ("STREET_ADDRESS", "12 Main St <br> Bonn St.", []),
    ("STREET_ADDRESS", "Main St.", ["Main St."]),
    ("STREET_ADDRESS", "K1A 0B6", ["K1A 0B6"]),
    ("STREET_ADDRESS", "54362315K", []),
    ("STREET_ADDRESS", "Mainstreet", []),
]


@pytest.mark.parametrize(("type", "text", "wanted"), PARTS)
def test_what_a_run_of_one_type_is_taken_for(type, text, wanted, monkeypatch):
    monkeypatch.setattr(entities, "tagger", Told(type))
    assert [text[one.start : one.end] for one in find(text)] == wanted


def test_broken_weights_are_an_error():
    packed = io.BytesIO()
    np.savez(packed, table=np.zeros(3))
    for broken in (b"", b"PK\x03\x04", packed.getvalue()):
        with pytest.raises(CorruptError, match="weights"):
            tagger.read_weights(broken)
