"""Capture by several processes, here and on Ray: the bytes of one process."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eyas.artifact import DONE, MANIFEST, Artifact
from eyas.errors import ConfigError, MismatchError, MissingInputError
from eyas.executor import LocalExecutor
from eyas.features import capture as stage
from eyas.features import forward
from eyas.features.capture import CaptureConfig, CaptureTask, capture, load_on_worker
from eyas.features.forward import ForwardResult, ForwardTask, WorkerForward
from eyas.model.weights import fingerprint
from eyas.operators.decoder import HookedDecoder, OwnDecoder
from eyas.shards import Features, writer
from tests.fork_server import imported_once
from tests.stages import killed_at_a_write, patched, write_answers
from tests.tiny import tiny_target

KILLED_AT = 3  # forwards of the first worker that gets so far


# several shards; the first samples reach the writer before it has a codec
small_portions = patched((stage, "SAMPLES_PER_SHARD", 4), (writer, "CALIBRATION_TOKENS", 300))


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(scope="module")
def answers(target, tmp_path_factory) -> Artifact:
    said = ["a table for two", "71 North Street, San Jose", "0123456789", "I would like"]
    dialogues = [(f"Question {at}", f"{said[at % 4] * (1 + at % 3)} {at}") for at in range(48)]
    return write_answers(target, tmp_path_factory.mktemp("answers") / "answers", dialogues)


def config_of(target: Path, **settings: Any) -> CaptureConfig:
    small = {"held_out_share": 0.3, "batch_tokens": 60, "decoder": "own"}
    return CaptureConfig(**{"target": str(target), **small, **settings})


def contents(output: Artifact) -> dict[str, Any]:
    """All files; the manifest without time and place."""
    files: dict[str, Any] = {name: output.read(name) for name in output.all_names()}
    files[MANIFEST] = json.loads(files[MANIFEST])
    del files[DONE], files[MANIFEST]["created"], files[MANIFEST]["url"]
    return files


@pytest.fixture(scope="module")
def of_one_process(target, answers, tmp_path_factory) -> dict[str, dict[str, Any]]:
    made = {}
    for decoder in ("own", "transformers"):
        output = Artifact(str(tmp_path_factory.mktemp(decoder) / "features"))
        capture(config_of(target, decoder=decoder), answers, output)
        made[decoder] = contents(output)
    return made


def test_processes_change_nothing(target, answers, of_one_process, tmp_path, monkeypatch):
    counts = {"encoded": 0, "as they are": 0}
    add = stage.ShardWriter.add

    def counted(self, sample):
        counts["encoded" if isinstance(sample, stage.EncodedSample) else "as they are"] += 1
        add(self, sample)

    monkeypatch.setattr(stage.ShardWriter, "add", counted)
    output = Artifact(str(tmp_path / "features"))
    with imported_once():
        capture(config_of(target, workers=3), answers, output)
    assert contents(output) == of_one_process["own"]
    assert len(Features(output).entries) > 20
    assert min(counts.values()) > 5


def load_or_be_killed(config: CaptureConfig, target_fingerprint: str) -> Any:
    """The first process that gets to KILLED_AT is killed."""
    assert Path(config.target).is_absolute(), "another host stands in another folder"
    forward = load_on_worker(config, target_fingerprint)
    decoder = forward._decoder
    mark, done = Path(config.target).with_name(f"killed-{config.decoder}-{config.executor}"), []
    states = decoder.states

    def states_or_die(*args: Any) -> Any:
        done.append(None)
        if len(done) == KILLED_AT and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return states(*args)

    decoder.states = states_or_die
    return forward


@pytest.mark.parametrize(
    ("decoder", "executor"),
    [("transformers", "local"), pytest.param("own", "ray", marks=pytest.mark.ray)],
)
def test_a_killed_worker_changes_nothing(
    target, answers, of_one_process, tmp_path, monkeypatch, decoder, executor
):
    monkeypatch.setattr(stage, "load_on_worker", load_or_be_killed)
    relative = Path(os.path.relpath(target))
    config = config_of(relative, decoder=decoder, executor=executor, workers=2)
    output = Artifact(str(tmp_path / "features"))
    with imported_once():
        capture(config, answers, output)
    assert target.with_name(f"killed-{decoder}-{executor}").exists()
    made = contents(output)
    made[MANIFEST]["facts"]["target"] = str(target)
    assert made == of_one_process[decoder]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_run_goes_on_with_any_number_of_workers(
    target, answers, of_one_process, tmp_path, monkeypatch, workers
):
    config, output = config_of(target), Artifact(str(tmp_path / "cut"))
    several = config.model_copy(update={"workers": 3 - workers})
    kept = killed_at_a_write(
        "train-00003.safetensors", lambda: capture(several, answers, Artifact(output.url)), output
    )
    assert len(kept) == 3
    if workers == 1:
        with monkeypatch.context() as patched:
            patched.setattr(forward, "build", lambda: "decoder-else")
            with pytest.raises(MismatchError, match=r"parts so far .*-else"):
                capture(config, answers, output)
    with imported_once():
        capture(config.model_copy(update={"workers": workers}), answers, output)
    assert contents(output) == of_one_process["own"]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "whole shards stay"


def test_where_the_work_runs_is_no_part_of_the_identity(target, answers):
    other = config_of(target, executor="ray", workers=7)
    tasks = [CaptureTask(config, answers) for config in (config_of(target), other)]
    assert tasks[0].settings == tasks[1].settings


def test_a_target_that_a_worker_does_not_have_is_refused_by_the_name_of_its_host(
    target, tmp_path, monkeypatch
):
    monkeypatch.setattr(forward.socket, "gethostname", lambda: "host-b")
    made_for, absent = fingerprint(target), config_of(tmp_path / "absent")
    with pytest.raises(MissingInputError, match=r"host-b: no target folder at .*absent") as raised:
        ForwardTask(partial(load_on_worker, absent, made_for), 1).ready()
    assert "a folder that all hosts mount at one path" in raised.value.hint
    other = config_of(tiny_target(tmp_path / "other", seed=1))
    with pytest.raises(MismatchError, match=r"host-b: .*other holds another target") as raised:
        ForwardTask(partial(load_on_worker, other, made_for), 1).ready()
    assert "a folder that all hosts mount at one path" in raised.value.hint


class Hosts(LocalExecutor):
    def __init__(self, *results: ForwardResult) -> None:
        super().__init__(ForwardTask(lambda: pytest.fail("computes"), 1), len(results))
        self._results = results

    def map(self, jobs):
        return (result for result, _ in zip(self._results, jobs, strict=True))


def test_hosts_whose_bits_would_differ_are_refused(target):
    own = OwnDecoder.load(target, "float32")
    hooked = HookedDecoder.load(target, "float32")
    said = [forward.implementation(decoder) for decoder in (own, hooked)]
    assert "decoder-" in said[0]
    assert "torch 2" in said[1]
    first = ForwardResult("host-a", said[0], own.lm_head_sha256, [])
    WorkerForward(Hosts(first, replace(first, host="host-b")), 2).close()
    other = said[0].replace("avx", "neon")
    with pytest.raises(MismatchError, match=r"host-a with eyas .*, host-b with eyas") as raised:
        WorkerForward(Hosts(first, replace(first, host="host-b", computed_by=other)), 2)
    assert "EYAS_NATIVE_VARIANT" in raised.value.hint


def test_workers_beside_servers_or_on_too_few_gpus_are_refused(
    target, answers, monkeypatch, output
):
    with pytest.raises(ValueError, match="they compute, and no workers"):
        config_of(target, servers=["http://localhost:1"], workers=2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    config = config_of(target, decoder="transformers", workers=3)
    with pytest.raises(ConfigError, match="onto 2 GPUs"):
        capture(config, answers, output)


@pytest.fixture
def output(tmp_path) -> Artifact:
    return Artifact(str(tmp_path / "features"))
