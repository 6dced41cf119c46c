"""The files of a head in its folder: whether they are still what was exported, and whether all
loaders take the same ones.

Knows names of files, manifests and their checksums. Does not know what a head is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from eyas.artifact import MANIFEST, Manifest, file_identity
from eyas.errors import EyasError, MissingInputError
from eyas.export.finding import Finding
from eyas.lineage import HEAD_FILES
from eyas.model.dialects import CONFIG_JSON, HEAD_JSON, INV_FREQ
from eyas.model.weights import INDEX, PICKLE, PICKLE_INDEX, SINGLE, file_tensors, sharded_tensors

STAGES = ("train", "export")  # whose output is a head
FORMS = ("sglang", "vllm")


def check_is_head(folder: Path) -> None:
    """Raise MissingInputError for a folder that holds no head itself but exported ones below."""
    below = [str(folder / form) for form in FORMS if (folder / form / CONFIG_JSON).is_file()]
    if below and not any((folder / name).is_file() for name in (CONFIG_JSON, HEAD_JSON)):
        raise MissingInputError(
            f"{folder} is an export: the heads lie below it", f"give {' or '.join(below)}"
        )


def file_findings(folder: Path) -> list[Finding]:
    """All that is wrong with the files of a head's folder."""
    return [*changed_findings(folder.resolve()), *twin_findings(folder)]


def changed_findings(folder: Path) -> Iterator[Finding]:
    """Files of a head of ours that are no longer what its manifest, here or in the folder above,
    says.
    """
    for root, prefix in ((folder, ""), (folder.parent, f"{folder.name}/")):
        try:
            manifest = Manifest.model_validate_json((root / MANIFEST).read_bytes())
        except (OSError, ValidationError):
            continue  # none, or not ours
        names = [name.removeprefix(prefix) for name in manifest.files if name.startswith(prefix)]
        for name in names if manifest.stage in STAGES else ():
            if "/" in name or not name.endswith(HEAD_FILES):
                continue
            if not (folder / name).is_file():
                yield Finding(
                    "error",
                    f"{folder / name} is gone: the {manifest.stage} that wrote it lists it",
                    "restore it",
                )
            elif file_identity(str(folder / name)) != manifest.files[prefix + name].sha256:
                what = (
                    f"{folder / name} has changed since it was "
                    f"{'exported' if manifest.stage == 'export' else 'trained'}"
                )
                yield Finding(
                    "error",
                    what,
                    "restore it, or run the stage that writes it again into a new folder",
                )


def twin_findings(folder: Path) -> Iterator[Finding]:
    """Weights that lie there twice and differ: which ones are served depends on the loader."""
    there = [name for name in (INDEX, SINGLE, PICKLE_INDEX, PICKLE) if (folder / name).is_file()]
    first, *others = there or [""]
    for other in others:
        try:
            same = equal(stored(folder, first), stored(folder, other))
            how = "hold different tensors"
        except EyasError as error:
            same, how = False, f"are both there, and one cannot be read ({error.what})"
        if not same:
            yield Finding(
                "error",
                f"{first} and {other} in {folder} {how}: loaders differ in which they take",
                "delete one",
            )


def stored(folder: Path, name: str) -> dict[str, Tensor]:
    """The tensors of one file, or of the shards of an index."""
    tensors = (
        sharded_tensors(folder, name, None)
        if name in (INDEX, PICKLE_INDEX)
        else file_tensors(folder / name, None)
    )
    return {key: tensor for key, tensor in tensors.items() if not key.endswith(INV_FREQ)}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Equal names and, in the precision of the first, equal values."""
    return one.keys() == other.keys() and all(
        tensor.shape == other[name].shape and torch.equal(tensor, other[name].to(tensor.dtype))
        for name, tensor in one.items()
    )
