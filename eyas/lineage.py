"""Where an artifact comes from: every stage, source, licence and filter that made it. Knows manifests and reads no other file.

A manifest holds the manifests of its inputs, so the walk needs the artifact alone, wherever its inputs went. A source is an
input that eyas did not make (stage "source"): its identity is the SHA-256 of its bytes, its config holds the licence. What
became of its rows stands in the ledger of the stage that read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from eyas.artifact import Manifest

SOURCE = "source"


@dataclass(frozen=True, slots=True)
class Source:
    """One set of raw rows. dropped: rows by reason; a source that no ledger counted has zeros."""

    name: str
    licence: str
    sha256: str
    url: str
    num_rows: int = 0
    num_kept: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)


def stages(manifest: Manifest) -> list[Manifest]:
    """The stages that led to an artifact, first to last, itself included, each once; sources left out."""
    found: dict[str, Manifest] = {}
    for made in manifest.inputs.values():
        found.update((stage.identity, stage) for stage in stages(made))
    if manifest.stage != SOURCE:
        found[manifest.identity] = manifest
    return list(found.values())


def sources(manifest: Manifest) -> list[Source]:
    """Every source of an artifact, each once, in the order in which they were read."""
    return list({(source.name, source.sha256): source for stage in stages(manifest) for source in read_by(stage)}.values())


def read_by(stage: Manifest) -> list[Source]:
    """The sources that a stage itself read."""
    accounts = (stage.facts.get("ledger") or {}).get("sources") or {}
    return [_source(name, made, accounts.get(name) or {}) for name, made in stage.inputs.items() if made.stage == SOURCE]


def lines(manifest: Manifest, name: str = "", depth: int = 0) -> Iterator[str]:
    """The walk as text, the artifact first and what made it indented below."""
    margin = "  " * depth
    label = f"{name}: " if name else ""
    yield f"{margin}{label}{manifest.stage} {manifest.identity} {manifest.created} {manifest.url}".rstrip()
    for title, values in (("config", manifest.config), ("counts", manifest.counts)):
        if values:
            yield f"{margin}  {title}: {_pairs(values)}"
    yield from (f"{margin}  {describe(source)}" for source in read_by(manifest))
    for role, made in manifest.inputs.items():
        if made.stage != SOURCE:
            yield from lines(made, role, depth + 1)


def describe(source: Source) -> str:
    """One line on a source."""
    dropped = f" (dropped: {_pairs(source.dropped)})" if source.dropped else ""
    rows = f", {source.num_kept} of {source.num_rows} rows kept{dropped}" if source.num_rows else ""
    return f"source {source.name}: {source.licence}{rows}, sha256 {source.sha256}, {source.url}"


def _source(name: str, made: Manifest, account: Mapping[str, Any]) -> Source:
    return Source(
        name=name,
        licence=str(made.config.get("licence") or "not given"),
        sha256=made.identity,
        url=made.url,
        num_rows=int(account.get("rows_in", 0)),
        num_kept=int(account.get("rows_out", 0)),
        dropped=account.get("dropped") or {},
    )


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
