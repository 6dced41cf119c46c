"""The load: arrivals by seed, and prompts of given lengths."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import numpy as np
import pytest
from pydantic import ValidationError

from eyas.bench.bench import BenchConfig
from eyas.bench.summary import RequestLoad
from eyas.bench.workload import arrival_times_s, lengths_of, synthetic_tasks
from eyas.errors import ConfigError


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


@pytest.mark.parametrize(
    ("prompts", "lengths"),
    [("p.jsonl", None), ("synthetic(64)", (64, 64)), ("synthetic( 8, 90 )", (8, 90))],
)
def test_lengths_of_synthetic_prompts(prompts, lengths):
    assert lengths_of(prompts) == lengths


@pytest.mark.parametrize(
    "prompts", ["synthetic", "synthetic()", "synthetic(9,3)", "synthetic(0)", "synthetic(a)"]
)
def test_lengths_that_are_none_are_refused(prompts):
    with pytest.raises(ConfigError):
        lengths_of(prompts)


def test_lengths_the_wrong_way_round_are_told_so():
    with pytest.raises(ConfigError, match="the smaller number comes first") as refused:
        lengths_of("synthetic(512,64)")
    assert "synthetic(64,512)" in refused.value.hint


class Tokenizer:
    """A server that counts: a template of 11 tokens, and one for each `letters` of a word."""

    def __init__(self, letters):
        self.letters, self.asked = letters, []

    def tokens(self, messages):
        (message,) = messages
        return 11 + sum(-(-len(word) // self.letters) for word in message["content"].split())

    async def count(self, messages):
        self.asked.append(messages[0]["content"])
        return self.tokens(messages)


@pytest.mark.parametrize("letters", [1, 3, 9])
def test_synthetic_prompts_have_the_tokens_that_were_asked_for(letters):
    server = Tokenizer(letters)
    tasks = asyncio.run(synthetic_tasks((40, 300), 12, 5, server.count))
    assert len({task.messages[0]["content"] for task in tasks}) == 12
    counted = [server.tokens(task.messages) for task in tasks]
    slack = 9 // letters  # a word may be so many tokens
    assert all(40 - slack <= count <= 300 + slack for count in counted)
    assert max(counted) - min(counted) > 100
    # no cache has seen them
    assert not {task.messages[0]["content"] for task in tasks} & set(server.asked)
    assert tasks == asyncio.run(synthetic_tasks((40, 300), 12, 5, server.count))


def test_one_length_is_kept_to():
    server = Tokenizer(9)
    tasks = asyncio.run(synthetic_tasks((128, 128), 6, 0, server.count))
    assert [server.tokens(task.messages) for task in tasks] == [128] * 6
    assert len(server.asked) < 6 * 6


def test_a_length_below_the_template_is_refused():
    with pytest.raises(ConfigError, match="no prompt of 5 tokens"):
        asyncio.run(synthetic_tasks((5, 5), 1, 0, Tokenizer(9).count))
