"""The stage `generate`: the target's own words, every turn accounted for, nothing lost or repeated
on resume.
"""

import collections
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas.artifact import VERSION, Artifact
from eyas.chat import Chat
from eyas.engine.engine import Engine
from eyas.errors import EmptyInputError, InputError, MissingInputError, TemplateError
from eyas.features import generate as stage
from eyas.features.generate import GenerateConfig, generate, open_backend
from eyas.privacy.detector import LeakDetector
from eyas.privacy.pii import PrivacyConfig
from eyas.records import Answer, Prompt, read_answers, read_origins
from tests.chat_folders import like_qwen_target
from tests.stages import prompts_of, talking_target, write_prompts
from tests.tiny import TEMPLATE, tiny_target, tiny_tokenizer

PROMPTS = prompts_of(23)
NO_NAMES = {"person": "keep", "street_address": "keep", "location": "keep"}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return talking_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(autouse=True, scope="module")
def small_parts():
    """Several parts of few prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage, "ROWS_PER_PART", 4)
        yield


def config_of(target: Path, **settings: Any) -> GenerateConfig:
    return GenerateConfig(**{"target": str(target), "max_tokens": 12, "max_batch": 5, **settings})


@pytest.fixture(scope="module")
def answered(target, tmp_path_factory) -> Artifact:
    """All prompts, greedily, in one go."""
    root = tmp_path_factory.mktemp("answered")
    output = Artifact(str(root / "answers"))
    generate(config_of(target), write_prompts(root / "prompts", PROMPTS), output)
    return output


def rows_by_prompt(artifact: Artifact) -> dict[str, list[Answer]]:
    rows: dict[str, list[Answer]] = collections.defaultdict(list)
    for answer in read_answers(artifact):
        rows[answer.prompt_id].append(answer)
    return rows


def dropped_rows(artifact: Artifact) -> list[dict[str, Any]]:
    return [
        row
        for name in artifact.names()
        if name.startswith("dropped-")
        for row in artifact.read_jsonl(name)
    ]


def test_every_turn_is_an_answer_or_a_counted_drop(answered):
    counts = answered.manifest("generate").counts
    assert counts["prompts"] == len(PROMPTS)
    assert counts["turns"] == sum(len(prompt.turns) for prompt in PROMPTS)
    assert (
        counts["turns"]
        == counts["answers"]
        + counts["dropped_earlier_turn_cut"]
        + counts["dropped_earlier_turn_marked"]
    )
    rows, dropped = rows_by_prompt(answered), dropped_rows(answered)
    assert list(rows) == [prompt.id for prompt in PROMPTS], "in the prompts' order, all of them"
    for prompt in PROMPTS:
        turns = [answer.turn for answer in rows[prompt.id]]
        turns += [row["turn"] for row in dropped if row["prompt_id"] == prompt.id]
        assert turns == list(range(len(prompt.turns)))
    assert {answer.finish_reason for answer in read_answers(answered)} == {"stop", "length"}, (
        "the test wants both"
    )
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
    """What is the same in every run stands in the row, the rest beside it, line by line."""
    rows, origins = list(read_answers(answered)), list(read_origins(answered))
    assert [(row.key, row.prompt_id, row.turn) for row in rows] == [
        (one.key, one.prompt_id, one.turn) for one in origins
    ]
    assert {(row.temperature, row.top_p, row.top_k, row.max_tokens, row.seed) for row in rows} == {
        (0.0, 1.0, 0, 12, None)
    }
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


def contents(artifact: Artifact) -> dict[str, bytes]:
    """The rows that are the same in every run, as they lie on disk."""
    return {
        name: artifact.read(name)
        for name in artifact.names()
        if name.startswith(("answers-", "dropped-"))
    }


def test_the_batch_changes_no_answer(target, answered, tmp_path):
    prompts = write_prompts(tmp_path / "prompts", PROMPTS)
    generate(config_of(target, max_batch=1), prompts, Artifact(str(tmp_path / "one")))
    assert contents(Artifact(str(tmp_path / "one"))) == contents(answered)


def test_the_engine_in_this_process_runs_on_a_gpu_where_there_is_one(target, monkeypatch):
    devices = []
    load = Engine.load

    def recorded(*settings):
        devices.append(settings[-1])
        return load(*settings[:-1], "cpu")

    monkeypatch.setattr(Engine, "load", recorded)
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(stage, "default_device", lambda device=device: device)
        with closing(open_backend(config_of(target), Chat(target), str(target), 200)):
            pass
    assert devices == ["cpu", "cuda"]


def test_finished_work_is_not_done_again(target, answered, tmp_path, monkeypatch):
    prompts = Artifact(answered.url.replace("/answers", "/prompts"))
    monkeypatch.setattr(Engine, "load", lambda *_: pytest.fail("loads the target to do nothing"))
    again = Artifact(answered.url)
    assert generate(config_of(target), prompts, again) == answered.manifest()
    assert again.was_done
    with pytest.raises(InputError, match="holds other work"):
        generate(config_of(target, sampling=[{"temperature": 0.5}]), prompts, again)


def test_sampling_is_repeatable_and_part_of_the_key(target, answered, tmp_path):
    prompts = write_prompts(tmp_path / "prompts", PROMPTS[:6])
    runs = []
    for name, batch in (("one", 6), ("two", 2)):
        output = Artifact(str(tmp_path / name))
        generate(
            config_of(target, sampling=[{"temperature": 1.0}], max_batch=batch), prompts, output
        )
        runs.append(contents(output))
    assert runs[0] == runs[1]
    greedy = {answer.key for answer in read_answers(answered)}
    sampled = {answer.key for answer in read_answers(Artifact(str(tmp_path / "one")))}
    assert not greedy & sampled


def open_question(answered: Artifact) -> str:
    """One whose answer lets a conversation go on."""
    return next(
        row.messages[0]["content"]
        for row in read_answers(answered)
        if row.marked is None and len(row.messages) == 2
    )


def test_the_key_is_the_work(target, answered, tmp_path):
    """Two prompts that begin alike have the same first question and different second ones."""
    first = open_question(answered)
    twins = [Prompt("a", "s", "l", (first, "In San Jose?")), Prompt("b", "s", "l", (first, "0123"))]
    output = Artifact(str(tmp_path / "answers"))
    generate(config_of(target), write_prompts(tmp_path / "prompts", twins), output)
    rows = rows_by_prompt(output)
    assert rows["a"][0].key == rows["b"][0].key
    assert rows["a"][0].messages == rows["b"][0].messages
    assert rows["a"][1].key != rows["b"][1].key


def test_what_does_not_fit_is_dropped_and_counted(target, answered, tmp_path):
    long = "zq#" * 100
    prompts = [
        Prompt("a", "s", "l", (long,)),
        Prompt("b", "s", "l", (open_question(answered), long, "more")),
        Prompt("c", "s", "l", ("Hi",)),
    ]
    output = Artifact(str(tmp_path / "answers"))
    manifest = generate(config_of(target), write_prompts(tmp_path / "prompts", prompts), output)
    assert manifest.counts["dropped_context_full"] == 3
    dropped = dropped_rows(output)
    assert [(row["prompt_id"], row["turn"]) for row in dropped] == [("a", 0), ("b", 1), ("b", 2)]
    assert "the limit is 255" in dropped[0]["detail"], "the target's context is 256"


def test_a_conversation_that_the_template_refuses_is_dropped_and_counted(tmp_path):
    target = talking_target(tmp_path / "target")
    refuses = (
        "{% for m in messages %}{% if 'secret' in m['content'] %}{{ raise_exception('No "
        "secrets') }}{% endif %}{% endfor %}"
    )
    tiny_tokenizer(target, chat_template=refuses + TEMPLATE)
    prompts = [Prompt("a", "s", "l", ("a secret",)), Prompt("b", "s", "l", ("Thanks",))]
    output = Artifact(str(tmp_path / "answers"))
    manifest = generate(config_of(target), write_prompts(tmp_path / "prompts", prompts), output)
    assert manifest.counts["dropped_template_refused"] == 1
    assert "No secrets" in dropped_rows(output)[0]["detail"]


SAID = "Ask bob@gnu.org, ann@example.com or Ada Lovelace in Paris."


def test_an_answer_with_what_nobody_told_the_target_is_left_out(target, tmp_path, monkeypatch):
    """An echo of the prompt, a reserved address, names and places stay; what came out of nowhere
    goes, and its later turns.
    """
    monkeypatch.setattr(Chat, "decode", lambda chat, ids: SAID)
    prompts = [
        Prompt("told", "s", "l", ("Is BOB@gnu.org right?",)),
        Prompt("alone", "s", "l", ("Thanks 6",)),
        Prompt("told later", "s", "l", ("Thanks 6", "bob@gnu.org?", "more")),
    ]
    output = Artifact(str(tmp_path / "answers"))
    manifest = generate(
        config_of(target, max_tokens=60), write_prompts(tmp_path / "prompts", prompts), output
    )
    assert list(rows_by_prompt(output)) == ["told"]
    counts = manifest.counts
    assert (
        counts["answers"],
        counts["dropped_pii.email_address"],
        counts["dropped_earlier_turn_dropped"],
    ) == (1, 2, 2)
    dropped = dropped_rows(output)
    assert [(row["prompt_id"], row["turn"]) for row in dropped] == [
        ("alone", 0),
        ("told later", 0),
        ("told later", 1),
        ("told later", 2),
    ]
    assert dropped[0]["detail"] == "EMAIL_ADDRESS at 4-15", "by type and place"
    assert not [
        name
        for name in output.names()
        if b"bob@" in output.read(name) and not name.startswith("answers-")
    ]
    kept = PrivacyConfig(actions={"email_address": "keep", **NO_NAMES})
    output = Artifact(str(tmp_path / "kept"))
    manifest = generate(
        config_of(target, max_tokens=60, personal=kept), Artifact(str(tmp_path / "prompts")), output
    )
    assert manifest.counts["answers"] == manifest.counts["turns"] == 5


@pytest.mark.parametrize(
    ("before", "answer", "types"),
    [
        ("Hi", "His card is 4929 1234 5678 9015.", ["CREDIT_CARD"]),
        ("Charge 4929123456789015", "I charged 4929 1234 5678 9015.", []),
        ("Hi", "Use 4242 4242 4242 4242 to test, (415) 555-0134 to call", []),
        ("Hi", "The key is AKIA" + "IOSFODNN7" + "EXAMPLE", ["API_KEY"]),
        ("Hi", "ssh root@8.8.8.8 with password: hunter2", ["IP_ADDRESS", "PASSWORD"]),
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


def test_nothing_to_answer(target, tmp_path):
    none = write_prompts(tmp_path / "none", [])
    with pytest.raises(EmptyInputError, match="holds no prompts"):
        generate(config_of(target), none, Artifact(str(tmp_path / "answers")))
    assert not (tmp_path / "answers").exists()
    long = write_prompts(tmp_path / "long", [Prompt("a", "s", "l", ("zq#" * 100,))])
    with pytest.raises(EmptyInputError, match="none of the 1 prompts"):
        generate(config_of(target), long, Artifact(str(tmp_path / "answers")))
    with pytest.raises(MissingInputError, match="does not exist"):
        generate(
            config_of(target), Artifact(str(tmp_path / "absent")), Artifact(str(tmp_path / "other"))
        )


def test_a_target_without_a_template_is_refused_before_anything_is_written(tmp_path):
    target = tiny_target(tmp_path / "target")
    for path in target.iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            path.unlink()
    tiny_tokenizer(target, chat_template=None)
    prompts = write_prompts(tmp_path / "prompts", PROMPTS[:1])
    with pytest.raises(TemplateError, match="no chat template"):
        generate(config_of(target), prompts, Artifact(str(tmp_path / "answers")))
    assert not (tmp_path / "answers").exists()
    with pytest.raises(MissingInputError, match="no target folder"):
        generate(config_of(tmp_path / "absent"), prompts, Artifact(str(tmp_path / "answers")))


def test_the_manifest_says_which_target_and_which_day(target, answered):
    manifest = answered.manifest()
    assert manifest.facts["target"] == str(target)
    assert manifest.config["date"] == "2026-01-01"
    assert len(manifest.config["target_fingerprint"]) == 16
    assert list(manifest.inputs) == ["prompts"]
    assert "target" not in json.dumps(sorted(manifest.config)).replace("target_fingerprint", ""), (
        "a path is no identity"
    )


def test_a_refused_run_claims_no_folder(target, tmp_path):
    """What the refusal advises changes the identity: the same folder must still be free."""
    prompts, output = write_prompts(tmp_path / "prompts", PROMPTS[:2]), tmp_path / "answers"
    with pytest.raises(MissingInputError, match="no server answers"):
        generate(config_of(target, servers=["http://127.0.0.1:9"]), prompts, Artifact(str(output)))
    assert not output.exists()
    generate(config_of(target), prompts, Artifact(str(output)))


def test_a_long_prompt_is_answered_as_far_as_the_targets_context_goes(target, tmp_path):
    """By default, and beside others that share the cache."""
    rows = [Prompt("long", "s", "l", ("zq#" * 60,)), *PROMPTS[:6]]
    output = Artifact(str(tmp_path / "answers"))
    generate(config_of(target), write_prompts(tmp_path / "prompts", rows), output)
    (long,) = rows_by_prompt(output)["long"]
    assert 150 < len(long.prompt_ids) < 256


def test_tools_are_in_the_prompt(tmp_path):
    target = like_qwen_target(tmp_path / "target")
    tools = ({"type": "function", "function": {"name": "find", "description": "Finds."}},)
    rows = [Prompt("with", "s", "l", ("Hi",), tools=tools), Prompt("without", "s", "l", ("Hi",))]
    output = Artifact(str(tmp_path / "answers"))
    generate(config_of(target), write_prompts(tmp_path / "prompts", rows), output)
    chat = Chat(target)
    shown = {name: chat.decode(rows[0].prompt_ids) for name, rows in rows_by_prompt(output).items()}
    assert '"find"' in shown["with"]
    assert "find" not in shown["without"]
