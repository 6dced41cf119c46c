"""Every stage, source, licence and filter that made an artifact.

A manifest holds the manifests of its inputs. An input that eyas did not make is a source (stage
"source"): its identity is the SHA-256 of its bytes, its config has licence and authors, and the
ledger of the stage that read it counts its rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from eyas.artifact import IDENTITY, MANIFEST, Artifact, Manifest
from eyas.errors import CorruptError, MissingInputError
from eyas.hub import PACKAGED, locate, resolve_head

SOURCE = "source"
DIGITS = 16  # shown of an identity
HEAD_FILES = (".json", ".safetensors", ".bin")


@dataclass(frozen=True, slots=True)
class Source:
    """One set of raw rows; without a ledger all counts are zero.

    dropped: rows by reason. verdict: `Verdict.to_json` of the licence gate, or empty. personal: the
    policy for personal data; None without a search. fictional: people are stated to be invented.
    log: its `LogConfig`, if it is a log. masked: replaced values by type.
    """

    name: str
    licence: str
    sha256: str
    url: str
    prompts_by: str = "not given"
    answers_by: str = "not given"
    verdict: Mapping[str, Any] = field(default_factory=dict)
    num_rows: int = 0
    num_kept: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    personal: str | None = None
    fictional: bool = False
    log: dict[str, Any] | None = None
    masked: Mapping[str, int] = field(default_factory=dict)

    def terms(self) -> Iterator[str]:
        """Lines on authors, personal data, the gate's verdict, overruled rules and duties."""
        yield f"prompts by {self.prompts_by}; answers, which are not used, by {self.answers_by}"
        if self.log:
            stated = ", ".join(f"{name} {value}" for name, value in self.log.items())
            yield f"a log of requests: {stated}"
        if self.personal is not None:
            found = _pairs({type: f"{count:,}" for type, count in self.masked.items()})
            invented = "; its people are stated to be invented" if self.fictional else ""
            yield f"personal data, policy {self.personal}: {found or 'none found'}{invented}"
        if not self.verdict:
            yield "no licence gate was asked"
            return
        verdict = "refused, and overruled," if self.verdict["overruled"] else "allowed"
        yield f"{verdict} under the policy {self.verdict['policy']}"
        for one in self.verdict["overruled"]:
            yield f"overruled {one['rule']} ({one['field']} {one['value']}): {one['reason']}"
        for trait, text in self.verdict["duties"].items():
            yield f"duty, {trait}: {text}"
        yield from (f"note: {note}" for note in self.verdict["notes"])


def head_manifest(name: str, config: Mapping[str, Any]) -> Manifest:
    """The manifest of a head by any name of eyas.hub, its files checked. For a head that eyas did
    not train: a source's, with this config and the SHA-256 of names and checksums. Raises
    MissingInputError, CorruptError.
    """
    place = locate(name)
    folder = Artifact(resolve_head(place))
    names = [name for name in folder.names() if name.endswith(HEAD_FILES) and name != MANIFEST]
    if folder.exists(MANIFEST) or folder.exists(IDENTITY):
        manifest = folder.manifest("train")
        for file in names:
            if file in manifest.files and folder.checksummed(file) != manifest.files[file]:
                raise CorruptError(
                    f"{place}/{file} does not match its checksum",
                    "delete the folder and run its stage again",
                )
        return manifest
    if not {"config.json", "eyas_head.json"} & set(names):
        raise MissingInputError(
            f"no head at {place}", "give the output of `eyas train`, or the folder of a head"
        )
    files = {file: folder.checksummed(file) for file in names}
    listed = "".join(f"{file} {found.sha256}\n" for file, found in files.items())
    return Manifest(
        stage=SOURCE,
        identity=hashlib.sha256(listed.encode()).hexdigest(),
        config=dict(config),
        counts={},
        files=files,
        url=place,
    )


def target_of(head: str) -> str:
    """The name of the target that a head was trained for. Raises MissingInputError where no stage
    says it, and what `head_manifest` raises.
    """
    if head in PACKAGED:
        return head
    made = stages(head_manifest(head, {}))
    if not (named := [*filter(None, (one.facts.get("target") for one in made))]):
        what = f"{head} does not say which target it drafts for"
        raise MissingInputError(what, "give target=NAME")
    return str(named[-1])


def stages(manifest: Manifest) -> list[Manifest]:
    """The stages that made an artifact, first to last, with its own, without sources."""
    found: dict[str, Manifest] = {}
    for made in manifest.inputs.values():
        found.update((stage.identity, stage) for stage in stages(made))
    if manifest.stage != SOURCE:
        found[manifest.identity] = manifest
    return list(found.values())


def sources(manifest: Manifest) -> list[Source]:
    """Every source of an artifact once, in order of reading."""
    found = [source for stage in stages(manifest) for source in read_by(stage)]
    return list({(source.name, source.sha256): source for source in found}.values())


def read_by(stage: Manifest) -> list[Source]:
    """The sources that a stage read."""
    return [
        _source(name, made, stage) for name, made in stage.inputs.items() if made.stage == SOURCE
    ]


def lines(manifest: Manifest, with_settings: bool = False) -> Iterator[str]:
    """A line for each stage, the last first, with the sources that it read."""
    for made in reversed(stages(manifest)):
        counts = f" ({_pairs(made.counts)})" if made.counts else ""
        yield f"{made.stage} {made.identity[:DIGITS]} {made.created} {made.url}{counts}"
        if with_settings and made.config:
            yield f"  config: {_pairs(made.config)}"
        for source in read_by(made):
            yield f"  {describe(source)}"
            yield from (f"    {line}" for line in source.terms())


def describe(source: Source) -> str:
    """A source in one line."""
    dropped = f" (dropped: {_pairs(source.dropped)})" if source.dropped else ""
    rows = f", {source.num_kept} of {source.num_rows} rows kept{dropped}" if source.num_rows else ""
    return f"source {source.name}: {source.licence}{rows}, sha256 {source.sha256}, {source.url}"


def _source(name: str, made: Manifest, stage: Manifest) -> Source:
    ledger = stage.facts.get("ledger") or {}
    account = (ledger.get("sources") or {}).get(name) or {}
    personal = made.config.get("personal") or stage.config.get("personal") or {}
    licences = ledger.get("licences") or ()
    verdict: Mapping[str, Any] = next((one for one in licences if one["source"] == name), {})
    terms = {
        field: str(verdict.get(field) or made.config.get(field) or "not given")
        for field in ("licence", "prompts_by", "answers_by")
    }
    return Source(
        name=name,
        sha256=made.identity,
        url=made.url,
        verdict=verdict,
        num_rows=int(account.get("rows_in", 0)),
        num_kept=int(account.get("rows_out", 0)),
        dropped=account.get("dropped") or {},
        personal=personal.get("policy"),
        log=made.config.get("log"),
        fictional=bool(made.config.get("fictional") or personal.get("fictional")),
        masked=account.get("masked") or {},
        **terms,
    )


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
