"""Eval through the engine: tau of prompts, recordings against the engine's own rounds, predictions
against a count by hand.
"""

from __future__ import annotations

import json

import pytest
import torch

from eyas.artifact import Artifact
from eyas.chat import Chat
from eyas.engine.costs import CostTable, Curve
from eyas.engine.tree import Speculation, Tree
from eyas.errors import ConfigError, CorruptError, EmptyInputError, EyasError, MissingInputError
from eyas.evaluate.decoding import decode, stretch
from eyas.evaluate.evaluate import EvalConfig, HeldOut, evaluate
from eyas.evaluate.overheads import Overheads, overheads
from eyas.evaluate.prediction import (
    PredictConfig,
    blocks,
    compared,
    costs_of,
    fixed,
    held_to_tau,
    machine_of,
    predict,
)
from eyas.evaluate.questions import Asked, questions_identity
from eyas.evaluate.recording import record
from eyas.evaluate.replay import Pace, Theatre, walked
from eyas.log import quiet
from tests.tiny import tiny_target
from tests.tiny_questions import SOURCES, asked, learned_head, learned_models, questions

COUNT = 12


def straight(first: float, slope: float) -> Curve:
    return Curve([1, 101], [first, first + 100 * slope])


# ms of target, decode, step, extend, enter; nothing of it is measured
MADE_UP = CostTable(
    straight(10, 1), straight(10, 1.5), straight(2, 0.1), straight(3, 0.2), straight(1, 0.05)
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=8)
    return folder, learned_head(folder, COUNT, tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def models(folders):
    return learned_models(*folders)


@pytest.fixture(scope="module")
def costs_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    path.write_text(json.dumps(MADE_UP.to_json()))
    return path


@pytest.fixture(scope="module")
def evaluated(folders, costs_file, tmp_path_factory):
    """eval.json of two trees at two temperatures, with a prediction from made-up costs, and its
    config.
    """
    folder, head = folders
    config = EvalConfig(
        trees=("fixed(4,2,6)", "fixed(3,1,4)"),
        max_tokens=24,
        models={"max_batch": 4, "max_length": 200},
        predict={"concurrencies": (1, 3), "costs": str(costs_file), "chunk_ms": 0, "arrival_ms": 1},
    )
    output = Artifact(str(tmp_path_factory.mktemp("eval")))
    manifest = evaluate(config, str(folder), head.url, HeldOut(questions=questions(COUNT)), output)
    again = evaluate(
        config, str(folder), head.url, HeldOut(questions=questions(COUNT)), Artifact(output.url)
    )
    assert again == manifest, "done already"
    return output.read_json("eval.json"), manifest


def test_says_of_each_tree_and_temperature_what_the_engine_does(evaluated, models, folders):
    result, manifest = evaluated
    assert [(one["speculation"], one["temperature"]) for one in result["trees"]] == [
        ("fixed(4,2,6)", 0.0),
        ("fixed(3,1,4)", 0.0),
        ("fixed(4,2,6)", 1.0),
        ("fixed(3,1,4)", 1.0),
    ]
    for one in result["trees"]:
        requests = asked(folders[0], COUNT).requests(24, one["temperature"], 0)
        results = list(models.engine(one["speculation"]).run(requests))
        hist = [
            sum(counts) for counts in zip(*(served.accept_hist for served in results), strict=True)
        ]
        assert one["accept_hist"] == hist
        assert one["tokens"] == sum(len(served.token_ids) for served in results)
        assert one["tau"] == pytest.approx(
            sum((a + 1) * count for a, count in enumerate(hist)) / sum(hist)
        )
        low, high = one["tau_interval"]
        assert 1 <= low <= one["tau"] <= high
        assert (
            one["tau"]
            <= one["tau_ceiling"]
            <= one["tau_ceiling_full_vocabulary"]
            <= one["num_draft_steps"] + 1
        )
        assert set(one["by_source"]) == set(SOURCES)
        assert (
            sum(part["rounds"] for part in one["by_source"].values()) == one["rounds"] == sum(hist)
        )
        assert (
            sum(part["answers"] for part in one["by_language"].values()) == one["answers"] == COUNT
        )
        assert one["by_language"]["de"]["answers"] == COUNT // 3
    first = result["trees"][0]
    assert sum(first["accept_hist"][1:]) > 10, "a head that accepts nothing would prove nothing"
    assert {name: result[name] for name in ("tau", "accept_hist", "rounds")} == {
        name: first[name] for name in ("tau", "accept_hist", "rounds")
    }
    assert manifest.facts["tau"] == result["tau"]
    assert "temperature 0" in result["assumes"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("sizes", ["fixed(5,2,8)", "fixed(2,2,4)", "fixed(5,2,3)"])
def test_a_recording_replays_what_the_engine_does_with_any_tree(
    models, folders, temperature, sizes
):
    """One recording of five levels: the same rounds as the engine's, answer by answer, for each
    depth and size.
    """
    requests = asked(folders[0], COUNT).requests(24, temperature, 7)
    recording = record(models, (5, 2), requests, quiet)
    served = decode(models.engine(sizes), requests, quiet)
    for request, answer in zip(requests, served, strict=True):
        assert recording.answers[request.id].token_ids == answer.token_ids
    speculation = Speculation.parse(sizes)
    theatre = Theatre(models, recording, speculation, Pace(MADE_UP, Overheads()), 3)
    played = theatre.ask("head", [request.id for request in requests], 3, True)
    assert [played[request.id].accepted for request in requests] == [
        answer.accepted for answer in served
    ]


def test_plain_answers_take_what_the_costs_say(models, folders):
    """One client: a token is a forward of a row; more: what the prompts of others take comes on
    top.
    """
    requests = asked(folders[0], COUNT).requests(24, 0.0, 0)
    recording = record(models, (4, 2), requests, quiet)
    overhead = Overheads(prefill=2.0, loads=[1, 4], plain=[1.5, 2.5], tree=[1.0, 1.0])
    pace = Pace(MADE_UP, overhead, chunk_ms=0.5, arrival_ms=5.0)
    speculation = Speculation.parse("fixed(4,2,6)")
    names = [request.id for request in requests]
    alone = Theatre(models, recording, speculation, pace, 2).ask("plain", names, 1, False)
    assert {round(one.tpot_ms, 9) for one in alone.values() if one.tpot_ms} == {10 * 1.5 + 0.5}
    two = Theatre(models, recording, speculation, pace, 2).ask("plain", names, 2, False)
    together_ms = (MADE_UP.forward(2, 2)) * 2.0 + 2 * 0.5
    slowest = max(one.tpot_ms for one in two.values() if one.tpot_ms)
    assert slowest > 10 * 1.5 + 0.5
    assert slowest > together_ms, "a prompt of the other client's came in between"


def test_no_round_with_trees_is_shorter_than_a_plain_one():
    flattering = Pace(MADE_UP, Overheads(tree=[0.01], plain=[1.0]))
    assert flattering.tree_ms(2, 50.0) == flattering.plain_ms(2) == MADE_UP.forward(2, 2)
    assert Pace(MADE_UP, Overheads()).tree_ms(2, 50.0) == 50.0


def test_predictions_have_the_measured_tau_and_the_sizes_rounds_cost(evaluated):
    result, _ = evaluated
    rows = result["predicted"]["by_concurrency"]
    assert [(row["concurrency"], row["speculation"]) for row in rows] == [
        (concurrency, speculation)
        for concurrency in (1, 3)
        for speculation in ("fixed(3,1,4)", "fixed(4,2,6)", "auto(6,3,12)")
    ]
    taus = {one["speculation"]: one["tau"] for one in result["trees"] if one["temperature"] == 0}
    for row in rows:
        assert ("withheld" in row) == (row["speedup"] is None)
        assert row["speedup"] in (None, pytest.approx(row["tpot_ms_plain"] / row["tpot_ms"]))
        if row["speculation"] in taus:
            assert row["tau"] == pytest.approx(taus[row["speculation"]]), (
                "a fixed tree accepts the same at any load"
            )
            assert row["round_cost"] > 1
    assert all(
        row["tpot_ms_plain"] == pytest.approx(10.0) for row in rows if row["concurrency"] == 1
    )
    assert CostTable.from_json(result["predicted"]["costs"]).to_json() == MADE_UP.to_json()
    assert result["predicted"]["machine"] == {}, "the made-up costs are of no machine"
    assert result["dtype"] == "float32"


def test_auto_is_never_much_slower_than_plain_and_takes_what_pays(models, folders):
    """Where rows cost nothing all is drafted, where they are dear nothing is."""
    requests = asked(folders[0], COUNT).requests(24, 0.0, 0)
    names = [request.id for request in requests] * 4
    recording = record(models, (4, 2), requests, quiet)
    free = CostTable(
        straight(10, 0.0), straight(10, 0.0), straight(0.1, 0), straight(0.1, 0), straight(0.0, 0)
    )
    dear = CostTable(
        straight(10, 10.0), straight(10, 10.0), straight(9, 1), straight(9, 1), straight(1, 1)
    )
    tpot_ms = {}
    for name, costs in (("free", free), ("dear", dear)):
        theatre = Theatre(
            models, recording, Speculation.parse("auto(4,2,6)"), Pace(costs, Overheads()), 2
        )
        last = [theatre.ask(f"{turn}", names[:COUNT], 1, True) for turn in range(8)][-1]
        times = [one.tpot_ms for one in last.values() if one.tpot_ms]
        tpot_ms[name] = sum(times) / len(times)
    assert tpot_ms["free"] < 0.95 * 10
    assert 10 <= tpot_ms["dear"] < 1.1 * 10


def test_the_walk_ends_with_the_answer():
    tree = Tree([1, 5, 6, 7], [-1, 0, 1, 2], [0, 1, 2, 3], [1, 3, 7, 15])
    assert walked(tree, [5, 6, 9]) == [5, 6, 9]
    assert walked(tree, [5, 6]) == [5, 6]
    assert walked(tree, [5, 6, 7, 8]) == [5, 6, 7, 8]
    assert walked(Tree.of_root(1), [5, 6]) == [5]


def figures(**changes):
    known = {
        "concurrency": 1,
        "tau": 3.0,
        "speedup": 2.4,
        "round_cost": 1.0,
        "median_tokens_per_round": 2.5,
    }
    return {**known, **changes}


@pytest.mark.parametrize(
    "possible",
    [
        {},
        {"concurrency": 8, "speedup": 2.9},
        {"tau": None, "speedup": 1.0},
        {"tau": None, "speedup": 1.05, "concurrency": 4},
    ],
)
def test_a_speed_up_below_tau_is_told(possible):
    assert held_to_tau(figures(**possible)) == figures(**possible)


@pytest.mark.parametrize(
    "impossible",
    [
        {"speedup": 2.6},  # above the median answer's tokens a round
        {"speedup": 3.1},
        {"speedup": 1.9, "tau": None, "round_cost": None},
        {"speedup": 1.05, "tau": None, "round_cost": None},
        {"round_cost": 0.9},
        {"round_cost": 0.9, "concurrency": 4},
    ],
)
def test_what_the_clock_cannot_give_is_an_error(impossible):
    with pytest.raises(EyasError, match="cannot be") as found:
        held_to_tau(figures(**impossible))
    assert found.value.exit_code == 1


@pytest.mark.parametrize(
    ("above", "why"),
    [
        ({"tau": 2.0}, "with a tau of 2.00: half of the answers have 2.50 tokens a round or more"),
        ({"tau": 2.0, "concurrency": 8}, "with a tau of 2.00: clients waited unlike"),
        (
            {"tau": None, "concurrency": 8, "round_cost": None},
            "with no tau, nothing being drafted: clients waited unlike",
        ),
    ],
)
def test_no_speed_up_above_tau_is_told_and_its_row_says_why(above, why):
    held = held_to_tau(figures(**above))
    assert held["speedup"] is None
    assert held["withheld"].startswith("2.40 would be above what can be, ")
    assert why in held["withheld"]
    assert held.keys() - figures().keys() == {"withheld"}


def test_one_client_gains_its_tokens_per_round_over_the_cost_of_a_round(models, folders):
    requests = asked(folders[0], COUNT).requests(24, 0.0, 0)
    recording = record(models, (4, 2), requests, quiet)
    theatre = Theatre(
        models, recording, Speculation.parse("fixed(4,2,6)"), Pace(MADE_UP, Overheads()), 2
    )
    names = [request.id for request in requests]
    plain, head = theatre.ask("plain", names, 1, False), theatre.ask("head", names, 1, True)
    # 6 rows are judged; 3 levels of 2 rows are drafted behind the first; the entries are those of
    # the last round's tokens.
    least_ms = MADE_UP.forward(1, 6) + 3 * MADE_UP.step(2) + MADE_UP.extend(1)
    most_ms = least_ms - MADE_UP.extend(1) + MADE_UP.extend(5)
    assert least_ms <= 10 * theatre.round_cost() <= most_ms
    assert theatre.round_cost() is None
    for one in head.values():
        if one.tpot_ms is not None:
            assert least_ms <= one.tpot_ms * one.tokens_per_round <= most_ms
    found = compared(plain, head)
    assert found["tpot_ms_plain"] == pytest.approx(10)
    assert found["speedup"] < found["tau"]


def test_overheads_are_measured_at_loads_that_can_be_reached(models, folders):
    requests = asked(folders[0], 3).requests(24, 0.0, 0)
    found = overheads(models, MADE_UP, ["fixed(4,2,6)", "auto(4,2,6)"], requests, (1, 2, 64), 0.05)
    assert set(found) == {"fixed(4,2,6)", "auto(4,2,6)"}
    for one in found.values():
        assert one.loads == [1, 2]
        assert one.prefill > 0
        assert all(ratio > 0 for ratio in (*one.plain, *one.tree))
    mixed = Overheads(loads=[1, 4], plain=[1.0, 3.0], tree=[1.0, 1.0])
    assert [mixed.ratio("plain", load) for load in (1, 2, 4, 64)] == [1.0, 2.0, 3.0, 3.0]


def test_costs_of_this_machine_are_measured_and_told(models, folders, tmp_path, monkeypatch):
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path))
    requests = asked(folders[0], 6).requests(8, 0.0, 0)
    config = PredictConfig(concurrencies=(2,), speculations=(), overhead_s=0.02)
    told = predict(config, models, [Speculation.parse("fixed(3,1,4)")], requests, quiet)
    (kept,) = (tmp_path / "costs").glob("*.json")
    again = costs_of(PredictConfig(costs=str(kept)), models, Speculation.parse("fixed(3,1,4)"))
    assert again.to_json() == CostTable.from_json(told["costs"]).to_json()
    (row,) = told["by_concurrency"]
    assert row["tpot_ms"] > 0
    here = told["machine"]
    assert (here["threads"], here["dtype"], here["native"]) == (
        torch.get_num_threads(),
        "float32",
        models.target.is_native,
    )
    assert here["cores"] >= 1
    kept_of = machine_of(PredictConfig(costs=str(kept)), models)
    assert kept_of == {
        name: here[name] for name in ("processor", "threads", "dtype", "native", "torch")
    }
    elsewhere = tmp_path / "eval.json"
    elsewhere.write_text(
        json.dumps({"predicted": {**told, "machine": {**here, "processor": "another"}}})
    )
    assert machine_of(PredictConfig(costs=str(elsewhere)), models)["processor"] == "another"


def test_costs_of_another_machine_may_come_from_its_eval(evaluated, models, tmp_path):
    path = tmp_path / "eval.json"
    path.write_text(json.dumps(evaluated[0]))
    found = costs_of(PredictConfig(costs=str(path)), models, Speculation.parse("auto"))
    assert found.to_json() == MADE_UP.to_json()
    for content in ("{", "[]", "{}", '{"format": 1}', '{"predicted": {}}'):
        path.write_text(content)
        with pytest.raises(CorruptError, match="no cost table"):
            costs_of(PredictConfig(costs=str(path)), models, Speculation.parse("auto"))
    with pytest.raises(MissingInputError, match="no cost table"):
        costs_of(
            PredictConfig(costs=str(tmp_path / "absent.json")), models, Speculation.parse("auto")
        )


def test_blocks_are_a_few_prompts_a_client():
    names = [str(number) for number in range(10)]
    assert blocks(names, 1, 2) == [names[:2], names[2:4], names[4:6], names[6:8], names[8:]]
    assert blocks(names, 1, 4) == [names[:3], names[3:6], names[6:9], names[9:]]
    assert blocks(names, 4, 4) == [names[:8], names[8:]]
    assert fixed(Speculation.parse("auto(4,2,6)")) == "fixed(4,2,6)"


def test_prompts_that_cannot_be_asked_are_left_out(folders):
    chat, some = Chat(folders[0]), questions(4)
    lengths = [len(chat.prompt_ids(one.messages)) for one in some]
    kept = Asked.of(some, chat, min(lengths))
    assert kept.num_left_out == sum(length > min(lengths) for length in lengths) > 0
    with pytest.raises(EmptyInputError, match="none of the 4"):
        Asked.of(some, chat, 3)
    assert questions_identity(some) != questions_identity(some[::-1])


def test_bad_settings_are_refused(folders, tmp_path):
    folder, head = folders
    with pytest.raises(ConfigError, match="there is no tau"):
        EvalConfig(trees=("off",))
    with pytest.raises(ConfigError, match="there is no tau"):
        PredictConfig(speculations=("auto", "off"))
    with pytest.raises(ConfigError, match="concurrencies"):
        PredictConfig(concurrencies=(1, 0))
    with pytest.raises(ConfigError, match="speculation is"):
        EvalConfig(trees=("tall",))
    with pytest.raises(ConfigError, match="temperatures"):
        EvalConfig(temperatures=(-1.0,))
    with pytest.raises(EmptyInputError, match="nothing held out"):
        evaluate(EvalConfig(), str(folder), head.url, HeldOut(), Artifact(str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_a_bar_goes_on_from_part_to_part():
    seen = []
    bar = stretch(lambda done, total=None, note="": seen.append((done, total, note)), 10, 30)
    bar(1, 10, "a")
    bar(2)
    assert seen == [(11, 30, "a"), (12, 30, "")]
