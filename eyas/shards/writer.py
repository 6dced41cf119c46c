"""Samples of one split into shards, in order; a killed writer goes on after the last whole one. It
holds one shard in memory, and the first samples until a codec is calibrated.
"""

from __future__ import annotations

import json
import logging

from eyas.artifact import WORK, Artifact, File
from eyas.errors import CorruptError
from eyas.shards.codecs import Codec, Tables, calibrate
from eyas.shards.layout import (
    FORMAT,
    EncodedSample,
    Entry,
    encoded,
    index_name,
    layers_of,
    shard_head,
)
from eyas.shards.sample import FeatureMeta, Sample, Split

log = logging.getLogger(__name__)
SHARD_BYTES = 128 << 20  # the sample that exceeds it ends a shard
CALIBRATION_TOKENS = 4096


class ShardWriter:
    """Adds samples, then `close` writes the index.

    The caller adds the same samples in the same order in every run, without those in `keys`: then
    the files are the same byte for byte after any interruption. codec: None until calibrated.
    """

    def __init__(
        self, artifact: Artifact, split: Split, meta: FeatureMeta, samples_per_shard: int = 50
    ) -> None:
        """Raises CorruptError for an unreadable shard."""
        self._artifact, self._split, self.meta = artifact, split, meta
        self._samples_per_shard = samples_per_shard
        self._entries: list[Entry] = []
        self._num_shards = 0
        self._pending: list[EncodedSample] = []
        self._uncoded: list[Sample] = []
        self._tables: Tables | None = None
        while (found := self._found(self._shard_name)) is not None:
            self._entries += found
            self._num_shards += 1
        self.codec: Codec | None = None
        if self._tables is not None or meta.is_exact:
            self.codec = meta.coder(self._tables)
        self.keys = {entry.key for entry in self._entries}

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def _shard_name(self) -> str:
        return f"{self._split}-{self._num_shards:05d}.safetensors"

    def add(self, sample: Sample | EncodedSample) -> None:
        """A sample, or its encoding by `codec`. Raises StorageFullError; whole shards are kept."""
        assert sample.key not in self.keys, f"sample {sample.key} twice"
        self.keys.add(sample.key)
        if isinstance(sample, EncodedSample):
            self._append(sample)
        elif self.codec is not None:
            self._append(encoded(sample, self.meta, self.codec))
        else:
            self._uncoded.append(sample)
            if sum(len(one.token_ids) for one in self._uncoded) >= CALIBRATION_TOKENS:
                self._calibrate()

    def close(self) -> None:
        if self._uncoded:
            self._calibrate()
        if self._pending:
            self._flush()
        index = {
            "format": FORMAT,
            "meta": self.meta.model_dump(),
            "tables": self._tables.to_text() if self._tables else "",
            "samples": [entry.model_dump() for entry in self._entries],
        }
        self._artifact.write_json(index_name(self._split), index)

    def _calibrate(self) -> None:
        layers = [layers_of(sample, self.meta) for sample in self._uncoded]
        self._tables = calibrate(self.meta.codec, layers)
        self.codec = self.meta.coder(self._tables)
        waiting, self._uncoded = self._uncoded, []
        for sample in waiting:
            self._append(encoded(sample, self.meta, self.codec))

    def _append(self, sample: EncodedSample) -> None:
        start = sum(one.entry.size for one in self._pending)
        place = {"shard": self._shard_name, "start": start}
        self._pending.append(EncodedSample(sample.entry.model_copy(update=place), sample.data))
        size = start + sample.entry.size
        if len(self._pending) == self._samples_per_shard or size >= SHARD_BYTES:
            self._flush()

    def _flush(self) -> None:
        """The note holds the checksum, so that a resumed run need not read the shard."""
        name, entries = self._shard_name, [entry for entry, _ in self._pending]
        head = shard_head(entries, self.meta, self._tables)
        self._artifact.write(name, b"".join([head, *(data for _, data in self._pending)]))
        note = self._artifact.written(name).model_dump_json()
        self._artifact.write(f"{WORK}/{name}.json", note.encode())
        self._entries += [_moved(entry, len(head)) for entry in entries]
        self._num_shards += 1
        self._pending.clear()

    def _found(self, name: str) -> list[Entry] | None:
        """An earlier run's entries; None without a whole shard. A whole one has a note, unless the
        run was killed between the two.
        """
        if not self._artifact.exists(name):
            return None
        note = f"{WORK}/{name}.json"
        noted = self._artifact.exists(note)
        try:
            entries = self._read_head(name)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            if not noted:
                log.warning("half a shard will be written again", extra={"data": {"shard": name}})
                return None
            raise CorruptError(
                f"{self._artifact.url}/{name} has no readable header, or not the bytes that the "
                "header lists",
                "delete the file and run `eyas capture` again",
            ) from error
        if noted:
            self._artifact.remember(name, File.model_validate_json(self._artifact.read(note)))
        return entries

    def _read_head(self, name: str) -> list[Entry]:
        size = int.from_bytes(self._artifact.read_range(name, 0, 8), "little")
        own = json.loads(self._artifact.read_range(name, 8, 8 + size))["__metadata__"]
        entries = [
            _moved(Entry.model_validate(entry), 8 + size) for entry in json.loads(own["samples"])
        ]
        if self._artifact.size(name) != entries[-1].start + entries[-1].size:
            raise ValueError("the shard has another length than its header says")
        if not self.meta.is_exact:
            self._tables = Tables.from_text(own["tables"], self.meta.hidden_size)
        return entries


def _moved(entry: Entry, by: int) -> Entry:
    return entry.model_copy(update={"start": entry.start + by})
