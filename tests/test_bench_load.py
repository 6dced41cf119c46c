"""The load: concurrencies, rates, arrivals by seed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from pydantic import ValidationError

from eyas.bench.bench import BenchConfig
from eyas.bench.summary import RequestLoad
from eyas.bench.workload import arrival_times_s


def test_arrivals_have_the_rate_and_are_poissons():
    times = arrival_times_s(4.0, 20_000, seed=0)
    assert times[0] == 0
    assert len(times) == 20_000
    gaps = np.array([after - before for before, after in pairwise(times)])
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.05)
    # the squared coefficient of variation of exponential gaps is 1
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1, rel=0.15)


def test_arrivals_are_the_seeds():
    first, again, other = (arrival_times_s(2.0, 9, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert arrival_times_s(2.0, 1, 0) == [0]


@pytest.mark.parametrize(
    "changes", [{"concurrencies": ()}, {"concurrencies": (0,)}, {"rates": (-1,)}]
)
def test_a_benchmark_needs_a_load(changes):
    with pytest.raises(ValidationError):
        BenchConfig(**changes)


def test_loads_are_closed_and_open():
    config = BenchConfig(concurrencies=(1, 64), rates=(0.5,), num_prompts=40)
    assert config.loads == [RequestLoad(1), RequestLoad(64), RequestLoad(rate=0.5)]
    assert [str(load) for load in config.loads] == ["1 at a time", "64 at a time", "0.5 a second"]
    assert [config.num_at(load) for load in config.loads] == [40, 256, 40]
