"""The reader: one sample by its number, its bytes verified, or many in a given order, read and
decoded ahead by threads. Any number of threads may read at once.

    samples by number    Features      index, checksums, decoding
    an order of them     order_of      a list of numbers that depends on its arguments alone, so any
                                       place in it can be returned to: to resume after n samples is
                                       to give the rest of the list
    read ahead           ahead
    from far away        range_reader  by the fastest client that is installed
                         Cache         on this machine's disk, bounded, shared by processes

    world_size 3      [4 0 6 2 5 1 3]  ->  rank 0: [4 2 3]   rank 1: [0 5]   rank 2: [6 1]

Does not know what a sample is used for.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import importlib.util
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import numpy as np
from pydantic import ByteSize, TypeAdapter, ValidationError
from torch import Tensor

from eyas.artifact import Artifact, Persistent, cache_folder
from eyas.errors import ConfigError, CorruptError, InputError, MissingInputError
from eyas.shards.codecs import Tables, codec_of
from eyas.shards.layout import (
    FORMAT,
    TOKEN_BYTES,
    Entry,
    decode_sample,
    decode_tokens,
    index_name,
)
from eyas.shards.sample import FeatureMeta, Sample, Split

# One decodes while one reads; many wait while a store far away answers.
LOCAL_THREADS, REMOTE_THREADS = 2, 16
AHEAD_BYTES = 256 << 20  # of decoded samples
S3_TIMEOUT = "120s"  # of one sample: some 30 MB where the target has 8 billion parameters
HAS_OBSTORE = importlib.util.find_spec("obstore") is not None
CACHE_VARIABLE = "EYAS_FEATURE_CACHE"
LOOK_SHARE = 0.05  # of the cache's bound, put by this process between two looks at the folder
KEEP_SHARE = 0.9  # of the bound, kept when the oldest go
AGAIN = "delete the folder and run `eyas capture` again, or restore the shard from a copy"

Read = TypeVar("Read")
ReadRange = Callable[[str, int, int], bytes]


class Features:
    """The samples of one split of a finished `capture` artifact: `len`, `[i]`, iteration.

    Raises MissingInputError or InputError for an artifact that is no finished capture, or one of
    another version.
    """

    def __init__(
        self, artifact: Artifact, split: Split = "train", cache: Cache | None = None
    ) -> None:
        """cache: where to keep what was read from a store that is not this machine's disk; by
        default, what the environment says (see Cache.from_environment)."""
        made = artifact.manifest("capture")
        self.inputs = {"features": made}
        index = artifact.read_json(index_name(split))
        if index.get("format") != FORMAT:
            raise InputError(
                f"{artifact.url} holds features of another version of eyas",
                "run `eyas capture` again",
            )
        self._artifact, self._cache_prefix = artifact, f"{made.identity}-"
        self._read_range = range_reader(artifact)
        is_local = artifact.local_path("") is not None
        self._cache = None if is_local else cache or Cache.from_environment()
        self._num_threads = LOCAL_THREADS if is_local else REMOTE_THREADS
        try:
            self.meta = FeatureMeta.model_validate(index["meta"])
            self.entries = [Entry.model_validate(entry) for entry in index["samples"]]
            tables = (
                Tables.from_text(index["tables"], self.meta.hidden_size)
                if index["tables"]
                else None
            )
        except (ValidationError, KeyError, ValueError) as error:
            raise CorruptError(
                f"{artifact.url}/{index_name(split)} is no index of features", AGAIN
            ) from error
        self._codec = codec_of(self.meta, tables) if self.entries else None

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def lengths(self) -> list[int]:
        """T of each sample, without reading one."""
        return [entry.length for entry in self.entries]

    def tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """token_ids int32 [T] and loss_mask bool [T] of a sample, 8 bytes a token: for counting, as
        nothing is verified.
        """
        entry = self.entries[number]
        return decode_tokens(self._read(entry, TOKEN_BYTES * entry.length))

    def all_tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        """`tokens` of every sample in order, many asked for at once."""
        sizes = [TOKEN_BYTES * entry.length for entry in self.entries]
        return ahead(self.tokens, range(len(self)), sizes.__getitem__, self._num_threads)

    def stream(self, numbers: Iterable[int]) -> Iterator[Sample]:
        """These samples in this order (see `order_of`), read and decoded ahead. Raises what
        `[number]` raises, in its place.
        """
        sizes = [self.meta.decoded_bytes_per_token * entry.length for entry in self.entries]
        return ahead(self.__getitem__, numbers, sizes.__getitem__, self._num_threads)

    def batches(self, batches: Sequence[Sequence[int]]) -> Iterator[list[Sample]]:
        """The samples of each list of numbers, read ahead; to go on after n batches, give
        batches[n:].
        """
        samples = self.stream(number for numbers in batches for number in numbers)
        return (list(islice(samples, len(numbers))) for numbers in batches)

    def __getitem__(self, number: int) -> Sample:
        """Read one sample and verify its checksum. Raises CorruptError naming shard and sample,
        MissingInputError.
        """
        entry, cache = self.entries[number], self._cache
        name = self._cache_prefix + entry.sha256
        data = cache.get(name) if cache else None
        if data is None or not _matches(data, entry):
            data = self._read(entry, entry.size)
            if not _matches(data, entry):
                raise CorruptError(f"{self._named(entry)} does not match its checksum", AGAIN)
            if cache:
                cache.put(name, data)
        try:
            return decode_sample(data, entry, self.meta, self._codec)
        except ValueError as error:
            raise CorruptError(
                f"{self._named(entry)} is not as its codec makes it: {error}", AGAIN
            ) from error

    def _named(self, entry: Entry) -> str:
        return f"sample {entry.key} in {self._artifact.url}/{entry.shard} (from byte {entry.start})"

    def _read(self, entry: Entry, size: int) -> bytes:
        try:
            return self._read_range(entry.shard, entry.start, entry.start + size)
        except FileNotFoundError as error:
            raise MissingInputError(
                f"{self._artifact.url} lacks the shard {entry.shard}",
                "delete the folder and run `eyas capture` again",
            ) from error


def _matches(data: bytes, entry: Entry) -> bool:
    return len(data) == entry.size and hashlib.sha256(data).hexdigest() == entry.sha256


# In an order, ahead


def order_of(
    num_samples: int, seed: int, epoch: int, rank: int = 0, world_size: int = 1
) -> list[int]:
    """The samples that one of `world_size` readers takes in an epoch, shuffled by seed and epoch
    alone.

    The readers of an epoch take each sample once between them, and as many each, give or take one.
    """
    assert 0 <= rank < world_size
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    shuffled = np.random.default_rng(int.from_bytes(digest[:16], "little")).permutation(num_samples)
    order: list[int] = shuffled[rank::world_size].tolist()
    return order


def ahead(
    read: Callable[[int], Read],
    numbers: Iterable[int],
    size_of: Callable[[int], int],
    num_threads: int,
) -> Iterator[Read]:
    """read(number) for these numbers, in this order, by threads; an error comes out where its
    result would have.

    At most AHEAD_BYTES of results by size_of(number) are held, those being made and the one just
    given out among them; one is held always.
    """
    waiting: deque[tuple[int, Future[Read]]] = deque()
    held = 0
    todo = iter(numbers)
    with ThreadPoolExecutor(num_threads, "features") as pool:
        try:
            following = next(todo, None)
            while waiting or following is not None:
                while following is not None and (
                    not waiting or held + size_of(following) <= AHEAD_BYTES
                ):
                    held += size_of(following)
                    waiting.append((following, pool.submit(read, following)))
                    following = next(todo, None)
                number, result = waiting.popleft()
                yield result.result()
                held -= size_of(number)
        finally:
            for _, result in waiting:
                result.cancel()


# From a store


def range_reader(artifact: Artifact) -> ReadRange:
    """read(name, start, end) -> bytes [start, end) of a file, unchecked. Raises FileNotFoundError,
    EyasError.

    obstore reads S3 three times as fast as s3fs (395 against 130-170 MB/s from a server on the same
    two cores) with half of the CPU. It is taken where it is installed and the environment holds the
    credentials, so that both clients are sure to be the same user; for all else, fsspec.
    """
    folder = artifact.local_path("")
    if folder is not None:
        return functools.partial(read_local, folder)
    scheme, _, rest = artifact.url.partition("://")
    by_environment = "AWS_ACCESS_KEY_ID" in os.environ and "AWS_PROFILE" not in os.environ
    if scheme != "s3" or not by_environment or not HAS_OBSTORE:
        return artifact.read_range
    bucket, _, prefix = rest.partition("/")
    client = importlib.import_module("obstore.store")  # an optional part, and slow to load
    options = {
        "timeout": S3_TIMEOUT,
        "connect_timeout": "10s",
        "allow_http": os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"),
    }
    s3 = client.S3Store(
        bucket, prefix=prefix, client_options=options, retry_config={"max_retries": 2}
    )
    store = Persistent(s3, artifact.url)
    return lambda name, start, end: bytes(store.get_range(name, start=start, end=end))


def read_local(folder: str, name: str, start: int, end: int) -> bytes:
    """Bytes [start, end) of a file on this disk, in a fifth of the time that fsspec takes."""
    with open(folder + name, "rb", buffering=0) as stream:
        stream.seek(start)
        blocks = []
        while start < end and (block := stream.read(end - start)):
            blocks.append(block)
            start += len(block)
        return b"".join(blocks) if len(blocks) != 1 else blocks[0]


class Cache:
    """Bytes under names, in `folder`, `max_bytes` of them; the reader verifies what it gets.

    A file is written beside and moved in place, so none is ever seen half-written. A hit makes a
    file young; when the folder is full the oldest go, down to nine tenths of the bound, under a
    lock that only those who delete take. A file that another process deletes meanwhile is a miss.
    Each process counts what it put since it last looked at the folder, and looks again after a
    twentieth of the bound: so n processes stay below it but for n - 1 twentieths.
    """

    def __init__(self, folder: str | Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = Path(folder), max_bytes
        self._folder.mkdir(parents=True, exist_ok=True)
        self._put_since = max_bytes  # of an unknown folder: look at the first put
        self._guard = threading.Lock()

    @classmethod
    def from_environment(cls) -> Cache | None:
        """The cache that EYAS_FEATURE_CACHE=200GB asks for: how much of a disk may be had is the
        machine's to say, not a run's. Raises ConfigError for what is no size.
        """
        stated = os.environ.get(CACHE_VARIABLE, "").strip()
        if not stated:
            return None
        try:
            max_bytes = TypeAdapter(ByteSize).validate_python(stated)
        except ValidationError as error:
            raise ConfigError(
                f"{CACHE_VARIABLE}={stated} is no size",
                f"write e.g. {CACHE_VARIABLE}=200GB, or 0 for no cache",
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
