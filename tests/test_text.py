"""Drafts from text: the index against a search by hand, and the merged trees."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.drafters import NOTHING, merged
from eyas.engine.text import (
    CHAIN,
    FIRST_ACCEPTANCE,
    NUM_KINDS,
    RecentAnswers,
    TextChain,
    TextIndex,
    kinds_of,
)
from eyas.model.rows import HEAD, TEXT, Proposals
from tests.test_tree import random_trees


def index_of(tokens: list[int]) -> TextIndex:
    index = TextIndex()
    index.extend(tokens)
    return index


def longest_match(tokens: list[int]) -> tuple[int, int]:
    best = (0, -1)
    for place in range(1, len(tokens)):
        length = 0
        while length < min(place, 16) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length:
            best = max(best, (length, place))
    return best[1], best[0]


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 40))
def test_the_match_is_the_longest_and_most_recent(tokens, cut):
    index = index_of(tokens[:cut])
    index.extend(tokens[cut:])
    place, length = index.match()
    expected = longest_match(tokens)
    # of many places of the same three tokens only the most recent are compared
    assert (place, length) == expected or (len(tokens) > 24 + 3 and length >= 3)
    assert tokens[place - length : place] == tokens[len(tokens) - length :] or not length


def test_large_ids_are_told_apart():
    tokens = [2**31 - 1, 5, 2**31 - 2, 5, 7, 2**31 - 1, 5]
    assert index_of(tokens).match() == (2, 2)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1, 2], list(range(3, 11))),
        ([1, 2, 9, 1, 2], [9, 1, 2, 9, 1, 2, 9, 1]),
        ([7, 7], [7] * CHAIN),
    ],
)
def test_the_chain_is_what_followed(tokens, expected):
    chain = index_of(tokens).chain()
    assert chain is not None
    assert chain.tokens == expected
    assert len(chain.kinds) == CHAIN


def test_no_match_no_chain():
    for tokens in ([], [1], [1, 2, 3]):
        assert index_of(tokens).chain() is None


def test_chains_of_recent_answers():
    recent = RecentAnswers()
    recent.add(None, [1, 2, 3, 4, 5, 6])
    recent.add(None, [9, 2, 3, 4, 7, 8])
    longer = recent.chain(None, [0, 1, 2, 3, 4])
    assert longer is not None
    assert longer.tokens == [5, 6, 9, 2, 3, 4, 7, 8]
    latest = recent.chain(None, [2, 3, 4])
    assert latest is not None
    assert latest.tokens == [7, 8]
    own = index_of([2, 3, 4, 7, 2, 3, 4]).chain()
    assert own is not None
    assert not set(own.kinds) & set(latest.kinds)  # counted apart
    assert max(latest.kinds) < NUM_KINDS
    for known in ([], [3, 4], [4, 3, 2]):
        assert recent.chain(None, known) is None


def test_salts_separate_recent_answers():
    recent = RecentAnswers()
    recent.add("a", [1, 2, 3, 4])
    recent.add(None, [1, 2, 3, 5])
    assert recent.chain("b", [1, 2, 3]) is None
    for salt, expected in (("a", [4]), (None, [5])):
        chain = recent.chain(salt, [1, 2, 3])
        assert chain is not None
        assert chain.tokens == expected


def test_recent_answers_are_bounded():
    recent = RecentAnswers(most_tokens=40)
    for first in range(0, 100, 10):
        recent.add("a", list(range(first, first + 10)))
        assert recent.num_tokens <= 40
    assert recent.chain("a", [1, 2, 3]) is None
    for first in (80, 90):
        assert recent.chain("a", [first, first + 1, first + 2]) is not None
    recent.add("b", list(range(500)))  # alone more than there is room for: its end is kept
    assert recent.num_tokens <= 40
    assert recent.chain("b", [490, 491, 492]) is not None
    recent.add("c", list(range(20)))
    recent.add("d", list(range(20)))
    assert recent.chain("a", [90, 91, 92]) is None  # added to longest ago
    assert recent.num_tokens <= 40
    for number in range(1000):  # nor do salts without end cost memory
        recent.add(str(number), [number])
    assert recent.chain("0", [1, 2, 3]) is None
    assert recent.num_tokens <= 40


def test_kinds_know_longer_matches_and_first_tokens():
    kinds = [kinds_of(length, CHAIN) for length in range(1, 17)]
    assert {kind % 2 for row in kinds for kind in row[:1]} == {0}
    assert {kind % 2 for row in kinds for kind in row[1:]} == {1}
    classes = [[kind // 2 for kind in row] for row in kinds]
    assert all(row == sorted(row) for row in classes)
    assert max(map(max, kinds)) < NUM_KINDS == 2 * len(FIRST_ACCEPTANCE)
    assert classes[0][0] == 0


chains_of_few_tokens = st.lists(
    st.lists(st.integers(0, 5), min_size=1, max_size=6).map(
        lambda tokens: TextChain(tokens, kinds_of(2, len(tokens)))
    ),
    max_size=2,
)


def is_there(proposals: Proposals, b: int) -> np.ndarray:
    return proposals.proposed_by(HEAD)[b] | proposals.proposed_by(TEXT)[b]


def children(proposals: Proposals, b: int, parent: int) -> dict[int, int]:
    found = {}
    for c in ((proposals.parents[b] == parent) & is_there(proposals, b)).nonzero()[0].tolist():
        assert int(proposals.tokens[b, c]) not in found, "a token twice behind one node"
        found[int(proposals.tokens[b, c])] = c
    return found


def paths_in(proposals: Proposals, b: int) -> dict[tuple[int, ...], int]:
    found: dict[tuple[int, ...], int] = {}
    for c, parent in enumerate(proposals.parents[b].tolist()):
        if is_there(proposals, b)[c]:
            assert -1 <= parent < c, "a parent comes first"
            above = next(path for path, at in found.items() if at == parent) if parent >= 0 else ()
            assert proposals.depths[c] == len(above) + 1
            found[(*above, int(proposals.tokens[b, c]))] = c
    return found


@settings(max_examples=150)
@given(
    st.integers(0, 10**6),
    st.lists(st.tuples(st.booleans(), chains_of_few_tokens), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_merged_trees(seed, asked, k, num_levels):
    """asked: of each line, whether the head drafts for it, and text's chains."""
    rng = np.random.default_rng(seed)
    drafts = [line for line, (has_head, _) in enumerate(asked) if has_head]
    head = random_trees(rng, len(drafts), k, num_levels) if drafts else NOTHING
    lines = [drafts.index(line) if line in drafts else -1 for line in range(len(asked))]
    chains = [own for _, own in asked]
    both = merged(head, lines, chains)
    assert both.sources is not None
    for b, (line, own) in enumerate(zip(lines, chains, strict=True)):
        for parent in range(-1, both.tokens.shape[1]):
            children(both, b, parent)
        found = paths_in(both, b)
        of_head = paths_in(head, line) if line >= 0 else {}
        of_text = {
            tuple(one.tokens[: depth + 1]) for one in own for depth in range(len(one.tokens))
        }
        assert set(found) == set(of_head) | of_text
        for path, c in found.items():
            assert both.sources[b, c] == HEAD * (path in of_head) + TEXT * (path in of_text)
            if path in of_head:
                assert both.scores[b, c] == head.scores[line, of_head[path]]
        assert not np.delete(both.sources[b], sorted(found.values())).any()


def merged_trees(rng: np.random.Generator, B: int) -> Proposals:
    k, levels = int(rng.integers(1, 4)), int(rng.integers(0, 4))
    which = [b for b in range(B) if rng.uniform() < 0.7]
    head = random_trees(rng, len(which), k, levels) if which else NOTHING
    chains = []
    for _ in range(B):
        rows = [rng.integers(0, 2 * k, rng.integers(1, 9)).tolist() for _ in range(rng.integers(3))]
        chains.append([TextChain(row, kinds_of(int(rng.integers(1, 9)), len(row))) for row in rows])
    return merged(head, [which.index(b) if b in which else -1 for b in range(B)], chains)
