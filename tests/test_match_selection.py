"""The match with the traffic: the weights are the paper's by hand, the draw is in proportion, and a
selection comes nearer.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.data import match
from eyas.data.duplicates import scrambled
from eyas.data.ledger import LENGTHS, length_class
from eyas.data.match import NUM_BUCKETS, STRENGTH, GramBlock, Profile
from eyas.errors import EmptyInputError
from tests.source_rows import real_rows, row

SEED = 7
TOPICS = {
    "food": "book a table for two at the thai restaurant tonight please and order noodles soup "
    "rice curry",
    "code": "how do i list files with tar grep the log find a process kill it print lines sort",
    "sums": "tom has nine apples he gives three to ann how many apples are left if each costs five "
    "dollars",
}
STOP = "the a to of and is in it i you"


def rows(shares, num_words, seed):
    """So many rows of each topic, of `num_words` words on average, mixed."""
    rng, made = random.Random(seed), []
    for topic, count in shares.items():
        for _ in range(count):
            length = rng.randint(num_words // 2, num_words * 3 // 2)
            said = (TOPICS[topic] if rng.random() < 0.7 else STOP for _ in range(length))
            made.append(row(" ".join(rng.choice(one.split()) for one in said), source=topic))
    rng.shuffle(made)
    return made


def keys(count):
    return scrambled(np.arange(1, count + 1, dtype=np.uint64))


def profile(block, keep=None):
    made = Profile()
    made.add(block, np.ones(len(block.counts), bool) if keep is None else keep)
    return made


def every(pool):
    return np.ones(len(pool), bool)


def drawn(names, num, seed=SEED):
    return lambda weights: match.sample(weights, names, num, seed)


def selected(pool, traffic, num, seed=SEED):
    """What `select_like` takes of the pool, the halves of the traffic, and the pool's digest."""
    blocks = match.gram_digest(pool)
    halves = match.traffic_halves(traffic)
    pick = drawn(keys(len(pool)), num, seed)
    chosen = match.select_like(blocks, every(pool), halves[0].grams, pick)
    return chosen, halves, blocks


def taken_of(pool, chosen):
    return Counter(one.source for one, keep in zip(pool, chosen, strict=True) if keep)


def test_buckets_are_words_and_pairs_whatever_their_case():
    found = match.buckets("Book a table")
    assert found.shape == (3 + 2,)
    assert found.dtype == np.int64
    assert found.tolist() == match.buckets("book  A\ntable").tolist()
    assert set(match.buckets("a table").tolist()) <= set(found.tolist())
    assert found.tolist() != match.buckets("table a Book").tolist()
    assert match.buckets("").shape == match.buckets(" \n").shape == (0,)
    assert match.buckets("one").shape == (1,)
    assert len(match.buckets("Wie geht's, 東京?")) == 8 + 7  # wie geht ' s , 東 京 ?


def test_buckets_are_the_same_on_every_machine():
    """Each test process has another hash seed."""
    assert match.buckets("Book a table, 東京").tolist() == GOLDEN


GOLDEN = [9470, 4652, 810, 3634, 5112, 1242, 511, 1752, 6499, 9626, 5494]


@given(st.lists(st.text(max_size=60), max_size=5))
def test_a_digest_holds_each_row_by_itself(texts):
    block = match.gram_digest([row(text, "twice") for text in texts])
    assert block.counts.sum() == len(block.grams)
    assert block.characters.tolist() == [len(text) + 5 for text in texts]
    start = 0
    for text, count in zip(texts, block.counts, strict=True):
        alone = [*match.buckets(text), *match.buckets("twice")]
        assert block.grams[start : start + count].tolist() == alone
        assert match.gram_digest([row(text, "twice")]).grams.tolist() == alone
        start += count


def test_words_spread_evenly_over_the_buckets():
    words = " ".join(f"word{number}" for number in range(100_000))
    counts = np.bincount(match.buckets(words), minlength=NUM_BUCKETS)
    assert counts.sum() == 199_999
    # Poisson with mean 20 has variance 20; a poor hash leaves holes or heaps.
    assert 18 < counts.var() < 22


def test_log_weight_by_hand():
    traffic, pool = np.zeros(NUM_BUCKETS, np.int64), np.zeros(NUM_BUCKETS, np.int64)
    traffic[3], pool[3], pool[4] = 9, 1, 8
    ratio = match.log_ratio(traffic, pool)
    more = math.log(10 / 10_009) - math.log(2 / 10_009)
    less = math.log(1 / 10_009) - math.log(9 / 10_009)
    grams, counts = np.array([3, 4, 3, 3, 3, 4], np.uint16), np.array([2, 0, 1, 3], np.int32)
    block = GramBlock(grams, counts, np.zeros(4, np.int32))
    expected = [STRENGTH * (more + less) / 2, 0, STRENGTH * more, STRENGTH * (2 * more + less) / 3]
    assert match.log_weights(block, ratio).tolist() == pytest.approx(expected)


def test_a_rows_weight_depends_on_no_other_row():
    made = rows({"food": 20, "code": 20}, 12, seed=1)
    together = match.gram_digest(made)
    rng = np.random.default_rng(0)
    ratio = match.log_ratio(rng.integers(0, 99, NUM_BUCKETS), rng.integers(0, 99, NUM_BUCKETS))
    alone = [float(match.log_weights(match.gram_digest([one]), ratio)[0]) for one in made]
    assert match.log_weights(together, ratio).tolist() == alone  # to the bit


def test_a_draw_is_in_proportion_to_the_weights():
    """Chi-square of 3 degrees under .1 % is above 16.3."""
    weights = np.log(np.array([1.0, 2.0, 3.0, 4.0]))
    draws = (match.sample(weights, keys(4), 1, seed) for seed in range(4000))
    found = Counter(int(np.flatnonzero(one)[0]) for one in draws)
    expected = [400, 800, 1200, 1600]
    assert sum((found[place] - count) ** 2 / count for place, count in enumerate(expected)) < 16.3


def test_a_draw_depends_on_no_order_and_grows_by_adding():
    rng = np.random.default_rng(0)
    weights, names = rng.normal(size=500), keys(500)
    order = rng.permutation(500)
    chosen = {num: match.sample(weights, names, num, SEED) for num in (0, 1, 50, 51, 400, 500, 900)}
    for num, mask in chosen.items():
        assert mask.sum() == min(num, 500)
        assert (match.sample(weights[order], names[order], num, SEED) == mask[order]).all()
    assert not (chosen[50] & ~chosen[51]).any()
    assert not (chosen[51] & ~chosen[400]).any()
    # A row gone: the others keep their places.
    without = weights.copy()
    gone = int(np.flatnonzero(chosen[50])[0])
    without[gone] = -np.inf
    assert (match.sample(without, names, 49, SEED) == chosen[50] & (np.arange(500) != gone)).all()
    assert (match.sample(weights, names, 50, SEED + 1) != chosen[50]).any()


def test_a_row_without_weight_is_never_drawn():
    weights = np.array([0.0, -np.inf, -50.0, -np.inf])
    assert match.sample(weights, keys(4), 4, SEED).tolist() == [True, False, True, False]


def test_noise_is_standard_gumbel():
    noise = match.gumbel(keys(100_000), SEED)
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.02)
    assert noise.std() == pytest.approx(math.pi / math.sqrt(6), abs=0.02)
    other = match.gumbel(keys(100_000), SEED + 1)
    assert abs(np.corrcoef(noise, other)[0, 1]) < 0.02
    assert (match.gumbel(keys(3), -1) == match.gumbel(keys(3), 2**64 - 1)).all()


def test_a_selection_comes_near_to_traffic_that_it_never_saw():
    pool = rows({"food": 400, "code": 900, "sums": 700}, 20, seed=1)
    traffic = rows({"food": 300}, 20, seed=2)
    chosen, (fitted, held_out), blocks = selected(pool, traffic, 200)
    after = profile(blocks, chosen)
    found = match.match_report(profile(blocks), after, fitted, held_out)
    assert after.num_rows == 200
    assert found["js"]["after"] < found["js"]["before"] / 4
    assert found["js"]["after"] < 2 * found["js"]["floor"]
    assert taken_of(pool, chosen)["food"] > 190


def test_a_mixture_stays_a_mixture():
    """Where sums are taken, the part of the traffic with the longest or plainest rows takes all."""
    pool = rows({"food": 800, "code": 800, "sums": 1500}, 20, seed=1)
    traffic = rows({"food": 180, "code": 120}, 20, seed=2)
    chosen, _, _ = selected(pool, traffic, 500)
    taken = taken_of(pool, chosen)
    assert taken["food"] / 500 == pytest.approx(0.6, abs=0.1)
    assert taken["code"] / 500 == pytest.approx(0.4, abs=0.1)


def test_long_rows_are_not_preferred_for_their_length():
    both = {"food": 500, "sums": 500}
    pool = rows(both, 10, seed=1) + rows(both, 60, seed=3)
    traffic = rows({"food": 150}, 10, seed=2) + rows({"food": 150}, 60, seed=4)
    chosen, (_, held_out), blocks = selected(pool, traffic, 300)
    after = profile(blocks, chosen)
    assert chosen[:1000].sum() / 300 == pytest.approx(0.5, abs=0.1)
    assert match.jensen_shannon(held_out.lengths, after.lengths) < 0.05


def test_the_round_that_came_nearest_counts():
    pool = rows({"food": 40, "code": 40}, 12, seed=1)
    counts = gram_counts(rows({"food": 30}, 12, seed=2))
    food = np.array([one.source == "food" for one in pool])
    for good in range(match.ROUNDS):
        answers = iter([food if number == good else ~food for number in range(match.ROUNDS)])
        pick = lambda weights: next(answers)  # noqa: B023, E731
        chosen = match.select_like(match.gram_digest(pool), every(pool), counts, pick)
        assert (chosen == food).all()


def gram_counts(made):
    return np.bincount(match.gram_digest(made).grams, minlength=NUM_BUCKETS)


def test_each_round_corrects_the_one_before():
    pool = rows({"food": 40, "code": 40}, 12, seed=1)
    counts = gram_counts(rows({"food": 30, "code": 30}, 12, seed=2))
    food = np.array([one.source == "food" for one in pool])
    seen = []

    def only_food(weights):
        seen.append(weights.copy())
        return food

    match.select_like(match.gram_digest(pool), every(pool), counts, only_food)
    assert len(seen) == match.ROUNDS
    change = seen[1] - seen[0]
    assert change[food].max() < change[~food].min()
    assert change[~food].mean() > 1


def test_a_pool_ten_times_as_large_weighs_the_same():
    pool = rows({"food": 40, "code": 40}, 12, seed=1)
    counts, seen = gram_counts(rows({"food": 9}, 12, seed=2)), []

    def pick(weights):
        seen.append(weights.copy())
        return np.ones(len(weights), bool)

    for times in (1, 10):
        block = match.gram_digest(pool * times)
        match.select_like(block, every(pool * times), counts, pick)
    assert seen[match.ROUNDS][:80] == pytest.approx(seen[0])


def test_dead_rows_are_not_selected_and_do_not_count():
    pool, traffic = rows({"food": 150, "code": 150}, 12, seed=1), rows({"food": 60}, 12, seed=2)
    alive = np.arange(300) % 3 != 0
    alone = [one for one, lives in zip(pool, alive, strict=True) if lives]
    fitted, _ = match.traffic_halves(traffic)
    whole, few = match.gram_digest(pool), match.gram_digest(alone)
    names = keys(300)
    chosen = match.select_like(whole, alive, fitted.grams, drawn(names, 50))
    expected = match.select_like(few, every(alone), fitted.grams, drawn(names[alive], 50))
    assert not (chosen & ~alive).any()
    assert (chosen[alive] == expected).all()


def test_a_pool_that_says_nothing_is_drawn_from_all_the_same():
    chosen, _, _ = selected([row("") for _ in range(9)], rows({"food": 60}, 12, seed=2), 4)
    assert chosen.sum() == 4


def test_the_traffic_is_cut_in_halves_by_what_it_says():
    traffic = rows({"food": 300}, 12, seed=2)
    one, other = match.traffic_halves(traffic)
    assert one.num_rows + other.num_rows == 300
    assert 110 < one.num_rows < 190
    again, _ = match.traffic_halves(reversed(traffic + traffic))
    assert (again.grams == 2 * one.grams).all()
    too_few = "too few prompts to fit one half and measure by the other: 1"
    with pytest.raises(EmptyInputError, match=too_few):
        match.traffic_halves([row("Hello")])


def test_report_holds_counts_and_no_words():
    pool, traffic = rows({"food": 150, "code": 150}, 12, seed=1), rows({"food": 60}, 12, seed=2)
    chosen, (fitted, held_out), blocks = selected(pool, traffic, 60)
    before, after = profile(blocks), profile(blocks, chosen)
    before.sources, after.sources = Counter(food=150, code=150), Counter(food=60)
    held_out.languages, before.languages = Counter(en=3), Counter(de=2)
    found = match.match_report(before, after, fitted, held_out)
    halves = {"traffic_fitted": fitted.num_rows, "traffic": held_out.num_rows}
    assert found["num_prompts"] == {**halves, "before": 300, "after": 60}
    taken = {"code": {"before": 150, "after": 0}, "food": {"before": 150, "after": 60}}
    assert found["sources"] == taken
    nothing = {"before": 0, "after": 0, "traffic": 0}
    assert found["languages"] == {"de": {**nothing, "before": 2}, "en": {**nothing, "traffic": 3}}
    for name in ("before", "after", "traffic"):
        assert sum(found["lengths"][name]) == found["num_prompts"][name]
        assert len(found["lengths"][name]) == len(found["lengths"]["from"])
    assert found["js"]["floor"] <= found["js"]["before"]
    said = {word for topic in TOPICS.values() for word in topic.split() if len(word) > 3}
    assert not [word for word in said if f'"{word}' in json.dumps(found)]


def test_real_traffic():
    names = ("sgd_dev", "gsm8k_train", "tldr", "taskmaster4")
    made = {name: real_rows(name, 2500) for name in names}
    traffic = made["sgd_dev"][::2]
    pool = made["sgd_dev"][1::2] + [one for name in list(made)[1:] for one in made[name][:1000]]
    chosen, (fitted, held_out), blocks = selected(pool, traffic, 500)
    found = match.match_report(profile(blocks), profile(blocks, chosen), fitted, held_out)
    assert found["js"]["after"] < found["js"]["before"] / 3
    assert found["js"]["after"] < 1.1 * found["js"]["floor"]
    assert found["length_js"]["after"] < found["length_js"]["before"] / 5
    assert taken_of(pool, chosen)["sgd_dev"] > 450


def test_length_classes_are_half_open():
    assert LENGTHS[0] == 0
    ends = [0, 24, 25, 49, 50, 6399, 6400, 10**6]
    assert list(map(length_class, ends)) == [0, 0, 1, 1, 2, 8, 9, 9]
    made = Profile()
    made.add(GramBlock(np.zeros(0, np.uint16), np.zeros(8, np.int32), np.array(ends)))
    assert made.lengths.tolist() == [2, 2, 1, 0, 0, 0, 0, 0, 1, 2]
    made = Profile()
    block = GramBlock(np.zeros(3, np.uint16), np.array([1, 2, 0]), np.array([3, 30, 7000]))
    made.add(block, np.array([True, False, True]))
    assert (made.num_rows, made.lengths.tolist()) == (2, [1, 0, 0, 0, 0, 0, 0, 0, 0, 1])
    assert made.grams.sum() == 1


COUNTS = st.lists(st.integers(0, 50), min_size=6, max_size=6).map(np.array)


@settings(deadline=None)
@given(COUNTS, COUNTS)
def test_divergences_are_what_they_should_be(one, other):
    assert match.jensen_shannon(one, one) == 0
    assert 0 <= match.jensen_shannon(one, other) + 1e-12 <= math.log(2) + 1e-9
    assert match.jensen_shannon(one, other) == pytest.approx(match.jensen_shannon(other, one))


def test_divergences_by_hand():
    assert match.jensen_shannon(np.array([2, 0]), np.array([0, 3])) == pytest.approx(math.log(2))
    assert match.jensen_shannon(np.array([0, 0]), np.array([0, 3])) == math.log(2)
    assert match.jensen_shannon(np.array([0, 0]), np.array([0, 0])) == 0
