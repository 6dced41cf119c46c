"""A cache on this machine's disk for what was read from an object store: bounded, and shared by any
number of processes.

Knows files, their age and their size. Does not know what is in them: whoever reads verifies.

A file is written beside and moved in place, so none is ever seen half-written. A hit makes a file
young; when the folder is full the oldest go, down to nine tenths of the bound, under a lock that
only those who delete take. A file that another process deletes while it is wanted is a miss. Each
process counts what it put since it last looked at the folder, and looks again after a twentieth of
the bound: so n processes stay below it but for n - 1 twentieths.

EYAS_FEATURE_CACHE=200GB in the environment gives every reader of features in a store one, below
EYAS_CACHE (~/.cache/eyas): how much of a disk may be had is the machine's to say, not a run's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from pathlib import Path
from uuid import uuid4

from pydantic import ByteSize, TypeAdapter, ValidationError

from eyas.artifact import cache_folder
from eyas.errors import ConfigError

VARIABLE = "EYAS_FEATURE_CACHE"
LOOK_SHARE = 0.05  # of the bound, put by this process between two looks at the folder
KEEP_SHARE = 0.9  # of the bound, kept when the oldest go


class Cache:
    """Bytes under names, in `folder`, `max_bytes` of them."""

    def __init__(self, folder: str | Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = Path(folder), max_bytes
        self._folder.mkdir(parents=True, exist_ok=True)
        self._put_since = max_bytes  # of an unknown folder: look at the first put
        self._guard = threading.Lock()

    @classmethod
    def from_environment(cls) -> Cache | None:
        """The cache that the environment asks for, if it does. Raises ConfigError for a size that
        is none.
        """
        stated = os.environ.get(VARIABLE, "").strip()
        if not stated:
            return None
        try:
            max_bytes = TypeAdapter(ByteSize).validate_python(stated)
        except ValidationError as error:
            raise ConfigError(
                f"{VARIABLE}={stated} is no size", f"write e.g. {VARIABLE}=200GB, or 0 for no cache"
            ) from error
        return cls(cache_folder("features"), max_bytes) if max_bytes else None

    def get(self, name: str) -> bytes | None:
        """The bytes put under a name, or None; they may be wrong, as a disk may be."""
        path = self._folder / name
        try:
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            return None
        return data

    def put(self, name: str, data: bytes) -> None:
        """Keep bytes; those larger than the whole cache are not kept, and a disk without room keeps
        none.
        """
        if len(data) > self._max_bytes * KEEP_SHARE:
            return
        half = self._folder / f".{uuid4().hex}"
        try:
            half.write_bytes(data)
            half.replace(self._folder / name)
        except OSError:  # a full disk is no reason to stop reading
            half.unlink(missing_ok=True)
            return
        with self._guard:
            self._put_since += len(data)
            if self._put_since < self._max_bytes * LOOK_SHARE:
                return
            self._put_since = 0
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        with (self._folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            files = sorted(self._files())
            total = sum(size for _, size, _ in files)
            if total <= self._max_bytes * (1 - LOOK_SHARE):
                return
            for _, size, path in files:
                if total <= self._max_bytes * KEEP_SHARE:
                    break
                path.unlink(missing_ok=True)
                total -= size

    def _files(self) -> list[tuple[int, int, Path]]:
        """When each file was last wanted, in ns, its size and its path; halves of killed writers
        among them.
        """
        found = []
        for entry in os.scandir(self._folder):
            if entry.name != ".lock":
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat()
                    found.append((status.st_mtime_ns, status.st_size, Path(entry.path)))
        return found
