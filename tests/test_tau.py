"""Figures of accepted drafts against their definitions, and simulations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.tau import (
    LEAST_ROWS,
    RoundCounts,
    acceptance_by_position,
    acceptance_of_positions,
    accepted_by_position,
    bootstrap,
    count_round,
    num_emitted,
    ratio_of_medians,
    ratio_of_sums,
    sum_hists,
    tau_interval,
    tau_of,
    tokens_per_forward,
)

HIST = st.lists(st.integers(0, 50), max_size=8)


def test_tau_and_acceptance_of_a_histogram():
    hist = [2, 1, 0, 1]  # four rounds, emitting 1, 1, 2 and 4 tokens
    assert num_emitted(hist) == 8
    assert tau_of(hist) == 2
    assert acceptance_by_position(hist) == [0.5, 0.5, 1]
    assert tau_of([0, 0]) is tau_of([]) is None


@given(HIST)
def test_tau_counts_every_round_once(hist):
    lengths = [accepted + 1 for accepted, count in enumerate(hist) for _ in range(count)]
    assert tau_of(hist) == (pytest.approx(np.mean(lengths)) if lengths else None)


@given(HIST)
def test_acceptance_by_position_gives_tau_back(hist):
    # shares of the rounds that accepted 0, 1, 2, ... or more
    reached = np.cumprod([1.0, *acceptance_by_position(hist)])
    if sum(hist):
        assert tau_of(hist) == pytest.approx(reached.sum())


@given(st.lists(HIST, max_size=5))
def test_histograms_add_up(hists):
    total = sum_hists(hists)
    assert len(total) == max(map(len, hists), default=0)
    assert sum(total) == sum(map(sum, hists))
    assert num_emitted(total) == sum(map(num_emitted, hists))


def test_tokens_per_forward_lies_between_plain_and_tau():
    assert tokens_per_forward(10, [0, 5]) == tau_of([0, 5]) == 2
    assert tokens_per_forward(10, [0, 2]) == 10 / 8  # two rounds of two, six plain steps
    assert tokens_per_forward(10, []) == 1
    assert tokens_per_forward(0, []) is None


@given(HIST)
def test_positions_that_servers_count_say_what_the_histogram_says(hist):
    accepted = [sum(hist[position + 1 :]) for position in range(len(hist) - 1)]
    assert accepted_by_position(hist) == accepted
    assert acceptance_of_positions(sum(hist), accepted) == acceptance_by_position(hist)


@given(st.lists(st.integers(0, 6), max_size=20))
def test_rounds_counted_one_by_one_are_the_histogram(rounds):
    hist: list[int] = []
    for accepted in rounds:
        count_round(hist, accepted)
    assert hist == np.bincount(np.array(rounds, dtype=int)).tolist()


def test_bootstrap_of_equal_rows_is_a_point():
    low, high = bootstrap([(10, 4)] * 9, ratio_of_medians)
    assert low == high == 2.5
    assert ratio_of_sums(np.zeros((3, 2))) == 0


class TestIntervals:
    def test_holds_the_true_tau_about_as_often_as_it_says(self):
        """Acceptance differs by prompt: an interval over prompts holds the true tau, one over
        rounds (of some sets) is too narrow.
        """
        rng = np.random.default_rng(0)
        true_tau, held, too_narrow = 3.0, 0, 0
        for draw in range(200):
            level = rng.gamma(2.0, 1.0, size=40)  # mean 2 accepted drafts
            accepted = rng.poisson(level[:, None], size=(40, 8))
            emitted, rounds = (accepted + 1).sum(1).tolist(), [8] * 40
            low, high = tau_interval(emitted, rounds, seed=draw)
            held += low <= true_tau <= high
            if draw < 60:
                each = (accepted + 1).ravel().tolist()
                low, high = tau_interval(each, [1] * len(each), seed=draw)
                too_narrow += low <= true_tau <= high
        assert 175 <= held <= 200
        assert too_narrow < 0.75 * 60

    @given(
        st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=LEAST_ROWS, max_size=30)
    )
    @settings(max_examples=30)
    def test_lies_within_the_prompts_own(self, counts):
        own, rounds = zip(*counts, strict=True)
        emitted = [ratio * number for ratio, number in counts]
        low, high = tau_interval(emitted, rounds)
        assert min(own) - 1e-9 <= low <= high <= max(own) + 1e-9
        assert (low, high) == tau_interval(emitted, rounds), "the same counts, the same interval"

    def test_needs_some_prompts_and_rounds(self):
        assert tau_interval([3] * (LEAST_ROWS - 1), [1] * (LEAST_ROWS - 1)) is None
        assert tau_interval([0] * 10, [0] * 10) is None
        assert tau_interval([3] * LEAST_ROWS, [1] * LEAST_ROWS) == (3, 3)


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=8))
@settings(max_examples=60)
def test_rounds_of_an_engine_are_judged_up_to_the_first_miss_but_for_the_last(hits):
    accepted = [next((at for at, hit in enumerate(row) if not hit), 3) for row in hits]
    tally = RoundCounts(3)
    tally.add_rounds(accepted)
    for position in range(3):
        reached = [row for row in accepted if row >= position]
        more = [row for row in accepted if row > position]
        unknown = accepted[-1] == position
        assert tally.accepted[position] == len(more)
        assert tally.judged[position] == len(reached) - unknown
    assert tally.emitted == sum(accepted) + len(accepted)


@given(st.data())
@settings(max_examples=60)
def test_the_walk_equals_serving_an_answer(data):
    """Of made-up drafts: whether each equals the answer is drawn for every slot and position."""
    n, steps = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 6))
    right = data.draw(
        st.lists(st.lists(st.booleans(), min_size=steps, max_size=steps), min_size=n, max_size=n)
    )
    matches = []
    for bonus in range(n - 1):
        following = right[bonus][: n - 1 - bonus]
        matches.append(
            next((count for count, equal in enumerate(following) if not equal), len(following))
        )
    tally = RoundCounts(steps)
    tally.add_answer(matches)

    at, rounds, hist, judged, accepted = 0, 0, [0] * (steps + 1), [0] * steps, [0] * steps
    while at < n - 1:  # y_at is emitted: a round
        rounds += 1
        emitted = 0
        for position in range(steps):
            if at + emitted == n - 1:
                break
            judged[position] += 1
            if not right[at][position]:
                break
            accepted[position] += 1
            emitted += 1
        if at + emitted < n - 1:
            emitted += 1  # the target's own
        hist[emitted - 1] += 1
        at += emitted
    assert tally.accept_hist == hist
    assert tally.rounds == rounds
    assert tally.emitted == n - 1
    assert (tally.judged, tally.accepted) == (judged, accepted)
    hist = [2 * count for count in tally.accept_hist]
    tally.add(tally)
    doubled = [[2 * count for count in counts] for counts in (judged, accepted)]
    assert [tally.accept_hist, tally.judged, tally.accepted] == [hist, *doubled]
    assert tally.tau == ((n - 1) / rounds if rounds else 0)
