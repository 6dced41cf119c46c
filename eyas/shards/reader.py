"""Samples by number, verified, or many in an order, read ahead by threads. Thread-safe."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from pydantic import ValidationError
from torch import Tensor

from eyas.artifact import Artifact
from eyas.cores import cores
from eyas.errors import CorruptError, InputError, MissingInputError
from eyas.shards.codecs import Tables
from eyas.shards.layout import READ, TOKEN_BYTES, Entry, decode_sample, decode_tokens, index_name
from eyas.shards.sample import FeatureMeta, Sample, Split
from eyas.stores import Persistent

LEAST_THREADS, REMOTE_THREADS = 2, 16  # or as many as cores; a store needs many requests at once
AHEAD_BYTES = 256 << 20  # of decoded samples, at least
BATCHES_AHEAD = 2  # or the bytes of these
S3_TIMEOUT = "120s"  # for a sample: some 30 MB of a target of 8 billion parameters
HAS_OBSTORE = importlib.util.find_spec("obstore") is not None
AGAIN = "restore this one shard from a copy, or delete the folder and run `eyas capture` again"

Read = TypeVar("Read")
ReadRange = Callable[[str, int, int], bytes]


class Features:
    """The samples of one split of a finished `capture` artifact. Raises MissingInputError or
    InputError for no finished capture or another version.
    """

    def __init__(self, artifact: Artifact, split: Split = "train") -> None:
        made = artifact.manifest("capture")
        self.inputs = {"features": made}
        index = artifact.read_json(index_name(split))
        if index.get("format") not in READ:
            what = f"{artifact.url} holds features of another version of eyas"
            raise InputError(what, "run `eyas capture` again")
        self._artifact = artifact
        self._read_range = range_reader(artifact)
        is_local = artifact.local_path("") is not None
        self._num_threads = max(cores(), LEAST_THREADS if is_local else REMOTE_THREADS)
        self._whole: set[str] = set()  # shards of the right length
        try:
            self.meta = FeatureMeta.model_validate(index["meta"])
            self.entries = [Entry.model_validate(entry) for entry in index["samples"]]
            text, size = index["tables"], self.meta.hidden_size
            tables = Tables.from_text(text, size) if text else None
        except (ValidationError, KeyError, ValueError) as error:
            raise CorruptError(
                f"{artifact.url}/{index_name(split)} is no index of features", AGAIN
            ) from error
        self.codec = self.meta.coder(tables) if self.entries else None

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def lengths(self) -> list[int]:
        return [entry.length for entry in self.entries]

    def all_tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Reads 8 bytes a token; no checksum."""
        sizes = [TOKEN_BYTES * entry.length for entry in self.entries]

        def tokens(number: int) -> tuple[Tensor, Tensor]:
            found = decode_tokens(self._read(self.entries[number], sizes[number]))[:2]
            if ((found[0] < 0) | (found[0] >= self.meta.vocab_size)).any():
                raise CorruptError(f"{self._named(self.entries[number])} is damaged", AGAIN)
            return found

        numbers = range(len(self))
        return ahead(tokens, numbers, sizes.__getitem__, self._num_threads, AHEAD_BYTES)

    def stream(self, numbers: Iterable[int], held: int = 0) -> Generator[Sample]:
        """These samples in order, read ahead; errors come in their place. held: bytes of samples to
        hold, AHEAD_BYTES at least.
        """
        held = max(held, AHEAD_BYTES)
        return ahead(self.__getitem__, numbers, self._decoded_bytes, self._num_threads, held)

    def _decoded_bytes(self, number: int) -> int:
        return self.meta.decoded_bytes_per_token * self.entries[number].length

    def batches(self, batches: Sequence[Sequence[int]]) -> Generator[list[Sample]]:
        largest = max((sum(map(self._decoded_bytes, numbers)) for numbers in batches), default=0)
        numbers = (number for numbers in batches for number in numbers)
        with contextlib.closing(self.stream(numbers, BATCHES_AHEAD * largest)) as samples:
            for of_batch in batches:
                yield [*islice(samples, len(of_batch))]

    def __getitem__(self, number: int) -> Sample:
        """Verifies the checksum. Raises CorruptError, MissingInputError."""
        entry = self.entries[number]
        for _ in range(2):  # the bytes may have changed on the way only
            data = self._read(entry, entry.size)
            if hashlib.sha256(data).hexdigest() == entry.sha256:
                break
        else:
            raise CorruptError(f"{self._named(entry)} does not match its checksum", AGAIN)
        try:
            return decode_sample(data, entry, self.meta, self.codec)
        except ValueError as error:
            raise CorruptError(f"{self._named(entry)} cannot be decoded: {error}", AGAIN) from error

    def _named(self, entry: Entry) -> str:
        return f"sample {entry.key} in {self._artifact.url}/{entry.shard} (from byte {entry.start})"

    def _read(self, entry: Entry, size: int) -> bytes:
        known = self.inputs["features"].files.get(entry.shard)
        try:
            # a store answers a range beyond the end as if it were broken: check the length, once
            if entry.shard not in self._whole and known is not None:
                if (length := self._artifact.size(entry.shard)) != known.bytes:
                    raise CorruptError(
                        f"{self._artifact.url}/{entry.shard} holds {length:,} bytes, not "
                        f"{known.bytes:,}",
                        AGAIN,
                    )
                self._whole.add(entry.shard)
            data = self._read_range(entry.shard, entry.start, entry.start + size)
        except FileNotFoundError as error:
            what = f"{self._artifact.url} lacks the shard {entry.shard}"
            raise MissingInputError(what, AGAIN) from error
        if len(data) != size:
            what = f"{self._named(entry)} has {len(data):,} of its {size:,} bytes"
            raise CorruptError(what, AGAIN)
        return data


def ahead(
    read: Callable[[int], Read],
    numbers: Iterable[int],
    size_of: Callable[[int], int],
    num_threads: int,
    most: int,
) -> Generator[Read]:
    """read(number) for these numbers, in order, by threads; an error comes in its result's place.

    At most `most`, by size_of, is held, running reads and the last result included; one always.
    """
    waiting: deque[tuple[int, Future[Read]]] = deque()
    held = 0
    todo = iter(numbers)
    with ThreadPoolExecutor(num_threads, "features") as pool:
        try:
            following = next(todo, None)
            while waiting or following is not None:
                while following is not None and (not waiting or held + size_of(following) <= most):
                    held += size_of(following)
                    waiting.append((following, pool.submit(read, following)))
                    following = next(todo, None)
                number, result = waiting.popleft()
                yield result.result()
                held -= size_of(number)
        finally:
            for _, result in waiting:
                result.cancel()


def range_reader(artifact: Artifact) -> ReadRange:
    """read(name, start, end) -> bytes. Raises FileNotFoundError, EyasError.

    obstore reads S3 three times as fast as s3fs with half of the CPU. It is used if it is installed
    and the environment holds the credentials, so that both are the same user.
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
    """Five times as fast as fsspec."""
    with open(folder + name, "rb", buffering=0) as stream:
        stream.seek(start)
        data: bytes = stream.read(end - start)
        while len(data) < end - start and (more := stream.read(end - start - len(data))):
            data += more  # one read ends at 2 GiB
        return data
