"""The engines benchmark's table, and the data on what engines read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.export.engines import EAGLE3_MODE, ENGINES, Launch, engine_of
from eyas.model.forms import Verifier
from eyas.operators.tensors import write_head
from tests.tiny import tiny_target
from tests.tiny_head import tiny_head

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import engines

ROW = {
    "engine": "vLLM", "head": "packaged", "speculation": "fixed(4,1,5)",
    "equal": 19, "ties": 1, "answers": 20, "foretold": 2.352, "tau": 2.34,
    "tau_interval": [2.1, 2.6], "tokens_per_second": 12.3,
}  # fmt: skip


def test_the_table_of_recorded_rows():
    far = ROW | {"tau": 1.9, "ties": 0, "equal": 20}
    _, near, low, why = engines.table([ROW, far], {"llama.cpp": "not here"}).splitlines()
    assert near.split() == [
        *("vLLM,", "packaged,", "fixed(4,1,5)", "20/20", "(1", "ties)", "2.34", "2.10-2.60"),
        *("2.35", "-0.5%", "12.3"),
    ]
    assert low.endswith("<- not as foretold")
    assert why == "skipped llama.cpp: not here"


def test_tau_is_over_the_tokens_after_the_first():
    answers = [{"tokens": [1] * 11, "rounds": 5}, {"tokens": [1] * 3, "rounds": 1}]
    assert engines.tau_figures(answers) == {"tau": 2.0, "tau_interval": None}


def test_layers_are_written_into_what_openvino_converted(tmp_path):
    """By the card's second command."""
    command = Launch("m", 3, 1, 4, taps=(1, 14, 26)).command("openvino")
    info = f"<rt_info>\n\t\t{EAGLE3_MODE}\n\t</rt_info>"
    (tmp_path / "openvino-ir").mkdir()
    file = tmp_path / "openvino-ir" / "openvino_model.xml"
    file.write_text(info)
    subprocess.run(["sh", "-c", command.splitlines()[-1]], cwd=tmp_path, check=True)
    layers = '<hidden_layers_list value="1 14 26" />'
    assert file.read_text() == info.replace(EAGLE3_MODE, EAGLE3_MODE + layers)


def test_forms_of_engines_whose_flags_are_read(tmp_path):
    config, tensors = tiny_head(tiny_target(tmp_path / "target"))
    embed_tokens = np.zeros((config.vocab_size, config.target_hidden_size), dtype=np.float32)
    for engine in ENGINES:
        assert engine.unread_flags(config) == engine.faults(config, tensors) == []
        beside = embed_tokens if engine.target_embeddings else None
        assert write_head(config, tensors, engine.form, Verifier(embed_tokens=beside))
    flags = {engine.title: engine.unread_flags for engine in ENGINES}
    modern = config.model_copy(update={"fc_norm": True, "norm_output": True})
    assert flags["vLLM"](modern) == flags["SGLang"](modern) == []
    assert flags["llama.cpp"](modern) == ["fc_norm", "norm_output"]


def test_targets_that_engines_serve_with_a_head_are_named_once():
    for family, titles in {
        "llama": ["SGLang", "vLLM", "llama.cpp", "OpenVINO"],
        "qwen2": ["SGLang", "vLLM", "OpenVINO"],
        "qwen3_5_text": ["SGLang", "vLLM", "llama.cpp"],
        "gemma3_text": ["SGLang", "vLLM"],
        "glm4_moe": ["SGLang", "vLLM"],
        "granite": ["vLLM"],
        "smollm3": ["vLLM", "OpenVINO"],
        "lfm2": ["llama.cpp"],
        "gpt2": [],
    }.items():
        assert [engine.title for engine in ENGINES if engine.serves(family)] == titles
    for engine in ENGINES:
        names = engine.families.split()
        assert len(names) == len(set(names))
        assert engine.options.keys() <= set(names)
        assert not engine.serves("")


@pytest.mark.parametrize(
    ("form", "changes", "tensors", "message"),
    [
        ("sglang", {"norm_before_residual": True}, {}, "norm_before_residual is set: SGLang"),
        ("sglang", {"taps": (0, 3, 5)}, {}, "taps (0, 3, 5) cannot be written for SGLang"),
        ("sglang", {}, {"embed_tokens.weight": torch.ones(1)}, "embeddings of its own: SGLang"),
        ("vllm", {}, {"lm_head.weight": None}, "vLLM needs one in the file"),
        ("openvino", {}, {"lm_head.weight": None}, "OpenVINO needs one in the file"),
        *(
            ("openvino", {flag: True}, {}, f"{flag} is set: OpenVINO ignores it")
            for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        ),
    ],
)
def test_what_an_engine_cannot_read_is_not_written_for_it(
    tmp_path, form, changes, tensors, message
):
    config, sound = tiny_head(tiny_target(tmp_path / "target"))
    kept = {name: tensor for name, tensor in (sound | tensors).items() if tensor is not None}
    (fault,) = engine_of(form).faults(config.model_copy(update=changes), kept)
    assert message in fault.what
    assert fault.hint
