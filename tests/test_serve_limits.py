"""Limits: keys, rates, the queue, times, sizes, and hostile clients."""

import asyncio
import json
import logging
import os
import random
import re
import signal
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress

import httpx
import openai
import pytest
import uvicorn
from starlette.responses import JSONResponse
from uvicorn.server import ServerState

from eyas.engine.request import Request, SamplingParams, Update
from eyas.errors import ConfigError, MissingInputError
from eyas.serve import answers, app, fields, server
from eyas.serve.limits import (
    FAILURES_PER_MINUTE,
    KEYS_VARIABLE,
    AccessControl,
    ApiError,
    LimitsConfig,
)
from eyas.serve.server import MAX_HEAD, Connection
from eyas.serve.worker import EngineWorker, QueueFull
from tests.serving import (
    MESSAGES,
    MODEL,
    GatedEngine,
    ask,
    connected,
    health,
    post,
    wait_for_requests,
)
from tests.tiny import children_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODY = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def open_client(world):
    with world.served() as client:
        yield client


@pytest.fixture(scope="module")
def client(world):
    with world.served(
        limits=LimitsConfig(body_timeout_s=0.5, max_connections=20, max_body_bytes=20_000)
    ) as client:
        yield client


@pytest.fixture
def keys(tmp_path):
    """A file of keys."""
    (tmp_path / "keys").write_text("a-key\n")
    return tmp_path / "keys"


def address_of(client):
    host, port = client.url.removeprefix("http://").split(":")
    return host, int(port)


def opened(client):
    return socket.create_connection(address_of(client), timeout=300)


HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: 9\r\n\r\n"
)


def answer(connection, end=None):
    """Status and error of what comes until the server closes, or until an answer's end."""
    data = b""
    while (end is None or end not in data) and (piece := connection.recv(65536)):
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def asked_health(client, stack, more):
    """A connection that has its answer before its request has ended."""
    connection = stack.enter_context(opened(client))
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + more)
    data = b""
    while not data.endswith(b"}"):
        data += connection.recv(65536)
    assert data.startswith(b"HTTP/1.1 200")
    return connection


# Keys and rates


def test_api_keys(world, keys, monkeypatch):
    keys.write_text("# of the two teams\nkey-of-team-a\n\nkey-of-team-b\n")
    monkeypatch.setenv(KEYS_VARIABLE, "key-of-the-operator")
    with world.served(limits=LimitsConfig(api_keys=keys)) as client:
        for key in ("key-of-team-a", "key-of-team-b", "key-of-the-operator"):
            with connected(client.url, key) as known:
                assert ask(known, max_tokens=2).usage.completion_tokens == 2
                assert known.models.list().data[0].id == MODEL
        for key in ("none", "key-of-team", "# of the two teams", "key-of-team-a,key-of-team-b"):
            with (
                connected(client.url, key) as unknown,
                pytest.raises(openai.AuthenticationError) as refused,
            ):
                ask(unknown)
            assert refused.value.code == "invalid_api_key"
            assert key not in str(refused.value.body)
        assert post(client, BODY).status_code == 401
        assert httpx.get(f"{client.url}/v1/models").status_code == 401
        assert health(client).status_code == httpx.get(f"{client.url}/metrics").status_code == 200


def test_a_file_without_keys_is_refused(tmp_path):
    (tmp_path / "keys").write_text("# none yet\n\n")
    with pytest.raises(ConfigError, match="holds no API key"):
        AccessControl(LimitsConfig(api_keys=tmp_path / "keys"))
    (tmp_path / "large").write_text("a-key\n" * 200_000)  # half a line would be another key
    for name, why in (("nowhere", "No such file"), ("large", "over 1048576 bytes")):
        with pytest.raises(MissingInputError, match=f"no API keys at .*{why}"):
            AccessControl(LimitsConfig(api_keys=tmp_path / name))


def test_keys_change_without_a_restart(world, keys, monkeypatch):
    """Also where the file is replaced, as Kubernetes does; an empty file is no open door, a pipe is
    not waited for, and a key of the environment stays.
    """
    new = keys.with_name("new")
    keys.write_text("key-of-team-a\nkey-of-team-b\n", encoding="utf-8-sig")
    monkeypatch.setenv(KEYS_VARIABLE, "key-of-the-operator")
    with world.served(limits=LimitsConfig(api_keys=keys)) as client:

        def let_in():
            found = {}
            for name in ("team-a", "team-b", "team-c", "the-operator"):
                key = {"authorization": f"Bearer key-of-{name}"}
                reply = httpx.get(f"{client.url}/v1/models", headers=key, timeout=300)
                found[name] = reply.status_code
            assert httpx.get(f"{client.url}/v1/models").status_code == 401
            return [name for name, status in found.items() if status == 200]

        assert let_in() == ["team-a", "team-b", "the-operator"]
        keys.write_text("key-of-team-b\n")
        assert let_in() == ["team-b", "the-operator"]
        new.write_text("key-of-team-c\n")
        new.replace(keys)
        assert let_in() == ["team-c", "the-operator"]
        keys.write_text("")
        assert let_in() == ["the-operator"]
        for replace in (os.mkfifo, os.mkdir, lambda path: None):
            keys.unlink() if keys.is_file() or keys.is_fifo() else keys.rmdir()
            replace(keys)
            assert let_in() == ["the-operator"]
        keys.write_text("key-of-team-a\n")
        assert let_in() == ["team-a", "the-operator"]


def test_guesses_of_keys_are_limited_by_address(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setenv(KEYS_VARIABLE, "known,other")
    access = AccessControl(LimitsConfig())

    def status(key, address="192.0.2.1"):
        try:
            asyncio.run(access.client_name(f"Bearer {key}", address))
        except ApiError as error:
            return error.status
        return 200

    assert status("known") == 200
    assert {status(f"guess {number}") for number in range(FAILURES_PER_MINUTE)} == {401}
    assert [status("guess"), status("other"), status("known")] == [429, 429, 200]
    assert [status("guess", "192.0.2.2"), status("other", "192.0.2.2")] == [401, 200]
    now += 60.0 / FAILURES_PER_MINUTE
    assert [status("other"), status("guess"), status("guess")] == [200, 401, 429]


def test_rates_are_per_client(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    access = AccessControl(LimitsConfig(requests_per_minute=3))
    for _ in range(3):
        access.count("a")
    with pytest.raises(ApiError) as refused:
        access.count("a")
    assert (refused.value.status, refused.value.retry_after) == (429, 20)
    access.count("b")
    now += 20.0
    access.count("a")
    with pytest.raises(ApiError):
        access.count("a")


def test_the_log_names_refused_clients(world, keys, caplog):
    caplog.set_level(logging.INFO, logger="eyas.serve")
    with world.served(limits=LimitsConfig(api_keys=keys, requests_per_minute=1)) as client:
        for key, kind in (
            ("wrong", openai.AuthenticationError),
            ("a-key", None),
            ("a-key", openai.RateLimitError),
        ):
            outcome = pytest.raises(kind) if kind else nullcontext()
            with connected(client.url, key) as asking, outcome as refused:
                asking.models.list(extra_headers={"x-forwarded-for": "203.0.113.9"})
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
    data = [one.data for one in caplog.records if one.getMessage() == "request"]
    unknown, let_in, too_often = data
    assert (unknown["status"], unknown["client"]) == (401, "127.0.0.1")
    assert let_in["client"].startswith("key-")
    assert (too_often["status"], too_often["client"]) == (429, let_in["client"])


# The queue and time


def test_a_full_queue_refuses(world):
    engine = world.engine(GatedEngine, max_batch=1)
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        client = stack.enter_context(world.served(engine, LimitsConfig(max_queue=2)))
        held = [pool.submit(ask, client, max_tokens=4) for _ in range(3)]
        wait_for_requests(client, lambda count: count >= 3)
        with pytest.raises(openai.RateLimitError) as refused:
            ask(client, max_tokens=4)
        assert refused.value.code == "queue_full"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.BadRequestError, match="4 samples"):
            ask(client, n=4)
        engine.gate.release(1000)
        assert {one.result().usage.completion_tokens for one in held} == {4}
        assert ask(client, max_tokens=4).usage.completion_tokens == 4


def test_the_last_place_of_the_queue_is_given_once(world):
    async def ask_both():
        worker = EngineWorker(world.engine(GatedEngine, max_batch=1))
        worker.start()
        asked = [Request(name, (5, 6), SamplingParams(max_tokens=1)) for name in "abc"]
        updates = [worker.updates([one], timeout_s=9, max_queue=1) for one in asked]
        found = await asyncio.gather(
            *(asyncio.wait_for(anext(one), 1) for one in updates), return_exceptions=True
        )
        assert worker.num_samples == 0
        for one in updates:
            await one.aclose()
        worker._engine.gate.release(9)
        await worker.stop()
        return [type(one) for one in found]

    assert asyncio.run(ask_both()) == [TimeoutError, TimeoutError, QueueFull]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_late_answer_fails(world, stream, begun):
    engine = world.engine(GatedEngine)
    with world.served(engine, LimitsConfig(request_timeout_s=0.4)) as client:
        if begun:
            engine.gate.release(2)
        if stream and begun:
            with pytest.raises(openai.APIError, match="the answer took more than"):
                list(ask(client, stream=True, max_tokens=200))
        else:
            with pytest.raises(openai.InternalServerError) as late:
                ask(client, stream=stream, max_tokens=200)
            assert (late.value.status_code, late.value.code) == (504, "timeout")
        engine.gate.release(1000)
        assert engine.is_empty.wait(300)
        assert health(client).json() == {"status": "ok", "requests": 0}


def test_sending_shares_the_answers_time(world, monkeypatch):
    times, engine = [], world.engine(GatedEngine)

    class Noted(answers.EventStream):
        def __init__(self, events, timeout_s, *given):
            times.append(timeout_s)
            super().__init__(events, timeout_s, *given)

    monkeypatch.setattr(app, "EventStream", Noted)
    with world.served(engine, LimitsConfig(request_timeout_s=60)) as client:
        threading.Timer(0.5, engine.gate.release, [100]).start()
        assert len(list(ask(client, stream=True, max_tokens=4))) > 1
    assert times[0] <= 59.8


# Clients that mean no good


def test_a_missing_body_frees_its_connection(client):
    with ExitStack() as stack:
        silent = [stack.enter_context(opened(client)) for _ in range(19)]
        for connection in silent:
            connection.sendall(HEAD + b"{")
        for connection in silent:
            assert answer(connection)[0] == 408  # and the connection ends
        assert ask(client, max_tokens=2).usage.completion_tokens == 2


def test_closed_idle_connections_no_longer_count():
    served = app.create_app(MODEL, LimitsConfig(max_connections=2))
    config = uvicorn.Config(served, lifespan="off", log_config=None)
    state = ServerState()

    class Transport(asyncio.Transport):
        closed = False

        def close(self):
            self.closed = True

        def is_closing(self):
            return self.closed

    async def open_four():
        transports = [Transport() for _ in range(4)]
        for transport in transports:
            connection = Connection(config, state, {})
            connection.connection_made(transport)
            connection.idle_since -= server.IDLE_S + 1
        return [transport.closed for transport in transports]

    assert asyncio.run(open_four()) == [True, True, False, False]
    assert len(state.connections) == 2


def test_surplus_connections_get_503(world):
    with world.served(limits=LimitsConfig(max_connections=20)) as client, ExitStack() as stack:
        held = [stack.enter_context(opened(client)) for _ in range(100)]
        for connection in held[::-1]:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
        statuses = Counter(connection.recv(12)[9:] for connection in held)
        assert statuses == {b"200": 20, b"503": 80}
        refusal = held[-1].recv(65536) + held[-1].recv(65536)
        assert b"too_many_connections" in refusal
        assert b"connection: close" in refusal
        for path in ("/health", "/ping", "/metrics"):
            assert httpx.get(client.url + path).status_code == 200


ENDLESS = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"


@pytest.mark.parametrize(
    "headers",
    [
        b"x: " + b"y" * MAX_HEAD,
        b"x: " + b"y" * (1 << 20) + b"\r\n\r\n",
        b"x: y\r\n" * 50_000 + b"\r\n",
        b"x: " + b"y" * (MAX_HEAD + 1) + b"\r\n\r\n",
    ],
    ids=["endless", "1 MB", "50,000 lines", "in one piece"],
)
@pytest.mark.parametrize("first", [b"", HEAD + b'{"a": 1}\n'], ids=["alone", "behind a request"])
def test_headers_are_bounded(open_client, headers, first):
    with opened(open_client) as connection:
        if first:
            connection.sendall(first)
            assert answer(connection, b"}}")[0] == 400
        connection.sendall(ENDLESS + headers)
        status, error = answer(connection)
        assert (status, error["type"]) == (431, "invalid_request_error")


CHUNKED = b"transfer-encoding: chunked\r\n\r\n0\r\n"


@pytest.mark.parametrize("trailers", [b"x: " + b"y" * 1000, b"x: y\r\n"], ids=["a line", "lines"])
def test_trailers_are_bounded(open_client, trailers):
    """431 where no answer has begun, else the end: no request has two answers."""
    with opened(open_client) as posted, ExitStack() as stack:
        posted.sendall(HEAD.replace(b"content-length: 9\r\n\r\n", CHUNKED))
        got = asked_health(open_client, stack, CHUNKED)
        for connection in (posted, got):
            with suppress(OSError):  # it has been closed
                for _ in range(200):
                    connection.sendall(trailers * 10)
        assert answer(posted)[0] == 431
        with suppress(ConnectionResetError):
            assert got.recv(1) == b""


UNREAD = b"content-length: 1000\r\n\r\n"


def test_headers_and_silence_time_out(client):
    """As a body that is not needed; many headers that come in time are answered."""
    with ExitStack() as stack:
        slow = [stack.enter_context(opened(client)) for _ in range(4)]
        slow.append(asked_health(client, stack, UNREAD))
        slow[4].sendall(b"a")
        slow[1].sendall(ENDLESS)
        slow[2].sendall(HEAD + b'{"a": 1}\n')
        assert answer(slow[2], b"}}")[0] == 400
        slow[2].sendall(ENDLESS)
        slow[3].sendall(ENDLESS + b"x: y\r\n" * 250 + b"\r\n")
        assert slow[3].recv(65536).startswith(b"HTTP/1.1 200")
        for connection in [*slow[:3], slow[4]]:
            assert connection.recv(1) == b""


def test_connections_without_bodies_make_room(world, monkeypatch):
    monkeypatch.setattr(server, "IDLE_S", 0)
    limits = LimitsConfig(max_connections=3, body_timeout_s=600)
    with world.served(limits=limits) as client, ExitStack() as stack:
        held = [asked_health(client, stack, UNREAD) for _ in range(3)]
        assert post(client, BODY).status_code == 200
        for connection in held:
            connection.settimeout(5)
            assert connection.recv(1) == b""


def test_half_sent_bodies_are_answered_on_a_full_server(world):
    limits = LimitsConfig(max_connections=3, body_timeout_s=600)
    with world.served(limits=limits) as client, ExitStack() as stack:
        held = [stack.enter_context(opened(client)) for _ in range(3)]
        for connection in held:
            connection.sendall(HEAD + b"{")
        while (refused := post(client, BODY)).status_code == 200:  # until the server has seen all
            time.sleep(0.01)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_connections"
        for connection in held:
            connection.sendall(b'"a": 10}')
            assert answer(connection, b"}}")[0] == 400


def test_prompts_times_samples_are_bounded_first(world, monkeypatch):
    made = []
    monkeypatch.setattr("eyas.serve.translation.Request", lambda **named: made.append(named))
    with world.served() as client:
        for prompts, n in ((["x"] * 1024, 128), ([[1]] * 3, 100)):
            reply = post(client, {"model": MODEL, "prompt": prompts, "n": n}, TEXT)
            assert reply.status_code == 400
            assert "samples are more than this server holds" in reply.json()["error"]["message"]
    assert not made


def test_a_slow_readers_updates_are_written_in_parts():
    """What came while it did not read is one batch of 400 updates."""
    turns, at_turn = 0, []

    class Written:
        is_over = False

        def chunk(self, update):
            at_turn.append(turns)
            return "x"

        def end(self):
            return "."

    async def read():
        nonlocal turns

        async def others():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async def updates():
            while True:
                Written.is_over = True
                yield [Update("a", [1], "stop")]

        working = asyncio.ensure_future(others())
        batch = [Update("a", [1])] * 400
        pieces = [one async for one in answers.event_pieces(batch, updates(), None, Written())]
        working.cancel()
        return b"".join(pieces)

    assert asyncio.run(read()) == b"x" * 401 + b"."
    assert max(Counter(at_turn).values()) <= answers.PART + 1  # the last update is another batch


def test_a_failed_grammar_is_an_error(ending):
    body = {**BODY, "max_tokens": 100, "guided_regex": "[a-z]{100}"}
    for stream in (False, True):
        engine = ending.engine(GatedEngine)
        with ending.served(engine) as client, ThreadPoolExecutor(1) as pool:
            reply = pool.submit(post, client, {**body, "stream": stream})
            engine.gate.release(5)
            while engine._scheduler.num_running == 0:
                time.sleep(0.01)
            (process,) = children_of(engine._grammars._process.process.pid)
            os.kill(process, signal.SIGKILL)
            engine.gate.release(1000)
            found = reply.result()
            assert found.status_code in ((200, 400) if stream else (400,))
            assert "the regex [a-z]{100} needs more than" in found.text
            assert engine.is_empty.wait(300)
            assert post(client, {**body, "guided_regex": "[ab]{3}"}).status_code == 200


@pytest.fixture
def compiling(ending, monkeypatch):
    """A client of a server whose grammars compile from `begun` until `may_end`."""
    engine, begun, may_end = ending.engine(), threading.Event(), threading.Event()
    compile_grammar = engine.compile_grammar

    def slow(params):
        if params.has_grammar:
            begun.set()
            assert may_end.wait(300)
        return compile_grammar(params)

    monkeypatch.setattr(engine, "compile_grammar", slow)
    with ending.served(engine) as client:
        yield client, begun, may_end
        may_end.set()


def test_slow_grammars_stop_no_other_stream(compiling):
    client, begun, may_end = compiling
    with ThreadPoolExecutor(1) as pool:
        guided = pool.submit(post, client, {**BODY, "guided_regex": "[ab]{3}"})
        assert begun.wait(300)
        try:
            assert ask(client, max_tokens=8).choices[0].finish_reason
            assert health(client).json() == {"status": "ok", "requests": 1}
            assert not guided.done()
        finally:
            may_end.set()
        assert re.fullmatch("[ab]{3}", guided.result().json()["choices"][0]["message"]["content"])


def test_a_disconnect_while_the_grammar_compiles(compiling):
    client, begun, may_end = compiling
    body = {**BODY, "guided_regex": "a"}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(client.url + CHAT, json=body, timeout=httpx.Timeout(60, read=0.5))
    assert begun.wait(300)
    wait_for_requests(client, lambda count: not count)
    may_end.set()
    assert ask(client, max_tokens=2).usage.completion_tokens == 2


TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


@pytest.mark.parametrize("garbage", [TLS_HELLO, b"HELLO\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n"])
def test_garbage_gets_400(client, garbage):
    with opened(client) as connection:
        connection.sendall(garbage)
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")


def test_too_large_bodies_are_refused(client):
    headers = {"content-type": "application/json"}
    reply = httpx.post(client.url + TEXT, content=b" " * 20_001, headers=headers)
    assert reply.status_code == 413
    endless = (b" " * 1000 for _ in range(5000))
    with suppress(httpx.TransportError):  # it may go on sending after it is refused
        reply = httpx.post(client.url + TEXT, content=endless, headers=headers)
        assert reply.status_code == 413
    assert health(client).status_code == 200


def test_a_client_that_reads_nothing_times_out(world):
    """Its answers fill the system's buffers; else its samples would wait for ever."""
    many = {"prompt": [[5]] * 64, "n": 4, "max_tokens": 100, "logprobs": 20}
    text = json.dumps({"model": MODEL, **many, "stream": True, "temperature": 0}).encode()
    head = HEAD.replace(b"content-length: 9", b"content-length: %d" % len(text))
    engine = world.engine(max_batch=16)
    with (
        world.served(engine, LimitsConfig(request_timeout_s=2)) as client,
        socket.socket() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address_of(client))
        connection.sendall(head + text)
        while 'reason="timeout"' not in httpx.get(f"{client.url}/metrics").text:
            time.sleep(0.05)
        wait_for_requests(client, lambda count: not count)


def test_fuzzed_bodies(open_client):
    rng = random.Random(0)
    optional = {"stop": ["x"], "tools": [], "response_format": {"type": "text"}}
    good = json.dumps({**BODY, **optional, "logit_bias": {"1": 1}}).encode()
    strange = [b"9" * 5000, b"[" * 300, b"\xff", b'"\\ud800"', b'""', b"\x00"]
    strange += b"1e400 -0 NaN {} null true".split()
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=open_client.url, headers=headers, timeout=300) as http:
        for number in range(200):
            body = bytearray(good)
            for _ in range(rng.randrange(1, 4)):
                at, byte = rng.randrange(len(body)), bytes([rng.randrange(256)])
                body[at : at + rng.randrange(4)] = rng.choice([*strange, byte])
            reply = http.post(rng.choice([CHAT, TEXT]), content=bytes(body))
            assert reply.status_code in (200, 400, 404), (number, bytes(body), reply.text)
    assert health(open_client).json() == {"status": "ok", "requests": 0}


def filled(before, unit, after, most):
    """A body of nearly `most` bytes: units between commas."""
    units, size = [], len(before) + len(after)
    while size + len(text := unit(len(units)).encode()) < most:
        units.append(text)
        size += len(text) + 1
    return before.encode() + b",".join(units) + after.encode()


HEAD_OF_BODY = json.dumps({**BODY, "max_tokens": 1})[:-1]


@pytest.mark.parametrize(
    ("path", "before", "unit", "after", "says"),
    [
        (CHAT, '{"model": "tiny", "messages": [', "{}", "]}", "values"),
        (CHAT, '{"model": "tiny", "messages": [', '{"role": "user"}', "]}", "keys"),
        (CHAT, f'{HEAD_OF_BODY}, "logit_bias": {{', '"%d": 1', "}}", "keys"),
        (CHAT, f"{HEAD_OF_BODY}, ", '"x%d": 1', "}", "keys"),
        (CHAT, f'{HEAD_OF_BODY}, "metadata": [', "[[[[]]]]", "]}", "keys"),
        (CHAT, f'{HEAD_OF_BODY}, "stop": [', '"x"', "]}", "stop"),
        (CHAT, f'{HEAD_OF_BODY}, "guided_choice": [', '"x"', "]}", "characters"),
        (TEXT, '{"model": "tiny", "prompt": [', "-1", "]}", "values"),
        (TEXT, '{"model": "tiny", "prompt": [', "[1]", "]}", "keys"),
        (TEXT, '{"model": "tiny", "prompt": [', '"x"', "]}", "prompts are too many"),
    ],
)
def test_bodies_of_too_many_values_are_refused_early(
    open_client, monkeypatch, path, before, unit, after, says
):
    """Counted: an error of pydantic's for every element was what took 20 s."""
    counts = []
    refusal = fields._refusal

    def counted(error, body):
        counts.append(error.error_count())
        return refusal(error, body)

    monkeypatch.setattr(fields, "_refusal", counted)
    body = filled(before, lambda at: unit.replace("%d", str(at)), after, (1 << 20) - 100)
    headers = {"content-type": "application/json"}
    reply = httpx.post(open_client.url + path, content=body, headers=headers, timeout=300)
    assert (reply.status_code, says in reply.json()["error"]["message"]) == (400, True), reply.text
    assert max(counts, default=0) < 10


def test_the_content_of_strings_is_not_counted(open_client):
    code = '{"a": [1, "\\"], \'b\': "\\\\"}' * 2000
    reply = post(open_client, {**BODY, "messages": [{"role": "user", "content": code}]})
    assert reply.json()["error"]["code"] == "context_length_exceeded", reply.text


def test_large_and_small_bodies_do_not_wait_for_each_other(open_client, monkeypatch):
    begun, may_end = threading.Event(), threading.Event()
    parse_body = app.parse_body

    def slow(kind, body):
        if len(body) > app.SMALL_BODY:
            begun.set()
            assert may_end.wait(300)
        return parse_body(kind, body)

    monkeypatch.setattr(app, "parse_body", slow)
    large = {**BODY, "user": "x" * app.SMALL_BODY}
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(post, open_client, large)
        try:
            assert begun.wait(300)
            assert ask(open_client, max_tokens=2).usage.completion_tokens == 2
            assert health(open_client).status_code == 200
            assert not reply.done()
        finally:
            may_end.set()
        assert reply.result().status_code == 200


def test_held_bodies_are_bounded(open_client, monkeypatch):
    monkeypatch.setattr(app, "MAX_HELD_BODIES", 0)
    refused = post(open_client, {**BODY, "user": "x" * app.SMALL_BODY})
    assert refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
    assert ask(open_client, max_tokens=2).usage.completion_tokens == 2


def test_too_many_logprobs_need_a_stream(open_client):
    wanted = {**BODY, "n": 128, "max_tokens": 200, "logprobs": True, "top_logprobs": 20}
    reply = post(open_client, wanted)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "logprobs"
    assert "stream" in reply.json()["error"]["message"]
    with httpx.stream("POST", f"{open_client.url}{CHAT}", json={**wanted, "stream": True}) as reply:
        assert reply.status_code == 200


def test_json_in_pieces_is_json():
    values = [{}, [], None, {"a": [], "é\n": [1, {"b": {}}]}, "x", 0.1]
    values += [[[]] * 300, list(range(129))]
    for value in values:
        assert "".join(answers.json_pieces(value)) == JSONResponse(value).body.decode()
    with pytest.raises(ValueError, match="JSON compliant"):
        "".join(answers.json_pieces([float("nan")]))


# The name of the server


def asked_as(client, host, path="/v1/models"):
    return httpx.get(client.url + path, headers={"host": host})


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/", "/openapi.json", "/x"])
def test_foreign_hosts_are_refused_at_every_path(open_client, path):
    """DNS rebinding: evil.example points its name at the loopback."""
    refused = asked_as(open_client, "evil.example:8000", path)
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "host_not_allowed"
    assert "--allowed-host" in refused.json()["error"]["message"]


OWN = ("localhost", "LOCALHOST:1234", "127.0.0.1:80", "[::1]:8000", "[::1]", "[fd00::7]:8000")
OWN += ("10.244.0.7:8000",)  # as a kubelet asks
FOREIGN = ("localhost.evil.example", "127.0.0.1.evil.example:80", "evil.example#localhost", "")
FOREIGN += ("evil.example@localhost", "localhost@evil.example", "localhost, evil.example")
FOREIGN += ("[::1", "[::]", "0.0.0.0")


@pytest.mark.parametrize("host", OWN + FOREIGN)
def test_hosts_of_the_loopback(open_client, host):
    assert asked_as(open_client, host).status_code == (200 if host in OWN else 403)


def test_allowed_hosts(world, keys):
    limits = LimitsConfig(allowed_hosts=["eyas.example.org"])
    with world.served(limits=limits) as client:
        assert asked_as(client, "Eyas.Example.org:443").status_code == 200
        assert asked_as(client, "localhost").status_code == 200
        assert asked_as(client, "other.example.org").status_code == 403
        assert asked_as(client, "10.244.0.7:8000", "/health").status_code == 200
    with world.served(limits=LimitsConfig(api_keys=keys)) as client:
        assert asked_as(client, "eyas.example.org").status_code == 401
        assert asked_as(client, "eyas.example.org", "/health").status_code == 200
    for wrong in ("http://x.org", "x.org:80", ""):
        with pytest.raises(ConfigError, match="no name of a host"):
            LimitsConfig(allowed_hosts=[wrong])


def test_logs_and_errors_hold_no_text_of_requests(client, caplog):
    caplog.set_level(logging.DEBUG, logger="eyas")
    secret = "correct-horse-battery-staple"
    bodies = [
        {},
        {"messages": [{"role": "user", "content": {"x": secret}}]},
        {"max_tokens": -1},
        {"temperature": secret},
        {"guided_regex": f"({secret}"},
    ]
    said = {**BODY, "messages": [{"role": "user", "content": secret}]}
    replies = [post(client, {**said, **body}) for body in bodies]
    assert [reply.status_code for reply in replies] == [200, 400, 400, 400, 400]
    assert not any(
        secret in record.getMessage() or secret in str(vars(record)) for record in caplog.records
    )
    assert not any(secret in reply.text for reply in replies[1:4])
    assert secret not in httpx.get(f"{client.url}/metrics").text
