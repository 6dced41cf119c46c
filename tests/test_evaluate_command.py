"""`eyas eval` as people call it: from prompts alone, on heads of any form, and one clear error for
bad input.
"""

from __future__ import annotations

import gzip
import json

import pytest

from eyas.artifact import Artifact
from eyas.cli.evaluation import foretold, in_one_line
from tests.test_cli import assert_one_clear_error, run_eyas
from tests.tiny import tiny_target
from tests.tiny_head import head_folder
from tests.tiny_questions import questions

SMALL = ("-s", "max_tokens=12", "-s", "models.max_length=200", "-s", "predict.concurrencies=[]")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=8)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """In a conversation's form, packed."""
    path = tmp_path_factory.mktemp("prompts") / "held_out.jsonl.gz"
    rows = [
        {"id": one.id, "source": one.source, "messages": list(one.messages)} for one in questions(9)
    ]
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def test_from_prompts_alone(target, prompts, tmp_path):
    head = head_folder(target, tmp_path / "head", form="sglang")
    options = (
        "--trees",
        "fixed(2,2,4) fixed(2,1,3)",
        "--temperatures",
        "0 0.7",
        "-s",
        "num_prompts=7",
        *SMALL,
    )
    result = run_eyas(
        "eval", head, "-t", target, "-o", tmp_path / "out", "--prompts", prompts, *options
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert [(one["speculation"], one["temperature"]) for one in told["trees"]] == [
        ("fixed(2,2,4)", 0.0),
        ("fixed(2,1,3)", 0.0),
        ("fixed(2,2,4)", 0.7),
        ("fixed(2,1,3)", 0.7),
    ]
    assert told["predicted"] == []
    assert "fixed(2,1,3)" in result.stdout
    assert "numbers" in result.stdout
    written = Artifact(str(tmp_path / "out")).read_json("eval.json")
    assert written["tau"] == told["tau"]
    assert written["answers"] == 7
    assert "predicted" not in written
    again = run_eyas(
        "eval", head, "-t", target, "-o", tmp_path / "out", "--prompts", prompts, *options
    )
    assert "done already" in again.stderr
    assert again.stdout == result.stdout


def test_predicts(target, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    head = head_folder(target, tmp_path / "head")
    options = (
        "--trees",
        "fixed(2,2,4)",
        "--temperatures",
        "0",
        "-s",
        "max_tokens=12",
        "-s",
        "models.max_length=200",
    )
    predict = "predict={concurrencies: [1, 2], overhead_s: 0.02, speculations: []}"
    result = run_eyas(
        "eval",
        head,
        "-t",
        target,
        "-o",
        tmp_path / "out",
        "--prompts",
        prompts,
        *options,
        "-s",
        predict,
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["predicted"]
    assert [row["concurrency"] for row in rows] == [1, 2]
    assert all(row["tpot_ms_plain"] > 0 for row in rows)


def test_bad_input_is_one_clear_error(target, prompts, tmp_path):
    head = head_folder(target, tmp_path / "head")
    base = ("eval", head, "-t", target, "-o", tmp_path / "out")
    empty, other = tmp_path / "empty.jsonl", tmp_path / "other.jsonl"
    empty.write_text("")
    other.write_text('{"text": "no turns"}\n')
    for options, words in {
        (): ("nothing to measure with", "--prompts"),
        ("--prompts", tmp_path / "absent.jsonl"): ("no prompts at",),
        ("--prompts", empty): ("has no prompts",),
        ("--prompts", other): ("no user turn",),
        ("--prompts", prompts, "--trees", "fixed(1,2"): ("speculation is 'fixed(1,2'",),
        ("--prompts", prompts, "--trees", "fixed(99,2,4)"): ("num_draft_steps is 99",),
        ("--prompts", prompts, "--temperatures", "warm"): ("temperatures",),
        ("--prompts", prompts, "--temperatures", "-1"): ("temperatures",),
        ("--prompts", prompts, "-s", "models.dtype=int3"): ("models.dtype",),
        ("--prompts", prompts, "-s", "models.max_length=20", "-s", "max_tokens=12"): (
            "none of the 9 held-out prompts",
        ),
        ("--prompts", prompts, "-s", f"predict.costs={empty}"): ("no cost table",),
        ("--features", tmp_path / "absent"): ("does not exist",),
    }.items():
        assert_one_clear_error(run_eyas(*base, *options), *words)
    absent = run_eyas(
        "eval", tmp_path / "no-head", "-t", target, "-o", tmp_path / "out", "--prompts", prompts
    )
    assert_one_clear_error(absent, "no head folder")
    elsewhere = tiny_target(tmp_path / "elsewhere", num_hidden_layers=8, seed=3)
    foreign = run_eyas("eval", head, "-t", elsewhere, "-o", tmp_path / "out", "--prompts", prompts)
    assert_one_clear_error(foreign, "lm_head")
    assert not (tmp_path / "out").exists(), "bad input claims no folder"


def measured(**changes):
    tree = {"speculation": "fixed(4,1,5)", "tau": 3.0, "tau_interval": [2.8, 3.2]}
    return {"tau": 9.0, "tau_interval": None, "num_draft_steps": 7, "trees": [tree], **changes}


def test_a_run_ends_with_what_was_foretold():
    rows = [
        {"speculation": "fixed(4,1,5)", "speedup": 1.5},
        {"speculation": "auto(6,3,12)", "speedup": 1.7},
    ]
    assert foretold(measured()) == {"tau_foretold": 3.0, "tau_interval": [2.8, 3.2]}
    assert foretold(measured(predicted={"by_concurrency": rows[:1]}))["speedup_foretold"] == 1.5
    assert foretold(measured(predicted={"by_concurrency": rows}))["speedup_foretold"] == 1.7
    line = in_one_line(measured(predicted={"by_concurrency": rows}))
    assert (
        line
        == "foretold by eval, before serving: tau 3.00 (2.80 - 3.20) with fixed(4,1,5); speed-up "
        "1.70"
    )
    assert in_one_line(measured(trees=[])).endswith("tau 9.00 (-) with a chain of 7")
