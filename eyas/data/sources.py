"""Sources: sets of conversations or prompts by path, glob, folder, fsspec URL or Hugging Face id,
read row by row. A row that cannot be read is reported by its place, never quoted.
"""

from __future__ import annotations

import hashlib
import itertools
import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from pydantic import Field, field_validator

from eyas.artifact import File, Manifest
from eyas.data import hub_sets
from eyas.data.formats import ENDINGS, FORMATS, FileLook, ending, look, values
from eyas.data.ledger import DamagedRow, Drop, SourceRow
from eyas.data.logs import LOG_REASONS, LogConfig, RequestSampler, logged_request
from eyas.data.shapes import BY_NAME, KEYS, KNOWN_SHAPES, row_id, user_side
from eyas.data.streams import StoreFile, Unreadable, public_url
from eyas.errors import CorruptError, EmptyInputError, InputError, MissingInputError
from eyas.hub import HUB_ID
from eyas.privacy.pii import PrivacyConfig
from eyas.settings import Settings

NOT_STATED = "NOASSERTION"  # SPDX: no licence is stated
GLOB_SIGNS = frozenset("*?[")
HIDDEN = re.compile(r"(?:^|/)[._]")
LOOKED_FILES, LOOKED_ROWS = 64, 8  # that are asked for their format and columns
URL_SET = re.compile(rf"hf://datasets/({HUB_ID.pattern})(?:[@/].*)?")
STATED = {"licence", "prompts_by", "answers_by", "overrule", "fictional", "personal"}


class SourceConfig(Settings):
    """One set of conversations or prompts, its licence, and who wrote it."""

    path: str = Field(
        min_length=1,
        description="file, folder, glob (data/**/*.jsonl.gz), fsspec URL, or a Hugging Face set: "
        "owner/name[@revision]",
    )
    name: str | None = Field(
        None, description="in prompts and ledger; made from the path if not given"
    )
    licence: str | None = Field(None, min_length=1, description="SPDX identifier, e.g. CC-BY-4.0")
    prompts_by: str | None = Field(
        None, min_length=1, description='who wrote the prompts: "human", or a model'
    )
    answers_by: str | None = Field(
        None, min_length=1, description='who wrote the answers: "human", or a model'
    )
    overrule: dict[str, str] = Field(
        {}, description="rules of the policy to overrule for this set: {rule: reason}"
    )
    fictional: bool = Field(
        False,
        description="the people of its prompts are invented, as in word problems: names and places "
        "are not searched for",
    )
    personal: PrivacyConfig | None = Field(
        None, description="what to do with personal data here, in place of the run's policy"
    )
    log: LogConfig | None = Field(
        None, description="for logs of requests: the basis for training on them, and a sample"
    )
    shape: str | None = Field(
        None, description=f"the form of rows, one of {', '.join(BY_NAME)}; recognised if not given"
    )
    subset: str | None = Field(
        None, description="of a Hugging Face set: the configuration; its default if not given"
    )
    split: str | None = Field(None, description="of a Hugging Face set; train if not given")
    max_prompts: int | None = Field(
        None, ge=1, description="take so many of its prompts, drawn by `seed`"
    )

    @field_validator("shape")
    @classmethod
    def _is_known(cls, shape: str | None) -> str | None:
        if shape is not None and shape not in BY_NAME:
            raise ValueError(f"no shape is called {shape!r}: {', '.join(BY_NAME)}")
        return shape

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
        found, named = hub_sets.hub_set(self.path), URL_SET.fullmatch(self.path)
        if label := (found and found[0]) or (named and named[1]):
            return label
        scheme, _, path = public_url(self.path).rpartition("::")[2].rpartition("://")
        solid = [part for part in path.split("/") if part and not GLOB_SIGNS & set(part)]
        if not solid:
            return self.path
        # The dots of a host do not end its name.
        return solid[-1] if scheme and len(solid) == 1 else solid[-1].split(".")[0] or solid[-1]


@dataclass(frozen=True)
class SourceFile:
    """One file of a source. name: its path below the common folder of the source's files."""

    name: str
    path: str
    filesystem: Any

    @property
    def url(self) -> str:
        """Its URL, or its path if it is local."""
        is_local = isinstance(self.filesystem, LocalFileSystem)
        return self.path if is_local else str(self.filesystem.unstrip_protocol(self.path))


def describe(source: SourceConfig) -> Manifest:
    """A source as the input of an artifact. Raises as `source_files`."""
    stated = source.model_dump(mode="json", include=STATED)
    if source.log:
        stated["log"] = source.log.model_dump(mode="json", exclude_defaults=True)
    read_as = source.model_dump(include={"shape", "subset", "split"}, exclude_none=True)
    facts: dict[str, Any] = {"read_as": read_as} if read_as else {}
    found: dict[str, File] = {}
    if hub_sets.hub_set(source.path):
        facts["commit"] = commit = hub_sets.set_commit(source.path, source.subset)
        identity = content_identity([commit, source.subset or "", source.split or ""])
    else:
        found = {place.name: _checksum(place) for place in source_files(source)}
        identity = content_identity([file.sha256 for file in found.values()])
    return Manifest(
        stage="source",
        identity=identity,
        config=stated,
        counts={},
        files=found,
        facts=facts,
        url=public_url(source.path),
    )


def content_identity(checksums: list[str]) -> str:
    """The SHA-256 of a single file; of several the SHA-256 of theirs, in order."""
    if len(checksums) == 1:
        return checksums[0]
    return hashlib.sha256("\n".join(checksums).encode()).hexdigest()


def read_source(source: SourceConfig) -> Iterator[SourceRow | DamagedRow]:
    """The rows of a source in order, one at a time. A row that cannot be read is a DamagedRow, and
    so is the rest of a broken file.

    Raises MissingInputError (no such file), EmptyInputError (no row), CorruptError (no readable
    row), InputError (the store fails, or a package is missing).
    """
    count, readable, first = 0, False, ""
    for row in _rows(source):
        count += 1
        known = isinstance(row, SourceRow) or row.drop.reason in {*LOG_REASONS, "tools"}
        readable = readable or known
        if isinstance(row, DamagedRow):
            first = first or f"{row.where}: {row.drop.note}"
        yield row
    if not count:
        what = f"{public_url(source.path)} holds no {'request' if source.log else 'row'}"
        raise EmptyInputError(what, "give a file of conversations or prompts")
    if not readable:
        formats = ", ".join(one.name for one in FORMATS)
        raise CorruptError(
            f"not one of the {count} rows of {public_url(source.path)} can be read; the first, "
            f"{first}",
            f"give {formats}, with {KNOWN_SHAPES}; or say its `shape`",
        )


def _rows(source: SourceConfig) -> Iterator[SourceRow | DamagedRow]:
    licence = source.licence or NOT_STATED
    sampler = RequestSampler(source.log) if source.log else None
    for place, line, value in _values(source):
        where = f"{place}:{line}"
        try:
            if isinstance(value, Unreadable):
                raise value
            if sampler:
                request = logged_request(value)
                if request is None:  # a line of the log that is no request
                    continue
                sampler.check(request)
                value = request.row
            turns, system = user_side(value, source.shape)
        except Unreadable as error:
            yield DamagedRow(source.label, where, Drop(error.reason, str(error)))
        else:
            yield SourceRow(source.label, licence, where, row_id(value), turns, system)


def _values(source: SourceConfig) -> Iterator[tuple[str, int, Any]]:
    """The values of a source, each with its file (of a hub set its split) and line."""
    keys = None if source.log else KEYS  # any column of a log may hold consent
    if hub_sets.hub_set(source.path):
        split = source.split or hub_sets.TRAIN
        for number, row in hub_sets.set_rows(source.path, source.subset, split, keys):
            yield split, number, row
        return
    for place in source_files(source):
        with _opened(place) as stored:
            stated = source.log is not None, source.shape == "strings"
            for line, value in values(stored, place.name, keys, *stated):
                yield place.name, line, value


def looks(source: SourceConfig) -> set[FileLook]:
    """What the files of a source look like. Raises as `source_files`."""
    if hub_sets.hub_set(source.path):
        rows = hub_sets.set_rows(source.path, source.subset, source.split, None)
        return {FileLook("", frozenset(row)) for _, row in itertools.islice(rows, 1)}
    found = set()
    for place in source_files(source)[:LOOKED_FILES]:
        with _opened(place) as stored:
            found.add(look(stored, place.name, LOOKED_ROWS))
    return found


def source_files(source: SourceConfig) -> list[SourceFile]:
    """The files of a source by name. Raises MissingInputError, EmptyInputError, InputError."""
    if source.subset or source.split:
        what = f"{source.path} has no subsets or splits"
        raise InputError(what, "they are for sets of the Hugging Face hub; name the files")
    with _reading(source.path):
        try:
            filesystem, path = url_to_fs(source.path)
        except ValueError as error:
            what = f"{public_url(source.path)} cannot be opened: {error}"
            raise InputError(what, "use a local path, s3://, gs://, https:// or hf://") from error
        found = {one: public_url(one) for one in _expanded(filesystem, path, source.path)}
    folders = [posixpath.dirname(shown) for shown in found.values()]
    start = len(posixpath.commonpath(folders) if len(folders) > 1 else folders[0])
    names = ((shown[start:].lstrip("/"), one) for one, shown in found.items())
    places = (SourceFile(name, one, filesystem) for name, one in names)
    return sorted(places, key=lambda place: place.name)


def _expanded(filesystem: Any, path: str, given: str) -> list[str]:
    try:
        is_folder = filesystem.info(path)["type"] == "directory"
    except FileNotFoundError:
        if not GLOB_SIGNS & set(path):
            raise
        every = filesystem.glob(path, detail=True).items()
        files = [name for name, facts in every if facts["type"] != "directory"]
        found = [name for name in files if "/." in path or "/." not in name]
        if not found:
            what = f"no file matches {public_url(given)}"
            raise MissingInputError(what, "check the pattern; ** stands for any folders") from None
        return found
    if not is_folder:
        return [path]
    seen = [name for name in filesystem.find(path) if not HIDDEN.search(name[len(path) :])]
    found = [*filter(ending, seen)]
    names = {*map(posixpath.basename, seen)}  # Arrow files beside other data may be a cache
    is_saved = not found or {"state.json", "dataset_info.json"} & names
    if is_saved and any(name.endswith(".arrow") for name in seen):
        what = f"the folder {public_url(given)} holds Arrow files, as save_to_disk writes them"
        raise InputError(what, "write Parquet: datasets.load_from_disk(FOLDER).to_parquet(FILE)")
    if not found:
        raise EmptyInputError(
            f"the folder {public_url(given)} holds no data file",
            f"give one with files that end in {', '.join(ENDINGS)}, packed or not; or name "
            "the files",
        )
    return found


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise MissingInputError(
            f"no file at {public_url(path)}",
            "check the path; relative paths start at the current folder",
        ) from error
    except (ImportError, OSError) as error:  # also a missing package of a store
        reason = str(error).replace(path, public_url(path))
        raise InputError(
            f"{public_url(path)} cannot be read: {reason}",
            "see that it can be reached, and that this user may read it",
        ) from error


@contextmanager
def _opened(place: SourceFile) -> Iterator[StoreFile]:
    with _reading(place.url):
        file = place.filesystem.open(place.path, "rb")
    with file:
        yield StoreFile(file, place.url)


def _checksum(place: SourceFile) -> File:
    with _opened(place) as stored:
        digest = hashlib.file_digest(stored, "sha256").hexdigest()
        return File(bytes=stored.tell(), sha256=digest)
