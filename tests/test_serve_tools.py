"""Tools, through templates with and without them: what the target reads, what the client gets."""

import json
import shutil
from pathlib import Path

import numpy as np
import openai
import pytest

from eyas.chat.files import read_tokenizer
from eyas.engine.grammar import Grammars
from eyas.engine.request import SamplingParams
from eyas.serve.protocol import Tool
from eyas.serve.tokenizer import Tokenizer
from eyas.serve.tools import CallReader, answer_grammar, call_schema, whole_calls
from tests.chat_folders import LIKE_QWEN, like_granite, like_qwen
from tests.serving import MODEL, TOOLS, World, ask, saying
from tests.tiny import tiny_target, tiny_tokenizer

TOKENIZERS = Path(__file__).resolve().parents[2] / "shared" / "data" / "tokenizers"
MAX_LENGTH = 1024
QUESTION = [{"role": "user", "content": "A table for two?"}]
ARGUMENTS = '{"party": 2, "indoors": true}'


def talking_qwen(folder):
    like_qwen(folder, LIKE_QWEN.replace("Tools:", "Tools, called as <tool_call>JSON</tool_call>:"))


def real_qwen(folder):
    source = TOKENIZERS / "qwen3"
    if not source.exists():
        pytest.skip("no real tokenizers here")
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).unlink()
    for path in source.iterdir():
        if path.name != "config.json":
            shutil.copyfile(path, folder / path.name)


# the tokenizer, the rows of its vocabulary, and the token that ends an answer
FAMILIES = {
    "like_qwen": (talking_qwen, 448, "<|im_end|>"),
    "qwen3": (real_qwen, 151_936, "<|im_end|>"),
}


def family(folder, write, vocab_size, end):
    """A random target under a family's tokenizer and template."""
    tiny_target(folder, vocab_size=vocab_size, max_position_embeddings=MAX_LENGTH)
    write(folder)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = read_tokenizer(folder).backend.token_to_id(end)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink()
    return World(folder)


@pytest.fixture(scope="module", params=FAMILIES)
def world(request, tmp_path_factory):
    return family(tmp_path_factory.mktemp(request.param), *FAMILIES[request.param])


@pytest.fixture(scope="module")
def client(world):
    with world.served(world.engine(max_length=MAX_LENGTH)) as client:
        yield client


def shown(world, engine, number=0):
    return world.chat.tokenizer.decode(engine.asked[number].prompt_ids, skip_special_tokens=False)


def test_calls_and_results(world):
    said = f"<think>\nTwo.\n</think>\n\nI will.\n{IN_TAGS}\n{IN_TAGS}"
    with saying(world, said) as (client, engine):
        message = ask(client, QUESTION, tools=TOOLS).choices[0].message
        assert message.content == said.split("\n<tool_call>")[0]
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": f"booked {place}"}
            for place, call in enumerate(message.tool_calls)
        ]
        ask(client, [*QUESTION, message.to_dict(), *results], tools=TOOLS)
        first, second = shown(world, engine), shown(world, engine, 1)
    assert "Book a table." in first
    # the target reads its own answer, and then the results
    assert second.startswith(first + said)
    assert second.count("<tool_response>") == 2
    assert second.index("booked 0") < second.index("booked 1")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "book"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_follow_their_schema(client, choice, stream):
    params = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 400, "stream": stream}
    reply = ask(client, QUESTION, temperature=1, seed=3, **params)
    if stream:
        deltas = [chunk.choices[0].delta for chunk in reply if chunk.choices]
        assert {delta.content for delta in deltas} == {None}
        call, *pieces = [call for delta in deltas for call in delta.tool_calls or []]
        assert {(one.index, one.id, one.function.name) for one in pieces} == {(0, None, None)}
        call.function.arguments += "".join(one.function.arguments for one in pieces)
    else:
        (call,) = reply.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    if call.function.name == "book":
        assert set(arguments) == {"party", "indoors"}
        assert 1 <= arguments["party"] <= 9
    else:
        assert (call.function.name, arguments) == ("cancel", {})
        assert choice == "required"


def test_a_call_cut_by_max_tokens(world):
    with saying(world, f"I will.\n{IN_TAGS}") as (client, engine):
        engine.script, engine.ending = engine.script[:-8], "length"
        reply = ask(client, QUESTION, tools=TOOLS).choices[0]
        (call,) = reply.message.tool_calls
        assert (reply.message.content, call.function.name) == ("I will.", "book")
        assert 0 < len(call.function.arguments) < len(ARGUMENTS)
        assert ARGUMENTS.startswith(call.function.arguments)
        engine.script = world.chat.tokenizer.encode('{"nam', add_special_tokens=False).ids
        params = {"tools": TOOLS, "tool_choice": "required", "max_tokens": len(engine.script)}
        reply = ask(client, QUESTION, **params).choices[0]
        assert (reply.message.content, reply.finish_reason) == ("", "length")


@pytest.mark.parametrize("path", ["chat", "responses"])
@pytest.mark.parametrize("arguments", ["{'a': 1}", '{"a": Oslo}', '{"a": "b}'])
def test_unreadable_calls_are_words(world, path, arguments):
    """In a whole answer; a stream has sent its name by then."""
    call = f'<tool_call>\n{{"name": "book", "arguments": {arguments}}}\n</tool_call>'
    with saying(world, call) as (client, _):
        if path == "chat":
            choice = ask(client, QUESTION, tools=TOOLS).choices[0]
            said = choice.message.content
            assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        else:
            tools = [{"type": "function", "strict": None, **tool["function"]} for tool in TOOLS]
            said = client.responses.create(model=MODEL, input="Hi", tools=tools).output_text
    assert said.replace("\\n", "\n") == call


@pytest.mark.parametrize("stream", [False, True])
def test_a_single_call_ends_the_answer(world, stream):
    """Beside sixteen stop strings, and with special tokens shown."""
    note = '{"note": "</tool_call>"}'
    call = f'<tool_call>\n{{"name": "cancel", "arguments": {note}}}\n</tool_call>'
    params = {"stop": [f"{number}%" for number in range(16)]}
    if stream:
        params = {"extra_body": {"skip_special_tokens": False}, "stream": True}
    with saying(world, f"I will.\n{call}\n{call} Done.", 3) as (client, _):
        reply = ask(client, QUESTION, tools=TOOLS, parallel_tool_calls=False, **params)
        choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices
        said = [choice.delta if stream else choice.message for choice in choices]
        assert "".join(one.content or "" for one in said) == "I will."
        calls = [one for turn in said for one in turn.tool_calls or []]
        assert "".join(one.function.arguments for one in calls) == note
        assert len([one for one in calls if one.id]) == 1
        assert choices[-1].finish_reason == "tool_calls"


def allowed(world, params, *texts):
    """For each text, whether it follows the grammar."""
    tokenizer, end = world.chat.tokenizer, world.chat.eos_token_ids[0]
    grammar = Grammars(tokenizer, 320, [end]).compile(params)

    def follows(text):
        matcher = grammar.matcher()
        for token in [*tokenizer.encode(text).ids, end]:
            if not matcher.mask()[token]:
                return False
            matcher.advance(token)
        return True

    return [*map(follows, texts)]


def test_an_answer_of_a_schema_may_be_a_call(plain):
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 5}}}
    with saying(plain, "{}") as (client, engine):
        ask(client, QUESTION, tools=TOOLS, response_format=wanted)
        with pytest.raises(openai.BadRequestError, match="cannot be required"):
            ask(client, QUESTION, tools=TOOLS, response_format=wanted, tool_choice="required")
        params = engine.asked[0].params
    assert allowed(plain, params, IN_TAGS, "5", "I") == [True, True, False]


def test_refusals_name_the_tools(client, world):
    odd = {"type": "function", "function": {"name": "f", "parameters": {"uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError, match=r"tools: .*uniqueItems") as refused:
        ask(client, QUESTION, tools=[odd], tool_choice="required")
    assert refused.value.param == "tools"
    text = "x " * 300_000
    long = {**odd, "function": {"name": "f", "description": text}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, QUESTION, tools=[long])
    is_clear = Tokenizer(world.chat).least_tokens(len(text)) > MAX_LENGTH
    assert refused.value.param == ("tools" if is_clear else "messages")
    assert refused.value.code == "context_length_exceeded"


def test_other_forms_of_calls_are_refused(tmp_path):
    """Granite begins calls with a special token and ends them with the turn."""
    with family(tmp_path, like_granite, 448, "<|end_of_text|>").served() as client:
        with pytest.raises(openai.BadRequestError, match="<tool_call> tags") as refused:
            ask(client, QUESTION, tools=TOOLS)
        assert refused.value.param == "tools"


# Templates without tools


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A random target whose template has no tools."""
    folder = tmp_path_factory.mktemp("plain")
    return World.make(folder, eos_token_id=2, max_position_embeddings=MAX_LENGTH)


FUNCTION = {"name": "book", "arguments": ARGUMENTS}
CALLED = {"id": "1", "type": "function", "function": FUNCTION}
TURNS = [
    *QUESTION,
    {"role": "assistant", "content": "I will.", "tool_calls": [CALLED, {**CALLED, "id": "2"}]},
    {"role": "tool", "tool_call_id": "1", "content": "booked 0"},
    {"role": "tool", "tool_call_id": "2", "content": "booked 1"},
]
IN_TAGS = f'<tool_call>\n{{"name": "book", "arguments": {ARGUMENTS}}}\n</tool_call>'


def test_the_generic_form_shows_tools_in_messages(plain):
    """Both results in a message of the user."""
    said = f"I will.\n{IN_TAGS}\n{IN_TAGS}"
    with saying(plain, said) as (client, engine):
        message = ask(client, QUESTION, tools=TOOLS).choices[0].message
        assert message.content == "I will."
        assert [call.function.arguments for call in message.tool_calls] == [ARGUMENTS] * 2
        ask(client, [*QUESTION, message.to_dict(), *TURNS[2:]], tools=TOOLS)
        ask(client, [{"role": "system", "content": "Be brief."}, *TURNS], tools=TOOLS)
        ask(client, TURNS, tools=TOOLS, tool_choice="none")
        first, second, third, fourth = (shown(plain, engine, number) for number in range(4))
    assert "Book a table." in first
    assert second.startswith(first + said)
    results = "".join(f"<tool_response>\nbooked {place}\n</tool_response>\n" for place in range(2))
    assert results.strip() in second
    assert third.count("system") == first.count("system")
    assert third.index("Be brief.") < third.index("Book a table.")
    assert "Book a table." not in fourth
    assert f"I will.\n{IN_TAGS}" in fourth


def test_the_generic_form_without_a_system_message(tmp_path):
    refuses = "{% if message['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    world = World.make(tmp_path, eos_token_id=2, max_position_embeddings=MAX_LENGTH)
    template = world.chat._template.plain
    loop = "{% for message in messages %}"
    assert loop in template
    tiny_tokenizer(tmp_path, chat_template=template.replace(loop, loop + refuses))
    with saying(World(tmp_path), "Well.") as (client, engine):
        ask(client, QUESTION, tools=TOOLS)
        text = shown(world, engine)
    assert text.index("Book a table.") < text.index(QUESTION[0]["content"])


@pytest.mark.parametrize("may_repeat", [False, True])
def test_the_generic_forms_grammar(plain, may_repeat):
    """After the opening tag a random walk writes calls, as in history, and no word after them."""
    tokenizer, end = plain.chat.tokenizer, plain.chat.eos_token_ids[0]
    tools = [Tool.model_validate(tool) for tool in TOOLS]
    grammars = Grammars(tokenizer, 320, [end])
    params = SamplingParams(grammar=answer_grammar(tools, may_repeat))
    grammar = grammars.compile(params)
    rng, counts = np.random.default_rng(0), set()
    for _ in range(6):
        matcher, said = grammar.matcher(), "I will.\n<tool_call>"
        ids = tokenizer.encode(said).ids
        for token in ids:
            assert matcher.mask()[token]
            matcher.advance(token)
        while not matcher.is_over:
            ids.append(int(rng.choice(np.flatnonzero(matcher.mask()))))
            matcher.advance(ids[-1])
        text = tokenizer.decode(ids, skip_special_tokens=True)
        reader = CallReader()
        parts = [part for part in [*reader.push(text), *reader.finish()] if part]
        words, *calls = whole_calls(parts)
        assert words == "I will."
        written = [
            f'<tool_call>\n{{"name": "{one.name}", "arguments": {one.arguments}}}\n</tool_call>'
            for one in calls
        ]
        assert text == "\n".join(["I will.", *written])
        for one in calls:
            parameters = {"book": {"party", "indoors"}, "cancel": set()}
            assert set(json.loads(one.arguments)) == parameters[one.name]
        counts.add(len(calls))
    assert (max(counts) > 1) == may_repeat
    assert allowed(plain, params, "No.") == [True]


ONE = {"a": {"enum": [1]}}
SEVEN = {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/a"}


@pytest.mark.parametrize(
    ("parameters", "right", "wrong"),
    [
        ({"properties": ONE}, {"a": 1}, {"b": 1}),
        ({"properties": ONE, "additionalProperties": True}, {"b": 1}, {"a": 2}),
        (None, {}, {"a": 1}),
        ({"properties": ONE | {"b": {"$ref": "#/properties/a"}}}, {"b": 1}, {"b": 2}),
        ({"properties": {"b": {"$ref": "#"}}, "$id": "x"}, {"b": {"b": 1}}, {"b": {"name": "f"}}),
        (SEVEN | {"definitions": ONE}, 1, 2),
    ],
)
def test_arguments_follow_the_parameters(plain, parameters, right, wrong):
    other = {"definitions": {"a": {"enum": [2]}}, "$id": "x"}
    functions = {"name": "f", "parameters": parameters}, {"name": "g", "parameters": other}
    tools = [Tool.model_validate({"type": "function", "function": one}) for one in functions]
    calls = [json.dumps({"name": "f", "arguments": one}) for one in (right, wrong)]
    params = SamplingParams(json_schema=call_schema(tools))
    assert allowed(plain, params, *calls) == [True, False]


def test_tools_of_one_name_keep_their_own_definitions(plain):
    each = [{"$ref": "#/$defs/a", "$defs": {"a": {"const": one}}} for one in (1, 2)]
    functions = [{"name": "f", "parameters": one} for one in each]
    tools = [Tool.model_validate({"type": "function", "function": one}) for one in functions]
    calls = [json.dumps({"name": "f", "arguments": one}) for one in (1, 2, 3)]
    params = SamplingParams(json_schema=call_schema(tools))
    assert allowed(plain, params, *calls) == [True, True, False]
