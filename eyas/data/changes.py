"""Changed rows, before and after, for a person who looks at them on a terminal.

The artifact has a row's place and what was found there (`changed-*.jsonl`, no values), and its
prompt. What it was before lies in its source alone, so the sources are read again.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from eyas.artifact import Artifact
from eyas.data.ledger import SourceRow, printable
from eyas.data.sources import SourceConfig, describe, read_source
from eyas.errors import CorruptError
from eyas.privacy.findings import Finding, replace
from eyas.records import Prompt

CHANGED = "changed"  # stem of the lines


def changed_line(row: SourceRow, id: str) -> dict[str, Any]:
    """The line of a changed row: its place, and what was found in it by type, place and keyed hash,
    by which a person's rows can be found and erased.
    """
    found = [dataclasses.asdict(one) for one in row.masked]
    return {"id": id, "source": row.source, "where": row.where, "found": found}


def show_changed(output: Artifact, type: str) -> Iterator[str]:
    """The changed rows with a finding of a type that begins so, as text, with a count at the end.
    Raises what reading the sources raises, and CorruptError where one no longer holds a row.
    """
    wanted, shown, types = type.strip().upper(), 0, Counter[str]()
    sources = list(_same_sources(output))
    prompts = (Prompt.from_json(line) for line in output.read_rows("prompts"))
    rows = (row for source in sources for row in read_source(source))
    for line in output.read_rows(CHANGED):
        found = [Finding(**one) for one in line["found"]]
        after = next((one for one in prompts if one.id == line["id"]), None)
        place = line["source"], line["where"]
        before = next((row for row in rows if (row.source, row.where) == place), None)
        if after is None or not isinstance(before, SourceRow):
            raise CorruptError(
                f"{line['where']} of {line['source']} is not the row that it was",
                "take the sources as they were when the prompts were made",
            )
        types.update({one.type for one in found})
        if any(one.type.startswith(wanted) for one in found):
            shown += 1
            yield from map(printable, _compared(before, after, found))
    there = ", ".join(f"{type} {count}" for type, count in sorted(types.items()))
    yield printable(f"{shown} rows; changed rows by type: {there or 'none'}")


def _same_sources(output: Artifact) -> Iterator[SourceConfig]:
    """The sources of a result, at the places where they were read."""
    for label, made in output.manifest("prompts").inputs.items():
        log = made.config.get("log")
        source = SourceConfig(path=made.url, name=label, log=log, **made.facts.get("read_as", {}))
        if describe(source).identity != made.identity:
            raise CorruptError(
                f"{made.url} is not what it was when the prompts were made",
                "put the source back as it was, or make the prompts again",
            )
        yield source


def _compared(before: SourceRow, after: Prompt, found: Iterable[Finding]) -> Iterator[str]:
    """For people: "- " the texts with what was found in them marked, "+ " as they are now."""
    counts = sorted(Counter(one.type for one in found).items())
    listed = ", ".join(f"{type} {count}" for type, count in counts)
    yield f"{before.where} of {before.source} (id {after.id}): {listed}"
    texts = zip(
        (None, *range(len(after.turns))),
        (before.system, *before.turns),
        (after.system, *after.turns),
        strict=True,
    )
    for turn, old, new in texts:
        here = sorted((one for one in found if one.turn == turn), key=lambda one: one.start)
        if here and old is not None:
            marks = (f"[{one.type}: {old[one.start : one.end]}]" for one in here)
            yield f"  - {replace(old, here, marks)}"
            yield f"  + {new}"
