"""What clients of other servers send: fields under other names, long prompts and answers, texts to
continue, and paths beside OpenAI's.
"""

import json
import time

import httpx
import openai
import pytest

import eyas
from eyas.engine.engine import EngineConfig
from eyas.engine.schemas import plain_schema
from eyas.errors import ConfigError
from eyas.serve.limits import LimitsConfig
from eyas.serve.protocol import ChatRequest
from eyas.serve.server import ServeConfig, load
from eyas.serve.worker import EngineWorker
from tests.serving import MAX_LENGTH, MESSAGES, MODEL, World, ask, complete, post, saying, text_of
from tests.tiny import TEMPLATE, tiny_tokenizer

PAGE = "https://chat.example.org"


@pytest.fixture(scope="module")
def world(ending):
    return ending


@pytest.fixture(scope="module")
def client(world):
    with world.served(limits=LimitsConfig(allowed_origins=[PAGE])) as client:
        yield client


# Length


def test_an_answer_is_as_long_as_fits(world, client):
    endless = {"ignore_eos": True}
    reply = ask(client, max_tokens=100_000, extra_body=endless)
    prompt = len(world.chat.prompt_ids(MESSAGES))
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (prompt, MAX_LENGTH)
    assert reply.choices[0].finish_reason == "length"
    assert complete(client, [5] * 250, max_tokens=4096).usage.completion_tokens <= 6


def test_a_too_long_prompt_names_the_setting(tmp_path):
    World.make(tmp_path, eos_token_id=2)
    for length, names_it in ((100, True), (256, False), (None, False)):
        service = load(ServeConfig(target=str(tmp_path), engine=EngineConfig(max_length=length)))
        assert service.info.max_length == (length or 256)
        body = ChatRequest(model=MODEL, messages=MESSAGES)
        with pytest.raises(Exception, match="holds") as refused:
            service.translator._request(body, [5] * 300, {})
        assert ("engine.max_length of up to 256" in refused.value.message) == names_it
    with pytest.raises(ConfigError, match=r"max_length=1000000 .* context of 256"):
        load(ServeConfig(target=str(tmp_path), engine=EngineConfig(max_length=1_000_000)))


@pytest.mark.parametrize(("free_pages", "num_pages"), [(None, None), (10_000, None), (20, 10)])
def test_half_of_the_free_memory_bounds_the_default(world, monkeypatch, free_pages, num_pages):
    page_bytes = world.engine()._page_bytes
    free = None if free_pages is None else free_pages * page_bytes
    monkeypatch.setattr("eyas.engine.engine.free_memory", lambda: free)
    engine = world.engine(max_length=None)
    most = engine._scheduler.most_pages(engine.max_length)
    assert engine._pool.num_pages == (num_pages or 4 * most)
    columns = engine._scheduler._limits.tree_columns
    assert engine.max_length == (num_pages * 16 - columns if num_pages else MAX_LENGTH)
    assert most <= engine._pool.num_pages
    monkeypatch.setattr("eyas.engine.engine.free_memory", lambda: 0)
    with pytest.raises(ConfigError, match=r"of memory; .* are free"):
        world.engine(max_length=None)


# Fields


def test_fields_of_other_servers(client):
    plain, repeat, repetition = (
        text_of(ask(client, temperature=1, seed=5, extra_body=body))
        for body in ({}, {"repeat_penalty": 1.9}, {"repetition_penalty": 1.9})
    )
    assert repeat == repetition != plain
    assert text_of(ask(client, temperature=1e-6)) == text_of(ask(client))


GBNF = 'root ::= "yes" | "no, " word\nword ::= [a-c]{2,3}'
LARK = 'start: "yes" | "no, " WORD\nWORD: /[a-c]{2,3}/'


@pytest.mark.parametrize(
    "field",
    [
        *({name: GBNF} for name in ("grammar", "guided_grammar", "ebnf")),
        {"structured_outputs": {"grammar": LARK}},
    ],
)
def test_an_answer_follows_a_grammar(client, field):
    for seed in range(3):
        reply = ask(client, temperature=1, seed=seed, extra_body=field)
        text = text_of(reply)
        word = text.removeprefix("no, ")
        assert text == "yes" or (text != word and 2 <= len(word) <= 3 and set(word) <= set("abc"))
        assert reply.choices[0].finish_reason == "stop"


def test_escaped_characters_of_a_grammar(client):
    asked = {"grammar": r'root ::= "\u00e9b\\u00e9" [\u4e2d-\u4e2e] "\x41\n"'}
    assert text_of(ask(client, extra_body=asked))[:-2] in ("éb\\u00e9中", "éb\\u00e9丮")


def test_one_of_constants_is_any_of(client):
    numbers = {"oneOf": [{"const": 1}, {"const": 2.5}, {"enum": [3, None]}]}
    assert plain_schema({"items": numbers, "uniqueItems": False, "format": "password"}) == {
        "items": {"anyOf": numbers["oneOf"]}
    }
    kept = [
        {"oneOf": [{"const": 1}, {"const": 1.0}]},
        {"oneOf": [{"const": 1}, {"type": "string"}]},
        {"properties": {"oneOf": {"uniqueItems": True}}, "const": {"uniqueItems": False}},
        {"uniqueItems": 0.5, "oneOf": "x", "format": "regex"},
    ]
    for schema in kept:
        assert plain_schema(schema) == schema
    reply = ask(client, extra_body={"guided_json": numbers}, temperature=1, seed=1)
    assert json.loads(text_of(reply)) in (1, 2.5, 3, None)


def test_special_tokens_on_demand(world):
    with saying(world, "I <|im_start|>would") as (client, engine):
        engine.script = (*engine.script[:-1], world.chat.eos_token_ids[0])
        shown = text_of(ask(client, extra_body={"skip_special_tokens": False}))
        assert (shown, text_of(ask(client))) == ("I <|im_start|>would", "I would")


def test_the_last_message_is_continued(world, client):
    begun = {"role": "assistant", "content": "I would like"}
    opened = {"continue_final_message": True, "add_generation_prompt": False}
    prompt_ids = world.chat.prompt_ids(MESSAGES)
    text = world.chat.tokenizer.decode(prompt_ids, skip_special_tokens=False) + begun["content"]
    reply = ask(client, [*MESSAGES, begun], extra_body={**opened, "return_token_ids": True})
    asked = reply.model_extra["prompt_token_ids"]
    assert world.chat.tokenizer.decode(asked, skip_special_tokens=False) == text
    assert text_of(reply) == complete(client, asked, max_tokens=24).choices[0].text
    named = {"role": "assistant", "content": "<|im_end|> is a token"}  # which is text here
    reply = ask(client, [*MESSAGES, named], extra_body={**opened, "return_token_ids": True})
    asked = reply.model_extra["prompt_token_ids"]
    assert asked.count(2) == len([one for one in prompt_ids if one == 2])
    for last in ({"role": "user", "content": "x"}, {"role": "assistant", "content": " "}):
        with pytest.raises(openai.BadRequestError, match="nothing to continue"):
            ask(client, [*MESSAGES, last], extra_body=opened)


@pytest.mark.parametrize("content", ["<", "|", "end", "im_end|>", "a  ", "user"])
def test_a_continued_message_ends_before_the_templates_text(world, content):
    turns = [*MESSAGES, {"role": "assistant", "content": content}]
    before, after = (
        world.chat.tokenizer.decode(ids, skip_special_tokens=False)
        for ids in (world.chat.prompt_ids(MESSAGES), world.chat.prompt_ids(turns, continues=True))
    )
    assert after == before + content


def test_stop_tokens_are_not_in_the_text(world, client):
    _, ids = world.truth(max_tokens=24)
    at = next(at for at in range(4, 24) if ids[at] not in ids[:at])
    for more in ({}, {"skip_special_tokens": False}, {"stop": ["nothing of that kind"]}):
        reply = ask(client, extra_body={"stop_token_ids": [ids[at]], **more})
        ending = reply.choices[0].finish_reason
        assert (text_of(reply), ending) == (world.chat.decode(ids[:at]), "stop")
        assert reply.usage.completion_tokens == at + 1


def test_prompts_wait_for_all_grammars(world, client, monkeypatch):
    """Nothing runs before the last is compiled: an update would come where only an end may."""
    compiled = EngineWorker._compiled
    monkeypatch.setattr(
        EngineWorker, "_compiled", lambda *given: time.sleep(0.1) or compiled(*given)
    )
    prompts, body = ["I would like", "A table", "The address"], {"regex": "[a-z ]{9,40}"}
    reply = complete(client, prompts, extra_body=body)
    monkeypatch.undo()
    alone = [complete(client, one, extra_body=body) for one in prompts]
    assert [one.text for one in reply.choices] == [one.choices[0].text for one in alone]


def test_reasoning_effort_reaches_the_template(world, tmp_path):
    World.make(tmp_path, eos_token_id=2)
    effort = "{% if reasoning_effort is defined %}{{ 'effort ' + reasoning_effort }}{% endif %}"
    tiny_tokenizer(tmp_path, chat_template=effort + TEMPLATE)
    with saying(World(tmp_path), "Well.") as (client, engine):
        ask(client, reasoning_effort="low")
        ask(client)
        first, second = (world.chat.decode(one.prompt_ids) for one in engine.asked)
    assert first.startswith("effort low")
    assert "effort" not in second


@pytest.mark.parametrize("body", [{}, {"tools": []}, {"tools": [], "tool_choice": "auto"}])
def test_turns_of_other_servers(client, body):
    thought = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": []}
    turns = [{**MESSAGES[0], "tool_calls": []}, thought, *MESSAGES]
    reply = post(client, {"model": MODEL, "messages": turns, "max_tokens": 2, **body})
    assert reply.status_code == 200, reply.text


def test_a_strict_template_refuses_in_its_words(tmp_path):
    strict = (
        "{% for message in messages %}{% if loop.index0 and message.role == messages[loop.index0 - "
        "1].role %}{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    )
    world = World.make(tmp_path, eos_token_id=2)
    tiny_tokenizer(tmp_path, chat_template=strict + world.chat._template.plain)
    with World(tmp_path).served() as client:
        reply = post(client, {"model": MODEL, "messages": [*MESSAGES, *MESSAGES]})
        assert reply.status_code == 400
        assert "roles must alternate" in reply.json()["error"]["message"]


# Paths


def test_tokenize_and_detokenize(world, client):
    def asked(path, **body):
        reply = post(client, body, path)
        assert reply.status_code == 200, reply.text
        return reply.json()

    ids = world.chat.tokenizer.encode("I would like").ids
    whole = asked("/tokenize", model=MODEL, prompt="I would like", return_token_strs=True)
    assert whole["tokens"] == ids == asked("/tokenize", content="I would like")["tokens"]
    assert (whole["count"], whole["max_model_len"]) == (len(ids), MAX_LENGTH)
    assert "".join(whole["token_strs"]) == "I would like"
    chat = asked("/tokenize", messages=MESSAGES)["tokens"]
    assert chat == world.chat.prompt_ids(MESSAGES)
    text = asked("/detokenize", tokens=chat)
    assert text["prompt"] == text["content"]
    assert text["prompt"] == world.chat.render(MESSAGES, True)
    for path, body, what in (
        ("/tokenize", {}, "give one of"),
        ("/tokenize", {"prompt": "x", "content": "y"}, "give one of"),
        ("/detokenize", {"tokens": [5000]}, "no token 5000"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ):
        reply = post(client, body, path)
        assert reply.status_code == 400
        assert what in reply.json()["error"]["message"]
    assert post(client, {"model": "other", "prompt": "x"}, "/tokenize").status_code == 404


def test_unknown_paths_name_the_known(client):
    for path, what in (
        ("/v1/embeddings", "has no embeddings"),
        ("/api/chat", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/completion", "/v1/completions"),
        ("/props", "/v1/models"),
        ("/v1/messages", "litellm"),
        ("/v1/messages/count_tokens", "/tokenize"),
    ):
        other = httpx.post(client.url + path, json={})
        assert other.status_code == 404
        assert what in other.json()["error"]["message"]
    missing = httpx.get(f"{client.url}/nowhere")
    assert missing.status_code == 404
    for path in ("/v1/chat/completions", "/v1/models", "/tokenize", "/health"):
        assert path in missing.json()["error"]["message"]
    wrong = httpx.get(f"{client.url}/v1/chat/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert "only POST" in wrong.json()["error"]["message"]
    assert httpx.get(f"{client.url}/version").json() == {"version": eyas.__version__}
    for method in ("GET", "POST"):
        assert httpx.request(method, f"{client.url}/ping").json()["status"] == "ok"


def test_cors_of_allowed_origins(world, client):
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "x-any"}
    url, allows = f"{client.url}/v1/chat/completions", "access-control-allow-origin"
    for origin, status in ((PAGE, 200), ("https://other.example.org", 400)):
        before = httpx.options(url, headers={"origin": origin, **asks})
        assert before.status_code == status
        body = {"model": "none", "messages": MESSAGES}
        after = httpx.post(url, json=body, headers={"origin": origin})
        assert after.status_code == 404
        for reply in (before, after):
            assert reply.headers.get(allows) == (PAGE if status == 200 else None)
    with world.served() as closed:
        reply = httpx.get(f"{closed.url}/health", headers={"origin": PAGE})
        assert allows not in reply.headers
        assert httpx.options(url.replace(client.url, closed.url)).status_code == 405
    for wrong in ("chat.example.org", "https://x/", "file://"):
        with pytest.raises(ConfigError, match="no origin"):
            LimitsConfig(allowed_origins=[wrong])
