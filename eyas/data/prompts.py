"""The stage `prompts`: raw conversation sets -> cleaned user prompts, a ledger and a data card.

    prompts-00000.jsonl   records.Prompt, in the order of the sources
    dropped-00000.jsonl   a redacted line per dropped row
    changed-00000.jsonl   a line per prompt in which something was replaced: place, types, hashes
    ledger.json           rows in = rows out + drops, by source and reason
    card.html             the same for the person who signs
    match.json            how near the prompts are to the traffic, if `match` is set
    work/                 finished blocks and the selection, until everything is written

Three steps, of which a killed run repeats none that it finished: blocks of rows go through the
filters, in any number of processes; what depends on other rows is decided on digests; what is taken
is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import itertools
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from eyas.artifact import VERSION, WORK, Artifact, Manifest, Parts, identity
from eyas.data.card import CardContents, write_card
from eyas.data.filters import FILTERS, CleaningTask, LateDrops, in_languages
from eyas.data.formats import FileLook
from eyas.data.ledger import Ledger, SourceRow
from eyas.data.licence import Verdict, gate, require
from eyas.data.licence_rules import read_policy
from eyas.data.logs import LogConfig
from eyas.data.match import VERSION as MATCH_VERSION
from eyas.data.match import MatchConfig, match_report, traffic_halves
from eyas.data.selection import (
    BLOCK_ROWS,
    BlockStore,
    RemainingRows,
    Selection,
    SelectionRules,
    cut,
    select,
)
from eyas.data.sources import SourceConfig, describe, looks, read_source
from eyas.errors import ConfigError, CorruptError, EmptyInputError, InputError
from eyas.executor import Executor, Place, open_executor
from eyas.log import Track, quiet
from eyas.privacy import detector
from eyas.privacy.key import key_id, key_place, privacy_key
from eyas.privacy.pii import TYPES, PrivacyConfig
from eyas.records import Prompt
from eyas.settings import Settings

ROWS_PER_PART = 10_000  # of prompts, of dropped and of changed rows
STEMS = ("prompts", "dropped", "changed")
SELECTION, VERSIONS, REPORT = f"{WORK}/selection.npz", f"{WORK}/versions.json", f"{WORK}/match.json"
LIBRARIES = ("numpy", "py3langid")  # besides those of the detector


class PromptsConfig(Settings):
    """What to read and what to keep. `executor` and `workers` do not change the result."""

    sources: list[SourceConfig] = Field(
        min_length=1, description="what to read, each with its licence"
    )
    policy: str | None = Field(
        None, description="file of rules for licences and authors; null: ours"
    )
    personal: PrivacyConfig = PrivacyConfig()
    near_duplicates: float | None = Field(
        0.85,
        ge=0.7,
        le=1,
        description="Jaccard of word pairs that drops the later of two rows; null: only exact "
        "duplicates",
    )
    evaluation: list[SourceConfig] = Field([], description="sets whose items no prompt may overlap")
    languages: tuple[str, ...] | None = Field(
        None, description="kept languages, ISO 639-1 codes such as [en, de]; null: all"
    )
    match: MatchConfig | None = Field(
        None, description="prompts like those of a log; null: no selection"
    )
    record: dict[str, str] = Field(
        {},
        description="facts of the processing for the card, HEADING: TEXT: operator, purpose, "
        "legal basis, retention, erasure, custody of the key",
    )
    damaged: Literal["warn", "error"] = Field(
        "warn",
        description="if a file is cut, or over 3 % of a source's rows are unreadable: what to do",
    )
    max_characters: int = Field(8000, ge=1, description="of user turns and system prompt together")
    max_prompts: int | None = Field(None, ge=1, description="stop reading after so many; null: all")
    seed: int = Field(0, ge=0, description="of the draws by `match` and `max_prompts`")
    executor: Place = Field("local", description="where the work runs; the result is the same")
    workers: int = Field(1, ge=1, description="processes, or actors on Ray")

    @model_validator(mode="after")
    def _is_whole(self) -> PromptsConfig:
        for sources in (self.sources, self.evaluation):
            counts = Counter(source.label for source in sources)
            twice = next((name for name, count in counts.items() if count > 1), None)
            if twice:
                raise ConfigError(
                    f"two sources are called {twice!r}", "give each a `name` of its own"
                )
        in_languages(self.languages or ())
        return self

    @property
    def labels(self) -> list[str]:
        return [source.label for source in self.sources]

    def settings(self, key: bytes) -> dict[str, Any]:
        """What the result depends on besides the sources, with contents in place of paths."""
        places = {"sources", "policy", "evaluation", "executor", "workers", "damaged", "record"}
        settings = self.model_dump(mode="json", exclude=places)
        if self.match:
            settings["match"]["traffic"] = describe(traffic_source(self.match)).identity
        limits = {one.label: one.max_prompts for one in self.sources if one.max_prompts}
        return {
            **settings,
            "limits": limits,
            "policy": read_policy(self.policy).title,
            "filters": {entry.name: entry.limits for entry in FILTERS},
            "evaluation": {source.label: describe(source).identity for source in self.evaluation},
            "key": key_id(key),
            "types": list(TYPES),
            "recognisers": {
                name: version
                for policy in self.policies.values()
                for name, version in detector.recogniser_versions(policy).items()
            },
        }

    @property
    def policies(self) -> dict[str, PrivacyConfig]:
        return {source.label: source.privacy(self.personal) for source in self.sources}

    def task(self, key: bytes) -> CleaningTask:
        """The work on each row."""
        return CleaningTask(
            labels=tuple(self.labels),
            key=key,
            max_characters=self.max_characters,
            languages=self.languages,
            evaluation=tuple(self.evaluation),
            personal=tuple(self.policies.values()),
            grams=self.match is not None,
        )


def traffic_source(config: MatchConfig) -> SourceConfig:
    """The sample of production prompts, or of a server's log. It is counted and not kept, so no
    licence and no consent is asked.
    """
    source = SourceConfig(path=config.traffic, name="traffic")
    if any(look.is_log for look in looks(source)):
        return source.model_copy(update={"log": LogConfig(basis="it is counted, and not kept")})
    return source


def make_prompts(config: PromptsConfig, output: Artifact, track: Track = quiet) -> Manifest:
    """Read the sources, clean them, and write the artifact `prompts`; resumes an unfinished one.

    Raises InputError (sources that the policy refuses, by what is stated before a file is opened,
    then by what their rows look like); MissingInputError, CorruptError, InputError (a file);
    EmptyInputError (no rows, or no prompt left).
    """
    policy = read_policy(config.policy)
    require(gate(config.sources, policy))
    looked = [looks(source) for source in config.sources]
    verdicts = gate(config.sources, policy, looked)
    require(verdicts)
    key = privacy_key()
    inputs = {source.label: describe(source) for source in config.sources}
    settings = config.settings(key)
    with output.begun(identity("prompts", settings, inputs)) as is_work:
        if is_work:
            return _make(config, output, verdicts, looked, settings, inputs, track)
    done = output.manifest("prompts")
    _refuse_damage(config, output, done.facts["warnings"])
    if done.facts["record"] != config.record:
        what = f"{output.url} is done, and its card holds another record of processing"
        raise InputError(what, "give another --output, or take the record with which it was made")
    return done


def _make(
    config: PromptsConfig,
    output: Artifact,
    verdicts: Sequence[Verdict],
    looked: Sequence[Collection[FileLook]],
    settings: Mapping[str, Any],
    inputs: Mapping[str, Manifest],
    track: Track,
) -> Manifest:
    key, made_with = privacy_key(), versions()
    if not output.exists(VERSIONS) or output.read_json(VERSIONS) != made_with:
        # begun by another version of eyas or of a library
        for name in (*itertools.chain.from_iterable(map(output.parts, STEMS)), "match.json"):
            output.delete(name)
        output.delete_work()
        output.write_json(VERSIONS, made_with)
    policies = {
        **config.model_dump(
            mode="json", include={"max_characters", "languages", "personal", "near_duplicates"}
        ),
        **{entry.name: entry.limits for entry in FILTERS if entry.limits},
        "key": key_id(key),
    }
    ledger = Ledger(made_with, policies, [one.to_json() for one in verdicts])
    licences = {verdict.source: verdict.licence for verdict in verdicts}
    try:
        with open_executor(config.executor, config.task(key), config.workers) as executor:
            if not output.exists(SELECTION):
                select_rows(config, output, executor, track)
            write(config, output, ledger, licences, executor)
    except (CorruptError, EmptyInputError):
        output.free()
        raise
    report = output.read_json(REPORT) if config.match else None
    contents = card_contents(config, ledger, inputs, identity("prompts", settings, inputs), report)
    output.write_json("ledger.json", contents.ledger)
    if report:
        output.write_json("match.json", report)
    output.write("card.html", write_card(contents).encode())
    _refuse_damage(config, output, ledger.warnings())
    total = ledger.total
    track(total.rows_in, total.rows_in)
    if not total.rows_out:
        reasons = ", ".join(f"{count} {reason}" for reason, count in total.dropped.most_common())
        output.free()
        what = f"no prompt is left of {total.rows_in} rows ({reasons})"
        raise EmptyInputError(what, f"{output.url}/dropped-*.jsonl says why each row went")
    counts = {
        "rows": total.rows_in,
        "prompts": total.rows_out,
        "dropped": total.dropped.total(),
        "masked": total.rows_masked,
    }
    read = {name: one["dropped"] for name, one in contents.ledger["sources"].items()}
    facts = {
        "ledger": ledger.facts(),
        "warnings": ledger.warnings(),
        "placeholders": ledger.placeholders(),
        "unrefused": [
            f"{one.label}: no request refuses by {one.log.opt_out}: check the path"
            for one in config.sources
            if one.log and one.log.opt_out and "consent" not in read.get(one.label, "consent")
        ],
        "record": config.record,
    }
    return output.finish("prompts", settings, inputs, counts, facts=facts)


def _refuse_damage(config: PromptsConfig, output: Artifact, warnings: Sequence[str]) -> None:
    if config.damaged == "error" and warnings:
        output.free()
        raise CorruptError("; ".join(warnings), "mend the files, or take `damaged: warn`")


def versions() -> dict[str, Any]:
    """Of eyas, its parts and the libraries that results depend on."""
    libraries = {name: importlib.metadata.version(name) for name in LIBRARIES}
    return {"eyas": VERSION, "match": MATCH_VERSION, **libraries, **detector.versions()}


def cleaned_blocks(
    config: PromptsConfig, store: BlockStore, executor: Executor, track: Track
) -> Generator[int]:
    """Step 1: the number of finished blocks, at each one; those of an earlier run first."""
    number = 0
    while store.has(number):
        number += 1
        yield number
    rows = (row for source in config.sources for row in read_source(source))
    missing = itertools.islice(cut(rows), number, None)
    with contextlib.closing(executor.map(missing)) as results:
        for result in results:
            assert result.number == number, "blocks come in order, so finished ones have no gap"
            store.write(result)
            number += 1
            track(number * BLOCK_ROWS)
            yield number


def select_rows(config: PromptsConfig, output: Artifact, executor: Executor, track: Track) -> None:
    """Step 2: decide which rows of the cleaned blocks are taken, and write the selection and, with
    `match`, its report.

    All rows are read; with a limit and nothing drawn, as many blocks as give so many prompts.
    """
    store, traffic, halves = BlockStore(output), None, None
    if config.match:
        rows_of_traffic = read_source(traffic_source(config.match))
        halves = traffic_halves(row for row in rows_of_traffic if isinstance(row, SourceRow))
        traffic = halves[0].grams
    rules = SelectionRules(
        config.near_duplicates,
        [source.max_prompts for source in config.sources],
        traffic,
        config.match.num_prompts if config.match else None,
        config.max_prompts,
        config.seed,
    )
    enough = None if rules.draws else rules.limit  # different texts
    num_blocks, keys = 0, set[bytes]()
    with contextlib.closing(cleaned_blocks(config, store, executor, track)) as finished:
        for num_blocks in finished:
            if enough is not None and rules.limit is not None:
                keys.update(map(bytes, store.arrays(num_blocks - 1, "text_key")["text_key"]))
                if len(keys) >= enough:
                    taken = select(RemainingRows(store, num_blocks), rules).num_taken
                    if taken == rules.limit:
                        break
                    # some are near-duplicates: read as many more
                    enough = len(keys) + rules.limit - taken
    rows = RemainingRows(store, num_blocks)
    selection = select(rows, rules)
    if halves:
        before = rows.profile(config.labels, selection.unrepeated)
        after = rows.profile(config.labels, selection.taken)
        output.write_json(REPORT, match_report(before, after, *halves))
    output.write(SELECTION, selection.to_bytes())


def write(
    config: PromptsConfig,
    output: Artifact,
    ledger: Ledger,
    licences: Mapping[str, str],
    executor: Executor,
) -> None:
    """Step 3: write the rows that were taken and the lines of those that were changed or dropped,
    and count them. licences: of each source, stated or known.
    """
    store = BlockStore(output)
    selection = Selection.from_bytes(output.read(SELECTION))
    rows = RemainingRows(store, selection.num_blocks)
    prompts, dropped, changed = (Parts(output, stem, ROWS_PER_PART) for stem in STEMS)
    jobs = (late_drops(rows, selection, block) for block in range(selection.num_blocks))
    with contextlib.closing(executor.map(jobs)) as redacted:
        for block, late_lines in enumerate(redacted):
            arrays = store.arrays(block, "rows_in", "language")
            for label, count in zip(config.labels, arrays["rows_in"].tolist(), strict=True):
                ledger.came_in(label, count)
            numbers = itertools.count(rows.first(block))
            languages, late = iter(arrays["language"].tolist()), iter(late_lines)
            for one in store.lines(block):
                if isinstance(one, SourceRow):
                    number, language = next(numbers), next(languages)
                    if selection.taken[number]:
                        ledger.went_out(one, language)
                        id, said = selection.id(number, one), (one.turns, one.system)
                        prompts.add(Prompt(id, one.source, licences[one.source], *said).to_json())
                        if one.masked:
                            found = [dataclasses.asdict(finding) for finding in one.masked]
                            place = {"id": id, "source": one.source, "where": one.where}
                            changed.add({**place, "found": found})
                        continue
                    one = next(late)
                ledger.dropped(one)
                dropped.add(one)
    for parts in (prompts, dropped, changed):
        parts.close()


def late_drops(rows: RemainingRows, selection: Selection, block: int) -> LateDrops:
    """The rows of a block that passed the filters and are not taken."""
    remaining = (one for one in rows.store.lines(block) if isinstance(one, SourceRow))
    numbered = enumerate(remaining, start=rows.first(block))
    drops = ((row, selection.drop(number, rows)) for number, row in numbered)
    return tuple((row, drop) for row, drop in drops if drop is not None)


def card_contents(
    config: PromptsConfig,
    ledger: Ledger,
    inputs: Mapping[str, Manifest],
    made_by: str,
    report: Mapping[str, Any] | None,
) -> CardContents:
    """What the card shows of the run of identity `made_by`. report: of `match`."""
    policies = config.policies
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return CardContents(
        ledger=ledger.to_json(),
        match=report,
        evaluation=[source.label for source in config.evaluation],
        identity=made_by,
        record={"date": today, **config.record},
        sources=inputs,
        searched={name: policy.types for name, policy in policies.items()},
        dropping=sorted(
            {one for by in policies.values() for one in by.types if by.action(one) == "drop"}
        ),
        key={"id": key_id(privacy_key()), "from": key_place()},
    )
