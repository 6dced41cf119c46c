"""Calibration of acceptance: paths, what is judged, what is learned in how many rounds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.acceptance import Acceptance, along_paths, judge
from eyas.engine.drafters import NOTHING, merged
from eyas.engine.text import TextChain, kinds_of
from eyas.model.rows import Proposals
from tests.test_text import merged_trees
from tests.test_tree import above_of, random_trees


def chain(rng: np.random.Generator, B: int, depth: int) -> Proposals:
    conditional = rng.uniform(0.05, 0.99, size=(B, depth))
    parents = np.broadcast_to(np.arange(-1, depth - 1, dtype=np.int32), (B, depth))
    tokens = rng.integers(0, 100, size=(B, depth))
    scores = np.log(conditional).cumsum(1).astype(np.float32)
    return Proposals(tokens, scores, parents, np.arange(1, depth + 1, dtype=np.int32))


def emit(rng: np.random.Generator, proposals: Proposals, accepted: np.ndarray) -> list[list[int]]:
    """Tokens of chains of which row b's level d is accepted with probability accepted[b, d]."""
    rows = []
    for tokens, probs in zip(proposals.tokens.tolist(), accepted, strict=True):
        hits = rng.uniform(size=len(tokens)) < probs
        length = len(tokens) if hits.all() else int(hits.argmin())
        rows.append([*tokens[:length], 1000])
    return rows


def own(proposals: Proposals) -> np.ndarray:
    parents = np.maximum(proposals.parents, 0).astype(np.int64)
    above = np.take_along_axis(proposals.scores, parents, 1)
    return np.exp(proposals.scores - np.where(proposals.parents < 0, 0, above))


def conditional(acceptance: Acceptance, proposals: Proposals) -> np.ndarray:
    """Of chains."""
    paths = acceptance.calibrate(proposals).paths
    return paths / np.concatenate((np.ones((len(paths), 1)), paths[:, :-1]), axis=1)


def observe(acceptance: Acceptance, proposals: Proposals, emitted: list[list[int]]) -> list[int]:
    return acceptance.observe(proposals, acceptance.calibrate(proposals), emitted)


def test_a_path_is_the_product_of_its_steps():
    rng = np.random.default_rng(8)
    for depth in range(1, 12):
        proposals = chain(rng, 3, depth)
        steps = rng.uniform(0.1, 0.99, size=(3, depth))
        paths = along_paths(steps, above_of(proposals.parents), depth)
        assert paths == pytest.approx(steps.cumprod(1))
    parents = np.array([[-1, -1, 0, 0, 1, 1], [-1, -1, 1, 1, 0, 0]])
    steps = np.array([[0.6, 0.3, 0.5, 0.4, 0.7, 0.1]] * 2)
    expected = [
        [0.6, 0.3, 0.6 * 0.5, 0.6 * 0.4, 0.3 * 0.7, 0.3 * 0.1],
        [0.6, 0.3, 0.3 * 0.5, 0.3 * 0.4, 0.6 * 0.7, 0.6 * 0.1],
    ]
    paths = along_paths(steps, above_of(parents), 2)
    assert paths == pytest.approx(np.array(expected))


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 4), st.booleans())
def test_judged_are_the_children_of_what_was_drawn(seed, B, with_text):
    rng = np.random.default_rng(seed)
    for _ in range(10):
        trees = merged_trees if with_text else random_trees
        proposals = trees(rng, B) if with_text else trees(rng, B, 2, int(rng.integers(0, 3)))
        if not proposals.tokens.size:
            continue
        emitted = [rng.integers(0, 4, rng.integers(0, 6)).tolist() for _ in range(B)]
        judged, drawn, accepted = judge(proposals, above_of(proposals.parents), emitted)
        expected_judged, expected_drawn = set(), set()
        for b, row in enumerate(emitted):
            node = -1
            for token in row:
                is_child = proposals.parents[b] == node
                if proposals.sources is not None:
                    is_child &= proposals.sources[b] > 0
                children = np.flatnonzero(is_child).tolist()
                expected_judged |= {(b, c) for c in children}
                hits = [c for c in children if proposals.tokens[b, c] == token]
                if not hits:
                    break
                node = hits[0]
                expected_drawn.add((b, node))
        there = True if proposals.sources is None else proposals.sources > 0
        assert set(map(tuple, np.argwhere(judged & there).tolist())) == expected_judged
        assert set(map(tuple, np.argwhere(drawn).tolist())) == expected_drawn
        before_last = {(b, c) for b, c in expected_drawn if proposals.depths[c] < len(emitted[b])}
        assert set(map(tuple, np.argwhere(accepted).tolist())) == before_last


def test_before_any_round_the_draft_is_believed():
    acceptance, proposals = Acceptance(6), chain(np.random.default_rng(0), 200, 6)
    assert conditional(acceptance, proposals) == pytest.approx(np.minimum(own(proposals), 0.995))


def test_calibration_follows_a_draft_that_is_too_sure_the_more_the_deeper():
    rng, acceptance = np.random.default_rng(1), Acceptance(3)
    ratio = np.array([0.9, 0.7, 0.5])
    for _ in range(2000):
        proposals = chain(rng, 4, 3)
        observe(acceptance, proposals, emit(rng, proposals, ratio * own(proposals)))
    fresh = chain(rng, 500, 3)
    found = (conditional(acceptance, fresh) / own(fresh)).mean(0)
    assert found == pytest.approx(ratio, abs=0.05)


def test_a_few_rounds_already_help_and_nothing_is_certain():
    rng, never, always = np.random.default_rng(2), Acceptance(1), Acceptance(1)
    for _ in range(10):
        observe(never, chain(rng, 1, 1), [[1000]])
    for _ in range(2000):
        proposals = chain(rng, 1, 1)
        observe(always, proposals, [[int(proposals.tokens[0, 0]), 7]])
    fresh = chain(rng, 300, 1)
    assert conditional(never, fresh).mean() < 0.75 * own(fresh).mean()
    assert own(fresh).max() < conditional(always, fresh).max() < 1


def test_a_kind_of_text_that_comes_true_is_believed_and_says_nothing_of_the_head():
    acceptance = Acceptance(4)
    good, bad = [TextChain([1, 2, 3], kinds_of(2, 3))], [TextChain([4, 5], kinds_of(9, 2))]
    for _ in range(40):
        proposals = merged(NOTHING, [-1, -1], [good, bad])
        assert observe(acceptance, proposals, [[1, 2, 3, 9], [9]]) == [0, 3, 0]
    believed = acceptance.of_text()
    assert believed[good[0].kinds[0]] > 0.8
    assert believed[bad[0].kinds[0]] < 0.3
    assert not acceptance.drawn.any()


def test_a_token_that_head_and_text_propose_is_one_candidate_and_surer_than_either():
    scores = np.log(np.array([[0.5, 0.3]])).astype(np.float32)
    parents, depths = np.full((1, 2), -1, np.int32), np.ones(2, np.int32)
    head, acceptance = Proposals(np.array([[10, 11]]), scores, parents, depths), Acceptance(4)
    text = TextChain([11, 12], kinds_of(3, 2))
    both = merged(head, [0], [[text]])
    of_text = float(acceptance.of_text()[text.kinds[0]])
    paths = acceptance.calibrate(both).paths[0]
    assert paths[:2] == pytest.approx([0.5, 1 - (1 - 0.3) * (1 - of_text)])
    assert observe(acceptance, both, [[11, 12, 5]]) == [0, 1, 1]
    assert observe(acceptance, both, [[10, 5]]) == [1, 0, 0]
