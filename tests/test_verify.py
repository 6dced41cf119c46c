"""The walk down the tree: it emits the target's own draws, whatever the tree proposes."""

from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eyas.engine.tree import Tree, most_probable, tree_of
from eyas.engine.verify import accept
from eyas.model.rows import Proposals

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


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_emitted_tokens_are_the_draws_along_the_path(seed, size):
    """So they follow the target's distribution, whatever the tree proposes."""
    rng = np.random.default_rng(seed)
    tree, asked = random_tree(rng, size), []
    drawn = defaultdict(lambda: int(rng.integers(VOCAB)))  # by context

    def draw(node: int) -> int:
        asked.append(node)
        return drawn[context_of(tree, node)]

    path, emitted = accept(tree.tokens, tree.parents, draw)
    context = (tree.tokens[0],)
    for token in emitted:
        assert token == drawn[context]
        context = (*context, token)
    assert asked == [0, *path], "each node of the path is asked once, in order"
    assert [tree.tokens[node] for node in path] == emitted[:-1]
    assert emitted[-1] not in children(tree, asked[-1]), "the longest path in the tree"


def test_greedy_accepts_the_longest_agreeing_path():
    tree = Tree([9, 1, 2, 3, 4], [-1, 0, 0, 2, 3])
    choices = {0: 2, 2: 3, 3: 7}
    assert accept(tree.tokens, tree.parents, choices.__getitem__) == ([2, 3], [2, 3, 7])
    assert accept(tree.tokens, tree.parents, {0: 2, 2: None}.__getitem__) == ([], [2])
    assert accept([5], [-1], lambda node: 8) == ([], [8])


@given(st.data())
def test_the_kept_tree_hangs_together_and_holds_the_best_paths(data):
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
