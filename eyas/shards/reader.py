"""The reader: one sample by its number, its bytes verified. Any number of threads may read at once.

Knows the index. Does not know in which order samples are wanted (stream).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from pydantic import ValidationError
from torch import Tensor

from eyas.artifact import Artifact
from eyas.errors import CorruptError, InputError, MissingInputError
from eyas.shards.cache import Cache
from eyas.shards.codecs import Tables, codec_of
from eyas.shards.layout import FORMAT, TOKEN_BYTES, Entry, decode_sample, decode_tokens
from eyas.shards.ranges import range_reader
from eyas.shards.sample import FeatureMeta, Sample, Split
from eyas.shards.stream import ahead
from eyas.shards.writer import index_name

# one decodes while one reads; many wait while a store far away answers
LOCAL_THREADS, REMOTE_THREADS = 2, 16
AGAIN = "delete the folder and run `eyas capture` again, or restore the shard from a copy"


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
        entry = self.entries[number]
        data = self._cached(entry) or self._fetched(entry)
        try:
            return decode_sample(data, entry, self.meta, self._codec)
        except ValueError as error:
            raise CorruptError(
                f"{self._named(entry)} is not as its codec makes it: {error}", AGAIN
            ) from error

    def _cached(self, entry: Entry) -> bytes | None:
        """The sample's bytes from this machine's disk, if they are there and right."""
        data = self._cache.get(self._cache_prefix + entry.sha256) if self._cache else None
        return data if data is not None and _matches(data, entry) else None

    def _fetched(self, entry: Entry) -> bytes:
        data = self._read(entry, entry.size)
        if not _matches(data, entry):
            raise CorruptError(f"{self._named(entry)} does not match its checksum", AGAIN)
        if self._cache:
            self._cache.put(self._cache_prefix + entry.sha256, data)
        return data

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
