"""`eyas prompts` as people use it: what may be used, what comes out, and what was dropped."""

import json

import pytest
import yaml

from eyas.artifact import Artifact
from tests.source_rows import written
from tests.test_cli import assert_one_clear_error, run_eyas

MAIL, CARD, PHONE = "ana.lee@example.com", "4242 4242 4242 4242", "(415) 555-0134"
MINE = ["--licence", "CC0-1.0", "--prompts-by", "human"]


@pytest.fixture
def raw(tmp_path):
    said = ["Where is the museum?", f"write to {MAIL}", f"charge {CARD}, call {PHONE}"]
    said += ["WHERE is  the museum?", ""]
    rows = [{"id": f"r{place}", "prompt": text} for place, text in enumerate(said)]
    written(tmp_path / "raw.jsonl", rows)
    return tmp_path / "raw.jsonl"


@pytest.fixture
def done(raw, tmp_path):
    shown = run_eyas("prompts", raw, *MINE, "-o", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    return tmp_path / "out"


def test_the_result_has_all_its_parts(done):
    output = Artifact(str(done))
    assert [row["id"] for row in output.read_rows("prompts")] == ["r0", "r1"]
    (changed,) = output.read_rows("changed")
    (found,) = changed.pop("found")
    assert changed == {"id": "r1", "source": "raw", "where": "raw.jsonl:2"}
    assert found["type"] == "EMAIL_ADDRESS"
    reasons = {row["reason"] for row in output.read_rows("dropped")}
    assert reasons == {"pii.credit_card", "duplicate.exact", "empty"}
    ledger = output.read_json("ledger.json")
    assert (ledger["rows_in"], ledger["rows_out"]) == (5, 2)
    assert ledger["licences"][0]["verdict"] == "allowed"
    assert "phonenumbers" in ledger["versions"]
    assert "pii.credit_card" in output.read("card.html").decode()
    everything = b"".join(output.read(name) for name in output.all_names())
    for value in (MAIL, CARD, PHONE):
        assert value.encode() not in everything


def test_dropped_rows_can_be_read_redacted(done):
    for words in ([done], ["-o", done]):
        shown = run_eyas("prompts", *words, "--show-dropped", "pii.credit")
        assert shown.exit_code == 0, shown.output
        for text in ("raw.jsonl:3 of raw (id r2): pii.credit_card", "<CREDIT_CARD>"):
            assert text in shown.stdout
        for text in ("duplicate", CARD, PHONE):
            assert text not in shown.stdout


def with_record(raw, folder, **record):
    folder.mkdir(exist_ok=True)
    run_file = folder / "run.yaml"
    run_file.write_text(yaml.safe_dump({"prompts": {"record": {"operator": "We", **record}}}))
    return run_eyas("prompts", raw, *MINE, "-c", run_file, "-o", folder / "out")


def test_the_record_is_on_the_card_and_in_the_manifest_and_changes_no_prompt(raw, tmp_path):
    stated = {"legal basis": "Art. 6(1)(f)", "date": "2026-11-22"}
    assert with_record(raw, tmp_path / "a", **stated).exit_code == 0
    output = Artifact(str(tmp_path / "a" / "out"))
    card = " ".join(output.read("card.html").decode().split())
    for heading, text in stated.items():
        assert f"<dt>{heading}</dt><dd>{text}</dd>" in card
    assert output.manifest().facts["record"] == {"operator": "We", **stated}
    again = with_record(raw, tmp_path / "a", purpose="another")
    assert_one_clear_error(again, "its card holds another record of processing")
    assert with_record(raw, tmp_path / "a", **stated).exit_code == 0
    assert with_record(raw, tmp_path / "b", purpose="another").exit_code == 0
    other = Artifact(str(tmp_path / "b" / "out"))
    assert other.manifest().identity == output.manifest().identity


def test_dropped_rows_can_be_read_where_no_prompt_is_left(tmp_path):
    (tmp_path / "raw.jsonl").write_text('{"prompt": ""}\n')
    refused = run_eyas("prompts", tmp_path / "raw.jsonl", *MINE, "-o", tmp_path / "out")
    assert_one_clear_error(refused, "no prompt is left of 1 rows (1 empty)")
    assert "empty" in run_eyas("prompts", tmp_path / "out", "--show-dropped", "").stdout


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ([], ["licence", "prompts_by"]),
        (["--licence", "MIT", "--prompts-by", "gpt-4"], ["gpt-4"]),
    ],
)
def test_what_may_not_be_used_is_refused_before_a_row_is_read(raw, tmp_path, stated, told):
    shown = run_eyas("prompts", raw, *stated, "-o", tmp_path / "out")
    assert_one_clear_error(shown, "1 of 1 sources may not be used", *told)
    assert not (tmp_path / "out").exists()


def test_an_overrule_is_recorded_with_its_reason(raw, tmp_path):
    overrule = {"non-commercial": "research in our own house"}
    source = {"path": str(raw), "licence": "CC-BY-NC-4.0", "prompts_by": "human"}
    source["overrule"] = overrule
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump({"prompts": {"sources": [source]}}))
    shown = run_eyas("prompts", "-c", run_file, "-o", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    output = Artifact(str(tmp_path / "out"))
    verdict = output.manifest().facts["ledger"]["licences"][0]
    assert verdict["verdict"] == "overruled"
    shown = run_eyas("lineage", tmp_path / "out").stdout
    for text in (json.dumps(verdict), output.read("card.html").decode(), shown):
        assert "research in our own house" in text


def test_settings_come_from_file_and_command_line(raw, tmp_path):
    run_file = tmp_path / "run.yaml"
    stated = {"sources": [{"path": "elsewhere"}], "personal": {"policy": "mask"}, "workers": 2}
    run_file.write_text(yaml.safe_dump({"prompts": stated}))
    out = tmp_path / "out"
    shown = run_eyas("prompts", raw, *MINE, "-c", run_file, "-s", "max_prompts=1", "-o", out)
    assert shown.exit_code == 0, shown.output
    made = [row["turns"] for row in Artifact(str(out)).read_rows("prompts")]
    assert made == [["Where is the museum?"]]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["prompts", "--show-dropped", "pii"], "shows one result"),
        (["prompts", "a.jsonl", "--licence", "MIT"], "no place for the result"),
        (["prompts", "--licence", "MIT", "-o", "out"], "but no source"),
        (["prompts", "nowhere", "--show-dropped", "pii"], "does not exist"),
    ],
)
def test_what_cannot_be_meant_is_one_clear_error(words, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_one_clear_error(run_eyas(*words), told)


def test_the_packaged_prompts_by_name(tmp_path):
    shown = run_eyas("prompts", "builtin", "-s", "max_prompts=20", "-o", tmp_path / "out")
    assert shown.exit_code == 0, shown.output
    assert len(list(Artifact(str(tmp_path / "out")).read_rows("prompts"))) == 20
