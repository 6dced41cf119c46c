"""The model card of an exported head: what it is for, how to serve it, what it was trained on.

Pure text, from values. Knows the fields of a Hugging Face card's front matter. Names no folder of
this machine, except the target's in the commands where the target has no other name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from eyas.artifact import Manifest
from eyas.export.launch import EngineForm, Launch
from eyas.lineage import SOURCE, Source, sources, stages
from eyas.model.config import HeadConfig
from eyas.model.dialects import FLAGS

# of the front matter of other cards
LICENCE, TERMS = "license", ("license", "license_name", "license_link")
FRONT = re.compile(r"\A---\s*\n(.*?)\n---\s*$", re.S | re.M)
DATA = re.compile(r"^## +Data\b[^\n]*\n(.*?)(?=^##? |\Z)", re.S | re.M | re.I)
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_SET = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)")
ENGINES: dict[EngineForm, str] = {"sglang": "SGLang", "vllm": "vLLM"}


@dataclass(frozen=True, slots=True)
class CardOrigin:
    """terms: the front matter's fields of a licence, if it names one. data: the text of the section
    "Data"; empty for none.
    """

    terms: Mapping[str, str] = field(default_factory=dict)
    data: str = ""

    @classmethod
    def of(cls, card: str) -> CardOrigin:
        """What a README.md says; nothing where it has no front matter, or none that is YAML."""
        card = card.replace("\r\n", "\n")
        front, data = FRONT.match(card), DATA.search(card)
        fields = _fields(front[1]) if front else {}
        terms = (
            {name: str(fields[name]) for name in TERMS if fields.get(name)}
            if fields.get(LICENCE)
            else {}
        )
        return cls(terms, data[1].strip() if data else "")

    @property
    def licence(self) -> str | None:
        """The licence by its name; None where the card has none."""
        return self.terms.get(LICENCE)


def _fields(front: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(front)
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class HeadCard:
    """What the card is written from. manifest: the head's; measured: eval.json, if there is one;
    hashes: SHA-256 by file name.

    licence: an id of the hub ("apache-2.0", "llama3.1"); language: codes of ISO 639-1. Both are
    what the owner states. origin: the card of a head that eyas did not train; its licence holds
    where the owner states none.
    """

    launch: Launch
    head: HeadConfig
    num_parameters: int
    dtype: str
    manifest: Manifest
    measured: Mapping[str, Any] | None
    hashes: Mapping[str, str]
    licence: str | None = None
    language: tuple[str, ...] = ()
    origin: CardOrigin = field(default_factory=CardOrigin)

    def text(self) -> str:
        """The card as Markdown."""
        parts = (
            self._front(),
            self._serving(),
            self._head(),
            self._measured(),
            self._training(),
            self._data(),
            self._files(),
        )
        return "\n".join("\n".join(lines) + "\n" for lines in parts)

    @property
    def forms(self) -> list[EngineForm]:
        """The folders that there are."""
        return [
            form for form in ENGINES if any(name.startswith(f"{form}/") for name in self.hashes)
        ]

    def metadata(self) -> dict[str, Any]:
        """The front matter: fields that the hub knows, and no other."""
        found: dict[str, Any] = {"library_name": "eyas", "pipeline_tag": "text-generation"}
        if HUB_ID.fullmatch(self.launch.target):
            found["base_model"] = self.launch.target
        if self.language:
            found["language"] = list(self.language)
        if self.licence:
            found["license"] = self.licence
        elif self.origin.licence:
            found |= self.origin.terms
        else:  # the hub's word for a licence that is not on its list
            found |= {"license": "other", "license_name": "of-the-target-and-its-data"}
        found["tags"] = ["eagle3", "speculative-decoding", *self.forms]
        if sets := sorted(
            {match[1] for source in sources(self.manifest) if (match := HUB_SET.match(source.url))}
        ):
            found["datasets"] = sets
        if self.measured is not None:
            found["metrics"] = ["tau"]
            found["model-index"] = [self._results(self.measured)]
        return found

    def _results(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        """tau as the hub's table of results has it: over all held-out answers, and by source."""
        taus = {
            "all held-out answers": measured["tau"],
            **_floats(measured.get("tau_by_source") or {}),
        }
        return {
            "name": f"EAGLE-3 head for {self.launch.title}",
            "results": [
                {
                    "task": {"type": "text-generation"},
                    "dataset": {"type": "held-out", "name": name},
                    "metrics": [
                        {
                            "type": "tau",
                            "name": "tau, emitted tokens per round",
                            "value": round(float(tau), 4),
                        }
                    ],
                }
                for name, tau in taus.items()
            ],
        }

    def _front(self) -> Iterator[str]:
        yield from (
            "---",
            yaml.safe_dump(self.metadata(), sort_keys=False, allow_unicode=True).rstrip(),
            "---",
            "",
        )
        yield f"# EAGLE-3 draft head for {self.launch.title}"
        yield ""
        yield (
            "It proposes tokens that the target verifies: decoding is faster and every output "
            "stays the target's own."
        )
        yield "It works with this target only, down to the weights: `eyas check` compares."

    def _serving(self) -> Iterator[str]:
        yield "## Serving"
        for form in self.forms:
            yield from (
                "",
                f"{ENGINES[form]}, in this folder:",
                "",
                "```sh",
                self.launch.command(form),
                "```",
            )
        yield ""
        yield (
            "Each folder is for its engine: the two read the list of tapped layers by different "
            "conventions."
        )

    def _head(self) -> Iterator[str]:
        head = self.head
        rows = {
            "parameters": f"{self.num_parameters:,}",
            "precision": self.dtype,
            "draft vocabulary": f"{head.draft_vocab_size:,} of {head.vocab_size:,} tokens",
            "taps": f"outputs of the target's layers {', '.join(map(str, head.taps))} (the first "
            "is 0)",
            "context": f"{head.max_position_embeddings:,} tokens",
            "norms": ", ".join(flag for flag in FLAGS if getattr(head, flag)) or "as in EAGLE",
            "target's lm_head, SHA-256": f"`{head.target_lm_head_sha256}`"
            if head.target_lm_head_sha256
            else "not given",
        }
        yield from ("## Head", "", *_table(rows))

    def _measured(self) -> Iterator[str]:
        yield from ("## Measured", "")
        if self.measured is None:
            yield (
                "Not measured before export: `eyas eval` measures tau on held-out answers, "
                "`eyas "
                "bench` a running server."
            )
            return
        measured = self.measured
        interval = (
            f" (95 %: {_cell('tau_interval', measured['tau_interval'])})"
            if measured.get("tau_interval")
            else ""
        )
        yield (
            f"tau {measured['tau']:.2f}{interval} on held-out answers (emitted tokens per "
            "round, "
            "the target's own included)."
        )
        if "assumes" in measured:
            yield f"It assumes {measured['assumes']}."
        for name in ("acceptance_by_position", "accept_hist"):
            if name in measured:
                values = (
                    f"{value:.3f}" if isinstance(value, float) else str(value)
                    for value in measured[name]
                )
                yield f"\n{name}: {', '.join(values)}"
        twice = {"tau_by_source"} if "by_source" in measured else set()
        for name, value in measured.items():
            if name not in twice and (rows := _rows(value)):
                notes = (
                    self._precision()
                    if name == "trees"
                    else _machine(value)
                    if name == "predicted"
                    else ""
                )
                yield from (
                    "",
                    f"### {name.replace('_', ' ')}",
                    "",
                    *([notes, ""] if notes else []),
                    *_columns(rows),
                )

    def _precision(self) -> str:
        """Of the target while tau was measured, and whether the commands have another; nothing
        where that is not known.
        """
        own, served = (self.measured or {}).get("dtype"), self.launch.dtype
        if own is None:
            return ""
        if served in (None, own):
            return f"Measured in {own}."
        hint = f"`eyas eval -s models.dtype={served}` measures what they serve."
        return (
            f"Measured in {own}; **the commands above serve in {served}**, where tau may be "
            f"another: {hint}"
        )

    def _training(self) -> Iterator[str]:
        yield from ("## Training", "")
        if self.manifest.stage == SOURCE:
            config = self.manifest.config
            yield f"Not trained by eyas: converted from a head in {config['form']} form, "
            yield (
                f"licence as its card says {config['licence']}, SHA-256 of its files "
                f"`{self.manifest.identity}`."
            )
            return
        settings = yaml.safe_dump(
            {"train": self.manifest.config}, sort_keys=False, allow_unicode=True
        ).rstrip()
        yield "With `train.yaml`:"
        yield from ("", "```yaml", settings, "```", "")
        yield "```sh"
        yield f"eyas train FEATURES --target {self.launch.title} --config train.yaml --output HEAD"
        yield from ("```", "", "Stages that led here, first to last:", "")
        for stage in stages(self.manifest):
            counts = ", ".join(f"{name} {count:,}" for name, count in stage.counts.items())
            yield f"- {stage.stage} `{stage.identity}`{': ' if counts else ''}{counts}"

    def _data(self) -> Iterator[str]:
        found = sources(self.manifest)
        yield from ("## Data", "")
        if self.origin.data:
            yield "As the card of the head says that it was converted from:"
            yield from ("", *(f"> {line}".rstrip() for line in self.origin.data.splitlines()))
            return
        if not found:
            yield "The lineage of this head names no source."
            return
        yield "The target answered prompts from these sources; only their user turns were used."
        yield ""
        for source in found:
            yield _source_line(source)
            yield from (f"  - {line}" for line in source.terms())

    def _files(self) -> Iterator[str]:
        yield from (
            "## Files",
            "",
            *_table(
                {f"`{name}`": f"`{digest}`" for name, digest in self.hashes.items()},
                ("file", "SHA-256"),
            ),
        )


def _machine(predicted: Mapping[str, Any]) -> str:
    """What the predicted times are of."""
    machine = predicted.get("machine") or {}
    known = {"processor": "{}", "cores": "{} cores", "threads": "{} threads", "dtype": "{}"}
    said = [words.format(machine[name]) for name, words in known.items() if name in machine]
    return f"On {', '.join(said)}." if said else "The machine that these times are of is not known."


def _source_line(source: Source) -> str:
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in source.dropped.items())
    rows = f"; {source.num_kept:,} of {source.num_rows:,} rows kept" if source.num_rows else ""
    return (
        f"- {source.name}: "
        f"{source.licence}{rows}{f' (dropped: {dropped})' if dropped else ''}; "
        f"SHA-256 `{source.sha256}`"
    )


def _table(rows: Mapping[str, Any], titles: tuple[str, str] = ("", "")) -> list[str]:
    return [
        f"| {titles[0]} | {titles[1]} |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
    ]


# eval.json's tables, whatever it has: by source, domain, language, temperature, tree, concurrency


def _rows(value: Any) -> list[dict[str, str]]:
    """The rows of a table of tau or speed-up, as text, or none: a list of objects, or objects or
    numbers by name.
    """
    if isinstance(value, Mapping):
        named = [
            {"": name, **(one if isinstance(one, Mapping) else {"tau": one})}
            for name, one in value.items()
        ]
        value = value.get("by_concurrency", named)
    if not isinstance(value, list) or not all(
        isinstance(row, Mapping) and {"tau", "speedup"} & row.keys() for row in value
    ):
        return []
    return [
        {key: cell for key, content in row.items() if (cell := _cell(key, content))}
        for row in value
    ]


def _columns(rows: list[dict[str, str]]) -> list[str]:
    names = list(dict.fromkeys(key for row in rows for key in row))
    lines = [" | ".join(row.get(name, "") for name in names) for row in rows]
    return [
        f"| {' | '.join(name.replace('_', ' ') for name in names)} |",
        "|---" * len(names) + "|",
        *(f"| {x} |" for x in lines),
    ]


def _cell(name: str, value: Any) -> str:
    """A number, a name or an interval as text; nothing for what fits no cell."""
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list) and name.endswith("_interval"):
        return f"{value[0]:.2f}-{value[1]:.2f}"
    return (
        str(value).replace("|", "/")
        if isinstance(value, int | str) and not isinstance(value, bool)
        else ""
    )


def _floats(taus: Mapping[str, Any]) -> dict[str, float]:
    """tau by name, of numbers or of objects with a tau."""
    found = {
        name: one.get("tau") if isinstance(one, Mapping) else one for name, one in taus.items()
    }
    return {name: float(tau) for name, tau in found.items() if isinstance(tau, int | float)}
