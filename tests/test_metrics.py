"""The benchmark's figures against definitions worked by hand, numpy, and simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.bench import metrics

SAMPLE = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)
HIST = st.lists(st.integers(0, 50), max_size=8)


def test_tpot_leaves_the_first_token_out():
    assert metrics.tpot_ms(ttft_ms=100, e2e_ms=190, num_output_tokens=10) == 10
    assert metrics.tpot_ms(ttft_ms=100, e2e_ms=100, num_output_tokens=1) is None


def test_itl_is_the_gap_between_chunks():
    assert metrics.itl_ms([5, 7, 12]) == [2, 5]
    assert metrics.itl_ms([5]) == metrics.itl_ms([]) == []


def test_throughput_is_tokens_per_second():
    assert metrics.throughput_tps(30, 2.0) == 15


def test_tau_and_acceptance_of_a_histogram():
    hist = [2, 1, 0, 1]  # four rounds, emitting 1, 1, 2 and 4 tokens
    assert metrics.num_emitted(hist) == 8
    assert metrics.tau(hist) == 2
    assert metrics.acceptance_by_position(hist) == [0.5, 0.5, 1]
    assert metrics.tau([0, 0]) is metrics.tau([]) is None


@given(HIST)
def test_tau_counts_every_round_once(hist):
    lengths = [accepted + 1 for accepted, count in enumerate(hist) for _ in range(count)]
    assert metrics.tau(hist) == (pytest.approx(np.mean(lengths)) if lengths else None)


@given(HIST)
def test_acceptance_by_position_gives_tau_back(hist):
    # share of the rounds that accepted 0, 1, 2, ... or more
    reached = np.cumprod([1.0, *metrics.acceptance_by_position(hist)])
    if sum(hist):
        assert metrics.tau(hist) == pytest.approx(reached.sum())


@given(st.lists(HIST, max_size=5))
def test_histograms_add_up(hists):
    total = metrics.sum_hists(hists)
    assert len(total) == max(map(len, hists), default=0)
    assert sum(total) == sum(map(sum, hists))
    assert metrics.num_emitted(total) == sum(map(metrics.num_emitted, hists))


@given(SAMPLE, st.floats(0, 1))
def test_percentile_is_numpys(values, share):
    assert metrics.percentile(values, share) == pytest.approx(
        np.quantile(values, share), rel=1e-9, abs=1e-6
    )


def test_median_interval_is_the_published_table():
    # Ranks for 95 %, counted from 1, as in tables of the sign test.
    table = {
        6: (1, 6),
        8: (1, 8),
        9: (2, 8),
        12: (3, 10),
        15: (4, 12),
        20: (6, 15),
        25: (8, 18),
        30: (10, 21),
        40: (14, 27),
    }
    for n, (low, high) in table.items():
        assert metrics.median_interval(range(1, n + 1)) == (low, high), n
    for n in range(6):
        assert metrics.median_interval(range(n)) is None


def test_median_interval_holds_the_median_as_often_as_it_says():
    samples = np.random.default_rng(0).exponential(size=(4000, 21))
    intervals = [metrics.median_interval(list(sample)) for sample in samples]
    share = np.mean([low <= np.log(2) <= high for low, high in intervals])
    assert 0.95 < share < 0.985  # 21 values allow .973, not .95 exactly


@given(SAMPLE)
def test_spread_is_in_order_and_within_the_sample(values):
    spread = metrics.spread(values)
    assert spread["count"] == len(values)
    assert min(values) <= spread["median"] <= spread["p90"] <= spread["p99"] <= max(values)
    assert (spread["low"] is None) == (len(values) < 6)
    if spread["low"] is not None:
        assert spread["low"] <= spread["median"] <= spread["high"]


def test_no_sample_has_no_spread():
    assert metrics.spread([]) is None


def test_tokens_per_forward_lies_between_plain_and_tau():
    assert metrics.tokens_per_forward(10, [0, 5]) == metrics.tau([0, 5]) == 2
    assert metrics.tokens_per_forward(10, [0, 2]) == 10 / 8  # two rounds of two, six plain steps
    assert metrics.tokens_per_forward(10, []) == 1
    assert metrics.tokens_per_forward(0, []) is None


@given(HIST)
def test_positions_that_servers_count_say_what_the_histogram_says(hist):
    accepted = [sum(hist[position + 1 :]) for position in range(len(hist) - 1)]
    assert metrics.acceptance_of_positions(sum(hist), accepted) == metrics.acceptance_by_position(
        hist
    )


def test_bootstrap_holds_a_ratio_as_often_as_it_says():
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        rows = rng.exponential(size=(40, 2)) * (2, 1)
        low, high = metrics.bootstrap_interval(rows, metrics.ratio_of_sums)
        held += low <= 2 <= high
    assert held > 0.87 * 200  # percentile intervals of small samples are a little narrow
    assert metrics.bootstrap_interval(rows, metrics.ratio_of_sums) == (low, high)
    assert metrics.bootstrap_interval(rows[:5], metrics.ratio_of_sums) is None


def test_bootstrap_of_equal_rows_is_a_point():
    low, high = metrics.bootstrap_interval([(10, 4)] * 9, metrics.ratio_of_medians)
    assert low == high == 2.5
    assert metrics.ratio_of_sums(np.zeros((3, 2))) == 0
