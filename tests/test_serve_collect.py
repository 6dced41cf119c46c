"""Consented prompts: kept cleaned, and nobody else's; what a crash leaves; and the way on, into
`eyas prompts`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import fsspec
import httpx
import pytest

from eyas.artifact import Artifact
from eyas.cli.options import read_run_file
from eyas.data.prompts import PromptsConfig, make_prompts
from eyas.errors import ConfigError, EyasError
from eyas.log import quiet
from eyas.serve.app import Extras
from eyas.serve.chat_request import ChatRequest
from eyas.serve.collection import EMPTY, FULL, KEPT, RUN_FILE, TOO_LONG, Collection, outcomes
from eyas.serve.consent import CollectConfig, Collector, prompt_rows
from eyas.serve.generate_request import GenerateRequest
from eyas.serve.text_request import TextRequest
from tests.serving import MODEL, World, ask, complete, post

MAIL = "ada.berg@lovelace-mail.org"
YES = {"x-eyas-consent": "yes"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World.make(tmp_path_factory.mktemp("target"))


def upper(texts):
    """A cleaner for tests: capitals, and one word that drops."""
    return (
        "API_KEY" if any("secret" in text for text in texts) else [text.upper() for text in texts]
    )


def collection(folder, **config):
    return Collection(CollectConfig(folder=folder, licence="CC-BY-4.0", **config), upper)


def rows(folder):
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


# The folder


def test_only_what_is_cleaned_is_written(tmp_path):
    kept = collection(tmp_path / "new" / "folder")
    chat = {"messages": [["system", "be kind"], ["user", "hello"], ["user", "again"]]}
    lines = [
        json.dumps(row)
        for row in (
            chat,
            {"prompt": "a secret"},
            {"prompt": " "},
            {"prompt": "x" * 300_000},
            {"prompt": "é"},
        )
    ]
    assert list(outcomes(kept, iter(lines))) == [KEPT, "pii.api_key", EMPTY, TOO_LONG, KEPT]
    turns = [
        {"role": "system", "content": "BE KIND"},
        {"role": "user", "content": "HELLO"},
        {"role": "user", "content": "AGAIN"},
    ]
    assert rows(tmp_path / "new" / "folder") == [{"messages": turns}, {"prompt": "É"}]
    (part,) = (tmp_path / "new" / "folder").glob("*.jsonl")
    assert part.stat().st_mode & 0o077 == 0


def test_a_cleaner_that_fails_costs_its_prompt_and_quotes_nothing(tmp_path):
    def fails(texts):
        raise ValueError(f"cannot read {texts}")

    kept = Collection(CollectConfig(folder=tmp_path, licence="MIT"), fails)
    assert list(outcomes(kept, iter(['{"prompt": "mine"}', "no json"]))) == [
        "failed.ValueError",
        "failed.JSONDecodeError",
    ]
    assert rows(tmp_path) == []


def test_the_folder_is_bounded_and_parts_are(tmp_path, monkeypatch):
    monkeypatch.setattr("eyas.serve.collection.PART_BYTES", 100)
    kept = collection(tmp_path, max_bytes=450)
    told = [kept.add({"prompt": "x" * 20}) for _ in range(20)]
    assert told == sorted(told, reverse=True)  # kept, then full
    assert told.count(FULL) > 5
    parts = sorted(tmp_path.glob("*.jsonl"))
    assert [path.name for path in parts] == [
        f"prompts-{number:05d}.jsonl" for number in range(len(parts))
    ]
    assert all(path.stat().st_size <= 100 for path in parts)
    assert len(parts) > 2
    del kept
    assert collection(tmp_path, max_bytes=450).add({"prompt": "x" * 20}) == FULL
    assert collection(tmp_path, max_bytes=900).add({"prompt": "x" * 20}) == KEPT


def test_a_line_that_a_crash_has_cut_is_taken_off(tmp_path):
    collection(tmp_path).add({"prompt": "one"})
    with open(tmp_path / "prompts-00000.jsonl", "ab") as stream:
        stream.write(b'{"prompt": "tw')
    kept = collection(tmp_path)
    kept.add({"prompt": "three"})
    assert rows(tmp_path) == [{"prompt": "ONE"}, {"prompt": "THREE"}]


def test_half_a_line_that_a_full_disk_took_is_taken_off_at_once(tmp_path, monkeypatch):
    kept = collection(tmp_path)
    kept.add({"prompt": "one"})
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, line: write(descriptor, line[:5]))
        assert list(outcomes(kept, iter(['{"prompt": "two"}']))) == ["failed.OSError"]
    kept.add({"prompt": "three"})
    assert rows(tmp_path) == [{"prompt": "ONE"}, {"prompt": "THREE"}]


def test_what_was_kept_under_one_licence_is_not_told_under_another(tmp_path):
    collection(tmp_path)
    # nothing was kept yet
    Collection(CollectConfig(folder=tmp_path, licence="MIT"), upper).add({"prompt": "one"})
    with pytest.raises(ConfigError, match="other terms"):
        collection(tmp_path)
    Collection(CollectConfig(folder=tmp_path, licence="MIT"), upper)


def test_a_folder_whose_name_looks_like_a_pattern(tmp_path):
    collection(tmp_path / "a[b]*").add({"prompt": "one"})
    (source,) = read_run_file(tmp_path / "a[b]*" / RUN_FILE)["prompts"]["sources"]
    assert len(fsspec.filesystem("file").glob(source["path"])) == 1


def test_a_folder_is_one_server_s(tmp_path, monkeypatch):
    monkeypatch.setattr("eyas.serve.collection.LAST_WORDS_S", 0.2)
    kept = collection(tmp_path)
    with pytest.raises(ConfigError, match="another server collects"):
        collection(tmp_path)
    del kept
    assert collection(tmp_path).add({"prompt": "one"}) == KEPT


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot collect"):
        collection(tmp_path / "file" / "folder")


# What there is to keep


def test_nothing_that_an_assistant_or_a_tool_said_is_handed_over():
    turns = [("developer", "d"), ("user", "u"), ("assistant", "a"), ("tool", "t"), ("user", "v")]
    asked = ChatRequest(
        model="m", messages=[{"role": role, "content": text} for role, text in turns]
    )
    assert prompt_rows(asked) == [{"messages": [["system", "d"], ["user", "u"], ["user", "v"]]}]
    assert prompt_rows(TextRequest(model="m", prompt=["a", [5], "b"])) == [
        {"prompt": "a"},
        {"prompt": "b"},
    ]
    assert prompt_rows(GenerateRequest(text=["a", "b"])) == [{"prompt": "a"}, {"prompt": "b"}]
    assert prompt_rows(GenerateRequest(input_ids=[5])) == []


# A server


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setenv("EYAS_PRIVACY_KEY", "a key for tests only")


def wait_for(client, count):
    """The outcomes that the server tells, once there are so many."""
    for _ in range(600):
        page = httpx.get(f"{client.url}/metrics").text
        lines = [
            line for line in page.splitlines() if line.startswith("eyas:collected_prompts_total")
        ]
        found = {
            line.split('outcome="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1])
            for line in lines
        }
        if sum(found.values()) >= count:
            return found
        time.sleep(0.05)
    raise TimeoutError(found)


def test_from_a_request_to_the_next_head_s_prompts(world, tmp_path, key):
    """serve -> collect -> eyas prompts: only who consented, and no personal data on the way."""
    folder = tmp_path / "collected"
    extras = Extras(collect=CollectConfig(folder=folder))
    with world.served(extras=extras) as client:
        said = f"I am Ada Berg, write to {MAIL} about a table for two at seven, by the window."
        for text, how in (
            (said, {"extra_headers": YES}),
            (
                "Where can I find a quiet place to read a book near the old harbour?",
                {"store": True},
            ),
            ("Not this one, nobody asked me whether it may be kept.", {}),
            (
                "Nor this one, since its field says no to what the header says.",
                {"extra_headers": YES, "store": False},
            ),
            (
                "And my card is 4111 1111 1111 1111, so please forget it again.",
                {"extra_headers": YES},
            ),
        ):
            ask(client, [{"role": "user", "content": text}], max_tokens=2, **how)
        complete(
            client,
            "The best way to cook rice without burning the pot is",
            max_tokens=2,
            extra_headers=YES,
        )
        assert post(client, {"model": MODEL, "messages": []}, headers=YES).status_code == 400
        told = wait_for(client, 4)
    assert told == {KEPT: 3, "pii.credit_card": 1}
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for private in (MAIL, "Ada Berg", "4111", "nobody asked me", "says no"):
        assert private.encode() not in everything
    assert b"a table for two at seven" in everything
    config = PromptsConfig(**read_run_file(folder / RUN_FILE)["prompts"])
    (source,) = config.sources
    assert (source.licence, source.prompts_by, source.label) == (
        "LicenseRef-own",
        "human",
        "collected",
    )
    made = Artifact(str(tmp_path / "prompts"))
    manifest = make_prompts(config, made, quiet)
    assert manifest.counts["rows"] == 3
    assert manifest.counts["prompts"] == 3
    texts = [json.dumps(row) for row in made.read_rows("prompts")]
    assert any("quiet place to read" in text for text in texts)
    assert not any(MAIL in text for text in texts)


def test_a_server_that_keeps_nothing_refuses_a_demand_and_makes_no_use_of_a_leave(world):
    with world.served() as client:
        assert (
            ask(client, max_tokens=2, extra_headers=YES, store=False).usage.completion_tokens == 2
        )
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        refused = post(client, {**body, "store": True}).json()["error"]
        assert (refused["param"], refused["code"]) == ("store", "unsupported_parameter")
        assert post(client, body, headers={"x-eyas-consent": "maybe"}).status_code == 400
        assert post(client, body, headers={"x-eyas-tag": "no spaces"}).status_code == 400


def test_a_server_goes_on_where_the_process_that_keeps_prompts_is_gone(tmp_path, key, caplog):
    async def lived() -> dict[str, int]:
        collector = Collector(CollectConfig(folder=tmp_path), MODEL)
        asked = TextRequest(model=MODEL, prompt="How many apples are three apples and a pear?")
        await collector.start()
        collector.keep(asked)
        while not collector.outcomes[KEPT]:
            await asyncio.sleep(0.01)
        collector._process.kill()
        await collector._process.wait()
        collector.keep(asked)
        await collector.stop()
        return dict(collector.outcomes)

    assert asyncio.run(lived()) == {KEPT: 1, "gone": 1}


COMMAND = (sys.executable, "-m", "eyas.serve.collection")


def test_a_process_that_is_killed_leaves_whole_lines_and_ends_with_its_server(tmp_path, key):
    config = CollectConfig(folder=tmp_path, licence="MIT").model_dump_json()
    with subprocess.Popen(
        [*COMMAND, config], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        for number in range(200):
            process.stdin.write(
                json.dumps({"prompt": f"How many apples are {number} apples and a pear?"}) + "\n"
            )
        process.stdin.flush()
        for _ in range(5):
            assert process.stdout.readline() == f"{KEPT}\n"
        os.kill(process.pid, signal.SIGKILL)
    assert len(rows(tmp_path)) >= 5
    with subprocess.Popen(
        [*COMMAND, config], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.stdin.close()  # what a server's end does, however it ends
        assert process.wait(60) == 0


def test_a_process_that_cannot_start_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("EYAS_PRIVACY_KEY", "short")
    done = subprocess.run(
        [*COMMAND, CollectConfig(folder=tmp_path, licence="MIT").model_dump_json()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "EYAS_PRIVACY_KEY" in done.stderr
    assert "Traceback" not in done.stderr


# uvicorn exits its thread
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_does_not_start_where_prompts_cannot_be_collected(world, tmp_path, monkeypatch):
    monkeypatch.setenv("EYAS_PRIVACY_KEY", "short")
    with (
        pytest.raises(EyasError, match="did not start"),
        world.served(extras=Extras(collect=CollectConfig(folder=tmp_path))),
    ):
        pass
