"""Exact duplicates: what counts as the same, and what does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.duplicates import Duplicates, fingerprint, normalised
from eyas.data.rows import Drop, Row


def row(*turns, system=None, line=1):
    return Row(source="set", licence="MIT", where=f"set.jsonl:{line}", id=None, turns=turns, system=system)


@pytest.mark.parametrize("again", ["WHERE is it?", "  Where\n\tis   it? ", "\uff37here is it?", "Where\u00a0is it?"])
def test_the_same_in_other_spelling(again):
    keep = Duplicates()
    assert keep(row("Where is it?")) == row("Where is it?")
    dropped = keep(row(again, line=2))
    assert dropped == Drop("duplicate", note="the same as set.jsonl:1 of set")


@pytest.mark.parametrize(
    "other", [row("Where is it"), row("Where is it?", "Thanks"), row("Where is", "it?"), row("Where is it?", system="Sir")]
)
def test_not_the_same(other):
    keep = Duplicates()
    keep(row("Where is it?"))
    assert keep(other) is other


@given(st.lists(st.text(), min_size=1, max_size=3))
def test_normalising_is_done_once_and_for_all(turns):
    assert [normalised(normalised(turn)) for turn in turns] == [normalised(turn) for turn in turns]
    assert fingerprint(row(*turns)) == fingerprint(row(*(f" {normalised(turn)}\n" for turn in turns)))
