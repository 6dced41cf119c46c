"""Lint of a head's files, settings and weights: what would serve badly although it loads.

Every function yields findings of one kind; `check` calls them in order.
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
from eyas.export.engines import ENGINES, FORMS
from eyas.lineage import HEAD_FILES
from eyas.model.architecture import TargetConfig
from eyas.model.arrays import Array, cast, nonfinite
from eyas.model.checkpoint import ANEW
from eyas.model.config import HeadConfig, TargetShape, rope_faults, same_rotation, spelled
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
    ambiguities,
    decisions,
    setting_faults,
)
from eyas.model.weights import (
    INDEX,
    PICKLE,
    PICKLE_INDEX,
    SINGLE,
    file_arrays,
    sharded_arrays,
)
from eyas.operators.shape import StoredMatrices

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
STAGES = ("train", "export")  # whose output is a head
# what older speculators wrote of the target
VERIFIER_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """An error serves wrong or badly for certain; a warning may be meant so; a note needs nothing
    done.

    meanings: of what can be meant in several ways, the name of each and the keys that say it.
    """

    level: Level
    what: str
    hint: str
    meanings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def in_order(findings: Iterable[CheckFinding]) -> list[CheckFinding]:
    """Errors first, notes last."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def exit_code(findings: Iterable[CheckFinding]) -> int:
    """0 nothing found but notes, 1 warnings, 2 an error."""
    levels = {finding.level for finding in findings}
    return 2 if "error" in levels else 1 if "warning" in levels else 0


def error(what: str, hint: str) -> CheckFinding:
    """An error without meanings."""
    return CheckFinding("error", what, hint)


def warning(what: str, hint: str) -> CheckFinding:
    """A warning."""
    return CheckFinding("warning", what, hint)


def errors(faults: Sequence[MismatchError]) -> list[CheckFinding]:
    """What `read_head` refuses, as findings."""
    return [error(fault.what, fault.hint) for fault in faults]


# Files


def check_is_head(folder: Path) -> None:
    """Raise MissingInputError for a folder that holds no head itself but exported ones below."""
    below = [str(folder / form) for form in FORMS if (folder / form / CONFIG_JSON).is_file()]
    if below and not any((folder / name).is_file() for name in (CONFIG_JSON, HEAD_JSON)):
        raise MissingInputError(
            f"{folder} is an export: the heads lie below it", f"give {' or '.join(below)}"
        )


def changed_findings(folder: Path) -> Iterator[CheckFinding]:
    """Files of a head of ours that differ from its manifest, here or in the folder above."""
    folder = folder.resolve()
    for root, prefix in ((folder, ""), (folder.parent, f"{folder.name}/")):
        try:
            manifest = Manifest.model_validate_json((root / MANIFEST).read_bytes())
        except (OSError, ValidationError):
            continue  # none, or not ours
        names = [name.removeprefix(prefix) for name in manifest.files if name.startswith(prefix)]
        for name in names if manifest.stage in STAGES else ():
            path = folder / name
            if "/" in name or not name.endswith(HEAD_FILES):
                continue
            if not path.is_file():
                what = f"{path} is gone: the {manifest.stage} that wrote it lists it"
                yield error(what, "restore it")
            elif file_identity(str(path)) != manifest.files[prefix + name].sha256:
                done = "exported" if manifest.stage == "export" else "trained"
                yield error(
                    f"{path} has changed since it was {done}",
                    "restore it, or run the stage that writes it again into a new folder",
                )


def twin_findings(folder: Path) -> Iterator[CheckFinding]:
    """Weights that lie there twice and differ: which ones are served depends on the loader."""
    there = [name for name in (INDEX, SINGLE, PICKLE_INDEX, PICKLE) if (folder / name).is_file()]
    first, *others = there or [""]
    for other in others:
        try:
            same = equal(stored(folder, first), stored(folder, other))
            how = "hold different tensors"
        except EyasError as fault:
            same, how = False, f"are both there, and one cannot be read ({fault.what})"
        if not same:
            yield error(
                f"{first} and {other} in {folder} {how}: loaders differ in which they take",
                "delete one",
            )


def stored(folder: Path, name: str) -> dict[str, Array]:
    """The tensors of one file, or of the shards of an index."""
    tensors = (
        sharded_arrays(folder, name, None)
        if name in (INDEX, PICKLE_INDEX)
        else file_arrays(folder / name, None)
    )
    return {key: tensor for key, tensor in tensors.items() if not key.endswith(INV_FREQ)}


def equal(one: dict[str, Array], other: dict[str, Array]) -> bool:
    """Equal names and, in the precision of the first, equal values."""
    return one.keys() == other.keys() and all(
        np.array_equal(tensor, cast(other[name], tensor.dtype)) for name, tensor in one.items()
    )


# Settings


def setting_findings(checkpoint: Checkpoint) -> Iterator[CheckFinding]:
    """The faults of the settings; what can be meant in several ways with its meanings."""
    ways = {one.fault.what: one.meanings for one in ambiguities(checkpoint)}
    for one in setting_faults(checkpoint):
        yield CheckFinding("error", one.what, one.hint, ways.get(one.what, {}))


def target_findings(config: HeadConfig, target: TargetShape) -> Iterator[CheckFinding]:
    """Where the head's shape differs from the target's, though it may be meant so."""
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
    """What the head borrows from the target, or was trained against."""
    if not config.target_lm_head_sha256:
        yield CheckFinding(
            "note",
            "the head does not say which lm_head it was trained against",
            "only eyas writes its hash; a good replay is as good",
        )
    stored = checkpoint.embed_tokens
    if stored is not None:
        ours = cast(vocabulary.embed_tokens, stored.dtype)
        if not np.array_equal(stored, ours):
            what = f"{EMBED_TOKENS} {tuple(stored.shape)} are not the target's {tuple(ours.shape)}"
            if EMBED_TOKENS_SHA256 in checkpoint.settings:
                yield error(what, "export the head again for this target")
            else:
                hint = (
                    "fine if the head was trained with them; SGLang uses the target's all the same"
                )
                yield warning(what, hint)
    mask = checkpoint.tensors.get("t2d", np.empty(0))
    ends = [token for token in vocabulary.config.eos_token_ids if token < len(mask)]
    if ends and not mask[ends].any():
        yield warning(
            f"no end token of the target ({ends}) is in the draft vocabulary: an end is never "
            "drafted",
            "count the draft vocabulary on answers that end",
        )


def verifier_findings(
    checkpoint: Checkpoint, target: TargetShape, config: Mapping[str, Any]
) -> Iterator[CheckFinding]:
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
        yield warning(
            f"the config names a verifier of {', '.join(named)}, the target is of {', '.join(own)}",
            hint,
        )
    for key in VERIFIER_SIZES:
        if verifier.get(key) not in (None, getattr(target, key)):
            yield warning(
                f"the config names a verifier of {key} {verifier[key]}, the target's is "
                f"{getattr(target, key)}",
                hint,
            )


def engine_findings(named: Collection[Form], config: HeadConfig) -> Iterator[CheckFinding]:
    """What engines do not read of it: a warning for those of forms in `named`, else a note."""
    for engine in ENGINES:
        flags = engine.unread_flags(config)
        if flags:
            effects = dict.fromkeys(engine.unread[flag] for flag in flags)
            yield CheckFinding(
                "warning" if engine.is_of(named) else "note",
                f"{engine.title} does not read {', '.join(flags)}: it {'; '.join(effects)}",
                f"serve it with another engine, or train a head without ({engine.where})",
            )


def serving_findings(named: Collection[Form], target: TargetShape) -> Iterator[CheckFinding]:
    """Engines that serve no such target with a head, ours among them: a warning for the engine of
    a form in `named`, and where no engine is left; else a note.
    """
    able = [engine.release for engine in ENGINES if engine.serves(target.model_type)]
    able += ["eyas serve"] if isinstance(target, TargetConfig) else []
    hint = (
        f"{', '.join(able)}: serve it there, or with a newer version that takes such targets"
        if able
        else "keep it for a newer version that takes such targets, or train one for another target"
    )
    unable = [engine for engine in ENGINES if not engine.serves(target.model_type)]
    levels: dict[Level, list[str]] = {"warning": [], "note": []}
    for engine in unable:
        levels["note" if able and not engine.is_of(named) else "warning"].append(engine.release)
    for level, names in levels.items():
        if names:
            missing = f"no EAGLE-3 for a target of {target.model_type!r}"
            yield CheckFinding(level, f"not served by {', '.join(names)}: {missing}", hint)
    for engine in ENGINES:
        if engine.is_of(named) and target.model_type in engine.options:
            words = " ".join(chain(*engine.options[target.model_type].items()))
            what = f"{engine.release} serves a target of {target.model_type!r} with {words} only"
            yield CheckFinding("note", what, "the command that export writes has it")


def form_findings(checkpoint: Checkpoint) -> Iterator[CheckFinding]:
    """What the engine of this form asks for beyond a right head."""
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


# Weights


def value_findings(checkpoint: Checkpoint) -> Iterator[CheckFinding]:
    """Values and precisions of the tensors."""
    weights = {
        name: tensor
        for name, tensor in checkpoint.all_tensors.items()
        if tensor.dtype.kind not in "biu"
    }
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
