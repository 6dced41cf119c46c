"""Progress for people and JSON lines for machines. Knows rich and logging, no stage."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

console = Console(stderr=True)  # stdout is for results: its last line may be one JSON object


class Track(Protocol):
    """What a stage gets to report progress with."""

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None: ...


def quiet(done: int, total: int | None = None, note: str = "") -> None:
    """A Track that reports nothing, for tests and library use."""


@contextmanager
def progress_bar(stage: str, total: int | None = None) -> Iterator[Track]:
    """A progress bar for one stage: `track(done, total, note)` moves it to `done` of `total`."""
    columns = (
        TextColumn("[bold]{task.description:<9}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(stage, total=total, note="")

        def track(done: int, total: int | None = None, note: str = "") -> None:
            # a total of None leaves it as it is
            bar.update(task, completed=done, total=total, note=note)

        yield track


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, name, message and whatever `extra={"data": {...}}`
    brings.
    """

    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "name": record.name,
            "message": record.getMessage(),
        }
        row.update(getattr(record, "data", {}))
        if record.exc_info:
            row["error"] = self.formatException(record.exc_info)
        return json.dumps(row, ensure_ascii=False)


def log_to_stderr(level: int = logging.INFO) -> None:
    """Send the records of `eyas.*` loggers to stderr as JSON lines, in place of what they went to
    before.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger("eyas")
    root.handlers[:] = [handler]
    root.setLevel(level)
