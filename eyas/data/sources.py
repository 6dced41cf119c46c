"""Sources: sets of conversations or prompts, by path, glob, folder, fsspec URL or Hugging Face id;
read row by row.

Knows which files a source has, in which order, and what to do where one of them, or all, cannot be
read. Takes the user's side only. Knows nothing of what makes a row unfit; a row it cannot read is
reported by place, never quoted.
"""

from __future__ import annotations

import functools
import hashlib
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel, ConfigDict, Field, field_validator

from eyas.artifact import File, Manifest
from eyas.data import formats, hub, shapes
from eyas.data.rows import Damaged, Drop, Row
from eyas.data.shapes import KEYS, SHAPES, Shape
from eyas.data.streams import Stored, Unreadable, shown
from eyas.errors import CorruptError, EmptyInputError, InputError, MissingInputError

NOT_STATED = "NOASSERTION"  # SPDX's word for a licence that nobody stated
MAGIC = frozenset("*?[")
BLOCK = 1 << 20  # bytes


class SourceConfig(BaseModel):
    """One set of conversations or prompts, the licence that allows training on it, and who wrote
    it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = Field(
        min_length=1,
        description="file, folder, glob (data/**/*.jsonl.gz), fsspec URL, or a Hugging Face set: "
        "owner/name[@revision], "
        "hf://datasets/owner/name[@revision][/path]",
    )
    name: str | None = Field(
        default=None, description="what prompts and ledger call it; made from the path if not given"
    )
    licence: str | None = Field(
        default=None, min_length=1, description="SPDX identifier, e.g. CC-BY-4.0"
    )
    prompts_by: str | None = Field(
        default=None, min_length=1, description='who wrote the prompts: "human", or a model'
    )
    answers_by: str | None = Field(
        default=None, min_length=1, description='who wrote the answers: "human", or a model'
    )
    overrule: dict[str, str] = Field(
        default={}, description="rules of the policy that do not hold here: {rule: reason}"
    )
    shape: Shape | None = Field(
        default=None, description="how rows are written; found out by looking if not given"
    )
    subset: str | None = Field(
        default=None,
        description="of a Hugging Face set: the configuration; its default if not given",
    )
    split: str | None = Field(default=None, description="of a Hugging Face set; train if not given")

    @field_validator("overrule")
    @classmethod
    def _have_reasons(cls, overrule: dict[str, str]) -> dict[str, str]:
        for rule, reason in overrule.items():
            if not reason.strip():
                raise ValueError(f"overruling {rule!r} needs a reason")
        return overrule

    @property
    def label(self) -> str:
        if self.name:
            return self.name
        if found := hub.asked_for(self.path):
            return found.id
        scheme, _, path = shown(self.path).rpartition("::")[2].rpartition("://")
        solid = [part for part in path.split("/") if part and not MAGIC & set(part)]
        if not solid:
            return self.path
        # a host's name is one name
        return solid[-1] if scheme and len(solid) == 1 else solid[-1].split(".")[0] or solid[-1]


@dataclass(frozen=True)
class Place:
    """One file of a source. name: its path below the folder that all files of the source share."""

    name: str
    path: str
    filesystem: Any

    @property
    def url(self) -> str:
        """What people and fsspec call it."""
        is_local = isinstance(self.filesystem, LocalFileSystem)
        return self.path if is_local else str(self.filesystem.unstrip_protocol(self.path))


def files(source: SourceConfig) -> list[str]:
    """The URLs of a source's files in the order of reading: by name. Raises MissingInputError,
    EmptyInputError, InputError.
    """
    return [place.url for place in places(source)]


def describe(source: SourceConfig) -> Manifest:
    """A source as the input of an artifact: what its files hold, wherever they lie, and what was
    stated about it.

    Raises MissingInputError, EmptyInputError, InputError.
    """
    found = {place.name: _checksum(place) for place in places(source)}
    stated = source.model_dump(
        mode="json", include={"licence", "prompts_by", "answers_by", "overrule"}
    )
    commit = hub.commit(source.path)
    return Manifest(
        stage="source",
        identity=content_identity([file.sha256 for file in found.values()]),
        config=stated,
        counts={},
        files=found,
        facts={"commit": commit} if commit else {},
        url=shown(source.path),
    )


def content_identity(checksums: list[str]) -> str:
    """One name for the contents of files in their order: of a single file its SHA-256, of several
    the hash of theirs.
    """
    return (
        checksums[0]
        if len(checksums) == 1
        else hashlib.sha256("\n".join(checksums).encode()).hexdigest()
    )


def read_source(source: SourceConfig) -> Iterator[Row | Damaged]:
    """The rows of a source in order, one at a time; one that cannot be read comes as Damaged.

    So does what follows a place where a file breaks (a cut gzip, a broken JSON array), as one: how
    many rows it held, nobody can tell. Raises MissingInputError (no such file), EmptyInputError (no
    row in it), CorruptError (not one readable row), InputError (a store that fails, or a package
    that is missing).
    """
    count, readable, first = 0, False, ""
    for place in places(source):
        for row in _rows(place, source):
            count += 1
            readable = readable or isinstance(row, Row)
            if isinstance(row, Damaged):
                first = first or f"{row.where}: {row.drop.note}"
            yield row
    if not count:
        raise EmptyInputError(
            f"{shown(source.path)} holds no row", "give a file of conversations or prompts"
        )
    if not readable:
        raise CorruptError(
            f"not one of the {count} rows of {shown(source.path)} can be read; the first, {first}",
            f"give JSON, JSON lines, CSV or Parquet with {SHAPES}; or plain text, one prompt a "
            "line; or say its `shape`",
        )


def _rows(place: Place, source: SourceConfig) -> Iterator[Row | Damaged]:
    """The rows of one file."""
    label, licence = source.label, source.licence or NOT_STATED
    texts: formats.Texts | None = (
        source.shape if source.shape in ("strings", "lines", "paragraphs") else None
    )
    with _opened(place) as stored:
        values = shapes.grouped(formats.values(stored, place.name, KEYS, texts))
        for line, value in values:
            where = f"{place.name}:{line}"
            try:
                if isinstance(value, Unreadable):
                    raise value
                turns, system = shapes.said(value, source.shape)
            except Unreadable as error:
                yield Damaged(label, where, Drop("malformed", str(error)))
            else:
                yield Row(label, licence, where, shapes.given_id(value), turns, system)


# The files.


def places(source: SourceConfig) -> list[Place]:
    """The files of a source by name. Raises MissingInputError, EmptyInputError, InputError."""
    asked = hub.asked_for(source.path)
    if asked is not None:
        found = hub.files(asked, source.subset, source.split)
        return _named([(path, _local()) for path in found])
    if source.subset or source.split:
        raise InputError(
            f"{source.path} has no subsets or splits",
            "they are for sets of the Hugging Face hub; name the files",
        )
    with _reading(source.path):
        filesystem, path = _located(source.path)
        return _named([(one, filesystem) for one in _expanded(filesystem, path, source.path)])


def _named(found: list[tuple[str, Any]]) -> list[Place]:
    """Places in the order of their names, which do not depend on where the files lie."""
    paths = [shown(path) for path, _ in found]
    folder = (
        posixpath.commonpath([posixpath.dirname(path) for path in paths]) if len(found) > 1 else ""
    )
    names = [
        path[len(folder) :].lstrip("/") if folder else posixpath.basename(path) for path in paths
    ]
    places = [Place(name, *one) for name, one in zip(names, found, strict=True)]
    return sorted(places, key=lambda place: place.name)


def _expanded(filesystem: Any, path: str, given: str) -> list[str]:
    """The files that a path stands for: itself, the data files of a folder, or what matches it."""
    try:
        is_folder = filesystem.info(path)["type"] == "directory"
    except FileNotFoundError:
        if not MAGIC & set(path):
            raise
        facts = filesystem.glob(path, detail=True)
        found = [
            name
            for name in facts
            if facts[name]["type"] != "directory" and ("/." in path or "/." not in name)
        ]
        if not found:
            raise MissingInputError(
                f"no file matches {shown(given)}", "check the pattern; ** stands for any folders"
            ) from None
        return found
    if not is_folder:
        return [path]
    found = [name for name in filesystem.find(path) if _is_data(name[len(path) :])]
    if not found:
        raise EmptyInputError(
            f"the folder {shown(given)} holds no data file",
            f"give one with files that end in {', '.join(formats.ENDINGS)}, packed or not; or name "
            "the files",
        )
    return found


def _is_data(name: str) -> bool:
    """Whether a file below a folder is read unasked: none that is hidden, half-written or of no
    format known here.
    """
    return bool(formats.ending(name)) and not any(
        part.startswith((".", "_")) for part in name.split("/")
    )


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn what goes wrong while a file is found and opened into the error that says so."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingInputError(
            f"no file at {shown(path)}",
            "check the path; relative paths start at the current folder",
        ) from error
    # a store's package that is not installed; no permission; no network
    except (ImportError, OSError) as error:
        reason = str(error).replace(path, shown(path))
        raise InputError(
            f"{shown(path)} cannot be read: {reason}",
            "check that it is readable, and its store at hand",
        ) from error


def _located(path: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it."""
    try:
        filesystem, inner = url_to_fs(path)
    except ValueError as error:
        raise InputError(
            f"{shown(path)} cannot be opened: {error}",
            "use a local path, s3://, gs://, https:// or hf://",
        ) from error
    return filesystem, inner


@contextmanager
def _opened(place: Place) -> Iterator[Stored]:
    with _reading(place.url):
        file = place.filesystem.open(place.path, "rb")
    with file:
        yield Stored(file, place.url)


def _checksum(place: Place) -> File:
    digest, size = hashlib.sha256(), 0
    with _opened(place) as stored:
        while block := stored.read(BLOCK):
            digest.update(block)
            size += len(block)
    return File(bytes=size, sha256=digest.hexdigest())


@functools.cache
def _local() -> LocalFileSystem:
    return LocalFileSystem()
