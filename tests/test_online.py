"""Training straight from the target: the head is that of a store, to the bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.artifact import Artifact
from eyas.cli import run as cli_run
from eyas.errors import MismatchError
from eyas.features.capture import CaptureConfig, CaptureTask, capture
from eyas.features.generate import GenerateConfig, generate
from eyas.features.online import OnlineFeatures, OnlineTarget
from eyas.lineage import lines
from eyas.model.target import Target
from eyas.operators.vocab import TargetVocabulary
from eyas.shards import Features
from eyas.train.state import StopConfig
from eyas.train.trainer import TrainConfig, train
from tests.architectures import saved_architecture
from tests.stages import ending_target, prompts_of, write_answers, write_prompts
from tests.test_cli import run_eyas

TRAIN = TrainConfig.model_validate(
    {
        "head": {"draft_vocab_size": 320},
        "epochs": 2,
        "batches": {"tokens": 512},
        "dtype": "float32",
        "checkpoint_every": 2,
    }
)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return ending_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def answers(target, tmp_path_factory) -> Artifact:
    """Half of the prompts share a long system prompt."""
    root = tmp_path_factory.mktemp("answers")
    output = Artifact(str(root / "answers"))
    system = "The address is 71 North Street. " * 20
    prompts = [
        dataclasses.replace(prompt, system=system if number % 2 else None)
        for number, prompt in enumerate(prompts_of(40))
    ]
    config = GenerateConfig(target=str(target), max_tokens=12)
    generate(config, write_prompts(root / "prompts", prompts), output)
    return output


def config_of(target: Path, **settings: Any) -> CaptureConfig:
    exact = {"held_out_share": 0.3, "batch_tokens": 1, "codec": "lossless"}
    return CaptureConfig(**{"target": str(target), **exact, **settings})


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def both(request, target, answers, tmp_path_factory) -> tuple[Artifact, OnlineTarget]:
    """A lossless store and the target, of the same settings."""
    config = config_of(target, store_dtype=request.param)
    store = Artifact(str(tmp_path_factory.mktemp("store") / "features"))
    capture(config, answers, store)
    return store, OnlineTarget(config, answers)


def assert_same(online: OnlineFeatures, stored: Features) -> None:
    numbers = list(range(len(stored)))
    assert len(online) == len(stored) > 2
    assert online.lengths == stored.lengths
    for (ids, mask), (stored_ids, stored_mask) in zip(
        online.all_tokens(), stored.all_tokens(), strict=True
    ):
        assert torch.equal(ids, stored_ids)
        assert torch.equal(mask, stored_mask)
    batches = [numbers[::-1][:5], numbers[3:], numbers[:1]]
    for made, read in zip(online.batches(batches), stored.batches(batches), strict=True):
        assert [one.key for one in made] == [one.key for one in read]
        for one, other in zip(made, read, strict=True):
            assert one.source == other.source
            assert one.aux_hidden.dtype == other.aux_hidden.dtype
            assert torch.equal(one.aux_hidden, other.aux_hidden)
            assert torch.equal(one.last_hidden, other.last_hidden)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_samples_are_the_stores_to_the_bit(both, split):
    store, at_hand = both
    assert_same(at_hand.features(split), Features(store, split))
    assert at_hand.meta == Features(store, split).meta.model_copy(update={"codec": "raw"})


def test_it_is_the_same_work_and_says_where_it_comes_from(both):
    store, at_hand = both
    made, stored = at_hand.manifest, store.manifest()
    assert made.identity == stored.identity
    assert made.counts == stored.counts
    assert made.inputs == stored.inputs
    assert (made.url, made.files) == ("", {})
    assert "generate" in "\n".join(lines(made))


def test_eyas_train_online_makes_the_stores_head_to_the_bit(target, answers, tmp_path, monkeypatch):
    config, store = config_of(target), Artifact(str(tmp_path / "store"))
    capture(config, answers, store)
    outputs = [Artifact(str(tmp_path / name)) for name in ("stored", "online")]
    with monkeypatch.context() as patch:
        patch.setattr(TargetVocabulary, "best", lambda *_: pytest.fail("its product is stored"))
        train(TRAIN, str(target), Features(store), outputs[0], held_out=Features(store, "held_out"))
    sections = {"capture": config.model_dump(mode="json", exclude={"target"})}
    run_file = tmp_path / "run.yaml"
    run_file.write_text(json.dumps(sections | {"train": TRAIN.model_dump(mode="json")}))
    words = ("train", answers.url, "--online", "-t", target, "-o", outputs[1].url, "-c", run_file)
    done = run_eyas(*words)
    assert done.exit_code == 0, done.output
    rows = [
        [{**row, "seconds": 0, "tokens_per_s": 0} for row in output.read_jsonl("metrics.jsonl")]
        for output in outputs
    ]
    assert rows[0] == rows[1]
    assert len(rows[0]) > 3
    assert outputs[0].read("model.safetensors") == outputs[1].read("model.safetensors")
    assert outputs[1].manifest().identity == outputs[0].manifest().identity
    # a finished head is found without the target
    monkeypatch.setattr(Target, "load", lambda *_: pytest.fail("loads the target to do nothing"))
    at_hand = OnlineTarget(config, answers)
    source, held_out = (at_hand.features(split) for split in ("train", "held_out"))
    train(TRAIN, str(target), source, Artifact(outputs[1].url), held_out=held_out)


def test_online_from_transformers_too(tmp_path_factory, tmp_path):
    folder = saved_architecture(tmp_path_factory.getbasetemp(), "gpt_neox")
    said = ["a table for two", "71 North Street", "0123456789", "San Jose, I would like"]
    dialogues = [(f"Question {at}", f"{said[at % 4]} {at}") for at in range(16)]
    answers = write_answers(folder, tmp_path / "answers", dialogues)
    config = CaptureConfig(target=str(folder), batch_tokens=1, codec="lossless")
    capture(config, answers, store := Artifact(str(tmp_path / "store")))
    wanted = TRAIN.model_copy(update={"epochs": 1, "stop": StopConfig(measurements=0)})
    heads = []
    for source in (Features(store), OnlineTarget(config, answers).features("train")):
        heads.append(Artifact(str(tmp_path / f"head {len(heads)}")))
        train(wanted, str(folder), source, heads[-1])
    assert heads[0].read("model.safetensors") == heads[1].read("model.safetensors")
    with pytest.raises(MismatchError, match="'gpt_neox' model; eyas' own engine runs") as raised:
        CaptureTask(CaptureConfig(target=str(folder), decoder="own"), answers)
    assert "SGLang" in raised.value.hint


def test_a_run_that_was_cut_goes_on_online(target, answers, tmp_path):
    """With batches computed together."""
    config = config_of(target, batch_tokens=4096)
    outputs = [Artifact(str(tmp_path / name)) for name in ("whole", "cut")]
    train(TRAIN, str(target), OnlineTarget(config, answers).features("train"), outputs[0])

    def interrupt(done, total=None, note=""):
        if done == 3:
            raise KeyboardInterrupt

    source = OnlineTarget(config, answers).features("train")
    with pytest.raises(KeyboardInterrupt):
        train(TRAIN, str(target), source, outputs[1], interrupt)
    train(TRAIN, str(target), OnlineTarget(config, answers).features("train"), outputs[1])
    assert outputs[0].read("model.safetensors") == outputs[1].read("model.safetensors")


def test_what_is_computed_together_is_other_work(target, answers):
    alone, together, squeezed = (
        OnlineTarget(config_of(target, **settings), answers)
        for settings in ({}, {"batch_tokens": 4096}, {"codec": "within4"})
    )
    assert len({one.manifest.identity for one in (alone, together, squeezed)}) == 3
    assert squeezed.meta.codec == "raw"
    numbers = list(range(len(alone.features("train"))))
    (one,), (other,) = (
        list(at_hand.features("train").batches([numbers])) for at_hand in (alone, together)
    )
    by_key = {sample.key: sample for sample in other}
    assert by_key.keys() == {sample.key for sample in one}
    for sample in one:
        torch.testing.assert_close(
            sample.aux_hidden, by_key[sample.key].aux_hidden, rtol=2e-2, atol=2e-2
        )


def test_a_run_that_is_online_stores_what_is_held_out(target, tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"I would like a table for {number} in San Jose."} for number in range(60)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(cli_run, "serve_and_bench", lambda *_: {})
    source = {"path": str(prompts), "licence": "CC0-1.0", "name": "made up", "prompts_by": "human"}
    config = cli_run.RunConfig(
        target=str(target),
        output=str(tmp_path / "run"),
        online=True,
        prompts={"sources": [source]},
        generate={"max_tokens": 12},
        capture={"held_out_share": 0.3, "batch_tokens": 1},
        train=TRAIN.model_dump(mode="json"),
        serve={},
    )
    made = cli_run.run_stages(config, config.output)
    features = made["capture"].manifest("capture")
    assert features.counts["train"] == 0 < features.counts["held_out"]
    learnt_from = made["train"].manifest("train").inputs["features"]
    assert learnt_from.counts["train"] > features.counts["held_out"]
    assert learnt_from.identity != features.identity
    assert made["eval"].read_json("eval.json")["tau"] >= 1.0
