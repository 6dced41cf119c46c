"""Where a run's numbers go besides metrics.jsonl, behind one small interface. Knows four clients,
no head and no loss.

TensorBoard's files are written by a few lines of our own: a summary of scalars is five fields of a
protocol buffer, and both packages that write it bring far more than it takes. What they hold is
checked with TensorBoard's own reader in the tests. The other three are extras: eyas[wandb],
eyas[mlflow], eyas[trackio].
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from eyas.errors import ConfigError

log = logging.getLogger(__name__)
TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
IDENTITY_TAG = "eyas_identity"


class TrackerConfig(BaseModel):
    """Settings of the trackers; they change nothing of what is trained.

    run: the run's name, by default that of the output folder. folder: where files go; TensorBoard's
    by default below the output folder, if that is on this machine, others' where they choose.
    server: MLflow's tracking URI, by default what its environment says.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    to: tuple[TrackerName, ...] = ()
    project: str = "eyas"
    run: str | None = None
    folder: str | None = None
    server: str | None = None


class Tracker(Protocol):
    """What takes a run's numbers."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one step, by name. A resumed run may give a step again."""

    def close(self) -> None:
        """All is said: write out what is held."""


class Trackers:
    """Several as one. One that fails is left out from then on, with a warning: a run is worth more
    than its curves.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """As Tracker.log."""
        self._ask(lambda tracker: tracker.log(step, values))

    def close(self) -> None:
        """As Tracker.close."""
        self._ask(lambda tracker: tracker.close())

    def _ask(self, ask: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                ask(tracker)
            except Exception as error:  # each client has a tree of errors of its own
                log.warning(
                    "a tracker failed and is left out",
                    extra={"data": {"tracker": name, "error": type(error).__name__}},
                )
                del self._trackers[name]


@dataclass(frozen=True, slots=True)
class RunOf:
    """What a tracker is told of a run when it begins: the step is the one it goes on from."""

    config: TrackerConfig
    name: str
    identity: str
    settings: dict[str, Any]
    step: int


def open_trackers(run: RunOf, output: str | None) -> Trackers:
    """Begin, or go on with, the run in every tracker that is asked for. output: the run's folder,
    if on this machine.

    Raises ConfigError for a tracker whose package is not installed, before any work.
    """
    made: dict[str, Tracker] = {}
    for name in run.config.to:
        if name == "tensorboard":
            made[name] = TensorBoard(folder_of(run.config, output), run.step)
        else:
            made[name] = begun(name, client(name), run)
    return Trackers(made)


def folder_of(config: TrackerConfig, output: str | None) -> str:
    """Where TensorBoard's files go. Raises ConfigError for an output that is no folder of this
    machine.
    """
    if config.folder is None and output is None:
        raise ConfigError(
            "tracker.folder: TensorBoard's files grow line by line, which an object store cannot "
            "do",
            "give a folder of this machine",
        )
    return config.folder or f"{output}/tensorboard"


def begun(name: str, package: Any, run: RunOf) -> Tracker:
    """The run in one tracker. Raises ConfigError when the tracker refuses, whatever its own error
    is: that may hold a login.
    """
    try:
        return CLIENTS[name](package, run)
    except Exception as error:
        raise ConfigError(
            f"tracker.to: {name} did not begin a run ({type(error).__name__})",
            f"see that its server can be reached and you are logged in, or take {name} out of "
            "tracker.to",
        ) from error


def client(name: str) -> Any:
    """The package of a tracker. Raises ConfigError when it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"tracker.to: {name} is not installed",
            f'pip install "eyas[{name}]", or take {name} out of tracker.to',
        ) from error


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics.jsonl by name, those of a list as name/0, name/1, ..."""
    flat: dict[str, float] = {}
    for name, value in row.items():
        if isinstance(value, int | float):
            flat[name] = float(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            flat.update((f"{name}/{number}", float(one)) for number, one in enumerate(value))
    flat.pop("step", None)
    return flat


# The clients


class Wandb:
    """Weights & Biases; a resumed run goes on under its identity."""

    def __init__(self, package: Any, run: RunOf) -> None:
        config = run.config
        self._run = package.init(
            project=config.project,
            name=run.name,
            id=run.identity,
            resume="allow",
            config=run.settings,
            dir=config.folder,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """As Tracker.log; steps that were said before are ignored by the client."""
        self._run.log(dict(values), step=step, commit=True)

    def close(self) -> None:
        """As Tracker.close."""
        self._run.finish()


class Trackio:
    """trackio; a resumed run goes on under its name."""

    def __init__(self, package: Any, run: RunOf) -> None:
        name = f"{run.name}-{run.identity}"
        self._run = package.init(
            project=run.config.project, name=name, resume="allow", config=run.settings, embed=False
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """As Tracker.log."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """As Tracker.close."""
        self._run.finish()


class Mlflow:
    """MLflow; a resumed run is found by its identity, a tag."""

    def __init__(self, package: Any, run: RunOf) -> None:
        project = run.config.project
        self._client = package.MlflowClient(tracking_uri=run.config.server)
        self._sent: Any = None
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        runs = self._client.search_runs(
            [experiment], filter_string=f"tags.{IDENTITY_TAG} = '{run.identity}'", max_results=1
        )
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(
            experiment, run_name=run.name, tags={IDENTITY_TAG: run.identity}
        ).info.run_id
        for name, value in flattened(run.settings).items():
            self._client.log_param(self._id, name, value)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """As Tracker.log; one request, whose answer nobody waits for until the end."""
        now = int(1000 * time.time())
        metric = importlib.import_module("mlflow.entities").Metric
        metrics = [metric(name, value, now, step) for name, value in values.items()]
        self._sent = self._client.log_batch(self._id, metrics, synchronous=False)

    def close(self) -> None:
        """As Tracker.close."""
        if self._sent is not None:
            self._sent.wait()  # the last of a queue
        self._client.set_terminated(self._id)


CLIENTS: dict[str, Callable[[Any, RunOf], Tracker]] = {
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
}


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


# TensorBoard's files: records of TFRecord, each a protocol buffer `Event`
# (tensorboard/compat/proto/event.proto)

CASTAGNOLI = 0x82F63B78
WALL_TIME, STEP, FILE_VERSION, SUMMARY, SESSION_LOG = 1, 2, 3, 5, 7  # fields of Event
VALUE, TAG, SIMPLE_VALUE, STATUS = 1, 1, 2, 1  # of Summary, Summary.Value and SessionLog
SESSION_START = 1
VARINT, DOUBLE, BYTES, FLOAT = 0, 1, 2, 5  # wire types


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (CASTAGNOLI if byte & 1 else 0)
        table.append(byte)
    return table


CRC_TABLE = _crc_table()


class TensorBoard:
    """Scalars as TensorBoard reads them, one file a process; a resumed run tells it to forget the
    steps from its own on.
    """

    def __init__(self, folder: str, step: int) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.{now % 10**9}"
        self._stream = Path(folder, name).open("xb")  # noqa: SIM115 until close
        self._write(_field(FILE_VERSION, b"brain.Event:2"))
        self._write(_field(STEP, step + 1) + _field(SESSION_LOG, _field(STATUS, SESSION_START)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """As Tracker.log."""
        summary = b"".join(
            _field(VALUE, _field(TAG, name.encode()) + _float(value))
            for name, value in values.items()
        )
        self._write(_field(STEP, step) + _field(SUMMARY, summary))

    def close(self) -> None:
        """As Tracker.close."""
        self._stream.close()

    def _write(self, event: bytes) -> None:
        """One record, at once on disk as far as other processes are concerned: TensorBoard shows it
        while it grows.
        """
        data = bytes([WALL_TIME << 3 | DOUBLE]) + struct.pack("<d", time.time()) + event
        size = struct.pack("<Q", len(data))
        self._stream.write(
            size
            + struct.pack("<I", masked_crc32c(size))
            + data
            + struct.pack("<I", masked_crc32c(data))
        )
        self._stream.flush()


def masked_crc32c(data: bytes) -> int:
    """TFRecord's checksum: CRC-32C, turned and shifted so that a checksum of checksums is no weak
    one.
    """
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _field(number: int, value: bytes | int) -> bytes:
    """A field of a protocol buffer: an integer, or anything with a length."""
    if isinstance(value, int):
        return bytes([number << 3 | VARINT]) + _varint(value)
    return bytes([number << 3 | BYTES]) + _varint(len(value)) + value


def _float(value: float) -> bytes:
    return bytes([SIMPLE_VALUE << 3 | FLOAT]) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])
