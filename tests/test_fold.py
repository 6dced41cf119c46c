"""Folding: one spelling for what looks alike, and every place of it leads back to the original."""

import itertools
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eyas.fold import INVISIBLE, LOOKALIKES, fold, latin

ALIKE = {
    "４１１１": "4111",
    "٤١١١ ۴۱۱۱ ४१११ ๔๑๑๑": "4111 4111 4111 4111",
    "⁴₁①❶𝟏": "41111",
    "4️⃣1️⃣": "41",
    "41\u200b1\u20601\u00ad": "4111",
    "41\u00a011\u202f11\u300011": "41 11 11 11",
    "41‑11−11–11": "41-11-11-11",
    "Berlin – Paris—Rome": "Berlin – Paris—Rome",
    "pаsswоrd of јоhn＠gmail．com": "password of john@gmail.com",
    "пароль, соль": "пароль, соль",
    "Jose\u0301 Mu\u0308ller": "José Müller",
    "“it’s”": '"it\'s"',
    "𝓙𝓸𝓱𝓷 ﬁnds ℡": "John finds TEL",
    "паспорт:AB1234567, раypal.сом": "паспорт:AB1234567, paypal.com",
    "10²³ of x², CO₂": "10²³ of x2, CO2",
    "3½ cups, 5 ㎏": "3½ cups, 5 kg",
}
# Texts in which what is folded stands beside what is not.
TEXTS = st.text(
    st.one_of(
        st.characters(),
        st.sampled_from("aB1 .-\u200b\u0301\u0308\u00ad–—½²１٤хоа\uff9e\u0344㎏ﬁ\u2028ı\u00b4"),
    ),
    max_size=30,
)


@pytest.mark.parametrize("text", ALIKE)
def test_what_looks_alike_is_spelt_alike(text):
    assert fold(text).text == ALIKE[text]


@given(TEXTS)
@example("х\u0308 a")
@example("x\u200b\u0308")
@example("1\u200b–")
def test_folding_again_changes_nothing(text):
    once = fold(text).text
    assert fold(once).text == once


@given(TEXTS)
def test_places_grow_and_only_what_is_not_seen_lies_between(text):
    folded = fold(text)
    assert len(folded.text) == len(folded.starts) == len(folded.ends)
    assert all(first <= second for first, second in itertools.pairwise(folded.starts))
    assert all(first <= second for first, second in itertools.pairwise(folded.ends))
    assert all(0 <= start < end <= len(text) for start, end in _spans(folded))
    seen = {place for start, end in _spans(folded) for place in range(start, end)}
    unseen = {place for place in range(len(text)) if INVISIBLE.match(text[place])}
    assert set(range(len(text))) == seen | unseen


def _spans(folded):
    return zip(folded.starts, folded.ends, strict=True)


@given(TEXTS, st.data())
def test_a_span_of_the_original_folds_to_what_was_found_in_it(text, data):
    folded = fold(text)
    if not folded.text:
        return
    start = data.draw(st.integers(0, len(folded.text) - 1))
    end = data.draw(st.integers(start + 1, len(folded.text)))
    first, last = folded.span(start, end)
    inside = latin(fold(text[first:last]).text).replace("–", "-").replace("—", "-")
    wanted = latin(folded.text[start:end]).replace("–", "-").replace("—", "-")
    assert unicodedata.normalize("NFKC", wanted) in unicodedata.normalize("NFKC", inside)


@given(st.text(st.characters(max_codepoint=127)))
def test_ascii_stays(text):
    folded = fold(text)
    assert folded.text == text
    assert [folded.span(at, at + 1) for at in range(len(text))] == [
        (at, at + 1) for at in range(len(text))
    ]


def test_lookalikes_become_one_latin_letter_each():
    assert all(len(chr(to)) == 1 and chr(to).isascii() for to in LOOKALIKES.values())
    assert all(chr(of).isupper() == chr(to).isupper() for of, to in LOOKALIKES.items())
    assert latin("Ѕсоре") == "Scope"
