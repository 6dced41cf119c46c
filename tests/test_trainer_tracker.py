"""Trackers: what TensorBoard's reader finds, what the clients keep, and what happens without them.

The clients that are not installed are skipped; `pip install "eyas[wandb]"` and so on.
"""

from __future__ import annotations

import logging
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyas.errors import ConfigError
from eyas.train.tracker import TRACKERS, TrackedRun, TrackerConfig, Trackers, open_trackers, scalars

BLOCK = 32 << 10
IDENTITY = "0123456789abcdef"
SETTINGS = {"seed": 1, "stop": {"patience": 2}}


def tracked(config: TrackerConfig, output: Path | None, step: int = 0) -> TrackedRun:
    return TrackedRun(config, "train-1", IDENTITY, SETTINGS, output and str(output), step)


def logged(config: TrackerConfig, folder: Path) -> None:
    """A run of five steps, cut after the fourth and resumed from a checkpoint of the second."""
    for first, last in ((0, 4), (2, 5)):
        opened = open_trackers(tracked(config, folder, first))
        for step in range(first + 1, last + 1):
            opened.log(step, {"loss": 1.0 / step, "accuracy/0": 0.1 * step})
        opened.close()


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format: blocks of 32 KiB; of each piece a checksum, its
    length, and whether it ends.
    """
    at, whole = 7, b""  # after W&B's own header
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


def finished_run(path: Path, kind: type) -> list:
    """The records of a run that has ended: the client's own process writes the last of them when
    `finish` has returned.
    """
    patience = time.monotonic() + 60
    while True:
        records = [kind.FromString(data) for data in leveldb_records(path.read_bytes())]
        if any(record.HasField("exit") for record in records):
            return records
        assert time.monotonic() < patience, "the client wrote no end"
        time.sleep(0.1)


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logged(TrackerConfig(to=("tensorboard",)), tmp_path)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    found = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert found.Tags()["scalars"] == ["loss", "accuracy/0"]
    assert [event.step for event in found.Scalars("loss")] == [1, 2, 3, 4, 5]
    assert [event.value for event in found.Scalars("loss")] == pytest.approx(
        [1.0 / step for step in range(1, 6)]
    )
    assert [event.value for event in found.Scalars("accuracy/0")] == pytest.approx(
        [0.1 * step for step in range(1, 6)]
    )


def test_wandb_keeps_what_is_logged(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged(TrackerConfig(to=("wandb",), folder=str(tmp_path)), tmp_path)
    steps = {}
    files = sorted(tmp_path.rglob("*.wandb"))
    assert len(files) == 2
    for path in files:
        assert IDENTITY in path.name
        for record in finished_run(path, messages.Record):
            for item in record.history.item:
                if "loss" in (item.key, *item.nested_key):
                    steps[record.history.step.num] = float(item.value_json)
    assert steps == pytest.approx({step: 1.0 / step for step in range(1, 6)})


def test_an_extra_that_is_absent_is_named_before_any_work(monkeypatch, tmp_path):
    for name, (module, _) in TRACKERS.items():
        monkeypatch.setitem(sys.modules, module, None)  # as the import of an absent package
        with pytest.raises(ConfigError, match=f"{name} is not installed") as raised:
            open_trackers(tracked(TrackerConfig(to=(name,)), tmp_path))
        assert f'pip install "eyas[{name}]"' in raised.value.hint


def test_a_tracker_that_refuses_is_an_error_without_its_words(monkeypatch, tmp_path):
    def refuse(package, run):
        raise ValueError("https://me:secret@server said no")

    monkeypatch.setitem(TRACKERS, "wandb", ("json", refuse))
    with pytest.raises(ConfigError, match=r"did not open a run \(ValueError\)") as raised:
        open_trackers(tracked(TrackerConfig(to=("wandb",)), tmp_path))
    assert "secret" not in str(raised.value)


def test_tensorboard_needs_a_folder_of_this_machine():
    pytest.importorskip("tensorboard")
    with pytest.raises(ConfigError, match=r"tracker\.folder"):
        open_trackers(tracked(TrackerConfig(to=("tensorboard",)), None))


def test_a_tracker_that_fails_is_dropped_and_the_others_go_on(caplog):
    class Counting:
        def __init__(self, fails_at: int) -> None:
            self.steps: list[int] = []
            self.fails_at, self.is_closed = fails_at, False

        def log(self, step, values):
            if step == self.fails_at:
                raise ConnectionError("a server with a secret in its address")
            self.steps.append(step)

        def close(self):
            self.is_closed = True

    bad, good = Counting(2), Counting(9)
    both = Trackers({"wandb": bad, "tensorboard": good})
    with caplog.at_level(logging.WARNING, "eyas"):
        for step in (1, 2, 3):
            both.log(step, {})
    both.close()
    assert (bad.steps, bad.is_closed) == ([1], False)
    assert (good.steps, good.is_closed) == ([1, 2, 3], True)
    assert [record.data for record in caplog.records] == [
        {"tracker": "wandb", "error": "ConnectionError"}
    ]
    assert "secret" not in caplog.text


def test_numbers_of_a_row_by_name():
    row = {
        "step": 3,
        "loss": 1.5,
        "accuracy": [0.5, 0.25],
        "judged": 7,
        "held_out_tau": 2.0,
        "note": "no number",
    }
    assert scalars(row) == {
        "loss": 1.5,
        "accuracy/0": 0.5,
        "accuracy/1": 0.25,
        "judged": 7.0,
        "held_out_tau": 2.0,
    }
