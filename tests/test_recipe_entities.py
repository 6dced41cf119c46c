"""What the tagger's weights are trained on: the same texts each time, and none of those that they
are measured on.
"""

from __future__ import annotations

import itertools
import random

import pytest

pytest.importorskip("faker", reason="needs the group `recipes`")
from recipes import entities
from recipes.entities import PERSON, Country, Writer, is_held_back
from tests.source_rows import shared


def made(seed):
    writer = Writer(seed)
    return [*writer.english(70), *writer.rows(15), *writer.frames(70)]


def test_the_same_seed_writes_the_same_texts_without_names_that_are_held_back():
    texts = made(3)
    assert texts == made(3)
    assert texts[:9] != [*Writer(4).english(9)]
    spans = [(text.text[start:end], kind) for text in texts for start, end, kind in text.spans]
    words = [one for one, kind in spans if kind == PERSON and one.isalpha() and len(one) > 3]
    assert len(words) > 30, "of which a fifth would be held back by chance"
    assert not [word for word in words if is_held_back(word, 5)]
    assert not [name for name in entities.census("all.last") if is_held_back(name, 5)]


@pytest.mark.parametrize("locale", ["en_US", "vi_VN", "zh_CN"])
def test_names_to_measure_with_are_held_back(locale):
    """vi_VN: Faker's own list of its given names has but two, and those English."""
    country = Country(locale, random.Random(1), held_back=True)
    names = [one() for one in (country.given, country.family) for _ in range(20)]
    assert all(is_held_back(name, 5) for name in names)
    assert country.full()


def test_labelled_sentences_and_prompts_that_are_held_back_are_not_trained_on():
    ner = shared("ner")

    def trained():
        return [*itertools.islice(entities.gold_texts(ner, Writer(5), 5), 150)]

    texts = trained()
    assert texts == trained()
    whole = "\n".join(text.text for text in texts)
    held = [text.text for _, _, text in entities.gold(ner, held_back=True)]
    long = [text for text in held if len(text) > 25]  # shorter ones may be in another
    assert len(long) > 1000
    assert not [text for text in long if text in whole]
    kept = [one.text for _, one in itertools.islice(entities.kept_texts(ner.parent, {}), 300)]
    assert kept
    assert not [one for one in kept if len(one) < entities.CHARACTERS and is_held_back(one, 10)]
