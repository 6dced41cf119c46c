"""The rows of `generate` on disk: parts of the prompts' order, and for a part that is not whole yet
a journal of its answers.

    answers-00000.jsonl      records.Answer of `rows_per_part` prompts, in the prompts' order; written last: the part is whole
    dropped-00000.jsonl      the turns of the same prompts that got no answer, each with its reason
    origins-00000.jsonl      records.Origin of the same answers, line by line: what differs from run to run
    work/part-00000.journal  what has come of the part so far, a line an event, in whatever order

A line of the journal is a checksum and JSON, and is with the system before the next turn is asked
for: a kill loses what was being answered and nothing else. A line that is torn or damaged counts as
not there. On a disk lines are appended; an object store takes segments of a journal
(part-00000-00003.journal), each of what came in SEGMENT_S or SEGMENT_LINES.

Knows rows and files. Does not know what is asked, or who answers.
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
class Entry:
    """What came of a conversation in one go: an answer, turns given up, or both. at: the prompt's
    place in its part.
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
        """The first one that it tells of."""
        return self.answer.turn if self.answer else int(self.dropped[0]["turn"])

    @property
    def num_turns(self) -> int:
        return (self.answer is not None) + len(self.dropped)

    def to_line(self) -> bytes:
        """One line, checksum first."""
        text = json.dumps(asdict(self), ensure_ascii=False).encode()
        return _checksum(text) + b" " + text + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Entry | None:
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
        self._num_segments = 0 if self._path else _num_segments(output, self._stem)
        self._is_torn = (
            self._path is not None
            and self._path.exists()
            and not self._path.read_bytes().endswith(b"\n")
        )

    def add(self, entry: Entry) -> None:
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

    def entries(self) -> list[Entry]:
        """All that was added, also by a process before this one; of a conversation what follows a
        lost line is lost as well.
        """
        if self._path is not None:
            content = self._path.read_bytes() if self._path.exists() else b""
        else:
            segments = [
                self._output.read(self._segment(number)) for number in range(self._num_segments)
            ]
            content = b"".join([*segments, *self._waiting])
        found = [Entry.from_line(line) for line in content.split(b"\n") if line]
        if None in found:
            data = {"journal": f"{self._output.url}/{self._stem}", "lines": found.count(None)}
            log.warning(
                "lines of a journal are not whole: what they told is asked for again",
                extra={"data": data},
            )
        return _in_turn(entry for entry in found if entry is not None)

    def delete(self) -> None:
        """Forget all: the part is whole."""
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
        return self._output.exists(answers_name(part))

    def open(self, part: int, num_prompts: int) -> list[Entry]:
        """Begin with a part, or go on: what has come of it, a turn after those before it."""
        self._journals[part] = Journal(self._output, part)
        self._left[part] = num_prompts
        return self._journals[part].entries()

    def add(self, part: int, entry: Entry) -> None:
        """Keep what came of one of its conversations."""
        if not entry.is_empty:
            self._journals[part].add(entry)

    def end(self, part: int) -> None:
        """One of its conversations is over; with the last of them the part's files are written."""
        self._left[part] -= 1
        if self._left[part] == 0:
            del self._left[part]
            self._write(part, self._journals.pop(part))

    def _write(self, part: int, journal: Journal) -> None:
        """The answers last: their file is what says that the part is whole."""
        entries = sorted(journal.entries(), key=lambda entry: (entry.at, entry.turn))
        answers = [entry.answer.to_json() for entry in entries if entry.answer]
        origins = [entry.origin.to_json() for entry in entries if entry.origin]
        dropped = [row for entry in entries for row in entry.dropped]
        self._output.delete(f"dropped-{part:05d}.jsonl")
        if dropped:
            self._output.write_jsonl(f"dropped-{part:05d}.jsonl", dropped)
        self._output.write_jsonl(f"origins-{part:05d}.jsonl", origins)
        self._output.write_jsonl(answers_name(part), answers)
        journal.delete()


def answers_name(part: int) -> str:
    """The file of a part's answers."""
    return f"answers-{part:05d}.jsonl"


@contextmanager
def claimed(output: Artifact) -> Iterator[None]:
    """Nobody else writes into this folder meanwhile: two that do would answer everything twice,
    into the same journals.

    The system lets go of the claim when the process ends, however it ends. Raises InputError. In an
    object store there is nothing to hold on to, and nothing is claimed.
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


def _in_turn(entries: Iterable[Entry]) -> list[Entry]:
    """Those that follow on what was told of their conversation before."""
    next_turn: Counter[int] = Counter()
    kept = []
    for entry in entries:
        if entry.turn == next_turn[entry.at]:
            next_turn[entry.at] += entry.num_turns
            kept.append(entry)
    return kept


def _checksum(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:_DIGITS].encode()


def _num_segments(output: Artifact, stem: str) -> int:
    """Segments are numbered without gaps: each is written whole before the next."""
    number = 0
    while output.exists(f"{stem}-{number:05d}.journal"):
        number += 1
    return number
