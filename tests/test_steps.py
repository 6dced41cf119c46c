"""The policy's three operations: the native library computes what the plain version does, through
several rounds of random candidates, with text and without.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from eyas.engine.acceptance import HEAD, TEXT, RequestAcceptance
from eyas.engine.costs import CostTable, Curve
from eyas.engine.graft import graft
from eyas.engine.steps import NativeSteps, RoundPlan, Steps
from eyas.engine.text import TextChain, kinds_of
from eyas.engine.tree import Speculation
from eyas.model.library import unavailable
from eyas.model.rows import PAD, Proposals
from tests.test_acceptance import random_trees
from tests.test_text import NOTHING

needs_native = pytest.mark.skipif(unavailable() is not None, reason="no native path here")
K, MOST = 4, 8  # draft steps, tokens judged


def random_costs(rng: np.random.Generator) -> CostTable:
    """Forwards are dear, or some rows are free; drafting is cheap, or as dear."""
    rows = [1, 2, 4, 8, 16, 64, 1500]
    scales = (1.0, 1.0, rng.choice([0.02, 0.3]), 0.05, 0.01)
    return CostTable(
        *(Curve(rows, scale * (1 + rng.uniform(0, 0.6, 7).cumsum())) for scale in scales)
    )


def random_chains(rng: np.random.Generator, num_tokens: int) -> list[TextChain]:
    rows = [
        rng.integers(0, num_tokens, rng.integers(1, 9)).tolist() for _ in range(rng.integers(3))
    ]
    return [TextChain(row, kinds_of(int(rng.integers(1, 9)), len(row))) for row in rows]


class Side:
    """One of the two versions, with its own requests."""

    def __init__(self, steps: Steps, greedy: Sequence[bool]) -> None:
        self.steps = steps
        self.requests = [RequestAcceptance(flag) for flag in greedy]

    def learned(self) -> list[np.ndarray]:
        """All that rounds have taught."""
        counts, trees = self.steps.acceptance, self.steps.trees
        own = [[*one.information, *one.pull] for one in self.requests]
        arrays = [*counts.judged, *counts.drawn, counts.variance, trees.paths_WQRKN]
        return [*arrays, trees.brought, trees.grown_from, np.array(own)]


def drawn_down(rng: np.random.Generator, proposals: Proposals, line: int) -> list[int]:
    """The tokens of a random path of a line's tree, and one more of any kind."""
    tokens, node = [], -1
    while len(children := np.flatnonzero(proposals.parents[line] == node)) and rng.uniform() < 0.7:
        node = int(rng.choice(children))
        tokens.append(int(proposals.tokens[line, node]))
    return [*tokens, int(rng.integers(0, 7))]


def one_round(
    rng: np.random.Generator, sides: list[Side], k: int, chains: list[list[TextChain]]
) -> None:
    """Both plan, choose and learn; of a round in which nobody has a candidate only the plan."""
    S = len(sides[0].requests)
    pending = rng.choice([1, 2, 7, 300], S)
    B, has_head = S + int(rng.integers(0, 3)), bool(rng.uniform() < 0.9)
    factors = float(rng.uniform(0.9, 1.3)), float(rng.uniform(0.8, 1.2))
    plans = [RoundPlan(pending, B, np.zeros(S, dtype=bool)) for _ in sides]
    is_auto = sides[0].steps.speculation.mode == "auto"
    for side, plan in zip(sides, plans, strict=True):
        if is_auto:
            side.steps.plan(plan, side.requests, chains, factors, has_head)
        else:
            plan.drafting[:], plan.width, plan.thresholds = True, k, [0.0] * K
    plain, fast = plans
    assert plain.drafting.tolist() == fast.drafting.tolist()
    assert plain.kinds.tolist() == fast.kinds.tolist()
    assert plain.width == fast.width
    assert fast.rate == pytest.approx(plain.rate)
    assert fast.thresholds == pytest.approx(plain.thresholds)
    growing = np.flatnonzero(plain.drafting).tolist()
    levels = int(rng.integers(0, K))
    proposals = random_trees(rng, len(growing), k, levels) if growing else NOTHING
    lines = growing
    if any(chains):
        lines = [s for s in range(S) if s in growing or chains[s]]
        proposals = graft(
            proposals,
            [growing.index(s) if s in growing else -1 for s in lines],
            [chains[s] for s in lines],
        )
    if not lines:
        return
    kept = [
        side.steps.choose(plan, proposals, [side.requests[s] for s in lines])
        for side, plan in zip(sides, plans, strict=True)
    ]
    # two products of the same factors differ in the last bit, and either may be taken
    paths, (by_plain, by_fast) = plain.calibration.paths, kept
    assert_allclose(np.sort(paths[by_plain & ~by_fast]), np.sort(paths[by_fast & ~by_plain]), 1e-12)
    assert (plain.num_nodes, plain.depth) == (fast.num_nodes, fast.depth)
    assert fast.expected_tokens == pytest.approx(plain.expected_tokens)
    assert fast.predicted_ms == pytest.approx(plain.predicted_ms)
    assert np.array_equal(plain.calibration.cells, fast.calibration.cells)
    for name in ("conditional", "weighed", "paths"):
        found, expected = getattr(fast.calibration, name), getattr(plain.calibration, name)
        assert_allclose(found, expected, rtol=1e-9)
    parents = proposals.parents
    assert (paths[parents == PAD] == 0).all()
    above = np.where(parents < 0, 1.0, np.take_along_axis(paths, np.maximum(parents, 0), 1))
    assert (paths <= above).all()
    emitted = [drawn_down(rng, proposals, line) for line in range(len(lines))]
    by_source = [side.steps.learn(plan, emitted) for side, plan in zip(sides, plans, strict=True)]
    assert by_source[0] == by_source[1]
    for expected, found in zip(*(side.learned() for side in sides), strict=True):
        assert_allclose(found, expected, rtol=1e-7, atol=1e-12)
    assert np.array_equal(*(side.steps.trees.reached_WQR for side in sides))


@needs_native
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 2, 3, 5, 17]), st.integers(1, 3), st.booleans())
def test_the_library_plans_chooses_and_learns_the_same(seed: int, S: int, k: int, text: bool):
    rng = np.random.default_rng(seed)
    speculation, costs = Speculation("auto", K, k, MOST), random_costs(rng)
    greedy = rng.integers(0, 2, S).astype(bool).tolist()
    sides = [Side(steps(speculation, costs), greedy) for steps in (Steps, NativeSteps)]
    for _ in range(12):
        chains = [random_chains(rng, 2 * k) for _ in range(S)] if text else []
        one_round(rng, sides, k, chains)


@needs_native
@pytest.mark.parametrize("has_costs", [False, True])
def test_trees_of_fixed_size_too(has_costs: bool):
    rng = np.random.default_rng(0)
    costs = random_costs(rng) if has_costs else None
    speculation = Speculation("fixed", K, 2, MOST)
    sides = [Side(steps(speculation, costs), [True, False]) for steps in (Steps, NativeSteps)]
    for _ in range(12):
        one_round(rng, sides, 2, [])


@needs_native
def test_arrays_that_are_parts_of_larger_ones_are_read_whole():
    """A tree that was not drafted to the end."""
    rng = np.random.default_rng(1)
    whole, costs = random_trees(rng, 2, 2, 3), random_costs(rng)
    part = Proposals(
        whole.tokens[:, :6], whole.scores[:, :6], whole.parents[:, :6], whole.depths[:6]
    )
    kept = []
    for steps in (Steps, NativeSteps):
        side = Side(steps(Speculation("fixed", K, 2, MOST), costs), [True, True])
        plan = RoundPlan(np.ones(2, dtype=np.int64), 2, np.ones(2, dtype=bool), width=2)
        kept.append(side.steps.choose(plan, part, side.requests))
        side.steps.learn(plan, [[1, 2], [3]])
        assert side.requests[0].information[HEAD] > 0
        assert side.requests[0].information[TEXT] == 0
    assert np.array_equal(*kept)


@needs_native
@pytest.mark.parametrize("greedy", [False, True])
def test_counts_are_read_inside_their_table_whatever_the_scores(greedy: bool):
    """A NaN as an integer is the least one: a place far before the table."""
    scores = np.array([[np.nan, -1.0, np.inf, -np.inf, np.nan]], dtype=np.float32)
    parents = np.array([[-1, -1, 0, 1, 1]], dtype=np.int32)
    depths = np.array([1, 1, 2, 2, 2], dtype=np.int32)
    proposals = Proposals(np.arange(5)[None], scores, parents, depths)
    steps = NativeSteps(Speculation("auto", K, 2, MOST), random_costs(np.random.default_rng(0)))
    plan = RoundPlan(np.ones(1, dtype=np.int64), 1, np.ones(1, dtype=bool))
    steps.choose(plan, proposals, [RequestAcceptance(greedy)])
    assert plan.calibration is not None
    assert np.isfinite(plan.calibration.paths).all()
    assert (plan.calibration.cells >= 0).all()
