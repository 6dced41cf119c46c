"""A target that our own engine does not run: trained on online too, and in words not served here.
What stages make of it is tested in test_architectures.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyas.artifact import Artifact
from eyas.cli.main import build
from eyas.errors import MismatchError
from eyas.features.capture import CaptureConfig, capture
from eyas.features.online import OnlineTarget
from eyas.shards import Features
from eyas.train.trainer import TrainConfig, train
from tests.architectures import save_architecture
from tests.stages import write_answers

TRAIN = TrainConfig.model_validate(
    {
        "head": {"draft_vocab_size": 128},
        "objective": {"num_ttt_steps": 2},
        "epochs": 1,
        "batches": {"tokens": 512},
        "dtype": "float32",
        "stop": {"measurements": 0},
    }
)


def answers_of(folder: Path, output: Path, count: int) -> Artifact:
    said = ["a table for two", "71 North Street", "0123456789", "San Jose, I would like"]
    return write_answers(
        folder, output, [(f"Question {at}", f"{said[at % 4]} {at}") for at in range(count)]
    )


def test_online_from_transformers_too(tmp_path):
    folder = save_architecture(tmp_path / "target", "gpt_neox")
    answers = answers_of(folder, tmp_path / "answers", 16)
    config = CaptureConfig(target=str(folder), batch_tokens=1, codec="lossless")
    capture(config, answers, store := Artifact(str(tmp_path / "store")))
    heads = [Artifact(str(tmp_path / name)) for name in ("stored", "online")]
    train(TRAIN, str(folder), Features(store), heads[0])
    train(TRAIN, str(folder), OnlineTarget(config, answers).features("train"), heads[1])
    assert heads[0].read("model.safetensors") == heads[1].read("model.safetensors")


def test_serving_it_is_refused_in_words(tmp_path):
    folder = save_architecture(tmp_path / "target", "gpt_neox")
    words = ["serve", "-t", str(folder), "--port", "0"]
    shown = CliRunner().invoke(build(words), words, prog_name="eyas")
    assert shown.exit_code == 2
    assert "'gpt_neox' model; eyas' own engine runs Llama" in shown.stderr
    assert "check says which servers take the head" in shown.stderr
    with pytest.raises(MismatchError, match="gpt_neox"):
        capture(
            CaptureConfig(target=str(folder), decoder="own"),
            answers_of(folder, tmp_path / "answers", 4),
            Artifact(str(tmp_path / "features")),
        )


def test_a_run_of_it_is_refused_before_any_work(tmp_path):
    folder = save_architecture(tmp_path / "target", "gpt_neox")
    run_file = tmp_path / "run.yaml"
    prompts = {"sources": [{"path": "none.jsonl", "licence": "CC0-1.0", "name": "none"}]}
    content = {
        "target": str(folder),
        "output": str(tmp_path / "run"),
        "prompts": prompts,
        "generate": {},
        "serve": {},
    }
    run_file.write_text(json.dumps(content))
    words = ["run", str(run_file)]
    shown = CliRunner().invoke(build(words), words, prog_name="eyas")
    assert shown.exit_code == 2
    assert "'gpt_neox' model; eyas' own engine runs Llama" in shown.stderr
    assert not (tmp_path / "run").exists()
