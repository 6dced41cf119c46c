"""Launch commands: what the engines' own parsers would take, by their options kept as data."""

from __future__ import annotations

import json
import shlex

import pytest

from eyas.errors import ConfigError
from eyas.export.launch import Launch, engines, parse

LAUNCH = Launch("my models/8B", num_draft_steps=3, tree_topk=4, num_verify_tokens=12, dtype="bfloat16", max_length=8192)
SGLANG = "python -m sglang.launch_server --model-path m "
VLLM = "vllm serve m "


def test_the_data_says_where_it_was_read():
    for engine in engines().values():
        assert engine.version[0].isdigit()
        assert any(document.startswith("https://") for document in engine.documents)
        assert {name for name in engine.required if name.startswith("-")} <= engine.options.keys()


def test_sglangs_command():
    assert parse("sglang", LAUNCH.sglang) == {
        "--model-path": "my models/8B",
        "--dtype": "bfloat16",
        "--context-length": 8192,
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": "./sglang",
        "--speculative-num-steps": 3,
        "--speculative-eagle-topk": 4,
        "--speculative-num-draft-tokens": 12,
    }


def test_vllms_command():
    assert parse("vllm", LAUNCH.vllm) == {
        "model": "my models/8B",
        "--dtype": "bfloat16",
        "--max-model-len": 8192,
        "--speculative-config": {"method": "eagle3", "model": "./vllm", "num_speculative_tokens": 3},
    }
    words = shlex.split(LAUNCH.vllm.replace("\\\n", ""))
    assert json.loads(words[words.index("--speculative-config") + 1])["method"] == "eagle3"


@pytest.mark.parametrize(
    ("steps", "topk", "asked", "served"),
    [(3, 1, 16, 4), (3, 4, 12, 12), (1, 4, 16, 5), (2, 2, 16, 7)],
    ids=["a chain: its drafts and the root", "as asked", "one step", "no more than there are candidates"],
)
def test_no_more_is_verified_than_is_drafted(steps, topk, asked, served):
    assert parse("sglang", Launch("m", steps, topk, asked).sglang)["--speculative-num-draft-tokens"] == served


def test_the_targets_own_length_is_not_spelled():
    launch = Launch("m", 3, 1, 4)
    assert "--context-length" not in launch.sglang
    assert "--max-model-len" not in launch.vllm


@pytest.mark.parametrize(
    ("engine", "command", "named"),
    [
        ("sglang", SGLANG + "--speculative-num-draft-token 4", "no option --speculative-num-draft-token"),
        ("sglang", SGLANG + "--speculative-algorithm EAGLE-3", "EAGLE-3 is unknown"),
        ("sglang", SGLANG + "--speculative-num-steps 0", "no whole number"),
        ("sglang", SGLANG + "--dtype bf16", "bf16 is unknown"),
        ("sglang", SGLANG + "--speculative-num-steps", "has no value"),
        ("sglang", SGLANG + "--tp-size 2 --tp-size 2", "given twice"),
        ("sglang", "python -m sglang.launch_server --dtype auto", "needs --model-path"),
        ("sglang", VLLM, "not started by"),
        ("vllm", VLLM + "more", "no option more"),
        ("vllm", "vllm serve", "needs model"),
        ("vllm", VLLM + "--speculative-config {", "is not JSON"),
        ("vllm", VLLM + "--speculative-config []", "not a JSON object"),
        ("vllm", VLLM + '--speculative-config \'{"method": "eagle3"}\'', "needs model"),
        ("vllm", VLLM + "--speculative-config '{\"num_spec_tokens\": 3}'", "no option num_spec_tokens"),
        (
            "vllm",
            VLLM
            + "--speculative-config '"
            + json.dumps({"method": "eagle-3", "model": "h", "num_speculative_tokens": 3})
            + "'",
            "eagle-3 is unknown",
        ),
        (
            "vllm",
            VLLM
            + "--speculative-config '"
            + json.dumps({"method": "eagle3", "model": "h", "num_speculative_tokens": True})
            + "'",
            "no whole number",
        ),
    ],
)
def test_what_the_engine_would_not_take_is_refused_by_name(engine, command, named):
    with pytest.raises(ConfigError, match=named):
        parse(engine, command)


def test_an_option_may_be_joined_to_its_value():
    assert parse("sglang", "python -m sglang.launch_server --model-path=m --tp-size=2") == {"--model-path": "m", "--tp-size": 2}
