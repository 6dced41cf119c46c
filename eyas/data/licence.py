"""The gate before any row is read: which sources may be used, by licence, by terms, and by who
wrote their prompts.

Knows the registry of known sets (registry.yaml) and asks a policy. What a run file states counts
for more than the registry, and where the two differ the policy hears of it. Answers are dropped
when a source is read, so who wrote them refuses nothing; a verdict notes it. Reads no source, and
knows of a source only what is stated.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml
from pydantic import BaseModel, ConfigDict, HttpUrl

from eyas import builtin
from eyas.data import spdx
from eyas.data.policy import CONTRADICTED, UNKNOWN, UNVERIFIED, Policy, Subject, spelled
from eyas.errors import InputError

REGISTRY = Path(__file__).with_name("registry.yaml")
PACKAGED = (builtin.BUILTIN, str(Path(builtin.__file__).with_name("demo_prompts.jsonl.gz")))
NO_LICENCE = "NONE"  # SPDX: the author gives none
PLACEHOLDER = "<why this use is allowed>"
COMPARED: tuple[Subject, ...] = ("licence", "prompts_by", "answers_by")

# owner/name on the Hugging Face hub: alone or with a revision, or after a prefix and before a
# revision or a file.
HUB_ID = re.compile(
    r"([\w.-]+/[\w.-]+)(?:@.*)?|(?:hf://(?:datasets/)?|https://huggingface\.co/datasets/)([\w.-]+/[\w.-]+)(?:[@/].*)?"
)


class Stated(Protocol):
    """What the gate reads of a source's config."""

    @property
    def label(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def name(self) -> str | None: ...
    @property
    def licence(self) -> str | None: ...
    @property
    def prompts_by(self) -> str | None: ...
    @property
    def answers_by(self) -> str | None: ...
    @property
    def overrule(self) -> Mapping[str, str]: ...


class KnownSet(BaseModel):
    """An entry of the registry. unverified: fields that are believed, and were not read where
    `source` says.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    aliases: tuple[str, ...] = ()
    licence: str | None = None
    terms: tuple[str, ...] = ()
    prompts_by: str | None = None
    answers_by: str | None = None
    url: HttpUrl
    source: str
    checked: datetime.date
    unverified: tuple[str, ...] = ()
    credit: str = ""
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """What holds for a source: as stated, and where nothing is stated, as the registry has it."""

    licence: str | None
    prompts_by: str | None
    answers_by: str | None
    terms: tuple[str, ...]
    known: KnownSet | None


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """One trait of a source: in which field, of which value, what it means there, and what to state
    instead, if anything.
    """

    field: Subject
    trait: str
    value: str
    meaning: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Objection:
    """A rule that fires. remedy: what to state instead, if anything; reason: why it was overruled,
    "" where it stands.
    """

    rule: str
    field: str
    value: str
    because: str
    remedy: str = ""
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What the policy says of one source. duties: text by trait; mistakes: overrules that mean
    nothing.

    known_as, facts_from: the registry's entry, and where its facts come from.
    """

    source: str
    licence: str
    prompts_by: str
    answers_by: str
    refusals: tuple[Objection, ...]
    overruled: tuple[Objection, ...]
    duties: Mapping[str, str]
    notes: tuple[str, ...]
    mistakes: tuple[str, ...]
    policy: str
    known_as: str = ""
    facts_from: str = ""

    @property
    def allowed(self) -> bool:
        return not self.refusals and not self.mistakes

    @property
    def terms(self) -> dict[str, str]:
        """What holds, from run file and registry: the fields of a source's config that readers and
        manifests pass on.
        """
        return {
            "licence": self.licence,
            "prompts_by": self.prompts_by,
            "answers_by": self.answers_by,
        }

    def to_json(self) -> dict[str, Any]:
        """What ledger, manifest and model card keep of a verdict: {"verdict": "allowed",
        "overruled" or "refused", ...}.
        """
        verdict = "refused" if not self.allowed else "overruled" if self.overruled else "allowed"
        fields = dataclasses.asdict(self)
        return {
            "verdict": verdict,
            **{
                name: list(value) if isinstance(value, tuple) else value
                for name, value in fields.items()
            },
        }


@functools.cache
def registry() -> dict[str, KnownSet]:
    """The known sets by each of their names, all in one spelling."""
    entries = [
        KnownSet.model_validate(entry)
        for entry in yaml.safe_load(REGISTRY.read_text(encoding="utf-8"))
    ]
    return {_spelled(name): entry for entry in entries for name in (entry.id, *entry.aliases)}


def gate(sources: Sequence[Stated], policy: Policy) -> list[Verdict]:
    """A verdict on each source, in order. Refuses nothing by itself: see `require`."""
    return [judge(source, policy) for source in sources]


def require(verdicts: Sequence[Verdict]) -> None:
    """Raise one InputError that lists every refused source, each rule with its field, and what to
    state to overrule it.
    """
    refused = [verdict for verdict in verdicts if not verdict.allowed]
    if refused:
        lines = "\n".join(line for verdict in refused for line in _complaint(verdict))
        raise InputError(
            f"{len(refused)} of {len(verdicts)} sources may not be used under the policy "
            f"{refused[0].policy}:\n{lines}",
            "state what is true of a source (licence, prompts_by, answers_by), leave it out, or "
            "overrule the rule: the reason "
            "goes into the ledger and onto the model card",
        )


def judge(source: Stated, policy: Policy) -> Verdict:
    """What the policy says of one source."""
    holds = _terms(source)
    marks = [*_marks(source, holds, policy), *_contradictions(source, holds, policy)]
    objections = list(_objections(marks, policy))
    reasons = {
        rule: " ".join(str(reason or "").split()) for rule, reason in source.overrule.items()
    }
    valid = {rule: reason for rule, reason in reasons.items() if reason not in ("", PLACEHOLDER)}
    known = holds.known
    return Verdict(
        source=source.label,
        licence=_canonical(holds.licence) or NO_LICENCE,
        prompts_by=holds.prompts_by or UNKNOWN,
        answers_by=holds.answers_by or UNKNOWN,
        refusals=tuple(one for one in objections if one.rule not in valid),
        overruled=tuple(
            dataclasses.replace(one, reason=valid[one.rule])
            for one in objections
            if one.rule in valid
        ),
        duties=_duties(marks, policy, known),
        notes=tuple(_notes(source, holds, marks, policy)),
        mistakes=tuple(_mistakes(reasons, valid, {one.rule for one in objections}, policy)),
        policy=policy.title,
        known_as=known.id if known else "",
        facts_from=str(known.url) if known else "",
    )


def find(source: Stated) -> KnownSet | None:
    """The registry's entry of a source: by its hub id, or by the name that the run file gives it;
    never by a file's name.
    """
    packaged = builtin.BUILTIN if source.path in PACKAGED else None
    names = (_hub_id(source.path), packaged, source.name)
    return next(
        (registry()[_spelled(name)] for name in names if name and _spelled(name) in registry()),
        None,
    )


# From a source to its traits.


def _terms(source: Stated) -> Terms:
    known = find(source)
    return Terms(
        licence=source.licence or (known.licence if known else None),
        prompts_by=source.prompts_by or (known.prompts_by if known else None),
        answers_by=source.answers_by or (known.answers_by if known else None),
        terms=known.terms if known else (),
        known=known,
    )


def _marks(source: Stated, holds: Terms, policy: Policy) -> Iterator[Mark]:
    yield from _licence_marks(source, holds.licence, policy)
    for trait in holds.terms:
        yield Mark("terms", trait, trait, policy.traits.get(trait, "asked by its publisher"))
    yield from _author_marks("prompts_by", holds.prompts_by, policy)
    yield from _author_marks("answers_by", holds.answers_by, policy)


def _licence_marks(source: Stated, text: str | None, policy: Policy) -> list[Mark]:
    if not text or text.upper() == NO_LICENCE:
        alike = None if find(source) else registry().get(_spelled(source.label))
        remedy = "licence: <SPDX id>" + (
            f", or name: {alike.id}, if it is the set that is known by that name" if alike else ""
        )
        return [Mark("licence", UNKNOWN, "not given", "no licence is stated", remedy)]
    try:
        return _traits(spdx.parse(text), policy)
    except ValueError as error:
        return [
            Mark("licence", UNKNOWN, text, f"no SPDX expression: {error}", "licence: <SPDX id>")
        ]


def _traits(tree: spdx.Expression, policy: Policy) -> list[Mark]:
    """Of licences that all hold, everything; of a choice, the first part with the fewest traits
    that are refused.
    """
    if isinstance(tree, spdx.AllOf):
        return [mark for part in tree.parts for mark in _traits(part, policy)]
    if isinstance(tree, spdx.OneOf):
        choices = [_traits(part, policy) for part in tree.parts]
        return min(
            choices, key=lambda marks: sum(policy.refuses(mark.field, mark.trait) for mark in marks)
        )
    entry = policy.licence(tree.id)
    if entry is None:
        return [
            Mark(
                "licence",
                UNKNOWN,
                str(tree),
                "the policy has no entry for it",
                "licence: <SPDX id that it has>",
            )
        ]
    return [Mark("licence", trait, str(tree), policy.traits[trait]) for trait in entry.traits]


def _author_marks(field: Subject, text: str | None, policy: Policy) -> Iterator[Mark]:
    names = _authors(text)
    if not names:
        yield Mark(
            field,
            UNKNOWN,
            "not given",
            "nobody is named",
            f"{field}: human, or {field}: <the model's name>",
        )
    for name in names:
        entry = policy.author(name)
        if entry is None:
            remedy = f"{field}: human, or {field}: <the model's name and version>"
            yield Mark(field, UNKNOWN, name, "the policy has no entry for it", remedy)
            continue
        for trait in entry.traits:
            details = "; ".join(
                part for part in (policy.traits[trait], entry.note, entry.url) if part
            )
            yield Mark(field, trait, name, f"{entry.family}: {details}")


def _contradictions(source: Stated, holds: Terms, policy: Policy) -> Iterator[Mark]:
    """Where the run file says something else than the registry; and what of the registry was not
    verified.
    """
    known = holds.known
    if known is None:
        return
    for field in COMPARED:
        stated, recorded = getattr(source, field), getattr(known, field)
        if stated and recorded and _differ(field, stated, recorded, policy):
            meaning = f"the registry has {recorded} for {known.id}, {known.url}"
            yield Mark(
                field, CONTRADICTED, stated, meaning, f"no {field}, so that the registry's counts"
            )
        elif recorded and not stated and field in known.unverified:
            yield Mark(field, UNVERIFIED, recorded, f"believed, not verified: look at {known.url}")


def _differ(field: str, stated: str, recorded: str, policy: Policy) -> bool:
    """Whether a licence is another one, or whether authors are left out whose terms are not those
    of the ones stated.
    """
    if field == "licence":
        return _key(stated) != _key(recorded)
    return bool(_families(recorded, policy) - _families(stated, policy))


def _families(text: str, policy: Policy) -> set[str]:
    entries = {name: policy.author(name) for name in _authors(text)}
    return {entry.family if entry else spelled(name) for name, entry in entries.items()}


# From traits to a verdict.


def _objections(marks: Sequence[Mark], policy: Policy) -> Iterator[Objection]:
    for rule in policy.rules:
        for mark in marks:
            if mark.field in rule.fields and mark.trait in rule.refuse:
                yield Objection(
                    rule.name,
                    mark.field,
                    mark.value,
                    f"{mark.meaning}; {rule.because}",
                    mark.remedy,
                )


def _duties(marks: Sequence[Mark], policy: Policy, known: KnownSet | None) -> dict[str, str]:
    """What goes with the prompts: traits that no rule refuses. Answers are dropped, and with them
    what they ask.
    """
    duties: dict[str, str] = {}
    for mark in marks:
        if (
            mark.field != "answers_by"
            and not policy.refuses(mark.field, mark.trait)
            and mark.trait not in duties
        ):
            duties[mark.trait] = f"{mark.value}: {mark.meaning}"
    if "attribution" in duties and known:
        duties["attribution"] += f" ({known.credit or known.id}, {known.url})"
    return duties


def _notes(source: Stated, holds: Terms, marks: Sequence[Mark], policy: Policy) -> Iterator[str]:
    for mark in marks:
        if mark.field == "answers_by" and mark.trait == UNKNOWN:
            yield (
                f"who wrote the answers is not known ({mark.value}); they are dropped when the "
                "source is read"
            )
        elif mark.field == "answers_by" and policy.refuses("prompts_by", mark.trait):
            yield (
                f"answers by {mark.value} would be refused ({mark.meaning}); they are dropped "
                "when the source is read"
            )
    if holds.known is not None:
        taken = [
            field for field in COMPARED if not getattr(source, field) and getattr(holds, field)
        ]
        if taken:
            yield (
                f"{', '.join(taken)} from the registry ({holds.known.source}; checked "
                f"{holds.known.checked})"
            )
        if holds.known.note:
            yield holds.known.note


def _mistakes(
    reasons: Mapping[str, str], valid: Mapping[str, str], fired: set[str], policy: Policy
) -> Iterator[str]:
    for rule in reasons:
        if rule not in fired:
            known = ", ".join(one.name for one in policy.rules)
            yield (
                f"overrule {rule}: no such rule fires for this source; remove the overrule "
                f"(rules: {known})"
            )
        elif rule not in valid:
            yield f"overrule {rule}: no reason is given; say why this use is allowed"


def _complaint(verdict: Verdict) -> Iterator[str]:
    yield f"  {verdict.source}:"
    for refusal in verdict.refusals:
        yield f"    rule {refusal.rule}, field {refusal.field}: {refusal.value} ({refusal.because})"
        if refusal.remedy:
            yield f"      or state {refusal.remedy}"
    rules = dict.fromkeys(refusal.rule for refusal in verdict.refusals)
    if rules:
        reasons = ", ".join(f'{rule}: "{PLACEHOLDER}"' for rule in rules)
        yield f"      to overrule, state overrule: {{{reasons}}}"
    yield from (f"    {mistake}" for mistake in verdict.mistakes)


# Names and their spellings.


def _hub_id(path: str) -> str | None:
    found = HUB_ID.fullmatch(path)
    if found is None:
        return None
    bare, prefixed = found.groups()
    # a folder of one's own is read in the hub's stead
    return prefixed or (None if Path(path).exists() else bare)


def _canonical(text: str | None) -> str:
    try:
        return str(spdx.parse(text)) if text else ""
    except ValueError:
        return text or ""


def _key(text: str) -> str:
    try:
        return spdx.key(spdx.parse(text))
    except ValueError:
        return text.strip().casefold()


def _authors(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _spelled(name: str) -> str:
    """One spelling of a set's name."""
    return re.sub(r"[\s_.-]+", "-", name.strip().casefold())
