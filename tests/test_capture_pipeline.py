"""A target that our own engine does not run: captured, trained on, measured and exported; and in
words not served here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from eyas.artifact import Artifact
from eyas.cli.main import build
from eyas.errors import MismatchError
from eyas.evaluate.evaluate import EvalConfig, evaluate
from eyas.export.check import check
from eyas.export.export import ExportConfig, export
from eyas.features.capture import CaptureConfig, capture
from eyas.features.online import OnlineTarget
from eyas.shards import Features
from eyas.train.trainer import TrainConfig, train
from tests.foreign import foreign_target
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


@pytest.mark.parametrize("family", ["gpt_neox", "gemma2"])
def test_from_answers_to_a_head_that_others_serve(family, tmp_path):
    folder = foreign_target(tmp_path / family, family)
    config = CaptureConfig(
        target=str(folder), held_out_share=0.3, store_dtype="float32", codec="lossless"
    )
    answers = answers_of(folder, tmp_path / "answers", 24)
    features, head, measured, exported = (
        Artifact(str(tmp_path / name)) for name in ("features", "head", "eval", "export")
    )
    manifest = capture(config, answers, features)
    assert (manifest.config["decoder"], manifest.config["dtype"]) == ("transformers", "float32")
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    for sample in Features(features):
        with torch.inference_mode():
            states = model(sample.token_ids[None].long(), output_hidden_states=True).hidden_states
        expected = torch.cat([states[at][0] for at in (2, 4, 5)], dim=-1)
        torch.testing.assert_close(sample.aux_hidden, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sample.last_hidden, states[-1][0], rtol=1e-4, atol=1e-4)
    train(TRAIN, str(folder), Features(features), head)
    rows = [row["loss"] for row in head.read_jsonl("metrics.jsonl")]
    assert all(0 < loss < 100 for loss in rows)
    evaluate(EvalConfig(), str(folder), head.url, measured, Features(features, "held_out"))
    assert measured.read_json("eval.json")["tau"] >= 1.0
    export(ExportConfig(), str(folder), head, exported, evaluation=measured)
    for form in ("sglang", "vllm"):
        assert not [one for one in check(Path(exported.url) / form, folder) if one.level == "error"]
    verifier = json.loads((Path(exported.url) / "vllm" / "config.json").read_text())[
        "speculators_config"
    ]["verifier"]
    assert verifier["architectures"] == list(model.config.architectures)


def test_online_from_transformers_too(tmp_path):
    folder = foreign_target(tmp_path / "target", "gpt_neox")
    answers = answers_of(folder, tmp_path / "answers", 16)
    config = CaptureConfig(target=str(folder), batch_tokens=1, codec="lossless")
    capture(config, answers, store := Artifact(str(tmp_path / "store")))
    heads = [Artifact(str(tmp_path / name)) for name in ("stored", "online")]
    train(TRAIN, str(folder), Features(store), heads[0])
    train(TRAIN, str(folder), OnlineTarget(config, answers).features("train"), heads[1])
    assert heads[0].read("model.safetensors") == heads[1].read("model.safetensors")


def test_serving_it_is_refused_in_words(tmp_path):
    folder = foreign_target(tmp_path / "target", "gpt_neox")
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
    folder = foreign_target(tmp_path / "target", "gpt_neox")
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
