"""The stage `prompts`: raw conversation sets -> cleaned user prompts, a ledger, and every dropped row with its reason.

Knows the order of the filters. Knows no file format, no pattern and no model.

    prompts-00000.jsonl   records.Prompt, in the order of the sources
    dropped-00000.jsonl   a redacted line per dropped row
    ledger.json           rows in = rows out + drops, by source and reason
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eyas.artifact import Artifact, Manifest, Parts, identity
from eyas.data.duplicates import Duplicates, fingerprint
from eyas.data.ledger import Ledger
from eyas.data.personal import PersonalData, PersonalPolicy
from eyas.data.rows import Damaged, Drop, Filter, Row
from eyas.data.sources import SourceConfig, describe, read_source
from eyas.errors import ConfigError, EmptyInputError
from eyas.log import Track, quiet
from eyas.records import Prompt

REPORT_EVERY = 200  # rows between two reports of progress
ROWS_PER_PART = 10_000  # of prompts, and of dropped rows
ID_DIGITS = 16  # of the fingerprint, in hex


class PromptsConfig(BaseModel):
    """What to read and what to let through."""

    model_config = ConfigDict(extra="forbid")

    sources: list[SourceConfig] = Field(min_length=1)
    personal: PersonalPolicy = PersonalPolicy()
    max_characters: int = Field(default=8000, ge=1, description="of a conversation's user turns and system prompt together")
    max_prompts: int | None = Field(default=None, ge=1, description="stop reading after so many; None reads all")

    @model_validator(mode="after")
    def _names_differ(self) -> PromptsConfig:
        twice = [name for name, count in Counter(source.label for source in self.sources).items() if count > 1]
        if twice:
            raise ConfigError(f"two sources are called {twice[0]!r}", "give each a `name` of its own")
        return self

    def settings(self) -> dict[str, Any]:
        """The config without paths: the same bytes make the same artifact wherever they lie."""
        return self.model_dump(mode="json", exclude={"sources": {"__all__": {"path"}}})


class Empty:
    """Drops a row in which the user says nothing."""

    def __call__(self, row: Row) -> Row | Drop:
        return row if row.turns else Drop("empty", note="no user turn with text")


class TooLong:
    """Drops a row of more than `limit` characters. Stands before all that searches the text."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def __call__(self, row: Row) -> Row | Drop:
        count = sum(map(len, row.turns)) + len(row.system or "")
        return row if count <= self._limit else Drop("too_long", note=f"{count} characters, allowed are {self._limit}")


def filters(config: PromptsConfig) -> list[Filter]:
    """The filters in order. Duplicates come last: rows may be the same once their personal data is masked."""
    return [Empty(), TooLong(config.max_characters), PersonalData(config.personal), Duplicates()]


def sift(rows: Iterable[Row | Damaged], filters: Sequence[Filter], ledger: Ledger) -> Iterator[Row]:
    """The rows that pass every filter, as changed by them; each row in, out or dropped is entered in the ledger."""
    for row in rows:
        ledger.came_in(row)
        result: Row | Drop = row.drop if isinstance(row, Damaged) else passed(row, filters)
        if isinstance(result, Drop):
            ledger.dropped(row, result)
        else:
            ledger.went_out(result)
            yield result


def passed(row: Row, filters: Sequence[Filter]) -> Row | Drop:
    """What the filters make of a row; the first drop ends it."""
    result: Row | Drop = row
    for keep in filters:
        if isinstance(result, Drop):
            break
        result = keep(result)
    return result


def numbered(rows: Iterable[Row]) -> Iterator[Prompt]:
    """Prompts with unique ids: the source's own where it has one that is not taken yet, else one made from the text."""
    taken: set[str] = set()
    for row in rows:
        id = row.id
        if id is None or id in taken:
            made = fingerprint(row)
            longer = (f"{made}.{count}" for count in itertools.count())  # where a source's own id looks like a fingerprint
            id = next(one for one in itertools.chain([made[:ID_DIGITS]], longer) if one not in taken)
        taken.add(id)
        yield Prompt(id=id, source=row.source, licence=row.licence, turns=row.turns, system=row.system)


def make_prompts(config: PromptsConfig, output: Artifact, track: Track = quiet) -> Manifest:
    """Read the sources, clean them, and write the artifact `prompts`; at once if that is done.

    Raises MissingInputError, CorruptError, InputError (a source), EmptyInputError (a source without rows, or no prompt left).
    """
    settings = config.settings()
    inputs = {source.label: describe(source) for source in config.sources}
    if not output.begin(identity("prompts", settings, inputs)):
        return output.manifest("prompts")
    ledger = Ledger()
    rows = (row for source in config.sources for row in read_source(source))
    kept = Parts(output, "prompts", ROWS_PER_PART)
    for prompt in numbered(sift(rows, filters(config), ledger)):
        kept.add(prompt.to_json())
        num_prompts = kept.num_rows
        if num_prompts % REPORT_EVERY == 0:
            track(num_prompts, note=prompt.source)
        if num_prompts == config.max_prompts:
            break
    num_prompts = kept.num_rows
    track(num_prompts, num_prompts)
    output.write_json("ledger.json", ledger.to_json())
    output.write("dropped-00000.jsonl", ledger.dropped_jsonl())
    total = ledger.total
    if not num_prompts:
        reasons = ", ".join(f"{count} {reason}" for reason, count in total.dropped.most_common())
        raise EmptyInputError(
            f"no prompt is left of {total.rows_in} rows ({reasons})", f"{output.url}/dropped-*.jsonl says why each row went"
        )
    kept.close()
    counts = {"rows": total.rows_in, "prompts": total.rows_out, "dropped": total.dropped.total(), "masked": total.rows_masked}
    return output.finish("prompts", settings, inputs, counts, facts={"ledger": ledger.to_json()})
