"""A server's life: models, health, a thread or a process, clients that leave, an engine that fails,
the end.
"""

from __future__ import annotations

import asyncio
import json
import runpy
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from unittest.mock import Mock

import httpx
import openai
import pytest
from pydantic import ValidationError

from eyas.engine.engine import Engine, EngineConfig
from eyas.errors import ConfigError, EyasError
from eyas.serve.completion import Answer
from eyas.serve.drift import DriftConfig
from eyas.serve.limits import LimitsConfig
from eyas.serve.server import ServeConfig, _bound, running_server, serve
from eyas.serve.vertex import VertexConfig
from tests.serving import MAX_LENGTH, MESSAGES, MODEL, GatedEngine, World, ask, connected, health


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World.make(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def client(world):
    with world.served() as client:
        yield client


def ask_health_until_refused(client):
    while True:
        health(client)


def test_models_and_health(client):
    (card,) = client.models.list().data
    assert card.id == MODEL
    told = {
        "model": MODEL,
        "dtype": "float32",
        "has_head": False,
        "max_length": MAX_LENGTH,
        "target_fingerprint": None,
    }
    assert card.eyas == told
    assert health(client).json() == {"status": "ok", "requests": 0}


def test_worker_sleeps_when_idle(world, monkeypatch):
    looks = []
    monkeypatch.setattr(
        Engine, "has_work", property(lambda self: looks.append(None) or self._scheduler.has_work)
    )
    with world.served() as client:
        ask(client)
        time.sleep(0.05)  # let the round that finds nothing to do pass
        before = len(looks)
        time.sleep(0.2)
        assert len(looks) == before


@pytest.mark.parametrize("rounds", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(world, stream, rounds):
    engine = world.engine(GatedEngine)
    with world.served(engine) as client:
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


def test_an_engine_that_fails_fails_its_requests_and_says_so(world):
    engine = world.engine(GatedEngine, max_batch=1)
    with world.served(engine) as client:
        engine.gate.release(2)
        begun = ask(client, stream=True)
        next(begun)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask, client)
            engine.error = RuntimeError("out of luck")
            engine.gate.release()
            with pytest.raises(openai.APIError, match="the engine failed: RuntimeError"):
                list(begun)
            with pytest.raises(
                openai.InternalServerError, match="the engine failed: RuntimeError"
            ) as failed:
                waiting.result()
        assert failed.value.type == "server_error"
        with pytest.raises(openai.InternalServerError, match="the engine failed: RuntimeError"):
            ask(client)
        assert health(client).status_code == 503
        assert "the engine failed: RuntimeError" in health(client).json()["error"]


def test_a_server_told_to_end_finishes_what_runs(world):
    engine = world.engine(GatedEngine)
    with ExitStack() as clients, ExitStack() as server, ThreadPoolExecutor(1) as pool:
        url = server.enter_context(world.served(engine)).url
        client = clients.enter_context(connected(url))
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
    assert text == world.truth(max_tokens=24)[0]


def test_a_server_in_a_process_of_its_own(world):
    config = ServeConfig(
        target=str(world.folder), model=MODEL, port=0, engine=EngineConfig(max_length=MAX_LENGTH)
    )
    with running_server(config) as url:
        body = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).json()
        assert reply["choices"][0]["message"]["content"] == world.truth(max_tokens=24)[0]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_a_process_told_to_end_finishes_what_runs_and_ends_well(world):
    config = ServeConfig(
        target=str(world.folder),
        model=MODEL,
        port=0,
        engine=EngineConfig(max_length=MAX_LENGTH, max_batch=1),
    )
    command = [sys.executable, "-m", "eyas.serve", config.model_dump_json()]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        ThreadPoolExecutor(3) as pool,
    ):
        url = next(line.strip() for line in process.stdout if line.startswith("http://"))
        with connected(url) as client:
            reply = ask(client, stream=True, max_tokens=100)
            text = next(reply).choices[0].delta.content
            waiting = pool.submit(ask, client)
            while health(client).json()["requests"] < 2 and not waiting.done():
                time.sleep(0.01)
            process.terminate()
            text += "".join(piece.choices[0].delta.content or "" for piece in reply)
            assert waiting.result().choices[0].message.content == world.truth(max_tokens=24)[0]
        assert text == world.truth(max_tokens=100)[0]
        assert process.wait(60) == 0


def test_what_has_not_finished_when_the_time_is_over_is_told_so(world):
    engine = world.engine(GatedEngine)
    with ExitStack() as clients, ExitStack() as server, ThreadPoolExecutor(2) as pool:
        url = server.enter_context(world.served(engine, LimitsConfig(shutdown_s=0.3))).url
        client = clients.enter_context(connected(url))
        engine.gate.release()
        begun = ask(client, stream=True, max_tokens=100)
        next(begun)
        whole = pool.submit(ask, client)
        while health(client).json()["requests"] < 2:
            time.sleep(0.01)
        leaving = pool.submit(server.close)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(begun)
        with pytest.raises(openai.InternalServerError) as stopped:
            whole.result()
        assert (stopped.value.status_code, stopped.value.code) == (503, "shutting_down")
        engine.gate.release(100)
        leaving.result()


def test_a_process_that_ends_before_it_is_ready_is_an_error(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho a library says hello\nexit 2\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with (
        pytest.raises(EyasError, match="exit code 2"),
        running_server(ServeConfig(target="t", port=0)),
    ):
        pytest.fail("it started")


def test_a_server_that_cannot_start_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["serve", ServeConfig(target=str(tmp_path / "none"), port=0).model_dump_json()]
    )
    monkeypatch.setattr("eyas.log.log_to_stderr", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("eyas.serve", run_name="__main__")
    assert ended.value.code == 2
    assert "no target folder" in capsys.readouterr().err


def test_a_server_told_to_end_while_it_loads_ends(monkeypatch):
    """The first process of a container: a signal with no handler is ignored there."""
    before = signal.getsignal(signal.SIGTERM)

    def load(config):
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("it went on loading")

    monkeypatch.setattr("eyas.serve.server.build_app", load)
    with pytest.raises(SystemExit) as ended:
        serve(ServeConfig(target="t", port=0))
    assert ended.value.code == 0
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("given", "warns"),
    [
        ({}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "vertex": VertexConfig()}, False),
    ],
)
def test_a_server_that_everybody_may_ask_says_so(monkeypatch, caplog, given, warns):
    monkeypatch.setattr("eyas.serve.server.build_app", lambda config: None)
    monkeypatch.setattr("eyas.serve.server._Server", lambda *_: Mock())
    serve(ServeConfig(target="t", port=0, **given))
    assert ("no API keys" in caplog.text) == warns
    caplog.clear()
    monkeypatch.setenv("EYAS_API_KEYS", "secret")
    serve(ServeConfig(target="t", port=0, **given))
    assert "no API keys" not in caplog.text


def test_a_time_without_end_is_refused():
    with pytest.raises(ValidationError, match="finite"):
        LimitsConfig(shutdown_s=float("inf"))
    with pytest.raises(ValidationError, match="finite"):
        DriftConfig(expect_tau=float("inf"))


def test_a_port_in_use_is_refused_before_the_model_is_loaded(client):
    port = int(client.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match="cannot listen"):
        serve(ServeConfig(target="not looked at", port=port))


def test_small_chunks_are_sent_at_once():
    """Else, after the headers, a stream's first tokens wait some 40 ms for their receipt (Nagle's
    algorithm).
    """

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
    config = ServeConfig(target="t", head="h", engine=EngineConfig(speculation="auto(4,2,8)"))
    assert ServeConfig.model_validate(json.loads(config.model_dump_json())) == config


def test_a_bug_within_a_stream_is_said_in_the_stream_and_logged_without_its_words(
    client, monkeypatch, caplog
):
    pushes = []

    def push(self, update):
        pushes.append(update)
        if len(pushes) > 2:
            raise RuntimeError("quotes what somebody wrote")
        return original(self, update)

    original = Answer.push
    monkeypatch.setattr(Answer, "push", push)
    with pytest.raises(openai.APIError, match="internal error: RuntimeError"):
        list(ask(client, stream=True, max_tokens=8))
    monkeypatch.undo()
    assert "quotes" not in caplog.text
    assert "internal error" in caplog.text
    assert ask(client, max_tokens=2).choices[0].finish_reason
