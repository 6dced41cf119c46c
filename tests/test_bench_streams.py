"""Streams recorded from llama.cpp and vLLM, and written in SGLang's form."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from eyas.bench.server import parse_metrics, precision, rounds_of, speculation_of
from eyas.bench.stream import read_reply
from eyas.client import StreamRecord

STREAMS = Path(__file__).with_name("streams")
# what the packaged target says in 12 tokens, whoever serves it
ANSWER = "I found 10 restaurants. How about Bonch"


def recorded(name):
    return json.loads((STREAMS / f"{name}.json").read_text())


def received(name, asked):
    """A recorded stream as the server sent it: times in ms and bytes."""
    record, pieces = recorded(name), []
    for at, *sent in record["streams"][asked]:
        events = (json.dumps(record["frame"] | e) if isinstance(e, dict) else e for e in sent)
        pieces.append((at, "".join(f"data: {e}\n\n" for e in events).encode()))
    return StreamRecord(0.0, pieces)


WITH_HEAD = ("llama_cpp_eagle3", "vllm_eagle3")


@pytest.mark.parametrize(
    ("name", "asked"),
    [("llama_cpp", "usage"), *product(WITH_HEAD, ("usage", "continuous"))],
)
def test_recorded_streams_are_read(name, asked):
    stream = received(name, asked)
    reply = read_reply(stream)
    assert not reply.error
    assert (reply.text, reply.num_prompt_tokens, reply.num_output_tokens) == (ANSWER, 17, 12)
    assert (reply.finish_reason, reply.counted_by) == ("length", "usage")
    times = [at for at, _ in stream.pieces]
    assert times[0] <= reply.ttft_ms < reply.e2e_ms <= times[-1]
    assert reply.accept_hist == []
    assert not reply.tells_rounds


def test_without_usage_llama_cpp_counts_in_its_timings_and_vllm_not_at_all():
    timed = read_reply(received("llama_cpp_eagle3", "bare"))
    assert (timed.num_prompt_tokens, timed.num_output_tokens) == (17, 12)
    assert (timed.counted_by, timed.num_accepted_drafts) == ("timings", 7)
    silent = read_reply(received("vllm_eagle3", "bare"))
    assert (silent.num_output_tokens, silent.counted_by, silent.text) == (0, "", ANSWER)
    assert silent.e2e_ms > silent.ttft_ms > 0


@pytest.mark.parametrize("name", WITH_HEAD)
def test_an_answer_of_one_token(name):
    reply = read_reply(received(name, "one_token"))
    assert (reply.text, reply.num_output_tokens, reply.error) == ("I", 1, "")


def sglang(**changes):
    """SGLang's: pings, an empty first delta, reasoning, `choices: []` at the end."""

    def chunk(delta, finish=None):
        delta = dict.fromkeys(("role", "content", "reasoning_content", "tool_calls")) | delta
        stop = {"finish_reason": finish, "matched_stop": 151645 if finish else None}
        choice = {"index": 0, "delta": delta, "logprobs": None, **stop}
        frame = {"id": "0a", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        return {**frame, "choices": [choice], "usage": None}

    call = {"index": 0, "function": {"name": "book", "arguments": "{}"}}
    usage = {"prompt_tokens": 9, "completion_tokens": 14, "reasoning_tokens": 6}
    chunks = [
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "They want "}),
        chunk({"reasoning_content": "Thai food."}),
        chunk({"content": "How about Bonchon?"}),
        chunk({"tool_calls": [call]}),
        chunk({}, finish="stop"),
        chunk({}) | {"choices": [], "usage": usage},
    ]
    chunks[-1] |= changes
    lines = [f"data: {json.dumps(one)}\r\n\r\n".encode() for one in chunks]
    ping = b": ping - 2026-01-01 00:00:00\r\n\r\n"
    return [(0.5, ping), *((float(at), line) for at, line in enumerate(lines, 1))]


def test_reasoning_and_calls_are_text_and_what_is_empty_is_not():
    reply = read_reply(StreamRecord(0.0, [*sglang(), (9.0, b"data: [DONE]\r\n\r\n")]))
    assert reply.text == "They want Thai food.How about Bonchon?book{}"
    assert (reply.ttft_ms, reply.e2e_ms, reply.itl_ms) == (2.0, 6.0, [1.0, 1.0, 1.0])
    assert (reply.num_prompt_tokens, reply.num_output_tokens) == (9, 14)


def test_the_last_chunk_may_have_no_choices_at_all():
    assert read_reply(StreamRecord(0.0, sglang(choices=None))).num_output_tokens == 14


def metrics(name):
    return "".join(f"{line}\n" for line in recorded(name)["paths"]["/metrics"])


def model_card(name):
    return recorded(name)["paths"]["/v1/models"]["data"][0]


def test_counters_of_all_servers_have_one_form():
    page = metrics("vllm_eagle3").replace("} 0.0", "} 0.0\nunreadable{ 1")
    counted = parse_metrics(page)
    assert counted["spec_decode_num_drafts_total"] == 0
    assert counted["spec_decode_num_accepted_tokens_per_pos_total|3"] == 0
    assert "spec_decode_num_drafts_total" in parse_metrics(metrics("llama_cpp_eagle3"))
    two_engines = (
        'vllm:a_total{engine="0",model_name="m"} '
        '2\nvllm:a_total{engine="1",model_name="m"} 3.5 1700000000\n# TYPE b gauge\n'
    )
    assert parse_metrics(two_engines) == {"a_total": 5.5}


def test_what_counters_say_of_rounds():
    counted = {
        "spec_decode_num_drafts_total": 10.0,
        "spec_decode_num_draft_tokens_total": 40.0,
        "spec_decode_num_accepted_tokens_total": 15.0,
        "spec_decode_num_accepted_tokens_per_pos_total|1": 5.0,
        "spec_decode_num_accepted_tokens_per_pos_total|0": 10.0,
        "spec_decode_num_accepted_tokens_per_pos_total|2": 0.0,
    }
    told = rounds_of(counted)
    assert told == {
        "num_rounds": 10,
        "tau": 2.5,
        "nodes_mean": 4,
        "acceptance_by_position": [1, 0.5, 0],
        "num_draft_steps": 3,
    }
    assert rounds_of({"spec_accept_length": 2.9}) == {"tau": 2.9}  # SGLang's gauge
    assert rounds_of({"spec_decode_num_drafts_total": 0.0}) == rounds_of({}) == {}


def test_how_a_server_speculates_is_what_sglang_tells():
    algorithm = {"speculative_algorithm": "EAGLE3"}
    info = algorithm | {"speculative_num_steps": 3, "speculative_eagle_topk": 1}
    assert speculation_of(info) == "EAGLE3, steps 3, top-k 1"
    assert speculation_of({"speculative_algorithm": None}) is None


@pytest.mark.parametrize(
    ("card", "info", "told"),
    [
        ({"eyas": {"dtype": "bfloat16"}}, {}, "bfloat16"),
        (model_card("llama_cpp"), {}, "bfloat16"),
        ({"meta": {"n_params": 1000, "size": 1062}}, {}, "8.5 bits a weight"),
        ({}, {"dtype": "bfloat16", "quantization": "fp8"}, "bfloat16/fp8"),
        ({}, {"dtype": "auto"}, "auto"),
        (model_card("vllm_eagle3"), {}, None),
    ],
)
def test_precision_is_what_a_server_tells(card, info, told):
    assert precision(card.get("eyas") or {}, card.get("meta") or {}, info) == told
