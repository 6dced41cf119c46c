"""The server, driven by the `openai` client over a real socket, on a real engine with a tiny random target."""

from __future__ import annotations

import asyncio
import json
import runpy
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import openai
import pytest

from eyas.chat import Chat
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.errors import ConfigError, EyasError
from eyas.model.target import Target
from eyas.serve.app import MAX_BODY_BYTES, Served, create_app
from eyas.serve.server import ServeConfig, _bound, running_app, running_server, serve
from eyas.serve.worker import Worker
from tests.tiny import tiny_target
from tests.tiny_head import head_folder

MODEL = "tiny"
MAX_LENGTH = 256
LONE_SURROGATE = b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}'
MESSAGES = [{"role": "user", "content": "I would like a table for two."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_target(tmp_path_factory.mktemp("target"), eos_token_id=None)  # answers end at max_tokens or a stop string


@pytest.fixture(scope="module")
def target(folder):
    return Target.load(folder)


@pytest.fixture(scope="module")
def chat(folder):
    return Chat(folder)


@pytest.fixture(scope="module")
def truth(target, chat):
    """The text of an answer, and its tokens, from the engine without a server."""
    engine = Engine(target)

    def answer(messages=MESSAGES, **params):
        prompt_ids = tuple(chat.prompt_ids(messages))
        (result,) = engine.run([Request("truth", prompt_ids, SamplingParams(**params))])
        return chat.decode(result.token_ids), result.token_ids

    return answer


def running(engine, chat, has_head=False):
    return running_app(create_app(Worker(engine), chat, Served(MODEL, "float32", has_head, engine.max_length)))


@contextmanager
def connected(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        client.url = url
        yield client


@contextmanager
def served(engine, chat, has_head=False):
    with running(engine, chat, has_head) as url, connected(url) as client:
        yield client


@pytest.fixture(scope="module")
def client(target, chat):
    with served(Engine(target, config=EngineConfig(max_batch=4, max_length=MAX_LENGTH)), chat) as client:
        yield client


def ask(client, messages=MESSAGES, **params):
    params = {"temperature": 0, "max_tokens": 24, **params}
    return client.chat.completions.create(model=MODEL, messages=messages, **params)


def health(client):
    return httpx.get(f"{client.url}/health")


def ask_health_until_refused(client):
    while True:
        health(client)


class GatedEngine(Engine):
    """An engine that works only when the test lets it, and can be told to fail."""

    def __init__(self, target, max_batch=4):
        super().__init__(target, config=EngineConfig(max_batch=max_batch, max_length=MAX_LENGTH))
        self.gate = threading.Semaphore(0)
        self.error = None
        self.is_empty = threading.Event()

    def step(self):
        self.gate.acquire()
        if self.error is not None:
            raise self.error
        return super().step()

    def cancel(self, request_id):
        super().cancel(request_id)
        if not self.has_work:
            self.is_empty.set()


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
    assert {(chunk.id, chunk.model, chunk.object) for chunk in chunks} == {(chunks[0].id, MODEL, "chat.completion.chunk")}


def test_stream_without_usage_ends_with_the_finish_reason(client):
    *_, last = ask(client, stream=True)
    assert last.choices[0].finish_reason == "length"
    assert last.usage is None


def test_end_token_finishes_with_stop_and_is_counted_but_not_shown(tmp_path, chat, truth):
    token_ids = truth(max_tokens=24)[1]
    end = token_ids[5]
    ended = Target.load(tiny_target(tmp_path, eos_token_id=end))
    with served(Engine(ended), chat) as client:
        reply = ask(client)
        last = list(ask(client, stream=True))[-1]
    assert reply.usage.completion_tokens == token_ids.index(end) + 1
    assert reply.choices[0].finish_reason == last.choices[0].finish_reason == "stop"


def test_sampling_follows_its_parameters_and_seed(client, truth):
    sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 7, "max_tokens": 24}
    once, again = (ask(client, **sampled, extra_body={"top_k": 20}).choices[0].message.content for _ in range(2))
    assert once == again == truth(**sampled, top_k=20)[0]
    assert once != ask(client, **{**sampled, "seed": 8}, extra_body={"top_k": 20}).choices[0].message.content


def test_temperature_is_one_by_default(client, truth):
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=3, max_completion_tokens=24)
    assert reply.choices[0].message.content == truth(temperature=1.0, seed=3, max_tokens=24)[0]


def test_answer_fills_the_room_when_no_limit_is_given(client):
    reply = ask(client, max_tokens=openai.omit)
    assert reply.usage.total_tokens == MAX_LENGTH


def test_text_parts_and_values_that_mean_off_are_accepted(client, truth):
    parts = [{"type": "text", "text": "I would like "}, {"type": "text", "text": "a table for two."}]
    off = {"n": 1, "frequency_penalty": 0, "logprobs": False, "response_format": {"type": "text"}, "tools": [], "user": "u"}
    reply = ask(client, [{"role": "user", "content": parts}], **off, extra_body={"speculation": False, "top_logprobs": None})
    assert reply.choices[0].message.content == truth(max_tokens=24)[0]


def test_many_at_once_get_the_answers_they_get_alone(client, truth):
    conversations = [[{"role": "user", "content": f"A table for {number}?"}] for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda messages: ask(client, messages), conversations))
    assert [reply.choices[0].message.content for reply in replies] == [truth(one, max_tokens=24)[0] for one in conversations]


@pytest.fixture(scope="module")
def speculating(folder, chat, tmp_path_factory):
    head = head_folder(folder, tmp_path_factory.mktemp("heads") / "head")
    config = EngineConfig(max_batch=4, max_length=MAX_LENGTH, speculation="fixed(2,2,4)")
    with served(Engine.load(folder, head, config=config), chat, has_head=True) as client:
        yield client


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 5}])
def test_speculation_changes_the_rounds_and_not_the_answer(speculating, truth, params):
    plain, default, on = (
        ask(speculating, **params, extra_body=body) for body in ({"speculation": False}, {}, {"speculation": True})
    )
    text = truth(max_tokens=24, **params)[0]
    assert {reply.choices[0].message.content for reply in (plain, default, on)} == {text}
    assert plain.usage.eyas["rounds"] == 0
    for reply in (default, on):
        rounds, hist = reply.usage.eyas["rounds"], reply.usage.eyas["accept_hist"]
        assert rounds == sum(hist) > 0
        assert sum((accepted + 1) * count for accepted, count in enumerate(hist)) == 24 - 1  # the first token is prefill's
        assert reply.usage.eyas["tau"] == 23 / rounds


def test_stop_string_counts_the_same_with_and_without_speculation(speculating, truth):
    stop = truth(max_tokens=24)[0][6:8]
    plain, eagle = (ask(speculating, stop=stop, extra_body={"speculation": on}) for on in (False, True))
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
        *pieces, last, usage = ask(client, stop=stop, stream=True, stream_options={"include_usage": True})
        got, reason = "".join(piece.choices[0].delta.content for piece in pieces), last.choices[0].finish_reason
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


def test_stop_string_frees_the_engine(target, chat, truth):
    engine = GatedEngine(target)
    text = truth(max_tokens=24)[0]
    with served(engine, chat) as client:
        engine.gate.release(200)
        ask(client, stop=text[3:5], max_tokens=200)
        assert engine.is_empty.wait(10)


# Refusals


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"n": 2}, "n"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 3}, "max_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"speculation": True}}, "speculation"),
        ({"extra_body": {"guided_json": "{}"}}, "guided_json"),
        ({"extra_body": {"temperature": "hot"}}, "temperature"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}]}]},
            "messages.0.content.0.cache",
        ),
        ({"extra_body": {"seed": 2**70}}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages.0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
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
        ("POST", "/v1/chat/completions", b" " * (MAX_BODY_BYTES + 1), "application/json", 413),
        ("GET", "/v1/chat/completions", b"", "application/json", 405),
        ("GET", "/nowhere", b"", "application/json", 404),
    ],
)
def test_every_error_has_the_same_shape(client, method, path, body, kind, status):
    reply = httpx.request(method, client.url + path, content=body, headers={"content-type": kind})
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


# Models, health, life and death


def test_models_and_health(client):
    (card,) = client.models.list().data
    assert card.id == MODEL
    assert card.eyas == {"model": MODEL, "dtype": "float32", "has_head": False, "max_length": MAX_LENGTH}
    assert health(client).json() == {"status": "ok", "requests": 0}


def test_worker_sleeps_when_idle(target, chat, monkeypatch):
    looks = []
    monkeypatch.setattr(Engine, "has_work", property(lambda self: looks.append(None) or self._scheduler.has_work))
    with served(Engine(target), chat) as client:
        ask(client)
        time.sleep(0.05)  # let the round that finds nothing to do pass
        before = len(looks)
        time.sleep(0.2)
        assert len(looks) == before


@pytest.mark.parametrize("rounds", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(target, chat, stream, rounds):
    engine = GatedEngine(target)
    with served(engine, chat) as client:
        if rounds:
            engine.gate.release(rounds)
        if stream and rounds:
            reply = ask(client, stream=True, max_tokens=200)
            assert next(reply).choices[0].delta.role == "assistant"
            reply.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                ask(client.with_options(timeout=0.3), stream=stream, max_tokens=200)
        engine.gate.release(200)
        assert engine.is_empty.wait(10)
        assert health(client).json() == {"status": "ok", "requests": 0}
        assert ask(client, max_tokens=4).usage.completion_tokens == 4


def test_an_engine_that_fails_fails_its_requests_and_says_so(target, chat):
    engine = GatedEngine(target, max_batch=1)
    with served(engine, chat) as client:
        engine.gate.release(2)
        begun = ask(client, stream=True)
        next(begun)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask, client)
            engine.error = RuntimeError("out of luck")
            engine.gate.release()
            with pytest.raises(openai.APIError, match="out of luck"):
                list(begun)
            with pytest.raises(openai.InternalServerError, match="out of luck") as failed:
                waiting.result()
        assert failed.value.type == "server_error"
        with pytest.raises(openai.InternalServerError, match="out of luck"):
            ask(client)
        assert health(client).status_code == 503
        assert "out of luck" in health(client).json()["error"]


def test_a_server_told_to_end_finishes_what_runs(target, chat, truth):
    engine = GatedEngine(target)
    with ExitStack() as server, ThreadPoolExecutor(1) as pool:
        url = server.enter_context(running(engine, chat))
        with connected(url) as client:
            engine.gate.release()
            reply = ask(client, stream=True)
            text = next(reply).choices[0].delta.content
            leaving = pool.submit(server.close)
            with pytest.raises(httpx.TransportError):
                ask_health_until_refused(client)
            assert not leaving.done()
            engine.gate.release(100)
            text += "".join(piece.choices[0].delta.content or "" for piece in reply)
        leaving.result()
    assert text == truth(max_tokens=24)[0]


def test_a_server_in_a_process_of_its_own(folder, truth):
    config = ServeConfig(target=str(folder), model=MODEL, port=0, engine=EngineConfig(max_length=MAX_LENGTH))
    with running_server(config) as url:
        body = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).json()
        assert reply["choices"][0]["message"]["content"] == truth(max_tokens=24)[0]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_a_process_that_ends_before_it_is_ready_is_an_error(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho a library says hello\nexit 2\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(EyasError, match="exit code 2"), running_server(ServeConfig(target="t", port=0)):
        pytest.fail("it started")


def test_a_server_that_cannot_start_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serve", ServeConfig(target=str(tmp_path / "none"), port=0).model_dump_json()])
    monkeypatch.setattr("eyas.log.log_to_stderr", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("eyas.serve", run_name="__main__")
    assert ended.value.code == 2
    assert "no target folder" in capsys.readouterr().err


def test_a_port_in_use_is_refused_before_the_model_is_loaded(client):
    port = int(client.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match="cannot listen"):
        serve(ServeConfig(target="not looked at", port=port))


def test_small_chunks_are_sent_at_once():
    """Else, after the headers, a stream's first tokens wait some 40 ms for their receipt (Nagle's algorithm)."""

    async def no_delay() -> int:
        seen: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            taken = writer.get_extra_info("socket")
            seen.set_result(taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with _bound("127.0.0.1", 0) as listener:
            async with await asyncio.start_server(accept, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname())
                writer.close()
                return await seen

    assert asyncio.run(no_delay()) != 0


def test_config_survives_its_journey_to_another_process():
    config = ServeConfig(target="t", head="h", engine=EngineConfig(tree_topk=2))
    assert ServeConfig.model_validate(json.loads(config.model_dump_json())) == config
