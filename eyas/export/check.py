"""Lint of a head against its target, and its replay: what would serve badly although it loads.

Knows what the engines do with what they find. Reads a head of any form step by step as `read_head` does, but goes on after
a fault and names them all; a head that can be read at all is replayed where the target can be run.

Letters: V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from eyas.builtin import demo_prompts, resolve_head, resolve_target
from eyas.errors import EmptyInputError, MismatchError, TemplateError
from eyas.export.answers import answered
from eyas.export.replay import ERROR, LEAST_TAU, WARNING, Replayed, replay
from eyas.model.checkpoint import (
    EMBED_TOKENS,
    EMBED_TOKENS_SHA256,
    FED_BACK,
    LM_HEAD,
    SGLANG_ARCHITECTURE,
    Checkpoint,
    decisions,
    embedding_faults,
    head_config,
    open_checkpoint,
    own_tensors,
    read_head,
    refuse,
    setting_faults,
    tensor_faults,
)
from eyas.model.config import HeadConfig, TargetConfig, TargetShape
from eyas.model.match import match_faults, rope_faults, same_rotation, shape_faults, spelled
from eyas.model.target import Target
from eyas.model.vocab import TargetVocabulary


@dataclass(frozen=True, slots=True)
class Finding:
    """An error serves wrong or badly for certain; a warning may be meant so."""

    level: Literal["error", "warning"]
    what: str
    hint: str


def check(head: str | Path, target: str | Path) -> list[Finding]:
    """All that is wrong with the head in a folder, of any form, for the target in a folder (or "builtin"); errors first.

    Raises MissingInputError, CorruptError, and MismatchError for what is no EAGLE-3 head or no supported target at all.
    """
    vocabulary = TargetVocabulary.load(resolve_target(str(target)))
    checkpoint = open_checkpoint(resolve_head(str(head)))
    findings = errors(setting_faults(checkpoint))
    try:
        config = head_config(checkpoint, vocabulary.config)
    except MismatchError as fault:
        return [*findings, *errors([fault]), *value_findings(checkpoint)]
    findings += errors(tensor_faults(config, own_tensors(checkpoint, config)))
    findings += errors(embedding_faults(checkpoint))
    findings += errors(match_faults(config, vocabulary.config, vocabulary.lm_head_sha256))
    findings += [
        *target_findings(config, vocabulary.config),
        *length_findings(config, vocabulary.config),
        *vocabulary_findings(checkpoint, config, vocabulary),
        *value_findings(checkpoint),
        *form_findings(checkpoint),
    ]
    return sorted(findings, key=lambda finding: finding.level)


def replay_head(head: str | Path, target: str | Path, text: Path | None = None) -> tuple[list[Replayed], str]:
    """Every reading of a head on answered text, the declared one's first; or none, and why not.

    A head that does not match its target otherwise than in shape is replayed: the number says what it costs. text: as in
    `answered`; None is the packaged prompts. Raises what loading the target raises, and MissingInputError.
    """
    folder = resolve_target(str(target))
    vocabulary = TargetVocabulary.load(folder)
    if not isinstance(vocabulary.config, TargetConfig):
        return [], "the target is of a family that our own decoder does not run"
    try:
        config, tensors = read_head(resolve_head(str(head)), vocabulary.config)
        refuse(head, shape_faults(config, vocabulary.config))
    except MismatchError as fault:
        return [], f"it cannot be read: {fault.what}"
    loaded = Target.load(folder, vocabulary.config.dtype)
    tensors.setdefault(LM_HEAD, loaded.lm_head)
    try:
        answers = answered(loaded, folder, text or demo_prompts())
    except (EmptyInputError, TemplateError) as fault:
        return [], fault.what
    return replay(config, tensors, loaded, answers), ""


def reading_findings(replayed: Sequence[Replayed]) -> Iterator[Finding]:
    """Whether the reading that the checkpoint declares is the best, and worth anything."""
    if not replayed:
        return
    declared, others = replayed[0], replayed[1:]
    better = [(one, one.gain(declared)) for one in others]
    better = [(one, gain) for one, gain in better if all(got >= bar for got, bar in zip(gain, WARNING, strict=True))]
    for one, gain in sorted(better, key=lambda pair: -pair[1][0])[:1]:
        certain = all(got >= bar for got, bar in zip(gain, ERROR, strict=True))
        what = (
            f"read as {one.reading!r} the head accepts more than as it declares itself: tau {one.tau:.2f} against "
            f"{declared.tau:.2f}, {gain[1]:+.0%} drafts ({gain[2]:.1f} standard errors)"
        )
        yield Finding("error" if certain else "warning", what, "correct config.json or the tensors; the table has all readings")
    if not better and declared.tau < LEAST_TAU:
        what = (
            f"the head drafts next to nothing of this text: tau {declared.tau:.2f} by its own reading and no better by others"
        )
        yield Finding("warning", what, "wrong weights, embeddings or target; or text that it was not trained for: give --text")


def exit_code(findings: Iterable[Finding]) -> int:
    """0 nothing found, 1 warnings only, 2 an error."""
    levels = {finding.level for finding in findings}
    return 2 if "error" in levels else 1 if levels else 0


def errors(faults: Sequence[MismatchError]) -> list[Finding]:
    """What `read_head` refuses, as findings."""
    return [Finding("error", fault.what, fault.hint) for fault in faults]


def target_findings(config: HeadConfig, target: TargetShape) -> Iterator[Finding]:
    """Where the head's shape differs from the target's, though it may be meant so."""
    if config.taps[-1] < target.num_hidden_layers and config.taps != target.default_taps:
        what = f"the head taps the outputs of layers {config.taps}, the default is {target.default_taps}"
        yield Finding("warning", what, "fine if it was trained on these; engines that ignore the list will misread it")
    if not rope_faults(config, target) and not config.own_rope and not same_rotation(config.rope, target.rope):
        yield Finding(
            "warning",
            f"rotary embedding differs: the head's is {spelled(config.rope)}, the target's {spelled(target.rope)}",
            "a rope_theta that is not given means 10000: write what the head was trained with, or own_rope for just this",
        )
    if config.rms_norm_eps != target.rms_norm_eps:
        what = f"rms_norm_eps is {config.rms_norm_eps}, the target's {target.rms_norm_eps}"
        yield Finding("warning", what, "one that is not given means 1e-6: write what the head was trained with")


def length_findings(config: HeadConfig, target: TargetShape) -> Iterator[Finding]:
    """A head whose rotary table ends before the target's context does. A longer one is harmless, and so is any in eyas."""
    if config.max_position_embeddings >= target.max_position_embeddings:
        return
    what = (
        f"max_position_embeddings is {config.max_position_embeddings}, the target's {target.max_position_embeddings}: SGLang "
        "0.5.23 does not start without SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1, older engines read past the head's rotary "
        "table and lose acceptance; vLLM 0.32 and eyas go by the target's"
    )
    hint = (
        f'write "max_position_embeddings": {target.max_position_embeddings} into the head\'s config, or export it again, which '
        "does: no weight depends on it"
    )
    yield Finding("warning", what, hint)


def vocabulary_findings(checkpoint: Checkpoint, config: HeadConfig, vocabulary: TargetVocabulary) -> Iterator[Finding]:
    """What the head borrows from the target, or was trained against."""
    trained_with = config.target_lm_head_sha256
    if not trained_with:
        yield Finding("warning", "the head does not say which lm_head it was trained against", "eyas writes its hash at export")
    stored = checkpoint.embed_tokens
    if stored is not None and not config.owns_embeddings:
        ours = vocabulary.embed_tokens.to(stored.dtype)
        if stored.shape != ours.shape or not torch.equal(stored, ours):
            what = f"{EMBED_TOKENS} {tuple(stored.shape)} are not the target's {tuple(ours.shape)}"
            if checkpoint.form == "sglang" or EMBED_TOKENS_SHA256 in checkpoint.settings:
                yield Finding("error", what, "SGLang uses the target's all the same; export the head again for this target")
            else:
                yield Finding("warning", what, "fine if the head was trained with them; SGLang would use the target's")
    mask = checkpoint.tensors.get("t2d")
    ends = [token for token in vocabulary.config.eos_token_ids if mask is not None and token < len(mask)]
    if ends and mask is not None and not mask[ends].any():
        yield Finding(
            "warning",
            f"no end token of the target ({ends}) is in the draft vocabulary: an end is never drafted",
            "count the draft vocabulary on answers that end",
        )


def value_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Values and precisions of the tensors."""
    weights = {name: tensor for name, tensor in checkpoint.tensors.items() if tensor.is_floating_point()}
    if checkpoint.embed_tokens is not None:
        weights["embed_tokens.weight"] = checkpoint.embed_tokens
    for name, tensor in weights.items():
        wide = tensor.float()
        if not wide.isfinite().all():
            bad = int((~wide.isfinite()).sum())
            yield Finding(
                "error", f"{name}: {bad} of {tensor.numel()} values are NaN or infinite", "train or download the head again"
            )
        elif not wide.any():
            yield Finding("error", f"{name} is all zeros", "train or download the head again")
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()})
    if len(dtypes) > 1:
        yield Finding("warning", f"tensors are of several precisions: {', '.join(dtypes)}", "export the head again")
    places = (checkpoint.settings, checkpoint.layer_settings)
    said = {str(place[key]) for place in places for key in ("dtype", "torch_dtype") if place.get(key)}
    for dtype in sorted(said - set(dtypes)):
        yield Finding(
            "warning", f"the config says {dtype}, the tensors are {', '.join(dtypes)}", "engines convert: correct the config"
        )


def form_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What the engine of this form asks for beyond a right head."""
    named = checkpoint.settings.get("architectures") or []
    if checkpoint.form == "sglang" and named != [SGLANG_ARCHITECTURE]:
        what = f"architectures is {named}: SGLang loads an EAGLE-3 head by the name {SGLANG_ARCHITECTURE} only"
        yield Finding("warning", what, "change it in config.json, or export the head again")
    if checkpoint.form == "sglang" and checkpoint.stated("norm_before_residual") == {True}:
        what = "norm_before_residual is set: SGLang does not read it, and takes the residual before the norm"
        yield Finding("warning", what, "serve it with vLLM, which does: SGLang would lose most of its acceptance")
    for decision in decisions(checkpoint):
        yield Finding("warning", decision, f'write "{FED_BACK}" into config.json to say so')
    if checkpoint.form == "sglang" and any(checkpoint.stated("tie_word_embeddings")):
        yield Finding("warning", "tie_word_embeddings is set: SGLang takes the embeddings for lm_head", "write false")
    if checkpoint.form == "vllm" and LM_HEAD not in checkpoint.tensors:
        yield Finding("warning", "lm_head.weight is missing: speculators needs one", "put the target's into the file")
    if "d2t" in checkpoint.tensors and "t2d" not in checkpoint.tensors:
        yield Finding("warning", "t2d is missing", "speculators needs it beside d2t; export the head again")
