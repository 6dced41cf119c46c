"""The answers of `generate` on disk: parts in the prompts' order, and for a part that is not whole
yet a journal of its answers.

    answers-00000.jsonl      records.Answer of a part's prompts, in order; written last
    dropped-00000.jsonl      the turns of the same prompts that have no answer, each with its reason
    origins-00000.jsonl      records.Origin of the same answers, line by line
    work/part-00000.journal  the part's events so far, a line each, in order of time

A line of the journal is a checksum and JSON, written before the next turn is asked for: a kill
loses the answers that are being written and nothing else. A torn or damaged line counts as missing.
On a disk lines are appended; an object store takes segments (part-00000-00003.journal) of
SEGMENT_LINES lines or SEGMENT_S seconds.

Knows rows and files. Does not know what is asked, or what answers.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eyas.artifact import WORK, Artifact, storage_errors
from eyas.errors import InputError
from eyas.records import Answer, Origin

log = logging.getLogger(__name__)
SEGMENT_LINES, SEGMENT_S = 64, 10.0
_DIGITS = 16  # of a line's checksum


@dataclass(slots=True)
class JournalEntry:
    """An event of a conversation: an answer, turns given up, or both. at: the prompt's place in its
    part.
    """

    at: int
    answer: Answer | None = None
    origin: Origin | None = None
    dropped: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return self.answer is None and not self.dropped

    @property
    def turn(self) -> int:
        """The first turn of the entry."""
        return self.answer.turn if self.answer else int(self.dropped[0]["turn"])

    @property
    def num_turns(self) -> int:
        return (self.answer is not None) + len(self.dropped)

    def to_line(self) -> bytes:
        """One line, checksum first."""
        text = json.dumps(asdict(self), ensure_ascii=False).encode()
        return _checksum(text) + b" " + text + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> JournalEntry | None:
        """None for a line that is not whole."""
        checksum, _, text = line.partition(b" ")
        if _checksum(text) != checksum:
            return None
        row = json.loads(text)
        answer, origin = row["answer"], row["origin"]
        return cls(
            row["at"],
            None if answer is None else Answer.from_json(answer),
            None if origin is None else Origin.from_json(origin),
            row["dropped"],
        )


class Journal:
    """The entries of one part, kept from the moment they are added."""

    def __init__(self, output: Artifact, part: int) -> None:
        self._output, self._stem = output, f"{WORK}/part-{part:05d}"
        path = output.local_path(f"{self._stem}.journal")
        self._path = None if path is None else Path(path)
        self._waiting: list[bytes] = []  # for a segment to be full
        self._since = 0.0
        self._num_segments = 0  # without gaps: each is written whole before the next
        while self._path is None and output.exists(self._segment(self._num_segments)):
            self._num_segments += 1
        self._is_torn = bool(
            self._path and self._path.exists() and not self._path.read_bytes().endswith(b"\n")
        )

    def add(self, entry: JournalEntry) -> None:
        """Keep an entry. Raises StorageFullError."""
        line = entry.to_line()
        if self._path is None:
            self._add_to_segment(line)
            return
        with storage_errors(self._output.url):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                file.write(b"\n" + line if self._is_torn else line)
        self._is_torn = False

    def entries(self) -> list[JournalEntry]:
        """All that was added, by earlier processes too; after a lost line the rest of its
        conversation is lost as well.
        """
        if self._path is not None:
            content = self._path.read_bytes() if self._path.exists() else b""
        else:
            segments = [
                self._output.read(self._segment(number)) for number in range(self._num_segments)
            ]
            content = b"".join([*segments, *self._waiting])
        found = [JournalEntry.from_line(line) for line in content.split(b"\n") if line]
        if None in found:
            data = {"journal": f"{self._output.url}/{self._stem}", "lines": found.count(None)}
            log.warning(
                "a journal has damaged lines: their turns are asked for again",
                extra={"data": data},
            )
        return _in_turn(entry for entry in found if entry is not None)

    def delete(self) -> None:
        """Delete the journal: its part is whole."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        for number in range(self._num_segments):
            self._output.delete(self._segment(number))
        self._num_segments, self._waiting = 0, []

    def _add_to_segment(self, line: bytes) -> None:
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append(line)
        if len(self._waiting) >= SEGMENT_LINES or time.monotonic() - self._since >= SEGMENT_S:
            self._output.write(self._segment(self._num_segments), b"".join(self._waiting))
            self._num_segments += 1
            self._waiting = []

    def _segment(self, number: int) -> str:
        return f"{self._stem}-{number:05d}.journal"


class AnswerParts:
    """The parts of an artifact while they are written."""

    def __init__(self, output: Artifact) -> None:
        self._output = output
        self._journals: dict[int, Journal] = {}
        self._left: dict[int, int] = {}

    def is_whole(self, part: int) -> bool:
        """True when nothing is left to do for a part."""
        return self._output.exists(f"answers-{part:05d}.jsonl")

    def open(self, part: int, num_prompts: int) -> list[JournalEntry]:
        """Begin a part, or resume it: its entries so far, each turn after those before it."""
        self._journals[part] = Journal(self._output, part)
        self._left[part] = num_prompts
        return self._journals[part].entries()

    def add(self, part: int, entry: JournalEntry) -> None:
        """Keep an event of one of its conversations."""
        if not entry.is_empty:
            self._journals[part].add(entry)

    def end(self, part: int) -> None:
        """One of its conversations is over; with the last of them the part's files are written."""
        self._left[part] -= 1
        if self._left[part] == 0:
            del self._left[part]
            self._write(part, self._journals.pop(part))

    def _write(self, part: int, journal: Journal) -> None:
        """The answers last: their file marks the part as whole."""
        entries = sorted(journal.entries(), key=lambda entry: (entry.at, entry.turn))
        answers = [entry.answer.to_json() for entry in entries if entry.answer]
        origins = [entry.origin.to_json() for entry in entries if entry.origin]
        dropped = [row for entry in entries for row in entry.dropped]
        self._output.delete(f"dropped-{part:05d}.jsonl")
        if dropped:
            self._output.write_jsonl(f"dropped-{part:05d}.jsonl", dropped)
        self._output.write_jsonl(f"origins-{part:05d}.jsonl", origins)
        self._output.write_jsonl(f"answers-{part:05d}.jsonl", answers)
        journal.delete()


@contextmanager
def folder_lock(output: Artifact) -> Iterator[None]:
    """Hold the folder alone: two processes would answer everything twice, into the same journals.

    The system releases the lock when the process ends, however it ends. An object store has no
    locks: nothing is held there. Raises InputError.
    """
    path = output.local_path(f"{WORK}/claim")
    if path is None:
        yield
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another process is writing into {output.url}",
                "wait for it, end it, or choose another output folder",
            ) from error
        yield


def _in_turn(entries: Iterable[JournalEntry]) -> list[JournalEntry]:
    """The entries that follow on those before them of the same conversation."""
    next_turn: Counter[int] = Counter()
    kept = []
    for entry in entries:
        if entry.turn == next_turn[entry.at]:
            next_turn[entry.at] += entry.num_turns
            kept.append(entry)
    return kept


def _checksum(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:_DIGITS].encode()
