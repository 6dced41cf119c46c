"""Stage `capture`: features are transformers', masks the target's words, no answer is lost."""

import contextlib
import dataclasses
import shutil
import threading
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from eyas.artifact import Artifact
from eyas.chat.tokenizer import TargetTokenizer
from eyas.errors import EmptyInputError, MismatchError, StorageFullError
from eyas.features import capture as stage
from eyas.features.capture import CaptureConfig, CaptureTask, capture, split_of
from eyas.features.generate import GenerateConfig, generate
from eyas.features.samples import SamplePlan, forward_batches, plan_samples
from eyas.model.target import Target
from eyas.model.weights import fingerprint
from eyas.operators.decoder import OwnDecoder
from eyas.records import Answer, read_answers
from eyas.shards import Features, encoded, teacher_mask
from tests.oracle.target import features_of
from tests.stages import (
    all_samples,
    ending_target,
    patched,
    prompts_of,
    write_answers,
    write_prompts,
)
from tests.tiny import tiny_target

PROMPTS = prompts_of(29)


small_shards = patched((stage, "SAMPLES_PER_SHARD", 4))


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return ending_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def answers(target, tmp_path_factory) -> Artifact:
    root = tmp_path_factory.mktemp("answers")
    output = Artifact(str(root / "answers"))
    config = GenerateConfig(target=str(target), max_tokens=12, max_batch=16)
    generate(config, write_prompts(root / "prompts", PROMPTS), output)
    return output


def config_of(target: Path, **settings: Any) -> CaptureConfig:
    exact = {"store_dtype": "float32", "codec": "lossless", "held_out_share": 0.3}
    return CaptureConfig(**{"target": str(target), **exact, **settings})


@pytest.fixture
def output(tmp_path) -> Artifact:
    return Artifact(str(tmp_path / "features"))


@pytest.fixture(scope="module")
def captured(target, answers, tmp_path_factory) -> Artifact:
    output = Artifact(str(tmp_path_factory.mktemp("captured") / "features"))
    capture(config_of(target), answers, output)
    return output


def test_taps_and_last_hidden_are_those_of_transformers(target, captured):
    """As near to transformers' float64 as its own float32."""
    exact, single = (
        AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
        for dtype in (torch.float64, torch.float32)
    )
    n = exact.config.num_hidden_layers

    def states_of(model, sample):
        with torch.inference_mode():
            states = model(sample.token_ids[None].long(), output_hidden_states=True).hidden_states
        return torch.cat([states[at][0] for at in (2, n // 2, n - 3, -1)], dim=-1).double()

    ours, theirs = 0.0, 0.0
    for sample in all_samples(captured).values():
        best_T = exact(sample.token_ids[None].long()).logits[0].argmax(-1)
        asked_T = teacher_mask(sample.loss_mask)
        assert torch.equal(sample.argmax, best_T.where(asked_T, -1).int())
        expected = states_of(exact, sample)
        found = torch.cat([sample.aux_hidden, sample.last_hidden], dim=-1)
        ours = max(ours, float((found - expected).abs().max()))
        theirs = max(theirs, float((states_of(single, sample) - expected).abs().max()))
    assert 0 < ours < 1.5 * theirs < 1e-3


def test_the_meta_says_what_the_features_are(target, captured):
    meta, manifest = Features(captured).meta, captured.manifest()
    assert (meta.taps, meta.hidden_size, meta.vocab_size) == ((1, 3, 4), 32, 320)
    assert meta.lm_head_sha256 == Target.load(target).lm_head_sha256
    assert manifest.facts["features"]["taps"] == [1, 3, 4]
    assert list(manifest.inputs) == ["answers"]
    assert (manifest.config["decoder"], manifest.config["dtype"]) == ("own", "float32")


def test_every_answer_is_under_a_mask_and_nothing_else_is(target, answers, captured):
    dropped = {(row["prompt_id"], row["turn"]) for row in captured.read_jsonl("dropped.jsonl")}
    expected: dict[str, list[list[int]]] = {}
    num_cut = 0
    for answer in read_answers(answers):
        if (answer.prompt_id, answer.turn) not in dropped:
            num_cut += answer.finish_reason == "length"
            expected.setdefault(answer.prompt_id, []).append(list(answer.answer_ids))
    assert 0 < num_cut < sum(map(len, expected.values())), "the test wants both"
    found: dict[str, list[list[int]]] = {}
    for sample in all_samples(captured).values():
        edges = np.flatnonzero(np.diff(sample.loss_mask.numpy().astype(int), append=0))
        for start, end in zip(edges[::2] + 1, edges[1::2] + 1, strict=True):
            spans = found.setdefault(sample.key.split("/")[0], [])
            spans.append(sample.token_ids[start:end].tolist())
    assert found == expected


def test_answers_of_another_target_or_version_are_refused(target, answers, tmp_path, monkeypatch):
    other = tiny_target(tmp_path / "other", seed=1)
    with pytest.raises(MismatchError, match="another target"):
        CaptureTask(config_of(other), answers)
    old = Artifact(str(tmp_path / "old"))
    old.begin("made by an older version")
    settings = {"target_fingerprint": fingerprint(target)}
    old.finish("generate", settings, {}, {"answers": 0}, {"target": str(target)})
    with pytest.raises(MismatchError, match="hold no tokens: an older version of eyas"):
        CaptureTask(config_of(target), old)
    monkeypatch.setattr(stage, "read_answers", lambda _: [answer_of([5, 6], [7, 8, 320, 2])])
    with pytest.raises(MismatchError, match="hold token 320, of 320"):
        _ = CaptureTask(config_of(target), answers).plan


def test_counts_balance_and_drops_can_be_read(answers, captured):
    counts = captured.manifest("capture").counts
    dropped = list(captured.read_jsonl("dropped.jsonl"))
    assert counts["answers"] == answers.manifest().counts["answers"]
    kept = sum(counts[name] for name in ("train", "held_out", "merged"))
    assert counts["answers"] == kept + len(dropped)
    assert "dropped_truncated" not in counts
    assert answers.manifest().counts["marked_truncated"] > 0
    assert counts["tokens"] == sum(len(one.token_ids) for one in all_samples(captured).values())
    assert min(counts["train"], counts["held_out"]) > 0


def test_the_split_goes_by_prompt(captured):
    for split in ("train", "held_out"):
        for sample in Features(captured, split):
            assert split_of(sample.key.split("/")[0], 0.3) == split
    share = sum(split_of(f"prompt {number}", 0.1) == "held_out" for number in range(5000)) / 5000
    assert 0.085 < share < 0.115
    assert split_of("any", 0.0) == "train"


def test_merged_turns_have_the_features_of_the_turns_alone(target, tmp_path, output):
    dialogues = [
        ("Hi", f"a table {at}", "San Jose?", "I would like", "7", "yes") for at in range(5)
    ]
    answers = write_answers(target, tmp_path / "answers", dialogues)
    loaded = Target.load(target)
    assert capture(config_of(target), answers, output).counts["merged"] == 10
    samples = all_samples(output)
    assert [*sorted(samples)] == [f"p{at}/2" for at in range(5)]
    for answer in read_answers(answers):
        whole = samples[f"{answer.prompt_id}/2"]
        ids = [*answer.prompt_ids, *answer.answer_ids]
        aux_hidden, last_hidden = features_of(loaded, torch.tensor([ids]))
        assert whole.token_ids[: len(ids)].tolist() == ids
        assert whole.loss_mask[len(answer.prompt_ids) : len(ids)].all()
        for found, alone in ((whole.aux_hidden, aux_hidden), (whole.last_hidden, last_hidden)):
            torch.testing.assert_close(found[: len(ids)], alone[0], rtol=1e-4, atol=1e-4)


def answer_of(
    prompt_ids: Sequence[int], answer_ids: Sequence[int], prompt_id: str = "p", **more: Any
) -> Answer:
    row = Answer("k", prompt_id, "s", "l", 0, (), tuple(prompt_ids), tuple(answer_ids), "stop", 0.0)
    return dataclasses.replace(row, **more)


def test_turns_are_one_sample_where_the_next_prompt_begins_with_all_before_it():
    first, end = answer_of([1, 2], [3, 4, 9]), [9]
    second = answer_of([1, 2, 3, 4, *end, 7, 8], [5, 6, *end], turn=1)
    third = answer_of([1, 2, 3, 4, *end, 7, 8, 5, 6, *end, 2], [5, *end], turn=2)
    plan = plan_samples([first, second, third], 256, ())
    assert [len(plan.samples), plan.num_merged] == [1, 2]
    (sample,) = plan.samples
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 9, 7, 8, 5, 6, 9, 2, 5, 9]
    assert np.flatnonzero(sample.loss_mask).tolist() == [2, 3, 4, 7, 8, 9, 11, 12]
    for other in (
        answer_of([1, 2, 3, 9, 7, 8], [5, 6, 9], turn=1),  # the past was rewritten, or retokenised
        answer_of([1, 2, 3, 4], [9, 7, 8], turn=1),  # a part of the answer stands in the prompt
        dataclasses.replace(second, prompt_id="q"),  # another conversation
    ):
        apart = plan_samples([first, other], 256, ())
        assert [len(apart.samples), apart.num_merged] == [2, 0]


def test_every_reason_to_drop():
    rows = [
        answer_of([1], [2] * 256, "long"),
        answer_of([1, 2], [9], "empty"),
        answer_of([1], [2, 3, 9], "loop", marked="looping"),
        answer_of([1], [2, 9], "kept"),
    ]
    plan = plan_samples(rows, 256, ("looping",))
    reasons = ["too_long", "no_supervised_slot", "looping"]
    assert [one["reason"] for one in plan.dropped] == reasons
    assert plan.reasons == dict.fromkeys(reasons, 1)
    assert [one.key for one in plan.samples] == ["kept/0"]
    kept = plan_samples(rows[2:3], 256, ("empty",))
    assert len(kept.samples) == 1, "a mark that is not left out"


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 200), st.integers(1, 20))
def test_batches_hold_every_sample_once_within_the_budget(lengths, batch_tokens, window):
    samples = [
        SamplePlan(str(at), "", "", np.zeros(length), np.zeros(length))
        for at, length in enumerate(lengths)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eyas.features.samples.WINDOW", window)
        made = list(forward_batches(samples, batch_tokens))
    assert all(made)
    assert sorted(int(one.key) for batch in made for one in batch) == list(range(len(lengths)))
    for batch in made:
        longest = max(len(one.token_ids) for one in batch)
        assert len(batch) == 1 or len(batch) * longest <= batch_tokens
        assert len({int(one.key) // window for one in batch}) == 1


def test_bfloat16_on_disk_is_float32_rounded(target, answers, captured, monkeypatch, output):
    pair, met = threading.Barrier(2), list[int]()

    def beside_another(*of: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            met.append(pair.wait(9))
        return encoded(*of)

    monkeypatch.setattr(stage, "encoded", beside_another)
    monkeypatch.setattr(stage, "cores", lambda: 2)
    assert CaptureConfig(target="t").store_dtype == "bfloat16"
    monkeypatch.setattr(TargetTokenizer, "__init__", lambda *_: pytest.fail("loads a tokenizer"))
    capture(config_of(target, store_dtype="bfloat16"), answers, output)
    exact, rounded = all_samples(captured), all_samples(output)
    assert exact.keys() == rounded.keys()
    for key, sample in rounded.items():
        assert sample.aux_hidden.dtype == torch.bfloat16
        assert torch.equal(sample.aux_hidden, exact[key].aux_hidden.bfloat16())
        assert torch.equal(sample.last_hidden, exact[key].last_hidden.bfloat16())
    assert met, "one thread encodes, slower than a GPU computes"


def test_a_disk_too_small_is_said_before_the_work(target, answers, captured, monkeypatch, output):
    needed = captured.manifest().counts["tokens"] * Features(captured).meta.bytes_per_token
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: usage(0, 0, needed - 1))
        patched.setattr(OwnDecoder, "states", lambda *_: pytest.fail("works without room"))
        with pytest.raises(StorageFullError, match=r"need [\d.,]+ [kM]B at .* are free"):
            capture(config_of(target), answers, output)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, needed))
    capture(config_of(target), answers, output)


def test_nothing_to_capture(tmp_path, output):
    target = tiny_target(tmp_path / "target")
    config = GenerateConfig(target=str(target), max_tokens=1)
    made = Artifact(str(tmp_path / "answers"))
    generate(config, write_prompts(tmp_path / "prompts", PROMPTS[:4]), made)
    settings = config_of(target, leave_out=("truncated", "looping"))
    with pytest.raises(EmptyInputError, match="truncated 4") as raised:
        capture(settings, made, output)
    assert "leave_out" in raised.value.hint


def test_alone_a_samples_values_depend_on_nothing_beside_it(target, answers, tmp_path):
    whole, part = (Artifact(str(tmp_path / name)) for name in ("whole", "part"))
    capture(config_of(target, batch_tokens=1), answers, whole)
    manifest = capture(config_of(target, batch_tokens=1), answers, part, splits=("held_out",))
    assert manifest.counts["train"] == 0 < manifest.counts["held_out"]
    assert len(Features(part, "train")) == 0
    decoder = OwnDecoder(Target.load(target))
    every = all_samples(whole)
    for key, sample in all_samples(part).items():
        alone = decoder.states([sample.token_ids.tolist()])
        for aux_hidden in (every[key].aux_hidden, alone.aux_hidden[0]):
            assert torch.equal(sample.aux_hidden, aux_hidden)
        for last_hidden in (every[key].last_hidden, alone.last_hidden[0]):
            assert torch.equal(sample.last_hidden, last_hidden)


def test_a_target_on_several_devices_is_transformers(target, answers):
    spread = CaptureTask(config_of(target, device_map="auto"), answers)
    assert spread.settings["decoder"] == "transformers"
    assert "device_map" not in spread.settings
