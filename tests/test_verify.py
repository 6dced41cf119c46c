"""The walk down the tree: its output distribution is the target's, whatever the tree proposes."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from eyas.engine.request import SamplingParams
from eyas.engine.tree import Tree, most_probable, tree_of
from eyas.engine.verify import accept
from eyas.model.rows import Proposals
from tests.test_sampling import adjusted_probs, draw

VOCAB = 5


def children(tree: Tree, node: int) -> set[int]:
    return {tree.tokens[child] for child in range(1, len(tree)) if tree.parents[child] == node}


def random_tree(rng: np.random.Generator, size: int) -> Tree:
    """Children of a node are distinct tokens, as a top-k gives them; otherwise anything goes."""
    tree = Tree.of_root(int(rng.integers(VOCAB)))
    while len(tree) < size:
        parent = int(rng.integers(len(tree)))
        taken = children(tree, parent)
        free = [token for token in range(VOCAB) if token not in taken]
        if free:
            tree.tokens.append(int(rng.choice(free)))
            tree.parents.append(parent)
    return tree


def context_of(tree: Tree, node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, tree.tokens[node])
        node = tree.parents[node]
    return tuple(path)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=3),
        SamplingParams(temperature=1.3, top_p=0.8),
    ],
    ids=["T=1", "top_k", "top_p"],
)
def test_emitted_sequences_follow_the_target(params):
    """Chi-square over all sequences of three tokens, with a new random tree for every round."""
    rng = np.random.default_rng(7)
    tables: dict[tuple[int, ...], np.ndarray] = {}

    def target_probs(context: tuple[int, ...]) -> np.ndarray:
        if context not in tables:
            seeded = np.random.default_rng(abs(hash(context)) % 2**32)
            logits = seeded.normal(size=VOCAB) * 1.5
            tables[context] = adjusted_probs(logits, params)
        return tables[context]

    draws, counts = 12_000, np.zeros(VOCAB**3)
    accepted = 0
    for _ in range(draws):
        sequence: tuple[int, ...] = (0,)
        while len(sequence) < 4:
            tree = random_tree(rng, int(rng.integers(1, 10)))
            tree.tokens[0] = sequence[-1]

            def drawn(node, prefix=sequence[:-1], tree=tree):
                probs = target_probs(prefix + context_of(tree, node))
                return draw(probs, int(rng.integers(2**63)))

            path, emitted = accept(tree.tokens, tree.parents, drawn)
            accepted += len(path)
            sequence += tuple(emitted)
        counts[np.ravel_multi_index(sequence[1:4], (VOCAB,) * 3)] += 1
    every = product(range(VOCAB), repeat=3)
    expected = np.array(
        [
            target_probs((0,))[a] * target_probs((0, a))[b] * target_probs((0, a, b))[c]
            for a, b, c in every
        ]
    )
    assert accepted > draws / 4, "else trees hardly matter"
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    assert chisquare(counts[possible], expected[possible] * draws).pvalue > 1e-4


def test_a_wrong_rule_would_fail_the_chi_square():
    """The same statistic finds a verifier that gives the tree a second chance."""
    rng = np.random.default_rng(3)
    probs = adjusted_probs(np.array([0.0, 0.5, 1.0, 0.2, 0.1]), SamplingParams(temperature=1.0))
    proposed = 2
    exact, biased = np.zeros(VOCAB), np.zeros(VOCAB)
    for _ in range(4000):
        token = draw(probs, int(rng.integers(2**63)))
        exact[token] += 1
        biased[token if token == proposed else draw(probs, int(rng.integers(2**63)))] += 1
    assert chisquare(exact, probs * 4000).pvalue > 1e-4
    assert chisquare(biased, probs * 4000).pvalue < 1e-6


def test_greedy_accepts_the_longest_agreeing_path():
    tree = Tree([9, 1, 2, 3, 4], [-1, 0, 0, 2, 3])
    choices = {0: 2, 2: 3, 3: 7}
    assert accept(tree.tokens, tree.parents, choices.__getitem__) == ([2, 3], [2, 3, 7])
    assert accept([5], [-1], lambda node: 8) == ([], [8])


@given(st.data())
def test_the_kept_tree_hangs_together_and_holds_the_best_paths(data):
    """Two levels of three: children never score above their parents, ties included."""
    log_prob = st.sampled_from([0.0, -0.5, -1.0, -2.5])
    first = data.draw(st.lists(log_prob, min_size=3, max_size=3))
    second = [first[place // 3] + data.draw(log_prob) for place in range(9)]
    scores = np.array([first + second], dtype=np.float32)
    parents = np.array([[-1] * 3 + [0] * 3 + [1] * 3 + [2] * 3], dtype=np.int32)
    tokens = np.arange(12, dtype=np.int64)[None]
    proposals = Proposals(tokens, scores, parents, np.array([1] * 3 + [2] * 9, dtype=np.int32))
    count = data.draw(st.integers(1, 12))
    kept = most_probable(scores, count)[0].nonzero()[0].tolist()
    assert sorted(scores[0][kept]) == sorted(scores[0])[-count:]
    tree = tree_of(99, proposals, 0, kept)
    assert (tree.tokens[0], tree.parents[0], len(tree)) == (99, -1, count + 1)
    assert all(0 <= parent < node for node, parent in enumerate(tree.parents) if node)
