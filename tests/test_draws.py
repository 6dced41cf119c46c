"""The library's draws against the plain sampler's: the same tokens and log-probabilities to the
bit, over all parameters, extreme logits, ties and sizes of the vocabulary.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eyas.engine.request import SamplingParams
from eyas.engine.sampling import BEST_WEIGHT, Sampler, token_logprob
from eyas.errors import EyasError
from eyas.model.library import address, library, unavailable
from tests.oracle.sampling import PlainSampler, weights_of
from tests.oracle.sampling import token_logprob as plain_logprob

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))

SIZES = (1, 2, 7, 16, 17, 300, 511, 513, 1024, 5000)
FEW = settings(max_examples=250, deadline=None)


def drawn(sampler: Sampler, rows: np.ndarray) -> list[int]:
    tokens = np.full(len(rows), -1, dtype=np.int64)
    state = sampler.draw_state()
    assert state is not None
    library().eyas_draw(ctypes.addressof(state), address(rows), *rows.shape, address(tokens))
    return tokens.tolist()


@st.composite
def rows_of_logits(draw):
    """fp32 [R, V] of many kinds."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    R, V = draw(st.integers(1, 4)), draw(st.sampled_from(SIZES))
    rows = rng.standard_normal((R, V)) * draw(st.sampled_from([0.0, 1e-30, 0.3, 3.0, 30.0, 1e30]))
    kind = draw(st.sampled_from(["smooth", "ties", "tower", "masked", "negative"]))
    if kind == "ties":
        rows = np.round(rows)
    elif kind == "tower":
        rows[:, rng.integers(V)] += 90.0
    elif kind == "masked":
        rows[:, rng.permutation(V)[: V - 1 - rng.integers(min(V, 20))]] = -np.inf
        rows[:, 1 % V] = 0.0  # no end token: where all but these are masked, none is left
    elif kind == "negative":
        rows -= 1e4
    return rows.astype(np.float32)


def within(V):
    return st.integers(0, V - 1)


@st.composite
def answers(draw):
    """Rows of logits, a prompt, end tokens and parameters: each is off in many."""
    rows = draw(rows_of_logits())
    V = rows.shape[1]
    rarely = st.sampled_from([False, False, True])
    options = {
        "temperature": draw(st.sampled_from([0.0, 1e-5, 0.3, 1.0, 1.0, 1.7, 2.0])),
        "top_k": draw(st.sampled_from([0, 0, 1, 2, 17, 400, V, V + 5])),
        "top_p": draw(st.sampled_from([1e-300, 1e-9, 0.1, 0.5, 0.9, 1 - 1e-12, 1.0, 1.0])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 1e-20, 1e-3, 0.1, 0.5, 1.0])),
        "seed": draw(st.integers(-(2**63), 2**63 - 1)),
        "ignore_eos": True,  # a walk ends with an end token, as far as the sampler counts
    }
    if draw(rarely):
        options["repetition_penalty"] = draw(st.sampled_from([0.01, 0.7, 1.3, 100.0]))
        options["frequency_penalty"] = draw(st.floats(-2, 2))
        options["presence_penalty"] = draw(st.sampled_from([-2.0, 0.0, 0.3]))
    if draw(rarely):
        options["logit_bias"] = draw(st.dictionaries(within(V), st.floats(-100, 100), max_size=5))
    if draw(rarely):
        options["logprobs"] = draw(st.sampled_from([0, 1, 5, 20]))
    if draw(rarely) and V > 2:
        options |= {"min_tokens": draw(st.integers(1, 4)), "stop_token_ids": (V // 2,)}
    prompt = draw(st.lists(within(V), max_size=30))
    return rows, prompt, SamplingParams(**options)


def sampler_of(prompt, params, V, kind=Sampler):
    return kind(params, prompt, V, frozenset({0} if V > 2 else ()))


@FEW
@given(answers())
@example((np.zeros((2, 513), np.float32), [], SamplingParams(temperature=1.0, top_p=0.5, seed=1)))
@example((np.zeros((2, 513), np.float32), [], SamplingParams(temperature=1.0, top_k=99, seed=1)))
def test_the_library_draws_the_tokens_of_the_plain_sampler(answer):
    rows, prompt, params = answer
    V = rows.shape[1]
    kinds = PlainSampler, Sampler, Sampler
    plain, ours, single = (sampler_of(prompt, params, V, kind) for kind in kinds)
    if plain.is_plain_greedy:
        return
    with np.errstate(all="ignore"):
        expected = [plain.draw(row) for row in rows]
        assert [single.draw(row) for row in rows] == expected
        tokens = drawn(ours, rows)
    ours.take_drawn(tokens)
    assert ours.num_drawn == plain.num_drawn
    assert tokens[: plain.num_drawn] == expected[: plain.num_drawn]
    assert ours.logprobs == single.logprobs == plain.logprobs


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1e-6, 0.1, 1.0, 5.0, 11.0, 40.0]))
@pytest.mark.parametrize("best", [0.0, 12.25, -3.7])
def test_weights_have_the_same_bits(best, seed, spread):
    """A row of two logits has their weights' sum."""
    rng = np.random.default_rng(seed)
    others = (best - np.abs(rng.standard_normal(64) * spread)).astype(np.float32)
    rows = np.stack([np.full(64, best, np.float32), others], axis=1)
    sampler = Sampler(SamplingParams(temperature=1.0, logprobs=0, seed=0), [], 2, frozenset())
    drawn(sampler, rows)
    expected = [int(weights_of(row, 1.0).sum()) for row in rows]
    assert sampler._scores.ints[:, 0].tolist() == expected
    errors = np.array(expected) / BEST_WEIGHT - 1 - np.exp(others.astype(np.float64) - rows[0, 0])
    assert np.abs(errors).max() < 0.6 / BEST_WEIGHT + 1e-14


def test_the_best_token_has_the_whole_weight_and_far_ones_none():
    logits = np.array([3.0, 3.0, 3.0 - 45 * math.log(2) - 0.01, -np.inf, -1e30], np.float32)
    assert weights_of(logits, 1.0).tolist() == [BEST_WEIGHT, BEST_WEIGHT, 0, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"temperature": 0.0, "logprobs": 1}])
def test_logits_that_overflowed_give_no_token(bad, options):
    rows = np.zeros((2, 40), np.float32)
    rows[1, 7] = bad
    params = SamplingParams(**{"temperature": 1.0, "seed": 0} | options)
    sampler = Sampler(params, [], 40, frozenset())
    tokens = drawn(sampler, rows)
    assert tokens[0] >= 0
    assert tokens[1] == -1
    with pytest.raises(EyasError, match="best logit is"):
        sampler.draw(rows[1])


@FEW
@given(rows_of_logits(), st.sampled_from([0, 1, 5, 20]))
def test_the_library_scores_a_prompts_token_as_python_does(rows, num_top):
    for row in rows:
        token = int(row.view(np.uint32).sum() % len(row))
        ours = token_logprob(row, token, num_top)
        assert repr(ours) == repr(plain_logprob(row, token, num_top))
