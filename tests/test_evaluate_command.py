"""The command `eyas eval`: from prompts alone, on heads of any form, and clear errors."""

from __future__ import annotations

import json

import pytest

from eyas.artifact import Artifact
from eyas.chat import Chat
from eyas.cli.eval import eval_figures, in_one_line
from eyas.cli.run import RunConfig, as_served
from eyas.evaluate.evaluate import EvalConfig
from eyas.settings import validated
from tests.test_cli import RUN, assert_one_clear_error, run_eyas
from tests.tiny import tiny_target
from tests.tiny_head import head_folder
from tests.tiny_prompts import SOURCES, eval_prompts, prompts_file

SMALL = ("-s", "max_tokens=12", "-s", "models.max_length=200")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"), num_hidden_layers=8)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return prompts_file(tmp_path_factory.mktemp("prompts"), 9)


def test_from_prompts_alone(target, prompts, tmp_path):
    head = head_folder(target, tmp_path / "head", form="sglang")
    words = ["eval", head, "-t", target, "-o", tmp_path / "out", "--prompts", prompts]
    words += ["--trees", "fixed(2,2,4) fixed(2,1,3)", "--temperatures", "0 0.7"]
    words += ["-s", "num_prompts=7", *SMALL]
    result = run_eyas(*words)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    measured = [(one["speculation"], one["temperature"]) for one in told["trees"]]
    trees = ("fixed(2,2,4)", "fixed(2,1,3)")
    assert measured == [(tree, temperature) for temperature in (0.0, 0.7) for tree in trees]
    assert "fixed(2,1,3)" in result.stdout
    assert "numbers" in result.stdout
    written = Artifact(str(tmp_path / "out")).read_json("eval.json")
    assert written["tau"] == told["tau"]
    assert written["answers"] == 7
    again = run_eyas(*words)
    assert "done already" in again.stderr
    assert again.stdout == result.stdout


def test_against_another_head(target, prompts, tmp_path):
    heads = [head_folder(target, tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 1))]
    words = ("eval", heads[0], "-t", target, "--prompts", prompts, "--against", heads[1])
    words += ("--trees", "fixed(2,2,4)", "--temperatures", "0", *SMALL)
    reported = run_eyas(*words, "-o", tmp_path / "out")
    assert reported.exit_code == 0, reported.output
    against = json.loads(reported.stdout.splitlines()[-1])["against"]
    alone = {}
    for number, head in enumerate(heads):
        output = tmp_path / f"alone-{number}"
        run_eyas("eval", head, *words[2:6], *words[8:], "-o", output)
        alone[number] = Artifact(str(output)).read_json("eval.json")
    assert list(against) == ["all", *sorted(SOURCES)]
    for name, change in against.items():
        mine, other = (
            alone[number] if name == "all" else alone[number]["by_source"][name]
            for number in (0, 1)
        )
        assert (change["tau"], change["tau_other"]) == (mine["tau"], other["tau"])
        assert (change["answers"], mine["answers"]) == ((9, 9) if name == "all" else (3, 3))
    assert f"against {heads[1]}, all answers: tau" in " ".join(reported.stdout.split())
    # the tolerance changes no result: nothing is measured again
    refused = run_eyas(*words, "-o", tmp_path / "out", "--tolerance", "0.5")
    assert "done already" in refused.stderr
    assert refused.exit_code == 3
    assert "not shown to be better" in " ".join(refused.stderr.split())


def test_prompts_that_are_too_long_are_counted_and_said(target, prompts, tmp_path):
    words = ("eval", head_folder(target, tmp_path / "head"), "-t", target, "--prompts", prompts)
    words += ("--trees", "fixed(2,2,4)", "--temperatures", "0", "-s", "max_tokens=12")
    chat = Chat(target)
    lengths = sorted(len(chat.prompt_ids(one.messages)) for one in eval_prompts(9))
    limit = lengths[3] + 12
    shown = run_eyas(*words, "-s", f"models.max_length={limit}", "-o", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    left_out = sum(length > lengths[3] for length in lengths)
    assert f"{left_out} of 9 prompts are not measured" in " ".join(shown.stderr.split())


def test_bad_input_is_one_clear_error(target, prompts, tmp_path):
    head = head_folder(target, tmp_path / "head")
    base = ("eval", head, "-t", target, "-o", tmp_path / "out")
    empty, other = tmp_path / "empty.jsonl", tmp_path / "other.jsonl"
    empty.write_text("")
    other.write_text('{"text": "no turns"}\n')
    asked = ("--prompts", prompts)
    for options, words in {
        (): ("nothing to measure with", "--prompts"),
        ("--prompts", tmp_path / "absent.jsonl"): ("no prompts at",),
        ("--prompts", empty): ("has no prompts",),
        ("--prompts", other): ("no user turn",),
        (*asked, "--trees", "fixed(1,2"): ("speculation is 'fixed(1,2'",),
        (*asked, "--trees", "fixed(99,2,4)"): ("num_draft_steps is 99",),
        (*asked, "--trees", "off"): ("there is no tau",),
        (*asked, "--temperatures", "warm"): ("temperatures",),
        (*asked, "--temperatures", "-1"): ("temperatures",),
        (*asked, "-s", "models.dtype=int3"): ("models.dtype",),
        (*asked, "-s", "models.max_length=20", "-s", "max_tokens=12"): ("none of the 9 held-out",),
        (*asked, "--tolerance", "0.1"): ("no other head", "--against"),
        (*asked, "--against", tmp_path / "absent"): ("no head folder",),
        ("--features", tmp_path / "absent"): ("does not exist",),
    }.items():
        assert_one_clear_error(run_eyas(*base, *options), *words)
    rest = ("-o", tmp_path / "out", *asked)
    absent = run_eyas("eval", tmp_path / "no-head", "-t", target, *rest)
    assert_one_clear_error(absent, "no head folder")
    elsewhere = tiny_target(tmp_path / "elsewhere", num_hidden_layers=8, seed=3)
    assert_one_clear_error(run_eyas("eval", head, "-t", elsewhere, *rest), "lm_head")
    assert not (tmp_path / "out").exists(), "bad input claims no folder"


def measured(**changes):
    tree = {"speculation": "fixed(4,1,5)", "tau": 3.0, "tau_interval": [2.8, 3.2]}
    return {"tau": 9.0, "tau_interval": None, "num_draft_steps": 7, "trees": [tree], **changes}


def test_a_run_ends_with_what_eval_measured():
    assert eval_figures(measured()) == {"tau_eval": 3.0, "tau_interval": [2.8, 3.2]}
    line = in_one_line(measured())
    assert line == "eval, before serving: tau 3.00 (2.80 - 3.20) with fixed(4,1,5)"
    assert in_one_line(measured(trees=[])).endswith("tau 9.00 (-) with a chain of 7")


def test_a_run_measures_as_it_serves():
    serve = {"dtype": "bfloat16", "threads": 3, "engine": {"max_length": 99}}
    run = {**RUN, "serve": serve, "bench": {"seed": 7, "max_tokens": 33}}
    asked = as_served(validated(RunConfig, run, "run.yaml"))
    wanted = {"dtype": "bfloat16", "threads": 3, "max_length": 99}
    assert asked.models.model_dump(include=wanted.keys()) == wanted
    assert (asked.seed, asked.max_tokens) == (7, 33)


def test_what_eval_measures_by_default_is_worth_its_time():
    """In `eyas run` too, whatever bench asks for."""
    config = EvalConfig()
    sizes = (len(config.trees), config.temperatures, config.num_prompts, config.max_tokens)
    assert sizes == (2, (0.0, 1.0), 100, 64)
    run = {**RUN, "bench": {"max_tokens": 500}}
    asked = as_served(validated(RunConfig, run, "run.yaml"))
    assert (asked.trees, asked.max_tokens) == (config.trees, config.max_tokens)
    asked = as_served(validated(RunConfig, {**run, "eval": {"max_tokens": 200}}, "run.yaml"))
    assert asked.max_tokens == 200
