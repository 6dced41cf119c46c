"""Foretold speed: costs between loads, tau into TPOT and tokens per second, steps by load; tables
that are refused; the card and the files of an export with a cost table.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu import foretold
from eyas.artifact import Artifact
from eyas.card import CardTau
from eyas.errors import ConfigError, CorruptError, MismatchError, MissingInputError
from eyas.export.export import ExportConfig, export
from eyas.export.speed import (
    DraftSize,
    EngineCosts,
    Foretold,
    cost_table,
    foretell,
    read_costs,
    settings_of,
    speed_of,
    steps_by_load,
)
from tests.test_cli import run_eyas
from tests.test_export import measured, trained
from tests.tiny import tiny_target

MACHINE = {"engine": "vLLM", "version": "0.32", "card": "H200", "target": "8B", "dtype": "bfloat16"}
CHAIN, LONG, TREE = (2, 1, 3), (4, 1, 5), (5, 4, 16)


def row(load: int, tpot_ms: float, arm: tuple[int, int, int] | None = None, **other) -> dict:
    """A measured row; each token waits 1 ms beside its TPOT."""
    sizes = arm and dict(zip(("steps", "topk", "verify"), arm, strict=True))
    tokens = 1000 * load / (tpot_ms + 1)
    figures = {"tpot_ms": tpot_ms, "ttft_ms": 50.0, "output_tokens_per_s": tokens}
    return {**MACHINE, "load": load, "arm": sizes, "tau": 2.0 if arm else None, **figures, **other}


def table(*rows: dict) -> EngineCosts:
    return EngineCosts.model_validate(cost_table(rows))


def figure(speculation: str, tau: float, *acceptance: float) -> CardTau:
    return CardTau(speculation, 0.0, tau, (tau, tau), 9, 99, acceptance)


FIGURES = [figure("fixed(4,1,5)", 2.875, 0.75, 0.75, 0.75, 0.75), figure("fixed(5,4,16)", 3.5)]
# plain decoding gets dearer slowly, a round fast
USUAL = [
    *(row(load, ms) for load, ms in ((1, 10), (4, 11), (16, 14))),
    *(row(load, ms, CHAIN) for load, ms in ((1, 6), (4, 7), (16, 21))),
    *(row(load, ms, LONG) for load, ms in ((1, 7), (4, 12), (16, 40))),
]


def test_tpot_is_a_rounds_cost_over_tau_and_throughput_has_the_same_wait():
    """A round of 14 ms, measured at tau 2; the wait of 1 ms is the table's, whatever tau is."""
    found = foretell(table(*USUAL, row(1, 8, TREE)), FIGURES, 1)
    tau = 2.2  # the long chain, cut: 1 + 1.875 (.75 + .75 ** 2) / (.75 + ... + .75 ** 4)
    assert [one.arm and str(one.arm) for one in found] == [
        None, "fixed(2,1,3)", "fixed(4,1,5)", "fixed(5,4,16)"
    ]  # fmt: skip
    plain, cut, whole, tree = found
    assert plain == Foretold(1, None, 1.0, 10, pytest.approx(1000 / 11), 1)
    assert (cut.tau, cut.tpot_ms) == (pytest.approx(tau), pytest.approx(12 / tau))
    assert whole.tpot_ms == pytest.approx(14 / 2.875)
    assert whole.output_tokens_per_s == pytest.approx(1000 / (14 / 2.875 + 1))
    assert tree.times_plain == pytest.approx(10 / (16 / 3.5))


@pytest.mark.parametrize(
    ("load", "round_ms"), [(1, 12), (4, 14), (9, 28), (16, 42), (17, None), (0, None)]
)
def test_costs_between_loads_are_interpolated_over_its_root_and_nowhere_else(load, round_ms):
    found = table(*USUAL).costs(DraftSize(steps=2, topk=1, verify=3), load)
    assert found == (None if round_ms is None else (pytest.approx(round_ms), pytest.approx(1)))


@given(
    st.lists(st.floats(1, 1e3), min_size=3, max_size=3),
    st.sampled_from([(1, 4, 64), (2, 3, 5), (1, 2, 4)]),
)
def test_costs_that_rise_with_the_load_rise_between_loads(costs, loads):
    rows = table(*(row(load, ms) for load, ms in zip(loads, sorted(costs), strict=True)))
    found = [rows.costs(None, load) for load in range(loads[0], loads[-1] + 1)]
    ms = [one[0] for one in found if one]
    assert len(ms) == len(found)
    assert ms == pytest.approx(sorted(ms))
    assert (ms[0], ms[-1]) == pytest.approx((min(costs), max(costs)))


def test_repetitions_count_by_their_median():
    rows = [row(2, ms, LONG, tau=tau) for ms, tau in ((5, 2.0), (4, 2.5), (90, 2.0))]
    arm = DraftSize(steps=4, topk=1, verify=5)
    assert table(row(2, 9), *rows).costs(arm, 2) == (pytest.approx(10), pytest.approx(1))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # at 2 requests 12.83 / 2.2 and 18.14 / 2.875; plain decoding and 2 steps meet at 8.7
        (USUAL, [(1, 1, 4), (2, 8, 2), (9, 16, 0)]),
        ([row(2, 10), row(8, 10), row(2, 5, LONG), row(8, 5, LONG)], [(1, 8, 4)]),
        ([row(1, 1), row(8, 1), row(1, 5, LONG), row(8, 5, LONG)], [(1, 8, 0)]),
        # a tree is no number of steps; a chain that was measured at few loads is none elsewhere
        ([row(1, 10), row(2, 10), row(1, 1, TREE), row(2, 1, TREE)], [(1, 2, 0)]),
        ([row(1, 10), row(3, 10), row(1, 5, LONG), row(2, 5, LONG)], [(1, 2, 4), (3, 3, 0)]),
    ],
)
def test_the_fastest_chain_by_load(rows, expected):
    ranges = steps_by_load(table(*rows), FIGURES)
    assert ranges == expected
    # every load once, as both engines ask for
    assert [first for first, _, _ in ranges] == [1, *(last + 1 for _, last, _ in ranges[:-1])]


@pytest.mark.parametrize(
    ("engine", "ranges", "expected"),
    [
        ("vllm", [(1, 8, 3), (9, 64, 0)],
         {"num_speculative_tokens": 3,
          "num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 64, 0]]}),
        ("sglang", [(1, 8, 3), (9, 64, 0)],
         {"1": {"candidate_steps": [3]}, "9": {"candidate_steps": [0]}}),
        ("vllm", [(1, 64, 0)], {}),
        ("sglang", [(1, 64, 0)], {}),
        ("eyas", [(1, 64, 3)], {}),
    ],
)  # fmt: skip
def test_the_forms_of_engines(engine, ranges, expected):
    assert settings_of(engine, ranges) == expected


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([], MismatchError, "rows of 0 engines"),
        ([row(1, 5), row(1, 5, card="H100")], MismatchError, "rows of 2 engines"),
        ([row(1, 5, CHAIN)], CorruptError, "no row of plain decoding"),
        ([row(0, 5)], CorruptError, "rows.0.load: Input should be greater than or equal to 1"),
        ([row(1, 5), row(1, 0, CHAIN)], CorruptError, "rows.1.round_ms: .* greater than 0"),
        ([row(1, 5), row(1, 5, CHAIN, tau=0.5)], CorruptError, "rows.1.tau"),
        ([row(1, 5), row(1, 5, (0, 1, 2))], CorruptError, "rows.1.arm.steps"),
        ([row(1, 5), row(4, 5, CHAIN, tau=None)], CorruptError, "no tau or no TPOT of .* at 4 req"),
    ],
)
def test_rows_that_make_no_table(rows, error, message):
    with pytest.raises(error, match=message):
        cost_table(rows)


def test_the_loads_that_are_shown_and_an_evaluation_of_other_sizes():
    found = speed_of(table(*(row(n, 9) for n in (2, 12, 24)), row(2, 9, CHAIN)), FIGURES)
    assert [one["load"] for one in found["foretold"] if not one["arm"]] == [2, 4, 8, 12, 16, 24]
    with pytest.raises(MismatchError, match=re.escape("the costs are of: fixed(9,2,4)")):
        speed_of(table(row(1, 9), row(1, 9, (9, 2, 4))), FIGURES)


def test_a_benchmark_makes_a_table_and_judges_what_it_foretells():
    server = {"kind": "vllm", "version": "0.32", "model": "8B"}
    names = ["plain", "fixed(4,1,5) simulated", "fixed(4,1,5)"]
    results = [
        {"arm": name, "concurrency": load, "tau": tau, "throughput_tps": 90.0,
         "tpot_ms": {"median": ms}, "ttft_ms": {"median": 50.0}}
        for load, times in ((1, (10.0, 7.0, 14.0)), (4, (11.0, 4.0, 3.0)))
        for name, ms, tau in zip(names, times, (None, 2.0, 2.5), strict=True)
    ]  # fmt: skip
    summary = {"results": results, "servers": dict.fromkeys(names, server)}
    tree = {"speculation": "fixed(4,1,5)", "temperature": 0.0, "tau": 2.0, "rounds": 9,
            "tau_interval": [2, 2], "answers": 9, "num_draft_steps": 4,
            "acceptance_by_position": []}  # fmt: skip
    found = foretold.compared(foretold.rows_of(summary, "H100", "bfloat16"), {"trees": [tree]})
    assert [one["tpot_ms"] for one in found["foretold_and_measured"]] == [(7, 14), (4, 3)]
    assert found["median_off"]["tpot_ms"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert found["wrong_signs"] == 1
    assert (found["costs"]["engine"], found["costs"]["card"]) == ("vllm", "H100")


class TestExport:
    @pytest.fixture(scope="class")
    def made(self, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Artifact, Artifact]:
        folder = tmp_path_factory.mktemp("speed")
        target = tiny_target(folder / "target")
        head = trained(target, str(folder / "head"))
        chain = {
            "speculation": "fixed(4,1,5)", "temperature": 0.0, "tau": 2.875, "rounds": 99,
            "tau_interval": [2.8, 2.9], "answers": 9, "num_draft_steps": 4,
            "acceptance_by_position": [0.75] * 4,
        }  # fmt: skip
        evaluation = measured(head, folder / "eval", {"tau": 2.875, "trees": [chain]})
        return target, head, evaluation

    @pytest.mark.parametrize(
        ("engine", "written", "said"),
        [
            ("vLLM", False, '"num_speculative_tokens_per_batch_size": [[1, 1, 4], [2, 8, 2], ['),
            ("SGLang", True, "--speculative-num-steps 4 --speculative-eagle-topk 1 "),
            ("eyas", False, "4 for 1, 2 for 2 to 8, 0 for 9 to 16 requests."),
        ],
    )
    def test_what_is_foretold_is_on_the_card_and_beside_the_commands(
        self, made, tmp_path, engine, written, said
    ):
        target, head, evaluation = made
        costs = tmp_path / "costs.json"
        costs.write_text(json.dumps(cost_table({**one, "engine": engine} for one in USUAL)))
        words = ("-t", target, "-o", tmp_path / "out", "--evaluation", evaluation.url)
        done = run_eyas("export", head.url, *map(str, words), "--costs", str(costs))
        assert done.exit_code == 0, done.output
        card = (tmp_path / "out" / "README.md").read_text()
        assert f"In {engine} 0.32 on H200, with 8B in bfloat16" in card
        assert "|\n| 1 | plain | 1.00 | 10.00 | 91 | 1.00 |\n| 1 | chain 2, 1, 3 | 2.20 |" in card
        assert "| 1 | chain 4, 1, 5 | 2.88 | 4.87 | 170 | 2.05 |\n| 2 | plain |" in card
        assert "| 16 | plain | 1.00 | 14.00 | 1,067 | 1.00 |\n" in card
        assert said in card
        expected = speed_of(read_costs(str(costs)), FIGURES[:1])
        assert json.loads((tmp_path / "out" / "speed.json").read_text()) == json.loads(
            json.dumps(expected)
        )
        adaptive = tmp_path / "out" / "sglang" / "adaptive.json"
        assert adaptive.exists() == written == ("adaptive.json" in card)
        if written:
            assert json.loads(adaptive.read_text())["9"] == {"candidate_steps": [0]}

    def test_without_a_table_nothing_of_it_is_there(self, made, tmp_path):
        target, head, evaluation = made
        output = Artifact(str(tmp_path / "out"))
        manifest = export(ExportConfig(), str(target), head, output, evaluation=evaluation)
        assert "oretold" not in (tmp_path / "out" / "README.md").read_text()
        assert not {"speed.json", "sglang/adaptive.json"} & manifest.files.keys()
        assert "costs" not in json.dumps(manifest.config)

    @pytest.mark.parametrize(
        ("content", "evaluated", "error", "message"),
        [
            (None, True, MissingInputError, "no file at"),
            ("[1", True, CorruptError, "costs.json: : Invalid JSON"),
            (json.dumps(cost_table(USUAL)), False, ConfigError, "without an evaluation"),
            (json.dumps(cost_table([row(1, 9), row(1, 9, TREE)])), True, MismatchError, "no tau"),
        ],
    )
    def test_a_table_that_cannot_be_used_takes_no_folder(
        self, made, tmp_path, content, evaluated, error, message
    ):
        target, head, evaluation = made
        costs = tmp_path / "costs.json"
        if content:
            costs.write_text(content)
        output = Artifact(str(tmp_path / "out"))
        config = ExportConfig(costs=str(costs))
        with pytest.raises(error, match=message):
            export(config, str(target), head, output, evaluation=evaluation if evaluated else None)
        assert not (tmp_path / "out").exists()
