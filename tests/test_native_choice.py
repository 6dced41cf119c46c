"""What the native library computes of a round's candidates, against the plain versions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.acceptance import Acceptance, RequestAcceptance, path_probs
from eyas.engine.tree import choose, choose_natively
from eyas.model import native
from eyas.model.rows import Proposals
from tests.test_budget import choose_plainly, costs, forest

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))


def proposals(rng: np.random.Generator, B: int, k: int, num_levels: int) -> Proposals:
    """Trees whose tokens are few, so that the same token stands in several places, but once among
    the children of a node.
    """
    _, parents, depths = forest(rng, B, k, num_levels)
    conditional = rng.uniform(0.001, 0.99, parents.shape)
    scores = np.log(path_probs(conditional, parents, depths)).astype(np.float32)
    tokens = np.concatenate([rng.permutation(2 * k)[:k] for _ in range(parents.size // k)]).reshape(
        parents.shape
    )
    return Proposals(tokens, scores, parents, depths)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 3), st.integers(0, 3))
def test_acceptance_learns_the_same(seed: int, B: int, k: int, num_levels: int):
    rng = np.random.default_rng(seed)
    plain, fast = Acceptance(), Acceptance(native=True)
    own = [[RequestAcceptance(bool(rng.integers(2))) for _ in range(B)] for _ in range(2)]
    own[1] = [RequestAcceptance(one.greedy) for one in own[0]]
    for _ in range(12):
        proposed = proposals(rng, B, k, num_levels)
        expected, found = plain.calibrate(proposed, own[0]), fast.calibrate(proposed, own[1])
        assert np.array_equal(found.cells, expected.cells)
        np.testing.assert_allclose(found.conditional, expected.conditional, rtol=1e-9)
        np.testing.assert_allclose(found.paths, expected.paths, rtol=1e-9)
        emitted = [
            rng.integers(0, 2 * k, rng.integers(1, num_levels + 3)).tolist() for _ in range(B)
        ]
        plain.observe(proposed, expected, emitted, own[0])
        fast.observe(proposed, found, emitted, own[1])
        assert [one.log_odds for one in own[1]] == pytest.approx([one.log_odds for one in own[0]])


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 12),
)
def test_the_choice_is_worth_the_same(seed: int, B: int, k: int, num_levels: int, max_nodes: int):
    rng = np.random.default_rng(seed)
    probs, parents, _ = forest(rng, B, k, num_levels)
    ms, num_tokens, rate = (
        costs(rng, int(rng.integers(0, 40))),
        B + int(rng.integers(0, 3)),
        float(rng.uniform(0.1, 3.0)),
    )
    expected = choose(probs, ms, num_tokens, 0.3, max_nodes, rate)
    found = choose_natively(probs, ms, num_tokens, 0.3, max_nodes, rate)
    kept, tokens, cost = found.kept, found.expected_tokens, found.predicted_ms
    assert kept.sum() == found.num_nodes
    assert kept.sum(1).max() <= max_nodes
    assert all(
        parents[b, c] < 0 or kept[b, parents[b, c]] for b, c in zip(*kept.nonzero(), strict=True)
    )
    assert tokens - rate * cost == pytest.approx(
        expected.expected_tokens - rate * expected.predicted_ms
    )
    _, plain_tokens, plain_ms = choose_plainly(
        probs.tolist(), ms.tolist(), num_tokens, 0.3, max_nodes, rate
    )
    assert tokens - rate * cost == pytest.approx(plain_tokens - rate * plain_ms)
    assert tokens == pytest.approx(num_tokens + probs[kept].sum())
