"""The cost table: curves, measuring against a false clock, the file, and the correction while
running.
"""

import json
import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.engine import costs
from eyas.engine.costs import CostTable, Curve, kept_or_measured, measure, monotone, round_costs
from eyas.engine.policy import Correction

IDENTITY = {"target": "a", "head": "b", "tree_topk": 3, "processor": "cpu of a kind"}


class FalseClock:
    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, int]] = []

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, ms_of_rows):
        def run(rows: int) -> None:
            self.calls.append((name, rows))
            self.now += ms_of_rows(rows, len(self.calls)) / 1e3

        return run


def table(scale: float = 1.0) -> CostTable:
    return CostTable(
        Curve([1, 8], [scale, 2 * scale]),
        *[Curve([1, 8], [part * scale, 2 * part]) for part in (1.5, 0.1, 0.2, 0.3)],
    )


def test_curve_goes_through_its_points_and_straight_on():
    curve = Curve([1, 4, 8, 16], [1.0, 1.0, 2.0, 4.0])
    assert [curve(rows) for rows in (0, 1, 2, 4, 6, 8, 12, 16)] == [0, 1, 1, 1, 1.5, 2, 3, 4]
    # the slope over the last three points
    assert curve(16 + 120) == pytest.approx(4 + 120 * 3 / 12)
    assert curve(5000) == pytest.approx(4 + (5000 - 16) * 3 / 12)
    assert curve.span(1020, 10) == pytest.approx([curve(rows) for rows in range(1020, 1030)])
    assert curve.span(1, 5) == pytest.approx([curve(rows) for rows in range(1, 6)])


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=12))
def test_smoothing_never_falls_and_keeps_the_sum(values):
    smooth = monotone(values)
    assert len(smooth) == len(values)
    assert all(a <= b for a, b in pairwise(smooth))
    assert sum(smooth) == pytest.approx(sum(values))
    assert monotone(smooth) == smooth


@pytest.mark.parametrize("rows", [[1], [2, 1], [1, 1]])
def test_curve_refuses_points_out_of_order(rows):
    with pytest.raises(ValueError, match="ascending"):
        Curve(rows, [1.0] * len(rows))


def test_measure_finds_the_cost_under_noise():
    clock = FalseClock()

    def target(rows: int, call: int) -> float:
        # every seventh call is interrupted
        return (0.6 + 0.05 * rows) * (10 if call % 7 == 0 else 1)

    ms = {"decode": 0.05, "step": 0.07, "extend": 0.1, "enter": 0.05}
    works = [clock.work(name, lambda *_, ms=one: ms) for name, one in ms.items()]
    works = (clock.work("target", target), *works)
    measured = measure(works, points=[1, 2, 4, 8, 16], clock=clock)
    assert [measured.target(rows) for rows in (1, 4, 16)] == pytest.approx([0.65, 0.8, 1.4])
    assert measured.step(5) == pytest.approx(0.07)
    assert measured.extend(5) == pytest.approx(0.1)
    assert {name for name, _ in clock.calls[:5]} == {"target", *ms}  # in turn, not one by one


def test_measure_leaves_out_what_takes_too_long():
    clock = FalseClock()
    names = ("target", "decode", "step", "extend", "enter")
    works = [clock.work(name, lambda rows, _: 12.0 * rows) for name in names]
    measured = measure(works, points=[1, 2, 4, 8, 16, 32, 64], clock=clock)
    assert measured.target.rows == [1, 2, 4, 8]
    assert measured.target(64) == pytest.approx(12 * 64)
    assert clock.now < 12


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))
    return tmp_path / "costs"


def test_table_is_kept_and_read_back(cache):
    kept_or_measured(IDENTITY, table)
    again = kept_or_measured(IDENTITY, lambda: pytest.fail("measured twice"))
    assert again.to_json() == table().to_json()
    assert len([*cache.iterdir()]) == 1
    for name in IDENTITY:  # another identity has a table of its own
        other = kept_or_measured(IDENTITY | {name: "another"}, lambda: table(2.0))
        assert other.target(1) == 2.0


def test_a_table_is_of_all_that_costs_depend_on(monkeypatch):
    monkeypatch.setattr(costs, "kept_or_measured", lambda identity, *_: identity)
    for name in ("processor", "num_threads", "build"):
        monkeypatch.setattr(costs, name, lambda name=name: name)
    target = SimpleNamespace(fingerprint="weights", precision="packed")
    head = SimpleNamespace(config=SimpleNamespace(model_dump_json=lambda: "shape"))
    work = SimpleNamespace(target=target, draft=head, tree_topk=3, measured=None)
    assert round_costs(work) == {
        "target": "weights", "head": "shape", "tree_topk": 3, "dtype": "packed",
        "processor": "processor", "threads": "num_threads", "native": "build",
    }  # fmt: skip


def test_a_stale_table_is_measured_anew(cache):
    kept_or_measured(IDENTITY, table)
    asked, measured = [], []
    kept_or_measured(
        IDENTITY,
        lambda: measured.append(table()) or measured[0],
        lambda old: asked.append(old.target(1)) or True,
    )
    assert (len(measured), asked) == (1, [1.0])


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"format": 0}', '{"format": 1, "target": {"rows": [1], "ms": [1]}}'],
)
def test_a_broken_or_old_file_is_measured_anew(cache, content):
    kept_or_measured(IDENTITY, lambda: table(2.0))
    (path,) = cache.iterdir()
    path.write_text(content)
    assert kept_or_measured(IDENTITY, table).target(1) == 1.0
    assert json.loads(path.read_text())["identity"]["processor"] == "cpu of a kind"


def test_a_folder_that_cannot_be_written_is_no_error(cache):
    cache.write_text("")
    assert kept_or_measured(IDENTITY, table).target(1) == 1.0


def test_the_factor_of_drafting_rounds_is_learned_apart_from_the_machine():
    correction, rng = Correction(), np.random.default_rng(0)
    for _ in range(600):
        correction.observe(1, False, 1.0, 1.2 * math.exp(rng.normal(0, 0.05)))
        correction.observe(1, True, 2.0, 3.0 * math.exp(rng.normal(0, 0.05)))
    assert correction.factor(1) == pytest.approx(1.5 / 1.2, rel=0.05)
    assert correction.observe(1, False, 1.0, 1.2) == pytest.approx(1.2, rel=0.05)
    assert correction.observe(1, True, 1.0, 1.5) == pytest.approx(1.5, rel=0.05)
    assert correction.factor(32) == correction.factor(1), "a load never seen begins with it"


def test_a_cold_start_is_not_the_last_word():
    correction = Correction()
    for _ in range(20):
        correction.observe(1, False, 1.0, 0.8)
    for slowed in (3.0, 1.9, 1.1):
        correction.observe(1, True, 1.0, 0.8 * slowed)
        assert correction.factor(1) < 1.1, "no reason yet to stop"
    for _ in range(30):
        correction.observe(1, True, 1.0, 0.8)
    assert correction.factor(1) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("rests_with_trees", "ms"), [(False, 20.0), (True, 0.05)])
def test_after_a_long_rest_one_round_does_not_decide(rests_with_trees, ms):
    correction = Correction()
    for _ in range(20_000):
        correction.observe(1, rests_with_trees, 1.0, 1.0)
    correction.observe(1, not rests_with_trees, 1.0, ms)
    assert 1.0 < correction.factor(1) < 1.04


def test_a_slower_machine_is_no_reason_to_stop_drafting():
    correction = Correction()
    for drafted in (False, True) * 50:
        correction.observe(1, drafted, 1.0, 1.0)
    for _ in range(300):
        correction.observe(1, True, 1.0, 2.0)
    assert correction.observe(1, True, 1.0, 2.0) == pytest.approx(2.0, rel=0.02)
    assert correction.factor(1) < 1.15


def test_few_plain_rounds_show_that_trees_are_slower():
    correction, rng = Correction(), np.random.default_rng(0)
    for round_ in range(600):
        drafted = not correction.is_due(4, gain=1.02)
        ms = (1.15 if drafted else 1.0) * math.exp(rng.normal(0, 0.05))
        correction.observe(4, drafted, 1.0, ms)
        if round_ == 15:
            assert correction.factor(4) < 1.05, "nothing says yet whose part it is"
    assert correction.factor(4) == pytest.approx(1.15, rel=0.04)
    assert correction.observe(4, False, 1.0, 1.0) == pytest.approx(1.0, rel=0.04)


@pytest.mark.parametrize(("gain", "apart"), [(1.01, 16), (1.0999, 40), (1.9999, 400)])
def test_a_look_costs_a_quarter_of_a_percent_of_the_time(gain, apart):
    correction = Correction()
    for _ in range(apart - 1):
        correction.observe(1, True, 1.0, 1.0)
    assert not correction.is_due(1, gain)
    correction.observe(1, True, 1.0, 1.0)
    assert correction.is_due(1, gain)
    correction.observe(1, False, 1.0, 1.0)
    assert not correction.is_due(1, gain)


def test_a_faster_round_with_trees_is_a_faster_machine():
    correction = Correction()
    for _ in range(300):
        correction.observe(1, True, 1.0, 0.7)
    assert correction.factor(1) == 1.0
    assert correction.observe(1, False, 1.0, 0.7) == pytest.approx(0.7, rel=0.06)


def test_what_has_not_run_for_long_is_forgotten():
    correction = Correction()
    for drafted in (False, True) * 500:
        correction.observe(1, drafted, 1.0, 1.5 if drafted else 1.0)
    assert correction.factor(1) == pytest.approx(1.5, rel=0.1)
    for _ in range(2000):
        correction.observe(1, False, 1.0, 1.0)
    assert correction.factor(1) < 1.2


def test_one_pause_changes_little():
    correction = Correction()
    for _ in range(50):
        correction.observe(1, True, 1.0, 1.0)
    correction.observe(1, True, 1.0, 100.0)
    assert correction.observe(1, True, 1.0, 1.0) < 1.06
