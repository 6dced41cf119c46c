"""`eyas bench URL`: a server's arms, files, the last line."""

from __future__ import annotations

import json

import pytest

from eyas.artifact import Artifact, Manifest, identity
from eyas.bench.bench import ArmConfig, BenchConfig
from eyas.cli.bench import arms_for
from tests.bench_servers import scripted
from tests.source_rows import written
from tests.test_cli import assert_one_clear_error, run_eyas
from tests.test_report import LEDGER

EYAS = {"owner": "eyas"}
NOTHING = {"config": {}, "counts": {}, "files": {}}


def benched(url, prompts, folder, *words, max_tokens=2, num_prompts=4):
    settings = ("--set", f"max_tokens={max_tokens}", "--set", f"num_prompts={num_prompts}")
    return run_eyas("bench", url, "--prompts", prompts, *settings, *words, "-o", folder)


@pytest.fixture
def prompts(tmp_path):
    rows = [
        {"id": n, "category": ("odd", "even")[n % 2], "turns": [f"I would like a table for {n}."]}
        for n in range(12)
    ]
    return written(tmp_path / "prompts.jsonl", rows)


def test_arms_are_what_the_server_can_do():
    with (
        scripted() as other,
        scripted(**EYAS, card={"eyas": {"has_head": True}}) as ours,
        scripted(**EYAS) as bare,
    ):
        assert arms_for(other, None) == arms_for(bare, None) == {"server": ArmConfig()}
        assert arms_for(ours, None) == BenchConfig().arms
        both = {"baseline": ArmConfig(url=other), "server": ArmConfig(url=ours)}
        assert arms_for(ours, other) == both


def test_two_servers_end_in_a_report_and_one_line_of_json(tmp_path, prompts):
    folder = tmp_path / "bench"
    loads = ("--concurrency", "1,3", "--rates", "40")
    with scripted(gap_s=0.01) as slow, scripted() as fast:
        words = ("--against", slow, *loads)
        done = benched(fast, prompts, folder, *words, max_tokens=4, num_prompts=12)
    assert done.exit_code == 0, done.output
    last = json.loads(done.stdout.splitlines()[-1])
    arms = [(one["arm"], one["baseline"]) for one in last["comparisons"]]
    assert arms == [("server", "baseline")] * 3
    assert [one.get("concurrency") for one in last["comparisons"]] == [1, 3, None]
    assert last["comparisons"][-1]["rate"] == 40
    assert "not told by other" in done.stderr
    assert "3 at a time" in done.stdout
    assert "40 a second" in done.stdout
    for name in ("rows.jsonl", "summary.json", "report.html", "report.md"):
        assert (folder / name).stat().st_size > 500, name
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "odd" in page


def test_a_server_by_itself_is_measured_without_a_comparison(tmp_path, prompts, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with scripted() as url:
        settings = ("--set", "max_tokens=2", "--set", "num_prompts=4")
        done = run_eyas("bench", url, "--prompts", prompts, *settings)
    assert done.exit_code == 0, done.output
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["comparisons"] == []
    assert (tmp_path / last["output"] / "report.html").exists()
    assert last["output"].startswith("out/bench-")


def test_later_turns_that_were_left_out_are_said_to_be(tmp_path):
    turns, task = ["compose it", "rewrite it"], {"category": "writing"}
    rows = [{"question_id": number, **task, "turns": turns[:number]} for number in (1, 2)]
    path = written(tmp_path / "prompts.jsonl", rows)
    with scripted() as url:
        done = benched(url, path, tmp_path / "bench")
    assert done.exit_code == 0, done.output
    assert "First turns only: the later turns of 1 conversations were not asked." in done.stderr


def test_unlike_servers_are_refused_until_one_insists(tmp_path, prompts):
    folder = tmp_path / "bench"
    with scripted() as one, scripted(extra_prompt_tokens=1) as other:
        refused = benched(one, prompts, folder, "--against", other)
        assert_one_clear_error(refused, "--compare-anyway")
        again = benched(one, prompts, folder, "--against", other, "--compare-anyway")
        assert again.exit_code == 0
    assert "(not comparable)" in (tmp_path / "bench" / "report.md").read_text()


def test_no_server_is_one_clear_error(tmp_path, prompts):
    failed = run_eyas("bench", "http://127.0.0.1:9", "--prompts", prompts, "-o", tmp_path / "bench")
    assert_one_clear_error(failed, "no server at http://127.0.0.1:9")
    assert not (tmp_path / "bench").exists()


def manifest(stage, identity, **fields):
    return Manifest(**{"stage": stage, "identity": identity, **NOTHING, **fields})


def made_head(folder, stage="train", target="ab" * 32):
    """A head from features of a target, of prompts with a ledger."""
    prompts = manifest("prompts", "a1b2", facts={"ledger": LEDGER})
    settings = {"target_fingerprint": target}
    features = manifest("capture", target, config=settings, inputs={"prompts": prompts})
    artifact = Artifact(str(folder))
    artifact.begin(identity(stage, {}, {"features": features}))
    artifact.finish(stage, {}, {"features": features}, {})
    return folder


def test_a_report_is_given_the_head_and_shows_its_lineage_and_ledger(tmp_path, prompts):
    card = {"has_head": True, "dtype": "bfloat16", "target_fingerprint": "ab" * 32}
    shared = (prompts, tmp_path / "bench", "--set", 'arms={"one": {}}')
    with scripted(**EYAS, card={"eyas": card}) as url:
        assert benched(url, *shared).exit_code == 0
        page = (tmp_path / "bench" / "report.html").read_text(encoding="utf-8")
        assert "eyas, version unknown, m, bfloat16, with a head, target abababababababab" in page
        assert "Where the prompts went" not in page
        head = made_head(tmp_path / "head")
        assert benched(url, *shared, "--head", head).exit_code == 0
        page = (tmp_path / "bench" / "report.html").read_text(encoding="utf-8")
        assert "1,300 rows came in" in page
        for text in (page, (tmp_path / "bench" / "report.md").read_text(encoding="utf-8")):
            assert "a1b2" in text
        for folder, message in (
            (made_head(tmp_path / "other", target="cd" * 32), "another target than the servers"),
            (made_head(tmp_path / "f", stage="capture"), "is an output of 'capture', not a head"),
            (tmp_path / "none", "does not exist"),
        ):
            assert_one_clear_error(benched(url, *shared, "--head", folder), message)
