"""The node budget: the fast choice, the plain one and brute force agree."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eyas.engine.acceptance import along_paths
from eyas.engine.tree import MAX_NODES, choose, goes_on, most_probable
from eyas.model.rows import Proposals


def forest(
    rng: np.random.Generator, B: int, k: int, num_levels: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Path probabilities [B, C], parents [B, C], depths [C] in the layout of proposals; coarse, so
    that ties are common.
    """
    C = k + num_levels * k * k
    depths = np.array(
        [1] * k + [2 + level for level in range(num_levels) for _ in range(k * k)], dtype=np.int32
    )
    parents = np.full((B, C), -1, dtype=np.int32)
    probs = rng.choice([0.05, 0.3, 0.6, 1.0], size=(B, C))
    for level in range(num_levels):
        start = 0 if level == 0 else k + (level - 1) * k * k
        for b in range(B):
            frontier = rng.choice(np.arange(start, k + level * k * k), k, replace=False)
            parents[b, k + level * k * k : k + (level + 1) * k * k] = np.repeat(frontier, k)
        new = slice(k + level * k * k, k + (level + 1) * k * k)
        probs[:, new] *= np.take_along_axis(probs, parents[:, new].astype(np.int64), 1)
    return probs, parents, depths


def random_trees(rng: np.random.Generator, B: int, k: int, num_levels: int) -> Proposals:
    """Trees whose tokens are few, so that the same token stands in several places, but once among
    the children of a node.
    """
    _, parents, depths = forest(rng, B, k, num_levels)
    conditional = rng.uniform(0.001, 0.99, parents.shape)
    scores = np.log(along_paths(conditional, above_of(parents), int(depths.max()))).astype(
        np.float32
    )
    tokens = [rng.permutation(2 * k)[:k] for _ in range(parents.size // k)]
    return Proposals(np.concatenate(tokens).reshape(parents.shape), scores, parents, depths)


def above_of(parents: np.ndarray) -> np.ndarray:
    """`Calibration.above`."""
    B, C = parents.shape
    return np.where(parents < 0, C, parents) + (C + 1) * np.arange(B)[:, None]


def costs(rng: np.random.Generator, num_nodes: int) -> np.ndarray:
    return 1.0 + np.cumsum(rng.choice([0.0, 0.02, 0.3], size=num_nodes + 1))


def choose_plainly(
    path_probs: Sequence[Sequence[float]],
    ms_of_nodes: Sequence[float],
    num_tokens: int,
    fixed_ms: float,
    max_nodes: int,
    rate: float,
) -> tuple[set[tuple[int, int]], float, float]:
    """The definition of `choose`: the kept (request, candidate), expected tokens, predicted ms."""
    ranked: list[tuple[float, int, int, int]] = []
    for b, row in enumerate(path_probs):
        best = sorted(range(len(row)), key=lambda c: (-row[c], c))[:max_nodes]
        ranked += [(-row[c], b, rank, c) for rank, c in enumerate(best)]
    ranked.sort()
    tokens, ms = float(num_tokens), ms_of_nodes[0] + fixed_ms
    best_n, best_tokens, best_ms = 0, tokens, ms
    for n, (negative, *_) in enumerate(ranked[: len(ms_of_nodes) - 1], start=1):
        tokens, ms = tokens - negative, ms_of_nodes[n] + fixed_ms
        if tokens - rate * ms > best_tokens - rate * best_ms:
            best_n, best_tokens, best_ms = n, tokens, ms
    return {(b, c) for _, b, _, c in ranked[:best_n]}, best_tokens, best_ms


@example(seed=12974, B=5, k=3, num_levels=0, max_nodes=2, rate=2.0)  # two trees of equal worth
@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 12),
    st.sampled_from([0.2, 0.5, 2.0]),
)
def test_fast_and_plain_agree_and_the_tree_is_connected(seed, B, k, num_levels, max_nodes, rate):
    rng = np.random.default_rng(seed)
    probs, parents, _ = forest(rng, B, k, num_levels)
    ms = costs(rng, int(rng.integers(0, 40)))
    num_tokens = B + int(rng.integers(0, 3))
    choice = choose(probs, ms, num_tokens, 0.3, max_nodes, rate)
    kept, tokens, predicted_ms = choose_plainly(
        probs.tolist(), ms.tolist(), num_tokens, 0.3, max_nodes, rate
    )
    assert {(int(b), int(c)) for b, c in zip(*choice.kept.nonzero(), strict=True)} == kept
    assert (choice.num_nodes, choice.expected_tokens) == (len(kept), pytest.approx(tokens))
    assert choice.predicted_ms == pytest.approx(predicted_ms)
    assert choice.kept.sum(1).max() <= max_nodes
    assert all(parents[b, c] < 0 or (int(b), int(parents[b, c])) in kept for b, c in kept)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 2), st.sampled_from([0.3, 0.7]))
def test_no_other_connected_tree_is_worth_more(seed, B, rate):
    rng = np.random.default_rng(seed)
    probs, parents, _ = forest(rng, B, 2, 1 if B == 2 else 2)  # 6 candidates each, or 10
    ms = costs(rng, probs.size)

    def worth(tokens: float, cost: float) -> float:
        return tokens - rate * cost

    choice = choose(probs, ms, B, 0.2, MAX_NODES, rate)
    best = -np.inf
    for bits in product([False, True], repeat=probs.size):
        kept = np.array(bits).reshape(probs.shape)
        above = np.take_along_axis(kept, np.maximum(parents, 0).astype(np.int64), 1) | (parents < 0)
        if (kept <= above).all():
            best = max(best, worth(B + probs[kept].sum(), ms[kept.sum()] + 0.2))
    assert worth(choice.expected_tokens, choice.predicted_ms) == pytest.approx(best)


def test_nothing_to_choose_from():
    assert choose(np.zeros((2, 0)), np.ones(1), 2, 0.0, MAX_NODES, 1.0).kept.shape == (2, 0)


def test_fixed_size_keeps_the_best_of_each_request():
    scores = np.log(np.array([[0.5, 0.3, 0.5, 0.2], [0.1, 0.2, 0.05, 0.2]]))
    assert most_probable(scores, 2).tolist() == [
        [True, False, True, False],
        [False, True, False, True],
    ]


def test_a_level_grows_where_paths_are_worth_more_than_a_node():
    mediocre, good = np.log(np.full((4, 1), 0.3)), np.log(np.array([[0.9], [0.1], [0.1], [0.1]]))
    for unworthy, expected in ((0.0, (True, True)), (0.25, (False, True)), (0.95, (False, False))):
        thresholds = [0.0, 0.5, unworthy]
        assert (goes_on(mediocre, thresholds, 1), goes_on(good, thresholds, 1)) == expected
        assert goes_on(mediocre, thresholds, 0), "a threshold of 0 is always reached"
