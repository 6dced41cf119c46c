"""`eyas bench URL` as a command: which arms a server gets, what is written,
what the last line says.
"""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from eyas.artifact import Artifact, Manifest, identity
from eyas.cli.bench import arms_for, ledger_of
from eyas.cli.main import build
from tests.bench_servers import scripted
from tests.test_report import LEDGER

EYAS = {"owner": "eyas"}


def run_eyas(*arguments):
    words = [str(word) for word in arguments]
    return CliRunner().invoke(build(words), words, prog_name="eyas")


@pytest.fixture
def prompts(tmp_path):
    rows = [
        {"id": n, "category": ("odd", "even")[n % 2], "turns": [f"I would like a table for {n}."]}
        for n in range(12)
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_arms_are_what_the_server_can_do():
    with (
        scripted() as other,
        scripted(**EYAS, card={"eyas": {"has_head": True}}) as ours,
        scripted(**EYAS) as bare,
    ):
        assert arms_for(other, None) == arms_for(bare, None) == {"server": {}}
        assert arms_for(ours, None) == {
            "plain": {"speculation": False},
            "eagle": {"speculation": True},
        }
        assert arms_for(ours, other) == {"baseline": {"url": other}, "server": {"url": ours}}


def test_two_servers_end_in_a_report_and_one_line_of_json(tmp_path, prompts):
    folder = tmp_path / "bench"
    shared = (
        "--prompts",
        prompts,
        "--set",
        "max_tokens=4",
        "--set",
        "num_prompts=12",
        "-o",
        folder,
    )
    with scripted(gap_s=0.01) as slow, scripted() as fast:
        done = run_eyas(
            "bench", fast, "--against", slow, "--concurrency", "1,3", "--rates", "40", *shared
        )
    assert done.exit_code == 0, done.output
    last = json.loads(done.stdout.splitlines()[-1])
    assert [
        (one["arm"], one["baseline"], one.get("concurrency")) for one in last["comparisons"]
    ] == [
        ("server", "baseline", 1),
        ("server", "baseline", 3),
        ("server", "baseline", None),
    ]
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
        done = run_eyas(
            "bench", url, "--prompts", prompts, "--set", "max_tokens=2", "--set", "num_prompts=4"
        )
    assert done.exit_code == 0, done.output
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["comparisons"] == []
    assert (tmp_path / last["output"] / "report.html").exists()
    assert last["output"].startswith("out/bench-")


def test_later_turns_that_were_left_out_are_said_to_be(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [
        {
            "question_id": number,
            "category": "writing",
            "turns": ["compose it", "rewrite it"][:number],
        }
        for number in (1, 2)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with scripted() as url:
        done = run_eyas(
            "bench", url, "--prompts", path, "--set", "max_tokens=2", "-o", tmp_path / "bench"
        )
    assert done.exit_code == 0, done.output
    assert "First turns only: the later turns of 1 conversations were not asked." in done.stderr


def test_unlike_servers_are_refused_until_one_insists(tmp_path, prompts):
    shared = (
        "--prompts",
        prompts,
        "--set",
        "max_tokens=2",
        "--set",
        "num_prompts=4",
        "-o",
        tmp_path / "bench",
    )
    with scripted() as one, scripted(extra_prompt_tokens=1) as other:
        refused = run_eyas("bench", one, "--against", other, *shared)
        assert refused.exit_code == 2
        assert "--compare-anyway" in refused.stderr
        assert (
            run_eyas("bench", one, "--against", other, "--compare-anyway", *shared).exit_code == 0
        )
    assert "(not comparable)" in (tmp_path / "bench" / "report.md").read_text()


def test_no_server_is_one_clear_error(tmp_path, prompts):
    failed = run_eyas("bench", "http://127.0.0.1:9", "--prompts", prompts, "-o", tmp_path / "bench")
    assert failed.exit_code == 2
    assert "no server at http://127.0.0.1:9" in failed.stderr
    assert not (tmp_path / "bench").exists()


def made_head(folder, stage="train", target="ab" * 32):
    """An artifact as `eyas train` leaves it: a head from features of a target, of prompts with a
    ledger.
    """
    prompts = Manifest(
        stage="prompts",
        identity="a1b2",
        config={},
        counts={"rows": 1200},
        files={},
        facts={"ledger": LEDGER},
    )
    settings = {"target_fingerprint": target}
    features = Manifest(
        stage="capture",
        identity=target,
        config=settings,
        counts={},
        files={},
        inputs={"prompts": prompts},
    )
    artifact = Artifact(str(folder))
    artifact.begin(identity(stage, {}, {"features": features}))
    artifact.finish(stage, {}, {"features": features}, {})
    return folder


def test_a_report_is_given_the_head_and_shows_its_lineage_and_ledger(tmp_path, prompts):
    card = {"has_head": True, "dtype": "bfloat16", "target_fingerprint": "ab" * 32}
    settings = ("--set", "max_tokens=2", "--set", "num_prompts=4", "--set", 'arms={"one": {}}')
    shared = ("--prompts", prompts, *settings, "-o", tmp_path / "bench")
    with scripted(**EYAS, card={"eyas": card}) as url:
        assert run_eyas("bench", url, *shared).exit_code == 0
        page = (tmp_path / "bench" / "report.html").read_text(encoding="utf-8")
        assert "eyas, version unknown, m, bfloat16, with a head, target abababababababab" in page
        assert "Where the prompts went" not in page
        head = made_head(tmp_path / "head")
        assert run_eyas("bench", url, *shared, "--head", head).exit_code == 0
        page = (tmp_path / "bench" / "report.html").read_text(encoding="utf-8")
        assert "1,300 rows came in" in page
        for text in (page, (tmp_path / "bench" / "report.md").read_text(encoding="utf-8")):
            assert "a1b2" in text
        for folder, message in (
            (made_head(tmp_path / "other", target="cd" * 32), "another target than the servers"),
            (made_head(tmp_path / "features", stage="capture"), "holds 'capture', no head"),
            (tmp_path / "none", "does not exist"),
        ):
            refused = run_eyas("bench", url, *shared, "--head", folder)
            assert refused.exit_code == 2
            assert message in refused.stderr


def test_the_ledger_is_found_behind_the_benchmark():
    prompts = Manifest(
        stage="prompts", identity="a", config={}, counts={}, files={}, facts={"ledger": LEDGER}
    )
    head = Manifest(
        stage="train", identity="b", config={}, counts={}, files={}, inputs={"prompts": prompts}
    )
    measured = Manifest(
        stage="bench", identity="c", config={}, counts={}, files={}, inputs={"head": head}
    )
    assert ledger_of(measured) == LEDGER
    assert ledger_of(measured.model_copy(update={"inputs": {}})) is None
