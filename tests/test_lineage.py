"""From an artifact back to every source, licence and filter."""

from __future__ import annotations

import pytest

from eyas.artifact import Artifact, Manifest, identity
from eyas.data.licence import judge
from eyas.data.licence_rules import shipped
from eyas.lineage import DIGITS, describe, lines, sources, stages
from tests.stated import Source

REASON = "the publisher agreed, letter of 3 May"
STATED = {"path": "/raw/aa", "name": "sgd", "licence": "CC-BY-SA-4.0", "prompts_by": "gpt-4"}
OVERRULE = {"contradiction": "x", "competing-model": REASON}
VERDICT = judge(Source(**STATED, overrule=OVERRULE), shipped()).to_json()
DROPPED = {"duplicate": 7, "personal_data": 3}
LEDGER = {
    "sources": {"sgd": {"rows_in": 100, "rows_out": 90, "dropped": DROPPED}},
    "licences": [VERDICT],
}


def source(licence: str, sha256: str) -> Manifest:
    given = {"identity": sha256, "config": {"licence": licence}, "url": f"/raw/{sha256}"}
    return Manifest(stage="source", counts={}, files={}, **given)


def finished(
    folder, stage: str, inputs: dict[str, Manifest], facts: dict | None = None, **config
) -> Manifest:
    artifact = Artifact(str(folder / stage))
    artifact.begin(identity(stage, config, inputs))
    artifact.write("data", stage.encode())
    return artifact.finish(stage, config, inputs, {"rows": 1}, facts)


@pytest.fixture
def head(tmp_path) -> Manifest:
    """train <- features <- answers <- prompts <- two sources, one of which is read again."""
    raw = {"sgd": source("CC-BY-SA-4.0", "aa"), "tldr": source("CC-BY-4.0", "bb")}
    prompts = finished(tmp_path, "prompts", raw, {"ledger": LEDGER}, max_characters=8000)
    answers = finished(tmp_path, "generate", {"prompts": prompts}, temperature=0.0)
    features = finished(tmp_path, "capture", {"answers": answers})
    inputs = {"features": features, "more": prompts, "tldr": raw["tldr"]}
    finished(tmp_path, "train", inputs, epochs=3)
    return Artifact(str(tmp_path / "train")).manifest()  # as a reader finds it on disk


def test_every_stage_is_found_once_first_to_last(head):
    assert [stage.stage for stage in stages(head)] == ["prompts", "generate", "capture", "train"]


def test_every_source_is_found_once_with_licence_and_rows(head):
    sgd, tldr = sources(head)
    assert (sgd.name, sgd.licence, sgd.sha256, sgd.url) == ("sgd", "CC-BY-SA-4.0", "aa", "/raw/aa")
    assert (sgd.num_rows, sgd.num_kept, sgd.dropped) == (100, 90, DROPPED)
    assert (tldr.name, tldr.licence, tldr.num_rows) == ("tldr", "CC-BY-4.0", 0)


def test_a_source_says_who_wrote_it_and_why_it_may_be_used(head):
    sgd, tldr = sources(head)
    text = list(sgd.terms())
    assert text[0] == "prompts by gpt-4; answers, which are not used, by human"
    assert text[1] == f"refused, and overruled, under the policy {shipped().title}"
    assert f"overruled competing-model (prompts_by gpt-4): {REASON}" in text
    assert any(line.startswith("duty, share-alike: CC-BY-SA-4.0") for line in text)
    assert any(line.startswith("duty, attribution") and "Google" in line for line in text)
    assert any(line.startswith("note: answers_by from the registry") for line in text)
    assert list(tldr.terms()) == [
        "prompts by not given; answers, which are not used, by not given",
        "no licence gate was asked",
    ]


def test_a_source_says_what_was_done_with_personal_data(tmp_path):
    novels = source("MIT", "aa")
    novels.config["fictional"] = True
    ledger = {"sources": {"mail": {"masked": {"PERSON": 1208, "PHONE_NUMBER": 1}}}}
    raw = {"mail": source("MIT", "bb"), "novels": novels}
    made = finished(tmp_path, "prompts", raw, {"ledger": ledger}, personal={"policy": "surrogate"})
    mail, novels = (list(one.terms())[1] for one in sources(made))
    assert mail == "personal data, policy surrogate: PERSON 1,208, PHONE_NUMBER 1"
    assert novels == (
        "personal data, policy surrogate: none found; its people are stated to be invented"
    )


def test_same_name_with_other_bytes_is_another_source(tmp_path):
    first = finished(tmp_path, "prompts", {"sgd": source("MIT", "aa")})
    second = finished(tmp_path / "again", "prompts", {"sgd": source("CC-BY-4.0", "cc")})
    both = finished(tmp_path, "train", {"first": first, "second": second})
    found = [(one.sha256, one.licence) for one in sources(both)]
    assert found == [("aa", "MIT"), ("cc", "CC-BY-4.0")]
    bare = Manifest(stage="source", identity="dd", config={}, counts={}, files={})
    (stated,) = sources(finished(tmp_path / "bare", "prompts", {"bare": bare}))
    assert "not given" in describe(stated)


def test_lines_show_filters_and_drops_below_what_they_made(head):
    text = list(lines(head))
    of_stages = [line for line in text if not line.startswith(" ")]
    assert [line.split()[0] for line in of_stages] == ["train", "capture", "generate", "prompts"]
    assert of_stages[0].startswith(f"train {head.identity[:DIGITS]} ")
    assert not any("max_characters" in line for line in text)
    assert any("max_characters 8000" in line for line in lines(head, with_settings=True))
    assert any(f"overruled competing-model (prompts_by gpt-4): {REASON}" in line for line in text)
    kept = "CC-BY-SA-4.0, 90 of 100 rows kept (dropped: duplicate 7, personal_data 3), sha256 aa"
    assert any(kept in line for line in text)
