"""The stage `prompts` in several processes, on Ray, in other portions, and killed at any point:
always the same bytes.
"""

import gzip
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from eyas.artifact import WORK, Artifact
from eyas.data import filters, selection
from eyas.data import prompts as stage
from eyas.data.ledger import SourceRow
from eyas.data.prompts import PromptsConfig, make_prompts
from eyas.errors import EyasError
from tests.source_rows import json_lines, written
from tests.stages import ROOT

BLOCK_ROWS, ROWS_PER_PART = 20, 30
MARKER = "Tuesday-at-nine"
WORDS = ["table", "train", "museum", "ticket", "dinner", "weather", "music", "blanket", "pencil"]
WORDS += ["answer", "number", "letter"]


def some_rows(count: int, seed: int = 0) -> list[dict]:
    """Repeated and nearly repeated ones, ids given twice, personal data, and some that
    are no rows.
    """
    random_of = random.Random(seed)
    rows: list = []
    for number in range(count):
        said = " ".join(random_of.choices(WORDS, k=random_of.randrange(4, 40)))
        messages = [{"role": "user", "content": f"{said} {number}"}]
        row = {"id": f"r{number % 90}", "messages": messages}
        kind = random_of.randrange(12)
        if kind == 0 and rows:
            row = rows[random_of.randrange(len(rows))]
        elif kind == 1:
            row["messages"][0]["content"] += f" write to p{number}@example.com"
        elif kind == 2:
            row["messages"][0]["content"] += " my card is 4242 4242 4242 4242"
        elif kind == 3:
            long = " ".join(f"{word}{place}" for place in range(4) for word in WORDS)
            row = {"turns": [long, f"and {number % 7}"]}
        elif kind == 4:
            row = {"messages": [{"role": "nobody", "content": "broken"}]}
        elif kind == 5:
            row["messages"][0]["content"] = " "
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("sources")
    first, second = some_rows(126, 250), some_rows(84, 170)
    written(folder / "first.jsonl", first)
    (folder / "second.jsonl.gz").write_bytes(gzip.compress(json_lines(second).encode()))
    item = next(row for row in first if " write to" in json.dumps(row))
    written(folder / "items.jsonl", [item])
    written(folder / "traffic.jsonl", some_rows(80, 7))
    return [
        {"path": str(folder / name), "licence": "MIT", "prompts_by": "human"}
        for name in ("first.jsonl", "second.jsonl.gz")
    ]


@pytest.fixture(autouse=True)
def small_portions(monkeypatch):
    monkeypatch.setattr(selection, "BLOCK_ROWS", BLOCK_ROWS)
    monkeypatch.setattr(stage, "ROWS_PER_PART", ROWS_PER_PART)


def made(folder: Path, sources: list[dict], **settings) -> Artifact:
    output = Artifact(str(folder))
    make_prompts(PromptsConfig(**everything(sources), **settings), output)
    return output


def everything(sources: list[dict]) -> dict[str, Any]:
    beside = Path(sources[1]["path"]).parent
    return {
        "sources": sources,
        "evaluation": [{"path": str(beside / "items.jsonl")}],
        "match": {"traffic": str(beside / "traffic.jsonl"), "num_prompts": 100},
    }


def contents(output: Artifact) -> dict[str, bytes]:
    """All files but those that hold times and paths; the manifest has the others' checksums."""
    names = set(output.all_names()) - {"manifest.json", "_DONE"}
    return {name: output.read(name) for name in names}


def prompts_of(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if name.startswith("prompts-")}


@pytest.fixture(scope="module")
def undisturbed(sources, tmp_path_factory) -> dict[str, bytes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "BLOCK_ROWS", BLOCK_ROWS)
        patch.setattr(stage, "ROWS_PER_PART", ROWS_PER_PART)
        return contents(made(tmp_path_factory.mktemp("undisturbed"), sources))


def test_what_is_compared_has_everything(undisturbed):
    names = {"prompts-00000.jsonl", "prompts-00001.jsonl", "dropped-00000.jsonl", "ledger.json"}
    assert names | {"changed-00000.jsonl"} <= set(undisturbed)
    ledger = json.loads(undisturbed["ledger.json"])
    reasons = {"contamination.items", "duplicate.exact", "duplicate.near", "empty", "malformed"}
    reasons |= {"match", "pii.credit_card"}
    assert reasons <= set(ledger["dropped"])
    assert "match.json" in undisturbed
    assert ledger["rows_in"] == 210
    assert ledger["rows_masked"] > 5
    lines = b"".join(prompts_of(undisturbed).values()).splitlines()
    ids = [json.loads(line)["id"] for line in lines]
    assert len(set(ids)) == len(ids) == ledger["rows_out"]


@pytest.mark.ray
def test_ray_changes_nothing(sources, undisturbed, tmp_path):
    assert contents(made(tmp_path, sources, executor="ray", workers=2)) == undisturbed


def test_where_the_work_runs_is_no_part_of_the_identity(sources):
    other = PromptsConfig(sources=sources, executor="ray", workers=7)
    assert PromptsConfig(sources=sources).settings(b"key") == other.settings(b"key")


@pytest.mark.parametrize("block_rows", [7, 1000])
def test_portions_change_nothing(sources, undisturbed, tmp_path, monkeypatch, block_rows):
    monkeypatch.setattr(selection, "BLOCK_ROWS", block_rows)
    assert contents(made(tmp_path, sources)) == undisturbed


def test_shards_change_no_prompt(sources, undisturbed, tmp_path):
    lines = Path(sources[0]["path"]).read_text().splitlines(keepends=True)
    (tmp_path / "first").mkdir()
    for shard in range(4):
        part = "".join(lines[shard * 32 : (shard + 1) * 32])
        (tmp_path / "first" / f"{shard}.jsonl").write_text(part)
    shards = {"path": str(tmp_path / "first" / "*.jsonl"), "name": "first"}
    output = contents(made(tmp_path / "out", [{**sources[0], **shards}, sources[1]]))
    assert prompts_of(output) == prompts_of(undisturbed)
    ledgers = [json.loads(files["ledger.json"]) for files in (output, undisturbed)]
    assert ledgers[0]["sources"] == ledgers[1]["sources"]


FORK = multiprocessing.get_context("fork")  # what is imported here need not be imported again


def until_killed(folder: Path, sources: list[dict], patched: str, name: str) -> None:
    """Run the stage in a process that kills itself (SIGKILL) instead of calling Artifact's
    `patched`: for the file `name`, or, where it is not called for a file, once the artifact is
    done.
    """

    def run() -> None:
        method = getattr(Artifact, patched)

        def method_or_die(self: Artifact, *args: Any) -> Any:
            if args[0] == name if args else self.is_done():
                os.kill(os.getpid(), signal.SIGKILL)
            return method(self, *args)

        setattr(Artifact, patched, method_or_die)
        made(folder, sources)

    process = FORK.Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


POINTS = [f"{WORK}/block-00000.npz", f"{WORK}/block-00004.jsonl", f"{WORK}/selection.npz"]
POINTS += ["prompts-00001.jsonl", "ledger.json"]


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_run_goes_on_and_ends_the_same(sources, undisturbed, tmp_path, monkeypatch, point):
    until_killed(tmp_path, sources, "write", point)
    assert not Artifact(str(tmp_path)).is_done()
    check_resumed(monkeypatch, tmp_path, sources, undisturbed, workers=1)


def check_resumed(monkeypatch, folder: Path, sources, undisturbed, workers: int) -> None:
    """The run goes on, does no finished block again, and ends with the same bytes."""
    finished = {name for name in Artifact(str(folder)).all_names() if name.startswith(WORK)}
    names, write = [], Artifact.write

    def noted(self, name, data):
        names.append(name)
        write(self, name, data)

    monkeypatch.setattr(Artifact, "write", noted)
    assert contents(made(folder, sources, workers=workers)) == undisturbed
    again = finished.intersection(names)
    assert not [name for name in again if name.endswith("jsonl") or name == stage.SELECTION]
    assert not (folder / WORK).exists()


def test_a_run_killed_while_it_tidies_up_is_done(sources, undisturbed, tmp_path):
    until_killed(tmp_path, sources, "delete_work", "")
    assert (tmp_path / WORK).is_dir()
    output = made(tmp_path, sources)
    assert output.was_done
    assert not (tmp_path / WORK).exists()
    assert contents(output) == undisturbed


KILLED = """
from eyas.artifact import Artifact
from eyas.data import prompts, selection
selection.BLOCK_ROWS, prompts.ROWS_PER_PART = {block_rows}, {rows_per_part}
if __name__ == "__main__":
    prompts.make_prompts(prompts.PromptsConfig(**{settings!r}, workers=2), Artifact({url!r}))
"""


def test_processes_change_nothing_nor_does_a_kill_from_outside(
    sources, undisturbed, tmp_path, monkeypatch
):
    """Of a run with two workers, which then goes on with two."""
    numbers = {"block_rows": BLOCK_ROWS, "rows_per_part": ROWS_PER_PART}
    code = KILLED.format(**numbers, settings=everything(sources), url=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        while process.poll() is None and not (tmp_path / WORK / "block-00003.npz").exists():
            time.sleep(0.001)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    check_resumed(monkeypatch, tmp_path, sources, undisturbed, workers=2)
    assert not list(tmp_path.glob("**/*.partial-*"))


def test_work_of_other_versions_is_done_again(sources, undisturbed, tmp_path):
    until_killed(tmp_path, sources, "write", stage.SELECTION)
    first = tmp_path / WORK / "block-00000.jsonl"
    first.write_text('{"row": "of another version"}\n')
    for stem in stage.STEMS:
        (tmp_path / f"{stem}-00009.jsonl").write_text('{"id": "of another version"}\n')
    versions = tmp_path / stage.VERSIONS
    versions.write_text(versions.read_text().replace('"numpy": "', '"numpy": "0.'))
    assert contents(made(tmp_path, sources)) == undisturbed


def test_a_failing_filter_is_told_by_place_and_quotes_nothing(monkeypatch):
    def failing(row):
        raise ValueError(f"cannot do {row.turns[0]}")

    row = SourceRow("set", "MIT", "set.jsonl:3", None, (MARKER,))
    said = r"broken failed on set.jsonl:3 of set: ValueError at .*_scale.py:\d+"
    with pytest.raises(EyasError, match=said) as raised:
        filters.filtered(row, {"broken": failing})
    assert MARKER not in str(raised.value)
    assert raised.value.__suppress_context__


def test_a_block_of_long_rows_is_shorter(monkeypatch):
    monkeypatch.setattr(selection, "BLOCK_CHARACTERS", 100)
    sizes = [60, 60, 250, 1, 1]
    rows = [SourceRow("set", "MIT", f"set:{size}", None, ("x" * size,)) for size in sizes]
    assert [len(block.rows) for block in selection.cut(rows)] == [2, 1, 2]
