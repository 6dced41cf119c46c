"""The model card of an exported head: card.md, filled from values. It names no folder of this
machine but a local target's, in the commands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import yaml

from eyas.artifact import Manifest
from eyas.card import CardTau
from eyas.export.engines import FORMS, EngineForm, Launch, engine_of
from eyas.hub import HUB_ID
from eyas.lineage import sources, stages
from eyas.model.config import HeadConfig
from eyas.model.dialects import FLAGS

CARD = "README.md"
LICENCE, TERMS = "license", ("license", "license_name", "license_link")
FRONT = re.compile(r"\A---\s*\n(.*?)\n---\s*$", re.S | re.M)
DATA = re.compile(r"^## +Data\b[^\n]*\n(.*?)(?=^##? |\Z)", re.S | re.M | re.I)
HUB_SET = re.compile(rf"hf://datasets/({HUB_ID.pattern})")
TEMPLATE = Path(__file__).with_name("card.md")


@dataclass(frozen=True, slots=True)
class CardOrigin:
    """What a head's own card says. terms: the licence's fields of the front matter. data: the text
    of the section "Data".
    """

    terms: Mapping[str, str] = field(default_factory=dict)
    data: str = ""

    @classmethod
    def of(cls, card: str) -> CardOrigin:
        """Read a README.md; terms stay empty without front matter in YAML."""
        card = card.replace("\r\n", "\n")
        front, data = FRONT.match(card), DATA.search(card)
        try:
            fields = yaml.safe_load(front[1]) if front else None
        except yaml.YAMLError:
            fields = None
        terms = {}
        if isinstance(fields, dict) and fields.get(LICENCE):
            terms = {name: str(fields[name]) for name in TERMS if fields.get(name)}
        return cls(terms, data[1].strip() if data else "")

    @property
    def licence(self) -> str | None:
        return self.terms.get(LICENCE)


@dataclass(frozen=True, slots=True)
class HeadCard:
    """The values of the card. manifest: the head's. measured: eval.json. speed: speed.json. hashes:
    SHA-256 by file name. licence: an id of the hub ("apache-2.0", "llama3.1"), by default origin's.
    origin: the card of a head that eyas did not train. gguf: SOURCE of a dequantised target.
    """

    launch: Launch
    head: HeadConfig
    num_parameters: int
    dtype: str
    manifest: Manifest
    measured: Mapping[str, Any] | None
    hashes: Mapping[str, str]
    licence: str | None = None
    origin: CardOrigin = field(default_factory=CardOrigin)
    gguf: Mapping[str, Any] | None = None
    speed: Mapping[str, Any] | None = None

    def text(self) -> str:
        environment = jinja2.Environment(
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
            card=self,
            launch=self.launch,
            engines={form: engine_of(form) for form in FORMS},
            front=_yaml(self.metadata()),
            measured=self.measured,
            speed=self.speed,
            manifest=self.manifest,
            origin=self.origin,
            stages=stages(self.manifest),
            sources=sources(self.manifest),
            cell=_cell,
            yaml=_yaml,
        )

    @property
    def forms(self) -> list[EngineForm]:
        return [form for form in FORMS if any(name.startswith(f"{form}/") for name in self.hashes)]

    def metadata(self) -> dict[str, Any]:
        """The front matter, in the hub's fields."""
        found: dict[str, Any] = {"library_name": "eyas", "pipeline_tag": "text-generation"}
        if HUB_ID.fullmatch(self.launch.target):
            found["base_model"] = self.launch.target
        if self.licence:
            found["license"] = self.licence
        else:  # "other" is the hub's word for a licence that is not on its list
            unnamed = {"license": "other", "license_name": "of-the-target-and-its-data"}
            found |= self.origin.terms or unnamed
        served = filter(self.launch.is_served, self.forms)
        found["tags"] = ["eagle3", "speculative-decoding", *served]
        if sets := sorted(
            {match[1] for source in sources(self.manifest) if (match := HUB_SET.match(source.url))}
        ):
            found["datasets"] = sets
        if measured := self.measured:
            found["metrics"] = ["tau"]
            first = (measured.get("trees") or [measured])[0]  # the served tree, if measured
            taus = {"all held-out answers": first["tau"]}
            taus |= {name: one["tau"] for name, one in first.get("by_source", {}).items()}
            metric = {"type": "tau", "name": "tau, emitted tokens per round"}
            results = [
                {
                    "task": {"type": "text-generation"},
                    "dataset": {"type": "held-out", "name": name},
                    "metrics": [{**metric, "value": round(float(tau), 4)}],
                }
                for name, tau in taus.items()
            ]
            name = f"EAGLE-3 head for {self.launch.title}"
            found["model-index"] = [{"name": name, "results": results}]
        return found

    def head_rows(self) -> dict[str, str]:
        head = self.head
        return {
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

    def tables(self) -> Iterator[tuple[str, str, list[str], list[list[str]]]]:
        """eval.json's tables: name, note (of trees the precision), columns, rows."""
        measured = self.measured or {}
        for name, value in measured.items():
            if rows := _rows(value):
                note, own, served = "", measured.get("dtype"), self.launch.dtype
                if name == "trees" and own is not None:
                    note = f"Measured in {own}."
                    if served not in (None, own):
                        note = (
                            f"Measured in {own}; **the commands above serve in {served}**, where "
                            f"tau may be another: `eyas eval -s models.dtype={served}` measures "
                            "what they serve."
                        )
                names = list(dict.fromkeys(key for row in rows for key in row))
                cells = [[row.get(column, "") for column in names] for row in rows]
                yield name, note, names, cells


def _yaml(content: Mapping[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True).rstrip()


def _rows(value: Any) -> list[dict[str, str]]:
    if isinstance(value, Mapping):
        value = [
            {"": name, **(one if isinstance(one, Mapping) else {"tau": one})}
            for name, one in value.items()
        ]
    if not isinstance(value, list) or not all(
        isinstance(row, Mapping) and "tau" in row for row in value
    ):
        return []
    return [
        {key: cell for key, content in row.items() if (cell := _cell(key, content))}
        for row in value
    ]


def _cell(name: str, value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list) and name.endswith("_interval"):
        return f"{value[0]:.2f}-{value[1]:.2f}"
    is_shown = isinstance(value, int | str) and not isinstance(value, bool)
    return str(value).replace("|", "/") if is_shown else ""


def prometheus_rules(figures: Sequence[CardTau], model: str, version: str, form: str) -> str:
    """A PrometheusRule that records a card's figures as eyas:card_*, for other engines' servers."""
    name = f"eyas-card-{version}-{form}"
    rules = [
        {
            "record": f"eyas:card_{series}",
            "expr": f"vector({value!r})",
            "labels": {
                "model_name": model,
                "head_version": version,
                "temperature": f"{one.temperature:g}",
            },
        }
        for one in figures
        for series, value in one.series.items()
    ]
    found = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "eyas-head"}},
        "spec": {"groups": [{"name": name, "interval": "1m", "rules": rules}]},
    }
    return yaml.safe_dump(found, sort_keys=False)
