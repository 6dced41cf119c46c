"""SGLang's /generate as its benchmark sends it, echoed prompts, and what both engines' benchmarks
ask besides.
"""

from __future__ import annotations

import json

import httpx
import pytest

from tests.serving import MODEL, World, complete, post

PROMPT = "I would like"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World.make(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def client(world, tmp_path_factory):
    engine = world.drafting(tmp_path_factory.mktemp("heads") / "head", "fixed(2,2,4)")
    with world.served(engine, has_head=True) as client:
        yield client


@pytest.fixture(scope="module")
def text(client):
    return complete(client, PROMPT, max_tokens=12).choices[0].text


def generate(client, **body):
    return post(client, body, "/generate")


def bench_body(prompt, stream=True, **extra):
    """Of `sglang.bench_serving --backend sglang`, every field that it sends."""
    return {
        ("text" if isinstance(prompt, str) else "input_ids"): prompt,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True},
        "stream": stream,
        "lora_path": "",
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
        **extra,
    }


def test_the_answer_has_the_id_that_the_request_was_given(client):
    assert (
        generate(client, **bench_body(PROMPT, stream=False, rid="mine")).json()["meta_info"]["id"]
        == "mine"
    )
    two = generate(client, **bench_body([[5, 6], [7]], stream=False, rid="mine")).json()
    assert [one["meta_info"]["id"] for one in two] == ["mine-0", "mine-1"]


def read_as_the_benchmark_does(lines):
    """(text, tokens, [new tokens of each event]): a stream, read as by sglang.bench_serving."""
    said, counted, steps = "", 0, []
    for line in lines:
        chunk = line.strip().removeprefix("data: ")
        if not chunk or chunk == "[DONE]":
            continue
        data = json.loads(chunk)
        if data.get("text"):
            said, before, counted = data["text"], counted, data["meta_info"]["completion_tokens"]
            steps.append(counted - before)
    return said, counted, steps


@pytest.mark.parametrize(
    "extra", [{}, {"lora_path": None}, {"stream_options": {"include_usage": True}}]
)
def test_sglang_s_benchmark_streams(client, text, extra):
    with httpx.stream(
        "POST", f"{client.url}/generate", json=bench_body(PROMPT, **extra), timeout=300
    ) as reply:
        assert reply.status_code == 200
        said, counted, steps = read_as_the_benchmark_does(reply.iter_lines())
    assert (said, counted) == (text, 12)
    assert all(step > 0 for step in steps)


def test_sglang_s_benchmark_without_streams_and_with_tokens(client, world, text):
    whole = generate(client, **bench_body(PROMPT, stream=False)).json()
    assert whole["text"] == text
    assert len(whole["output_ids"]) == whole["meta_info"]["completion_tokens"] == 12
    assert whole["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    assert whole["meta_info"]["spec_verify_ct"] > 0
    ids = world.chat.tokenizer.encode(PROMPT, add_special_tokens=False)
    by_tokens = generate(client, **bench_body(ids, stream=False)).json()
    assert (
        by_tokens["output_ids"] == world.results(ids, max_tokens=12, ignore_eos=True)[0].token_ids
    )
    assert by_tokens["meta_info"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_sglang_s_benchmark_reads_tau(client, text, path):
    info = httpx.get(client.url + path).json()
    assert info["internal_states"][0]["avg_spec_accept_length"] >= 1
    assert info["served_model_name"] == MODEL


def test_logprobs_come_as_sglang_has_them(client):
    asked = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    answer = generate(
        client, text=PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 3}, **asked
    ).json()
    meta = answer["meta_info"]
    openai = complete(client, PROMPT, max_tokens=3, logprobs=2).choices[0].logprobs
    assert [one[0] for one in meta["output_token_logprobs"]] == openai.token_logprobs
    assert [one[1] for one in meta["output_token_logprobs"]] == answer["output_ids"]
    assert "system" in [one[2] for one in meta["output_token_logprobs"]]
    assert [len(one) for one in meta["output_top_logprobs"]] == [2, 2, 2]
    assert meta["input_token_logprobs"] == []


def test_several_prompts_and_samples_are_a_list(client):
    params = {
        "temperature": 0.9,
        "sampling_seed": 3,
        "max_new_tokens": 4,
        "n": 2,
        "stop": ["never said"],
    }
    answers = generate(client, text=["I", "you would"], sampling_params=params).json()
    assert len(answers) == 4
    assert len({one["meta_info"]["id"] for one in answers}) == 4
    assert [one["meta_info"]["prompt_tokens"] for one in answers] == sorted(
        one["meta_info"]["prompt_tokens"] for one in answers
    )
    streamed = generate(client, text=["I", "you would"], sampling_params=params, stream=True).text
    events = [
        json.loads(line.removeprefix("data: "))
        for line in streamed.split("\n\n")
        if line and "[DONE]" not in line
    ]
    last = {event["index"]: event["text"] for event in events}
    assert last == {number: one["text"] for number, one in enumerate(answers)}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "x", "input_ids": [5]}, "text"),
        ({"text": ""}, "text"),
        ({"text": "x", "logprob_start_len": 0}, "logprob_start_len"),
        ({"text": "x", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "x", "lora_path": "mine"}, "lora_path"),
        ({"text": "x", "image_data": "http://x/y.png"}, "image_data"),
        ({"text": "x", "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"text": "x", "unheard_of": 1}, "unheard_of"),
        ({"text": "x", "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens"),
        ({"text": "x", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        (
            {"text": "x", "sampling_params": {"max_new_tokens": 3000}},
            "sampling_params.max_new_tokens",
        ),
        ({"text": "x", "sampling_params": {"temperature": 3}}, "sampling_params.temperature"),
        ({"text": "x", "sampling_params": {"ebnf": "root ::= x"}}, "ebnf"),
        ({"text": "x", "sampling_params": {"min_new_tokens": 200}}, "min_tokens"),
        ({"text": "x", "sampling_params": [{"n": 1}]}, "sampling_params"),
        ({"text": "x", "store": True}, "store"),
    ],
)
def test_what_generate_does_not_do_is_refused(client, body, param):
    reply = generate(client, **body)
    assert reply.status_code == 400, reply.text
    assert (
        param in (reply.json()["error"]["param"] or "") or param in reply.json()["error"]["message"]
    )


# What else vLLM's benchmark asks


def test_a_model_has_the_root_that_vllm_s_benchmark_takes_its_tokenizer_from(client):
    (card,) = httpx.get(f"{client.url}/v1/models").json()["data"]
    assert (card["id"], card["root"]) == (MODEL, MODEL)


@pytest.mark.parametrize("extra", [{"echo": False}, {"echo": True}, {"echo": True, "stream": True}])
def test_the_prompt_stands_before_its_text_where_it_is_asked_for(client, text, extra):
    reply = complete(client, PROMPT, max_tokens=12, **extra)
    said = (
        "".join(chunk.choices[0].text for chunk in reply)
        if extra.get("stream")
        else reply.choices[0].text
    )
    assert said == (PROMPT + text if extra["echo"] else text)


def test_each_choice_echoes_its_own_prompt(client, world):
    ids = world.chat.tokenizer.encode("you", add_special_tokens=False)
    reply = client.completions.create(
        model=MODEL, prompt=["I would", "well"], n=2, max_tokens=3, echo=True
    )
    assert [choice.text[:4] for choice in reply.choices] == ["I wo", "I wo", "well", "well"]
    assert complete(client, ids, echo=True).choices[0].text.startswith("you")
    assert reply.usage.completion_tokens == 12


def test_prompts_as_tokens_of_vllm_s_benchmark(client, world):
    body = {
        "model": MODEL,
        "prompt": world.chat.tokenizer.encode(PROMPT, add_special_tokens=False),
        "repetition_penalty": 1.0,
        "max_tokens": 4,
        "logprobs": None,
    }
    stream = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    reply = post(client, {**body, **stream}, "/v1/completions")
    events = [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n")[:-2]]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 4
    assert sum(events[-1]["usage"]["eyas"]["accept_hist"]) == events[-1]["usage"]["eyas"]["rounds"]
