"""A model's files out of an object store, into a folder of this machine: whole, checksummed, and
resumed where it was cut.

    URI/target/     a target in Hugging Face's form
    URI/head/       a head in any form; absent for plain decoding

A file is fetched in blocks into `NAME.partial-VERSION`, VERSION being of the object, so that an
object that has changed is begun anew; it gets its name once its checksum is right: the store's own
MD5 or CRC32C, and the manifest's SHA-256 where the folder is one of eyas' artifacts. Files that are
there and right are not fetched again; of a store without checksums (S3), those whose version, kept
below `versions/`, is the store's. Knows no model.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from eyas.artifact import BLOCK_BYTES, DONE, MANIFEST, Persistent, storage_errors
from eyas.errors import CorruptError, InputError, MissingInputError

try:
    import google_crc32c
except ImportError:  # comes with gcsfs
    CRC32C: Any = None
else:
    CRC32C = google_crc32c.Checksum

TARGET, HEAD, VERSIONS = "target", "head", "versions"
log = logging.getLogger("eyas.serve")


def place(uri: str) -> Path:
    """Where a URI's files are kept if nothing else is said: in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "eyas" / "models" / hashlib.sha256(uri.rstrip("/").encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Stored:
    """A file in the store: name below the URI, path in the store, bytes, and what the store knows
    it by.
    """

    name: str
    path: str
    size: int
    md5: str | None
    crc32c: str | None
    version: str

    @classmethod
    def of(cls, root: str, facts: Mapping[str, Any]) -> Stored:
        """Of what a store tells about a file; the keys are those of GCS."""
        path = str(facts["name"])
        known = {
            name: facts.get(name)
            for name in (
                "generation",
                "md5Hash",
                "crc32c",
                "etag",
                "ETag",
                "LastModified",
                "mtime",
                "created",
                "size",
            )
        }
        version = hashlib.sha256(
            json.dumps(known, sort_keys=True, default=str).encode()
        ).hexdigest()[:12]
        return cls(
            path[len(root) :].lstrip("/"),
            path,
            int(facts["size"]),
            facts.get("md5Hash"),
            facts.get("crc32c"),
            version,
        )

    @property
    def has_checksum(self) -> bool:
        """Whether what is fetched can be held against one of the store's."""
        return self.md5 is not None or (self.crc32c is not None and CRC32C is not None)


def fetched(uri: str, folder: Path | None = None) -> tuple[Path, Path | None]:
    """The local folders of target and head, once all files are there and right. folder: in which;
    `place` of the URI.

    Raises MissingInputError (nothing there, no target/), CorruptError (a file that is not what the
    store says), InputError (no client for the store), EyasError (a store that does not answer),
    StorageFullError.
    """
    folder = folder or place(uri)
    store, root = _opened(uri)
    found = [
        Stored.of(root, facts)
        for facts in store.find(root, detail=True).values()
        if facts.get("type") == "file"
    ]
    wanted = [
        one for one in found if one.name.split("/")[0] in (TARGET, HEAD) and one.name.split("/")[1:]
    ]
    if not any(one.name.startswith(f"{TARGET}/") for one in wanted):
        raise MissingInputError(
            f"{uri} has no files below {TARGET}/",
            f"lay the target's files there, and the head's below {HEAD}/",
        )
    for one in wanted:
        local = folder / one.name
        if not local.resolve().is_relative_to(folder.resolve()):
            raise InputError(f"{uri} has a file whose name leads out of the folder", "rename it")
        with storage_errors(str(folder)):
            _fetch(store, one, local, folder / VERSIONS / one.name)
    _forget_others(folder, {one.name for one in wanted})
    target = folder / TARGET
    head = folder / HEAD if any(one.name.startswith(f"{HEAD}/") for one in wanted) else None
    for one_of_two in (target, head) if head is not None else (target,):
        _check_manifest(one_of_two)
    log.info(
        "model fetched",
        extra={"data": {"files": len(wanted), "bytes": sum(one.size for one in wanted)}},
    )
    return target, head


def _opened(uri: str) -> tuple[Any, str]:
    try:
        store, root = url_to_fs(uri.rstrip("/"))
    except (ImportError, ValueError) as error:
        raise InputError(
            f"{uri} cannot be opened: {error}", "install eyas[gcs] for gs://, eyas[s3] for s3://"
        ) from error
    store.invalidate_cache()
    persistent = Persistent(store, uri)
    return persistent, str(root)


def _fetch(store: Any, one: Stored, local: Path, version: Path) -> None:
    """version: the file that says of which version of the object a local file is."""
    is_known = one.has_checksum or (version.is_file() and version.read_text() == one.version)
    if is_known and local.is_file() and local.stat().st_size == one.size and _is_right(one, local):
        return
    local.parent.mkdir(parents=True, exist_ok=True)
    partial = local.with_name(f"{local.name}.partial-{one.version}")
    for other in local.parent.glob(f"{_literal(local.name)}.partial-*"):
        if other != partial:
            other.unlink()
    have = partial.stat().st_size if partial.is_file() else 0
    with open(partial, "ab") as stream:
        if have > one.size:
            stream.truncate(0)
            have = 0
        for start in range(have, one.size, BLOCK_BYTES):
            stream.write(
                store.cat_file(one.path, start=start, end=min(start + BLOCK_BYTES, one.size))
            )
            stream.flush()
        os.fsync(stream.fileno())
    if partial.stat().st_size != one.size or not _is_right(one, partial):
        partial.unlink()
        raise CorruptError(
            f"{one.name} came otherwise than its store says",
            "start again; if it stays so, upload it again",
        )
    version.unlink(missing_ok=True)
    os.replace(partial, local)
    if not one.has_checksum:
        version.parent.mkdir(parents=True, exist_ok=True)
        version.write_text(one.version)


def _literal(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


def _is_right(one: Stored, path: Path) -> bool:
    """Whether a file has the store's checksum; of a store without any, its size must do."""
    if not one.has_checksum:
        return True
    if one.md5 is not None:
        return (
            base64.b64encode(_digest(path, hashlib.md5(usedforsecurity=False))).decode() == one.md5
        )
    return base64.b64encode(_digest(path, CRC32C())).decode() == one.crc32c


def _digest(path: Path, digest: Any) -> bytes:
    with open(path, "rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return bytes(digest.digest())


def _forget_others(folder: Path, names: set[str]) -> None:
    """Delete what an earlier version of the model had and this one has not."""
    for path in [path for part in (TARGET, HEAD) for path in (folder / part).rglob("*")]:
        if path.is_file() and path.relative_to(folder).as_posix() not in names:
            path.unlink()


def _check_manifest(folder: Path) -> None:
    """Of one of our artifacts, every file against the manifest. Raises CorruptError,
    MissingInputError.
    """
    if not (folder / MANIFEST).is_file() or not (folder / DONE).is_file():
        return
    text = (folder / MANIFEST).read_bytes()
    if hashlib.sha256(text).hexdigest() != (folder / DONE).read_text().strip():
        raise CorruptError(
            f"{folder.name}/{MANIFEST} does not match its done marker", "upload the folder again"
        )
    for name, file in json.loads(text)["files"].items():
        path = folder / name
        if not path.is_file():
            raise MissingInputError(
                f"{folder.name}/{name} is missing", "upload the folder again, all of it"
            )
        if _digest(path, hashlib.sha256()).hex() != file["sha256"]:
            raise CorruptError(
                f"{folder.name}/{name} does not match its checksum", "upload the folder again"
            )
