"""The mix: shares to the row, the largest total there is, and the same rows for the same seed."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eyas.data import fit
from eyas.data.duplicates import scrambled
from eyas.data.fit import MixDraw, mix_counts
from eyas.errors import ConfigError, EmptyInputError

NAMES = ["chat", "code", "sums"]


@pytest.mark.parametrize(
    ("mix", "available", "limit", "expected"),
    [
        ({"a": 0.5, "b": 0.5}, {"a": 10, "b": 30}, None, {"a": 10, "b": 10}),
        ({"a": 0.7, "b": 0.3}, {"a": 1000, "b": 1000}, 10, {"a": 7, "b": 3}),
        ({"a": 1, "b": 1, "c": 1}, {"a": 99, "b": 99, "c": 99}, 100, {"a": 34, "b": 33, "c": 33}),
        ({"c": 1, "b": 1, "a": 1}, {"a": 99, "b": 99, "c": 99}, 100, {"a": 34, "b": 33, "c": 33}),
        ({"a": 0.9, "b": 0.1}, {"a": 5, "b": 100}, None, {"a": 5, "b": 1}),
        ({"a": 1}, {"a": 5, "b": 100}, None, {"a": 5}),
        # 0.1 + 0.2 is not 0.3 in floats
        ({"a": 0.1, "b": 0.2}, {"a": 1000, "b": 200}, None, {"a": 100, "b": 200}),
        ({"a": 2, "b": 1}, {"a": 1000, "b": 1000}, 0, {"a": 0, "b": 0}),
    ],
)
def test_counts_by_hand(mix, available, limit, expected):
    assert mix_counts(mix, available, limit) == expected


@settings(deadline=None, max_examples=300)
@given(
    st.dictionaries(
        st.sampled_from("abcde"), st.integers(1, 60).map(lambda share: share / 10), min_size=1
    ),
    st.lists(st.integers(1, 120), min_size=5, max_size=5),
    st.none() | st.integers(0, 270),
)
@example({"a": 1.4, "b": 2.3, "c": 0.4}, [9, 14, 2, 1, 1], None)
def test_counts_are_shares_to_the_row_and_no_larger_total_is(mix, numbers, limit):
    available = dict(zip("abcde", numbers, strict=True))
    counts = mix_counts(mix, available, limit)
    total = sum(counts.values())
    exact = {name: Fraction(str(share)) for name, share in mix.items()}
    share = {name: one / sum(exact.values()) for name, one in exact.items()}
    assert set(counts) == set(mix)
    assert total <= sum(numbers) if limit is None else total <= limit
    for name, count in counts.items():
        assert 0 <= count <= available[name]
        assert abs(count - total * share[name]) < 1
    # Every larger total that the rows could fill asks some source for more than it has.
    for larger in range(
        total + 1, min(sum(numbers), limit if limit is not None else sum(numbers)) + 1
    ):
        assert any(larger * share[name] > available[name] - 1 for name in mix)
        capped = mix_counts(mix, dict.fromkeys(available, 10**6), larger)
        assert any(capped[name] > available[name] for name in mix)


@pytest.mark.parametrize("share", [0, -1, float("nan"), float("inf")])
def test_a_share_is_above_zero(share):
    with pytest.raises(ConfigError, match="the mix gives 'b' a share of"):
        mix_counts({"a": 1, "b": share}, {"a": 5, "b": 5})


def test_a_share_of_what_is_not_there_is_an_error_that_names_it():
    with pytest.raises(ConfigError, match="to 'web', which is no source") as raised:
        mix_counts({"a": 1, "web": 1}, {"a": 5, "b": 5})
    assert raised.value.hint == "the sources are a, b"
    with pytest.raises(EmptyInputError, match="a share to 'b', 'c', of which no row is left"):
        mix_counts({"a": 1, "c": 1, "b": 1}, {"a": 5, "b": 0, "c": 0})
    with pytest.raises(ConfigError, match="names no source"):
        mix_counts({}, {"a": 5})


def draw(count, counts, seed=3):
    rng = np.random.default_rng(0)
    sources = rng.integers(0, 3, count)
    return MixDraw(
        NAMES, sources, scrambled(np.arange(1, count + 1, dtype=np.uint64)), counts, seed
    )


def test_a_draw_takes_the_counts_and_nothing_of_other_sources():
    counts = {"chat": 17, "sums": 3}
    made = draw(300, counts)
    chosen = made(np.zeros(300))
    for place, name in enumerate(NAMES):
        assert (chosen & (made.sources == place)).sum() == counts.get(name, 0)
    assert (made(np.zeros(300)) == chosen).all()
    assert (draw(300, counts, seed=4)(np.zeros(300)) != chosen).any()


def test_a_draw_follows_the_weights_within_a_source():
    made = draw(300, {"chat": 20, "code": 20})
    liked = np.arange(300) % 2 == 0
    chosen = made(np.where(liked, 30.0, 0.0))
    assert not (chosen & ~liked).any()
    assert chosen.sum() == 40
    none = made(np.full(300, -np.inf))
    assert not none.any()


def test_a_mix_and_a_match_together_keep_the_shares():
    rng = np.random.default_rng(1)
    grams = rng.integers(0, 50, (300, 4)).astype(np.uint16)
    block = fit.GramBlock(grams.reshape(-1), np.full(300, 4, np.int32), np.full(300, 20, np.int32))
    traffic = np.zeros(fit.NUM_BUCKETS, np.int64)
    traffic[:10] = 40
    made = draw(300, {"chat": 20, "code": 10})
    chosen = fit.select_like(lambda: [block], np.ones(300, bool), traffic, made)
    assert [int((chosen & (made.sources == place)).sum()) for place in range(3)] == [20, 10, 0]
    wanted = (grams < 10).mean(axis=1)
    assert wanted[chosen].mean() > 2 * wanted.mean()
