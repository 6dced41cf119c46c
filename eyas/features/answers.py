"""The answers of `generate` on disk: parts in the order of the prompts, and a journal of each
unfinished part.

    answers-00000.jsonl             records.Answer of a part's prompts; written last
    dropped-00000.jsonl             turns without an answer, and why
    origins-00000.jsonl             records.Origin of the answers, line by line
    work/part-00000/00012-001.json  journal: conversation 12 of the part, turn 1

A journal entry is one file, written whole or not at all: a kill loses only unwritten answers.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from eyas.artifact import WORK, Artifact
from eyas.errors import MismatchError
from eyas.model.library import CHOICE
from eyas.records import Answer, Origin

log = logging.getLogger(__name__)
COMPUTED_BY = f"{WORK}/computed_by.json"
WRITERS = 32  # entries at a time: an object store takes about 50 ms for each


@dataclass(slots=True)
class JournalEntry:
    """An answer, dropped turns, or both. at: the conversation's place in its part."""

    at: int
    answer: Answer | None = None
    origin: Origin | None = None
    dropped: list[dict[str, Any]] = field(default_factory=list)

    @property
    def turn(self) -> int:
        return self.answer.turn if self.answer else int(self.dropped[0]["turn"])

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> JournalEntry:
        answer = row["answer"] and Answer.from_json(row["answer"])
        origin = row["origin"] and Origin.from_json(row["origin"])
        return cls(row["at"], answer, origin, row["dropped"])


def hold_to(output: Artifact, computed_by: Mapping[str, str]) -> None:
    """Record what computes an artifact's parts: {"here": ..., "servers": ...}, where known.

    Raises MismatchError if something else computed the parts of an earlier run.
    """
    before = output.read_json(COMPUTED_BY) if output.exists(COMPUTED_BY) else {}
    for where, now in computed_by.items():
        if before.get(where, now) != now:
            raise MismatchError(
                f"the parts so far in {output.url} were computed by {before[where]}; this run "
                f"would go on with {now}: their last bits differ",
                "resume where it began (servers that compute alike; a processor of one kind, or "
                f"{CHOICE}=avx2 on both, and the same packages), or choose another output folder",
            )
    if computed_by.keys() - before.keys():
        output.write_json(COMPUTED_BY, {**before, **computed_by})


class AnswerParts:
    def __init__(self, output: Artifact) -> None:
        self._output = output
        self._kept: dict[str, list[str]] = {}  # an earlier process's files, by folder
        for name in output.all_names():
            self._kept.setdefault(name.rpartition("/")[0], []).append(name)
        self._entries: dict[int, list[JournalEntry]] = {}
        self._writing: dict[int, list[Future[None]]] = {}
        self._left: dict[int, int] = {}
        self.num_done = 0  # conversations
        self._writers = ThreadPoolExecutor(WRITERS, "journal")

    def is_whole(self, part: int) -> bool:
        return self._output.exists(f"answers-{part:05d}.jsonl")

    def open(self, part: int, num_conversations: int) -> list[JournalEntry]:
        """Begin or resume a part: its journal so far, in the order of turns."""
        kept: list[JournalEntry] = []
        next_turn: Counter[int] = Counter()
        for name in self._kept.pop(_folder(part), ()):
            try:
                entry = JournalEntry.from_json(self._output.read_json(name))
            except (ValueError, LookupError, TypeError):
                data = {"journal": f"{self._output.url}/{name}"}
                log.warning("a damaged entry: its turns are asked for again", extra={"data": data})
                continue
            # a later turn may have been written before an earlier one, which was then lost
            if entry.turn == next_turn[entry.at]:
                next_turn[entry.at] += (entry.answer is not None) + len(entry.dropped)
                kept.append(entry)
        self._entries[part], self._writing[part] = kept, []
        self._left[part] = num_conversations
        return list(kept)

    def add(self, part: int, entry: JournalEntry) -> None:
        """Write an entry. Raises StorageFullError, perhaps for an earlier one."""
        if entry.answer is None and not entry.dropped:
            return
        self._entries[part].append(entry)
        name = f"{_folder(part)}/{entry.at:05d}-{entry.turn:03d}.json"
        content = json.dumps(asdict(entry), ensure_ascii=False).encode()
        self._writing[part].append(self._writers.submit(self._output.write, name, content))
        if self._writing[part][0].done():
            self._writing[part].pop(0).result()

    def end(self, part: int) -> None:
        """The last conversation's end writes the part's files."""
        self.num_done += 1
        self._left[part] -= 1
        if self._left[part] == 0:
            del self._left[part]
            self._write(part, self._entries.pop(part))

    def close(self) -> None:
        """Wait until all entries are written. Raises StorageFullError."""
        self._writers.shutdown()
        for future in itertools.chain.from_iterable(self._writing.values()):
            future.result()

    def _write(self, part: int, entries: list[JournalEntry]) -> None:
        for future in self._writing.pop(part):
            future.result()
        entries.sort(key=lambda entry: (entry.at, entry.turn))
        answers = [entry.answer.to_json() for entry in entries if entry.answer]
        origins = [entry.origin.to_json() for entry in entries if entry.origin]
        dropped = [row for entry in entries for row in entry.dropped]
        self._output.delete(f"dropped-{part:05d}.jsonl")
        if dropped:
            self._output.write_jsonl(f"dropped-{part:05d}.jsonl", dropped)
        self._output.write_jsonl(f"origins-{part:05d}.jsonl", origins)
        self._output.write_jsonl(f"answers-{part:05d}.jsonl", answers)  # last: marks it whole
        self._output.delete_work(_folder(part))


def _folder(part: int) -> str:
    return f"{WORK}/part-{part:05d}"
