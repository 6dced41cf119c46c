"""Answers by servers: the engine's own rows, whatever befalls the servers."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import _base_client

from eyas.artifact import VERSION, Artifact
from eyas.chat import Chat
from eyas.errors import ConfigError, EyasError, MismatchError, MissingInputError, TemplateError
from eyas.features import fleet
from eyas.features import generate as stage
from eyas.features.backends import TargetProof, TargetServer
from eyas.features.fleet import ClientConfig, server_urls
from eyas.features.generate import GenerateConfig, generate
from eyas.model.weights import fingerprint
from eyas.records import Prompt, read_answers, read_origins
from eyas.serve.limits import KEYS_VARIABLE
from eyas.serve.server import ServeConfig
from tests.faulty_server import FAULTS, faulty
from tests.object_stores import free_port
from tests.serving import World
from tests.stages import contents, patched, prompts_of, talking_target, write_prompts
from tests.tiny import TEMPLATE, tiny_target, tiny_tokenizer

PROMPTS = prompts_of(23)
MIX = [{"share": 0.5}, {"share": 0.5, "temperature": 1.0, "top_p": 0.9}]
CLIENT = {"concurrency": 4, "timeout_s": 300}


# several parts of few prompts, and servers that are given up soon
small_parts = patched(
    (stage, "ROWS_PER_PART", 4),
    (fleet, "PATIENCE_S", 20),
    (_base_client, "INITIAL_RETRY_DELAY", 0.05),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return talking_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Artifact:
    return write_prompts(tmp_path_factory.mktemp("all") / "prompts", PROMPTS)


@pytest.fixture(scope="module")
def url(target) -> Iterator[str]:
    with World(target).served() as client:
        yield client.url


def config_of(target: Path, *urls: str, **settings: Any) -> GenerateConfig:
    client = {**CLIENT, **settings.pop("client", {})}
    sizes = {"max_tokens": 12, "max_length": 200, "sampling": MIX}
    return GenerateConfig(
        **{"target": str(target), **sizes, **settings, "servers": urls, "client": client}
    )


@pytest.fixture
def output(tmp_path) -> Artifact:
    return Artifact(str(tmp_path / "answers"))


@pytest.fixture(scope="module")
def answered(target, prompts, tmp_path_factory) -> Artifact:
    output = Artifact(str(tmp_path_factory.mktemp("answered") / "answers"))
    generate(config_of(target, max_batch=5), prompts, output)
    return output


def is_probe(asked: dict[str, Any]) -> bool:
    return asked["max_tokens"] == 1


def but_probes(fault: str) -> Any:
    return lambda asked: None if is_probe(asked) else fault


def of_prompts(faults: dict[int, str]) -> Any:
    """These faults for the first turns of the prompts of these numbers."""
    by_text = {PROMPTS[number].turns[0]: fault for number, fault in faults.items()}
    return lambda asked: by_text.get(asked["messages"][-1]["content"])


@pytest.fixture
def through(target, prompts, url, output):
    """Answers all prompts by a server that does what `choose` says; the manifest and the server."""

    def run(choose, **settings):
        with faulty(url, choose) as server:
            return generate(config_of(target, server.url, **settings), prompts, output), server

    return run


# Well


@pytest.mark.parametrize("send", ["messages", "tokens"])
def test_servers_give_the_engines_rows(target, prompts, answered, url, send, output):
    with World(target).served() as other:
        config = config_of(target, url, f"{other.url}/v1/", client={"send": send})
        manifest = generate(config, prompts, output)
        assert contents(output) == contents(answered), "sampled rows too: a row's seed is its own"
        assert manifest.counts == answered.manifest().counts
        assert manifest.identity != answered.manifest().identity
        origins = list(read_origins(output))
        assert {one.server for one in origins} == {url, other.url}
    assert {one.engine for one in origins} == {f"eyas {VERSION}"}
    told = manifest.facts["servers"]
    assert [one["url"] for one in told] == [url, other.url]
    assert {(one["reason"], one["failures"], one["model"]) for one in told} == {("", 0, "tiny")}
    assert sum(one["answers"] for one in told) == manifest.counts["answers"]
    assert "client" not in manifest.config
    again = Artifact(output.url)
    generate(config_of(target, "http://127.0.0.1:9", client={"send": send}), prompts, again)
    assert again.was_done, "who answered is no part of what was done"


def test_no_server_is_asked_for_more_than_it_may(through):
    running, most, lock = [0], [0], threading.Lock()

    def choose(asked):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.02 if most[0] > 2 else 0.5)  # on a busy machine requests come slowly
        with lock:
            running[0] -= 1

    through(choose, client={"concurrency": 3})
    assert most[0] == 3


# Ill


@pytest.mark.parametrize(
    ("faults", "every", "timeout_s"),
    [(FAULTS, 3, 60), (["hang"], 1, 4), (["busy long"] * 6, 1, 60)],
    ids=["every third", "an answer that never comes", "Retry-After: 300"],
)
def test_what_goes_wrong_changes_no_row(
    through, answered, output, monkeypatch, faults, every, timeout_s
):
    if "busy long" in faults:  # busy is alive
        monkeypatch.setattr(fleet, "PATIENCE_S", 0.1)
        monkeypatch.setattr(fleet, "LONGEST_PAUSE_S", 0.3)
    count, left = itertools.count(1), list(faults)

    def choose(asked):
        return left.pop() if left and not is_probe(asked) and next(count) % every == 0 else None

    manifest, _ = through(choose, client={"timeout_s": timeout_s})
    assert not left
    assert contents(output) == contents(answered)
    (told,) = manifest.facts["servers"]
    assert told["reason"] == ""
    assert told["failures"] >= 2 or faults != FAULTS, "garbage and an empty answer are ours"


FAILED = "server_failed", "2 failures; the last: does not answer within 3 s"


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        (
            {4: "500", 9: "400", 3: "other tokens"},
            {  # of an error its code, and none of its text
                "p4": ("server_failed", "5 failures; the last: answers HTTP 500"),
                "p9": ("server_refused", "{} answers HTTP 400 (no_such_thing)"),
                "p3": ("server_saw_other_tokens", "{} saw "),
            },
        ),
        ({4: "hang", 9: "trickle"}, {"p4": FAILED, "p9": FAILED}),
    ],
    ids=["wrong", "never"],
)
def test_a_request_that_breaks_servers_is_given_up_and_counted(
    through, answered, output, monkeypatch, faults, expected
):
    """A server that passes its checks is alive, however long nothing else was answered."""
    timeout_s = 300
    if "hang" in faults.values():
        timeout_s = 3
        quick = {"PATIENCE_S": 0.1, "MOST_FAILURES": 2, "CLIENT_RETRIES": 0, "PAUSES_S": 0}
        for name, value in quick.items():
            monkeypatch.setattr(fleet, name, value)
    manifest, server = through(of_prompts(faults), client={"timeout_s": timeout_s})
    dropped = [row for row in output.read_rows("dropped") if row["reason"].startswith("server_")]
    assert {row["prompt_id"] for row in dropped} == set(expected)
    for row in dropped:
        reason, detail = expected[row["prompt_id"]]
        assert (row["reason"], row["detail"][: len(detail.format(server.url))]) == (
            reason,
            detail.format(server.url),
        )
        assert "bob" not in row["detail"]
        assert manifest.counts[f"dropped_{reason}"] > 0
    rest = [row for row in read_answers(answered) if row.prompt_id not in expected]
    assert list(read_answers(output)) == rest


# Dead


@contextlib.contextmanager
def server_process(target: Path, port: int = 0) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    engine = {"max_batch": 4, "max_length": 256}
    config = ServeConfig(target=str(target), model="tiny", port=port, engine=engine)
    command = [sys.executable, "-m", "eyas.serve", config.model_dump_json()]
    pipes = {"stdout": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            yield next(line.strip() for line in process.stdout if line.startswith("http")), process
        finally:
            process.kill()


def test_a_server_that_is_killed_loses_nothing_and_is_asked_again_when_it_is_back(
    target, prompts, answered, url, output
):
    port, told = free_port(), []
    with (
        server_process(target, port) as (mortal, process),
        faulty(url, lambda asked: time.sleep(0.2)) as slow,
    ):
        (card,) = httpx.get(f"{mortal}/v1/models").json()["data"]
        assert card["eyas"]["target_fingerprint"] == fingerprint(target)

        def track(done, total=None, note=""):
            told.append(note)
            if done >= 5 and process.poll() is None:
                process.kill()

        manifest = generate(config_of(target, mortal, slow.url), prompts, output, track)
    assert process.returncode == -signal.SIGKILL
    assert contents(output) == contents(answered)
    dead = manifest.facts["servers"][0]
    assert dead["reason"].startswith(("breaks the connection", "takes no connection"))
    assert dead["answers"] > 0
    assert any("1 of 2 servers" in note and f"{mortal} " in note for note in told)


def test_a_server_that_comes_back_is_asked_again(through):
    until = [0.0]

    def choose(asked):
        is_seventh = asked["messages"][-1]["content"] == PROMPTS[6].turns[0]
        if not until[0] and not is_probe(asked) and is_seventh:
            until[0] = time.monotonic() + 1
        return "reset" if time.monotonic() < until[0] else None

    manifest, server = through(choose)
    assert manifest.counts["prompts"] == len(PROMPTS)
    assert not [name for name in manifest.counts if name.startswith("dropped_server")]
    assert sum(map(is_probe, server.asked)) > 3, "it is looked at before it is asked"


def test_without_a_server_left_all_is_kept_and_goes_on_later(
    target, prompts, answered, url, monkeypatch, output
):
    monkeypatch.setattr("eyas.features.fleet.PATIENCE_S", 1)
    is_dead = threading.Event()
    with faulty(url, lambda asked: "reset" if is_dead.is_set() else None) as first:
        mortal = first.url

        def track(done, total=None, note=""):
            if done >= 9:
                is_dead.set()

        with pytest.raises(EyasError, match=r"no server answers: .*breaks the connection") as error:
            generate(config_of(target, mortal), prompts, output, track)
    assert "run the same command again" in error.value.hint
    assert not output.is_done()
    with faulty(url, lambda asked: None) as server:
        generate(config_of(target, server.url), prompts, output)
        assert contents(output) == contents(answered)
        num_answers = sum(1 for _ in read_answers(answered))
        asked = [one for one in server.asked if not is_probe(one)]
        assert len(asked) <= num_answers - 9, "what was answered is not asked again"
        kept = [one for one in read_origins(output) if one.server == mortal]
        assert len(kept) == num_answers - len(asked)


def test_a_server_that_leaves_out_end_tokens_stops_the_run(through, answered, output):
    """Most probes, of one token, do not show it."""
    with pytest.raises(MismatchError, match="leaves out the token that ended an answer"):
        through(but_probes("trimmed"))
    through(lambda asked: None)
    assert contents(output) == contents(answered)


# Strange


def test_a_server_of_something_else_is_refused_before_it_is_asked(target, url, tmp_path):
    def refused(config, match, error=MismatchError):
        with pytest.raises(error, match=match):
            stage.open_backend(config, Chat(target), str(target), config.max_length)

    other = tiny_target(tmp_path / "other")
    tiny_tokenizer(other, chat_template="{{ bos_token }}" + TEMPLATE.replace("\n", "\n\n"))
    with World(other).served() as client:
        saw = "saw .* prompt tokens where the target's template gives"
        refused(config_of(target, url, client.url), saw)
    card = {"id": "tiny", "owned_by": "eyas", "eyas": {"target_fingerprint": "0123"}}
    several = [{"id": "tiny"}, {"id": "other"}]
    for cards, match in (
        ([card], "serves another target .0123, not "),
        (several, "serves 2 models .tiny, other.: name one"),
    ):
        page = json.dumps({"data": cards}).encode()
        with faulty(url, lambda asked: None, {"/v1/models": page}) as server:
            refused(config_of(target, server.url), match)
    refused(config_of(target, url, client={"model": "llama"}), "does not serve llama, only tiny")
    with World(target).served(World(target).engine(max_length=100)) as client:
        short = "holds 100 tokens a request, fewer than max_length 200"
        refused(config_of(target, client.url), short)
    for fault, match, error in (
        ("no ids", "gives no token ids: it has to know", MismatchError),
        ("other tokens", "gives .*, or others, when asked for one token", MismatchError),
        ("redirect", "HTTP 307", MismatchError),
        ("400", "HTTP 400 .no_such_thing., when asked for one token", MismatchError),
        ("garbage", "no server answers: .*no JSON", MissingInputError),
    ):
        with faulty(url, lambda asked, fault=fault: fault) as server:
            refused(config_of(target, server.url), match, error)
    nobody = "no server answers: .*(takes no|breaks the) connection"
    refused(config_of(target, f"http://127.0.0.1:{free_port()}"), nobody, MissingInputError)


def test_addresses_and_keys(target, monkeypatch):
    for urls, match in (
        (["10.0.0.5:8000"], "is not the address of a server: it has no scheme"),
        (["http://[::1"], "is not the address of a server"),
        (["http://a:99999"], "is not the address of a server"),
        (["ftp://a"], "is not the address of a server"),
        (["http://me:secret@a:1"], "the address of a holds a password"),
        (["http://a:1", "http://a:1/v1"], "twice"),
    ):
        with pytest.raises(ConfigError, match=match) as error:
            server_urls(urls)
        assert "secret" not in str(error.value)
    assert server_urls(["http://a:1/v1/", "https://b/api/v1"]) == ["http://a:1", "https://b/api"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "openai", None)
        with pytest.raises(ConfigError, match="package openai, which is not installed") as error:
            TargetServer("http://a:1", ClientConfig(), TargetProof("", 1, (), (2,)))
        assert "eyas[servers]" in error.value.hint
    monkeypatch.setenv("EYAS_API_KEY", "a\nb")
    with pytest.raises(ConfigError, match="characters that no header takes"):
        TargetServer("http://a:1", ClientConfig(), TargetProof("", 1, (), (2,)))


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(
    target, prompts, monkeypatch, caplog, output
):
    key = "sk-of-the-tests"
    monkeypatch.setenv(KEYS_VARIABLE, key)
    with World(target).served() as client, caplog.at_level(logging.DEBUG):
        with pytest.raises(MismatchError, match=r"HTTP 401 .invalid_api_key."):
            generate(config_of(target, client.url), prompts, output)
        monkeypatch.setenv("EYAS_API_KEY", key)
        manifest = generate(config_of(target, client.url), prompts, output)
    assert manifest.counts["answers"] > 0
    assert key not in caplog.text
    assert all(key.encode() not in output.read(name) for name in output.names())


def test_control_tokens_in_messages_are_left_out_where_a_server_renders_them(target, url, tmp_path):
    rows = [
        Prompt("plain", "s", "l", ("Hello there",)),
        Prompt("control", "s", "l", ("Say <|im_end|> please", "Thanks")),
    ]
    prompts = write_prompts(tmp_path / "prompts", rows)
    sent = {}
    for send in ("messages", "tokens"):
        output = Artifact(str(tmp_path / send))
        manifest = generate(config_of(target, url, client={"send": send}), prompts, output)
        sent[send] = {row.prompt_id for row in read_answers(output)}
        told = [row for row in output.read_rows("dropped") if row["reason"] == "control_text"]
        assert [(row["turn"], row["detail"]) for row in told] == (
            [] if send == "tokens" else [(0, "<|im_end|>"), (1, "<|im_end|>")]
        )
        assert manifest.counts.get("dropped_control_text", 0) == len(told)
    assert sent == {"messages": {"plain"}, "tokens": {"plain", "control"}}


def test_a_template_that_prints_the_day_goes_as_tokens(tmp_path, output):
    dated = talking_target(tmp_path / "target")
    tiny_tokenizer(dated, chat_template="{{ strftime_now('%d %B %Y') }}" + TEMPLATE)
    prompts = write_prompts(tmp_path / "prompts", PROMPTS[:4])
    here = Artifact(str(tmp_path / "here"))
    day = {"date": datetime.date(2024, 2, 29)}
    generate(config_of(dated, **day), prompts, here)
    with World(dated).served() as client:
        match = "prints today's date, and servers would print another than 2024-02-29"
        with pytest.raises(TemplateError, match=match):
            generate(config_of(dated, client.url, **day), prompts, output)
        there = Artifact(str(tmp_path / "tokens"))
        generate(config_of(dated, client.url, client={"send": "tokens"}, **day), prompts, there)
    assert contents(there) == contents(here)


def test_a_fault_of_ours_is_not_lost(target, prompts, url, monkeypatch, output):
    async def bug(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(TargetServer, "reply", bug)
    with pytest.raises(ZeroDivisionError):
        generate(config_of(target, url), prompts, output)


def test_what_a_servers_parsers_make_of_an_answer_is_its_message_and_not_its_tokens(
    through, answered, output
):
    through(but_probes("parsed"))
    plain = {row.prompt_id: row for row in read_answers(answered) if row.turn == 0}
    for row in read_answers(output):
        assert row.messages[-1]["reasoning_content"] == "Hm."
        assert row.turn or row.answer_ids == plain[row.prompt_id].answer_ids


def test_half_a_character_in_a_servers_answer_ends_no_run(through, output):
    """Nor do calls, which end their conversation."""
    manifest, _ = through(but_probes("halved"))
    rows = list(read_answers(output))
    assert len(rows) == len(PROMPTS)
    assert manifest.counts["dropped_earlier_turn_called"] > 0
    for row in rows:
        assert row.messages[-1]["content"] == "So \ufffd"
        assert row.messages[-1]["tool_calls"][0]["function"]["arguments"] == "\ufffd"


def stated(url: str, **precision: str) -> Any:
    """A server that states how it computes, as SGLang does, in front of our engine."""
    card = {"data": [{"id": "tiny", "owned_by": "sglang"}]}
    told = {"version": "0.5.5", **precision}
    pages = {"/v1/models": card, "/get_server_info": told}
    return faulty(url, lambda asked: None, {k: json.dumps(v).encode() for k, v in pages.items()})


def test_servers_that_state_another_precision_are_no_one_target(target, prompts, url, output):
    with (
        stated(url, dtype="bfloat16") as one,
        stated(url, dtype="float16") as other,
        stated(url) as silent,
    ):
        with pytest.raises(MismatchError, match=r"bfloat16.* float16|float16.* bfloat16"):
            generate(config_of(target, one.url, other.url), prompts, output)
        assert not output.names(), "the folder is free"
        # cut after its first part, and gone on with by another server
        for begun in (one, other):
            raised = pytest.raises(MismatchError, match="parts so far")
            with raised if begun is other else pytest.raises(KeyboardInterrupt):
                generate(config_of(target, begun.url), prompts, output, interrupt)
        manifest = generate(config_of(target, one.url, silent.url), prompts, output)
    told = {server["url"]: server["precision"] for server in manifest.facts["servers"]}
    assert told == {one.url: {"dtype": "bfloat16"}, silent.url: "not stated"}


def interrupt(done: int, *_: Any) -> None:
    if done:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("name", "path", "told", "engine"),
    [
        ("vllm", "/version", {"version": "0.11.2"}, "vllm 0.11.2"),
        ("sglang", "/get_server_info", {"version": "0.5.5", "model_path": "x"}, "sglang 0.5.5"),
        ("someone", "/none", {}, "someone"),
    ],
)
def test_other_engines_tell_their_version(url, name, path, told, engine):
    card = {"data": [{"id": "tiny", "owned_by": name}]}
    pages = {"/v1/models": json.dumps(card).encode(), path: json.dumps(told).encode()}

    async def described(url):
        one = TargetServer(url, ClientConfig(), TargetProof("", 1, (), (2,)))
        await one.describe()
        await one.close()
        return one.engine

    with faulty(url, lambda asked: None, pages) as server:
        assert asyncio.run(described(server.url)) == engine
