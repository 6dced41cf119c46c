"""The memory: counts against a plain count, the file, its vocabulary, the stage and the engine."""

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.artifact import Artifact
from eyas.chat import Chat
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.memory import FILE, TextMemory, counted, packed
from eyas.engine.request import Request, SamplingParams
from eyas.engine.text import CHAIN, kind_in_memory
from eyas.errors import CorruptError, MismatchError, MissingInputError
from eyas.features.generate import GenerateConfig, generate
from eyas.features.memory import MemoryConfig, pack
from eyas.model.target import Target
from tests.stages import prompts_of, talking_target, write_prompts
from tests.tiny import tiny_target

answers_of_few_tokens = st.lists(st.lists(st.integers(0, 4), max_size=12), max_size=8)


def plainly_counted(answers: list[list[int]]) -> dict[tuple[int, ...], tuple[int, float]]:
    """Of each context seen twice: the token behind it most often (the least of several), its
    share.
    """
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for tokens in answers:
        for n in (1, 2, 3):
            for at in range(n, len(tokens)):
                counts[tuple(tokens[at - n : at])][tokens[at]] += 1
    return {
        context: (best, count[best] / (count.total() + 1))
        for context, count in counts.items()
        if count.total() >= 2
        for best in [min(count, key=lambda token: (-count[token], token))]
    }


def memory_of(answers: list[list[int]], folder: Path, most: int = 1000) -> TextMemory:
    (folder / FILE).write_bytes(packed(counted(answers, most), 24, "vocabulary"))
    return TextMemory.open(folder)


@given(answers_of_few_tokens, st.lists(st.integers(0, 5), max_size=6))
def test_chains_are_those_of_a_plain_count(tmp_path_factory, answers, tokens):
    memory = memory_of(answers, tmp_path_factory.mktemp("memory"))
    expected, known = plainly_counted(answers), list(tokens)
    chain = memory.chain(tokens)
    found = [] if chain is None else list(zip(chain.tokens, chain.kinds, strict=True))
    for depth, (token, kind) in enumerate(found):
        context = next(
            tuple(known[-n:])
            for n in (3, 2, 1)
            if len(known) >= n and tuple(known[-n:]) in expected
        )
        best, share = expected[context]
        assert token == best
        assert kind == kind_in_memory(len(context), int(255 * share) / 255, depth == 0)
        known.append(token)
    assert len(found) <= CHAIN
    if found == []:
        seen = known and (known[-1],) in expected
        assert not seen or expected[(known[-1],)][1] < 0.45


def test_only_the_most_frequent_contexts_are_kept():
    answers = [[1, 2]] * 5 + [[3, 4]] * 4 + [[5, 6]] * 3 + [[7, 8]]
    assert counted(answers, 2)["keys_1"].tolist() == [1, 3]
    assert counted(answers, 9)["keys_1"].tolist() == [1, 3, 5]
    assert counted([], 9)["keys_3"].tolist() == []


def test_a_memory_of_other_tokens_is_refused(tmp_path):
    class Words:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    memory = memory_of([[1, 2, 1, 2]], tmp_path)
    memory.check(24, None)
    for vocab_size, tokenizer in ((25, None), (24, Words())):
        with pytest.raises(MismatchError):
            memory.check(vocab_size, tokenizer)


def test_what_is_no_memory_is_refused(tmp_path):
    with pytest.raises(MissingInputError):
        TextMemory.open(tmp_path)
    whole = packed(counted([[1, 2, 1, 2]], 9), 24, "vocabulary")
    for wrong in (b"", b"{}", whole[:100], whole[:-1], np.zeros(100, np.uint8).tobytes()):
        (tmp_path / FILE).write_bytes(wrong)
        with pytest.raises(CorruptError):
            TextMemory.open(tmp_path)


def test_a_memory_drafts_and_changes_no_token(tmp_path, monkeypatch):
    monkeypatch.setattr("eyas.engine.costs.cache_folder", lambda _: tmp_path)
    target = Target.load(tiny_target(tmp_path / "target", vocab_size=24))
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    asked = [Request(str(n), (n, 7, n + 5), params) for n in range(5)]
    plain = Engine(target, None, EngineConfig(max_length=64, speculation="off"))
    answers = {one.request_id: one.token_ids for one in plain.run(asked)}
    memory = memory_of([*answers.values()] * 2, tmp_path)
    drafting = Engine(target, None, EngineConfig(max_length=64), memory=memory)
    assert {one.request_id: one.token_ids for one in drafting.run(asked)} == answers
    assert drafting.metrics()["accepted_text"] > 40


def test_the_stage_packs_the_answers_of_its_target(tmp_path, monkeypatch):
    monkeypatch.setattr("eyas.engine.costs.cache_folder", lambda _: tmp_path)
    folder = talking_target(tmp_path / "target")
    prompts = write_prompts(tmp_path / "prompts", prompts_of(8))
    answers, output = Artifact(str(tmp_path / "answers")), Artifact(str(tmp_path / "memory"))
    generate(GenerateConfig(target=str(folder), max_tokens=12), prompts, answers)
    made = pack(MemoryConfig(target=str(folder)), answers, output)
    assert made.counts["answers"] > 8
    assert made.inputs["answers"].inputs["prompts"].stage == "prompts"
    memory = TextMemory.open(tmp_path / "memory")
    assert len(memory.chain([5]).tokens if memory.chain([5]) else []) <= CHAIN
    tokenizer = Chat(folder).tokenizer
    memory.check(memory.vocab_size, tokenizer)
    assert pack(MemoryConfig(target=str(folder)), answers, Artifact(output.url)) == made
    other = talking_target(tmp_path / "other", strength=2.5)
    with pytest.raises(MismatchError):
        pack(MemoryConfig(target=str(other)), answers, Artifact(str(tmp_path / "another")))
    engine = Engine.load(folder, config=EngineConfig(max_length=64), memory=tmp_path / "memory")
    assert engine.rounds.memory is not None
