"""Artifacts: a folder at any fsspec URL with data files, a manifest and a done marker written last.

    prompts/
        prompts-00000.jsonl
        ledger.json
        manifest.json           counts, config, SHA-256 of each file, manifests of the inputs
        _DONE                   written last
        work/                   parts that only the stage itself needs, until it is done

The identity is the hash of the stage's name, its config and its inputs' identities. A folder
without `_DONE` is unfinished; only the stage that wrote it reads it, to resume.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel, ValidationError

from eyas.errors import CorruptError, EyasError, InputError, MissingInputError
from eyas.stores import open_store, storage_errors

VERSION = "0.2.0"  # the only place: pyproject.toml and the API read it here
MANIFEST, DONE, IDENTITY, CLAIM = "manifest.json", "_DONE", "_IDENTITY", "_CLAIM"
BLOCK_BYTES = 16 << 20  # read at a time
WORK = "work"


class File(BaseModel):
    bytes: int
    sha256: str


class Manifest(BaseModel):
    """Enough to verify every byte of an artifact and to find every source."""

    stage: str
    identity: str
    config: dict[str, Any]
    counts: dict[str, int]
    files: dict[str, File]
    inputs: dict[str, Manifest] = {}
    facts: dict[str, Any] = {}
    url: str = ""
    created: str = ""
    version: str = VERSION


def identity(stage: str, config: Mapping[str, Any], inputs: Mapping[str, Manifest]) -> str:
    """16 hex digits of the SHA-256 over the stage, its config and its inputs' identities."""
    made = {name: one.identity for name, one in sorted(inputs.items())}
    what = json.dumps({"stage": stage, "config": config, "inputs": made}, sort_keys=True)
    return hashlib.sha256(what.encode()).hexdigest()[:16]


def file_identity(url: str) -> str:
    """SHA-256 of the bytes at a URL. Raises MissingInputError, InputError."""
    try:
        with fsspec.open(url, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise MissingInputError(
            f"no file at {url}", "check the path; relative paths start at the current folder"
        ) from error
    except IsADirectoryError as error:
        raise InputError(f"{url} is a folder", "give a file in it") from error


def cache_folder(name: str) -> Path:
    """$EYAS_CACHE/name, else below $XDG_CACHE_HOME or ~/.cache."""
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("EYAS_CACHE") or Path(user, "eyas")) / name


class Artifact:
    """One artifact at `url` (`file://`, `s3://`, `gs://`, `memory://` or a plain path)."""

    def __init__(self, url: str) -> None:
        self.url = str(url).rstrip("/")
        if not self.url:  # else the current folder
            raise InputError(f"{str(url)!r} names no folder", "name one: out/NAME")
        self._fs, self._root = open_store(self.url)
        self._local = isinstance(self._fs, LocalFileSystem)
        self._written: dict[str, File] = {}
        self._manifest: Manifest | None = None
        self.was_done = False  # what `begin` found

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    # Reading

    def is_done(self) -> bool:
        return self.exists(DONE)

    def manifest(self, stage: str | None = None) -> Manifest:
        """The manifest, checked against the done marker and the stage. Raises MissingInputError
        (absent or unfinished), CorruptError (another done marker), InputError (another stage).
        """
        if self._manifest is None:
            if not self.is_done():
                what = "is no output of a stage" if self.exists("") else "does not exist"
                raise MissingInputError(
                    f"the artifact {self.url} {'is unfinished' if self.exists(IDENTITY) else what}",
                    f"give the output of `eyas {stage or 'STAGE'}`, run to its end",
                )
            digest = self._bytes(DONE).decode(errors="replace").strip()
            text = self._bytes(MANIFEST) if self.exists(MANIFEST) else b""
            try:
                made = Manifest.model_validate_json(text)
            except ValidationError:
                made = None
            if made is None or hashlib.sha256(text).hexdigest() != digest:
                raise CorruptError(
                    f"{self.url}/{MANIFEST} does not match its done marker",
                    "restore it from a copy; without one, delete the folder and run the stage",
                )
            self._manifest = made
        if stage is not None and self._manifest.stage != stage:
            raise InputError(
                f"{self.url} holds {self._manifest.stage!r}, not {stage!r}",
                f"give the output of `eyas {stage}`",
            )
        return self._manifest

    def local_path(self, name: str) -> str | None:
        """The path of a file on this machine's disk; None in an object store."""
        return self._path(name) if self._local else None

    def room(self) -> int | None:
        """Free bytes; None for an object store."""
        if not self._local:
            return None
        place = self._root
        while not os.path.exists(place):
            place = os.path.dirname(place)
        return shutil.disk_usage(place).free

    def exists(self, name: str) -> bool:
        """Whether the store has it now."""
        with storage_errors(self.url):
            try:  # fsspec's own `exists` is false where nothing answers
                self._fs.invalidate_cache()
                self._fs.info(self._path(name) if name else self._root)
            except (FileNotFoundError, NotADirectoryError):
                return False
        return True

    def names(self) -> list[str]:
        """Names of the files directly in the folder, sorted, without half-written ones."""
        if not self.exists(""):
            return []
        found = self._fs.ls(self._root, detail=True)
        names = (str(one["name"]).rsplit("/", 1)[-1] for one in found if one["type"] == "file")
        return sorted(name for name in names if ".partial-" not in name and name != CLAIM)

    def all_names(self) -> list[str]:
        """As `names`, with the files of subfolders ("a/b")."""
        self._fs.invalidate_cache()
        names = (str(path)[len(self._root) :].lstrip("/") for path in self._fs.find(self._root))
        return sorted(name for name in names if ".partial-" not in name and name != CLAIM)

    def read(self, name: str) -> bytes:
        """The bytes of a file, in a finished artifact checked against the manifest; a wrong one is
        read once more, since the network may have failed. Raises MissingInputError, CorruptError.
        """
        known = self.manifest().files.get(name) if self.is_done() else None
        for _ in range(2):
            data = self._bytes(name)
            if known is None or hashlib.sha256(data).hexdigest() == known.sha256:
                return data
        assert known is not None
        raise CorruptError(
            f"{self.url}/{name} does not match its checksum",
            f"restore this file from a copy (SHA-256 {known.sha256}); without one, delete the "
            "folder and run its stage again",
        )

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Bytes [start, end) of a file, unchecked."""
        return self._bytes(name, start=start, end=end)

    def _bytes(self, name: str, **part: int) -> bytes:
        with storage_errors(f"{self.url}/{name}"):
            try:
                return bytes(self._fs.cat_file(self._path(name), **part))
            except FileNotFoundError as error:
                raise MissingInputError(
                    f"{self.url} has no file {name}", "run the stage that makes it again"
                ) from error

    def size(self, name: str) -> int:
        """Bytes of a file."""
        self._fs.invalidate_cache()
        return int(self._fs.info(self._path(name))["size"])

    def version(self, name: str) -> str:
        """A hex id of a file's content, which changes when the store replaces the file."""
        return str(self._fs.ukey(self._path(name)))[:16]

    def read_json(self, name: str) -> Any:
        return json.loads(self.read(name))

    def read_jsonl(self, name: str) -> Iterator[dict[str, Any]]:
        for line in self.read(name).splitlines():
            yield json.loads(line)

    def read_rows(self, stem: str) -> Iterator[dict[str, Any]]:
        """Rows of the files `stem`-00000.jsonl, ... in order, with one file in memory."""
        for name in self.parts(stem):
            yield from self.read_jsonl(name)

    def parts(self, stem: str) -> list[str]:
        """Names of the numbered files of a stem, in order."""
        numbered = re.compile(rf"{re.escape(stem)}-(\d+)\.jsonl")
        found = {name: one for name in self.names() if (one := numbered.fullmatch(name))}
        return sorted(found, key=lambda name: int(found[name][1]))

    # Writing

    def is_done_for(self, identity: str) -> bool:
        """Whether the work of this identity is done here. Raises InputError for a folder with other
        work.
        """
        self.was_done = self.is_done()
        if not (self.was_done or self.exists(IDENTITY)):
            return False
        held = self.manifest().identity if self.was_done else self._bytes(IDENTITY).decode()
        if held != identity:
            raise InputError(
                f"{self.url} holds other work (identity {held}, now {identity}: its config or "
                "inputs changed)",
                "choose another output folder, or delete this one",
            )
        return self.was_done

    @contextmanager
    def begun(self, identity: str) -> Iterator[bool]:
        """`begin`, with the folder held alone if there is work to do."""
        if self.is_done_for(identity):
            yield self.begin(identity)
            return
        with self.held_alone():
            yield self.begin(identity)  # asked again: another process may have done it

    def begin(self, identity: str) -> bool:
        """Claim the folder for this identity; True if there is work to do. Parts of an interrupted
        run stay, to be resumed. Raises InputError for a folder with other work.
        """
        if self.is_done_for(identity):
            self.delete_work()
        if self.was_done or self.exists(IDENTITY):
            self._delete_halves()
            return not self.was_done
        if self.exists(WORK):  # `finish` would delete it
            what = f"{self.url} holds a folder {WORK} not of eyas"
            raise InputError(what, "choose another output")
        self._delete_halves(IDENTITY)  # nothing else can have been begun here
        self.write(IDENTITY, identity.encode())
        self._written.clear()
        return True

    @contextmanager
    def held_alone(self) -> Iterator[None]:
        """Lock the folder against other processes until the block or the process ends. An object
        store has no locks. Raises InputError where another process holds it.
        """
        path = self.local_path(CLAIM)
        if path is None:
            yield
            return
        with storage_errors(self.url):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            file = open(path, "wb")  # noqa: SIM115  # closed below
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_held = os.fstat(file.fileno()).st_nlink > 0  # else deleted just now
            except BlockingIOError:
                is_held = False
            if not is_held:
                raise InputError(
                    f"another process is writing into {self.url}",
                    "wait for it, end it, or choose another output folder",
                )
            try:
                yield
            finally:
                with suppress(FileNotFoundError):
                    os.remove(path)

    def write(self, name: str, data: bytes) -> None:
        """Write a file whole or not at all; its checksum is kept for the manifest."""
        path = self._path(name)
        with storage_errors(self.url):
            if self._local:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                partial = f"{path}.partial-{os.getpid()}"
                try:
                    with open(partial, "wb") as stream:
                        stream.write(data)
                        stream.flush()
                        os.fsync(stream.fileno())
                    os.replace(partial, path)
                except BaseException:
                    if os.path.exists(partial):
                        os.remove(partial)
                    raise
            else:
                try:
                    self._fs.pipe_file(path, data)
                except FileNotFoundError as error:  # no object that is written can be absent
                    raise MissingInputError(
                        f"there is no bucket for {self.url}", "make it, or check its name"
                    ) from error
                if self.size(name) != len(data):
                    raise EyasError(
                        f"{self.url} kept {self.size(name)} of the {len(data)} bytes of {name}",
                        "write it again",
                    )
        if not name.startswith(f"{WORK}/"):
            self.remember(name, File(bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))

    def written(self, name: str) -> File:
        return self._written[name]

    def remember(self, name: str, file: File) -> None:
        """Give a file's checksum, so that `finish` does not read it again."""
        self._written[name] = file

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())

    def write_jsonl(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self.write(name, "".join(lines).encode())

    def delete(self, name: str) -> None:
        if self.exists(name):
            self._fs.rm_file(self._path(name))
        self._written.pop(name, None)

    def _delete_halves(self, of: str = "") -> None:
        """Delete half-written files, but not those that a running process writes."""
        for path in self._fs.find(self._root) if self._local else ():
            name, mark, process = str(path).rsplit("/", 1)[-1].rpartition(".partial-")
            if mark and name.startswith(of) and not is_another_process(process):
                self._fs.rm_file(path)

    def delete_work(self, folder: str = WORK) -> None:
        """Delete `work/`, or another folder."""
        if self.exists(folder):
            self._fs.rm(self._path(folder), recursive=True)

    def free(self) -> None:
        """Give the folder up, unless the work is done: after an error that would come again."""
        if not self.is_done():
            self.delete_work()
            self.delete(IDENTITY)

    def finish(
        self,
        stage: str,
        config: Mapping[str, Any],
        inputs: Mapping[str, Manifest],
        counts: Mapping[str, int],
        facts: Mapping[str, Any] | None = None,
    ) -> Manifest:
        """Write the manifest, then the done marker, then delete `work/`."""
        names = {*self._written, *self.all_names()} - {IDENTITY, MANIFEST, DONE}
        manifest = Manifest(
            stage=stage,
            identity=identity(stage, config, inputs),
            config=dict(config),
            counts=dict(counts),
            files={
                name: self._written.get(name) or self.checksummed(name)
                for name in sorted(names)
                if not name.startswith(f"{WORK}/")
            },
            inputs=dict(inputs),
            facts=dict(facts or {}),
            url=self.url,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        text = manifest.model_dump_json(indent=1).encode() + b"\n"
        self.write(MANIFEST, text)
        self.write(DONE, hashlib.sha256(text).hexdigest().encode())
        self._manifest = manifest
        self.delete_work()
        return manifest

    def checksummed(self, name: str) -> File:
        """Size and SHA-256 of a file, read by blocks."""
        digest, size = hashlib.sha256(), self.size(name)
        for start in range(0, size, BLOCK_BYTES):
            digest.update(self.read_range(name, start, min(start + BLOCK_BYTES, size)))
        return File(bytes=size, sha256=digest.hexdigest())


def is_another_process(process: str) -> bool:
    """Whether this is the id of another running process."""
    if not process.isdigit() or int(process) == os.getpid():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's; no id
        pass
    return True


class Parts:
    """Rows written into numbered files of `rows_per_part` lines. A file is written whole, when it
    is full or at `close`; its rows are in memory until then.
    """

    def __init__(self, artifact: Artifact, stem: str, rows_per_part: int) -> None:
        self.num_rows = 0
        self._artifact, self._stem, self._rows_per_part = artifact, stem, rows_per_part
        self._lines: list[bytes] = []

    def add(self, row: Mapping[str, Any]) -> None:
        self._lines.append(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self.num_rows += 1
        if len(self._lines) == self._rows_per_part:
            self._write()

    def close(self) -> None:
        """Write the last file; without any row an empty one."""
        if self._lines or not self.num_rows:
            self._write()

    def _write(self) -> None:
        part = (self.num_rows - 1) // self._rows_per_part if self.num_rows else 0
        self._artifact.write(f"{self._stem}-{part:05d}.jsonl", b"".join(self._lines))
        self._lines.clear()
