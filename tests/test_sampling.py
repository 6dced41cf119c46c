"""From logits to a token: the plain form (tests/oracle) against the definition, cuts, ties,
penalties, random numbers, and what is refused. test_draws.py holds the library to the plain form.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from eyas.engine.request import SamplingParams
from eyas.engine.sampling import BEST_WEIGHT, Sampler, derived_seed
from eyas.errors import EyasError, InputError
from tests.oracle.sampling import (
    draw_key,
    exponentials,
    kept_weights,
    penalised,
    sample,
    token_logprob,
)

V = 300


def reference_probs(logits_V, params):
    """The definition, token by token, in exact order and with fsum."""
    best = max(logits_V)
    probs = [math.exp((logit - best) / params.temperature) for logit in logits_V]
    ranked = sorted(range(len(probs)), key=lambda token: (-logits_V[token], token))
    ranked = [token for token in ranked if probs[token] >= params.min_p]
    ranked = ranked[: params.top_k or None]
    total, before, kept = math.fsum(probs[token] for token in ranked), [], []
    for token in ranked:
        if math.fsum(before) >= params.top_p * total:
            break
        before.append(probs[token])
        kept.append(token)
    return np.isin(np.arange(len(probs)), kept) * np.array(probs) / math.fsum(before)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.4},
        {"top_k": 7},
        {"top_p": 0.63},
        {"min_p": 0.07},
        {"temperature": 1.9, "top_k": 40, "top_p": 0.71, "min_p": 0.011},
    ],
)
def test_the_plain_form_is_the_definition(options):
    params = SamplingParams(**{"temperature": 1.0} | options)
    logits_V = np.random.default_rng(5).standard_normal(V) * 2
    expected_V = reference_probs(logits_V.tolist(), params)
    weights_V = kept_weights(logits_V, params)
    found_V = weights_V / weights_V.sum()
    np.testing.assert_allclose(found_V, expected_V, rtol=1e-12, atol=1 / BEST_WEIGHT)


def test_ties_at_a_cut_go_to_the_smaller_id():
    logits_V = np.array([1.0, 2.0, 2.0, 1.0, 2.0, 1.0])
    for cut, kept in (
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 4}, [0, 1, 2, 4]),
        ({"top_p": 0.4}, [1, 2]),
    ):
        weights_V = kept_weights(logits_V, SamplingParams(temperature=1.0, **cut))
        assert weights_V.nonzero()[0].tolist() == kept
    assert sample(logits_V, SamplingParams(), 0.0) == 1


@pytest.mark.parametrize(("gap", "kept"), [(-1e-9, False), (1e-9, True)])
def test_min_p_cuts_exactly(gap, kept):
    logits_V = np.array([0.0, math.log(0.25) + gap, -50.0])
    params = SamplingParams(temperature=1.0, min_p=0.25)
    drawn = {sample(logits_V, params, key) for key in range(100)}
    assert drawn == ({0, 1} if kept else {0})
    assert (kept_weights(logits_V, params) > 0).tolist() == [True, kept, False]


def test_tokens_are_drawn_as_often_as_they_weigh():
    probs_V = np.array([0.0, 0.25, 0.0, 0.7, 0.05])
    with np.errstate(divide="ignore"):
        logits_V, params = np.log(probs_V), SamplingParams(temperature=1.0)
    drawn = [sample(logits_V, params, draw_key(3, index)) for index in range(4000)]
    counts_V, there = np.bincount(drawn, minlength=5), probs_V > 0
    assert counts_V[~there].sum() == 0
    assert stats.chisquare(counts_V[there], 4000 * probs_V[there]).pvalue > 1e-3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_overflowed_are_an_error(bad):
    logits_V = np.zeros(V, np.float32)
    logits_V[4] = bad
    with pytest.raises(EyasError, match="best logit"):
        sample(logits_V, SamplingParams(temperature=1.0), 5)


# Penalties


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 39), max_size=30),
    st.lists(st.integers(0, 39), max_size=30),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.sampled_from([-2.0, 0.0, 0.7]),
    st.sampled_from([-1.5, 0.0, 0.4]),
)
def test_penalties_are_the_definition(prompt, output, repetition, frequency, presence):
    params = SamplingParams(
        repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence
    )
    logits_V = np.random.default_rng(len(output)).standard_normal(40)
    seen = np.array(sorted({*prompt, *output}), dtype=np.int64)
    counts = np.array([output.count(token) for token in seen.tolist()], dtype=np.int64)
    expected = []
    for token, logit in enumerate(logits_V.tolist()):
        if token in prompt or token in output:
            logit = logit / repetition if logit > 0 else logit * repetition
        expected.append(logit - frequency * output.count(token) - presence * (token in output))
    np.testing.assert_allclose(
        penalised(logits_V, seen, counts, params), expected, rtol=1e-13, atol=1e-13
    )


# Log-probabilities


def test_logprobs_are_log_softmax_of_the_raw_logits():
    logits_V = torch.randn(V, generator=torch.Generator().manual_seed(1)) * 4
    expected_V = logits_V.double().log_softmax(-1)
    got = token_logprob(logits_V.numpy(), 17, 5)
    best = expected_V.topk(5)
    assert [token for token, _ in got.top] == best.indices.tolist()
    np.testing.assert_allclose([number for _, number in got.top], best.values.numpy(), rtol=1e-12)
    assert got.token_id == 17
    assert got.logprob == pytest.approx(float(expected_V[17]), rel=1e-12)
    for count in (3, 1, 0):
        expected = tuple((token, -math.log(9)) for token in range(count))
        assert token_logprob(np.zeros(9, np.float32), 8, count).top == expected


# Random numbers


def test_numbers_are_logs_of_splitmix64s():
    """The first outputs for state 0, published with the algorithm: seed 0 mixes to state 0."""
    assert draw_key(0, 0) == 0xE220A8397B1DCDAF
    words = 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F
    expected = [-math.log2((2 * (word >> 12) + 1) / 2**53) for word in words]
    np.testing.assert_allclose(exponentials(0, np.arange(3)), expected, rtol=1e-12)


def numbers_of(seed_B, index_B, ids_V):
    """fp64 [B * V], of a mean of 1."""
    keys = [draw_key(*pair) for pair in zip(seed_B, index_B, strict=True)]
    return np.concatenate([exponentials(key, ids_V) for key in keys]) * math.log(2)


def test_numbers_are_exponential_and_independent():
    many, one = range(20000), np.zeros(1, np.int64)
    for numbers in (
        numbers_of([7], [3], np.arange(20000)),
        numbers_of([7] * 20000, many, one),
        numbers_of(many, [3] * 20000, one),
    ):
        assert stats.kstest(numbers, "expon").pvalue > 1e-3
        for lag in (1, 2, 64):
            assert abs(np.corrcoef(numbers[lag:], numbers[:-lag])[0, 1]) < 0.03


def test_samples_of_a_request_have_seeds_of_their_own():
    assert derived_seed(7, 0) == 7
    seeds = {derived_seed(seed, sample_of) for seed in (-5, 0, 1, 2) for sample_of in range(128)}
    assert len(seeds) == 4 * 128
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert len({Sampler(SamplingParams(), (1,), 9, frozenset()).seed for _ in range(2)}) == 2


# What is refused


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e-9}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias"),
        ({"logit_bias": {3: math.inf}}, "logit_bias"),
        ({"logit_bias": {3: math.nan}}, "logit_bias"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x" * 1025,)}, "stop"),
        ({"stop": ("x",) * 17}, "stop"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": tuple(range(17))}, "stop_token_ids"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"n": 0}, "n 0"),
        ({"n": 129}, "n 129"),
        ({"n": "2"}, "n '2'"),
        ({"n": True}, "n True"),
        ({"top_k": 2.0}, "top_k"),
        ({"stop": ("x", 1)}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"json_schema": "{}", "regex": "a"}, "several of json_schema, regex"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"json_schema": "{}", "min_tokens": 1}, "min_tokens"),
    ],
)
def test_what_is_out_of_range_is_refused(options, what):
    with pytest.raises(InputError, match=what) as caught:
        SamplingParams(**options)
    assert caught.value.hint


def test_limits_themselves_are_fine():
    SamplingParams(
        temperature=1e-5,
        top_p=1.0,
        min_p=1.0,
        seed=-(2**63),
        frequency_penalty=-2.0,
        presence_penalty=2.0,
        logit_bias={0: -100.0, 1: 100.0},
        stop=("x" * 1024,) * 16,
        min_tokens=8,
        max_tokens=8,
        n=128,
        logprobs=20,
    )


def test_tokens_that_the_target_lacks_are_refused():
    for params in (SamplingParams(logit_bias={40: 1.0}), SamplingParams(stop_token_ids=(3, 40))):
        params.check_vocabulary(41)
        with pytest.raises(InputError, match="token 40"):
            params.check_vocabulary(40)
