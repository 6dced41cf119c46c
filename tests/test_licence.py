"""The licence gate: what the shipped policy refuses and lets through, overrules, the registry, and
policies of one's own.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from eyas.builtin import demo_prompts
from eyas.data.known_sets import KnownSet, find, registry
from eyas.data.licence import PLACEHOLDER, Verdict, gate, judge, require
from eyas.data.licence_rules import LicencePolicy, read_policy, shipped
from eyas.errors import ConfigError, InputError, MissingInputError
from tests.stated import Source

ROOT = Path(__file__).resolve().parents[1]


def verdict(**stated) -> Verdict:
    return judge(Source(**stated), shipped())


def rules(judged: Verdict) -> list[str]:
    return [refusal.rule for refusal in judged.refusals]


HUMAN = {"prompts_by": "human", "answers_by": "human"}
# The rules that fire: of licences of what people wrote, and of authors under free licences.
LICENCES = {
    "": [
        *("MIT", "CC-BY-SA-4.0", "odc-by", "LicenseRef-own", "MIT AND Apache-2.0", "GPL-2.0+"),
    ],
    "non-commercial": ["CC-BY-NC-4.0", "cc-by-nc-3.0-de", "ODC-By-1.0 AND CC-BY-NC-4.0"],
    "no-derivatives": ["CC-BY-ND-4.0"],
    "non-commercial no-derivatives": ["CC-BY-NC-ND-4.0"],
    "research-only": ["LicenseRef-research-only"],
    "evaluation-only": ["LicenseRef-evaluation-only"],
    "unknown-licence": [
        *(None, "NONE", "CC-BY-9.9", "LicenseRef-ours", "the MIT licence", "MIT OR CC-BY-NC-4.0"),
        *("MIT AND nothing", "(MIT", ""),
    ],
}
AUTHORS = {
    "": [
        *("meta-llama/Llama-3.1-70B-Instruct", "openai/gpt-oss-120b", "Qwen/Qwen3-8B"),
        *("mistral-7b-instruct-v0.2", "deepseek_r1"),
    ],
    "unknown-author": [None, "frontier-9"],
    "competing-model": [
        *("GPT-4", "human, openai/gpt-4o", "Claude 3 Opus", "gemini-1.5-pro", "grok-2"),
        "meta-llama/Meta-Llama-3-70B-Instruct",
    ],
    "non-commercial": ["command-r-plus"],
    "research-only": ["mistral-large-2407"],
}
CASES = [({"licence": one, **HUMAN}, fired) for fired, all in LICENCES.items() for one in all]
CASES += [
    ({"licence": "MIT", "prompts_by": one}, fired) for fired, all in AUTHORS.items() for one in all
]
CASES.append(({"licence": "MIT", "prompts_by": "human", "answers_by": "gpt-4"}, ""))
CASES.append(({"licence": "MIT", "prompts_by": "GPT-4", "answers_by": "GPT-4"}, "competing-model"))


@pytest.mark.parametrize(("stated", "fired"), CASES)
def test_the_shipped_policy_refuses_by_rule(stated, fired):
    judged = verdict(**stated)
    assert rules(judged) == fired.split()
    assert judged.allowed == (not fired)


def test_duties_go_with_what_passes():
    share_alike = verdict(licence="CC-BY-SA-4.0", **HUMAN).duties
    assert share_alike.keys() == {"attribution", "share-alike"}
    assert "under this licence only" in share_alike["share-alike"]
    assert verdict(licence="CC0-1.0", **HUMAN).duties == {}
    assert "built-with-llama" in verdict(licence="MIT", prompts_by="llama-3.3-70b").duties
    assert "Databricks" in verdict(name="databricks-dolly-15k").duties["attribution"]


def test_answers_refuse_nothing_and_ask_nothing_but_are_noted():
    judged = verdict(licence="CC0-1.0", prompts_by="human", answers_by="gpt-4, llama-3.1-8b")
    assert judged.allowed
    assert judged.duties == {}
    (note,) = judged.notes
    assert "answers by gpt-4 would be refused" in note
    assert "dropped" in note
    assert "not known" in verdict(licence="CC0-1.0", prompts_by="human").notes[0]


# Refusals and overrules


def test_one_error_lists_every_refused_source_with_rule_field_and_what_to_state():
    require(gate([Source(licence="MIT", prompts_by="human")], shipped()))
    sources = [
        Source(name="good", licence="MIT", prompts_by="human"),
        Source(name="nobody-said", prompts_by="human"),
        Source(name="made", licence="MIT", prompts_by="gpt-4"),
        Source(name="both", licence="CC-BY-NC-4.0", prompts_by="claude"),
    ]
    with pytest.raises(InputError) as caught:
        require(gate(sources, shipped()))
    text = str(caught.value)
    assert text.startswith("3 of 4 sources may not be used under the policy shipped")
    assert "good" not in text
    assert "rule unknown-licence, field licence: not given" in text
    assert "or state licence: <SPDX id>" in text
    assert "rule competing-model, field prompts_by: gpt-4 (OpenAI:" in text
    assert (
        f'overrule: {{non-commercial: "{PLACEHOLDER}", competing-model: "{PLACEHOLDER}"}}' in text
    )


def test_what_a_refusal_says_to_state_lets_the_source_through():
    """The line of the message with a reason in place of the placeholder, as in a run file."""
    stated = {"licence": "CC-BY-NC-4.0", "prompts_by": "gpt-4"}
    overrule = {
        refusal.rule: "the publisher agreed, letter of 3 May"
        for refusal in verdict(**stated).refusals
    }
    judged = verdict(**stated, overrule=overrule)
    assert judged.allowed
    assert [(one.rule, one.field, one.value, one.reason) for one in judged.overruled] == [
        ("non-commercial", "licence", "CC-BY-NC-4.0", "the publisher agreed, letter of 3 May"),
        ("competing-model", "prompts_by", "gpt-4", "the publisher agreed, letter of 3 May"),
    ]
    assert judged.to_json()["verdict"] == "overruled"
    del overrule["competing-model"]
    assert rules(verdict(**stated, overrule=overrule)) == ["competing-model"]


@pytest.mark.parametrize(
    ("licence", "overrule", "problem"),
    [
        *(
            ("CC-BY-NC-4.0", {"non-commercial": one}, "no reason")
            for one in ("", " \n", PLACEHOLDER)
        ),
        *(("MIT", {one: "so"}, "no such rule fires") for one in ("non-commercial", "no-such-rule")),
    ],
)
def test_an_overrule_needs_a_reason_and_a_rule_that_fires(licence, overrule, problem):
    judged = verdict(licence=licence, **HUMAN, overrule=overrule)
    assert not judged.allowed
    assert judged.overruled == ()
    with pytest.raises(InputError, match=f"overrule {next(iter(overrule))}: {problem}"):
        require([judged])


def test_a_verdict_is_json_with_the_policy_it_was_made_under():
    made = verdict(name="samsum", overrule={"research-only": "it is research\nof ours"}).to_json()
    assert json.loads(json.dumps(made)) == made
    assert made["verdict"] == "refused"
    assert made["licence"] == "CC-BY-NC-ND-4.0"
    assert [one["rule"] for one in made["refusals"]] == ["non-commercial", "no-derivatives"]
    assert [one["reason"] for one in made["overruled"]] == ["it is research of ours"]
    assert shipped().identity in made["policy"]
    assert made["known_as"] == "samsum"
    assert made["facts_from"].startswith("https://huggingface.co/")


# The registry


def test_some_thirty_sets_are_known_and_every_fact_has_its_place():
    entries = {entry.id: entry for entry in registry().values()}
    assert len(entries) >= 30
    names = [name for entry in entries.values() for name in (entry.id, *entry.aliases)]
    assert len({name.casefold() for name in names}) == len(names)
    facts = ("licence", "terms", "prompts_by", "answers_by")
    for entry in entries.values():
        assert entry.source
        assert set(entry.unverified) <= {name for name in facts if getattr(entry, name)}
        if "nothing that could be read" in entry.source:
            assert set(entry.unverified) == {name for name in facts if getattr(entry, name)}


def test_every_licence_and_term_of_the_registry_is_known_to_the_shipped_policy():
    for entry in registry().values():
        if entry.licence and entry.licence not in ("NONE", "NOASSERTION"):
            assert "unknown-licence" not in rules(verdict(name=entry.id)), entry.id
        for trait in entry.terms:
            assert shipped().refuses("terms", trait), entry.id
        for name in (entry.prompts_by or "").split(","):
            assert not name or shipped().author(name), f"{entry.id}: {name}"


KNOWN = {
    "": ["oasst1", "OpenAssistant/oasst2", "wildchat", "openorca"],
    "competing-model": [
        *("ultrachat-200k", "HuggingFaceH4/ultrachat_200k", "teknium/GPTeacher-General-Instruct"),
    ],
    "unknown-licence": ["sharegpt"],
    "non-commercial": ["no-robots"],
    "non-commercial competing-model": ["alpaca"],
    "evaluation-only": ["spec-bench"],
    "unknown-author": ["infinity-instruct"],
    "non-commercial competing-model competing-model competing-model": ["magpie-pro"],
}


@pytest.mark.parametrize(
    ("name", "fired"), [(name, fired) for fired, names in KNOWN.items() for name in names]
)
def test_a_known_set_needs_no_statement(name, fired):
    assert rules(verdict(name=name)) == fired.split()


DOLLY = "databricks/databricks-dolly-15k"


@pytest.mark.parametrize(
    "path",
    [
        DOLLY,
        f"{DOLLY}@bdd27f4",
        f"hf://datasets/{DOLLY}/train.jsonl",
        f"hf://datasets/{DOLLY}@main",
        f"https://huggingface.co/datasets/{DOLLY}/resolve/main/train.jsonl",
    ],
)
def test_a_set_is_found_by_its_hub_id(path):
    judged = verdict(path=path)
    assert judged.known_as == "databricks-dolly-15k"
    assert judged.allowed
    of_source = (judged.licence, judged.prompts_by, judged.answers_by)
    assert of_source == ("CC-BY-SA-3.0", "human", "human")
    assert any("from the registry" in note for note in judged.notes)


def test_a_folder_of_that_name_is_not_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find(Source(path="openai/gsm8k")) is not None
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    assert find(Source(path="openai/gsm8k")) is None


def test_a_file_name_alone_is_no_evidence_but_a_hint():
    judged = verdict(path="/raw/gsm8k.jsonl")
    assert judged.known_as == ""
    assert rules(judged) == ["unknown-licence", "unknown-author"]
    assert find(Source(path="gsm8k")) is None


@pytest.mark.parametrize(
    ("path", "licence", "fired"),
    [  # its terms and contradictions hold, and nothing is filled in
        ("/raw/alpaca.jsonl", "CC0-1.0", ["contradiction", "contradiction"]),
        ("s3://bucket/GSM8K.jsonl.gz", "CC0-1.0", ["contradiction"]),
        ("/raw/spec_bench.jsonl", "Apache-2.0", ["evaluation-only"]),
        ("/raw/alpaca_data.json", "CC0-1.0", ["contradiction", "contradiction"]),
        ("/raw/no_robots/data/train-00000.parquet", "CC0-1.0", ["contradiction"]),
        ("/raw/nectarine-sales.jsonl", "CC0-1.0", []),
        ("/raw/our-tickets.sharegpt.jsonl", "CC0-1.0", []),
        ("/raw/gsm8k.jsonl", "MIT", []),
        ("/raw/math/ours.jsonl", "CC0-1.0", []),
        ("/raw/oasst1.jsonl.gz", "Apache-2.0", []),
    ],
)
def test_a_file_called_after_a_known_set_stands_under_its_terms(path, licence, fired):
    judged = verdict(path=path, licence=licence, prompts_by="human")
    assert rules(judged) == fired
    assert judged.known_as == ""
    assert verdict(
        path=path, licence=licence, prompts_by="human", overrule=dict.fromkeys(fired, "ours")
    ).allowed


@pytest.mark.parametrize("path", ["builtin", "builtin-general", "builtin-sql", str(demo_prompts())])
def test_the_packaged_prompts_are_known_by_their_place(path):
    judged = verdict(path=path, name="demo", licence="CC0-1.0")
    assert judged.known_as == "eyas-demo-prompts"
    assert judged.prompts_by == "program"
    assert judged.allowed


@pytest.mark.parametrize(
    "run_file", ["eyas/cli/demo.yaml", "eyas/cli/demo_quick.yaml", "runs/builtin_head.yaml"]
)
def test_our_own_runs_pass(run_file):
    content = yaml.safe_load((ROOT / run_file).read_text())
    fields = ("path", "name", "licence", "prompts_by", "answers_by", "overrule")
    sections = [content["prompts"], (content.get("keep") or {}).get("prompts", {})]
    sources = [one for section in sections for one in section.get("sources", [])]
    stated = [{name: one[name] for name in fields if name in one} for one in sources]
    require(gate([Source(**one) for one in stated], shipped()))


def test_what_was_not_verified_is_said():
    assert "unverified" in verdict(name="star").duties
    assert "unverified" not in verdict(name="star", licence="MIT").duties
    assert "unverified" not in verdict(name="oasst1").duties


@pytest.mark.parametrize(
    ("stated", "is_refused"),
    [
        ({"name": "no-robots", "licence": "MIT"}, True),
        ({"name": "sharegpt", "licence": "Apache-2.0"}, True),  # none is given
        ({"name": "ultrachat-200k", "prompts_by": "human"}, True),
        ({"name": "self-instruct", "prompts_by": "human"}, True),  # some of the authors
        ({"name": "alpaca", "licence": "cc-by-nc-4.0"}, False),
        ({"name": "ultrachat-200k", "prompts_by": "gpt-3.5-turbo"}, False),
        ({"name": "tulu-3", "licence": "CC-BY-NC-4.0 AND ODC-By-1.0"}, False),
        ({"name": "oasst1", "answers_by": "gpt-4"}, False),  # said of answers, which are dropped
    ],
)
def test_a_statement_that_contradicts_the_registry_is_refused(stated, is_refused):
    fired = rules(verdict(**stated))
    assert fired == ["contradiction"] if is_refused else "contradiction" not in fired


def test_a_contradiction_can_be_overruled_and_what_is_stated_then_counts():
    overrule = {"contradiction": "relicensed to us"}
    judged = verdict(name="no-robots", licence="MIT", overrule=overrule)
    assert judged.allowed
    assert judged.licence == "MIT"
    assert "CC-BY-NC-4.0" in judged.overruled[0].because


def test_the_registry_rejects_fields_that_it_does_not_know():
    with pytest.raises(ValidationError):
        KnownSet(id="x", url="https://x.org", source="y", checked="2026-01-01", license="MIT")


# Policies of one's own


def policy_of(folder: Path, text: str | None) -> LicencePolicy:
    path = folder / "policy.yaml"
    if text is not None:
        path.write_text(text)
    return read_policy(str(path))


HEAD = 'name: ours\nversion: "3"\n'
RULE = "rules: [{{name: {}, fields: [{}], refuse: [{}], because: so}}]\n"


def test_a_policy_adds_and_removes_licences_and_rules(tmp_path):
    ours = policy_of(
        tmp_path,
        HEAD
        + "remove_rules: [evaluation-only]\n"
        + "traits: {fee: a fee is due to the publisher}\n"
        + "licences: [{ids: [LicenseRef-ours], traits: [fee]},"
        + " {ids: [CC-BY-SA-4.0], traits: [unknown]}]\n"
        + "authors: [{family: us, names: [our-model-*]}]\n"
        + RULE.format("answers", "answers_by", "no-competing-models"),
    )
    own = Source(licence="LicenseRef-ours", prompts_by="our-model-7b", answers_by="human")
    judged = judge(own, ours)
    assert judged.allowed
    assert judged.duties == {"fee": "LicenseRef-ours: a fee is due to the publisher"}
    assert rules(judge(Source(licence="CC-BY-SA-4.0", **HUMAN), ours)) == ["unknown-licence"]
    assert judge(Source(licence="LicenseRef-evaluation-only", **HUMAN), ours).allowed
    answered = Source(licence="MIT", prompts_by="human", answers_by="gpt-4")
    assert rules(judge(answered, ours)) == ["answers"]
    assert rules(judge(Source(licence="CC-BY-NC-4.0", **HUMAN), ours)) == ["non-commercial"]


STRICT = RULE.format("unverified", "licence, prompts_by", "unverified")
ALONE = "extends: nothing\nlicences: [{ids: [MIT]}]\n" + RULE.format("known", "licence", "unknown")
RENAMED = RULE.format("non-commercial", "licence", "share-alike")


@pytest.mark.parametrize(
    ("text", "stated", "fired"),
    [
        ("licences: [{ids: [mit], traits: [research-only]}]\n", "MIT", ["research-only"]),
        (RENAMED, "CC-BY-SA-4.0", ["non-commercial"]),
        (RENAMED, "CC-BY-NC-4.0", []),
        (STRICT, {"name": "star"}, ["unverified"]),
        (STRICT, {"name": "oasst1"}, []),
        (ALONE, {"licence": "MIT", "prompts_by": "gpt-4"}, []),
        (ALONE, "Apache-2.0", ["known"]),
    ],
)
def test_own_entries_and_rules_come_first_replace_or_stand_alone(tmp_path, text, stated, fired):
    stated = stated if isinstance(stated, dict) else {"licence": stated, **HUMAN}
    assert rules(judge(Source(**stated), policy_of(tmp_path, HEAD + text))) == fired


def test_what_no_rule_refuses_any_more_becomes_a_duty(tmp_path):
    ours = policy_of(tmp_path, HEAD + "remove_rules: [non-commercial]\n")
    judged = judge(Source(licence="CC-BY-NC-4.0", **HUMAN), ours)
    assert judged.allowed
    assert "not for commercial use" in judged.duties["non-commercial"]


def test_the_identity_is_of_what_a_policy_says(tmp_path):
    one, same, other = (
        policy_of(tmp_path, HEAD + text)
        for text in ("", "# a comment\n", "remove_rules: [evaluation-only]\n")
    )
    assert one.identity == same.identity
    assert read_policy(None) == shipped()
    assert len({shipped().identity, one.identity, other.identity}) == 3
    assert judge(Source(licence="MIT", **HUMAN), one).policy == f"ours 3 ({one.identity})"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: [", "is not YAML"),
        ("just words", "name: Field required"),
        (HEAD + "rule: []\n", "rule: no such field"),
        (HEAD + RULE.format("x", "license", "unknown"), r"rules\.0\.fields\.0"),
        (HEAD + RULE.format("x", "licence", "odd"), "a trait that does not exist: 'odd'"),
        (HEAD + "licences: [{ids: [X], traits: [odd]}]\n", "a trait that does not exist: 'odd'"),
        (HEAD + "remove_rules: [odd]\n", "a rule that does not exist: 'odd'"),
        (
            HEAD + "rules: [&a {name: x, fields: [terms], refuse: [unknown], because: y}, *a]\n",
            "two rules called 'x'",
        ),
        (HEAD + "extends: nothing\n", "no rule"),
        (None, "no policy can be read"),
    ],
)
def test_a_policy_that_does_not_fit_says_where(tmp_path, text, message):
    with pytest.raises(MissingInputError if text is None else ConfigError, match=message):
        policy_of(tmp_path, text)
