"""Launch commands: what the engines' own parsers would take, by their options kept as data."""

from __future__ import annotations

import json
import shlex

import pytest

from eyas.errors import ConfigError
from eyas.export.launch import Launch, engines, parse

LAUNCH = Launch(
    "my models/8B",
    num_draft_steps=3,
    tree_topk=4,
    num_verify_tokens=12,
    dtype="bfloat16",
    max_length=8192,
)
SGLANG = "python -m sglang.launch_server --model-path m "
EAGLE3 = SGLANG + "--speculative-algorithm EAGLE3 --speculative-draft-model-path h "
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
        "--speculative-config": {
            "method": "eagle3",
            "model": "./vllm",
            "num_speculative_tokens": 3,
        },
    }
    words = shlex.split(LAUNCH.vllm.replace("\\\n", ""))
    assert json.loads(words[words.index("--speculative-config") + 1])["method"] == "eagle3"


@pytest.mark.parametrize(
    ("steps", "topk", "asked", "served"),
    [(3, 1, 16, 4), (3, 4, 12, 12), (1, 4, 16, 5), (2, 2, 16, 7)],
    ids=[
        "a chain: its drafts and the root",
        "as asked",
        "one step",
        "no more than there are candidates",
    ],
)
def test_no_more_is_verified_than_is_drafted(steps, topk, asked, served):
    assert (
        parse("sglang", Launch("m", steps, topk, asked).sglang)["--speculative-num-draft-tokens"]
        == served
    )


def test_the_targets_own_length_is_not_spelled():
    launch = Launch("m", 3, 1, 4)
    assert "--context-length" not in launch.sglang
    assert "--max-model-len" not in launch.vllm


@pytest.mark.parametrize(
    ("engine", "command", "named"),
    [
        (
            "sglang",
            SGLANG + "--speculative-num-draft-token 4",
            r"-draft-token is not in our list of SGLang \d\S+'s options",
        ),
        ("sglang", SGLANG + "--speculative-algorithm EAGLE-3", "EAGLE-3 is unknown"),
        ("sglang", SGLANG + "--speculative-num-steps 0", "no whole number"),
        ("sglang", SGLANG + "--dtype bf16", "bf16 is unknown"),
        ("sglang", SGLANG + "--speculative-num-steps", "has no value"),
        ("sglang", SGLANG + "--tp-size 2 --tp-size 2", "given twice"),
        ("sglang", "python -m sglang.launch_server --dtype auto", "needs --model-path"),
        ("sglang", SGLANG + "--tp 2 --tensor-parallel-size 2", "given twice"),
        (
            "sglang",
            SGLANG + "--served-model-name 'it",
            "a shell cannot read this command: No closing quotation",
        ),
        ("sglang", SGLANG + "--some-switch", "--some-switch is not in our list"),
        ("sglang", SGLANG + "--enable-metrics=true", "takes no value"),
        ("sglang", SGLANG + "--enable-metrics true", "true is not in our list"),
        ("sglang", SGLANG + "--mem-fraction-static 1.5", "no share above 0"),
        ("sglang", SGLANG + "--mem-fraction-static 0", "no share above 0"),
        ("vllm", VLLM + "--gpu-memory-utilization nan", "no share above 0"),
        (
            "sglang",
            SGLANG + "--speculative-algorithm EAGLE3",
            "EAGLE3 needs --speculative-draft-model-path",
        ),
        ("sglang", EAGLE3 + "--speculative-eagle-topk 4", "needs --speculative-num-steps"),
        ("sglang", EAGLE3 + "--speculative-num-draft-tokens 4", "needs --speculative-num-steps"),
        (
            "sglang",
            EAGLE3
            + "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens "
            "6",
            "--speculative-num-draft-tokens is 6, --speculative-num-steps 3",
        ),
        ("sglang", VLLM, "not started by"),
        ("vllm", VLLM + "more", "more is not in our list"),
        ("vllm", "vllm serve", "needs model"),
        ("vllm", VLLM + "--speculative-config {", "is not JSON"),
        ("vllm", VLLM + "--speculative-config []", "not a JSON object"),
        ("vllm", VLLM + '--speculative-config \'{"method": "eagle3"}\'', "needs model"),
        (
            "vllm",
            VLLM + "--speculative-config '{\"num_spec_tokens\": 3}'",
            "num_spec_tokens is not in our list",
        ),
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
    assert parse("sglang", "python -m sglang.launch_server --model-path=m --tp-size=2") == {
        "--model-path": "m",
        "--tp-size": 2,
    }


def test_switches_and_shares_and_other_names():
    assert parse(
        "sglang",
        "python -m sglang.launch_server --model m --tp 2 --enable-metrics --mem-fraction-static "
        "0.8",
    ) == {
        "--model-path": "m",
        "--tp-size": 2,
        "--enable-metrics": True,
        "--mem-fraction-static": 0.8,
    }
    assert parse(
        "vllm",
        VLLM + "--enforce-eager -tp 2 --gpu-memory-utilization .9 --max-num-batched-tokens=8192",
    ) == {
        "model": "m",
        "--enforce-eager": True,
        "--tensor-parallel-size": 2,
        "--gpu-memory-utilization": 0.9,
        "--max-num-batched-tokens": 8192,
    }


@pytest.mark.parametrize("topk", [1, 4])
def test_a_tree_may_be_judged_in_part_and_a_chain_whole(topk):
    sizes = (
        f"--speculative-num-steps 3 --speculative-eagle-topk {topk} "
        f"--speculative-num-draft-tokens {4 if topk == 1 else 9}"
    )
    assert parse("sglang", EAGLE3 + sizes)["--speculative-eagle-topk"] == topk


def test_rules_name_options_that_there_are():
    for engine in engines().values():
        for rule in engine.rules:
            assert {*rule.when, *rule.needs, *(rule.one_more or ())} <= engine.options.keys()
