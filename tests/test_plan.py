"""`eyas plan` counts what the stages then make, or more; without room nothing begins."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from eyas.artifact import Artifact
from eyas.chat import Chat
from eyas.cli import run as cli_run
from eyas.cli.options import read_run_file
from eyas.cli.run import RunConfig
from eyas.errors import EmptyInputError, StorageFullError
from eyas.features.capture import CaptureConfig, capture
from eyas.features.generate import GenerateConfig, generate
from eyas.model.config import HeadConfig, HeadOptions
from eyas.operators.head import Head
from eyas.operators.shape import target_shape
from eyas.plan.needs import (
    SAMPLE_SIZE,
    STAND_IN,
    Needs,
    PlannedRun,
    Room,
    count_needs,
    feature_bytes,
    head_parameters,
    keeps_earlier_turns,
    plan_run,
    read_prompts,
    refuse_without_room,
    source_prompts,
    turn_lengths,
)
from eyas.records import Prompt, read_answers
from eyas.settings import validated
from eyas.shards import CODECS, FeatureMeta
from eyas.train.trainer import TrainConfig
from tests.architectures import save_architecture
from tests.stages import ending_target, prompts_of, write_prompts
from tests.test_cli import run_eyas
from tests.tiny import TEMPLATE, tiny_target, tiny_tokenizer

TRAIN = TrainConfig(
    head={"draft_vocab_size": 64}, objective={"num_ttt_steps": 2}, epochs=2, batches={"tokens": 256}
)
# An earlier answer is marked, so that no turn begins with the tokens of the one before.
REWRITES = TEMPLATE.replace(
    "message['content'] +",
    "('~' if message['role'] == 'assistant' and not loop.last else '') + message['content'] +",
)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ending_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts", prompts_of(29))


def work_of(target: Path, output: Path, **changes: Any) -> PlannedRun:
    generate = GenerateConfig(**{"target": str(target), "max_tokens": 12, **changes})
    captured = CaptureConfig(target=str(target), codec="raw")
    return PlannedRun(str(target), str(output), generate, captured, TRAIN)


def test_what_is_counted_is_what_is_made_or_more(target, prompts, tmp_path):
    run = work_of(target, tmp_path)
    plan = plan_run(run, *read_prompts(prompts))
    needs = plan.needs
    answers, features = Artifact(str(tmp_path / "answers")), Artifact(str(tmp_path / "features"))
    generate(run.generate, prompts, answers)
    capture(run.capture, answers, features)
    rows = list(read_answers(answers))
    firsts = {row.prompt_id: len(row.prompt_ids) for row in rows if row.turn == 0}
    assert needs.prompts == 29
    assert needs.answers == sum(len(prompt.turns) for prompt in prompts_of(29)) >= len(rows)
    assert needs.answer_tokens == 12 * needs.answers >= sum(len(row.answer_ids) for row in rows)
    assert needs.prompt_tokens >= sum(len(row.prompt_ids) for row in rows)
    lengths = {prompt.id: turn_lengths(prompt, Chat(target), 12, 1024) for prompt in prompts_of(29)}
    # exact, where nothing comes before
    assert {name: found[0] for name, found in lengths.items() if found} == firsts
    made = features.manifest().counts["tokens"]
    assert made <= needs.feature_tokens < 6 * made
    begun = dataclasses.replace(run, begun=(answers.url, features.url))
    room = plan_run(begun, *read_prompts(prompts)).room
    names = [name for name in features.names() if "safetensors" in name]
    assert room.features >= sum(features.size(name) for name in names) > 0
    assert room.answers >= sum(answers.size(name) for name in answers.names() if "answers" in name)
    assert room.present >= room.features / 10, "what is there already is not asked for again"
    assert plan_run(run, *read_prompts(prompts)).room.present == 0, "not this run's"


def test_turns_come_after_those_before_them(target):
    chat = Chat(target)
    prompt = Prompt("a", "", "", ("Hi", "In San Jose?", "Thanks"), system="Be brief.")
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    first = len(chat.prompt_ids(said))
    said.append({"role": "assistant", "content": STAND_IN})
    second = len(chat.prompt_ids([*said, {"role": "user", "content": "In San Jose?"}]))
    lengths = turn_lengths(prompt, chat, 100, 10_000)
    assert lengths is not None
    assert lengths[:2] == [first, second + 100]
    assert len(lengths) == 3
    # no room for an answer, so it is not asked
    assert turn_lengths(prompt, chat, 100, second + 100) == [first]


def test_a_conversation_is_one_sample_where_the_template_lets_the_past_be(tmp_path):
    prompts = [Prompt("a", "", "", ("Hi", "Thanks"))]
    for name, template in (("keeps", TEMPLATE), ("rewrites", REWRITES)):
        tiny_tokenizer(tmp_path / name, chat_template=template)
    keeps, rewrites = (Chat(tmp_path / name) for name in ("keeps", "rewrites"))
    assert keeps_earlier_turns(keeps)
    assert not keeps_earlier_turns(rewrites)
    config = GenerateConfig(target="t", max_tokens=10)
    one, two = (count_needs(prompts, 1, chat, config) for chat in (keeps, rewrites))
    before = turn_lengths(prompts[0], keeps, 10, 1024)
    assert before is not None
    assert one.feature_tokens == before[-1] + 10
    assert two.feature_tokens == two.prompt_tokens + two.answer_tokens
    drawn = config.model_copy(update={"answers_per_prompt": 3})
    three = count_needs(prompts, 1, rewrites, drawn)
    assert (three.answers, three.feature_tokens) == (3 * two.answers, 3 * two.feature_tokens)


def test_many_prompts_are_sampled_evenly(target, tmp_path):
    many = write_prompts(tmp_path / "many", prompts_of(2 * SAMPLE_SIZE + 1))
    count, sample = read_prompts(many)
    assert (count, len(sample)) == (2001, 667)
    needs = plan_run(work_of(target, tmp_path), count, sample).needs
    answers = sum(len(prompt.turns) for prompt in prompts_of(count))
    assert abs(needs.answers - answers) < 0.02 * answers
    with pytest.raises(EmptyInputError, match="no prompts"):
        read_prompts(write_prompts(tmp_path / "none", []))


def test_a_stated_length_of_answers_takes_the_place_of_the_longest(target, prompts, tmp_path):
    run = work_of(target, tmp_path)
    short, whole = (plan_run(run, *read_prompts(prompts), tokens).needs for tokens in (5, 500))
    assert (short.answer_tokens, whole.answer_tokens) == (5 * short.answers, 12 * whole.answers)


def test_features_of_an_8b_model_take_what_is_published():
    meta = FeatureMeta(taps=(1, 15, 28), hidden_size=4096, vocab_size=128256, lm_head_sha256="")
    sizes = feature_bytes(Needs(1, 1, 0, 1, 1, 1), meta, 0.0)
    assert sizes["raw"] == 4 * 2 * 4096 + 8
    assert sizes.keys() == CODECS.keys()
    assert sizes["within4"] < sizes["lossless"] < sizes["raw"]


def test_a_heads_parameters_are_counted_without_making_one(target):
    shape, options = target_shape(target), HeadOptions(draft_vocab_size=64)
    head = Head(HeadConfig.for_target(shape, options))
    assert head_parameters(shape, options) == sum(weight.numel() for weight in head.parameters())


def test_online_stores_what_is_held_out(target, prompts, tmp_path):
    work = work_of(target, tmp_path)
    stored, online = (
        plan_run(dataclasses.replace(work, online=one), *read_prompts(prompts)).room.features
        for one in (False, True)
    )
    assert online == pytest.approx(work.capture.held_out_share * stored, abs=1)


def test_a_target_that_our_engine_does_not_run_is_planned(prompts, tmp_path):
    work = work_of(save_architecture(tmp_path / "neox", "gpt_neox"), tmp_path)
    assert plan_run(work, *read_prompts(prompts)).needs.prompts == 29


def write_rows(path: Path, count: int) -> Path:
    rows = ({"prompt": f"I would like a table for {one} in San Jose."} for one in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_file(folder: Path, target: Path, **sections: Any) -> Path:
    prompts = write_rows(folder / "prompts.jsonl", 20)
    source = {"path": str(prompts), "licence": "CC0-1.0", "name": "made up", "prompts_by": "human"}
    content = {
        **{"target": str(target), "output": str(folder / "run"), "serve": {}},
        "prompts": {"sources": [source]},
        "generate": {"max_tokens": 12},
        "train": TRAIN.model_dump(mode="json"),
        **sections,
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(content))
    return path


class TestCommand:
    def test_json_has_all_of_it(self, target, prompts, tmp_path):
        shown = run_eyas("plan", run_file(tmp_path, target), "--prompts", prompts.url, "--json")
        assert shown.exit_code == 0, shown.output
        plan = json.loads(shown.stdout)
        assert plan["needs"]["prompts"] == 29
        assert plan["fits"]
        assert plan["bytes_by_codec"].keys() == set(CODECS)
        assert not (tmp_path / "run").exists()

    def test_tables(self, target, tmp_path):
        shown = run_eyas(
            "plan", run_file(tmp_path, target), "--num-prompts", 50, "--characters", 90
        )
        assert shown.exit_code == 0, shown.output
        assert "within4 (this run's)" in shown.stdout
        assert "600" in shown.stdout, "50 answers of 12 tokens"
        assert "filler prompts of 90 characters" in shown.stdout

    def test_the_sources_of_the_run_file_are_counted(self, target, tmp_path):
        path = run_file(tmp_path, target)
        shown = run_eyas("plan", path)
        assert "of all rows of the sources" in shown.stdout
        needs = json.loads(run_eyas("plan", path, "--json").stdout)["needs"]
        assert (needs["prompts"], needs["sampled"], needs["answers"]) == (20, 20, 20)
        sources = validated(RunConfig, read_run_file(path), "").prompts
        many = write_rows(tmp_path / "many.jsonl", SAMPLE_SIZE + 500)
        limits = {"max_prompts": 1200}
        other = sources.sources[0].model_copy(update={"path": str(many), **limits})
        count, sample = source_prompts(sources.model_copy(update={"sources": [other]}))
        assert (count, len(sample)) == (1200, SAMPLE_SIZE)
        assert len({prompt.turns for prompt in sample}) == SAMPLE_SIZE

    def test_a_target_that_run_refuses_is_refused(self, tmp_path):
        neox = save_architecture(tmp_path / "neox", "gpt_neox")
        path = run_file(tmp_path, neox)
        shown = run_eyas("plan", path)
        assert shown.exit_code == 2
        assert "lossless" in shown.stdout, "the plan is shown all the same: stages may do without"
        assert "answer prompts by a server" in " ".join(shown.stderr.split())
        for words in (("run", path), ("serve", "-t", neox, "--port", 0)):
            refused = run_eyas(*words)
            assert refused.exit_code == 2
            assert "'gpt_neox' model; eyas' own engine runs Llama" in refused.stderr
        assert "check says which servers take the head" in refused.stderr
        assert not (tmp_path / "run").exists()

    def test_too_few_layers_are_refused_at_once(self, tmp_path):
        short = tiny_target(tmp_path / "short", num_hidden_layers=6)
        prompts = write_prompts(tmp_path / "prompts", prompts_of(2))
        path = run_file(tmp_path, short)
        for words in (
            ("plan", path),
            ("run", path),
            ("generate", prompts.url, "-t", short, "-o", tmp_path / "answers"),
        ):
            shown = run_eyas(*words)
            assert shown.exit_code == 2
            assert "a target of 6 layers has no three distinct taps" in shown.stderr
        assert not (tmp_path / "run").exists()
        assert not (tmp_path / "answers").exists()

    def test_without_room_the_exit_code_is_2(self, target, tmp_path, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 1_000_000))
        shown = run_eyas("plan", run_file(tmp_path, target), "--num-prompts", 100_000)
        assert shown.exit_code == 2
        assert "lossless" in shown.stdout, "the plan is shown all the same"
        assert "1 MB are free" in shown.stderr

    def test_a_run_without_room_answers_nothing(self, target, tmp_path, monkeypatch):
        # some prompts are held out: a run with none ends before it answers, whatever the room
        path = run_file(tmp_path, target, capture={"held_out_share": 0.5})

        def unwanted(*_: object) -> None:
            raise RuntimeError("it answers")

        monkeypatch.setattr(cli_run, "generate", unwanted)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 1_000))
        refused = run_eyas("run", path)
        assert refused.exit_code == 2, refused.output
        assert "--anyway" in refused.stderr
        assert isinstance(run_eyas("run", path, "--anyway").exception, RuntimeError)


def test_an_object_store_has_no_end():
    refuse_without_room(Room(answers=1, features=10**18, head=1, free=None), "s3://bucket/run")
    refuse_without_room(Room(answers=1, features=10, head=1, free=2, present=10), "out")
    with pytest.raises(StorageFullError):
        refuse_without_room(Room(answers=1, features=10, head=1, free=1, present=10), "out")
