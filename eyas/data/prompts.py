"""The stage `prompts`: raw conversation sets -> cleaned user prompts, a ledger, and every dropped row with its reason.

Knows the order of the filters and the flow. Knows no file format, no pattern and no model.

    prompts-00000.jsonl   records.Prompt, in the order of the sources
    dropped-00000.jsonl   a redacted line per dropped row
    ledger.json           rows in = rows out + drops, by source and reason
    work/                 finished blocks and the selection, until all is written

Three steps, of which a killed run repeats none that it finished: blocks of rows go through the filters, in any number of
processes; what depends on other rows is decided on digests of those that are left; what is taken is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from eyas.artifact import VERSION, WORK, Artifact, Manifest, Parts, identity
from eyas.data import fit
from eyas.data.blocks import BLOCK_ROWS, Block, Blocks, Lines, Sifted, cut
from eyas.data.duplicates import DuplicatesConfig
from eyas.data.executor import Executor, LocalExecutor
from eyas.data.ledger import Ledger, entry
from eyas.data.personal import PersonalData, PersonalPolicy, find
from eyas.data.ray_executor import RayExecutor
from eyas.data.rows import Damaged, Drop, Filter, Row
from eyas.data.selection import Match, Rows, Selection, Wanted, row_digests, select
from eyas.data.sources import SourceConfig, describe, read_source
from eyas.errors import ConfigError, EmptyInputError, EyasError
from eyas.log import Track, quiet
from eyas.records import Prompt

ROWS_PER_PART = 10_000  # of prompts, and of dropped rows
SELECTION, VERSIONS = f"{WORK}/selection.npz", f"{WORK}/versions.json"
DECIDING = ("presidio-analyzer", "phonenumbers", "tldextract", "numpy")  # libraries that results depend on

Gone = tuple[tuple[Row, Drop], ...]


class PromptsConfig(BaseModel):
    """What to read and what to let through. `executor` and `workers` say where the work runs, and change nothing of it."""

    model_config = ConfigDict(extra="forbid")

    sources: list[SourceConfig] = Field(min_length=1)
    personal: PersonalPolicy = PersonalPolicy()
    duplicates: DuplicatesConfig = DuplicatesConfig()
    match: fit.MatchConfig | None = None
    mix: dict[str, float] | None = Field(default=None, description="shares by source; None takes all there is")
    max_characters: int = Field(default=8000, ge=1, description="of a conversation's user turns and system prompt together")
    max_prompts: int | None = Field(default=None, ge=1, description="stop reading after so many; None reads all")
    seed: int = Field(default=0, ge=0, description="of what `match` and `mix` draw")
    executor: Literal["local", "ray"] = "local"
    workers: int = Field(default=1, ge=1, description="processes, or actors on Ray")

    @model_validator(mode="after")
    def _names_differ(self) -> PromptsConfig:
        twice = [name for name, count in Counter(source.label for source in self.sources).items() if count > 1]
        if twice:
            raise ConfigError(f"two sources are called {twice[0]!r}", "give each a `name` of its own")
        return self

    def settings(self) -> dict[str, Any]:
        """The config without paths and places: the same bytes make the same artifact wherever they lie."""
        return self.model_dump(
            mode="json", exclude={"sources": {"__all__": {"path"}}, "match": {"traffic"}, "executor": True, "workers": True}
        )

    @property
    def labels(self) -> list[str]:
        return [source.label for source in self.sources]


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
    """The filters that look at one row, in order: cheap ones first, and none that searches a text that is too long."""
    return [Empty(), TooLong(config.max_characters), PersonalData(config.personal)]


@dataclasses.dataclass(frozen=True)
class Cleaning:
    """The work of the stage, as it is sent to a process: blocks to sift, and rows to redact."""

    config: PromptsConfig

    def ready(self) -> Callable[[Block | Gone], Sifted | list[dict[str, Any]]]:
        """The function on both, with its filters built."""
        return functools.partial(clean, filters=filters(self.config), config=self.config)


def clean(job: Block | Gone, filters: Sequence[Filter], config: PromptsConfig) -> Sifted | list[dict[str, Any]]:
    """A block sifted, or the entries of rows that passed the filters and go all the same."""
    if isinstance(job, Block):
        return sift(job, filters, config)
    return [entry(row, drop, find) for row, drop in job]


def sift(block: Block, filters: Sequence[Filter], config: PromptsConfig) -> Sifted:
    """What the filters make of each row of a block, and the digests of those that are left. Depends on the block alone."""
    lines = Lines()
    left: list[Row] = []
    for row in block.rows:
        result: Row | Drop = row.drop if isinstance(row, Damaged) else passed(row, filters)
        if isinstance(result, Drop):
            lines.drop(entry(row, result, find))
        else:
            lines.keep(result)
            left.append(result)
    digests = row_digests(left)
    digests["rows_in"] = np.bincount([config.labels.index(row.source) for row in block.rows], minlength=len(config.labels))
    digests["place"] = lines.places()
    digests["source"] = np.array([config.labels.index(row.source) for row in left], dtype=np.uint16)
    if config.match:
        grams = fit.digest(left)
        digests |= {"grams": grams.grams, "counts": grams.counts, "characters": grams.characters}
    return Sifted(block.number, lines.text(), digests)


def passed(row: Row, filters: Sequence[Filter]) -> Row | Drop:
    """What the filters make of a row; the first drop ends it.

    Raises EyasError where a filter fails: the row by its place, the failure by its place in the code. What it says may quote
    the row, so it is not passed on.
    """
    result: Row | Drop = row
    for keep in filters:
        if isinstance(result, Drop):
            break
        try:
            result = keep(result)
        except EyasError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{frame.filename}:{frame.lineno}"
            raise EyasError(
                f"{type(keep).__name__} failed on {row.where} of {row.source}: {type(error).__name__} at {place}",
                "this is a bug of eyas or of a library; leave the row out and run again: finished blocks are kept",
            ) from None
    return result


# The flow


def make_prompts(config: PromptsConfig, output: Artifact, track: Track = quiet) -> Manifest:
    """Read the sources, clean them, and write the artifact `prompts`; at once if that is done, from where it was cut if not.

    Raises MissingInputError, CorruptError, InputError (a source), EmptyInputError (a source without rows, or no prompt left).
    """
    inputs = {source.label: describe(source) for source in config.sources}
    settings = config.settings()
    if not output.begin(identity("prompts", settings, inputs)):
        return output.manifest("prompts")
    _same_versions(output)
    blocks = Blocks(output)
    kind = RayExecutor if config.executor == "ray" else LocalExecutor
    with kind(Cleaning(config), config.workers) as executor:
        if not output.exists(SELECTION):
            finished = finished_blocks(config, blocks, executor, track)
            output.write(SELECTION, chosen(config, blocks, finished).to_bytes())
        ledger = write(config, output, Selection.from_bytes(output.read(SELECTION)), executor)
    total = ledger.total
    track(total.rows_in, total.rows_in)
    output.write_json("ledger.json", ledger.to_json())
    if not total.rows_out:
        reasons = ", ".join(f"{count} {reason}" for reason, count in total.dropped.most_common())
        raise EmptyInputError(
            f"no prompt is left of {total.rows_in} rows ({reasons})", f"{output.url}/dropped-*.jsonl says why each row went"
        )
    counts = {"rows": total.rows_in, "prompts": total.rows_out, "dropped": total.dropped.total(), "masked": total.rows_masked}
    return output.finish("prompts", settings, inputs, counts, facts={"ledger": ledger.facts()})


def _same_versions(output: Artifact) -> None:
    """Throw away what another version of eyas or of a library began: half of one and half of the other is neither."""
    now = versions()
    if not output.exists(VERSIONS) or output.read_json(VERSIONS) != now:
        output.delete_work()
        output.write_json(VERSIONS, now)


def versions() -> dict[str, str]:
    """Of eyas and of the libraries that results depend on."""
    return {"eyas": VERSION, **{name: importlib.metadata.version(name) for name in DECIDING}}


def chosen(config: PromptsConfig, blocks: Blocks, finished: Generator[int]) -> Selection:
    """The decisions on all rows; where `max_prompts` ends the reading, on the rows of as many blocks as give so many.

    How far is read follows from the rows alone, not from how many blocks were on their way.
    """
    wanted = Wanted(
        labels=config.labels,
        near=config.duplicates.near,
        match=_match(config.match) if config.match else None,
        mix=config.mix,
        limit=config.max_prompts,
        seed=config.seed,
    )
    drawn = config.match is not None or config.mix is not None  # from all there is
    with contextlib.closing(finished):
        reading = Reading(blocks, finished)
        enough = None if drawn else config.max_prompts
        while True:
            reading.go_on(enough)
            selection = select(Rows(blocks, reading.num_blocks), wanted)
            if enough is None or config.max_prompts is None or reading.ended or selection.num_taken == config.max_prompts:
                return selection
            enough = reading.num_different + config.max_prompts - selection.num_taken  # for the near-duplicates among them


class Reading:
    """Blocks as they are finished, and how many different rows are left in them."""

    def __init__(self, blocks: Blocks, finished: Iterator[int]) -> None:
        self.num_blocks = 0
        self.ended = False
        self._blocks, self._finished = blocks, finished
        self._fingerprints: set[bytes] = set()

    @property
    def num_different(self) -> int:
        return len(self._fingerprints)

    def go_on(self, enough: int | None) -> None:
        """Wait for more blocks, until so many different rows are left, or to the end."""
        while not self.ended and (enough is None or self.num_different < enough):
            number = next(self._finished, None)
            if number is None:
                self.ended = True
                break
            self.num_blocks = number
            if enough is not None:
                self._fingerprints.update(map(bytes, self._blocks.digests(number - 1, "fingerprint")["fingerprint"]))


def _match(config: fit.MatchConfig) -> Match:
    """What the rows should resemble: the n-grams of one half of the traffic."""
    source = SourceConfig(path=config.traffic, licence="LicenseRef-traffic")
    fitted, _ = fit.traffic_halves(row for row in read_source(source) if isinstance(row, Row))
    return Match(fitted.grams, config.num_prompts)


def finished_blocks(config: PromptsConfig, blocks: Blocks, executor: Executor, track: Track) -> Generator[int]:
    """How many blocks are finished, each time one more is: those of an earlier run at once, the others as they come."""
    number = 0
    while blocks.has(number):
        number += 1
        yield number
    rows = (row for source in config.sources for row in read_source(source))
    missing = itertools.islice(cut(rows), number, None)
    with contextlib.closing(executor.map(missing)) as sifted:
        for block in sifted:
            assert block.number == number, "blocks come in order, so that finished ones have no gap"
            blocks.write(block)
            number += 1
            track(number * BLOCK_ROWS)
            yield number


def write(config: PromptsConfig, output: Artifact, selection: Selection, executor: Executor) -> Ledger:
    """Write the rows that were taken and the entries of those that were not, and count both."""
    ledger = Ledger(versions())
    blocks = Blocks(output)
    rows = Rows(blocks, selection.num_blocks)
    prompts, dropped = Parts(output, "prompts", ROWS_PER_PART), Parts(output, "dropped", ROWS_PER_PART)
    jobs = (not_taken(rows, selection, block) for block in range(selection.num_blocks))
    with contextlib.closing(executor.map(jobs)) as redacted:
        for block, entries in enumerate(redacted):
            for label, count in zip(config.labels, blocks.digests(block, "rows_in")["rows_in"].tolist(), strict=True):
                ledger.came_in(label, count)
            redacted_rows, number = iter(entries), rows.first(block)
            for one in blocks.entries(block):
                line = one if isinstance(one, dict) else None
                if isinstance(one, Row):
                    if selection.takes(number):
                        ledger.went_out(one)
                        prompts.add(Prompt(selection.id(number, one), one.source, one.licence, one.turns, one.system).to_json())
                    else:
                        line = next(redacted_rows)
                    number += 1
                if line is not None:
                    ledger.dropped(line)
                    dropped.add(line)
    prompts.close()
    dropped.close()
    return ledger


def not_taken(rows: Rows, selection: Selection, block: int) -> Gone:
    """The rows of a block that passed the filters and go all the same."""
    left = (one for one in rows.blocks.entries(block) if isinstance(one, Row))
    drops = ((row, selection.drop(number, rows)) for number, row in enumerate(left, start=rows.first(block)))
    return tuple((row, drop) for row, drop in drops if drop is not None)
