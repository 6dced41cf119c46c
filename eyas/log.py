"""Progress for people and JSON lines for machines."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
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
LINE_EVERY_S = 20.0  # between two lines of progress where stderr is no terminal


class Track(Protocol):
    """A stage reports its progress by calling this."""

    def __call__(self, done: int, total: int | None = None, note: str = "") -> None: ...


def quiet(done: int, total: int | None = None, note: str = "") -> None:
    """A Track that reports nothing."""


def progress_bar(stage: str) -> AbstractContextManager[Track]:
    """The progress of one stage on stderr: a bar on a terminal, elsewhere a line every
    LINE_EVERY_S seconds with rate and time left, also while nothing moves.
    """
    return _terminal_bar(stage) if console.is_terminal else _lines(stage)


@contextmanager
def _terminal_bar(stage: str) -> Iterator[Track]:
    bar = Progress(
        TextColumn("[bold]{task.description:<9}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )
    task = bar.add_task(stage, total=None, note="")

    def track(done: int, total: int | None = None, note: str = "") -> None:
        bar.start()  # does nothing once started
        bar.update(task, completed=done, total=total, note=note)  # a total of None leaves it

    try:
        yield track
    finally:
        bar.stop()


@contextmanager
def _lines(stage: str) -> Iterator[Track]:
    state = _StageProgress()
    over = threading.Event()

    def print_lines() -> None:
        while not over.wait(LINE_EVERY_S):
            console.print(f"{stage:<9} {state.line(time.monotonic())}", highlight=False)

    printer = threading.Thread(target=print_lines, name=f"progress of {stage}", daemon=True)
    printer.start()
    try:
        yield state.track
    finally:
        over.set()
        printer.join()


class _StageProgress:
    def __init__(self) -> None:
        self._began = time.monotonic()
        # time and count at the first progress: a resumed stage begins late
        self._first: tuple[float, int] | None = None
        self._done, self._note = 0, ""
        self._total: int | None = None

    def track(self, done: int, total: int | None = None, note: str = "") -> None:
        """A smaller `done` begins another part of the stage, with its own rate."""
        if self._first is None or done < self._done:
            self._first = (time.monotonic(), done)
        self._done, self._total, self._note = done, total or self._total, note

    def line(self, now: float) -> str:
        """The line at `now`, of time.monotonic."""
        if self._first is None:
            return f"preparing, {now - self._began:.0f} s"
        since, first = self._first
        rate = (self._done - first) / max(now - since, 1e-9)
        parts = [f"{self._done:,}" + (f" of {self._total:,}" if self._total else "")]
        if rate > 0:
            parts.append(f"{rate:,.1f}/s")
            if self._total:
                left = timedelta(seconds=round((self._total - self._done) / rate))
                parts.append(f"{left} left")
        return ", ".join([*parts, self._note] if self._note else parts)


def size_text(num_bytes: float) -> str:
    """Bytes with three digits in a fitting unit: "5.37 GB", "412 kB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:,.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"


class JsonFormatter(logging.Formatter):
    """JSON lines: time, level, name, message and the fields of `extra={"data": ...}`."""

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


def error_facts(error: BaseException) -> dict[str, Any]:
    """An exception's type and places, without its message, which may quote a request."""
    frames = traceback.extract_tb(error.__traceback__)[-12:]
    places = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    return {"error": type(error).__name__, "places": places}


def log_to_stderr(level: int = logging.INFO) -> None:
    """Send the records of `eyas.*` loggers to stderr as JSON lines, and nowhere else."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger("eyas")
    root.handlers[:] = [handler]
    root.setLevel(level)
