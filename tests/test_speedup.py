"""Speed-up by arithmetic: the curve, the bound by tau, and what a benchmark gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.engine.tree import Speculation
from eyas.errors import ConfigError, CorruptError, MissingInputError
from eyas.evaluate.speedup import (
    CostCurve,
    DraftCost,
    predicted_speedup,
    predictions,
    read_bench,
)
from eyas.evaluate.trees import weights_share
from tests.bench_rows import bench_output, row

CHAIN, TREE = Speculation.parse("fixed(4,1,5)"), Speculation.parse("fixed(6,3,12)")
CURVE = CostCurve.of({16: 40.0, 1: 10.0, 4: 16.0})


def test_a_forward_costs_a_straight_line_between_loads_and_nothing_is_extrapolated():
    assert [CURVE.at(rows) for rows in (1, 2, 4, 10, 16)] == [10, 12, 16, 28, 40]
    assert CURVE.at(17) is None
    assert CostCurve.of({2: 5.0, 4: 9.0}).at(1) is None


def test_pictured():
    """4 steps of a tenth of a forward and a forward of 5 rows, for 3 tokens."""
    chain = predicted_speedup(CURVE, DraftCost(0.1), CHAIN, 3.0, 1)
    assert chain["tpot_ms"] == pytest.approx((18 + 4 * 0.1 * 10) / 3)
    assert chain["speedup"] == pytest.approx(10 / chain["tpot_ms"])
    measured = predicted_speedup(CURVE, DraftCost(0.1, step_ms=2.0), CHAIN, 3.0, 1)
    assert measured["tpot_ms"] == pytest.approx((18 + 4 * 2.0) / 3)
    # a tree drafts tree_topk rows a step
    tree = predicted_speedup(CURVE, DraftCost(0.1), TREE, 3.0, 1)
    assert tree["tpot_ms"] == pytest.approx((32 + 6 * 0.1 * 14) / 3)


def test_a_load_that_was_not_measured_is_named():
    beyond = predicted_speedup(CURVE, DraftCost(0.1), TREE, 3.0, 4)
    assert beyond["speedup"] is beyond["tpot_ms"] is None
    assert beyond["missing"] == "TPOT at 48 requests (measured: 1 to 16)"
    rows = predictions(CURVE, DraftCost(0.1), [(CHAIN, 2.0), (Speculation.parse("auto"), 2.0)])
    assert [(one["concurrency"], one["speedup"] is None) for one in rows] == [
        (1, False),
        (4, True),
        (16, True),
    ]


@given(
    st.dictionaries(st.integers(1, 70), st.floats(0.1, 1e3), min_size=1, max_size=8),
    st.floats(0, 2),
    st.floats(1, 7),
    st.integers(1, 12),
)
def test_no_speed_up_exceeds_tau(points, share, tau, num_requests):
    """Whatever was measured, noise included."""
    for tree in (CHAIN, TREE):
        found = predicted_speedup(CostCurve.of(points), DraftCost(share), tree, tau, num_requests)
        assert (found["speedup"] is None) == ("missing" in found)
        if found["speedup"] is not None:
            assert 0 < found["speedup"] <= tau * (1 + 1e-9)


def test_a_draft_step_reads_its_weights_by_those_that_a_forward_reads():
    target = {
        "model.embed_tokens.weight": (100, 8),
        "model.layers.0.mlp.weight": (8, 50),
        "lm_head.weight": (100, 8),
    }
    head = {"d2t": (20,), "t2d": (100,), "midlayer.weight": (8, 25), "lm_head.weight": (20, 8)}
    assert weights_share(target, head) == (200 + 160) / (400 + 800)
    # tied embeddings are read as the lm_head; a head without one reads the target's
    tied = {name: shape for name, shape in target.items() if name != "lm_head.weight"}
    whole = {"midlayer.weight": (8, 25), "embed_tokens.weight": (100, 8)}
    assert weights_share(tied, whole) == (200 + 800) / (400 + 800)


def test_the_plain_arm_of_a_benchmark_is_the_curve(tmp_path):
    drafting = [row("eagle", str(number), tpot_ms=6.0, hist=[0, 2, 2]) for number in range(6)]
    plain = [row("plain", str(number), tpot_ms=10.0) for number in range(6)]
    plain += [row("plain", str(number), tpot_ms=12.0, concurrency=4) for number in range(6)]
    plain += [row("plain", "0", tokens=1, concurrency=8)]  # no second token: no TPOT
    curve, source = read_bench(bench_output(tmp_path / "both", [*drafting, *plain]))
    assert curve == CostCurve((1, 4), (10.0, 12.0))
    assert source["tpot_ms"] == {1: 10.0, 4: 12.0}
    assert (source["arm"], source["server"]) == ("plain", {"model": "a"})
    with pytest.raises(ConfigError, match="no arm that decodes without speculation"):
        read_bench(bench_output(tmp_path / "drafting", drafting))
    with pytest.raises(MissingInputError):
        read_bench(str(tmp_path / "absent"))
    (tmp_path / "both" / "summary.json").write_text("{}")
    with pytest.raises(CorruptError):
        read_bench(str(tmp_path / "both"))
