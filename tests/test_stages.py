"""The contract of every stage: a folder is claimed for one work; done work is not done again;
killed work resumes to the same bytes; an object store holds the same files.

A new stage is a row of `STAGES`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from eyas.artifact import DONE, IDENTITY, MANIFEST, Artifact, Manifest
from eyas.data.prompts import PromptsConfig, make_prompts
from eyas.engine.engine import Engine
from eyas.errors import CorruptError, InputError
from eyas.evaluate.evaluate import EvalConfig, evaluate
from eyas.export.export import ExportConfig, export
from eyas.features.capture import CaptureConfig, capture
from eyas.features.generate import GenerateConfig, generate
from eyas.log import Track, quiet
from eyas.model.target import Target
from eyas.shards import Features
from eyas.stores import Persistent
from eyas.train.trainer import TrainConfig, train
from tests.stages import ended, ending_target, in_a_process
from tests.tiny_prompts import eval_prompts

World = SimpleNamespace  # target: a folder; raw: a file of prompts; finished artifacts by stage
NUM_PROMPTS = 24


@dataclass(frozen=True)
class Stage:
    """run: does the work; its `change` makes it other work. differs: files that hold times."""

    name: str
    run: Callable[[World, Artifact, int, Track], Manifest]
    differs: tuple[str, ...] = ()


def run_prompts(world: World, output: Artifact, change: int, track: Track) -> Manifest:
    source = {"path": str(world.raw), "licence": "CC0-1.0", "prompts_by": "human", "name": "raw"}
    config = PromptsConfig(sources=[source], max_characters=8000 - change)
    return make_prompts(config, output, track)


def run_generate(world: World, output: Artifact, change: int, track: Track) -> Manifest:
    config = GenerateConfig(target=str(world.target), max_tokens=12 + change, max_batch=4)
    return generate(config, world.prompts, output, track)


def run_capture(world: World, output: Artifact, change: int, track: Track) -> Manifest:
    config = CaptureConfig(target=str(world.target), held_out_share=0.3 + change / 10)
    return capture(config, world.generate, output, track)


def run_train(world: World, output: Artifact, change: int, track: Track) -> Manifest:
    config = TrainConfig(
        head={"draft_vocab_size": 64},
        objective={"num_ttt_steps": 3},
        epochs=2,
        batches={"tokens": 128},
        stop={"measurements": 1},
        checkpoint_every=2,
        seed=change,
    )
    held_out = Features(world.capture, "held_out")
    source = Features(world.capture, "train")
    return train(config, str(world.target), source, output, track, held_out)


def run_eval(world: World, output: Artifact, change: int, track: Track) -> Manifest:
    config = EvalConfig(
        trees=("fixed(2,2,4)",),
        temperatures=(0.0, 1.0),
        max_tokens=6,
        seed=change,
        models={"max_length": 200},
    )
    held_out, head = Features(world.capture, "held_out"), world.train.url
    return evaluate(config, str(world.target), head, output, held_out, eval_prompts(6), track)


def run_export(world: World, output: Artifact, change: int, track: Track) -> Manifest:
    config = ExportConfig(target_name=f"owner/model-{change}")
    return export(config, str(world.target), world.train, output, track, world.eval)


STAGES = {
    stage.name: stage
    for stage in (
        Stage("prompts", run_prompts),
        Stage("generate", run_generate, differs=("origins",)),
        Stage("capture", run_capture),
        Stage("train", run_train, differs=("metrics.jsonl",)),  # the clock: see test_trainer
        Stage("eval", run_eval),
        Stage("export", run_export),
    )
}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    """What every stage reads, each made by the stage before."""
    root = tmp_path_factory.mktemp("world")
    made = World(target=ending_target(root / "target"), raw=root / "raw.jsonl")
    rows = [{"turns": [f"A table for {number} in San Jose?"]} for number in range(NUM_PROMPTS)]
    made.raw.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for stage in STAGES.values():
        output = Artifact(str(root / stage.name))
        stage.run(made, output, 0, quiet)
        setattr(made, stage.name, Artifact(output.url))
    return made


@pytest.fixture(params=STAGES.values(), ids=STAGES)
def stage(request) -> Stage:
    found: Stage = request.param
    return found


def contents(artifact: Artifact, stage: Stage) -> dict[str, str]:
    """Checksums by file, of those that do not differ; each is checked."""
    files = artifact.manifest(stage.name).files
    for name in files:
        artifact.read(name)  # raises for another checksum
    different = stage.differs or "/"
    return {name: one.sha256 for name, one in files.items() if not name.startswith(different)}


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_what_is_written_is_listed_and_nothing_is_left_over(world, stage):
    artifact = getattr(world, stage.name)
    names = set(artifact.all_names())
    assert names - {IDENTITY, MANIFEST, DONE} == set(artifact.manifest(stage.name).files)
    assert contents(artifact, stage)
    assert not any(".partial-" in str(path) for path in Path(artifact.url).rglob("*"))


def test_done_work_is_not_done_again_and_other_work_is_refused(world, stage):
    artifact = Artifact(getattr(world, stage.name).url)
    before, steps = snapshot(Path(artifact.url)), []
    with pytest.MonkeyPatch.context() as patch:
        for model in (Engine, Target):
            patch.setattr(model, "load", lambda *_: pytest.fail("loads a model to do nothing"))
        patch.setattr("eyas.export.export.check", lambda *_: pytest.fail("checks it again"))
        manifest = stage.run(world, artifact, 0, lambda *step: steps.append(step))
    assert manifest == getattr(world, stage.name).manifest()
    assert (artifact.was_done, steps) == (True, [])
    with pytest.raises(InputError, match="holds other work"):
        stage.run(world, Artifact(artifact.url), 1, quiet)
    assert snapshot(Path(artifact.url)) == before


def writes(world: World, stage: Stage, output: Artifact) -> Iterator[str]:
    """The names that the stage writes, in order."""
    names, write = [], Artifact.write

    def told(self: Artifact, name: str, data: bytes) -> None:
        if self.url == output.url:
            names.append(name)
        write(self, name, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Artifact, "write", told)
        stage.run(world, output, 0, quiet)
    return iter(names)


def killed_before_write(world: World, stage: Stage, output: Artifact, number: int) -> None:
    """The process is killed in place of its write of this number."""
    left, write = [number], Artifact.write

    def write_or_die(self: Artifact, name: str, data: bytes) -> None:
        if self.url == output.url:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
        write(self, name, data)

    def work() -> None:
        Artifact.write = write_or_die  # type: ignore[method-assign]  # of the child alone
        stage.run(world, output, 0, quiet)

    assert ended(in_a_process(work)) == -signal.SIGKILL


def test_killed_work_is_not_read_as_whole_and_is_resumed_to_the_same_bytes(world, stage, tmp_path):
    """Before its first write (the claim), the last (the done marker), and some between."""
    whole, written = (
        getattr(world, stage.name),
        list(writes(world, stage, Artifact(f"{tmp_path}/w"))),
    )
    assert (written[0], written[-2:]) == (IDENTITY, [MANIFEST, DONE])
    last = len(written) - 1
    for number in sorted({0, 1, last // 2, last - 1, last}):
        output = Artifact(str(tmp_path / str(number)))
        killed_before_write(world, stage, output, number)
        assert not output.is_done()
        with pytest.raises(InputError, match=r"unfinished|does not exist|no output of"):
            Artifact(output.url).manifest()
        resumed = Artifact(output.url)
        manifest = stage.run(world, resumed, 0, quiet)
        assert manifest.identity == whole.manifest().identity, written[number]
        assert manifest.counts == whole.manifest().counts
        assert contents(Artifact(output.url), stage) == contents(whole, stage), written[number]


def test_two_processes_do_not_work_in_one_folder(world, stage, tmp_path):
    output = Artifact(str(tmp_path / stage.name))
    with output.held_alone(), pytest.raises(InputError, match="another process is writing into"):
        stage.run(world, Artifact(output.url), 0, quiet)
    assert output.all_names() == []
    stage.run(world, Artifact(output.url), 0, quiet)
    assert output.is_done()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_done_folder_without_its_manifest_is_damaged(world, damage, tmp_path):
    folder = tmp_path / "prompts"
    shutil.copytree(world.prompts.url, folder)
    damage(folder / MANIFEST)
    with pytest.raises(CorruptError, match="does not match its done marker"):
        Artifact(str(folder)).manifest()


def test_an_object_store_holds_the_same(world, stage, tmp_path):
    whole, output = getattr(world, stage.name), Artifact(f"memory://{tmp_path}/{stage.name}")
    manifest = stage.run(world, output, 0, quiet)
    assert manifest.identity == whole.manifest().identity
    assert contents(Artifact(output.url), stage) == contents(whole, stage)


@pytest.mark.parametrize(
    ("error", "asked"),
    [(TypeError, 1), (KeyError, 1), (FileNotFoundError, 1), (ConnectionError, 3), (OSError, 3)],
)
def test_a_store_is_asked_again_for_an_outage_alone(monkeypatch, error, asked):
    monkeypatch.setattr("eyas.stores.FIRST_PAUSE_S", 0.0)
    calls = []

    def info(path):
        calls.append(path)
        if len(calls) < 3:
            raise error(path)
        return path

    store = Persistent(SimpleNamespace(info=info), "s3://bucket")
    if asked == 1:
        with pytest.raises(error):
            store.info("a")
    else:
        assert store.info("a") == "a"
    assert len(calls) == asked
