"""Sets of the Hugging Face hub: the files of an id, subset and split, and their copies in the local
cache.

    owner/name[@revision]                        the files of the default subset and split
    hf://datasets/owner/name[@revision][/path]   a file, those of a folder, or those of a glob

The hub is asked once per process and set, so that a whole run sees one commit. Without a network
the cache is used. HF_ENDPOINT names another hub, HF_TOKEN opens gated sets. Knows no row.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import yaml
from fsspec.utils import glob_translate
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

from eyas.data.formats import ending
from eyas.errors import InputError, MissingInputError
from eyas.hub import FAULTS

URL = "hf://"
SET = re.compile(
    r"(?P<id>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>refs/[\w.-]+/[\w.-]+|[^/@]+))?(?:/(?P<path>.*))?"
)
README = "README.md"
NOT_DATA = frozenset(
    {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json", "config.json"}
)
SPLITS = {
    "train": "train|training",
    "validation": "validation|valid|val|dev",
    "test": "test|testing|eval|evaluation",
}
PART_OF = re.compile(r"(\d+)[-_]of[-_](\d+)")
GLOB_SIGNS = frozenset("*?[")

SplitPatterns = dict[str, dict[str, list[str]]]  # patterns of files by subset and split


@dataclass(frozen=True)
class HubPath:
    """A path of a run file that names a set. path: in the repository; "" leaves the choice to
    subset and split.
    """

    id: str
    revision: str = "main"
    path: str = ""


@dataclass(frozen=True)
class Listing:
    """The files of a set at one commit. folder: their place, if only the cache was available."""

    id: str
    commit: str
    names: tuple[str, ...]
    folder: str | None = None


def hub_path(path: str) -> HubPath | None:
    """The set that a path names, or None for another kind of path. Raises InputError (an hf:// URL
    of no set).
    """
    if path.startswith(URL):
        found = SET.fullmatch(path.removeprefix(f"{URL}datasets/"))
        if found is None:
            raise InputError(
                f"{path} names no set of the hub",
                "write hf://datasets/owner/name[@revision][/path]",
            )
        return HubPath(found["id"], found["revision"] or "main", (found["path"] or "").strip("/"))
    found = SET.fullmatch(path)
    if found is None or found["path"] is not None or ending(path) or Path(path).exists():
        return None
    return HubPath(found["id"], found["revision"] or "main")


def files(place: HubPath, subset: str | None = None, split: str | None = None) -> list[str]:
    """Local copies of the files, downloaded if they are not cached.

    Raises MissingInputError (no such set, file, subset or split), InputError (the hub refuses, or
    only a part of the set is cached).
    """
    listing = _listing(place.id, place.revision, os.environ.get("HF_ENDPOINT"))
    if place.path:
        if subset or split:
            raise InputError(
                f"{place.id}: a path, and a subset or split besides", "give one or the other"
            )
        chosen = matching(listing.names, [place.path])
        if not chosen:
            raise MissingInputError(f"{place.id} has no file {place.path}", _choice(listing.names))
    else:
        readme = (
            Path(_fetched(listing, README)).read_text(encoding="utf-8", errors="replace")
            if README in listing.names
            else ""
        )
        chosen = chosen_files(listing, configurations(readme), subset, split)
    if listing.folder is not None:
        _check_parts(listing.id, chosen)
    found = [_fetched(listing, name) for name in chosen]
    if listing.folder is None:
        _remember(found[0], place.revision, listing.commit)
    return found


def commit(path: str) -> str | None:
    """The commit at which a set is read; None for another kind of path."""
    place = hub_path(path)
    return (
        _listing(place.id, place.revision, os.environ.get("HF_ENDPOINT")).commit if place else None
    )


# Which files.


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The names that match a pattern of the hub: a file, or the data files of a folder or glob;
    sorted.
    """
    found: set[str] = set()
    for pattern in patterns:
        pattern = pattern.strip("/")
        if GLOB_SIGNS & set(pattern):
            match = re.compile(glob_translate(pattern)).match
            found.update(name for name in names if match(name) and _is_data(name))
        else:
            found.update(
                name
                for name in names
                if name == pattern or (name.startswith(f"{pattern}/") and _is_data(name))
            )
    return sorted(found)


def configurations(readme: str) -> SplitPatterns:
    """{subset: {split: patterns}} of the YAML in a set's README; the subset marked as default also
    under "default".
    """
    head = re.match(r"\ufeff?---\r?\n(.*?)\r?\n---", readme, re.S)
    try:
        stated = yaml.safe_load(head[1]) if head else None
    except yaml.YAMLError:
        stated = None
    configs = stated.get("configs") if isinstance(stated, dict) else None
    usable = (
        [one for one in configs if isinstance(one, dict) and _patterns(one)]
        if isinstance(configs, list)
        else []
    )
    found = {str(one.get("config_name", "default")): _patterns(one) for one in usable}
    marked = next((_patterns(one) for one in usable if one.get("default") is True), None)
    return {**found, "default": marked} if marked else found


def _patterns(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """{split: patterns} of one configuration: a pattern, a list, or a list by split."""
    data, folder = config.get("data_files"), str(config.get("data_dir") or "").strip("/")
    found: dict[str, list[str]] = defaultdict(list)
    if data is None and folder:
        return {"": [folder]}  # the splits follow from the names below it
    for one in data if isinstance(data, list) else [data] if data else []:
        split, paths = (
            (one.get("split", "train"), one.get("path"))
            if isinstance(one, dict)
            else ("train", one)
        )
        for path in paths if isinstance(paths, list) else [paths]:
            if isinstance(path, str):
                found[str(split)].append(f"{folder}/{path}" if folder else path)
    return dict(found)


def chosen_files(
    listing: Listing, stated: SplitPatterns, subset: str | None, split: str | None
) -> list[str]:
    """The files of a subset and a split: by the README, else by the words in their names. Raises
    MissingInputError (not there, or one has to be chosen).
    """
    wanted = split or "train"
    if not stated:
        if subset:
            raise MissingInputError(
                f"{listing.id} states no subsets",
                f"leave `subset` out, or name {URL}datasets/... and a path",
            )
        return _of_split(listing.id, [name for name in listing.names if _is_data(name)], wanted)
    patterns = _of_subset(listing.id, stated, subset)
    if "" in patterns:
        return _of_split(listing.id, matching(listing.names, patterns[""]), wanted)
    if wanted not in patterns:
        raise MissingInputError(
            f"{listing.id} has no split {wanted}", f"give a `split`: {', '.join(patterns)}"
        )
    found = matching(listing.names, patterns[wanted])
    if not found:
        raise MissingInputError(
            f"{listing.id} has none of the files of its split {wanted}", _choice(listing.names)
        )
    return found


def _of_subset(id: str, stated: SplitPatterns, subset: str | None) -> dict[str, list[str]]:
    """The patterns of a subset; without a name, of the default or of the only one."""
    if subset is None and len(stated) > 1 and "default" not in stated:
        raise MissingInputError(
            f"{id} has several subsets", f"give a `subset`: {', '.join(stated)}"
        )
    name = subset or ("default" if "default" in stated else next(iter(stated)))
    if name not in stated:
        raise MissingInputError(f"{id} has no subset {name}", f"it has {', '.join(stated)}")
    return stated[name]


def _of_split(id: str, names: list[str], wanted: str) -> list[str]:
    """The files with the word of the split in their name; all files if no name has such a word."""
    if not names:
        raise MissingInputError(
            f"{id} has no data file that can be read",
            f"{URL}datasets/{id}@refs/convert/parquet may have",
        )
    by_split: dict[str, list[str]] = defaultdict(list)
    for name in names:
        by_split[_split_of(name)].append(name)
    if not any(by_split):
        by_split = {"train": by_split[""]}
    if wanted not in by_split:
        raise MissingInputError(
            f"{id} has no split {wanted}", f"give a `split`: {', '.join(filter(None, by_split))}"
        )
    # The same rows may be there in several formats: the most common one.
    most_common = Counter(ending(name) for name in by_split[wanted]).most_common(1)[0][0]
    return sorted(name for name in by_split[wanted] if ending(name) == most_common)


def _split_of(name: str) -> str:
    """The split whose word is in a path, not as part of a longer word; "" for none."""
    found = (
        split
        for split, words in SPLITS.items()
        if re.search(rf"(?<![a-z])(?:{words})(?![a-z])", name.lower())
    )
    return next(found, "")


def _is_data(name: str) -> bool:
    parts = name.split("/")
    return (
        bool(ending(name))
        and parts[-1] not in NOT_DATA
        and not any(part.startswith(".") for part in parts)
    )


def _choice(names: tuple[str, ...]) -> str:
    data = [name for name in names if _is_data(name)]
    return (
        f"it has {', '.join(data[:10])}{', ...' if len(data) > 10 else ''}"
        if data
        else "it has no data file"
    )


def _check_parts(id: str, names: list[str]) -> None:
    """Raise InputError where the names (1-of-3) say that the cache lacks parts of the set."""
    parts: dict[str, int] = Counter(PART_OF.sub(r"\2", name) for name in names)
    for name in names:
        part = PART_OF.search(name)
        if part and parts[PART_OF.sub(r"\2", name)] < int(part[2]):
            raise InputError(
                f"the hub cannot be asked, and the cache has only a part of {id}",
                f"`hf download --repo-type dataset {id}`",
            )


# The hub and its cache.


@functools.cache
def _listing(id: str, revision: str, endpoint: str | None) -> Listing:
    """The files of a set at a revision. Raises MissingInputError, InputError."""
    hub = huggingface_hub.HfApi(endpoint=endpoint)
    try:
        commit = str(hub.dataset_info(id, revision=revision).sha)
        found = hub.list_repo_tree(id, recursive=True, revision=commit, repo_type="dataset")
        return Listing(
            id,
            commit,
            tuple(sorted(one.path for one in found if isinstance(one, huggingface_hub.RepoFile))),
        )
    except GatedRepoError as error:
        raise InputError(
            f"{id} is a gated set", "accept its terms on the hub, and set HF_TOKEN"
        ) from error
    except FAULTS as error:
        refused = isinstance(error, HfHubHTTPError) and error.response.status_code in (
            401,
            403,
            404,
        )
        cached = None if refused else _cached(id, revision)
        if cached is None:
            raise MissingInputError(
                f"no file or folder {id} here, and no such set on the hub: {_reason(error)}",
                "check the id and the revision; HF_TOKEN opens private sets",
            ) from error
        return cached


def _cached(id: str, revision: str) -> Listing | None:
    """The files of a set in the cache, possibly only a part."""
    try:
        folder = huggingface_hub.snapshot_download(
            id, repo_type="dataset", revision=revision, local_files_only=True
        )
    except (OSError, ValueError):
        return None
    names = sorted(
        path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()
    )
    return Listing(id, Path(folder).name, tuple(names), folder=str(folder))


def _fetched(listing: Listing, name: str) -> str:
    """The local copy of a file, from the cache if it is there. Raises InputError."""
    if listing.folder is not None:
        return f"{listing.folder}/{name}"
    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        found = huggingface_hub.hf_hub_download(
            listing.id, name, repo_type="dataset", revision=listing.commit, endpoint=endpoint
        )
    except GatedRepoError as error:
        raise InputError(
            f"{listing.id} is a gated set", "accept its terms on the hub, and set HF_TOKEN"
        ) from error
    except FAULTS as error:
        raise InputError(
            f"{name} of {listing.id} cannot be fetched: {_reason(error)}", "try again"
        ) from error
    return str(found)


def _remember(path: str, revision: str, commit: str) -> None:
    """Record the commit of a revision in the cache, as the hub's client does for downloads by
    revision.
    """
    if revision != commit:
        snapshots = next(folder for folder in Path(path).parents if folder.name == commit).parent
        reference = snapshots.parent / "refs" / revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)


def _reason(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
