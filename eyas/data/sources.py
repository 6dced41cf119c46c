"""Sources: sets of conversations or prompts, by path, glob, folder, fsspec URL or Hugging Face id,
read row by row.

Knows the files of a source and their order. Takes the user's side only. A row that cannot be read
is reported by its place, never quoted. Knows no reason for which a readable row is dropped.
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
from eyas.data.ledger import DamagedRow, Drop, SourceRow
from eyas.data.shapes import KEYS, SHAPES, RowShape
from eyas.data.streams import StoreFile, Unreadable, public_url
from eyas.data.traffic import NOT_TAKEN, RequestSampler, TrafficConfig, logged_request
from eyas.errors import CorruptError, EmptyInputError, InputError, MissingInputError
from eyas.privacy.pii import PrivacyConfig

NOT_STATED = "NOASSERTION"  # SPDX: no licence is stated
GLOB_SIGNS = frozenset("*?[")
BLOCK = 1 << 20  # bytes
LOOKED_FILES, LOOKED_ROWS = 64, 8  # that are asked for their columns


class SourceConfig(BaseModel):
    """One set of conversations or prompts, its licence, and who wrote it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str = Field(
        min_length=1,
        description="file, folder, glob (data/**/*.jsonl.gz), fsspec URL, or a Hugging Face set: "
        "owner/name[@revision], "
        "hf://datasets/owner/name[@revision][/path]",
    )
    name: str | None = Field(
        default=None, description="in prompts and ledger; made from the path if not given"
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
        default={}, description="rules of the policy to overrule for this set: {rule: reason}"
    )
    fictional: bool = Field(
        default=False,
        description="the people of its prompts are invented, as in word problems: names and places "
        "are not searched for",
    )
    personal: PrivacyConfig | None = Field(
        default=None, description="what to do with personal data here, in place of the run's policy"
    )
    traffic: TrafficConfig | None = Field(
        default=None,
        description="its files are logs of requests: what allows to train on them, and a sample",
    )
    shape: RowShape | None = Field(
        default=None, description="how rows are written; recognised if not given"
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

    def privacy(self, of_run: PrivacyConfig) -> PrivacyConfig:
        """What is done about personal data in its rows."""
        policy = self.personal or of_run
        return policy.model_copy(update={"fictional": True}) if self.fictional else policy

    @property
    def label(self) -> str:
        if self.name:
            return self.name
        if found := hub.hub_path(self.path):
            return found.id
        scheme, _, path = public_url(self.path).rpartition("::")[2].rpartition("://")
        solid = [part for part in path.split("/") if part and not GLOB_SIGNS & set(part)]
        if not solid:
            return self.path
        # The dots of a host do not end its name.
        return solid[-1] if scheme and len(solid) == 1 else solid[-1].split(".")[0] or solid[-1]


@dataclass(frozen=True)
class SourceFile:
    """One file of a source. name: its path below the common folder of all files of the source."""

    name: str
    path: str
    filesystem: Any

    @property
    def url(self) -> str:
        """Its URL, or its path if it is local."""
        is_local = isinstance(self.filesystem, LocalFileSystem)
        return self.path if is_local else str(self.filesystem.unstrip_protocol(self.path))


def describe(source: SourceConfig) -> Manifest:
    """A source as the input of an artifact: the contents of its files, wherever they lie, and what
    is stated about it. Raises MissingInputError, EmptyInputError, InputError.
    """
    found = {place.name: _checksum(place) for place in source_files(source)}
    stated = source.model_dump(
        mode="json",
        include={"licence", "prompts_by", "answers_by", "overrule", "fictional", "personal"},
    )
    if source.traffic:
        stated["traffic"] = source.traffic.model_dump(mode="json", exclude_defaults=True)
    commit = hub.commit(source.path)
    read_as = source.model_dump(include={"shape", "subset", "split"}, exclude_none=True)
    return Manifest(
        stage="source",
        identity=content_identity([file.sha256 for file in found.values()]),
        config=stated,
        counts={},
        files=found,
        facts={
            **({"commit": commit} if commit else {}),
            **({"read_as": read_as} if read_as else {}),
        },
        url=public_url(source.path),
    )


def content_identity(checksums: list[str]) -> str:
    """One identity for the contents of files in order: the SHA-256 of a single file, of several the
    hash of their SHA-256.
    """
    if len(checksums) == 1:
        return checksums[0]
    return hashlib.sha256("\n".join(checksums).encode()).hexdigest()


def read_source(source: SourceConfig) -> Iterator[SourceRow | DamagedRow]:
    """The rows of a source in order, one at a time; one that cannot be read is a DamagedRow.

    The rest of a file that breaks (a cut gzip, a broken JSON array) is one DamagedRow: how many
    rows it held is unknown. Raises MissingInputError (no such file), EmptyInputError (no row in
    it), CorruptError (no readable row), InputError (the store fails, or a package is missing).
    """
    count, readable, first = 0, False, ""
    sampler = RequestSampler(source.traffic) if source.traffic else None
    for place in source_files(source):
        for row in _rows(place, source, sampler):
            count += 1
            readable = readable or isinstance(row, SourceRow) or row.drop.reason in NOT_TAKEN
            if isinstance(row, DamagedRow):
                first = first or f"{row.where}: {row.drop.note}"
            yield row
    if not count:
        raise EmptyInputError(
            f"{public_url(source.path)} holds no row", "give a file of conversations or prompts"
        )
    if not readable:
        raise CorruptError(
            f"not one of the {count} rows of {public_url(source.path)} can be read; the first, "
            f"{first}",
            f"give JSON, JSON lines, CSV or Parquet with {SHAPES}; or plain text, one prompt a "
            "line; or say its `shape`",
        )


def _rows(
    place: SourceFile, source: SourceConfig, sampler: RequestSampler | None
) -> Iterator[SourceRow | DamagedRow]:
    """The rows of one file. sampler: of a log, which also has lines that are no rows."""
    label, licence = source.label, source.licence or NOT_STATED
    texts: formats.TextUnit | None = (
        source.shape if source.shape in ("strings", "lines", "paragraphs") else None
    )
    texts = "log" if sampler else texts
    with _opened(place) as stored:
        values = shapes.join_trees(formats.values(stored, place.name, KEYS, texts))
        for line, value in values:
            where = f"{place.name}:{line}"
            try:
                if isinstance(value, Unreadable):
                    raise value
                if sampler:
                    request = logged_request(value)
                    if request is None:
                        continue
                    sampler.check(request)
                    value = request.row
                turns, system = shapes.user_side(value, source.shape)
            except Unreadable as error:
                yield DamagedRow(label, where, Drop(error.reason, str(error)))
            else:
                id, untaken = shapes.row_id(value), shapes.num_untaken(value)
                yield SourceRow(label, licence, where, id, turns, system, untaken=untaken)


def columns(source: SourceConfig) -> set[frozenset[str]]:
    """The columns of each file, or the keys of its first rows: what the rows look like.

    Raises as `read_source` does for files that cannot be found or opened.
    """
    found = set()
    for place in source_files(source)[:LOOKED_FILES]:
        with _opened(place) as stored:
            found.add(formats.columns(stored, place.name, KEYS, LOOKED_ROWS))
    return found


# The files.


def source_files(source: SourceConfig) -> list[SourceFile]:
    """The files of a source by name. Raises MissingInputError, EmptyInputError, InputError."""
    named = hub.hub_path(source.path)
    if named is not None:
        found = hub.files(named, source.subset, source.split)
        return _named([(path, _local()) for path in found])
    if source.subset or source.split:
        raise InputError(
            f"{source.path} has no subsets or splits",
            "they are for sets of the Hugging Face hub; name the files",
        )
    with _reading(source.path):
        filesystem, path = _located(source.path)
        return _named([(one, filesystem) for one in _expanded(filesystem, path, source.path)])


def _named(found: list[tuple[str, Any]]) -> list[SourceFile]:
    """Files in the order of their names, which do not depend on the place of the folder."""
    paths = [public_url(path) for path, _ in found]
    folder = (
        posixpath.commonpath([posixpath.dirname(path) for path in paths]) if len(found) > 1 else ""
    )
    names = [
        path[len(folder) :].lstrip("/") if folder else posixpath.basename(path) for path in paths
    ]
    places = [SourceFile(name, *one) for name, one in zip(names, found, strict=True)]
    return sorted(places, key=lambda place: place.name)


def _expanded(filesystem: Any, path: str, given: str) -> list[str]:
    """The files of a path: itself, the data files of a folder, or the matches of a glob."""
    try:
        is_folder = filesystem.info(path)["type"] == "directory"
    except FileNotFoundError:
        if not GLOB_SIGNS & set(path):
            raise
        facts = filesystem.glob(path, detail=True)
        found = [
            name
            for name in facts
            if facts[name]["type"] != "directory" and ("/." in path or "/." not in name)
        ]
        if not found:
            raise MissingInputError(
                f"no file matches {public_url(given)}",
                "check the pattern; ** stands for any folders",
            ) from None
        return found
    if not is_folder:
        return [path]
    found = [name for name in filesystem.find(path) if _is_data(name[len(path) :])]
    if not found:
        raise EmptyInputError(
            f"the folder {public_url(given)} holds no data file",
            f"give one with files that end in {', '.join(formats.ENDINGS)}, packed or not; or name "
            "the files",
        )
    return found


def _is_data(name: str) -> bool:
    """Whether a file of a folder is read: not hidden, not half-written, of a known format."""
    return bool(formats.ending(name)) and not any(
        part.startswith((".", "_")) for part in name.split("/")
    )


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn a failure to find or open a file into an InputError."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingInputError(
            f"no file at {public_url(path)}",
            "check the path; relative paths start at the current folder",
        ) from error
    # A missing package of a store, no permission, no network.
    except (ImportError, OSError) as error:
        reason = str(error).replace(path, public_url(path))
        raise InputError(
            f"{public_url(path)} cannot be read: {reason}",
            "check that it is readable, and that its store can be reached",
        ) from error


def _located(path: str) -> tuple[Any, str]:
    """The file system of a URL and the path in it."""
    try:
        filesystem, inner = url_to_fs(path)
    except ValueError as error:
        raise InputError(
            f"{public_url(path)} cannot be opened: {error}",
            "use a local path, s3://, gs://, https:// or hf://",
        ) from error
    return filesystem, inner


@contextmanager
def _opened(place: SourceFile) -> Iterator[StoreFile]:
    with _reading(place.url):
        file = place.filesystem.open(place.path, "rb")
    with file:
        yield StoreFile(file, place.url)


def _checksum(place: SourceFile) -> File:
    digest, size = hashlib.sha256(), 0
    with _opened(place) as stored:
        while block := stored.read(BLOCK):
            digest.update(block)
            size += len(block)
    return File(bytes=size, sha256=digest.hexdigest())


@functools.cache
def _local() -> LocalFileSystem:
    return LocalFileSystem()
