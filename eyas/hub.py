"""Names of targets and heads, and the local folder that each stands for.

builtin, smollm2    a model in a package (PACKAGED)
OWNER/NAME          an id of the Hugging Face hub: its snapshot in the hub's cache, downloaded
                    where it is incomplete; OWNER/NAME/FILE.gguf is one file
SCHEME://...        a folder in a store of fsspec: copied into a cache, checked
FILE.gguf           a target, converted once into a folder in the cache (eyas/gguf)
anything else       a folder; if it has only GGUF files, the model among them
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub

from eyas import builtin
from eyas.artifact import (
    BLOCK_BYTES,
    DONE,
    IDENTITY,
    MANIFEST,
    Artifact,
    File,
    cache_folder,
    file_identity,
)
from eyas.builtin import BUILTIN, SMOLLM2
from eyas.errors import CorruptError, MissingInputError
from eyas.gguf.file import part_names
from eyas.gguf.folder import is_gguf, target_folder
from eyas.stores import storage_errors

PACKAGED: dict[str, dict[str, Callable[[], Path]]] = {
    BUILTIN: {"target": builtin.target_folder, "head": builtin.head_folder},
    SMOLLM2: {"target": builtin.smollm2_file, "head": builtin.smollm2_head_folder},
}

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_FILE = re.compile(rf"({HUB_ID.pattern})/([\w.-]+\.gguf)")
SHARDS, NUMBERED = "model.safetensors.index.json", re.compile(r"\.\d+\.")
CONFIGS, WEIGHTS = ("config.json", "eyas_head.json"), ("model.safetensors", "pytorch_model.bin")
FILES = [  # of a model, directly in its folder
    *("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "pytorch_model*.bin"),
    "README.md",
]
# the weights a second time, beside safetensors
OTHER_FORMS = ("pytorch_model*.bin*", "consolidated*.safetensors*")
# GGUF files that are no model: image projector, head, adapter, parts but the first.
BESIDE_A_MODEL = re.compile(
    r"(?:^|[-_.])(mmproj|eagle3|imatrix|lora|adapter)(?:[-_.]|$)|-(?!00001)\d{5}-of-\d{5}", re.I
)
# In a fetched folder: each file's version in the store.
VERSIONS, LOCK = ".versions", ".lock"


def resolve_target(name: str, without_layers: bool = False) -> str:
    """The folder of a target. without_layers: download only the shards with embeddings and lm_head.
    Raises MissingInputError, CorruptError.
    """
    what = "a folder or URL with config.json, *.safetensors and a tokenizer, a GGUF file"
    return _folder(locate(name, "target", without_layers), "target", what)


def resolve_head(name: str) -> str:
    """The folder of a head, in any form. Raises MissingInputError, CorruptError."""
    what = "the output of `eyas train`, the folder or URL of a head in any form"
    return _folder(locate(name, "head"), "head", what)


def locate(name: str, role: str = "head", without_layers: bool = False) -> str:
    """The folder, file or URL of a target or head (role); no URL is opened. Raises
    MissingInputError.
    """
    if name in PACKAGED:
        return str(PACKAGED[name][role]())
    if (named := HUB_FILE.fullmatch(name)) and not Path(name).exists():
        return hub_file(*named.groups())
    return hub_folder(name, without_layers) if is_hub_id(name) else name


def _folder(place: str, role: str, what: str) -> str:
    if "://" in place:
        place = str(fetch(place))
    if role == "target" and Path(place).is_dir():
        files = _gguf_files(sorted(os.listdir(place)))
        place = str(Path(place) / only_model(place, files)) if files else place
    if role == "target" and is_gguf(place):
        return str(target_folder(place))
    if not Path(place).is_dir():
        packaged = ", ".join(f'"{name}"' for name in PACKAGED)
        raise MissingInputError(
            f"no {role} folder at {place}",
            f"give {what}, {packaged}, or an id of the hub (OWNER/NAME)",
        )
    return place


def only_model(place: str, files: Sequence[str]) -> str:
    """The model among GGUF files. Raises MissingInputError for none or several."""
    models = [name for name in files if not BESIDE_A_MODEL.search(name) or len(files) == 1]
    if len(models) != 1:
        raise MissingInputError(
            f"{place} holds {len(models)} models as GGUF files: {', '.join(models or files)}",
            f"name one: {place}/{(models or files)[0]}",
        )
    return models[0]


def files_of(names: Sequence[str], place: str) -> list[str]:
    """A model's files, with weights in one form. Raises what `only_model` raises."""
    found = [name for name in names if _is_of_a_model(name)]
    if files := _gguf_files(names):
        return [part.name for part in part_names(Path(only_model(place, files)))]
    if {"model.safetensors", SHARDS}.isdisjoint(found):
        return found
    # model.fp16.safetensors repeats model.safetensors; the shards of an index have any names
    others = (*OTHER_FORMS, *["model.*.safetensors"] * (SHARDS not in found))
    return [name for name in found if not any(fnmatch(name, form) for form in others)]


def _gguf_files(names: Sequence[str]) -> list[str]:
    if any(_is_of_a_model(name) and name.endswith((".safetensors", ".bin")) for name in names):
        return []
    return [name for name in names if fnmatch(name, "*.gguf") and "/" not in name]


def is_hub_id(name: str) -> bool:
    """Whether the name is `owner/name`, and no path here."""
    return HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def hub_folder(name: str, without_layers: bool = False) -> str:
    """The folder of a hub model in the cache's latest snapshot. Raises MissingInputError where it
    is not cached and cannot be downloaded.
    """
    found: str | Exception = ""
    wanted = [*FILES, "*.gguf"]
    for is_local in (True, False):
        try:
            if not is_local:
                wanted = files_of(huggingface_hub.list_repo_files(name), name)
                if without_layers and SHARDS in wanted:
                    index = Path(huggingface_hub.hf_hub_download(name, SHARDS))
                    left = _shards(index, False) - _shards(index, True)
                    wanted = [one for one in wanted if one not in left]
            found = str(
                huggingface_hub.snapshot_download(
                    name, allow_patterns=wanted, ignore_patterns=["*/*"], local_files_only=is_local
                )
            )
        except faults() as error:
            found = error
        if isinstance(found, str) and _is_complete(Path(found), without_layers):
            return found
    # Offline the hub's client returns an incomplete snapshot.
    cached = "only a part of it is cached"
    reason = cached if isinstance(found, str) else str(found).strip().partition("\n")[0]
    raise MissingInputError(
        f"no folder {name} here, and no model of this name in full in the hub's cache; the "
        f"download failed: {reason}",
        f"`hf download {name}` where there is a network (HF_TOKEN for a gated model), or give a "
        "folder",
    )


def hub_file(repository: str, file: str) -> str:
    """A GGUF file of a hub model in the cache, with all its parts. Raises MissingInputError."""
    try:
        parts = [part.name for part in part_names(Path(file))]
        first, *_ = [huggingface_hub.hf_hub_download(repository, part) for part in parts]
    except faults() as error:
        what = f"{file} of {repository} cannot be had: {error}"
        raise MissingInputError(what, "check both names, or give a file") from error
    return str(first)


def faults() -> tuple[type[Exception], ...]:
    """The errors of the hub's client and of its HTTP client, which differ between versions."""
    errors = importlib.import_module("huggingface_hub.errors")
    return (OSError, ValueError, *errors.HfHubHTTPError.__bases__)


def _shards(index: Path, without_layers: bool) -> set[str]:
    """The files of an index, or those with more than numbered layers; none of a damaged index,
    which fails on loading.
    """
    try:
        shard_of = json.loads(index.read_bytes())["weight_map"].items()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()
    return {str(s) for key, s in shard_of if not (without_layers and NUMBERED.search(key))}


def _is_complete(folder: Path, without_layers: bool) -> bool:
    """Whether config and weights are all there: other tools may cache some files only."""
    if any((folder / name).exists() for name in CONFIGS):
        for weights in WEIGHTS:
            index = folder / f"{weights}.index.json"
            if index.is_file():
                return all((folder / shard).exists() for shard in _shards(index, without_layers))
            if (folder / weights).exists():
                return True
    return bool(_gguf_files(os.listdir(folder)))


def fetch(url: str, folder: Path | None = None) -> Path:
    """Copy a model's files from a store into a local folder, by default one in the cache; a local
    folder is returned itself.

    Files whose version in the store, and checksum in a manifest, are the same are kept; a download
    that was cut is resumed; files that the store no longer has are deleted. Raises
    MissingInputError (no files, an unfinished artifact), CorruptError (another checksum),
    InputError (no client for the store), EyasError (no answer), StorageFullError.
    """
    source = Artifact(url)
    here = source.local_path("")
    if here is not None:
        return Path(here)
    is_artifact = source.exists(IDENTITY) or source.is_done()
    known = source.manifest().files if is_artifact else {}
    there = source.names()
    names = [*files_of(there, url), *({DONE} & set(there))]
    gone = [name for name in known if _is_of_a_model(name) and name not in names]
    if gone or not names:
        raise MissingInputError(
            f"{url} has no {gone[0]}" if gone else f"{url} has no files of a model",
            "check the URL, or upload the folder again, all of it",
        )
    folder = folder or cache_folder("models") / hashlib.sha256(source.url.encode()).hexdigest()[:16]
    with storage_errors(str(folder)), _locked(folder):
        for name in names:
            _fetch_file(source, name, folder, known.get(name))
        for version in (folder / VERSIONS).iterdir():
            if version.name not in (*names, LOCK):
                (folder / version.name).unlink(missing_ok=True)
                version.unlink()
    return folder


def _is_of_a_model(name: str) -> bool:
    return "/" not in name and any(fnmatch(name, pattern) for pattern in FILES)


def _fetch_file(source: Artifact, name: str, folder: Path, known: File | None) -> None:
    local, version = folder / name, folder / VERSIONS / name
    size, current = source.size(name), source.version(name)
    if (
        version.is_file()
        and version.read_text() == current
        and local.is_file()
        and local.stat().st_size == size
        and (known is None or file_identity(str(local)) == known.sha256)
    ):
        return
    partial = folder / f"{name}.partial-{current}"
    for other in folder.glob(f"{glob.escape(name)}.partial-*"):
        if other != partial:  # of an older version
            other.unlink()
    with open(partial, "ab") as stream:
        for start in range(stream.tell(), size, BLOCK_BYTES):
            stream.write(source.read_range(name, start, min(start + BLOCK_BYTES, size)))
        os.fsync(stream.fileno())
    if known is not None and file_identity(str(partial)) != known.sha256:
        partial.unlink()
        raise CorruptError(
            f"{source.url}/{name} does not match the checksum in its {MANIFEST}",
            "run the same command again; if it stays so, upload the folder again",
        )
    version.unlink(missing_ok=True)
    os.replace(partial, local)
    version.write_text(current)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time: all ranks of a training run fetch the head."""
    (folder / VERSIONS).mkdir(parents=True, exist_ok=True)
    with open(folder / VERSIONS / LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
