"""The licence gate: which sources may be used, by licence, terms and authors of their prompts.

It is a list of what is allowed: a licence or an author that the policy does not name refuses a
source. The registry of known sets fills in what a run file does not state; a statement that differs
is a trait, on which the policy decides. Answers are dropped, so their authors are only noted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from eyas.data.formats import FileLook
from eyas.data.known_sets import KnownSet, find, named_like
from eyas.data.licence_rules import (
    CONTRADICTED,
    NO_CONSENT,
    UNKNOWN,
    UNVERIFIED,
    LicencePolicy,
    TermField,
    author_key,
)
from eyas.data.sources import SourceConfig
from eyas.errors import InputError

NO_LICENCE = "NONE"  # SPDX: the author gives none
PLACEHOLDER = "<why this use is allowed>"
COMPARED: tuple[TermField, ...] = ("licence", "prompts_by", "answers_by")


@dataclass(frozen=True, slots=True)
class SourceTrait:
    """A trait of a source. field, value: what has it; remedy: what to state instead."""

    field: TermField
    trait: str
    value: str
    meaning: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Objection:
    """A rule that fires. remedy: what to state instead; reason: why it was overruled, or ""."""

    rule: str
    field: str
    value: str
    because: str
    remedy: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The policy's decision on one source. duties: text by trait; mistakes: overrules without
    effect or reason; known_as, facts_from: the registry's entry and its URL.
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

    def to_json(self) -> dict[str, Any]:
        """The fields, with "verdict": "allowed", "overruled" or "refused"."""
        verdict = "refused" if not self.allowed else "overruled" if self.overruled else "allowed"
        fields = asdict(self).items()
        listed = {name: list(one) if isinstance(one, tuple) else one for name, one in fields}
        return {"verdict": verdict, **listed}


def gate(
    sources: Sequence[SourceConfig],
    policy: LicencePolicy,
    looks: Sequence[Collection[FileLook]] | None = None,
) -> list[Verdict]:
    """A verdict on each source. looks: at each source's files, once they are known."""
    given: Sequence[Collection[FileLook] | None] = looks or [None] * len(sources)
    return [judge(source, policy, look) for source, look in zip(sources, given, strict=True)]


def require(verdicts: Sequence[Verdict]) -> None:
    """Raise one InputError that lists every refused source, with each rule, its field, and what to
    state instead.
    """
    refused = [verdict for verdict in verdicts if not verdict.allowed]
    if refused:
        lines = "\n".join(line for verdict in refused for line in _complaint(verdict))
        raise InputError(
            f"{len(refused)} of {len(verdicts)} sources may not be used under the policy "
            f"{refused[0].policy}:\n{lines}",
            "state what is true of a source (licence, prompts_by, answers_by), leave it out, or "
            "overrule the rule: the reason goes into the ledger and onto the model card",
        )


def judge(
    source: SourceConfig, policy: LicencePolicy, look: Collection[FileLook] | None = None
) -> Verdict:
    """The verdict on one source. look: at its files, None while they are not known."""
    known = find(source)
    alike = known or named_like(source)
    holds = {field: getattr(source, field) or getattr(known, field, None) for field in COMPARED}
    traits = [*_licence_traits(holds["licence"], policy)]
    for term in alike.terms if alike else ():
        meaning = policy.traits.get(term, "asked by its publisher")
        traits.append(SourceTrait("terms", term, term, meaning))
    traits += _author_traits("prompts_by", holds["prompts_by"], policy)
    traits += _author_traits("answers_by", holds["answers_by"], policy)
    traits += _contradictions(source, alike, policy) if alike else ()
    if not known and any(one.is_log for one in look or ()) and not (source.log or source.shape):
        remedy = (
            "log: {consent: <field of each request that says yes>} or log: {basis: <why all of "
            "them may be used>}; if it is none, its shape: openai, or strings for lines of text"
        )
        meaning = "its files look like a log"
        traits.append(SourceTrait("terms", NO_CONSENT, "not stated", meaning, remedy))
    objections = [
        Objection(rule.name, one.field, one.value, f"{one.meaning}; {rule.because}", one.remedy)
        for rule in policy.rules
        for one in traits
        if one.field in rule.fields and one.trait in rule.refuse
    ]
    fired = {one.rule for one in objections}
    if look is None:  # they may yet
        fired |= {rule.name for rule in policy.rules if NO_CONSENT in rule.refuse}
    reasons = {rule: " ".join(reason.split()) for rule, reason in source.overrule.items()}
    valid = {rule: reason for rule, reason in reasons.items() if reason not in ("", PLACEHOLDER)}
    return Verdict(
        source=source.label,
        licence=(holds["licence"] or NO_LICENCE).strip(),
        prompts_by=holds["prompts_by"] or UNKNOWN,
        answers_by=holds["answers_by"] or UNKNOWN,
        refusals=tuple(one for one in objections if one.rule not in valid),
        overruled=tuple(
            replace(one, reason=valid[one.rule]) for one in objections if one.rule in valid
        ),
        duties=_duties(traits, policy, known),
        notes=tuple(_notes(source, known, traits, policy)),
        mistakes=tuple(_mistakes(reasons, valid, fired, policy)),
        policy=policy.title,
        known_as=known.id if known else "",
        facts_from=str(known.url) if known else "",
    )


def _licence_traits(text: str | None, policy: LicencePolicy) -> Iterator[SourceTrait]:
    remedy = "licence: <SPDX id>"
    if not text or text.upper() == NO_LICENCE:
        yield SourceTrait("licence", UNKNOWN, "not given", "no licence is stated", remedy)
        return
    for id in licence_ids(text):
        if (entry := policy.licence(id)) is None:
            problem = "the policy has no entry for it; of several, state the one that you take"
            yield SourceTrait("licence", UNKNOWN, id, problem, remedy)
        for one in entry.traits if entry else ():
            yield SourceTrait("licence", one, id, policy.traits.get(one, "the policy refuses it"))


def _author_traits(
    field: TermField, text: str | None, policy: LicencePolicy
) -> Iterator[SourceTrait]:
    names, remedy = _authors(text), f"{field}: human, or {field}: <the model's name and version>"
    if not names:
        yield SourceTrait(field, UNKNOWN, "not given", "no author is named", remedy)
    for name in names:
        entry = policy.author(name)
        if entry is None:
            yield SourceTrait(field, UNKNOWN, name, "the policy has no entry for it", remedy)
            continue
        for trait in entry.traits:
            details = "; ".join(filter(None, (policy.traits[trait], entry.note, entry.url)))
            yield SourceTrait(field, trait, name, f"{entry.family}: {details}")


def _contradictions(
    source: SourceConfig, known: KnownSet, policy: LicencePolicy
) -> Iterator[SourceTrait]:
    """Where the run file differs from the registry, and the registry's unverified facts."""
    for field in COMPARED:
        stated, recorded = getattr(source, field), getattr(known, field)
        if stated and recorded and _differ(field, stated, recorded, policy):
            meaning = f"the registry has {recorded} for {known.id}, {known.url}"
            remedy = f"no {field}, so that the registry's counts"
            yield SourceTrait(field, CONTRADICTED, stated, meaning, remedy)
        elif recorded and not stated and field in known.unverified:
            meaning = f"believed, not verified: look at {known.url}"
            yield SourceTrait(field, UNVERIFIED, recorded, meaning)


def _differ(field: str, stated: str, recorded: str, policy: LicencePolicy) -> bool:
    """Whether the licence is another one, or authors with other terms are left out."""
    if field == "licence":
        one, other = ({*map(str.casefold, licence_ids(text))} for text in (stated, recorded))
        return one != other
    return bool(_families(recorded, policy) - _families(stated, policy))


def _families(text: str, policy: LicencePolicy) -> set[str]:
    entries = {name: policy.author(name) for name in _authors(text)}
    return {entry.family if entry else author_key(name) for name, entry in entries.items()}


def _duties(
    traits: Sequence[SourceTrait], policy: LicencePolicy, known: KnownSet | None
) -> dict[str, str]:
    """The traits that no rule refuses, but for those of answers."""
    duties: dict[str, str] = {}
    for one in traits:
        if one.field != "answers_by" and not policy.refuses(one.field, one.trait):
            duties.setdefault(one.trait, f"{one.value}: {one.meaning}")
    if "attribution" in duties and known:
        duties["attribution"] += f" ({known.credit or known.id}, {known.url})"
    return duties


def _notes(
    source: SourceConfig,
    known: KnownSet | None,
    traits: Sequence[SourceTrait],
    policy: LicencePolicy,
) -> Iterator[str]:
    dropped = "they are dropped when the source is read"
    for one in traits:
        if one.field == "answers_by" and one.trait == UNKNOWN:
            yield f"who wrote the answers is not known ({one.value}); {dropped}"
        elif one.field == "answers_by" and policy.refuses("prompts_by", one.trait):
            yield f"answers by {one.value} would be refused ({one.meaning}); {dropped}"
    if known is None:
        return
    taken = [field for field in COMPARED if not getattr(source, field) and getattr(known, field)]
    if taken:
        yield f"{', '.join(taken)} from the registry ({known.source}; checked {known.checked})"
    if known.note:
        yield known.note


def _mistakes(
    reasons: Mapping[str, str], valid: Mapping[str, str], fired: set[str], policy: LicencePolicy
) -> Iterator[str]:
    for rule in reasons:
        if rule not in fired:
            known = ", ".join(one.name for one in policy.rules)
            remedy = f"remove the overrule (rules: {known})"
            yield f"overrule {rule}: no such rule fires for this source; {remedy}"
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


def licence_ids(text: str) -> list[str]:
    """The ids in "A AND B"; each holds for a part of the set."""
    return [one.strip() for one in re.split(r"\s+AND\s+", text.strip(), flags=re.I)]


def _authors(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]
