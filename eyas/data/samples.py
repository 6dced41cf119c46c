"""Changed rows, before and after: for a person who looks at them on a terminal, or in a file that
only the privacy key opens.

What a row was before lies in its source alone; the artifact has its place and what was found there
(`changed-*.jsonl`, no values), and the prompt that was made of it. So the sources are read again.
"""

from __future__ import annotations

import base64
import dataclasses
import heapq
import importlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from eyas.artifact import Artifact
from eyas.data.ledger import SourceRow, printable
from eyas.data.sources import SourceConfig, describe, read_source
from eyas.errors import ConfigError, CorruptError, MissingInputError
from eyas.privacy.findings import Finding
from eyas.privacy.key import key_id, keyed, privacy_key
from eyas.records import Prompt

NUM_SAMPLES = 20
CHANGED = "changed"  # stem of the lines
FILE = "samples.enc"


@dataclass(frozen=True, slots=True)
class ChangedRow:
    """A prompt, the row that it was, and what was found in it."""

    before: SourceRow
    after: Prompt
    found: tuple[Finding, ...]

    def lines(self) -> Iterator[str]:
        """For people: "- " the texts with what was found in them marked, "+ " as they are now."""
        types = Counter(one.type for one in self.found)
        counts = ", ".join(f"{type} {count}" for type, count in sorted(types.items()))
        yield f"{self.before.where} of {self.before.source} (id {self.after.id}): {counts}"
        before_after = zip(
            (None, *range(len(self.after.turns))),
            (self.before.system, *self.before.turns),
            (self.after.system, *self.after.turns),
            strict=True,
        )
        for number, before, after in before_after:
            here = [one for one in self.found if one.turn == number]
            if here and before is not None:
                yield f"  - {_marked(before, here)}"
                yield f"  + {after}"


def changed_line(row: SourceRow, id: str) -> dict[str, Any]:
    """The line of a row that became a prompt and was changed: its place, and what was found in it
    by type, place and keyed hash, no value. By the hash a person's rows can be found and erased.
    """
    found = [dataclasses.asdict(one) for one in row.masked]
    return {"id": id, "source": row.source, "where": row.where, "found": found}


def changed_rows(
    output: Artifact, sources: Iterable[SourceConfig], ids: Collection[str] | None = None
) -> Iterator[ChangedRow]:
    """The changed rows of a result in order, or those with these ids. Raises what reading the
    sources raises, and CorruptError where a source no longer holds a row.
    """
    prompts = (Prompt.from_json(line) for line in output.read_rows("prompts"))
    rows = (row for source in sources for row in read_source(source))
    for line in output.read_rows(CHANGED):
        if ids is not None and line["id"] not in ids:
            continue
        after = next((one for one in prompts if one.id == line["id"]), None)
        place = line["source"], line["where"]
        before = next((row for row in rows if (row.source, row.where) == place), None)
        if after is None or not isinstance(before, SourceRow):
            raise CorruptError(
                f"{line['where']} of {line['source']} is not the row that it was",
                "take the sources as they were when the prompts were made",
            )
        yield ChangedRow(before, after, tuple(Finding(**one) for one in line["found"]))


def same_sources(output: Artifact) -> list[SourceConfig]:
    """The sources of a result, at the places where they were read. Raises what reading them raises,
    and CorruptError where one has changed.
    """
    sources = []
    for label, made in output.manifest("prompts").inputs.items():
        source = SourceConfig(path=made.url, name=label, **made.facts.get("read_as", {}))
        if describe(source).identity != made.identity:
            raise CorruptError(
                f"{made.url} is not what it was when the prompts were made",
                "put the source back as it was, or make the prompts again",
            )
        sources.append(source)
    return sources


def sampled_ids(output: Artifact, key: bytes) -> set[str]:
    """NUM_SAMPLES of the changed rows, drawn by the key: the same ones in each run."""
    ids = (line["id"] for line in output.read_rows(CHANGED))
    return set(heapq.nsmallest(NUM_SAMPLES, ids, key=lambda id: keyed(key, "sample", id)))


def show_changed(output: Artifact, type: str) -> Iterator[str]:
    """The changed rows of a result with a finding of a type that begins so, as text, with a count
    at the end. Raises as `same_sources` and `changed_rows`.
    """
    wanted, rows, types = type.strip().upper(), 0, Counter[str]()
    for row in changed_rows(output, same_sources(output)):
        types.update({one.type for one in row.found})
        if any(one.type.startswith(wanted) for one in row.found):
            rows += 1
            yield from map(printable, row.lines())
    there = ", ".join(f"{type} {count}" for type, count in sorted(types.items()))
    yield printable(f"{rows} rows; changed rows by type: {there or 'none'}")


def show_samples(output: Artifact) -> Iterator[str]:
    """The encrypted samples of a result, with the privacy key. Raises MissingInputError where there
    are none, and as `decrypted`.
    """
    if not output.exists(FILE):
        raise MissingInputError(
            f"{output.url} holds no samples",
            "make the prompts with `record: {samples: encrypted}`, or take --diff",
        )
    return map(printable, decrypted(output.read(FILE), privacy_key()))


def encrypted(lines: Iterable[str], key: bytes) -> bytes:
    """The lines as a Fernet token (AES-128-CBC with HMAC-SHA256) under a key that is derived from
    the privacy key. Raises ConfigError without `cryptography`.
    """
    content = json.dumps({"key": key_id(key), "lines": list(lines)}, ensure_ascii=False)
    token: bytes = _fernet(key).encrypt(content.encode("utf-8", "surrogatepass"))
    return token


def decrypted(token: bytes, key: bytes) -> list[str]:
    """The reverse. Raises ConfigError for another key."""
    fernet = _fernet(key)
    try:
        content: Mapping[str, Any] = json.loads(fernet.decrypt(token))
    # its class is known once the package is there
    except importlib.import_module("cryptography.fernet").InvalidToken as error:
        raise ConfigError(
            f"the samples cannot be read with the privacy key {key_id(key)}",
            "the card names the id of their key: set EYAS_PRIVACY_KEY, or restore that key's file",
        ) from error
    return list(content["lines"])


def _fernet(key: bytes) -> Any:
    try:
        module = importlib.import_module("cryptography.fernet")
    except ImportError as error:
        raise ConfigError(
            "encrypted samples need the package cryptography, which is not installed",
            "pip install 'eyas[samples]', or take `samples: terminal` or `none`",
        ) from error
    return module.Fernet(base64.urlsafe_b64encode(keyed(key, "samples")))


def _marked(text: str, found: Iterable[Finding]) -> str:
    """The text with [TYPE: ...] around what was found."""
    parts, end = [], 0
    for one in sorted(found, key=lambda one: one.start):
        parts += [text[end : one.start], f"[{one.type}: {text[one.start : one.end]}]"]
        end = one.end
    return "".join([*parts, text[end:]])
