"""The numbers of a run in TensorBoard or Weights & Biases, beside metrics.jsonl.

Each is an extra: eyas[tensorboard], eyas[wandb]. Logins and servers are set by their own
environment variables.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from eyas.errors import ConfigError

log = logging.getLogger(__name__)
TrackerName = Literal["tensorboard", "wandb"]


class TrackerConfig(BaseModel):
    """Settings of the trackers; they change nothing of what is trained.

    folder: where files go, on this machine; by default TensorBoard's go below the output folder,
    and Weights & Biases chooses.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    to: tuple[TrackerName, ...] = Field((), description="tensorboard, wandb; none by default")
    project: str = Field("eyas", description="name at the trackers")
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as a tracker opens it.

    output: the run's folder on this machine, or None in an object store. step: the steps that are
    done; a resumed run repeats the numbers of later steps.
    """

    config: TrackerConfig
    name: str
    identity: str
    settings: Mapping[str, Any]
    output: str | None
    step: int = 0


class Tracker(Protocol):
    """One open run in one tracker."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one step, by name."""

    def close(self) -> None:
        """Write what is buffered, and end the run."""


class Trackers:
    """Several trackers as one. One that fails is dropped with a warning, and training continues."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.log(step, values))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # each client has its own tree of errors
                data = {"tracker": name, "error": type(error).__name__}
                log.warning("a tracker failed and is dropped", extra={"data": data})
                del self._trackers[name]


def open_trackers(run: TrackedRun) -> Trackers:
    """Open the run in every tracker of its config; a resumed run continues there.

    Raises ConfigError, before any work, for a tracker that is not installed or refuses.
    """
    return Trackers({name: _opened(name, run) for name in run.config.to})


def _opened(name: TrackerName, run: TrackedRun) -> Tracker:
    module, tracker = TRACKERS[name]
    try:
        package = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"tracker.to: {name} is not installed",
            f'pip install "eyas[{name}]", or take {name} out of tracker.to',
        ) from error
    try:
        return tracker(package, run)
    except ConfigError:
        raise
    except Exception as error:  # its message is not shown: it may hold a login
        raise ConfigError(
            f"tracker.to: {name} did not open a run ({type(error).__name__})",
            f"check that its server can be reached and you are logged in, or take {name} out of "
            "tracker.to",
        ) from error


class TensorBoard:
    """torch's writer of event files, one file a process."""

    def __init__(self, package: Any, run: TrackedRun) -> None:
        folder = run.config.folder or (run.output and f"{run.output}/tensorboard")
        if folder is None:
            raise ConfigError(
                "tracker.folder: TensorBoard's files grow line by line, which an object store "
                "cannot do",
                "give a folder of this machine",
            )
        # hides what an earlier, killed process wrote of the steps that come again
        self._writer = package.SummaryWriter(folder, purge_step=run.step + 1, flush_secs=10)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases; a resumed run continues under its identity."""

    def __init__(self, package: Any, run: TrackedRun) -> None:
        self._run = package.init(
            project=run.config.project,
            name=run.name,
            id=run.identity,
            resume="allow",
            config=dict(run.settings),
            dir=run.config.folder,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # the client ignores steps that it has already
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[TrackerName, tuple[str, Callable[[Any, TrackedRun], Tracker]]] = {
    "tensorboard": ("torch.utils.tensorboard", TensorBoard),
    "wandb": ("wandb", Wandb),
}


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
