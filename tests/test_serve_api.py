"""The API, by the `openai` client over a real socket."""

import itertools
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest

from eyas.chat import Chat
from eyas.chat.files import read_tokenizer
from eyas.engine.engine import Engine
from eyas.model.target import Target
from eyas.serve.app import create_app
from eyas.serve.limits import LimitsConfig
from eyas.serve.server import ServeConfig, load, running_app
from eyas.serve.tokenizer import Tokenizer
from eyas.serve.vertex import VertexConfig
from tests.serving import (
    CALL,
    MAX_LENGTH,
    MESSAGES,
    MODEL,
    TOOL_TEMPLATE,
    TOOLS,
    ask,
    complete,
    connected,
    events,
    post,
    saying,
    text_of,
)
from tests.tiny import tiny_target, tiny_tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODY = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
LONE_SURROGATE = b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}'


@pytest.fixture(scope="module")
def truth(world):
    return world.truth


def user(content, **fields):
    return {"messages": [{"role": "user", "content": content, **fields}]}


# Answers


def test_answer_is_what_the_engine_decodes(client, truth):
    reply = ask(client)
    text, token_ids = truth(max_tokens=24)
    (choice,) = reply.choices
    assert (choice.message.content, choice.message.role) == (text, "assistant")
    assert (choice.finish_reason, choice.logprobs) == ("length", None)
    assert reply.usage.completion_tokens == len(token_ids) == 24
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 24
    assert reply.usage.eyas == {"rounds": 0, "accept_hist": [], "tau": None}


def test_stream_joins_to_the_answer(client, truth):
    chunks = list(ask(client, **USAGE))
    *pieces, last, usage = chunks
    assert [piece.choices[0].delta.role for piece in pieces] == ["assistant"] + [None] * 23
    assert text_of(pieces) == truth(max_tokens=24)[0]
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * 24
    assert last.choices[0].finish_reason == "length"
    assert (usage.choices, usage.usage.completion_tokens) == ([], 24)
    assert usage.usage.eyas["rounds"] == 0
    assert {(chunk.id, chunk.model, chunk.object) for chunk in chunks} == {
        (chunks[0].id, MODEL, "chat.completion.chunk")
    }
    *_, last = bare = list(ask(client, stream=True))
    assert last.choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in bare)


def test_usage_in_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask(client, max_tokens=4, stream=True, stream_options=options))
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 4, 4, 4]


def test_end_tokens_count_and_are_not_shown(tmp_path, world):
    token_ids = world.truth(max_tokens=24)[1]
    end = token_ids[5]
    ended = Target.load(tiny_target(tmp_path, eos_token_id=end))
    with world.served(Engine(ended)) as client:
        reply = ask(client)
        last = list(ask(client, stream=True))[-1]
        assert ask(client, extra_body={"ignore_eos": True}).usage.completion_tokens == 24
        assert ask(client, extra_body={"min_tokens": 10}).usage.completion_tokens >= 10
    assert reply.usage.completion_tokens == token_ids.index(end) + 1
    assert reply.choices[0].finish_reason == last.choices[0].finish_reason == "stop"


def test_defaults(client, truth):
    given = {"model": MODEL, "messages": MESSAGES, "seed": 3}
    reply = client.chat.completions.create(**given, max_completion_tokens=24)
    assert text_of(reply) == truth(temperature=1.0, seed=3, max_tokens=24)[0]
    assert client.chat.completions.create(**given).usage.total_tokens == MAX_LENGTH


WITHOUT_EFFECT = [
    {"metadata": {"run": 7, "nested": [{}], "k" * 100: "v" * 1000}},
    {"metadata": "any"},
    {"temperature": 1e-6},
    {"cache_prompt": True, "repeat_penalty": 1, "skip_special_tokens": True, "best_of": 1},
    *({"reasoning_effort": effort} for effort in ("minimal", "low", "medium", "high", "xhigh")),
    {"max_tokens": 24, "add_generation_prompt": True, "continue_final_message": False},
    {"reasoning_effort": "none"},
    {"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}, "prompt_cache_retention": "24h"},
    {"prompt_cache_key": "k", "safety_identifier": "s", "user": "u"},
    {"verbosity": "low", "service_tier": "priority", "store": True},
    {"prediction": {"type": "content", "content": "x"}},
    {"cache_control": {"type": "ephemeral"}},
    {"stream": True, "stream_options": {"include_obfuscation": False}},
    {"n": 1, "frequency_penalty": 0, "logprobs": False, "tools": [], "speculation": False},
    {"response_format": {"type": "text"}, "top_logprobs": None, "use_beam_search": False},
    dict.fromkeys(
        ("stop", "seed", "tools", "tool_choice", "n", "logit_bias", "guided_json", "echo")
    ),
    user([{"type": "text", "text": one} for one in MESSAGES[0]["content"]]),
]


@pytest.mark.parametrize("field", WITHOUT_EFFECT, ids=lambda field: min(field))
def test_what_changes_no_output_is_accepted(client, truth, field):
    reply = post(client, {**BODY, **field})
    assert reply.status_code == 200, reply.text
    if "stream" in field:
        text = "".join(one["choices"][0]["delta"].get("content", "") for one in events(reply))
    else:
        text = reply.json()["choices"][0]["message"]["content"]
    assert text == truth(max_tokens=24)[0]


def test_messages_may_hold_notes(client, truth):
    hint = {"cache_control": {"type": "ephemeral"}}
    breakpoint_ = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    answered = {"role": "assistant", "content": "When?"}
    bare = [*MESSAGES, answered, {"role": "user", "content": "At noon."}]
    notes = {"provider_specific_fields": {"refusal": None}, "thinking_blocks": [], "id": "msg_1"}
    thoughts = {"reasoning_content": "The time is missing.", "reasoning_details": [{}]}
    with_more = [
        {**MESSAGES[0], "name": "Ann", **hint},
        {**answered, **notes, **thoughts, "annotations": [{"type": "x"}]},
        {"role": "user", "content": [{"type": "text", "text": "At noon.", **hint, **breakpoint_}]},
    ]
    assert text_of(ask(client, with_more)) == truth(bare, max_tokens=24)[0]


def test_concurrent_answers_are_those_alone(client, truth):
    asked = [user(f"A table for {number}?")["messages"] for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda messages: ask(client, messages), asked))
    assert list(map(text_of, replies)) == [truth(one, max_tokens=24)[0] for one in asked]


@pytest.fixture(scope="module")
def speculating(world, tmp_path_factory):
    engine = world.drafting(tmp_path_factory.mktemp("heads") / "head", "fixed(2,2,4)")
    with world.served(engine, has_head=True) as client:
        yield client


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 5}])
def test_speculation_keeps_the_answer(speculating, truth, params):
    plain, default, on = (
        ask(speculating, **params, extra_body=body)
        for body in ({"speculation": False}, {}, {"speculation": True})
    )
    text = truth(max_tokens=24, **params)[0]
    assert {text_of(reply) for reply in (plain, default, on)} == {text}
    assert plain.usage.eyas["rounds"] == 0
    for reply in (default, on):
        rounds, hist = reply.usage.eyas["rounds"], reply.usage.eyas["accept_hist"]
        assert rounds == sum(hist) > 0
        # the first token is prefill's
        assert sum((accepted + 1) * count for accepted, count in enumerate(hist)) == 24 - 1
        assert reply.usage.eyas["tau"] == 23 / rounds


# Stop strings


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("start", "length"), [(0, 2), (7, 1), (5, 6)])
def test_stop_string_ends_the_text_before_it(client, speculating, truth, stream, start, length):
    text, token_ids = truth(max_tokens=24)
    stop = text[start : start + length]
    before = text[: text.index(stop)]
    counts = []
    for one in (client, speculating):
        if stream:
            *pieces, last, usage = ask(one, stop=stop, **USAGE)
            got, reason = text_of(pieces), last.choices[0].finish_reason
        else:
            usage = ask(one, stop=["never said", stop])
            got, reason = text_of(usage), usage.choices[0].finish_reason
        assert (got, reason) == (before, "stop")
        counts.append(usage.usage.completion_tokens)
    assert counts[0] == counts[1] <= len(token_ids)
    assert stop in text[: len(before) + length]


def test_a_partial_stop_string_is_shown(client, truth):
    text = truth(max_tokens=24)[0]
    reply = ask(client, stop=text[-3:] + "!")
    assert text_of(reply) == text
    assert reply.choices[0].finish_reason == "length"


# Refusals


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
FUNCTION = {"type": "function", "function": {"name": "f"}}
OBFUSCATED = {"stream": True, "stream_options": {"include_obfuscation": True}}
TWO_GRAMMARS = {"response_format": {"type": "json_object"}, "guided_regex": "a"}


def each(wrong):
    """A row for each value of a field."""
    return [({name: value}, name) for name, values in wrong.items() for value in values]


OF_CHATS = each(
    {
        "top_k": (-2, 2**31),
        "n": (0, 129, True),
        "temperature": (2.5, "hot"),
        "top_p": (0,),
        "max_tokens": (0,),
        "max_completion_tokens": (0,),
        "min_tokens": (30,),
        "stop": (["a"] * 17,),
        "frequency_penalty": (2.5,),
        "logit_bias": ({"1": 5, "01": -5}, {"x": 1}, {"5000": 1}),
        "top_logprobs": (2,),
        "response_format": ({"type": "json_schema"},),
        "best_of": (2,),
        "add_generation_prompt": (False,),
        "continue_final_message": (True,),
        "use_beam_search": (True,),
        "chat_template_kwargs": ({"enable_thinking": True},),
        "tool_choice": ("required",),
        "stream_options": ({"include_usage": True},),
        "speculation": (True,),
        "text_drafts": (True,),
        "guided_jsn": ("{}",),
        "seed": (2**70,),
        "reasoning_effort": ("lots",),
        "moderation": ({"model": "m"},),
        "messages": ([],),
    }
)
OF_CHATS += [  # with a part of the message
    ({"functions": [{"name": "f"}]}, "functions", "send tools"),
    ({"function_call": {"name": "f"}}, "function_call", "send tool_choice"),
    ({"logit_bias": {str(at): 1 for at in range(2000)}}, "", "2000 keys, the limit is 1024"),
    ({"logit_bias": {"1": 200}}, "logit_bias.1"),
    ({"stop": ["x", ""]}, "stop", "at least 1 character"),
    ({"stop": ""}, "stop", "a stop string is empty"),
    ({"max_completion_tokens": 3}, "max_tokens"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (TWO_GRAMMARS, "guided_regex"),
    ({"grammar": "root ::= [a-z]", "ebnf": "root ::= [a-z]"}, "grammar"),
    ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
    ({"ignore_eos": True, "regex": "a"}, "ignore_eos"),
    ({"skip_special_tokens": False, "stop": "x"}, "skip_special_tokens"),
    (OBFUSCATED, "stream_options.include_obfuscation"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    (user(None), "messages"),
    (user("x" * 4000), "messages"),
    (user("x", tool_call_id="1"), "messages"),
    (user("x", reasoning_content="y"), "messages"),
    (user("x", name="y" * 300), "messages.0.name"),
    (user([{"type": "text", "text": "x", "cache": 1}]), "messages.0.content.0.cache"),
    (user([IMAGE]), "messages.0.content.0", "reads no images"),
]
PROMPTS = ("", [], "x" * 100_000, "x" * 300, ["x"] * 5000)
OF_TEXTS = each({"prompt": PROMPTS, "max_tokens": (-1,), "suffix": ("y",), "logprobs": (21,)})
OF_TEXTS += [
    ({"prompt": [5000]}, "vocabulary"),
    ({"prompt": ["x" * 200] * 20, "echo": True, "logprobs": 20, "max_tokens": 0}, "echo"),
    ({"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    ({"prompt": ["x"] * 100, "n": 100}, "n"),
    ({"messages": MESSAGES}, "messages"),
]
OF_GRAMMARS = [  # by a target that can end an answer
    *(({"guided_json": one}, "json_schema") for one in ({"not": {}}, "{")),
    *(({"grammar": f"root ::= {one}"}, "grammar") for one in ("thing", '"a', "(" * 3000)),
    ({"guided_regex": "("}, "regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"regex": "a" * 70_000}, "regex"),
]
BAD_CALL = {"id": "1", "function": {"name": "x", "arguments": "["}}
OF_TOOLS = [  # by a template that has them
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"tools": TOOLS, "tool_choice": {**FUNCTION, "function": {"name": "eat"}}}, "tool_choice"),
    ({"tools": TOOLS, "regex": "a"}, "tools"),
    ({"tools": TOOLS, "json_schema": "{} start: x"}, "json_schema"),
    ({"tools": [{"type": "retrieval"}]}, "tools.0"),
    ({"messages": [{"role": "assistant", "tool_calls": [BAD_CALL]}]}, "messages"),
]


@pytest.mark.parametrize(
    ("served", "body", "param", "says"),
    [
        *(("client", *row, "")[:4] for row in OF_CHATS),
        *(("follower", *row, "") for row in OF_GRAMMARS),
        *(("caller", *row, "") for row in OF_TOOLS),
        *(("client", {"prompt": "x", **body}, param, "") for body, param in OF_TEXTS),
    ],
)
def test_refusals_name_the_field(request, served, body, param, says):
    path, body = (TEXT, {"model": MODEL, **body}) if "prompt" in body else (CHAT, BODY | body)
    reply = post(request.getfixturevalue(served), body, path)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error"), reply.text
    assert (error["param"] or "").startswith(param) or (path == TEXT and param in error["message"])
    assert says in error["message"]


def test_the_official_client_reads_refusals(client):
    with pytest.raises(openai.BadRequestError, match="holds 256 tokens") as refused:
        ask(client, [{"role": "user", "content": "x" * 4000}])
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="another", messages=MESSAGES)
    assert refused.value.code == "model_not_found"
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="no model 'another' here"):
        client.models.retrieve("another")


def test_the_model_is_optional(client):
    for path, body in ((CHAT, BODY), ("/v1/responses", {"input": "Hi"})):
        named, unnamed = (post(client, body | {"model": one}, path) for one in (MODEL, None))
        assert unnamed.json()["model"] == named.json()["model"] == MODEL


@pytest.mark.parametrize(
    ("method", "path", "body", "kind", "status"),
    [
        ("POST", CHAT, b"{", "application/json", 400),
        ("POST", CHAT, b"[]", "application/json", 400),
        ("POST", CHAT, LONE_SURROGATE, "application/json", 400),
        ("POST", CHAT, b"[" * 100_000, "application/json", 400),
        ("POST", CHAT, b"{}", "text/plain", 415),
        ("POST", CHAT, b" " * (LimitsConfig().max_body_bytes + 1), "application/json", 413),
        ("GET", CHAT, b"", "application/json", 405),
        ("GET", "/nowhere", b"", "application/json", 404),
        ("POST", "/generate", b"{}", "application/json", 404),
    ],
)
def test_every_error_has_the_same_shape(client, method, path, body, kind, status):
    reply = httpx.request(method, client.url + path, content=body, headers={"content-type": kind})
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


# Grammars


@pytest.fixture(scope="module")
def follower(ending):
    with ending.served() as client:
        yield client


SIZE = {"type": "integer", "minimum": 1, "maximum": 9}
SCHEMA = {
    "type": "object",
    "properties": {"party": SIZE, "indoors": {"type": "boolean"}},
    "required": ["party", "indoors"],
    "additionalProperties": False,
}
NAMED = {"name": "table", "schema": SCHEMA, "strict": True}


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"json_schema": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
    ],
)
def test_json_follows_its_schema(follower, body):
    reply = ask(follower, max_tokens=200, extra_body=body)
    said = json.loads(text_of(reply))
    assert set(said) == {"party", "indoors"}
    assert 1 <= said["party"] <= 9
    assert isinstance(said["indoors"], bool)
    assert reply.choices[0].finish_reason == "stop"


def test_regexes_choices_and_objects(follower):
    choices = ["a (b)*", "c.d|e", "[f] g-h"]
    said = {}
    for name, value in {
        "regex": "[0-9]{3}-(a|b)",
        "guided_regex": "[0-9]{3}-(a|b)",
        "guided_choice": choices,
        "structured_outputs": {"choice": choices},
        "response_format": {"type": "json_object"},
    }.items():
        said[name] = text_of(ask(follower, max_tokens=50, extra_body={name: value}))
    for name in ("regex", "guided_regex"):
        assert re.fullmatch("[0-9]{3}-(a|b)", said[name])
    assert {said["guided_choice"], said["structured_outputs"]} <= {*choices}
    assert said["response_format"].lstrip().startswith("{")


# Samples


def test_samples_are_those_of_the_engine(client, world):
    params = {"n": 3, "temperature": 0.9, "seed": 5, "max_tokens": 16}
    results = world.results(world.chat.prompt_ids(MESSAGES), **params)
    texts = [world.chat.decode(result.token_ids) for result in results]
    assert len(set(texts)) > 1
    reply = ask(client, **params)
    assert [choice.message.content for choice in reply.choices] == texts
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert reply.usage.completion_tokens == 48
    streamed = {}
    for chunk in ask(client, **params, stream=True):
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
        {"top_k": 20, "top_p": 0.9, "temperature": 0.8, "seed": 7},
    ],
)
def test_every_field_reaches_the_engine(client, truth, params):
    body = json.loads(json.dumps(params))
    (choice,) = post(client, {**BODY, **body}).json()["choices"]
    assert choice["message"]["content"] == truth(max_tokens=24, **params)[0]
    if "seed" in params:
        other = post(client, {**BODY, **body, "seed": 8}).json()["choices"]
        assert choice["message"]["content"] != other[0]["message"]["content"]


# Log-probabilities


def test_logprobs_are_the_engines(client, world):
    (truth,) = world.results(world.chat.prompt_ids(MESSAGES), max_tokens=8, logprobs=3)
    params = {"max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    reply = ask(client, **params)
    content = reply.choices[0].logprobs.content
    assert [one.logprob for one in content] == [one.logprob for one in truth.logprobs]
    assert [[top.logprob for top in one.top_logprobs] for one in content] == [
        [p for _, p in one.top] for one in truth.logprobs
    ]
    said = bytes(byte for one in content for byte in one.bytes).decode(errors="replace")
    assert said == text_of(reply)
    streamed = [
        one
        for chunk in ask(client, **params, stream=True)
        for one in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert streamed == content


def test_logprobs_in_the_legacy_shape(client):
    legacy = complete(client, max_tokens=8, logprobs=2).choices[0].logprobs
    lists = legacy.tokens, legacy.token_logprobs, legacy.top_logprobs, legacy.text_offset
    assert {len(one) for one in lists} == {8}
    assert all(logprob <= 0 and math.isfinite(logprob) for logprob in legacy.token_logprobs)
    assert all(
        max(top.values()) >= logprob
        for top, logprob in zip(legacy.top_logprobs, legacy.token_logprobs, strict=True)
    )
    lengths = [1 if token.startswith("bytes:") else len(token) for token in legacy.tokens]
    assert legacy.text_offset == [0, *np.cumsum(lengths)[:-1]]
    assert complete(client).choices[0].logprobs is None


# Token ids


@pytest.mark.parametrize("stop", [None, [" "]])
@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_of_prompt_and_answer(client, world, stream, stop):
    """As in vLLM: a chat's prompt at the top, a text's at each choice. A stop string ends the text,
    and its tokens are the answer's.
    """
    params = {"n": 2, "seed": 3, "temperature": 0.9, "max_tokens": 12, "stop": stop}
    asked = world.chat.prompt_ids(MESSAGES)
    truth = [one.token_ids for one in world.results(asked, **{**params, "stop": tuple(stop or ())})]
    reply = ask(client, **params, extra_body={"return_token_ids": True}, stream=stream)
    if stream:
        chunks = [chunk.to_dict() for chunk in reply]
        of_prompts = [one["prompt_token_ids"] for one in chunks if "prompt_token_ids" in one]
        assert of_prompts == [asked] * 2
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
def test_token_ids_of_several_prompts(client, world, stream):
    texts, found = ["I would like", "71 North"], {}
    reply = complete(client, texts, extra_body={"return_token_ids": True}, stream=stream)
    for choice in [one for chunk in reply for one in chunk.choices] if stream else reply.choices:
        prompt, answer = found.setdefault(choice.index, ([], []))
        prompt += getattr(choice, "prompt_token_ids", [])
        answer += choice.token_ids
    asked = [prompt_ids(world, text) for text in texts]
    truth = [world.results(ids, max_tokens=12)[0].token_ids for ids in asked]
    assert [found[index] for index in range(2)] == list(zip(asked, truth, strict=True))


def test_logprobs_with_token_ids(client):
    wishes = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    reply = ask(client, max_tokens=4, logprobs=True, top_logprobs=2, extra_body=wishes)
    (choice,) = reply.choices
    names = [one.token for one in choice.logprobs.content]
    assert names == [f"token_id:{token}" for token in choice.token_ids]
    for one in choice.logprobs.content:
        assert one.top_logprobs[0].token == one.token  # greedy
        assert all(top.token.startswith("token_id:") for top in one.top_logprobs)
    (text,) = complete(client, max_tokens=4, logprobs=2, extra_body=wishes).choices
    assert text.logprobs.tokens == [f"token_id:{token}" for token in text.token_ids]
    assert all(
        set(top) >= {name}
        for name, top in zip(text.logprobs.tokens, text.logprobs.top_logprobs, strict=True)
    )


# /v1/completions


def prompt_ids(world, text="I would like"):
    return world.chat.tokenizer.encode(text, add_special_tokens=False).ids


def test_a_text_is_what_the_engine_decodes(client, world):
    (truth,) = world.results(prompt_ids(world), max_tokens=12)
    text = world.chat.decode(truth.token_ids)
    whole, of_tokens = complete(client), complete(client, prompt_ids(world))
    # OpenAI's default
    assert complete(client, max_tokens=openai.omit).usage.completion_tokens == 16
    assert "token_ids" not in whole.choices[0].model_extra
    assert whole.object == "text_completion"
    assert whole.choices[0].text == of_tokens.choices[0].text == text
    assert whole.choices[0].finish_reason == "length"
    *pieces, usage = complete(client, **USAGE)
    assert "".join(piece.choices[0].text for piece in pieces) == text
    assert pieces[-1].choices[0].finish_reason == "length"
    assert (usage.choices, usage.usage.completion_tokens) == ([], 12)


def test_usage_says_how_much_of_a_prompt_was_found_computed(client):
    prompt = [41, 5] * 25  # three pages and two tokens
    for found in (0, 48):
        usage = complete(client, prompt, n=2).usage
        assert usage.prompt_tokens_details.cached_tokens == found
    several = complete(client, [[*prompt, 6], [*prompt, 7]]).usage
    assert (several.prompt_tokens, several.prompt_tokens_details.cached_tokens) == (102, 96)


@pytest.mark.parametrize("as_tokens", [False, True])
def test_choices_are_in_prompt_order(client, world, as_tokens):
    texts = ["I would like", "The address is", "71 North"]
    alone = [complete(client, text).choices[0].text for text in texts]
    asked = [prompt_ids(world, text) for text in texts] if as_tokens else texts
    reply = complete(client, asked, n=2)
    assert [choice.text for choice in reply.choices] == [text for text in alone for _ in range(2)]
    assert [choice.index for choice in reply.choices] == list(range(6))
    assert reply.usage.prompt_tokens == sum(len(prompt_ids(world, text)) for text in texts)


# Requests as other programs send them

# of `vllm bench serve` (openai, openai-chat) and of `sglang.bench_serving` (sglang-oai, -chat)
SENT_TEXT, SENT_CHAT = {"prompt": "I would like"}, user([{"type": "text", "text": "A table"}])
AS_VLLM = [
    (TEXT, {**SENT_TEXT, "repetition_penalty": 1.0, "max_tokens": 8, "logprobs": None, **USAGE}),
    (CHAT, {**SENT_CHAT, "max_completion_tokens": 8, **USAGE}),
]
SHARED = {"temperature": 0.0, "stream": True, "ignore_eos": True}
AS_SGLANG = [
    (TEXT, {**SENT_TEXT, **SHARED, "best_of": 1, "max_tokens": 8}),
    (CHAT, {**user("A table for two"), **SHARED, "max_completion_tokens": 8}),
]
OFF = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
SPECIAL = {"skip_special_tokens": True, "spaces_between_special_tokens": True}


SAMPLING = [
    {},
    {"ignore_eos": True, "temperature": 0.0, "top_p": 0.9, "top_k": -1, "min_p": 0.1},
    {**OFF, "stream_options": {"include_usage": True}},
    {"n": 1, "min_tokens": 8, **SPECIAL, "logprobs": None},
]


@pytest.mark.parametrize(("path", "body"), AS_VLLM + AS_SGLANG)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_benchmarks_of_vllm_and_sglang_are_served(client, path, body, sampling):
    body = {"model": MODEL, **body, **sampling}
    headers = {"x-request-id": "bench-1", "authorization": "Bearer none"}
    reply = post(client, body, path, headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-request-id"] == "bench-1"
    choices = [event["choices"][0] for event in events(reply) if event["choices"]]
    assert any(one["text"] if path == TEXT else one["delta"].get("content") for one in choices)
    if "stream_options" in body:
        assert events(reply)[-1]["usage"]["completion_tokens"] == 8


# Tools


@pytest.fixture(scope="module")
def caller(tooled):
    with tooled.served(tooled.engine(max_length=1024)) as client:
        yield client


@pytest.mark.parametrize("per_step", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_in_an_answer(tooled, per_step, stream):
    with saying(tooled, f"I will. \n{CALL}\n{CALL}", per_step) as (client, engine):
        without = ask(client), ask(client, tools=TOOLS, tool_choice="none")
        assert {text_of(one) for one in without} == {f"I will. \n{CALL}\n{CALL}"}
        reply = ask(client, tools=TOOLS, stream=stream)
        if stream:
            reply = list(reply)
            pieces = [call for chunk in reply for call in chunk.choices[0].delta.tool_calls or []]
            calls = [call for call in pieces if call.id]
            assert [call.index for call in calls] == [0, 1]
            assert {1: len(pieces) > 10, 3: len(pieces) > 4, 100: pieces == calls}[per_step]
            for call in calls:
                rest = [one.function for one in pieces if one.index == call.index and not one.id]
                call.function.arguments += "".join(one.arguments for one in rest)
        else:
            calls = reply.choices[0].message.tool_calls
        ending = (reply[-1] if stream else reply).choices[0].finish_reason
        _, hidden, shown = (tooled.chat.decode(one.prompt_ids) for one in engine.asked)
    assert (text_of(reply), ending) == ("I will.", "tool_calls")
    arguments = [json.loads(call.function.arguments) for call in calls]
    assert arguments == [{"party": 2, "indoors": True}] * 2
    assert len({call.id for call in calls}) == 2
    assert "Book a table." in shown
    assert "Book a table." not in hidden


def test_template_options(tooled):
    def with_options(**options):
        return {"extra_body": {"chat_template_kwargs": options}}

    with saying(tooled, "Done.") as (client, engine):
        ask(client)
        ask(client, **with_options(enable_thinking=True))
        ask(client, reasoning_effort="none")
        ask(client, **with_options(enable_thinking=False))
        plain, thinking, none, off = (tooled.chat.decode(one.prompt_ids) for one in engine.asked)
        assert "Think." in thinking
        assert "Think." not in plain
        assert none == off
        with pytest.raises(openai.BadRequestError, match="no option 'think'"):
            ask(client, **with_options(think=True))
        with pytest.raises(openai.BadRequestError, match="contradicts enable_thinking"):
            ask(client, reasoning_effort="none", **with_options(enable_thinking=True))


def test_clients_set_the_templates_own_options(tmp_path):
    names = ["enable_thinking", "brief", "formal", "kind"]
    read = "".join(f"{{% if {name} %}}{{{{ '{name}' }}}}{{% endif %}}" for name in names)
    own = "{% set said = raise_exception is defined %}{{ bos_token or strftime_now('%Y') }}"
    tiny_tokenizer(tmp_path, chat_template=own + read + TOOL_TEMPLATE)
    tokenizer = Tokenizer(Chat(tmp_path))
    for values in itertools.product([True, False], repeat=4):
        options = dict(zip(names, values, strict=True))
        text = tokenizer.chat(options).render(MESSAGES)
        assert {name for name in names if name in text} == {one for one in names if options[one]}
    assert tokenizer.chat({}).render(MESSAGES) == tokenizer.chat(options).render(MESSAGES)
    known = (
        "message call said role messages tools bos_token loop strftime_now raise_exception range"
    )
    for name in known.split():
        assert not tokenizer.knows_option(name), name


def test_lone_surrogates_in_arguments_are_refused(tooled):
    arguments = json.dumps({"party": "\ud800"})
    called = {"id": "1", "type": "function", "function": {"name": "a", "arguments": arguments}}
    item = {"type": "function_call", "call_id": "1", "name": "a", "arguments": arguments}
    chat = {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [called]}]}
    bodies = {CHAT: chat, "/tokenize": chat, "/predict": {"instances": [chat]}}
    with tooled.served(vertex=VertexConfig()) as client:
        for path, body in {**bodies, "/v1/responses": {"input": [*MESSAGES, item]}}.items():
            reply = post(client, body, path)
            assert reply.status_code == 400
            assert "half a character" in reply.json()["error"]["message"]


def test_the_template_gets_reasoning(tooled):
    for name in ("reasoning_content", "reasoning"):
        turns = [*MESSAGES, {"role": "assistant", "content": "Well.", name: "Hm."}]
        with saying(tooled, "Done.") as (client, engine):
            ask(client, [*turns, {"role": "user", "content": "So?"}])
            assert "(Hm.)Well." in tooled.chat.decode(engine.asked[0].prompt_ids)


def test_the_tokenizer_is_read_once(world, monkeypatch):
    reads = []
    monkeypatch.setattr(
        "eyas.chat.tokenizer.read_tokenizer", lambda path: reads.append(1) or read_tokenizer(path)
    )
    config = ServeConfig(target=str(world.folder), model=MODEL)
    with running_app(create_app(MODEL), load(config)) as url, connected(url) as client:
        ask(client, stop=["never said"], max_tokens=4)
        with pytest.raises(openai.BadRequestError):  # the target has no end token
            ask(client, extra_body={"regex": "a"})
    assert len(reads) == 1
