"""The check of a head against its target, by lint and replay: what serves badly although it loads.

The lint reads a head of any form as `read_head` does, but names all faults. A head that can be read
is replayed where the target can be run: by our own engine, or else through transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from eyas.errors import MismatchError
from eyas.export.engines import EngineForm
from eyas.export.lint import (
    CheckFinding,
    changed_findings,
    check_is_head,
    engine_findings,
    errors,
    form_findings,
    in_order,
    serving_findings,
    setting_findings,
    target_findings,
    twin_findings,
    value_findings,
    verifier_findings,
    vocabulary_findings,
    warning,
)
from eyas.export.scores import ERROR, LEAST_TAU, MEANINGS, WARNING, ReadingScore
from eyas.hub import resolve_head, resolve_target
from eyas.model.architecture import TargetConfig
from eyas.model.checkpoint import (
    embedding_faults,
    head_config,
    open_checkpoint,
    own_tensors,
    tensor_faults,
)
from eyas.model.config import match_faults, read_config
from eyas.operators.shape import StoredMatrices, target_shape


def check(
    head: str | Path, target: str | Path, forms: Sequence[EngineForm] = ()
) -> list[CheckFinding]:
    """All that is wrong with a head of any form for a target (folders, or "builtin"); errors first.

    forms: those it is about to be written in, beside its own. Raises MissingInputError,
    CorruptError, and MismatchError for what is no EAGLE-3 head or no supported target at all.
    """
    target_folder, folder = resolve_target(str(target)), Path(resolve_head(str(head)))
    vocabulary = StoredMatrices.load(target_folder)
    check_is_head(folder)
    checkpoint = open_checkpoint(folder)
    findings = [
        *changed_findings(folder),
        *twin_findings(folder),
        *setting_findings(checkpoint),
    ]
    try:
        config = head_config(checkpoint, vocabulary.config)
    except MismatchError as fault:
        return in_order([*findings, *errors([fault]), *value_findings(checkpoint)])
    findings += errors(tensor_faults(config, own_tensors(checkpoint, config)))
    findings += errors(embedding_faults(checkpoint))
    findings += errors(match_faults(config, vocabulary.config, vocabulary.lm_head_sha256))
    findings += [
        *target_findings(config, vocabulary.config),
        *vocabulary_findings(checkpoint, config, vocabulary),
        *verifier_findings(checkpoint, vocabulary.config, read_config(target_folder)),
        *value_findings(checkpoint),
        *form_findings(checkpoint),
    ]
    if not any(finding.level == "error" for finding in findings):
        named = {checkpoint.form, *forms}
        findings += engine_findings(named, config)
        findings += serving_findings(named, vocabulary.config)
    return in_order(findings)


def replayed_by(target: str | Path) -> str:
    """What runs a target that is replayed, for people."""
    shape = target_shape(resolve_target(str(target)))
    return "our own engine" if isinstance(shape, TargetConfig) else "transformers"


def verdict(
    findings: Sequence[CheckFinding],
    replayed: Sequence[ReadingScore],
    why: Sequence[CheckFinding] | None = None,
) -> list[CheckFinding]:
    """The findings of the lint, settled by the replay, and those of the replay; errors first. why:
    those of a replay under counterfactuals (`why.why_findings`).
    """
    of_replay = list(reading_findings(replayed)) if why is None else why
    of_lint = [settled(finding, replayed) if finding.meanings else finding for finding in findings]
    return in_order([*of_lint, *of_replay])


def settled(finding: CheckFinding, replayed: Sequence[ReadingScore]) -> CheckFinding:
    """An ambiguity, with the tau of its best two meanings in the hint, and what to write if the
    replay can tell.
    """
    best: dict[str, ReadingScore] = {}
    for one in replayed:
        for name in set(one.reading.split(MEANINGS)) & finding.meanings.keys():
            best[name] = max(one, best.get(name, one), key=lambda it: it.accepted_drafts)
    if len(best) < 2:
        return finding
    first, second, *_ = sorted(best, key=lambda name: -best[name].accepted_drafts)
    taus = ", ".join(f"{best[name].tau:.2f} with {name!r}" for name in (first, second))
    gain = best[first].gain(best[second])
    keys = json.dumps(finding.meanings[first])
    answer = (
        f"{first!r} is meant: write {keys}" if gain.reaches(WARNING) else "which tells too little"
    )
    return replace(finding, hint=f"{finding.hint}. Replayed, tau is {taus}: {answer}")


def reading_findings(replayed: Sequence[ReadingScore]) -> Iterator[CheckFinding]:
    """Whether the reading that the checkpoint declares is the best, and worth anything."""
    if not replayed:
        return
    declared, *others = replayed
    better = [one for one in others if one.gain(declared).reaches(WARNING)]
    if better:
        best = max(better, key=lambda one: one.gain(declared).drafts)
        gain = best.gain(declared)
        yield CheckFinding(
            "error" if gain.reaches(ERROR) else "warning",
            f"read as {best.reading!r} the head accepts more than {declared.reading}: tau "
            f"{best.tau:.2f} against {declared.tau:.2f}, {gain.share:+.0%} drafts "
            f"({gain.standard_errors:.1f} standard errors)",
            "correct config.json or the tensors; the table has all readings",
        )
    elif declared.tau < LEAST_TAU:
        yield warning(
            f"the head drafts next to nothing of this text: tau {declared.tau:.2f} by its own "
            "reading and no better by others",
            "wrong weights, embeddings or target; or text that it was not trained for: give --text",
        )
