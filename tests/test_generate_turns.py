"""Turn by turn: every row is what a server saw; shares of sampling; memory; a head."""

from __future__ import annotations

import gc
import re
import shutil
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from eyas.artifact import Artifact
from eyas.chat import Chat
from eyas.engine.engine import Engine
from eyas.features.conversation import Conversation, Sampling, sampling_of
from eyas.features.generate import GenerateConfig, generate
from eyas.features.samples import plan_samples
from eyas.records import Prompt, read_answers
from tests.chat_folders import like_gpt_oss, like_qwen_target
from tests.serving import ScriptedEngine, World
from tests.stages import prompts_of, talking_target, write_prompts
from tests.tiny import tiny_target
from tests.tiny_head import head_folder

QWEN3 = Path(__file__).resolve().parents[2] / "shared" / "data" / "tokenizers" / "qwen3"
THOUGHTS, SAID = "<think>\nThe user wants a colour.\n</think>\n\n", "Blue, of course."
TURNS = ("Name a colour.", "Another one?", "And a last one.")


def thinking_target(folder: Path, kind: str) -> Path:
    """Its template drops the thoughts of earlier turns."""
    if kind == "like":
        return like_qwen_target(folder)
    if not QWEN3.is_dir():
        pytest.skip("needs Qwen3's tokenizer in ../shared/data/tokenizers")
    tiny_target(
        folder,
        family="qwen3",
        vocab_size=151936,
        eos_token_id=[151645, 151643],
        num_hidden_layers=7,
    )
    for path in folder.iterdir():
        if path.name.startswith(("tokenizer", "chat_template", "special_tokens")):
            path.unlink()
    for path in QWEN3.iterdir():
        if path.name not in ("config.json", "LICENSE", "README.md"):
            shutil.copy(path, folder)
    return folder


def scripted(chat: Chat) -> type[ScriptedEngine]:
    class Thinking(ScriptedEngine):
        script = (
            *chat.tokenizer.encode(THOUGHTS + SAID, add_special_tokens=False).ids,
            chat.eos_token_ids[0],
        )

    return Thinking


@pytest.mark.parametrize(
    ("kind", "by"), [("like", "engine"), ("like", "server"), ("real", "server")]
)
def test_a_template_that_drops_earlier_thoughts(kind, by, tmp_path, monkeypatch):
    target = thinking_target(tmp_path / "target", kind)
    chat = Chat(target)
    thinking = scripted(chat)
    prompts = write_prompts(
        tmp_path / "prompts", [Prompt("a", "s", "l", TURNS), Prompt("b", "s", "l", TURNS[:1])]
    )
    output = Artifact(str(tmp_path / "answers"))
    settings: dict[str, Any] = {"target": str(target), "max_length": 200, "max_tokens": 60}
    if by == "engine":
        engine = thinking(World(target).target, tokenizer=chat.tokenizer)
        monkeypatch.setattr(Engine, "load", lambda *_, **__: engine)
        generate(GenerateConfig(**settings), prompts, output)
        seen = [request.prompt_ids for request in sorted(engine.asked, key=lambda one: one.id)]
    else:
        world = World(target)
        engine = world.engine(thinking)
        with world.served(engine) as client:
            generate(GenerateConfig(**settings, servers=[client.url]), prompts, output)
        asked = [request for request in engine.asked if request.params.max_tokens > 1]
        seen = sorted((request.prompt_ids for request in asked), key=len)
    rows = list(read_answers(output))
    assert [(row.prompt_id, row.turn) for row in rows] == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    for row in rows:
        assert [one["content"] for one in row.messages if one["role"] == "assistant"] == [
            THOUGHTS + SAID
        ] * (row.turn + 1)
        prompt_ids = tuple(chat.prompt_ids(row.messages[:-1]))
        assert row.prompt_ids == prompt_ids
        assert prompt_ids in seen, "exactly as it was seen"
        assert row.answer_ids == thinking.script
        assert chat.decode(prompt_ids).count("The user wants") == 0, "earlier thoughts are gone"
        assert chat.decode(prompt_ids).count(SAID) == row.turn, "earlier answers are not"
    assert len(seen) == len(rows)
    plan = plan_samples(rows, 1 << 20, ())
    assert [int(one.loss_mask.sum()) for one in plan.samples] == [len(thinking.script)] * 4
    assert plan.num_merged == 0, "the past is another one in each turn"


def test_an_answer_in_parts_ends_its_conversation_where_nothing_parses_it(tmp_path, monkeypatch):
    """Their text in one would be no earlier turn that a server shows the target."""
    target = tiny_target(tmp_path / "target", vocab_size=440)
    for path in target.glob("tokenizer*"):
        path.unlink()
    chat = Chat(like_gpt_oss(target))
    text = "<|channel|>analysis<|message|>A colour.<|end|><|start|>assistant<|channel|>final"

    class Channels(ScriptedEngine):
        script = (
            *chat.tokenizer.encode(f"{text}<|message|>{SAID}", add_special_tokens=False).ids,
            chat.eos_token_ids[0],
        )

    engine = Channels(World(target).target, tokenizer=chat.tokenizer)
    monkeypatch.setattr(Engine, "load", lambda *_, **__: engine)
    prompts = write_prompts(tmp_path / "prompts", [Prompt("a", "s", "l", TURNS[:2])])
    output = Artifact(str(tmp_path / "answers"))
    manifest = generate(GenerateConfig(target=str(target), max_tokens=100), prompts, output)
    (row,) = read_answers(output)
    assert row.answer_ids == Channels.script
    (sample,) = plan_samples([row], 256, ()).samples
    assert sample.token_ids[sample.loss_mask].tolist() == list(Channels.script)
    assert manifest.counts["dropped_earlier_turn_in_parts"] == 1


# Sampling in shares

MIX = (Sampling(share=0.7), Sampling(share=0.3, temperature=1.0, top_p=0.95, top_k=40))


def test_shares_of_conversations_are_sampled_as_they_say(tmp_path):
    target = talking_target(tmp_path / "target")
    prompts = prompts_of(60)
    output = Artifact(str(tmp_path / "answers"))
    config = GenerateConfig(target=str(target), max_tokens=8, sampling=MIX)
    generate(config, write_prompts(tmp_path / "prompts", prompts), output)
    rows = {row.prompt_id: row for row in read_answers(output)}
    share = sum(row.temperature == 0 for row in rows.values()) / len(rows)
    assert 0.5 < share < 0.85
    for prompt in prompts:
        row, wanted = rows[prompt.id], sampling_of(prompt, MIX)
        if wanted.temperature:
            assert (row.temperature, row.top_p, row.top_k) == (1.0, 0.95, 40)
            assert row.seed is not None
            assert 0 <= row.seed < 2**31
        else:
            assert (row.temperature, row.top_p, row.top_k, row.seed) == (0.0, 1.0, 0, None)
    assert len({row.seed for row in rows.values() if row.seed is not None}) > 10


def test_several_conversations_with_each_prompt(tmp_path):
    target = talking_target(tmp_path / "target")
    prompts = prompts_of(12)
    output = Artifact(str(tmp_path / "answers"))
    thirds = tuple(Sampling(share=1 / 3, temperature=at) for at in (0.0, 0.7, 1.0))
    config = GenerateConfig(target=str(target), max_tokens=8, sampling=thirds, answers_per_prompt=3)
    made = generate(config, write_prompts(tmp_path / "prompts", prompts), output)
    rows = list(read_answers(output))
    first_turns = [row for row in rows if row.turn == 0]
    for prompt in prompts:
        of_prompt = [row for row in first_turns if row.prompt_id == prompt.id]
        assert sorted(row.temperature for row in of_prompt) == [0.0, 0.7, 1.0]
    assert made.counts["turns"] == 3 * sum(len(prompt.turns) for prompt in prompts)
    keys = [one.key for one in plan_samples(rows, 10_000, ()).samples]
    assert len(set(keys)) == len(keys) > 2 * len(prompts)
    assert len({row.key for row in rows}) == len(rows)


def test_greedy_answers_would_be_the_same():
    half = (Sampling(share=0.5), Sampling(share=0.5, temperature=1.0))
    assert GenerateConfig(target="t", sampling=half, answers_per_prompt=2)
    with pytest.raises(ValidationError, match=r"one share of temperature 0, of 0\.3333 at most"):
        GenerateConfig(target="t", sampling=half, answers_per_prompt=3)
    for of in range(2, 20):  # what the error says is taken
        with pytest.raises(ValidationError) as refused:
            GenerateConfig(target="t", answers_per_prompt=of)
        said = float(re.search(r"of ([\d.]+) at most", str(refused.value))[1])
        shares = (Sampling(share=said), Sampling(share=1 - said, temperature=1.0))
        assert GenerateConfig(target="t", sampling=shares, answers_per_prompt=of)
    twice = [(0.25, 0.0), (0.25, 1.0), (0.25, 0.0), (0.25, 0.7)]
    shares = tuple(Sampling(share=share, temperature=heat) for share, heat in twice)
    with pytest.raises(ValidationError, match="one share of temperature 0"):
        GenerateConfig(target="t", sampling=shares, answers_per_prompt=2)


@settings(max_examples=30)
@given(
    st.lists(st.text(min_size=1), min_size=1, max_size=3),
    st.none() | st.text(),
    st.text(),
    st.text(),
)
def test_the_share_is_a_matter_of_what_is_said(turns, system, one, other):
    first, second = (Prompt(name, name, "l", tuple(turns), system) for name in (one, other))
    assert sampling_of(first, MIX) == sampling_of(second, MIX)
    assert sampling_of(first, MIX[:1]) == MIX[0]


def test_shares_come_out_right():
    mix = (
        Sampling(share=0.2),
        Sampling(share=0.5, temperature=0.7),
        Sampling(share=0.3, temperature=1.0),
    )
    counts = Counter(
        sampling_of(Prompt("p", "s", "l", (f"Question {number}",)), mix).temperature
        for number in range(6000)
    )
    assert {name: round(count / 6000, 1) for name, count in counts.items()} == {
        0.0: 0.2,
        0.7: 0.5,
        1.0: 0.3,
    }


@pytest.mark.parametrize(
    ("sampling", "match"),
    [
        ([], "at least 1 item"),
        ([{"share": 0.7}, {"share": 0.2, "temperature": 1}], "shares sum to 0.9"),
        ([{"share": 0}], "greater than 0"),
        ([{"temperature": -1}], "temperature -1"),
        ([{"temperature": 1e-9}], "nearly 0"),
        ([{"temperature": 1, "top_p": 0}], "top_p 0"),
        ([{"temperature": 1, "seed": 3}], "Extra inputs"),
    ],
)
def test_sampling_that_cannot_be(sampling, match):
    with pytest.raises(ValidationError, match=match):
        GenerateConfig(target="builtin", sampling=sampling)


# Memory, and a head


def test_memory_holds_one_part_and_what_is_running(tmp_path, monkeypatch):
    target = talking_target(tmp_path / "target")
    alive: weakref.WeakSet[Conversation] = weakref.WeakSet()
    made, most = [0], [0]
    init = Conversation.__init__

    def counted(self, *options):
        init(self, *options)
        alive.add(self)
        made[0] += 1
        gc.collect(0)
        most[0] = max(most[0], len(alive))

    monkeypatch.setattr(Conversation, "__init__", counted)
    monkeypatch.setattr("eyas.features.generate.ROWS_PER_PART", 10)
    config = GenerateConfig(target=str(target), max_tokens=4, max_batch=4)
    generate(
        config,
        write_prompts(tmp_path / "prompts", prompts_of(100)),
        Artifact(str(tmp_path / "answers")),
    )
    assert made[0] == 100
    assert most[0] <= 2 * 10 + 4


def test_a_head_changes_no_row(tmp_path):
    target = talking_target(tmp_path / "target")
    head = head_folder(target, tmp_path / "head")
    prompts = write_prompts(tmp_path / "prompts", prompts_of(23))
    plain, drafted = Artifact(str(tmp_path / "plain")), Artifact(str(tmp_path / "drafted"))
    config = GenerateConfig(target=str(target), max_tokens=12, max_batch=5, sampling=MIX)
    without = generate(config, prompts, plain)
    with_head = generate(
        config.model_copy(update={"head": str(head), "max_batch": 3}), prompts, drafted
    )
    assert without.identity == with_head.identity
    assert with_head.facts["head"] == str(head)
    for name in plain.names():
        if name.startswith(("answers-", "dropped-")):
            assert plain.read(name) == drafted.read(name)
    with pytest.raises(ValidationError, match="servers have their own"):
        GenerateConfig(target="t", head="h", servers=["http://a:1"])
