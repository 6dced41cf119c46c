"""Lint of a head against its target, and its replay: what would serve badly although it loads.

Knows what the engines do with what they find. Reads a head of any form step by step as `read_head`
does, but goes on after a fault and names them all; a head that can be read at all is replayed where
the target can be run.

Letters: V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.builtin import demo_prompts
from eyas.errors import EmptyInputError, MismatchError, TemplateError
from eyas.export.answers import answered
from eyas.export.damage import damage_findings
from eyas.export.files import check_is_head, file_findings
from eyas.export.finding import Finding, in_order
from eyas.export.replay import DECLARED, ERROR, LEAST_TAU, WARNING, Bar, Reading, Replayed, replay
from eyas.hub import resolve_head, resolve_target
from eyas.model.checkpoint import (
    embedding_faults,
    head_config,
    judged_head,
    open_checkpoint,
    own_tensors,
    refuse,
    tensor_faults,
)
from eyas.model.config import (
    HeadConfig,
    TargetConfig,
    TargetShape,
    match_faults,
    read_config,
    rope_faults,
    same_rotation,
    shape_faults,
    spelled,
)
from eyas.model.dialects import (
    EMBED_TOKENS,
    EMBED_TOKENS_SHA256,
    FED_BACK,
    LM_HEAD,
    SGLANG_ARCHITECTURE,
    Checkpoint,
    ambiguities,
    decisions,
    setting_faults,
)
from eyas.model.target import Target, stored_dtype
from eyas.model.vocab import TargetVocabulary

MEANINGS = "; "  # between the names of meanings that are taken together
UNSAID = "the head does not say which lm_head it was trained against"
# that older speculators wrote
VERIFIER_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")


def check(head: str | Path, target: str | Path) -> list[Finding]:
    """All that is wrong with the head in a folder, of any form, for the target in a folder (or
    "builtin"); errors first.

    Raises MissingInputError, CorruptError, and MismatchError for what is no EAGLE-3 head or no
    supported target at all.
    """
    target_folder, folder = resolve_target(str(target)), Path(resolve_head(str(head)))
    vocabulary = TargetVocabulary.load(target_folder)
    check_is_head(folder)
    checkpoint = open_checkpoint(folder)
    findings = [*file_findings(folder), *setting_findings(checkpoint)]
    try:
        config = head_config(checkpoint, vocabulary.config)
    except MismatchError as fault:
        return in_order([*findings, *errors([fault]), *value_findings(checkpoint)])
    findings += errors(tensor_faults(config, own_tensors(checkpoint, config)))
    findings += errors(embedding_faults(checkpoint))
    findings += errors(match_faults(config, vocabulary.config, vocabulary.lm_head_sha256))
    findings += [
        *target_findings(config, vocabulary.config),
        *length_findings(config, vocabulary.config),
        *vocabulary_findings(checkpoint, config, vocabulary),
        *verifier_findings(checkpoint, vocabulary.config, read_config(target_folder)),
        *value_findings(checkpoint),
        *form_findings(checkpoint),
    ]
    return in_order(findings)


def replay_head(
    head: str | Path, target: str | Path, text: Path | None = None
) -> tuple[list[Replayed], str]:
    """Every reading of a head on answered text, the declared one's first; or none, and why not.

    A head that does not match its target otherwise than in shape is replayed: the number says what
    it costs. text: as in `answered`; None is the packaged prompts. Raises what loading the target
    raises, and MissingInputError.
    """
    folder = resolve_target(str(target))
    vocabulary = TargetVocabulary.load(folder)
    if not isinstance(vocabulary.config, TargetConfig):
        return [], "the target is of a family that our own decoder does not run"
    try:
        ways = meanings(resolve_head(str(head)), vocabulary.config)
    except MismatchError as fault:
        return [], f"it cannot be read: {fault.what}"
    loaded = Target.load(folder, stored_dtype(vocabulary.config))
    for way in ways:
        way.tensors.setdefault(LM_HEAD, loaded.lm_head)
    try:
        answers = answered(loaded, folder, text or demo_prompts())
    except (EmptyInputError, TemplateError) as fault:
        return [], fault.what
    return replay(ways, loaded, answers), ""


def meanings(folder: str | Path, target: TargetShape) -> list[Reading]:
    """The head in a folder as its config declares it, or in each way in which that can be meant and
    run on this target.

    Raises what `read_head` raises, and MismatchError where no way fits.
    """
    checkpoint = open_checkpoint(folder)
    ways: list[Reading] = []
    misfits: list[MismatchError] = []
    for chosen in product(*(one.meanings.items() for one in ambiguities(checkpoint))):
        settings = checkpoint.settings | {
            key: value for _, keys in chosen for key, value in keys.items()
        }
        try:
            config, tensors = judged_head(folder, replace(checkpoint, settings=settings), target)
            refuse(folder, shape_faults(config, target))
        except MismatchError as fault:
            misfits.append(fault)
        else:
            ways.append(
                Reading(MEANINGS.join(name for name, _ in chosen) or DECLARED, config, tensors)
            )
    if not ways:
        raise misfits[0]
    return ways


def judged(findings: Sequence[Finding], replayed: Sequence[Replayed]) -> list[Finding]:
    """What the lint found as the replay lets it be seen, and what the replay found; errors first."""
    heard = list(reading_findings(replayed))
    seen = [settled(finding, replayed) if finding.meanings else finding for finding in findings]
    if replayed and not heard:
        hint = "the replay is as good as it would be with its own: nothing to do"
        seen = [
            replace(one, level="note", hint=hint) if one.what == UNSAID else one for one in seen
        ]
    return in_order([*seen, *heard])


def settled(finding: Finding, replayed: Sequence[Replayed]) -> Finding:
    """What can be meant in several ways, with the tau of each in the hint, and what to write if the
    replay can tell.
    """
    best: dict[str, Replayed] = {}
    for one in replayed:
        for name in set(one.reading.split(MEANINGS)) & finding.meanings.keys():
            best[name] = max(one, best.get(name, one), key=lambda it: it.accepted_drafts)
    if len(best) < 2:
        return finding
    first, second, *_ = sorted(best, key=lambda name: -best[name].accepted_drafts)
    taus = ", ".join(f"{best[name].tau:.2f} with {name!r}" for name in (first, second))
    gain = best[first].gain(best[second])
    keys = json.dumps(finding.meanings[first])
    told = f"{first!r} is meant: write {keys}" if over(gain, WARNING) else "which tells too little"
    return replace(finding, hint=f"{finding.hint}. Replayed, tau is {taus}: {told}")


def over(gain: Bar, bar: Bar) -> bool:
    """Whether a gain counts."""
    return all(got >= least for got, least in zip(gain, bar, strict=True))


def reading_findings(replayed: Sequence[Replayed]) -> Iterator[Finding]:
    """Whether the reading that the checkpoint declares is the best, and worth anything."""
    if not replayed:
        return
    declared, others = replayed[0], replayed[1:]
    better = [(one, one.gain(declared)) for one in others]
    better = [(one, gain) for one, gain in better if over(gain, WARNING)]
    for one, gain in sorted(better, key=lambda pair: -pair[1][0])[:1]:
        certain = over(gain, ERROR)
        what = (
            f"read as {one.reading!r} the head accepts more than {declared.reading}: tau "
            f"{one.tau:.2f} against "
            f"{declared.tau:.2f}, {gain[1]:+.0%} drafts ({gain[2]:.1f} standard errors)"
        )
        yield Finding(
            "error" if certain else "warning",
            what,
            "correct config.json or the tensors; the table has all readings",
        )
    if not better and declared.tau < LEAST_TAU:
        what = (
            f"the head drafts next to nothing of this text: tau {declared.tau:.2f} by its own "
            "reading and no better by others"
        )
        yield Finding(
            "warning",
            what,
            "wrong weights, embeddings or target; or text that it was not trained for: give --text",
        )


def errors(faults: Sequence[MismatchError]) -> list[Finding]:
    """What `read_head` refuses, as findings."""
    return [Finding("error", fault.what, fault.hint) for fault in faults]


def setting_findings(checkpoint: Checkpoint) -> list[Finding]:
    """The faults of the settings; what can be meant in several ways with its meanings."""
    ways = {one.fault.what: one.meanings for one in ambiguities(checkpoint)}
    return [
        replace(one, meanings=ways.get(one.what, {})) for one in errors(setting_faults(checkpoint))
    ]


def target_findings(config: HeadConfig, target: TargetShape) -> Iterator[Finding]:
    """Where the head's shape differs from the target's, though it may be meant so."""
    if config.taps[-1] < target.num_hidden_layers and config.taps != target.default_taps:
        what = (
            f"the head taps the outputs of layers {config.taps}, the default is "
            f"{target.default_taps}"
        )
        yield Finding(
            "warning",
            what,
            "fine if it was trained on these; engines that ignore the list will misread it",
        )
    if (
        not rope_faults(config, target)
        and not config.own_rope
        and not same_rotation(config.rope, target.rope)
    ):
        yield Finding(
            "warning",
            f"rotary embedding differs: the head's is {spelled(config.rope)}, the target's "
            f"{spelled(target.rope)}",
            "a rope_theta that is not given means 10000: write what the head was trained with, or "
            "own_rope for just this",
        )
    if config.rms_norm_eps != target.rms_norm_eps:
        what = f"rms_norm_eps is {config.rms_norm_eps}, the target's {target.rms_norm_eps}"
        yield Finding(
            "warning",
            what,
            "one that is not given means 1e-6: write what the head was trained with",
        )


def length_findings(config: HeadConfig, target: TargetShape) -> Iterator[Finding]:
    """A head whose rotary table ends before the target's context does. A longer one is harmless,
    and so is any in eyas.
    """
    if config.max_position_embeddings >= target.max_position_embeddings:
        return
    what = (
        f"max_position_embeddings is {config.max_position_embeddings}, the target's "
        f"{target.max_position_embeddings}: SGLang "
        "0.5.23 does not start without SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1, older engines "
        "read past the head's rotary "
        "table and lose acceptance; vLLM 0.32 and eyas go by the target's"
    )
    hint = (
        f'write "max_position_embeddings": {target.max_position_embeddings} into the head\'s '
        "config, or export it again, which "
        "does: no weight depends on it"
    )
    yield Finding("warning", what, hint)


def vocabulary_findings(
    checkpoint: Checkpoint, config: HeadConfig, vocabulary: TargetVocabulary
) -> Iterator[Finding]:
    """What the head borrows from the target, or was trained against."""
    trained_with = config.target_lm_head_sha256
    if not trained_with:
        yield Finding("warning", UNSAID, "eyas writes its hash at export; a good replay is as good")
    stored = checkpoint.embed_tokens
    if stored is not None and not config.owns_embeddings:
        ours = vocabulary.embed_tokens.to(stored.dtype)
        if stored.shape != ours.shape or not torch.equal(stored, ours):
            what = f"{EMBED_TOKENS} {tuple(stored.shape)} are not the target's {tuple(ours.shape)}"
            if checkpoint.form == "sglang" or EMBED_TOKENS_SHA256 in checkpoint.settings:
                yield Finding(
                    "error",
                    what,
                    "SGLang uses the target's all the same; export the head again for this target",
                )
            else:
                yield Finding(
                    "warning",
                    what,
                    "fine if the head was trained with them; SGLang would use the target's",
                )
    mask = checkpoint.tensors.get("t2d")
    ends = [
        token for token in vocabulary.config.eos_token_ids if mask is not None and token < len(mask)
    ]
    if ends and mask is not None and not mask[ends].any():
        yield Finding(
            "warning",
            f"no end token of the target ({ends}) is in the draft vocabulary: an end is never "
            "drafted",
            "count the draft vocabulary on answers that end",
        )


def verifier_findings(
    checkpoint: Checkpoint, target: TargetShape, config: Mapping[str, Any]
) -> Iterator[Finding]:
    """Where a speculators config names another target. config: the target's config.json."""
    speculators = checkpoint.settings.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    if not isinstance(verifier, dict):
        return
    hint = (
        "write the target's into speculators_config.verifier, or give the target that the head "
        "was trained for"
    )
    named, own = verifier.get("architectures") or [], config.get("architectures") or []
    if named and own and not set(named) & set(own):
        yield Finding(
            "warning",
            f"the config names a verifier of {', '.join(named)}, the target is of {', '.join(own)}",
            hint,
        )
    for key in VERIFIER_SIZES:
        if verifier.get(key) not in (None, getattr(target, key)):
            what = (
                f"the config names a verifier of {key} {verifier[key]}, the target's is "
                f"{getattr(target, key)}"
            )
            yield Finding("warning", what, hint)


def value_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Values and precisions of the tensors."""
    weights = {
        name: tensor for name, tensor in checkpoint.tensors.items() if tensor.is_floating_point()
    }
    finite: dict[str, Tensor] = {}
    if checkpoint.embed_tokens is not None:
        weights["embed_tokens.weight"] = checkpoint.embed_tokens
    for name, tensor in weights.items():
        wide = tensor.float()
        if not wide.isfinite().all():
            bad = int((~wide.isfinite()).sum())
            yield Finding(
                "error",
                f"{name}: {bad} of {tensor.numel()} values are NaN or infinite",
                "train or download the head again",
            )
        elif not wide.any():
            yield Finding("error", f"{name} is all zeros", "train or download the head again")
        else:
            finite[name] = tensor
    yield from damage_findings(finite)
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()})
    if len(dtypes) > 1:
        yield Finding(
            "warning",
            f"tensors are of several precisions: {', '.join(dtypes)}",
            "export the head again",
        )
    places = (checkpoint.settings, checkpoint.layer_settings)
    said = {
        str(place[key]) for place in places for key in ("dtype", "torch_dtype") if place.get(key)
    }
    for dtype in sorted(said - set(dtypes)):
        yield Finding(
            "warning",
            f"the config says {dtype}, the tensors are {', '.join(dtypes)}",
            "engines convert: correct the config",
        )


def form_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What the engine of this form asks for beyond a right head."""
    named = checkpoint.settings.get("architectures") or []
    if checkpoint.form == "sglang" and named != [SGLANG_ARCHITECTURE]:
        what = (
            f"architectures is {named}: SGLang loads an EAGLE-3 head by the name "
            f"{SGLANG_ARCHITECTURE} only"
        )
        yield Finding("warning", what, "change it in config.json, or export the head again")
    if checkpoint.form == "sglang" and checkpoint.stated("norm_before_residual") == {True}:
        what = (
            "norm_before_residual is set: SGLang does not read it, and takes the residual "
            "before the norm"
        )
        yield Finding(
            "warning",
            what,
            "serve it with vLLM, which does: SGLang would lose most of its acceptance",
        )
    for decision in decisions(checkpoint):
        yield Finding("warning", decision, f'write "{FED_BACK}" into config.json to say so')
    if checkpoint.form == "sglang" and any(checkpoint.stated("tie_word_embeddings")):
        yield Finding(
            "warning",
            "tie_word_embeddings is set: SGLang takes the embeddings for lm_head",
            "write false",
        )
    if checkpoint.form == "vllm" and LM_HEAD not in checkpoint.tensors:
        yield Finding(
            "warning",
            "lm_head.weight is missing: speculators needs one",
            "put the target's into the file",
        )
    if "d2t" in checkpoint.tensors and "t2d" not in checkpoint.tensors:
        yield Finding(
            "warning", "t2d is missing", "speculators needs it beside d2t; export the head again"
        )
