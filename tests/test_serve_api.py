"""The API, driven by the `openai` client over a real socket, on a real engine with a tiny random
target.
"""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import numpy as np
import openai
import pytest
from transformers import AutoTokenizer

from eyas.engine.engine import Engine, EngineConfig
from eyas.model.target import Target
from eyas.serve.app import create_app
from eyas.serve.limits import LimitsConfig
from eyas.serve.server import ServeConfig, load, running_app
from tests.serving import (
    MAX_LENGTH,
    MESSAGES,
    MODEL,
    ScriptedEngine,
    World,
    ask,
    complete,
    connected,
    post,
)
from tests.tiny import tiny_target
from tests.tiny_head import head_folder

LONE_SURROGATE = b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}'


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World.make(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def truth(world):
    return world.truth


@pytest.fixture(scope="module")
def client(world):
    with world.served() as client:
        yield client


# Answers


def test_answer_is_what_the_engine_decodes(client, truth):
    reply = ask(client)
    text, token_ids = truth(max_tokens=24)
    assert reply.choices[0].message.content == text
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == len(token_ids) == 24
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 24
    assert reply.usage.eyas == {"rounds": 0, "accept_hist": [], "tau": None}


def test_stream_has_a_chunk_per_update_and_joins_to_the_answer(client, truth):
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    *pieces, last, usage = chunks
    assert [piece.choices[0].delta.role for piece in pieces] == ["assistant"] + [None] * 23
    assert "".join(piece.choices[0].delta.content for piece in pieces) == truth(max_tokens=24)[0]
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * 24
    assert last.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage.completion_tokens == 24
    assert usage.usage.eyas["rounds"] == 0
    assert {(chunk.id, chunk.model, chunk.object) for chunk in chunks} == {
        (chunks[0].id, MODEL, "chat.completion.chunk")
    }


def test_stream_without_usage_ends_with_the_finish_reason(client):
    *_, last = ask(client, stream=True)
    assert last.choices[0].finish_reason == "length"
    assert last.usage is None


def test_end_token_finishes_with_stop_and_is_counted_but_not_shown(tmp_path, world):
    token_ids = world.truth(max_tokens=24)[1]
    end = token_ids[5]
    ended = Target.load(tiny_target(tmp_path, eos_token_id=end))
    with world.served(Engine(ended)) as client:
        reply = ask(client)
        last = list(ask(client, stream=True))[-1]
    assert reply.usage.completion_tokens == token_ids.index(end) + 1
    assert reply.choices[0].finish_reason == last.choices[0].finish_reason == "stop"


def test_sampling_follows_its_parameters_and_seed(client, truth):
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": 24}
    once, again = (
        ask(client, **sampled, extra_body={"top_k": 20}).choices[0].message.content
        for _ in range(2)
    )
    assert once == again == truth(**sampled, top_k=20)[0]
    assert (
        once
        != ask(client, **{**sampled, "seed": 8}, extra_body={"top_k": 20})
        .choices[0]
        .message.content
    )


def test_temperature_is_one_by_default(client, truth):
    reply = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, seed=3, max_completion_tokens=24
    )
    assert reply.choices[0].message.content == truth(temperature=1.0, seed=3, max_tokens=24)[0]


def test_answer_fills_the_room_when_no_limit_is_given(client):
    reply = ask(client, max_tokens=openai.omit)
    assert reply.usage.total_tokens == MAX_LENGTH


def test_text_parts_and_values_that_mean_off_are_accepted(client, truth):
    parts = [
        {"type": "text", "text": "I would like "},
        {"type": "text", "text": "a table for two."},
    ]
    off = {
        "n": 1,
        "frequency_penalty": 0,
        "logprobs": False,
        "response_format": {"type": "text"},
        "tools": [],
        "user": "u",
    }
    reply = ask(
        client,
        [{"role": "user", "content": parts}],
        **off,
        extra_body={"speculation": False, "top_logprobs": None},
    )
    assert reply.choices[0].message.content == truth(max_tokens=24)[0]


WITHOUT_EFFECT = [
    {"metadata": {"run": 7, "nested": [{}], "k" * 100: "v" * 1000}},
    {"metadata": "any"},
    {"reasoning_effort": "none"},
    {"prompt_cache_retention": "24h"},
    {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}},
    {"prompt_cache_key": "k", "safety_identifier": "s", "user": "u"},
    {"verbosity": "low", "service_tier": "priority", "store": True},
    {"prediction": {"type": "content", "content": "x"}},
    {"cache_control": {"type": "ephemeral"}},
    {"stream": True, "stream_options": {"include_obfuscation": False}},
]


@pytest.mark.parametrize("field", WITHOUT_EFFECT, ids=lambda field: min(field))
def test_what_changes_no_output_is_accepted(client, truth, field):
    body = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24, **field}
    reply = post(client, body)
    assert reply.status_code == 200, reply.text
    if "stream" in field:
        text = "".join(one["choices"][0]["delta"].get("content", "") for one in events(reply))
    else:
        text = reply.json()["choices"][0]["message"]["content"]
    assert text == truth(max_tokens=24)[0]


def test_messages_may_hold_what_their_template_does_not_read(client, truth):
    hint = {"cache_control": {"type": "ephemeral"}}
    breakpoint_ = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    bare = [
        *MESSAGES,
        {"role": "assistant", "content": "When?"},
        {"role": "user", "content": "At noon."},
    ]
    with_more = [
        {**MESSAGES[0], "name": "Ann", **hint},
        {
            **bare[1],
            "reasoning_content": "The time is missing.",
            "annotations": [{"type": "x"}],
            "provider_specific_fields": {"refusal": None},
            "id": "msg_1",
            "thinking_blocks": [],
            "reasoning_details": [{}],
        },
        {"role": "user", "content": [{"type": "text", "text": "At noon.", **hint, **breakpoint_}]},
    ]
    assert ask(client, with_more).choices[0].message.content == truth(bare, max_tokens=24)[0]


def test_many_at_once_get_the_answers_they_get_alone(client, truth):
    conversations = [
        [{"role": "user", "content": f"A table for {number}?"}] for number in range(12)
    ]
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda messages: ask(client, messages), conversations))
    assert [reply.choices[0].message.content for reply in replies] == [
        truth(one, max_tokens=24)[0] for one in conversations
    ]


@pytest.fixture(scope="module")
def speculating(world, tmp_path_factory):
    head = head_folder(world.folder, tmp_path_factory.mktemp("heads") / "head")
    config = EngineConfig(max_batch=4, max_length=MAX_LENGTH, speculation="fixed(2,2,4)")
    with world.served(
        Engine.load(world.folder, head, config=config, tokenizer=world.chat.tokenizer),
        has_head=True,
    ) as client:
        yield client


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 5}])
def test_speculation_changes_the_rounds_and_not_the_answer(speculating, truth, params):
    plain, default, on = (
        ask(speculating, **params, extra_body=body)
        for body in ({"speculation": False}, {}, {"speculation": True})
    )
    text = truth(max_tokens=24, **params)[0]
    assert {reply.choices[0].message.content for reply in (plain, default, on)} == {text}
    assert plain.usage.eyas["rounds"] == 0
    for reply in (default, on):
        rounds, hist = reply.usage.eyas["rounds"], reply.usage.eyas["accept_hist"]
        assert rounds == sum(hist) > 0
        # the first token is prefill's
        assert sum((accepted + 1) * count for accepted, count in enumerate(hist)) == 24 - 1
        assert reply.usage.eyas["tau"] == 23 / rounds


def test_stop_string_counts_the_same_with_and_without_speculation(speculating, truth):
    stop = truth(max_tokens=24)[0][6:8]
    plain, eagle = (
        ask(speculating, stop=stop, extra_body={"speculation": on}) for on in (False, True)
    )
    assert plain.choices[0].message.content == eagle.choices[0].message.content
    assert plain.usage.completion_tokens == eagle.usage.completion_tokens


# Stop strings


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("start", "length"), [(0, 2), (7, 1), (5, 6)])
def test_stop_string_ends_the_text_before_it(client, truth, stream, start, length):
    text, token_ids = truth(max_tokens=24)
    stop = text[start : start + length]
    before = text[: text.index(stop)]
    if stream:
        *pieces, last, usage = ask(
            client, stop=stop, stream=True, stream_options={"include_usage": True}
        )
        got, reason = (
            "".join(piece.choices[0].delta.content for piece in pieces),
            last.choices[0].finish_reason,
        )
    else:
        usage = ask(client, stop=["never said", stop])
        got, reason = usage.choices[0].message.content, usage.choices[0].finish_reason
    assert (got, reason) == (before, "stop")
    assert usage.usage.completion_tokens <= len(token_ids)
    assert stop in text[: len(before) + length]


def test_what_looked_like_a_stop_string_is_shown_in_the_end(client, truth):
    text = truth(max_tokens=24)[0]
    reply = ask(client, stop=text[-3:] + "!")
    assert reply.choices[0].message.content == text
    assert reply.choices[0].finish_reason == "length"


# Refusals


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 3}, "max_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"logit_bias": {"1": 200}}, "logit_bias.1"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"guided_regex": "a"}},
            "guided_regex",
        ),
        ({"extra_body": {"guided_grammar": "root ::= a"}}, "guided_grammar"),
        ({"extra_body": {"min_tokens": 30}}, "min_tokens"),
        ({"extra_body": {"ignore_eos": True, "regex": "a"}}, "ignore_eos"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"extra_body": {"skip_special_tokens": False}}, "skip_special_tokens"),
        (
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
            "chat_template_kwargs",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"speculation": True}}, "speculation"),
        ({"extra_body": {"text_drafts": True}}, "text_drafts"),
        ({"extra_body": {"guided_jsn": "{}"}}, "guided_jsn"),
        ({"extra_body": {"temperature": "hot"}}, "temperature"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}]}
                ]
            },
            "messages.0.content.0.cache",
        ),
        ({"extra_body": {"seed": 2**70}}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "name": "y" * 300}]}, "messages.0.name"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"extra_body": {"moderation": {"model": "m"}}}, "moderation"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "messages.0.content.0",
        ),
        ({"messages": [{"role": "user", "content": "x" * 4000}]}, "messages"),
        ({"max_tokens": 250}, "max_tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client, params, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **params)
    assert refused.value.param.startswith(param)
    assert refused.value.type == "invalid_request_error"
    assert refused.value.body["message"]


def test_a_prompt_without_room_names_the_context(client):
    with pytest.raises(openai.BadRequestError, match="holds 256 tokens") as refused:
        ask(client, [{"role": "user", "content": "x" * 4000}])
    assert refused.value.code == "context_length_exceeded"


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="another", messages=MESSAGES)
    assert refused.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "body", "kind", "status"),
    [
        ("POST", "/v1/chat/completions", b"{", "application/json", 400),
        ("POST", "/v1/chat/completions", b"[]", "application/json", 400),
        ("POST", "/v1/chat/completions", LONE_SURROGATE, "application/json", 400),
        ("POST", "/v1/chat/completions", b"[" * 100_000, "application/json", 400),
        ("POST", "/v1/chat/completions", b"{}", "text/plain", 415),
        (
            "POST",
            "/v1/chat/completions",
            b" " * (LimitsConfig().max_body_bytes + 1),
            "application/json",
            413,
        ),
        ("GET", "/v1/chat/completions", b"", "application/json", 405),
        ("GET", "/nowhere", b"", "application/json", 404),
    ],
)
def test_every_error_has_the_same_shape(client, method, path, body, kind, status):
    reply = httpx.request(method, client.url + path, content=body, headers={"content-type": kind})
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


# Grammars


@pytest.fixture(scope="module")
def ending(tmp_path_factory):
    """A world whose target can end an answer, as one that follows a grammar must."""
    return World.make(tmp_path_factory.mktemp("ending"), eos_token_id=2)


@pytest.fixture(scope="module")
def follower(ending):
    with ending.served() as client:
        yield client


SCHEMA = {
    "type": "object",
    "properties": {
        "party": {"type": "integer", "minimum": 1, "maximum": 9},
        "indoors": {"type": "boolean"},
    },
    "required": ["party", "indoors"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "body",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "table", "schema": SCHEMA, "strict": True},
            }
        },
        {"extra_body": {"guided_json": SCHEMA}},
        {"extra_body": {"guided_json": json.dumps(SCHEMA)}},
        {"extra_body": {"json_schema": json.dumps(SCHEMA)}},
        {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
    ],
)
def test_json_follows_its_schema(follower, body):
    reply = ask(follower, max_tokens=200, **body)
    said = json.loads(reply.choices[0].message.content)
    assert set(said) == {"party", "indoors"}
    assert 1 <= said["party"] <= 9
    assert isinstance(said["indoors"], bool)
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("name", ["regex", "guided_regex"])
def test_an_answer_follows_its_regex(follower, name):
    reply = ask(follower, max_tokens=50, extra_body={name: "[0-9]{3}-(a|b)"})
    text = reply.choices[0].message.content
    assert text[:3].isdigit()
    assert text[3:] in ("-a", "-b")


@pytest.mark.parametrize("field", ["guided_choice", "structured_outputs"])
def test_a_choice_is_taken_as_it_is_written(follower, field):
    choices = ["a (b)*", "c.d|e", "[f] g-h"]
    body = {field: choices if field == "guided_choice" else {"choice": choices}}
    assert ask(follower, max_tokens=50, extra_body=body).choices[0].message.content in choices


def test_any_object_is_an_object_as_far_as_it_goes(follower):
    reply = ask(follower, max_tokens=100, response_format={"type": "json_object"})
    assert reply.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_json": {"not": {}}}, "json_schema"),
        ({"guided_json": "{"}, "json_schema"),
        ({"guided_regex": "("}, "regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"regex": "a" * 70_000}, "regex"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused(follower, body, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(follower, extra_body=body)
    assert refused.value.param == param


# Samples


def test_samples_are_those_of_the_engine(client, world):
    results = world.results(
        world.chat.prompt_ids(MESSAGES), n=3, temperature=0.9, seed=5, max_tokens=16
    )
    texts = [world.chat.decode(result.token_ids) for result in results]
    assert len(set(texts)) > 1
    reply = ask(client, n=3, temperature=0.9, seed=5, max_tokens=16)
    assert [choice.message.content for choice in reply.choices] == texts
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert reply.usage.completion_tokens == 48
    streamed = {}
    for chunk in ask(client, n=3, temperature=0.9, seed=5, max_tokens=16, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert [streamed[index] for index in range(3)] == texts


@pytest.mark.parametrize(
    "params",
    [
        {"min_p": 0.2, "temperature": 0.9, "seed": 1},
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"logit_bias": {7: 50.0}},
        {"stop_token_ids": (70, 71, 72)},
        {"top_k": 5, "temperature": 1.5, "seed": 2},
    ],
)
def test_every_field_reaches_the_engine(client, truth, params):
    body = {
        name: {str(key): one for key, one in value.items()} if name == "logit_bias" else value
        for name, value in params.items()
    }
    reply = post(
        client, {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24, **body}
    ).json()
    assert reply["choices"][0]["message"]["content"] == truth(max_tokens=24, **params)[0]


def test_end_tokens_can_be_ignored_and_put_off(tmp_path, world):
    end = world.truth(max_tokens=24)[1][3]
    ended = Target.load(tiny_target(tmp_path, eos_token_id=end))
    with world.served(Engine(ended)) as client:
        assert ask(client).usage.completion_tokens <= 4
        assert ask(client, extra_body={"ignore_eos": True}).usage.completion_tokens == 24
        assert ask(client, extra_body={"min_tokens": 10}).usage.completion_tokens >= 10


# Log-probabilities


def test_logprobs_are_the_engines_in_openais_shape(client, world):
    (truth,) = world.results(world.chat.prompt_ids(MESSAGES), max_tokens=8, logprobs=3)
    reply = ask(client, max_tokens=8, logprobs=True, top_logprobs=3)
    content = reply.choices[0].logprobs.content
    assert [one.logprob for one in content] == [one.logprob for one in truth.logprobs]
    assert [[top.logprob for top in one.top_logprobs] for one in content] == [
        [p for _, p in one.top] for one in truth.logprobs
    ]
    assert (
        bytes(byte for one in content for byte in one.bytes).decode(errors="replace")
        == reply.choices[0].message.content
    )
    chunks = ask(client, max_tokens=8, logprobs=True, top_logprobs=3, stream=True)
    streamed = [
        one
        for chunk in chunks
        for one in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert streamed == content


def test_logprobs_in_the_legacy_shape(client):
    reply = complete(client, max_tokens=8, logprobs=2)
    legacy = reply.choices[0].logprobs
    assert (
        len(legacy.tokens)
        == len(legacy.token_logprobs)
        == len(legacy.top_logprobs)
        == len(legacy.text_offset)
        == 8
    )
    assert all(logprob <= 0 and math.isfinite(logprob) for logprob in legacy.token_logprobs)
    assert all(
        max(top.values()) >= logprob
        for top, logprob in zip(legacy.top_logprobs, legacy.token_logprobs, strict=True)
    )
    lengths = [1 if token.startswith("bytes:") else len(token) for token in legacy.tokens]
    assert legacy.text_offset == [0, *np.cumsum(lengths)[:-1]]


def test_without_logprobs_there_are_none(client):
    assert ask(client).choices[0].logprobs is None
    assert complete(client).choices[0].logprobs is None


# Token ids


@pytest.mark.parametrize("stop", [None, [" "]])
@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_those_of_the_prompt_and_of_the_answer(client, world, stream, stop):
    """As in vLLM: of a chat the prompt's are at the top, of texts at each choice. A stop string
    ends the text, and its tokens are the answer's.
    """
    extra = {"return_token_ids": True}
    params = {"n": 2, "seed": 3, "temperature": 0.9, "max_tokens": 12, "stop": stop}
    asked = world.chat.prompt_ids(MESSAGES)
    truth = [one.token_ids for one in world.results(asked, **{**params, "stop": tuple(stop or ())})]
    reply = ask(client, **params, extra_body=extra, stream=stream)
    if stream:
        chunks = [chunk.to_dict() for chunk in reply]
        assert [one["prompt_token_ids"] for one in chunks if "prompt_token_ids" in one] == [
            asked
        ] * 2
        assert "prompt_token_ids" in chunks[0]
        found = [[], []]
        for choice in (chunk["choices"][0] for chunk in chunks):
            found[choice["index"]] += choice.get("token_ids", [])
    else:
        assert reply.prompt_token_ids == asked
        found = [choice.token_ids for choice in reply.choices]
        assert reply.usage.completion_tokens == sum(map(len, found))
    assert found == truth


@pytest.mark.parametrize("stream", [False, True])
def test_each_text_has_the_token_ids_of_its_own_prompt(client, world, stream):
    texts, found = ["I would like", "71 North"], {}
    reply = complete(client, texts, extra_body={"return_token_ids": True}, stream=stream)
    for choice in [one for chunk in reply for one in chunk.choices] if stream else reply.choices:
        prompt, answer = found.setdefault(choice.index, ([], []))
        prompt += getattr(choice, "prompt_token_ids", [])
        answer += choice.token_ids
    asked = [prompt_ids(world, text) for text in texts]
    truth = [world.results(ids, max_tokens=12)[0].token_ids for ids in asked]
    assert [found[index] for index in range(2)] == list(zip(asked, truth, strict=True))


def test_without_a_wish_there_are_no_token_ids(client):
    for reply in (post(client, {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}),):
        assert "token_ids" not in reply.text


# /v1/completions


def prompt_ids(world, text="I would like"):
    return world.chat.tokenizer.encode(text, add_special_tokens=False)


def test_a_text_goes_on_as_the_engine_goes_on(client, world):
    (truth,) = world.results(prompt_ids(world), max_tokens=12)
    text = world.chat.decode(truth.token_ids)
    whole, of_tokens = complete(client), complete(client, prompt_ids(world))
    assert whole.object == "text_completion"
    assert whole.choices[0].text == of_tokens.choices[0].text == text
    assert whole.choices[0].finish_reason == "length"
    *pieces, usage = complete(client, stream=True, stream_options={"include_usage": True})
    assert "".join(piece.choices[0].text for piece in pieces) == text
    assert pieces[-1].choices[0].finish_reason == "length"
    assert (usage.choices, usage.usage.completion_tokens) == ([], 12)


@pytest.mark.parametrize("as_tokens", [False, True])
def test_several_prompts_have_choices_in_their_order(client, world, as_tokens):
    texts = ["I would like", "The address is", "71 North"]
    alone = [complete(client, text).choices[0].text for text in texts]
    reply = complete(
        client, [prompt_ids(world, text) for text in texts] if as_tokens else texts, n=2
    )
    assert [choice.text for choice in reply.choices] == [text for text in alone for _ in range(2)]
    assert [choice.index for choice in reply.choices] == list(range(6))
    assert reply.usage.prompt_tokens == sum(len(prompt_ids(world, text)) for text in texts)


def test_completions_have_16_tokens_by_default(client):
    assert complete(client, max_tokens=openai.omit).usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [5000]}, "vocabulary"),
        ({"prompt": "x" * 100_000}, "prompt"),
        ({"prompt": "x" * 300}, "prompt"),
        ({"prompt": "x", "max_tokens": 1000}, "max_tokens"),
        ({"prompt": ["x" * 200] * 20, "echo": True, "logprobs": 20, "max_tokens": 0}, "echo"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": ["x"] * 5000}, "prompt"),
        ({"prompt": ["x"] * 100, "n": 100}, "n"),
        ({"prompt": "x", "messages": MESSAGES}, "messages"),
    ],
)
def test_texts_that_cannot_go_on_are_refused(client, params, param):
    reply = post(client, {"model": MODEL, **params}, "/v1/completions")
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"] or error["message"]).startswith(param) or param in error["message"]


# Requests as other programs send them


def as_vllm_bench(client, **sampling):
    """Bodies of `vllm bench serve`, for its backends openai and openai-chat."""
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    text = {
        "model": MODEL,
        "prompt": "I would like",
        "repetition_penalty": 1.0,
        "max_tokens": 8,
        "logprobs": None,
    }
    chat = {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "A table for two"}]}],
        "max_completion_tokens": 8,
    }
    return {
        "/v1/completions": {**text, **stream, **sampling},
        "/v1/chat/completions": {**chat, **stream, **sampling},
    }


def as_sglang_bench(client, **sampling):
    """Bodies of `sglang.bench_serving`, for its backends sglang-oai and sglang-oai-chat."""
    shared = {"model": MODEL, "temperature": 0.0, "stream": True, "ignore_eos": True}
    text = {**shared, "prompt": "I would like", "best_of": 1, "max_tokens": 8}
    chat = {
        **shared,
        "messages": [{"role": "user", "content": "A table for two"}],
        "max_completion_tokens": 8,
    }
    return {"/v1/completions": {**text, **sampling}, "/v1/chat/completions": {**chat, **sampling}}


def events(reply):
    *lines, done = [line for line in reply.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("bodies", [as_vllm_bench, as_sglang_bench])
@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"ignore_eos": True, "temperature": 0.0, "top_p": 0.9, "top_k": -1, "min_p": 0.1},
        {
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stream_options": {"include_usage": True},
        },
        {
            "n": 1,
            "min_tokens": 8,
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "logprobs": None,
        },
    ],
)
def test_benchmarks_of_vllm_and_sglang_are_served(client, bodies, sampling):
    for path, body in bodies(client, **sampling).items():
        headers = {"x-request-id": "bench-1"} | (
            {"authorization": "Bearer none"} if "n" in sampling else {}
        )
        reply = post(client, body, path, headers=headers)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-request-id"] == "bench-1"
        choices = [event["choices"][0] for event in events(reply) if event["choices"]]
        said = [
            choice["text"] if "text" in choice else choice["delta"].get("content")
            for choice in choices
        ]
        assert any(said)
        if "stream_options" in body:
            assert events(reply)[-1]["usage"]["completion_tokens"] == 8


def test_usage_in_every_chunk_where_it_is_asked_for(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask(client, max_tokens=4, stream=True, stream_options=options))
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 4, 4, 4]
    assert all(chunk.usage is None for chunk in ask(client, max_tokens=4, stream=True))


def test_null_asks_for_nothing_in_every_field(client, truth):
    body = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    off = dict.fromkeys(
        (
            "stop",
            "seed",
            "tools",
            "tool_choice",
            "n",
            "logit_bias",
            "guided_json",
            "echo",
            "response_format",
        )
    )
    assert (
        post(client, {**body, **off}).json()["choices"][0]["message"]["content"]
        == truth(max_tokens=24)[0]
    )


# Tools


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "book",
            "description": "Book a table.",
            "parameters": {
                "type": "object",
                "properties": {"party": {"$ref": "#/$defs/size"}, "indoors": {"type": "boolean"}},
                "required": ["party", "indoors"],
                "additionalProperties": False,
                "$defs": {"size": {"type": "integer", "minimum": 1, "maximum": 9}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "cancel",
            "parameters": {"type": "object", "additionalProperties": False},
        },
    },
]
NO_CALL = {"id": "1", "type": "function", "function": {"name": "x", "arguments": "["}}
CALL = '<tool_call>\n{"name": "book", "arguments": {"party": 2, "indoors": true}}\n</tool_call>'


@pytest.fixture(scope="module")
def tooled(tmp_path_factory):
    return World.tooled(tmp_path_factory.mktemp("tooled"))


@pytest.fixture(scope="module")
def caller(tooled):
    with tooled.served(tooled.engine(max_length=1024)) as client:
        yield client


@contextmanager
def saying(world, text, per_step=1):
    """A client of a server whose target says a text; and the engine, which keeps its requests."""
    engine = world.engine(ScriptedEngine, max_length=1024)
    tokenizer = world.chat.tokenizer
    said = tokenizer.encode(text, add_special_tokens=False)
    engine.script, engine.per_step = (*said, tokenizer.eos_token_id), per_step
    with world.served(engine) as client:
        yield client, engine


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "book"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_is_made(caller, choice, stream):
    params = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 450, "temperature": 1, "seed": 3}
    if stream:
        chunks = list(ask(caller, stream=True, **params))
        (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert (chunks[-1].choices[0].finish_reason, call.index) == ("tool_calls", 0)
    else:
        reply = ask(caller, **params)
        (call,) = reply.choices[0].message.tool_calls
        assert (reply.choices[0].finish_reason, reply.choices[0].message.content) == (
            "tool_calls",
            None,
        )
    arguments = json.loads(call.function.arguments)
    if choice != "required" or call.function.name == "book":
        assert call.function.name == "book"
        assert set(arguments) == {"party", "indoors"}
        assert 1 <= arguments["party"] <= 9
    else:
        assert arguments == {}


@pytest.mark.parametrize("per_step", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_read_out_of_an_answer(tooled, per_step, stream):
    with saying(tooled, f"I will. \n{CALL}\n{CALL}", per_step) as (client, engine):
        if stream:
            chunks = list(ask(client, tools=TOOLS, stream=True))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
            assert [call.index for call in calls] == [0, 1]
            ending = chunks[-1].choices[0].finish_reason
        else:
            choice = ask(client, tools=TOOLS).choices[0]
            text, calls, ending = (
                choice.message.content,
                choice.message.tool_calls,
                choice.finish_reason,
            )
        shown = tooled.chat.decode(engine.asked[0].prompt_ids)
    assert (text, ending) == ("I will.", "tool_calls")
    assert [json.loads(call.function.arguments) for call in calls] == [
        {"party": 2, "indoors": True}
    ] * 2
    assert len({call.id for call in calls}) == 2
    assert "Book a table." in shown


def test_a_call_that_cannot_be_read_is_text(tooled):
    text = '<tool_call>{"name": book}</tool_call> well'
    with saying(tooled, text) as (client, _):
        choice = ask(client, tools=TOOLS).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
        text,
        None,
        "stop",
    )


def test_without_tools_a_tag_is_text(tooled):
    with saying(tooled, CALL) as (client, engine):
        assert ask(client).choices[0].message.content == CALL
        assert ask(client, tools=TOOLS, tool_choice="none").choices[0].message.content == CALL
        assert "Book a table." not in tooled.chat.decode(engine.asked[1].prompt_ids)


def test_one_call_at_most_ends_behind_its_tag(tooled):
    with saying(tooled, CALL) as (client, engine):
        ask(client, tools=TOOLS, parallel_tool_calls=False)
        assert engine.asked[0].params.stop == ("</tool_call>",)


def test_a_conversation_with_calls_is_shown_to_the_target(tooled):
    turns = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "book", "arguments": '{"party": 2}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "booked"},
    ]
    with saying(tooled, "Done.") as (client, engine):
        assert ask(client, turns, tools=TOOLS).choices[0].message.content == "Done."
        shown = tooled.chat.decode(engine.asked[0].prompt_ids)
    assert '<tool_call>{"name": "book", "arguments": {"party": 2}}</tool_call>' in shown
    assert "booked" in shown


def test_options_of_the_template_reach_it(tooled):
    with saying(tooled, "Done.") as (client, engine):
        ask(client)
        ask(client, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
        plain, thinking = (tooled.chat.decode(asked.prompt_ids) for asked in engine.asked)
        assert "Think." in thinking
        assert "Think." not in plain
        with pytest.raises(openai.BadRequestError, match="no option 'think'"):
            ask(client, extra_body={"chat_template_kwargs": {"think": True}})


def test_no_effort_means_no_thinking_where_the_template_has_a_switch(tooled):
    with saying(tooled, "Done.") as (client, engine):
        ask(client, reasoning_effort="none")
        kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
        ask(client, extra_body=kwargs)
        none, off = (asked.prompt_ids for asked in engine.asked)
        assert none == off
        kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
        with pytest.raises(openai.BadRequestError, match="contradicts enable_thinking"):
            ask(client, reasoning_effort="none", extra_body=kwargs)


def test_a_template_sees_the_thoughts_of_earlier_turns(tooled):
    """As in vLLM: the template decides what becomes of them."""
    for name in ("reasoning_content", "reasoning"):
        turns = [*MESSAGES, {"role": "assistant", "content": "Well.", name: "Hm."}]
        with saying(tooled, "Done.") as (client, engine):
            ask(client, [*turns, {"role": "user", "content": "So?"}])
            assert "(Hm.)Well." in tooled.chat.decode(engine.asked[0].prompt_ids)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "eat"}}},
            "tool_choice",
        ),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "function": {"name": "x", "arguments": "["}}],
                    }
                ]
            },
            "messages",
        ),
    ],
)
def test_tools_that_cannot_be_used_are_refused(caller, params, param):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(caller, **params)
    assert refused.value.param.startswith(param)


def test_the_tokenizer_is_read_once(world, monkeypatch):
    """For templates with other options, stop strings and grammars as well."""
    reads = []
    read = AutoTokenizer.from_pretrained
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda *a, **k: reads.append(a) or read(*a, **k)
    )
    config = ServeConfig(target=str(world.folder), model=MODEL)
    with running_app(create_app(MODEL), load(config)) as url, connected(url) as client:
        ask(client, stop=["never said"], max_tokens=4)
        with pytest.raises(openai.BadRequestError):  # the target has no end token
            ask(client, extra_body={"regex": "a"})
    assert len(reads) == 1
