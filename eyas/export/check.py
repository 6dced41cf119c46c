"""The lint of a head against its target: files, settings and weights that load, and serve badly.

It reads any form as `read_head` does, and names all faults. `replay` runs the head, and `verdict`
joins the two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from eyas.artifact import MANIFEST, Manifest, file_identity
from eyas.errors import EyasError, MismatchError, MissingInputError
from eyas.export.engines import ENGINES, FORMS, EngineAbilities, EngineForm
from eyas.hub import resolve_head, resolve_target
from eyas.lineage import HEAD_FILES
from eyas.model.architecture import TargetConfig
from eyas.model.arrays import Array, cast, nonfinite
from eyas.model.checkpoint import (
    ANEW,
    embedding_faults,
    head_config,
    open_checkpoint,
    own_tensors,
    tensor_faults,
)
from eyas.model.config import (
    HeadConfig,
    TargetShape,
    match_faults,
    read_config,
    rope_faults,
    same_rotation,
    spelled,
)
from eyas.model.dialects import (
    CONFIG_JSON,
    EMBED_TOKENS,
    EMBED_TOKENS_SHA256,
    FED_BACK,
    HEAD_JSON,
    INV_FREQ,
    LM_HEAD,
    SGLANG_ARCHITECTURE,
    Checkpoint,
    Form,
    decisions,
    setting_faults,
)
from eyas.model.weights import INDEX, PICKLE, PICKLE_INDEX, SINGLE, file_arrays, sharded_arrays
from eyas.operators.shape import StoredMatrices, target_shape

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
OWN_ENGINE = "our own engine"
STAGES = {"train": "trained", "export": "exported"}
# older speculators' fields of the target
VERIFIER_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """An error is certain to serve badly; a warning may be intended; a note needs no action.

    meanings: of an ambiguous setting, by the meaning's name the keys that state it. unfit: engines
    that should not serve the head.
    """

    level: Level
    what: str
    hint: str
    meanings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    unfit: tuple[str, ...] = ()


def in_order(findings: Iterable[CheckFinding]) -> list[CheckFinding]:
    """Errors first, notes last."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def exit_code(findings: Iterable[CheckFinding]) -> int:
    """0 without warnings, 1 with warnings, 2 with an error."""
    levels = {finding.level for finding in findings}
    return 2 if "error" in levels else 1 if "warning" in levels else 0


def error(what: str, hint: str) -> CheckFinding:
    """A finding of level error."""
    return CheckFinding("error", what, hint)


def warning(what: str, hint: str) -> CheckFinding:
    """A finding of level warning."""
    return CheckFinding("warning", what, hint)


def errors(faults: Sequence[MismatchError]) -> list[CheckFinding]:
    """The refusals of `read_head`, with the meanings of ambiguous settings."""
    return [
        CheckFinding("error", one.what, one.hint, getattr(one, "meanings", {})) for one in faults
    ]


def check(
    head: str | Path, target: str | Path, forms: Sequence[EngineForm] = ()
) -> list[CheckFinding]:
    """All faults of a head of any form for a target (folders, or "builtin"); errors first.

    forms: those to be exported, beside its own. Raises MissingInputError, CorruptError, and
    MismatchError for what is no EAGLE-3 head or no supported target.
    """
    target_folder, folder = resolve_target(str(target)), Path(resolve_head(str(head)))
    vocabulary = StoredMatrices.load(target_folder)
    shape = vocabulary.config
    below = [str(folder / form) for form in FORMS if (folder / form / CONFIG_JSON).is_file()]
    if below and not any((folder / name).is_file() for name in (CONFIG_JSON, HEAD_JSON)):
        raise MissingInputError(
            f"{folder} is an export: the heads lie below it", f"give {' or '.join(below)}"
        )
    checkpoint = open_checkpoint(folder)
    findings = [*changed_findings(folder), *twin_findings(folder)]
    findings += errors(setting_faults(checkpoint))
    try:
        config = head_config(checkpoint, shape)
    except MismatchError as fault:
        return in_order([*findings, *errors([fault]), *value_findings(checkpoint)])
    findings += errors(
        tensor_faults(config, own_tensors(checkpoint, config))
        + embedding_faults(checkpoint)
        + match_faults(config, shape, vocabulary.lm_head_sha256)
    )
    findings += [
        *target_findings(config, shape),
        *vocabulary_findings(checkpoint, config, vocabulary),
        *verifier_findings(checkpoint, shape, read_config(target_folder)),
        *value_findings(checkpoint),
        *form_findings(checkpoint),
    ]
    if not any(finding.level == "error" for finding in findings):
        named = {checkpoint.form, *forms}
        findings += [*engine_findings(named, config), *serving_findings(named, shape)]
    return in_order(findings)


def replayed_by(target: str | Path) -> str:
    """The name of what runs a target in a replay."""
    shape = target_shape(resolve_target(str(target)))
    return OWN_ENGINE if isinstance(shape, TargetConfig) else "transformers"


def changed_findings(folder: Path) -> Iterator[CheckFinding]:
    """Files that differ from the manifest, here or in the folder above."""
    folder = folder.resolve()
    for root, prefix in ((folder, ""), (folder.parent, f"{folder.name}/")):
        try:
            manifest = Manifest.model_validate_json((root / MANIFEST).read_bytes())
        except (OSError, ValidationError):
            continue  # none, or another tool's
        for listed, stored in manifest.files.items() if manifest.stage in STAGES else ():
            name = listed.removeprefix(prefix)
            if not listed.startswith(prefix) or "/" in name or not name.endswith(HEAD_FILES):
                continue
            path = folder / name
            if not path.is_file():
                what = f"{path} is gone: the {manifest.stage} that wrote it lists it"
                yield error(what, "restore it")
            elif file_identity(str(path)) != stored.sha256:
                yield error(
                    f"{path} has changed since it was {STAGES[manifest.stage]}",
                    "restore it, or run the stage that writes it again into a new folder",
                )


def twin_findings(folder: Path) -> Iterator[CheckFinding]:
    """Weights that are stored twice and differ."""

    def stored(name: str) -> dict[str, Array]:
        is_index = name in (INDEX, PICKLE_INDEX)
        tensors = (
            sharded_arrays(folder, name, None) if is_index else file_arrays(folder / name, None)
        )
        return {key: tensor for key, tensor in tensors.items() if not key.endswith(INV_FREQ)}

    there = [name for name in (INDEX, SINGLE, PICKLE_INDEX, PICKLE) if (folder / name).is_file()]
    for other in there[1:]:
        try:
            ours, theirs = stored(there[0]), stored(other)
            same = ours.keys() == theirs.keys() and all(
                np.array_equal(one, cast(theirs[name], one.dtype)) for name, one in ours.items()
            )
            how = "hold different tensors"
        except EyasError as fault:
            same, how = False, f"are both there, and one cannot be read ({fault.what})"
        if not same:
            yield error(
                f"{there[0]} and {other} in {folder} {how}: loaders differ in which they take",
                "delete one",
            )


def target_findings(config: HeadConfig, target: TargetShape) -> Iterator[CheckFinding]:
    """Differences from the target's shape that may be intended."""
    if config.taps[-1] < target.num_hidden_layers and config.taps != target.default_taps:
        yield warning(
            f"the head taps the outputs of layers {config.taps}, the default is "
            f"{target.default_taps}",
            "fine if it was trained on these; engines that ignore the list, as OpenVINO does, will "
            "misread it",
        )
    is_said = config.own_rope or rope_faults(config, target)
    if not is_said and not same_rotation(config.rope, target.rope):
        yield warning(
            f"rotary embedding differs: the head's is {spelled(config.rope)}, the target's "
            f"{spelled(target.rope)}",
            "a rope_theta that is not given means 10000: write what the head was trained with, or "
            "own_rope for just this",
        )
    if config.rms_norm_eps != target.rms_norm_eps:
        yield warning(
            f"rms_norm_eps is {config.rms_norm_eps}, the target's {target.rms_norm_eps}",
            "one that is not given means 1e-6: write what the head was trained with",
        )
    if config.max_position_embeddings < target.max_position_embeddings:  # a longer one is harmless
        yield warning(
            f"max_position_embeddings is {config.max_position_embeddings}, the target's "
            f"{target.max_position_embeddings}: SGLang 0.5.23 does not start without "
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1, older engines read past the head's "
            "rotary table and lose acceptance; vLLM 0.32 and eyas go by the target's",
            f'write "max_position_embeddings": {target.max_position_embeddings} into the head\'s '
            "config, or export it again, which does: no weight depends on it",
        )


def vocabulary_findings(
    checkpoint: Checkpoint, config: HeadConfig, vocabulary: StoredMatrices
) -> Iterator[CheckFinding]:
    """Embeddings, lm_head and end tokens."""
    if not config.target_lm_head_sha256:
        what = "the head does not say which lm_head it was trained against"
        yield CheckFinding("note", what, "only eyas writes its hash; a good replay is as good")
    own = checkpoint.embed_tokens
    if own is not None:
        lent = cast(vocabulary.embed_tokens, own.dtype)
        what = f"{EMBED_TOKENS} {tuple(own.shape)} are not the target's {tuple(lent.shape)}"
        is_said = EMBED_TOKENS_SHA256 in checkpoint.settings
        if not np.array_equal(own, lent) and is_said:
            yield error(what, "export the head again for this target")
        elif not np.array_equal(own, lent):
            hint = "fine if the head was trained with them; SGLang uses the target's all the same"
            yield warning(what, hint)
    mask = checkpoint.tensors.get("t2d", np.empty(0))
    ends = [token for token in vocabulary.config.eos_token_ids if token < len(mask)]
    if ends and not mask[ends].any():
        what = f"no end token of the target ({ends}) is in the draft vocabulary"
        hint = "count the draft vocabulary on answers that end"
        yield warning(f"{what}: an end is never drafted", hint)


def verifier_findings(
    checkpoint: Checkpoint, target: TargetShape, config: Mapping[str, Any]
) -> Iterator[CheckFinding]:
    """Another target in a speculators config. config: the target's config.json."""
    speculators = checkpoint.settings.get("speculators_config")
    verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
    if not isinstance(verifier, dict):
        return
    listed = (verifier.get("architectures"), config.get("architectures"))
    said, own = (sorted(map(str, one)) if isinstance(one, list) else [] for one in listed)
    others = []
    if said and own and not {*said} & {*own}:
        others.append(f"{', '.join(said)}, the target is of {', '.join(own)}")
    for key in VERIFIER_SIZES:
        size = getattr(target, key)
        if verifier.get(key) not in (None, size):
            others.append(f"{key} {verifier[key]}, the target's is {size}")
    hint = (
        "write the target's into speculators_config.verifier, or give the target that the head "
        "was trained for"
    )
    for what in others:
        yield warning(f"the config names a verifier of {what}", hint)


def engine_findings(named: Collection[Form], config: HeadConfig) -> Iterator[CheckFinding]:
    """Flags that engines do not read: a warning if their form is `named`, else a note."""
    for engine in ENGINES:
        if flags := engine.unread_flags(config):
            effects = dict.fromkeys(engine.unread[flag] for flag in flags)
            yield CheckFinding(
                "warning" if engine.is_of(named) else "note",
                f"{engine.title} does not read {', '.join(flags)}: it {'; '.join(effects)}",
                f"serve it with another engine, or train a head without ({engine.where})",
                unfit=(engine.title,),
            )


def serving_findings(named: Collection[Form], target: TargetShape) -> Iterator[CheckFinding]:
    """Engines that do not serve this target with a head: a warning if their form is `named` or no
    engine does, else a note.
    """
    family = target.model_type
    able = [engine.release for engine in ENGINES if engine.serves(family)]
    able += ["eyas serve"] if isinstance(target, TargetConfig) else []
    hint = (
        f"{', '.join(able)}: serve it there, or with a newer version that takes such targets"
        if able
        else "keep it for a newer version that takes such targets, or train one for another target"
    )
    unable = [engine for engine in ENGINES if not engine.serves(family)]
    grave = [engine for engine in unable if not able or engine.is_of(named)]
    levels: dict[Level, list[EngineAbilities]] = {"warning": grave}
    levels["note"] = [engine for engine in unable if engine not in grave]
    for level, others in levels.items():
        if others:
            names = ", ".join(engine.release for engine in others)
            what = f"not served by {names}: no EAGLE-3 for a target of {family!r}"
            yield CheckFinding(level, what, hint, unfit=tuple(engine.title for engine in others))
    for engine in ENGINES:
        if engine.is_of(named) and family in engine.options:
            words = " ".join(chain(*engine.options[family].items()))
            what = f"{engine.release} serves a target of {family!r} with {words} only"
            yield CheckFinding("note", what, "the command that export writes has it")


def form_findings(checkpoint: Checkpoint) -> Iterator[CheckFinding]:
    """What the engine of this form needs beside a correct head."""
    named = checkpoint.settings.get("architectures") or []
    if checkpoint.form == "sglang" and named != [SGLANG_ARCHITECTURE]:
        yield warning(
            f"architectures is {named}: SGLang loads an EAGLE-3 head by the name "
            f"{SGLANG_ARCHITECTURE} only",
            "change it in config.json, or export the head again",
        )
    for decision in decisions(checkpoint):
        yield warning(decision, f'write "{FED_BACK}" into config.json to say so')
    if checkpoint.form == "sglang" and any(checkpoint.stated("tie_word_embeddings")):
        what = "tie_word_embeddings is set: SGLang takes the embeddings for lm_head"
        yield warning(what, "write false")
    if checkpoint.form == "vllm" and LM_HEAD not in checkpoint.tensors:
        what = "lm_head.weight is missing: speculators needs one"
        yield warning(what, "put the target's into the file")
    if "d2t" in checkpoint.tensors and "t2d" not in checkpoint.tensors:
        yield warning("t2d is missing", "speculators needs it beside d2t; export the head again")


def value_findings(checkpoint: Checkpoint) -> Iterator[CheckFinding]:
    """Values and precisions of the tensors."""
    weights = {n: one for n, one in checkpoint.all_tensors.items() if one.dtype.kind not in "biu"}
    for name, tensor in weights.items():
        if not tensor.any():
            yield error(f"{name} is all zeros", ANEW)
        elif bad := nonfinite({name: tensor}):
            yield error(bad[0], ANEW)
    dtypes = sorted({str(tensor.dtype) for tensor in weights.values()})
    if len(dtypes) > 1:
        what = f"tensors are of several precisions: {', '.join(dtypes)}"
        yield warning(what, "export the head again")
    places = (checkpoint.settings, checkpoint.layer_settings)
    said = {
        str(place[key]) for place in places for key in ("dtype", "torch_dtype") if place.get(key)
    }
    for dtype in sorted(said - set(dtypes)):
        yield warning(
            f"the config says {dtype}, the tensors are {', '.join(dtypes)}",
            "engines convert: correct the config",
        )
