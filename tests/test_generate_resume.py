"""Whatever kills `generate`, the rows are those of a whole run, and nothing is asked twice."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest

from eyas.artifact import WORK, Artifact
from eyas.errors import MismatchError, MissingInputError, StorageFullError
from eyas.features import answers as on_disk
from eyas.features import backends
from eyas.features import generate as stage
from eyas.features.answers import AnswerParts, JournalEntry
from eyas.features.backends import EngineBackend
from eyas.features.generate import GenerateConfig, generate
from eyas.records import Answer, Origin, read_answers, read_origins
from tests.stages import (
    contents,
    ended,
    in_a_process,
    patched,
    prompts_of,
    talking_target,
    write_prompts,
)

PROMPTS = prompts_of(60)


small_parts = patched((stage, "ROWS_PER_PART", 7))


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return talking_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Artifact:
    return write_prompts(tmp_path_factory.mktemp("all") / "prompts", PROMPTS)


@pytest.fixture(scope="module")
def config(target) -> GenerateConfig:
    mix = [{"share": 0.7}, {"share": 0.3, "temperature": 1.0}]
    return GenerateConfig(target=str(target), max_tokens=12, max_batch=5, sampling=mix)


@pytest.fixture(scope="module")
def whole(config, prompts, tmp_path_factory) -> tuple[Artifact, float]:
    output = Artifact(str(tmp_path_factory.mktemp("whole") / "answers"))
    started = time.monotonic()
    generate(config, prompts, output)
    return output, time.monotonic() - started


def is_running(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def kept_turns(folder: Path) -> set[tuple[str, int]]:
    """The answers on disk with those before them, read without the code that wrote them."""
    rows = [
        json.loads(line)
        for path in folder.glob("answers-*.jsonl")
        for line in path.read_bytes().splitlines()
    ]
    for path in (folder / WORK).glob("*/*.json"):
        rows.append(json.loads(path.read_bytes())["answer"])
    found = {(row["prompt_id"], row["turn"]) for row in rows if row is not None}
    # several threads write: a turn without those before it is asked for again
    return {(name, turn) for name, turn in found if {(name, t) for t in range(turn)} <= found}


@pytest.fixture
def asked(monkeypatch, tmp_path) -> Path:
    """A file to which every process adds the ids that it asks for."""
    log, add = tmp_path / "asked", EngineBackend.add

    def add_and_tell(self, request):
        with log.open("a") as file:
            file.write(request.id + "\n")
        add(self, request)

    monkeypatch.setattr(EngineBackend, "add", add_and_tell)
    return log


def asked_for(log: Path) -> set[tuple[str, int]]:
    """What was asked for since the last call."""
    ids = [line.rsplit("/", 2) for line in log.read_text().splitlines()] if log.exists() else []
    log.unlink(missing_ok=True)
    assert len({*map(tuple, ids)}) == len(ids), "nothing is asked twice in one process"
    return {(name, int(turn)) for name, _, turn in ids}


def test_killed_at_any_moment(config, prompts, whole, asked, tmp_path):
    uninterrupted, seconds = whole
    output, rng = tmp_path / "answers", random.Random(0)
    num_killed, num_kept = 0, 0
    while True:
        kept = kept_turns(output)
        num_kept = max(num_kept, len(kept))
        pid = in_a_process(lambda: generate(config, prompts, Artifact(str(output))))
        if num_killed < 7:
            # the first one has something to lose
            while num_killed == 0 and not kept_turns(output) and is_running(pid):
                time.sleep(0.005)
            time.sleep(rng.uniform(0.1, 0.6) * seconds * (num_killed > 0))
            os.kill(pid, signal.SIGKILL)
        code = ended(pid)
        assert not kept & asked_for(asked), "what was kept is not asked for again"
        assert kept <= kept_turns(output), "nothing is lost"
        if code == 0:
            break
        assert code == -signal.SIGKILL
        num_killed += 1
    assert num_killed > 0
    assert num_kept > 0
    assert contents(Artifact(str(output))) == contents(uninterrupted)
    assert Artifact(str(output)).manifest().counts == uninterrupted.manifest().counts
    assert Artifact(str(output)).manifest().identity == uninterrupted.manifest().identity
    assert not (output / WORK).exists()


@pytest.mark.parametrize("when", ["before", "torn", "after", "part", "work"])
def test_killed_at_the_worst_moment(when, config, prompts, whole, asked, tmp_path, monkeypatch):
    """Before and after an answer's file, half-way through it, before a part's last file, and before
    its journal is deleted.
    """
    output, write, write_jsonl = tmp_path / "answers", Artifact.write, Artifact.write_jsonl
    count = [0]

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def keep_or_die(self, name, data):
        count[0] += name.startswith(WORK)
        is_time = name.startswith(WORK) and count[0] >= 11 and when not in ("part", "work")
        if is_time and when == "before":
            die()
        if is_time and when == "torn":
            half = output / f"{name}.partial-{os.getpid()}"
            half.parent.mkdir(parents=True, exist_ok=True)
            half.write_bytes(data[: len(data) // 2])
            die()
        write(self, name, data)
        if is_time:
            die()

    def write_or_die(self, name, rows):
        if when == "part" and name == "answers-00002.jsonl":
            die()
        write_jsonl(self, name, rows)
        if when == "work" and name == "answers-00002.jsonl":
            die()

    with monkeypatch.context() as patch:
        patch.setattr(Artifact, "write", keep_or_die)
        patch.setattr(Artifact, "write_jsonl", write_or_die)
        for _ in range(3 if when not in ("part", "work") else 1):
            kept = kept_turns(output)
            killed = in_a_process(lambda: generate(config, prompts, Artifact(str(output))))
            assert ended(killed) == -signal.SIGKILL
            assert not kept & asked_for(asked)
            assert kept < kept_turns(output)
    kept = kept_turns(output)
    files = {path: path.stat().st_mtime_ns for path in output.glob("answers-*.jsonl")}
    assert files or when not in ("part", "work")
    with pytest.raises(MissingInputError, match="unfinished"):
        list(read_answers(Artifact(str(output))))
    with monkeypatch.context() as patch:
        patch.setattr(backends, "build", lambda: "decoder-else")  # its last bits differ
        with pytest.raises(MismatchError, match=r"parts so far .*-else"):
            generate(config, prompts, Artifact(str(output)))
    generate(config, prompts, Artifact(str(output)))
    assert not kept & asked_for(asked)
    made = Artifact(str(output))
    assert contents(made) == contents(whole[0])
    assert [one.key for one in read_origins(made)] == [one.key for one in read_answers(made)]
    assert {path: path.stat().st_mtime_ns for path in files} == files, "whole parts stay"


def test_a_damaged_entry_is_asked_for_again_with_what_stood_on_it(
    config, prompts, whole, asked, tmp_path, monkeypatch, caplog
):
    output = tmp_path / "answers"
    with monkeypatch.context() as patch:
        patch.setattr(
            on_disk.AnswerParts, "_write", lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        )
        killed = in_a_process(lambda: generate(config, prompts, Artifact(str(output))))
        assert ended(killed) == -signal.SIGKILL
    asked_for(asked)
    later = next(path for path in sorted((output / WORK).glob("*/*-001.json")))
    prompt_id = json.loads(later.read_text())["answer"]["prompt_id"]
    before = kept_turns(output) - {(prompt_id, turn) for turn in range(4)}
    later.with_name(later.name.replace("-001", "-000")).write_bytes(b'{"at": 3, "answer": {"key')
    with caplog.at_level(logging.WARNING):
        generate(config, prompts, Artifact(str(output)))
    again = asked_for(asked)
    assert {(prompt_id, 0), (prompt_id, 1)} <= again
    assert not again & before
    assert sum("damaged" in record.message for record in caplog.records) == 1
    assert contents(Artifact(str(output))) == contents(whole[0])


def test_what_a_killed_process_left_half_written_is_swept(config, prompts, whole, tmp_path):
    """Its name ends with the process's number."""
    output = tmp_path / "answers"
    output.mkdir()
    (output / "_IDENTITY.partial-99998").write_bytes(b"half")
    (output / "somebody.partial-99998").write_bytes(b"a folder that is not ours yet")

    def interrupt(done, total=None, note=""):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(config, prompts, Artifact(str(output)), interrupt)
    assert [path.name for path in output.rglob("*.partial-*")] == ["somebody.partial-99998"]
    parts = ("answers-00000.jsonl", "origins-00001.jsonl", f"{WORK}/part-00000/00000-000.json")
    for name in (*parts, "manifest.json"):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / f"{name}.partial-99999").write_bytes(b"half")
    generate(config, prompts, Artifact(str(output)))
    assert not list(output.rglob("*.partial-*"))
    assert contents(Artifact(str(output))) == contents(whole[0])


def test_what_another_process_writes_now_is_left_alone(tmp_path):
    output = Artifact(str(tmp_path))
    output.begin("work")
    with subprocess.Popen(["sleep", "60"]) as other:
        half = tmp_path / f"answers-00000.jsonl.partial-{other.pid}"
        half.write_bytes(b"half")
        Artifact(output.url).begin("work")
        assert half.exists()
        other.kill()
    Artifact(output.url).begin("work")
    assert not half.exists()


def test_in_an_object_store_too_nothing_is_lost(config, prompts, whole, asked, tmp_path):
    url = f"memory://{tmp_path}/answers"
    store = fsspec.filesystem("memory")

    class Killed(BaseException): ...

    def track(done, total=None, note=""):
        if done >= 20:
            raise Killed

    with pytest.raises(Killed):
        generate(config, prompts, Artifact(url), track)
    journal = store.glob(f"{tmp_path}/answers/{WORK}/*/*.json")
    entries = [json.loads(store.cat_file(path)) for path in journal]
    kept = {(row["prompt_id"], row["turn"]) for one in entries if (row := one["answer"])} | {
        (row["prompt_id"], row["turn"]) for row in Artifact(url).read_rows("answers")
    }
    first = asked_for(asked)
    assert len(first - kept) <= 5, "in flight"
    generate(config, prompts, Artifact(url))
    assert not kept & asked_for(asked)
    assert contents(Artifact(url)) == contents(whole[0])
    assert not store.exists(f"{tmp_path}/answers/{WORK}")


def test_a_full_disk_says_so_and_keeps_what_there_is(config, prompts, whole, tmp_path, monkeypatch):
    output, write, count = Artifact(str(tmp_path / "answers")), Artifact.write, [0]

    def full(self, name, data):
        count[0] += name.startswith(WORK)
        if count[0] == 9:
            raise StorageFullError("no room left", "free some")
        write(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(Artifact, "write", full)
        with pytest.raises(StorageFullError, match="no room left"):
            generate(config, prompts, output)
    generate(config, prompts, Artifact(output.url))
    assert contents(output) == contents(whole[0])


# The journal by itself


def entry(at: int, turn: int, text: str = "Yes") -> JournalEntry:
    messages: Any = ({"role": "user", "content": "?"}, {"role": "assistant", "content": text})
    answer = Answer(f"k{turn}", f"p{at}", "s", "l", turn, messages, (1, 2), (3,), "stop", 0.0)
    return JournalEntry(at, answer, Origin(answer.key, answer.prompt_id, turn, "eyas", None, 1.5))


@pytest.mark.parametrize(
    "text", ["Yes", "a\nb\r\nc\u2028d\x85e", '"', "\u65e5\u672c\U0001f600", "\x00\x1f", ""]
)
def test_an_entry_is_what_was_written_and_only_what_follows_on_others_counts(text, tmp_path):
    parts = AnswerParts(Artifact(str(tmp_path)))
    parts.open(0, 3)
    dropped = JournalEntry(0, dropped=[{"prompt_id": "p0", "turn": 2, "reason": "r", "detail": ""}])
    kept = [entry(0, 0, text), entry(0, 1), dropped, entry(1, 0), entry(1, 1, text)]
    for one in (*kept, entry(0, 4, "after the end"), entry(2, 1, "lost its first turn")):
        parts.add(0, one)
    parts.close()
    assert AnswerParts(Artifact(str(tmp_path))).open(0, 3) == kept
