"""Feature shards: samples with hidden states on disk, read one by one from any store.

Knows the format. Knows no model and no stage's work.

    train-00000.safetensors  train-00001.safetensors  ...  train.index.json      and the same for held_out

    shard    [header length, 8 bytes][header, JSON][sample 0][sample 1] ...      an ordinary safetensors file
    sample   [token_ids i32 T][loss_mask i32 T][aux_hidden T x 3Ht][last_hidden T x Ht]

A sample is one contiguous range of bytes, so one request reads it and nothing else; its length is a multiple of 8 in
every dtype, which keeps each tensor aligned without gaps (the mask is stored as int32 for that). The index holds range
and SHA-256 of each sample; a shard's own header holds the same for its samples, so a shard is whole or absent and a
killed writer goes on after the last one.

Letters: T sequence, Ht target hidden size.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from eyas.artifact import Artifact
from eyas.errors import CorruptError, MissingInputError

Split = Literal["train", "held_out"]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_FORMAT_NAMES = {torch.int32: "I32", torch.bfloat16: "BF16", torch.float32: "F32"}


class FeatureMeta(BaseModel):
    """What the features are features of: `taps` are after_layer indices, `last_hidden` is after the target's final norm."""

    model_config = ConfigDict(frozen=True)

    taps: tuple[int, int, int]
    hidden_size: int
    vocab_size: int
    lm_head_sha256: str
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    last_hidden: Literal["post_norm"] = "post_norm"

    @property
    def bytes_per_token(self) -> int:
        return 8 + 4 * self.hidden_size * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation as the target saw it, with what the target thought.

    token_ids int32 [T]; loss_mask bool [T], true on the tokens that the target wrote (several spans where several turns
    are the target's); aux_hidden [T, 3*Ht], the three taps side by side; last_hidden [T, Ht]. `source` is the data set.
    """

    key: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux_hidden: torch.Tensor
    last_hidden: torch.Tensor
    source: str = ""


class Entry(BaseModel):
    """A sample's place: bytes [start, start + size of `length` tokens) of `shard`."""

    key: str
    source: str
    shard: str
    start: int
    length: int
    sha256: str


def encode_sample(sample: Sample, meta: FeatureMeta) -> bytes:
    """The sample's bytes. Features are cast to the dtype of `meta`; equal dtypes are kept bit for bit."""
    length, hidden = len(sample.token_ids), meta.hidden_size
    assert sample.loss_mask.shape == (length,)
    assert sample.aux_hidden.shape == (length, 3 * hidden)
    assert sample.last_hidden.shape == (length, hidden)
    dtype = DTYPES[meta.dtype]
    tensors = (
        sample.token_ids.to(torch.int32),
        sample.loss_mask.to(torch.int32),
        sample.aux_hidden.to(dtype),
        sample.last_hidden.to(dtype),
    )
    return b"".join(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)


def decode_sample(data: bytes, entry: Entry, meta: FeatureMeta) -> Sample:
    """The inverse of `encode_sample`; the tensors share one fresh buffer."""
    assert len(data) == entry.length * meta.bytes_per_token
    buffer = bytearray(data)
    length, hidden, dtype = entry.length, meta.hidden_size, DTYPES[meta.dtype]
    taps_at = 8 * length
    last_at = taps_at + 3 * hidden * length * dtype.itemsize
    ids_and_mask = torch.frombuffer(buffer, dtype=torch.int32, count=2 * length)
    return Sample(
        key=entry.key,
        token_ids=ids_and_mask[:length],
        loss_mask=ids_and_mask[length:].bool(),
        aux_hidden=torch.frombuffer(buffer, dtype=dtype, offset=taps_at, count=3 * hidden * length).view(length, 3 * hidden),
        last_hidden=torch.frombuffer(buffer, dtype=dtype, offset=last_at).view(length, hidden),
        source=entry.source,
    )


def _tensor_table(entries: list[Entry], meta: FeatureMeta) -> dict[str, Any]:
    """The safetensors header's table: name -> dtype, shape and bytes relative to the end of the header."""
    table: dict[str, Any] = {}
    dtype = DTYPES[meta.dtype]
    for number, entry in enumerate(entries):
        at = entry.start
        for name, kind, shape in (
            ("token_ids", torch.int32, [entry.length]),
            ("loss_mask", torch.int32, [entry.length]),
            ("aux_hidden", dtype, [entry.length, 3 * meta.hidden_size]),
            ("last_hidden", dtype, [entry.length, meta.hidden_size]),
        ):
            end = at + kind.itemsize * torch.Size(shape).numel()
            table[f"{number:03d}.{name}"] = {"dtype": _FORMAT_NAMES[kind], "shape": shape, "data_offsets": [at, end]}
            at = end
    return table


class ShardWriter:
    """Writes the samples of one split, in order, into shards; after a killed writer it goes on behind the last whole shard.

    The caller adds the same samples in the same order in every run and leaves out those whose key is in `keys`; the
    files are then the same, byte for byte, however often the work was cut. `close` writes the index.
    """

    def __init__(self, artifact: Artifact, split: Split, meta: FeatureMeta, samples_per_shard: int = 50) -> None:
        self._artifact, self._split, self._meta = artifact, split, meta
        self._samples_per_shard = samples_per_shard
        self._entries: list[Entry] = []
        self._num_shards = 0
        self._pending: list[tuple[Entry, bytes]] = []
        while artifact.exists(self._shard_name):
            self._entries += self._read_header(self._shard_name)
            self._num_shards += 1
        self.keys = {entry.key for entry in self._entries}

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def _shard_name(self) -> str:
        return f"{self._split}-{self._num_shards:05d}.safetensors"

    def add(self, sample: Sample) -> None:
        """Append a sample. Raises StorageFullError; whole shards are kept."""
        assert sample.key not in self.keys, f"sample {sample.key} twice"
        data = encode_sample(sample, self._meta)
        start = sum(len(earlier) for _, earlier in self._pending)
        entry = Entry(
            key=sample.key,
            source=sample.source,
            shard=self._shard_name,
            start=start,
            length=len(sample.token_ids),
            sha256=hashlib.sha256(data).hexdigest(),
        )
        self._pending.append((entry, data))
        self.keys.add(sample.key)
        if len(self._pending) == self._samples_per_shard:
            self._flush()

    def close(self) -> None:
        """Write what is pending, then the index of all shards."""
        if self._pending:
            self._flush()
        index = {"meta": self._meta.model_dump(), "samples": [entry.model_dump() for entry in self._entries]}
        self._artifact.write_json(_index_name(self._split), index)

    def _flush(self) -> None:
        entries = [entry for entry, _ in self._pending]
        own = json.dumps([entry.model_dump() for entry in entries])
        header = json.dumps({"__metadata__": {"samples": own}, **_tensor_table(entries, self._meta)}).encode()
        header += b" " * (-len(header) % 8)
        head = len(header).to_bytes(8, "little") + header
        self._artifact.write(self._shard_name, b"".join([head, *(data for _, data in self._pending)]))
        self._entries += [_moved(entry, len(head)) for entry in entries]
        self._num_shards += 1
        self._pending.clear()

    def _read_header(self, name: str) -> list[Entry]:
        try:
            size = int.from_bytes(self._artifact.read_range(name, 0, 8), "little")
            header = json.loads(self._artifact.read_range(name, 8, 8 + size))
            return [_moved(Entry.model_validate(entry), 8 + size) for entry in json.loads(header["__metadata__"]["samples"])]
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptError(
                f"{self._artifact.url}/{name} has no readable header", "delete the file and run `eyas capture` again"
            ) from error


def _moved(entry: Entry, by: int) -> Entry:
    """From offsets after the header to offsets in the file."""
    return entry.model_copy(update={"start": entry.start + by})


def _index_name(split: Split) -> str:
    return f"{split}.index.json"


class Features:
    """The samples of one split of a finished `capture` artifact: `len`, `[i]`, iteration.

    Raises MissingInputError or InputError for an artifact that is no finished capture.
    """

    def __init__(self, artifact: Artifact, split: Split = "train") -> None:
        artifact.manifest("capture")
        index = artifact.read_json(_index_name(split))
        self._artifact = artifact
        self.meta = FeatureMeta.model_validate(index["meta"])
        self.entries = [Entry.model_validate(entry) for entry in index["samples"]]

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def lengths(self) -> list[int]:
        """T of each sample, without reading one."""
        return [entry.length for entry in self.entries]

    def tokens(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """token_ids int32 [T] and loss_mask bool [T] of a sample, 8 bytes a token: for counting, as nothing is verified."""
        entry = self.entries[number]
        ids_and_mask = torch.frombuffer(bytearray(self._read(entry, 8)), dtype=torch.int32)
        return ids_and_mask[: entry.length], ids_and_mask[entry.length :].bool()

    def __getitem__(self, number: int) -> Sample:
        """Read one sample and verify its checksum. Raises CorruptError naming shard and sample, MissingInputError."""
        entry = self.entries[number]
        data = self._read(entry, self.meta.bytes_per_token)
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            where = f"{self._artifact.url}/{entry.shard}"
            raise CorruptError(
                f"sample {entry.key} in {where} (from byte {entry.start}) does not match its checksum",
                "delete the folder and run `eyas capture` again, or restore the shard from a copy",
            )
        return decode_sample(data, entry, self.meta)

    def _read(self, entry: Entry, bytes_per_token: int) -> bytes:
        try:
            return self._artifact.read_range(entry.shard, entry.start, entry.start + entry.length * bytes_per_token)
        except FileNotFoundError as error:
            raise MissingInputError(
                f"{self._artifact.url} lacks the shard {entry.shard}", "delete the folder and run `eyas capture` again"
            ) from error
