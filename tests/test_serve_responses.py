"""/v1/responses by the `openai` client: answers are those of chat completions, in its own items."""

from __future__ import annotations

import json

import httpx
import openai
import pydantic
import pytest

from tests.serving import CALL, MESSAGES, MODEL, TOOLS, ask, post, saying, text_of
from tests.test_serve_api import FUNCTION, SCHEMA

TEXT = MESSAGES[0]["content"]
IMAGE = {"type": "input_image", "image_url": "x"}
FLAT_TOOLS = [{"type": "function", "strict": None, **tool["function"]} for tool in TOOLS]


@pytest.fixture(scope="module")
def world(tooled):
    return tooled


@pytest.fixture(scope="module")
def client(world):
    with world.served(world.engine(max_length=1024)) as client:
        yield client


def respond(client, content=TEXT, **params):
    params = {"temperature": 0, "max_output_tokens": 24, **params}
    return client.responses.create(model=MODEL, input=content, **params)


# Answers


def test_an_answer_is_that_of_a_chat(client):
    reply = respond(client)
    assert reply.output_text == text_of(ask(client))
    assert (reply.object, reply.model, reply.store) == ("response", MODEL, False)
    chat, usage = ask(client).usage, respond(client).usage
    counts = usage.input_tokens, usage.output_tokens, usage.total_tokens
    assert counts == (chat.prompt_tokens, chat.completion_tokens, chat.total_tokens)
    assert usage.input_tokens_details.cached_tokens == chat.prompt_tokens_details.cached_tokens > 0
    assert usage.eyas["rounds"] == 0


def test_a_cut_answer_is_incomplete(client):
    reply = respond(client, max_output_tokens=3)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert reply.output[0].status == "incomplete"
    assert reply.usage.output_tokens == 3


def test_items_are_turns(client):
    """An answer comes back as it was, as clients without a store send it."""
    first = respond(client, instructions="Be brief.")
    follow = [
        {"role": "user", "content": [{"type": "input_text", "text": TEXT}]},
        *first.output,
        {"type": "message", "role": "user", "content": "And at noon?"},
    ]
    turns = [
        {"role": "system", "content": "Be brief."},
        *MESSAGES,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And at noon?"},
    ]
    reply = respond(client, follow, instructions="Be brief.")
    assert reply.output_text == text_of(ask(client, turns))


def test_what_changes_no_output_is_accepted(client):
    fields = {
        **{"store": True, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k"},
        **{"prompt_cache_retention": "24h", "service_tier": "flex", "max_tool_calls": 3},
        **{"background": False, "truncation": "disabled", "metadata": {"run": "7"}},
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "none", "summary": "auto"},
        "text": {"verbosity": "low", "format": {"type": "text"}},
    }
    reply = respond(client, **fields)
    assert reply.output_text == text_of(ask(client))
    assert (reply.store, reply.metadata) == (False, {"run": "7"})
    nothing = dict.fromkeys(("instructions", "tools", "previous_response_id", "text", "metadata"))
    body = {"model": MODEL, "input": TEXT, "temperature": 0, "max_output_tokens": 24, **nothing}
    whole = post(client, body, "/v1/responses").json()
    assert whole["output"][0]["content"][0]["text"] == reply.output_text


def test_logprobs_are_those_of_a_chat(client):
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    reply = respond(client, max_output_tokens=8, **wanted)
    chat = ask(client, max_tokens=8, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    found = reply.output[0].content[0].logprobs
    assert [one.to_dict() for one in found] == [one.to_dict() for one in chat]
    events = list(respond(client, max_output_tokens=8, stream=True, **wanted))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [one.logprob for event in deltas for one in event.logprobs]
    assert streamed == [one.logprob for one in chat]


class Table(pydantic.BaseModel):
    party: int
    indoors: bool


def test_an_answer_follows_its_schema(client):
    wanted = {"type": "json_schema", "name": "table", "schema": SCHEMA, "strict": True}
    reply = respond(client, max_output_tokens=200, text={"format": wanted})
    assert set(json.loads(reply.output_text)) == {"party", "indoors"}
    parsed = client.responses.parse(
        model=MODEL, input=TEXT, temperature=0, max_output_tokens=400, text_format=Table
    )
    assert isinstance(parsed.output_parsed, Table)


# Streams


def test_events_are_in_openais_order(client):
    events = list(respond(client, stream=True, max_output_tokens=4))
    kinds = [event.type.removeprefix("response.") for event in events]
    num_deltas = kinds.count("output_text.delta")
    assert num_deltas > 1
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * num_deltas,
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[2].item.content == []  # its part is an event of its own
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    whole = respond(client, max_output_tokens=4)
    assert text == events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage
    ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert ids == {events[-1].response.output[0].id}


def test_events_have_names_and_no_done(client):
    body = {"model": MODEL, "input": TEXT, "max_output_tokens": 2, "stream": True}
    reply = post(client, body, "/v1/responses")
    assert reply.headers["content-type"].startswith("text/event-stream")
    for block in reply.text.strip().split("\n\n"):
        name, data = block.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity"])
def test_infinite_numbers_are_refused(client, number):
    asked = {"model": MODEL, "input": TEXT, "tool_choice": "none"}
    for more in (
        {"tools": [{"type": "function", "name": "a", "parameters": {"x": [0.5]}}]},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"x": 0.5}}}},
    ):
        body = json.dumps(asked | more).replace("0.5", number)
        headers = {"content-type": "application/json"}
        reply = httpx.post(f"{client.url}/v1/responses", content=body, headers=headers)
        assert reply.status_code == 400
        assert "infinite or NaN" in reply.json()["error"]["message"]


def test_the_clients_accumulator_agrees(client):
    with client.responses.stream(
        model=MODEL, input=TEXT, temperature=0, max_output_tokens=200, tools=FLAT_TOOLS
    ) as stream:
        final = stream.get_final_response()
    whole = respond(client, max_output_tokens=200, tools=FLAT_TOOLS)
    assert final.output_text == whole.output_text
    assert [item.type for item in final.output] == [item.type for item in whole.output]


# Tools


@pytest.mark.parametrize("per_step", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_items_in_order(world, per_step, stream):
    with saying(world, f"I will. \n{CALL}\n{CALL}\nDone.", per_step) as (client, engine):
        reply = respond(client, tools=FLAT_TOOLS, stream=stream)
        if stream:
            *events, last = reply
            reply = last.response
            done = [event.item for event in events if event.type == "response.output_item.done"]
            assert [item.to_dict() for item in done] == [item.to_dict() for item in reply.output]
            arguments = "response.function_call_arguments"
            whole = [event for event in events if event.type == f"{arguments}.done"]
            deltas = [event for event in events if event.type == f"{arguments}.delta"]
            assert len(deltas) > 2 or per_step > 1
            for one in whole:
                pieces = [event.delta for event in deltas if event.item_id == one.item_id]
                assert "".join(pieces) == one.arguments
        shown = world.chat.decode(engine.asked[0].prompt_ids)
    kinds = [item.type for item in reply.output]
    assert kinds == ["message", "function_call", "function_call", "message"]
    texts = [item.content[0].text for item in reply.output if item.type == "message"]
    assert texts == ["I will.", "\nDone."]
    for item in reply.output[1:3]:
        assert json.loads(item.arguments) == {"party": 2, "indoors": True}
        assert (item.name, item.status) == ("book", "completed")
    assert reply.status == "completed"
    assert "Book a table." in shown


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "book"}])
def test_calls_and_results_are_those_of_a_chat(world, choice):
    items = [
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": "I will."},
        {"type": "function_call", "call_id": "1", "name": "book", "arguments": '{"party": 2}'},
        {"type": "function_call_output", "call_id": "1", "output": "booked"},
    ]
    function = {"name": "book", "arguments": '{"party": 2}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": "I will.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "booked"},
    ]
    of_a_chat = choice if isinstance(choice, str) else {**FUNCTION, "function": {"name": "book"}}
    with saying(world, "Done.") as (client, engine):
        respond(client, items, tools=FLAT_TOOLS, tool_choice=choice)
        ask(client, turns, tools=TOOLS, tool_choice=of_a_chat)
        ours, theirs = ((one.prompt_ids, one.params) for one in engine.asked)
    assert ours == theirs


# Refusals


REFUSED = {
    "previous_response_id": "resp_1",
    "conversation": "conv_1",
    "background": True,
    "truncation": "auto",
    "tool_choice": "required",
    "tools": [FLAT_TOOLS[0], FLAT_TOOLS[0]],
    "top_logprobs": 2,
    "max_output_tokens": 0,
    "metadata": {str(number): "" for number in range(17)},
    "stream_options": {"include_obfuscation": True},
}
UNKNOWN = {"prompt": {"id": "p"}, "background_options": {}, "n": 2, "messages": MESSAGES}
CONTENTS = [
    ([], "input"),
    ([{"type": "reasoning", "summary": []}], "input"),
    ("x" * 30_000, "input"),
    ([{"type": "item_reference", "id": "x"}], "input.0"),
    ([{"type": 7, "role": "user", "content": "x"}], "input.0"),
    (["x"], "input.0"),
    ([{"type": "function_call_output", "output": "x"}], "input.0.call_id"),
    ([{"role": "user", "content": [IMAGE]}], "input.0.content.0"),
]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        *(({name: value}, name) for name, value in REFUSED.items()),
        *(({"extra_body": {name: value}}, name) for name, value in UNKNOWN.items()),
        *(({"content": content}, param) for content, param in CONTENTS),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": FLAT_TOOLS, "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"include": ["file_search"]}, "include.0"),
        ({"include": ["message.output_text.logprobs"], "tools": FLAT_TOOLS}, "include"),
        ({"reasoning": {"effort": "fast"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ],
)
def test_refusals_name_the_field(client, params, param):
    with pytest.raises(openai.BadRequestError) as refused:
        respond(client, **params)
    assert refused.value.param.startswith(param)
    assert refused.value.type == "invalid_request_error"
    assert param != "input.0.content.0" or "input_image: this server reads no" in str(refused.value)


def test_hosted_tools_and_reasoning_are_left_out(world, caplog):
    with saying(world, "Done.") as (client, engine):
        hosted = [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]
        thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
        items = [{"role": "user", "content": TEXT}, thought]
        assert respond(client, items, tools=[*FLAT_TOOLS, *hosted]).output_text == "Done."
        respond(client, TEXT, tools=FLAT_TOOLS)
        wanted = ["web_search_call.action.sources", "message.output_text.logprobs"]
        respond(client, TEXT, tools=hosted, include=wanted)
        respond(client, TEXT, tools=[])
        asked = [one.prompt_ids for one in engine.asked]
    assert asked[0] == asked[1]
    assert asked[2] == asked[3] != asked[0]
    assert {"custom", "web_search", wanted[0]} == {
        kind for one in caplog.records if hasattr(one, "data") for kind in one.data.get("types", ())
    }


def test_responses_cannot_be_fetched(client):
    reply = httpx.get(f"{client.url}/v1/responses/resp_1")
    assert reply.status_code == 404
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
