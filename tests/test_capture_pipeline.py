"""A target that our own engine does not run: trained on online, refused by `serve` and `run`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eyas.artifact import Artifact
from eyas.errors import MismatchError
from eyas.features.capture import CaptureConfig, capture
from eyas.features.online import OnlineTarget
from eyas.shards import Features
from eyas.train.trainer import TrainConfig, train
from tests.architectures import saved_architecture
from tests.stages import write_answers
from tests.test_cli import run_eyas

TRAIN = TrainConfig(
    head={"draft_vocab_size": 128},
    objective={"num_ttt_steps": 2},
    epochs=1,
    batches={"tokens": 512},
    dtype="float32",
    stop={"measurements": 0},
)
REFUSED = "'gpt_neox' model; eyas' own engine runs Llama"


@pytest.fixture
def folder(tmp_path_factory) -> Path:
    return saved_architecture(tmp_path_factory.getbasetemp(), "gpt_neox")


def answers_of(folder: Path, output: Path, count: int) -> Artifact:
    said = ["a table for two", "71 North Street", "0123456789", "San Jose, I would like"]
    dialogues = [(f"Question {at}", f"{said[at % 4]} {at}") for at in range(count)]
    return write_answers(folder, output, dialogues)


def test_online_from_transformers_too(folder, tmp_path):
    answers = answers_of(folder, tmp_path / "answers", 16)
    config = CaptureConfig(target=str(folder), batch_tokens=1, codec="lossless")
    capture(config, answers, store := Artifact(str(tmp_path / "store")))
    heads = [Artifact(str(tmp_path / name)) for name in ("stored", "online")]
    train(TRAIN, str(folder), Features(store), heads[0])
    train(TRAIN, str(folder), OnlineTarget(config, answers).features("train"), heads[1])
    assert heads[0].read("model.safetensors") == heads[1].read("model.safetensors")


def test_serving_it_is_refused_in_words(folder, tmp_path):
    shown = run_eyas("serve", "-t", folder, "--port", 0)
    assert shown.exit_code == 2
    assert REFUSED in shown.stderr
    assert "check says which servers take the head" in shown.stderr
    config = CaptureConfig(target=str(folder), decoder="own")
    with pytest.raises(MismatchError, match=REFUSED) as raised:
        capture(config, answers_of(folder, tmp_path / "answers", 4), Artifact(str(tmp_path / "f")))
    assert "SGLang" in raised.value.hint


def test_a_run_of_it_is_refused_before_any_work(folder, tmp_path):
    prompts = {"sources": [{"path": "none.jsonl", "licence": "CC0-1.0", "name": "none"}]}
    content = {"target": str(folder), "output": str(tmp_path / "run"), "prompts": prompts}
    run_file = tmp_path / "run.yaml"
    run_file.write_text(json.dumps({**content, "generate": {}, "serve": {}}))
    shown = run_eyas("run", run_file)
    assert shown.exit_code == 2
    assert REFUSED in shown.stderr
    assert not (tmp_path / "run").exists()
