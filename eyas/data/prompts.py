"""The stage `prompts`: raw conversation sets -> cleaned user prompts, a ledger, and every dropped
row with its reason.

Knows the flow. Knows no file format, no pattern and no model.

    prompts-00000.jsonl   records.Prompt, in the order of the sources
    dropped-00000.jsonl   a redacted line per dropped row
    ledger.json           rows in = rows out + drops, by source and reason
    card.html             the same for the person who signs
    fit.json              how near the prompts are to the traffic, where they are to match it
    work/                 finished blocks and the selection, until all is written

Three steps, of which a killed run repeats none that it finished: blocks of rows go through the
filters, in any number of processes; what depends on other rows is decided on digests of those that
are left; what is taken is written.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import itertools
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eyas.artifact import VERSION, WORK, Artifact, Manifest, Parts, identity
from eyas.data import fit, mix
from eyas.data.blocks import BLOCK_ROWS, Blocks, cut
from eyas.data.card import CardContents, write_card
from eyas.data.duplicates import DuplicatesConfig
from eyas.data.executor import Executor, LocalExecutor
from eyas.data.language import LanguageConfig
from eyas.data.ledger import Ledger
from eyas.data.licence import gate, require
from eyas.data.policy import read_policy
from eyas.data.quality import QualityConfig
from eyas.data.rows import Row
from eyas.data.selection import Match, Rows, Selection, Wanted, select
from eyas.data.sieve import Cleaning, Gone
from eyas.data.sources import SourceConfig, describe, read_source
from eyas.errors import ConfigError, EmptyInputError
from eyas.log import Track, quiet
from eyas.privacy import detector
from eyas.privacy.key import fingerprint, privacy_key
from eyas.privacy.policy import PrivacyConfig
from eyas.records import Prompt

ROWS_PER_PART = 10_000  # of prompts, and of dropped rows
SELECTION, VERSIONS, FIT = f"{WORK}/selection.npz", f"{WORK}/versions.json", f"{WORK}/fit.json"
LIBRARIES = ("numpy", "py3langid")  # that results depend on, besides those of the detector


class PromptsConfig(BaseModel):
    """What to read and what to let through. `executor` and `workers` say where the work runs, and
    change nothing of it.
    """

    model_config = ConfigDict(extra="forbid")

    sources: list[SourceConfig] = Field(min_length=1)
    policy: str | None = Field(
        default=None, description="file of rules for licences and authors; None: the shipped ones"
    )
    personal: PrivacyConfig = PrivacyConfig()
    duplicates: DuplicatesConfig = DuplicatesConfig()
    evaluation: list[SourceConfig] = Field(
        default=[], description="sets whose items no prompt may overlap"
    )
    quality: QualityConfig = QualityConfig()
    language: LanguageConfig = LanguageConfig()
    match: fit.MatchConfig | None = None
    mix: dict[str, float] | None = Field(
        default=None, description="shares by source; None takes all there is"
    )
    max_characters: int = Field(
        default=8000, ge=1, description="of a conversation's user turns and system prompt together"
    )
    max_prompts: int | None = Field(
        default=None, ge=1, description="stop reading after so many; None reads all"
    )
    seed: int = Field(default=0, ge=0, description="of what `match` and `mix` draw")
    executor: Literal["local", "ray"] = "local"
    workers: int = Field(default=1, ge=1, description="processes, or actors on Ray")

    @model_validator(mode="after")
    def _names_differ(self) -> PromptsConfig:
        for sources in (self.sources, self.evaluation):
            twice = [
                name
                for name, count in Counter(source.label for source in sources).items()
                if count > 1
            ]
            if twice:
                raise ConfigError(
                    f"two sources are called {twice[0]!r}", "give each a `name` of its own"
                )
        return self

    def settings(self, key: bytes) -> dict[str, Any]:
        """What the result depends on besides the sources: the config with what files hold in place
        of where they lie.

        Raises what reading those files raises.
        """
        places = {"sources", "policy", "evaluation", "executor", "workers"}
        settings = self.model_dump(mode="json", exclude=places)
        if self.match:
            settings["match"]["traffic"] = describe(traffic_source(self.match)).identity
        return {
            **settings,
            "policy": read_policy(self.policy).title,
            "evaluation": {source.label: describe(source).identity for source in self.evaluation},
            "key": fingerprint(key),
        }

    def work(self, key: bytes) -> Cleaning:
        """What is to be done with each row."""
        return Cleaning(
            labels=tuple(self.labels),
            key=key,
            max_characters=self.max_characters,
            quality=self.quality,
            language=self.language,
            evaluation=tuple(self.evaluation),
            personal=self.personal,
            grams=self.match is not None,
        )

    @property
    def labels(self) -> list[str]:
        return [source.label for source in self.sources]


def traffic_source(config: fit.MatchConfig) -> SourceConfig:
    """The sample of production prompts. Nothing of it is kept, so nobody asks for its licence."""
    return SourceConfig(path=config.traffic, name="traffic")


# The flow


def make_prompts(config: PromptsConfig, output: Artifact, track: Track = quiet) -> Manifest:
    """Read the sources, clean them, and write the artifact `prompts`; at once if that is done, from
    where it was cut if not.

    Raises InputError that lists every source that the policy refuses, before a row is read;
    MissingInputError, CorruptError, InputError (a source, an evaluation set, a policy, the
    traffic); EmptyInputError (a source without rows, or no prompt left).
    """
    verdicts = gate(config.sources, read_policy(config.policy))
    require(verdicts)
    key = privacy_key()
    inputs = {source.label: describe(source) for source in config.sources}
    settings = config.settings(key)
    work = identity("prompts", settings, inputs)
    if not output.begin(work):
        return output.manifest("prompts")
    _same_versions(output)
    with _executor(config, key) as executor:
        if not output.exists(SELECTION):
            decide(config, output, finished_blocks(config, Blocks(output), executor, track))
        ledger = Ledger(
            versions(), policies(config, key), [verdict.to_json() for verdict in verdicts]
        )
        write(
            config,
            output,
            ledger,
            {verdict.source: verdict.licence for verdict in verdicts},
            executor,
        )
    sum_up(config, output, ledger, work)
    total = ledger.total
    track(total.rows_in, total.rows_in)
    if not total.rows_out:
        reasons = ", ".join(f"{count} {reason}" for reason, count in total.dropped.most_common())
        raise EmptyInputError(
            f"no prompt is left of {total.rows_in} rows ({reasons})",
            f"{output.url}/dropped-*.jsonl says why each row went",
        )
    counts = {
        "rows": total.rows_in,
        "prompts": total.rows_out,
        "dropped": total.dropped.total(),
        "masked": total.rows_masked,
    }
    return output.finish("prompts", settings, inputs, counts, facts={"ledger": ledger.facts()})


def _executor(config: PromptsConfig, key: bytes) -> Executor:
    """Where the work runs. Ray is loaded when it is asked for: half a second and 55 MB."""
    if config.executor == "local":
        return LocalExecutor(config.work(key), config.workers)
    made: Executor = importlib.import_module("eyas.data.ray_executor").RayExecutor(
        config.work(key), config.workers
    )
    return made


def _same_versions(output: Artifact) -> None:
    """Throw away what another version of eyas or of a library began: half of one and half of the
    other is neither.
    """
    now = versions()
    if not output.exists(VERSIONS) or output.read_json(VERSIONS) != now:
        for name in (*output.parts("prompts"), *output.parts("dropped")):
            output.delete(name)
        output.delete_work()
        output.write_json(VERSIONS, now)


def versions() -> dict[str, Any]:
    """Of eyas, of its parts that count theirs, and of the libraries that results depend on."""
    libraries = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {
        "eyas": VERSION,
        "fit": fit.VERSION,
        "mix": mix.VERSION,
        **libraries,
        **detector.versions(),
    }


def policies(config: PromptsConfig, key: bytes) -> dict[str, Any]:
    """What each filter was told, for the ledger."""
    kept = {"max_characters", "quality", "language", "personal", "duplicates"}
    return {**config.model_dump(mode="json", include=kept), "key": fingerprint(key)}


def decide(config: PromptsConfig, output: Artifact, finished: Generator[int]) -> None:
    """Wait for the blocks, and write the decisions on their rows; and how near those taken are to
    the traffic, if asked.
    """
    halves = None
    if config.match:
        halves = fit.traffic_halves(
            row for row in read_source(traffic_source(config.match)) if isinstance(row, Row)
        )
    match = Match(halves[0].grams, config.match.num_prompts) if config.match and halves else None
    wanted = Wanted(
        config.labels, config.duplicates.near, match, config.mix, config.max_prompts, config.seed
    )
    blocks = Blocks(output)
    selection = chosen(config, blocks, wanted, finished)
    if halves:
        rows = Rows(blocks, selection.num_blocks)
        profiles = (
            rows.profile(config.labels, selection.unrepeated),
            rows.profile(config.labels, selection.taken),
        )
        output.write_json(FIT, fit.report(*profiles, *halves))
    output.write(SELECTION, selection.to_bytes())


def chosen(
    config: PromptsConfig, blocks: Blocks, wanted: Wanted, finished: Generator[int]
) -> Selection:
    """The decisions on all rows; where `max_prompts` ends the reading, on the rows of as many
    blocks as give so many.

    How far is read follows from the rows alone, not from how many blocks were on their way.
    """
    drawn = config.match is not None or config.mix is not None  # from all there is
    with contextlib.closing(finished):
        reading = Reading(blocks, finished)
        enough = None if drawn else config.max_prompts
        while True:
            reading.go_on(enough)
            selection = select(Rows(blocks, reading.num_blocks), wanted)
            if (
                enough is None
                or config.max_prompts is None
                or reading.ended
                or selection.num_taken == config.max_prompts
            ):
                return selection
            # for the near-duplicates among them
            enough = reading.num_different + config.max_prompts - selection.num_taken


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
                self._fingerprints.update(
                    map(bytes, self._blocks.digests(number - 1, "fingerprint")["fingerprint"])
                )


def finished_blocks(
    config: PromptsConfig, blocks: Blocks, executor: Executor, track: Track
) -> Generator[int]:
    """How many blocks are finished, each time one more is: those of an earlier run at once, the
    others as they come.
    """
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


def write(
    config: PromptsConfig,
    output: Artifact,
    ledger: Ledger,
    licences: Mapping[str, str],
    executor: Executor,
) -> None:
    """Write the rows that were taken and the entries of those that were not, and count both.

    licences: what holds for each source, stated or known.
    """
    blocks = Blocks(output)
    selection = Selection.from_bytes(output.read(SELECTION))
    rows = Rows(blocks, selection.num_blocks)
    prompts, dropped = (
        Parts(output, "prompts", ROWS_PER_PART),
        Parts(output, "dropped", ROWS_PER_PART),
    )
    jobs = (not_taken(rows, selection, block) for block in range(selection.num_blocks))
    with contextlib.closing(executor.map(jobs)) as redacted:
        for block, entries in enumerate(redacted):
            digests = blocks.digests(block, "rows_in", "language")
            for label, count in zip(config.labels, digests["rows_in"].tolist(), strict=True):
                ledger.came_in(label, count)
            numbers, languages = (
                itertools.count(rows.first(block)),
                iter(digests["language"].tolist()),
            )
            late = iter(entries)
            for one in blocks.entries(block):
                line = one if isinstance(one, dict) else None
                if isinstance(one, Row):
                    number, language = next(numbers), next(languages)
                    if selection.taken[number]:
                        ledger.went_out(one, language)
                        id, licence = selection.id(number, one), licences[one.source]
                        prompts.add(
                            Prompt(id, one.source, licence, one.turns, one.system).to_json()
                        )
                    else:
                        line = next(late)
                if line is not None:
                    ledger.dropped(line)
                    dropped.add(line)
    prompts.close()
    dropped.close()


def sum_up(config: PromptsConfig, output: Artifact, ledger: Ledger, identity: str) -> None:
    """Write the ledger, and the card for people."""
    output.write_json("ledger.json", ledger.to_json())
    fitted = output.read_json(FIT) if config.match else None
    if fitted:
        output.write_json("fit.json", fitted)
    contents = CardContents(
        ledger.to_json(), fitted, [source.label for source in config.evaluation], identity=identity
    )
    output.write("card.html", write_card(contents).encode())


def not_taken(rows: Rows, selection: Selection, block: int) -> Gone:
    """The rows of a block that passed the filters and go all the same."""
    left = (one for one in rows.blocks.entries(block) if isinstance(one, Row))
    drops = (
        (row, selection.drop(number, rows))
        for number, row in enumerate(left, start=rows.first(block))
    )
    return tuple((row, drop) for row, drop in drops if drop is not None)
