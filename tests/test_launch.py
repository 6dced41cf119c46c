"""The launch commands of engines, word by word."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from eyas.export.engines import Launch

LAUNCH = Launch("my models/8B", 3, 4, 12, dtype="bfloat16", max_length=8192)


def words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "))


def test_sglangs_command():
    assert words(LAUNCH.command("sglang")) == [
        *("python", "-m", "sglang.launch_server"),
        *("--model-path", "my models/8B"),
        *("--dtype", "bfloat16"),
        *("--context-length", "8192"),
        *("--speculative-algorithm", "EAGLE3"),
        *("--speculative-draft-model-path", "./sglang"),
        *("--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "4"),
        *("--speculative-num-draft-tokens", "12"),
    ]


def test_sglang_takes_a_window_from_the_command_and_vllm_from_the_config():
    windowed = replace(LAUNCH, draft_window=512)
    added = set(words(windowed.command("sglang"))) - set(words(LAUNCH.command("sglang")))
    assert added == {"--speculative-draft-window-size", "512"}
    assert windowed.command("vllm") == LAUNCH.command("vllm")


def test_vllm_runs_by_transformers_what_its_own_code_does_not_tap():
    added = words(replace(LAUNCH, family="gemma3_text").command("vllm"))
    assert added[added.index("--model-impl") + 1] == "transformers"
    assert replace(LAUNCH, family="llama").command("vllm") == LAUNCH.command("vllm")


def test_vllms_command():
    *rest, speculation = words(LAUNCH.command("vllm"))
    assert rest == [
        *("vllm", "serve", "my models/8B"),
        *("--dtype", "bfloat16"),
        *("--max-model-len", "8192"),
        "--speculative-config",
    ]
    wanted = {"method": "eagle3", "model": "./vllm", "num_speculative_tokens": 3}
    assert json.loads(speculation) == wanted


def test_openvinos_conversion():
    assert words(LAUNCH.command("openvino")) == [
        *("optimum-cli", "export", "openvino"),
        *("--model", "./openvino"),
        *("--task", "text-generation-with-past"),
        *("--trust-remote-code", "./openvino-ir"),
    ]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_words_are_those_of_the_shell_with_another_head(engine):
    assert LAUNCH.arguments(engine, f"./{engine}") == words(LAUNCH.command(engine))
    elsewhere = LAUNCH.arguments(engine, "/a head/of mine")
    assert "/a head/of mine" in " ".join(elsewhere)
    assert f"./{engine}" not in " ".join(elsewhere)


@pytest.mark.parametrize(
    ("steps", "topk", "asked", "served"),
    [(3, 1, 16, 4), (3, 4, 12, 12), (1, 4, 16, 5), (2, 2, 16, 7)],
    ids=["a chain: drafts and root", "as asked", "one step", "no more than there are candidates"],
)
def test_no_more_is_verified_than_is_drafted(steps, topk, asked, served):
    command = words(Launch("m", steps, topk, asked).command("sglang"))
    assert command[-2:] == ["--speculative-num-draft-tokens", str(served)]


def test_what_is_left_to_the_engine_is_not_given():
    launch = Launch("m", 3, 1, 4)
    for engine, option in (("sglang", "--context-length"), ("vllm", "--max-model-len")):
        assert option not in launch.command(engine)
        assert "--dtype" not in launch.command(engine)
