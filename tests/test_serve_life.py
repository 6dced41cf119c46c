"""A server's life: health, clients that leave, an engine that fails, another head, the end."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import httpx
import openai
import pytest
from pydantic import ValidationError

from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.errors import ConfigError, EyasError
from eyas.log import JsonFormatter
from eyas.serve import limits, metrics
from eyas.serve.app import copy_head, create_app
from eyas.serve.limits import LimitsConfig
from eyas.serve.metrics import Metrics
from eyas.serve.server import ServeConfig, UvicornServer, _bound, running_server, serve
from eyas.serve.writers import CompletionWriter
from tests.object_stores import free_port
from tests.serving import (
    MAX_LENGTH,
    MODEL,
    GatedEngine,
    ask,
    connected,
    health,
    text_of,
    wait_for_requests,
)
from tests.tiny_head import head_folder


def process_config(world):
    sizes = EngineConfig(max_length=MAX_LENGTH, max_batch=1)
    return ServeConfig(target=str(world.folder), model=MODEL, port=0, engine=sizes)


@contextmanager
def closable(served):
    """A client that outlives its server, what ends the server in a thread, and the threads."""
    with ExitStack() as clients, ExitStack() as server, ThreadPoolExecutor(2) as pool:
        url = server.enter_context(served).url
        yield clients.enter_context(connected(url)), lambda: pool.submit(server.close), pool


def test_models_and_health(client):
    (card,) = client.models.list().data
    assert card.id == MODEL
    facts = {"model": MODEL, "dtype": "float32", "has_head": False, "text_drafts": False}
    unknown = dict.fromkeys(("context", "target_fingerprint", "hub_id"))
    assert card.eyas == facts | unknown | {"max_length": MAX_LENGTH}
    assert health(client).json() == {"status": "ok", "requests": 0}


def test_worker_sleeps_when_idle(world, monkeypatch):
    looks = []
    monkeypatch.setattr(
        Engine, "has_work", property(lambda self: looks.append(None) or self._scheduler.has_work)
    )
    with world.served() as client:
        ask(client)
        for _ in range(100):  # the round that finds nothing to do comes late on a busy machine
            before = len(looks)
            time.sleep(0.2)
            if len(looks) == before:
                return
    pytest.fail("it looks for work all the time")


@pytest.mark.parametrize("rounds", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_cancels_the_request(world, stream, rounds):
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
        assert engine.is_empty.wait(300)
        assert health(client).json() == {"status": "ok", "requests": 0}
        assert ask(client, max_tokens=4).usage.completion_tokens == 4


def test_a_failed_engine_fails_all_requests(world, caplog):
    """The log has the error's type and places; its message may quote a request."""
    engine, said = world.engine(GatedEngine, max_batch=1), "the engine failed: RuntimeError"
    with world.served(engine) as client:
        engine.gate.release(2)
        begun = ask(client, stream=True)
        next(begun)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask, client)
            engine.error = RuntimeError("out of luck")
            engine.gate.release()
            with pytest.raises(openai.APIError, match=said):
                list(begun)
            with pytest.raises(openai.InternalServerError, match=said) as failed:
                waiting.result()
        assert failed.value.type == "server_error"
        with pytest.raises(openai.InternalServerError, match=said):
            ask(client)
        assert health(client).status_code == 503
        assert said in health(client).json()["error"]
    (record,) = [one for one in caplog.records if one.getMessage() == "the engine failed"]
    line = JsonFormatter().format(record)
    assert json.loads(line)["error"] == "RuntimeError"
    assert any(place.endswith(" _gated") for place in json.loads(line)["places"])
    assert "out of luck" not in line


# Another head


def test_swapping_heads_keeps_the_answers(world, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="eyas.serve")
    heads, keys = tmp_path / "heads", tmp_path / "keys"
    keys.write_text("a-key\n")
    for seed in (1, 2):
        head_folder(world.folder, heads / f"head-{seed}", seed=seed)
    head_folder(world.folder, heads / "small", draft_vocab_size=16)
    (heads / "broken").mkdir()
    (heads / "gone").symlink_to(tmp_path / "removed")
    engine = world.drafting(tmp_path / "head", "fixed(2,2,4)")
    limits = LimitsConfig(api_keys=keys, heads=heads)
    truth, _ = world.truth(max_tokens=150)

    def swap(name, key="a-key"):
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{url}/v1/head", json={"head": name}, headers=headers, timeout=300)

    with (
        world.served(engine, limits, has_head=True) as client,
        connected(client.url, "a-key") as asking,
        ThreadPoolExecutor(4) as pool,
    ):
        url, before = client.url, None
        streams = [pool.submit(ask, asking, max_tokens=150) for _ in range(4)]
        for number in range(8):
            name = f"head-{1 + number % 2}"
            reply = swap(name)
            assert (reply.status_code, reply.json()) == (200, {"head": name, "before": before})
            before = name
        for stream in streams:
            assert text_of(stream.result()) == truth
        (heads / "linked").mkdir()
        for path in (tmp_path / "head").iterdir():
            (heads / "linked" / path.name).symlink_to(path)
        for name, status, what in (
            ("../head", 404, "there is broken, head-1, head-2, linked, small"),
            ("linked", 400, "a link out of the folder of heads"),
            ("small", 400, "draft_vocab_size of the head is 16, of the served one 64: restart"),
            ("broken", 400, "broken"),
        ):
            reply = swap(name)
            assert (reply.status_code, reply.json()["error"]["param"]) == (status, "head")
            assert what in reply.json()["error"]["message"]
            assert str(tmp_path) not in reply.text
        assert swap("head-1", "another key").status_code == 401
        assert text_of(ask(asking, max_tokens=150)) == truth
        assert ask(asking).usage.eyas["accept_hist"]
    swapped = [one.data for one in caplog.records if one.getMessage() == "another head drafts"]
    assert [one["head"] for one in swapped] == ["head-1", "head-2"] * 4


def test_overwriting_a_swapped_heads_files(world, tmp_path):
    """`cp` cuts a mapped file short first: reading it then is SIGBUS."""
    head_folder(world.folder, tmp_path / "heads" / "a")
    copy_head(tmp_path / "heads", "a", str(tmp_path / "copy"))
    engine = world.drafting(tmp_path / "head", "fixed(2,2,4)")
    draft = engine.read_draft(tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy")
    for path in (tmp_path / "heads" / "a").iterdir():
        os.truncate(path, 0)
    assert engine.swap_draft(draft)
    request = Request("a", tuple(range(3, 20)), SamplingParams(max_tokens=20))
    (result,) = engine.run([request])
    assert len(result.token_ids) == 20


def test_signals_let_requests_finish(world):
    """The first ends the server, whichever it is; later ones are ignored."""
    command = [sys.executable, "-m", "eyas.serve", process_config(world).model_dump_json()]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process,
        ThreadPoolExecutor(1) as pool,
    ):
        url = process.stdout.readline().strip()
        with connected(url) as client:
            reply = ask(client, stream=True, max_tokens=150)
            text = next(reply).choices[0].delta.content
            waiting = pool.submit(ask, client)
            while health(client).json()["requests"] < 2 and not waiting.done():
                time.sleep(0.01)
            for one in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                process.send_signal(one)
                time.sleep(0.02)
            text += text_of(reply)
            assert text_of(waiting.result()) == world.truth(max_tokens=24)[0]
            process.send_signal(signal.SIGINT)
        _, printed = process.communicate()
    assert text == world.truth(max_tokens=150)[0]
    assert (process.returncode, "Traceback" in printed) == (0, False), printed
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_swapping_heads_needs_a_folder_and_keys(client, tmp_path):
    reply = httpx.post(f"{client.url}/v1/head", json={"head": "a"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "head_is_fixed")
    with pytest.raises(ConfigError, match="no API keys"):
        create_app(MODEL, LimitsConfig(heads=tmp_path))


def test_a_draining_server_finishes_what_runs(world):
    """Nothing new is taken; health and counters answer until the last word is sent."""
    engine = world.engine(GatedEngine)
    with closable(world.served(engine)) as (client, end, pool):
        url = client.url
        engine.gate.release()
        reply = ask(client, stream=True)
        text = next(reply).choices[0].delta.content
        leaving = end()
        while health(client).status_code == 200:
            time.sleep(0.01)
        assert health(client).json() == {"status": "draining", "requests": 1}
        page = pool.submit(httpx.get, f"{url}/metrics")
        while not page.done():  # the engine tells its counts between two steps
            engine.gate.release()
            time.sleep(0.05)
        assert page.result().status_code == 200
        with pytest.raises(openai.InternalServerError) as refused:
            ask(client)
        assert (refused.value.status_code, refused.value.code) == (503, "shutting_down")
        assert refused.value.response.headers["connection"] == "close"
        assert not leaving.done()
        engine.gate.release(100)
        text += text_of(reply)
        leaving.result()
    assert text == world.truth(max_tokens=24)[0]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_the_end_waits_for_a_regular_scraper(world, monkeypatch):
    with closable(world.served()) as (client, end, _):
        for seconds_ago in (600, 0):
            clock = lambda ago=seconds_ago: time.monotonic() - ago  # noqa: E731
            both = SimpleNamespace(monotonic=clock, perf_counter=time.perf_counter)
            monkeypatch.setattr(metrics, "time", both)
            httpx.get(f"{client.url}/metrics")
        ask(client, max_tokens=7)
        leaving = end()
        while health(client).status_code == 200:
            time.sleep(0.01)
        assert not leaving.done()
        page = httpx.get(f"{client.url}/metrics").text
        leaving.result(300)
    assert "eyas:generation_tokens_total" in page
    assert 'finished_reason="length",model_name="tiny"} 1.0' in page


def test_when_a_scrape_is_awaited(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    metrics = Metrics("m")
    exchange = SimpleNamespace(endpoint="/", completions=(), failure=None)
    for now in (0.0, 15.0):  # noqa: B007  the clock
        metrics.count(exchange, 200)
        assert not metrics.is_awaited
        metrics.page({}, 0)
    assert not metrics.is_awaited
    metrics.count(exchange, 200)
    assert metrics.is_awaited
    now = 15 + 1.5 * 15
    assert not metrics.is_awaited


def test_a_server_ends_with_its_parent(world):
    code = f"""
import time
from eyas.serve.server import ServeConfig, running_server
given = {process_config(world).model_dump_json()!r}
with running_server(ServeConfig.model_validate_json(given)) as url:
    print(url, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        url = parent.stdout.readline().strip()
        assert httpx.get(f"{url}/health").status_code == 200
        parent.kill()
    address = httpx.URL(url)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with socket.socket() as asking:
            if asking.connect_ex((address.host, address.port)) != 0:
                return
        time.sleep(0.1)
    pytest.fail("it runs on")


def test_requests_fail_after_shutdown_s(world):
    engine = world.engine(GatedEngine)
    with closable(world.served(engine, LimitsConfig(shutdown_s=0.3))) as (client, end, pool):
        engine.gate.release()
        begun = ask(client, stream=True, max_tokens=100)
        next(begun)
        whole = pool.submit(ask, client)
        wait_for_requests(client, lambda count: count >= 2)
        leaving = end()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(begun)
        with pytest.raises(openai.InternalServerError) as stopped:
            whole.result()
        assert (stopped.value.status_code, stopped.value.code) == (503, "shutting_down")
        engine.gate.release(100)
        leaving.result()


def test_a_server_that_ends_before_it_is_ready(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho a library says hello\nexit 2\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    config = ServeConfig(target="t", port=0)
    with pytest.raises(EyasError, match="exit code 2"), running_server(config):
        pytest.fail("it started")


def test_a_server_that_cannot_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["serve", ServeConfig(target=str(tmp_path / "none"), port=0).model_dump_json()]
    )
    monkeypatch.setattr("eyas.log.log_to_stderr", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("eyas.serve", run_name="__main__")
    assert ended.value.code == 2
    assert "no target folder" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_it_listens_and_ends_while_the_model_loads(monkeypatch, capsys, kind):
    """Vertex AI restarts a container that does not listen."""
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    seen = []

    def loading(config):
        url = f"http://127.0.0.1:{port}"
        seen.append(httpx.get(f"{url}/health"))
        seen.append(httpx.get(f"{url}/v1/models"))
        assert httpx.get(f"{url}/metrics").status_code == httpx.get(url).status_code == 200
        signal.raise_signal(kind)
        pytest.fail("it went on loading")

    monkeypatch.setattr("eyas.serve.server.load", loading)
    port = free_port()
    with pytest.raises(SystemExit) as ended:
        serve(ServeConfig(target="t", port=port))
    assert ended.value.code == 0
    # nothing interrupts the end of the process
    assert [signal.getsignal(one) for one in before] == [signal.SIG_IGN] * 2
    for one, handler in before.items():
        signal.signal(one, handler)
    assert [reply.status_code for reply in seen] == [503, 503]
    assert [int(reply.headers["retry-after"]) for reply in seen] == [5, 5]
    assert seen[0].json() == {"status": "loading"}
    assert seen[1].json()["error"]["code"] == "loading"
    assert capsys.readouterr().out == ""  # it was never ready


def test_a_signals_dropped_exception_still_ends_the_server(monkeypatch):
    class Dropped:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("eyas.serve.server.load", lambda config: Dropped())
    monkeypatch.setattr(UvicornServer, "open", lambda server, service: None)
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: None)
    ready = []
    with pytest.raises(SystemExit) as ended:
        serve(ServeConfig(target="t", port=0), on_ready=ready.append)
    assert (ended.value.code, len(ready)) == (0, 1)


@pytest.mark.parametrize(
    ("given", "warns"),
    [({}, False), ({"host": "0.0.0.0"}, True), ({"host": "0.0.0.0", "vertex": {}}, False)],
)
def test_an_open_server_warns(monkeypatch, caplog, given, warns):
    monkeypatch.setattr("eyas.serve.server.load", lambda config: None)
    monkeypatch.setattr(UvicornServer, "open", lambda server, service: None)

    def stop(url):
        raise KeyboardInterrupt

    for has_keys in (False, True):
        with pytest.raises(KeyboardInterrupt):
            serve(ServeConfig(target="t", port=0, **given), on_ready=stop)
        assert gc.get_freeze_count() == 0  # or libraries report what was not collected
        assert ("no API keys" in caplog.text) == (warns and not has_keys)
        caplog.clear()
        monkeypatch.setenv("EYAS_API_KEYS", "secret")


def test_the_file_of_keys_is_read_once(tmp_path, monkeypatch):
    keys = tmp_path / "keys"
    keys.write_text("a-key\n")
    reads = []
    read = limits._read_text
    monkeypatch.setattr(limits, "_read_text", lambda path: reads.append(path) or read(path))
    monkeypatch.setattr("eyas.serve.server.load", lambda config: None)
    monkeypatch.setattr(
        UvicornServer, "open", lambda server, service: setattr(server, "should_exit", True)
    )
    config = ServeConfig(target="t", host="0.0.0.0", port=0, limits=LimitsConfig(api_keys=keys))
    serve(config, on_ready=lambda url: None)
    assert reads.count(keys) == 1


def test_infinite_times_are_refused():
    with pytest.raises(ValidationError, match="finite"):
        LimitsConfig(shutdown_s=float("inf"))


@pytest.mark.parametrize("port", [-1, 65536, 80000])
def test_impossible_ports_are_refused(port):
    with pytest.raises(ValidationError, match=r"port\n  Input should be (less|greater) than"):
        ServeConfig(target="t", port=port)


def test_a_port_in_use_is_refused_first(client):
    port = int(client.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match="cannot listen"):
        serve(ServeConfig(target="not looked at", port=port))


def test_small_chunks_are_sent_at_once():
    """Else a stream's second chunk waits 40 ms (Nagle's algorithm)."""

    async def no_delay():
        seen: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def accept(_, writer):
            taken = writer.get_extra_info("socket")
            seen.set_result(taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with _bound("127.0.0.1", 0) as listener:
            async with await asyncio.start_server(accept, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname())
                writer.close()
                return await seen

    assert asyncio.run(no_delay()) != 0


def test_an_internal_error_in_a_stream(client, monkeypatch, caplog):
    pushes, original = [], CompletionWriter.chunk

    def push(self, update):
        pushes.append(update)
        if len(pushes) > 2:
            raise RuntimeError("quotes what somebody wrote")
        return original(self, update)

    monkeypatch.setattr(CompletionWriter, "chunk", push)
    with pytest.raises(openai.APIError, match="internal error: RuntimeError"):
        list(ask(client, stream=True, max_tokens=8))
    monkeypatch.undo()
    assert "quotes" not in caplog.text
    assert "internal error" in caplog.text
    assert ask(client, max_tokens=2).choices[0].finish_reason
