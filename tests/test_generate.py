"""Stage `generate`: the target's own words, every turn accounted for, nothing repeated on
resume.
"""

import collections
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas.artifact import VERSION, Artifact, Manifest
from eyas.chat import Chat
from eyas.errors import EmptyInputError, MissingInputError, TemplateError
from eyas.features import generate as stage
from eyas.features.generate import GenerateConfig, generate
from eyas.privacy.detector import LeakDetector
from eyas.privacy.pii import PrivacyConfig
from eyas.records import Answer, Prompt, read_answers, read_origins
from tests.stages import contents, patched, prompts_of, talking_target, write_prompts
from tests.tiny import TEMPLATE, tiny_target, tiny_tokenizer

PROMPTS = prompts_of(23)
NO_NAMES = {"person": "keep", "street_address": "keep", "location": "keep"}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return talking_target(tmp_path_factory.mktemp("target"))


small_parts = patched((stage, "ROWS_PER_PART", 4))


def config_of(target: Path, **settings: Any) -> GenerateConfig:
    return GenerateConfig(**{"target": str(target), "max_tokens": 12, "max_batch": 5, **settings})


@pytest.fixture(scope="module")
def answered(target, tmp_path_factory) -> Artifact:
    root = tmp_path_factory.mktemp("answered")
    output = Artifact(str(root / "answers"))
    generate(config_of(target), write_prompts(root / "prompts", PROMPTS), output)
    return output


@pytest.fixture
def output(tmp_path) -> Artifact:
    return Artifact(str(tmp_path / "answers"))


def run(target: Path, prompts: list[Prompt], output: Artifact, **settings: Any) -> Manifest:
    where = Path(output.url).parent / f"prompts of {Path(output.url).name}"
    return generate(config_of(target, **settings), write_prompts(where, prompts), output)


def rows_by_prompt(artifact: Artifact) -> dict[str, list[Answer]]:
    rows: dict[str, list[Answer]] = collections.defaultdict(list)
    for answer in read_answers(artifact):
        rows[answer.prompt_id].append(answer)
    return rows


def dropped_rows(artifact: Artifact) -> list[dict[str, Any]]:
    return list(artifact.read_rows("dropped"))


def test_every_turn_is_an_answer_or_a_counted_drop(answered):
    counts = answered.manifest("generate").counts
    assert counts["prompts"] == len(PROMPTS)
    assert counts["turns"] == sum(len(prompt.turns) for prompt in PROMPTS)
    ends = ("answers", "dropped_earlier_turn_cut", "dropped_earlier_turn_marked")
    assert counts["turns"] == sum(counts[name] for name in ends)
    rows, dropped = rows_by_prompt(answered), dropped_rows(answered)
    assert list(rows) == [prompt.id for prompt in PROMPTS], "in the prompts' order, all of them"
    for prompt in PROMPTS:
        turns = [answer.turn for answer in rows[prompt.id]]
        turns += [row["turn"] for row in dropped if row["prompt_id"] == prompt.id]
        assert turns == list(range(len(prompt.turns)))
    reasons = {answer.finish_reason for answer in read_answers(answered)}
    assert reasons == {"stop", "length"}, "the test wants both"
    assert {row["reason"] for row in dropped} == {"earlier_turn_cut", "earlier_turn_marked"}


def test_a_turn_sees_the_targets_own_answers_and_most_marked_ones_end_the_conversation(answered):
    prompts = {prompt.id: prompt for prompt in PROMPTS}
    for prompt_id, rows in rows_by_prompt(answered).items():
        prompt = prompts[prompt_id]
        system = [{"role": "system", "content": prompt.system}] if prompt.system else []
        said = system
        for answer in rows:
            assert (answer.source, answer.licence) == (prompt.source, prompt.licence)
            said = [*said, {"role": "user", "content": prompt.turns[answer.turn]}]
            assert list(answer.messages[:-1]) == said
            assert answer.messages[-1]["role"] == "assistant"
            said = list(answer.messages)
        assert all(answer.marked is None for answer in rows[:-1])
        assert (rows[-1].finish_reason == "length") == (rows[-1].marked == "truncated")


def test_a_row_says_how_it_was_made(target, answered):
    rows, origins = list(read_answers(answered)), list(read_origins(answered))
    assert [(row.key, row.prompt_id, row.turn) for row in rows] == [
        (one.key, one.prompt_id, one.turn) for one in origins
    ]
    asked = {(row.temperature, row.top_p, row.top_k, row.max_tokens, row.seed) for row in rows}
    assert asked == {(0.0, 1.0, 0, 12, None)}
    assert {(one.engine, one.server) for one in origins} == {(f"eyas {VERSION}", None)}
    assert all(one.latency_ms > 0 for one in origins)
    counts = answered.manifest().counts
    marked = collections.Counter(row.marked for row in rows if row.marked)
    assert {f"marked_{name}": count for name, count in marked.items()}.items() <= counts.items()
    assert set(marked) == {"truncated", "empty"}, "the test wants both"


def test_answers_are_what_transformers_generates(target, answered):
    chat, model = Chat(target), AutoModelForCausalLM.from_pretrained(target)
    for answer in list(read_answers(answered))[::4]:
        prompt_ids = chat.prompt_ids(answer.messages[:-1])
        assert list(answer.prompt_ids) == prompt_ids
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([prompt_ids]), max_new_tokens=12, do_sample=False, pad_token_id=0
            )
        written = out[0, len(prompt_ids) :].tolist()
        assert list(answer.answer_ids) == written
        stopped = written[-1] in chat.eos_token_ids
        assert answer.finish_reason == ("stop" if stopped else "length")
        assert answer.messages[-1]["content"] == chat.decode(written[:-1] if stopped else written)


def test_sampling_is_repeatable_and_part_of_the_key(target, answered, tmp_path):
    one, two = (Artifact(str(tmp_path / name)) for name in ("one", "two"))
    for output, batch in ((one, 6), (two, 2)):
        run(target, PROMPTS[:6], output, sampling=[{"temperature": 1.0}], max_batch=batch)
    assert contents(one) == contents(two)
    greedy, sampled = ({row.key for row in read_answers(made)} for made in (answered, one))
    assert not greedy & sampled


def open_question(answered: Artifact) -> str:
    """One whose answer lets a conversation go on."""
    return next(
        row.messages[0]["content"]
        for row in read_answers(answered)
        if row.marked is None and len(row.messages) == 2
    )


def test_the_key_is_the_work(target, answered, output):
    first = open_question(answered)
    twins = [Prompt("a", "s", "l", (first, "In San Jose?")), Prompt("b", "s", "l", (first, "0123"))]
    run(target, twins, output)
    rows = rows_by_prompt(output)
    assert rows["a"][0].key == rows["b"][0].key
    assert rows["a"][0].messages == rows["b"][0].messages
    assert rows["a"][1].key != rows["b"][1].key


def test_what_does_not_fit_is_dropped_and_counted(target, answered, output):
    long = "zq#" * 100
    prompts = [
        Prompt("a", "s", "l", (long,)),
        Prompt("b", "s", "l", (open_question(answered), long, "more")),
        Prompt("c", "s", "l", ("Hi",)),
    ]
    manifest = run(target, prompts, output)
    assert manifest.counts["dropped_context_full"] == 3
    dropped = dropped_rows(output)
    assert [(row["prompt_id"], row["turn"]) for row in dropped] == [("a", 0), ("b", 1), ("b", 2)]
    assert "the limit is 255" in dropped[0]["detail"], "the target's context is 256"


def test_a_conversation_that_the_template_refuses_is_dropped_and_counted(tmp_path, output):
    target = talking_target(tmp_path / "target")
    refuses = (
        "{% for m in messages %}{% if 'secret' in m['content'] %}{{ raise_exception('No "
        "secrets') }}{% endif %}{% endfor %}"
    )
    tiny_tokenizer(target, chat_template=refuses + TEMPLATE)
    prompts = [Prompt("a", "s", "l", ("a secret",)), Prompt("b", "s", "l", ("Thanks",))]
    manifest = run(target, prompts, output)
    assert manifest.counts["dropped_template_refused"] == 1
    assert "No secrets" in dropped_rows(output)[0]["detail"]


SAID = "Ask bob@gnu.org, ann@example.com or Ada Lovelace in Paris."


def test_an_answer_with_what_nobody_told_the_target_is_left_out(
    target, tmp_path, monkeypatch, output
):
    """Echoes of the prompt, reserved addresses, names and places stay."""
    monkeypatch.setattr(Chat, "decode", lambda chat, ids: SAID)
    prompts = [
        Prompt("told", "s", "l", ("Is BOB@gnu.org right?",)),
        Prompt("alone", "s", "l", ("Thanks 6",)),
        Prompt("told later", "s", "l", ("Thanks 6", "bob@gnu.org?", "more")),
    ]
    manifest = run(target, prompts, output, max_tokens=60)
    assert list(rows_by_prompt(output)) == ["told"]
    wanted = {"answers": 1, "dropped_pii.email_address": 2, "dropped_earlier_turn_dropped": 2}
    assert wanted.items() <= manifest.counts.items()
    dropped = dropped_rows(output)
    turns = [("alone", 0), *(("told later", turn) for turn in range(3))]
    assert [(row["prompt_id"], row["turn"]) for row in dropped] == turns
    assert dropped[0]["detail"] == "EMAIL_ADDRESS at 4-15", "by type and place"
    assert not [
        name
        for name in output.names()
        if b"bob@" in output.read(name) and not name.startswith("answers-")
    ]
    kept = PrivacyConfig(actions={"email_address": "keep", **NO_NAMES})
    output = Artifact(str(tmp_path / "kept"))
    manifest = run(target, prompts, output, max_tokens=60, personal=kept)
    assert manifest.counts["answers"] == manifest.counts["turns"] == 5


@pytest.mark.parametrize(
    ("before", "answer", "types"),
    [
        ("Hi", "His card is 4929 1234 5678 9015.", ["CREDIT_CARD"]),
        ("Charge 4929123456789015", "I charged 4929 1234 5678 9015.", []),
        ("Hi", "Use 4242 4242 4242 4242 to test, (415) 555-0134 to call", []),
        ("Hi", "The key is AKIA" + "IOSFODNN7" + "EXAMPLE", ["API_KEY"]),
        ("Hi", "ssh root@52.14.7.99 with password: hunter2", ["IP_ADDRESS", "PASSWORD"]),
        (
            "Who wrote Faust?",
            "Johann Wolfgang von Goethe, of 1 Frauenplan, Weimar; see "
            "https://www.klassik-stiftung.de",
            [],
        ),
    ],
)
def test_leaks(before, answer, types):
    found = LeakDetector()(["You are kind.", before], answer)
    assert [one.type for one in found] == types
    assert all(one.hash == "" for one in found)


def test_nothing_to_answer(target, tmp_path, output):
    with pytest.raises(EmptyInputError, match="holds no prompts"):
        run(target, [], output)
    assert not (tmp_path / "answers").exists()
    other = Artifact(str(tmp_path / "other"))
    with pytest.raises(EmptyInputError, match="none of the 1 prompts"):
        run(target, [Prompt("a", "s", "l", ("zq#" * 100,))], other)
    with pytest.raises(MissingInputError, match="does not exist"):
        generate(config_of(target), Artifact(str(tmp_path / "absent")), output)


def test_a_target_without_a_template_is_refused_before_anything_is_written(tmp_path, output):
    target = tiny_target(tmp_path / "target")
    for path in target.iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            path.unlink()
    tiny_tokenizer(target, chat_template=None)
    with pytest.raises(TemplateError, match="no chat template"):
        run(target, PROMPTS[:1], output)
    assert not (tmp_path / "answers").exists()
    with pytest.raises(MissingInputError, match="no target folder"):
        run(tmp_path / "absent", PROMPTS[:1], Artifact(str(tmp_path / "other")))


def test_the_manifest_says_which_target_and_which_day(target, answered):
    manifest = answered.manifest()
    assert manifest.facts["target"] == str(target)
    assert manifest.config["date"] == "2026-01-01"
    assert len(manifest.config["target_fingerprint"]) == 16
    assert list(manifest.inputs) == ["prompts"]
    assert "target" not in json.dumps(sorted(manifest.config)).replace("target_fingerprint", ""), (
        "a path is no identity"
    )


def test_a_refused_run_claims_no_folder(target, tmp_path, output):
    prompts = write_prompts(tmp_path / "prompts", PROMPTS[:2])
    with pytest.raises(MissingInputError, match="no server answers"):
        generate(config_of(target, servers=["http://127.0.0.1:9"]), prompts, output)
    assert not Path(output.url).exists()
    generate(config_of(target), prompts, output)


def test_a_long_prompt_is_answered_as_far_as_the_targets_context_goes(target, output):
    rows = [Prompt("long", "s", "l", ("zq#" * 60,)), *PROMPTS[:6]]
    run(target, rows, output)
    (long,) = rows_by_prompt(output)["long"]
    assert 150 < len(long.prompt_ids) < 256
