"""The benchmark's figures against definitions worked by hand, numpy, and simulation."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eyas.bench import metrics

SAMPLE = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


def test_tpot_leaves_the_first_token_out_and_no_sample_has_no_spread():
    assert metrics.tpot_ms(ttft_ms=100, e2e_ms=190, num_output_tokens=10) == 10
    assert metrics.tpot_ms(ttft_ms=100, e2e_ms=100, num_output_tokens=1) is None
    assert metrics.spread([]) is None


def test_median_interval_is_the_published_table():
    # Ranks for 95 %, counted from 1, as in tables of the sign test.
    table = {6: (1, 6), 8: (1, 8), 9: (2, 8), 12: (3, 10), 15: (4, 12)}
    table |= {20: (6, 15), 25: (8, 18), 30: (10, 21), 40: (14, 27)}
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
