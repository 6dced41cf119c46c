"""A GGUF file's weights as a published checkpoint: tensors, and the bytes of safetensors files,
which are written only for engines that read no GGUF.

Values are dequantised by the `gguf` package: float32 if all matrices are, else rounded to bfloat16.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from eyas.gguf.blocks import BlockMatrix
from eyas.gguf.configuration import stored_dtype
from eyas.gguf.folder import is_of_file, linked_file
from eyas.gguf.tensors import SHORT_CONVOLUTION, PublishedTensor, raw_tensors, weights
from eyas.stores import storage_errors

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 2 << 30
WRITTEN_AT_ONCE = 64 << 20
SAFETENSORS_TYPES = {"float32": "F32", "bfloat16": "BF16"}
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def lies_in_file(folder: Path) -> bool:
    """Whether a target's weights are in a GGUF file alone, and not in its folder."""
    return is_of_file(folder) and not (folder / INDEX).exists()


def file_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the checkpoint's tensors by name. Raises MissingInputError, CorruptError."""
    return {tensor.name: tensor.shape for tensor in weights(linked_file(folder))}


def dequantised_tensors(
    folder: Path, wanted: Collection[str] | None = None
) -> tuple[str, dict[str, NDArray[np.float32]]]:
    """The checkpoint's dtype, and its tensors (those `wanted`) before they are rounded to it.
    Raises MissingInputError, CorruptError.
    """
    file = linked_file(folder)
    tensors = (one for one in weights(file) if wanted is None or one.name in wanted)
    return stored_dtype(file), {one.name: one.values() for one in tensors}


def matrices_apart(
    folder: Path,
) -> tuple[str, dict[str, NDArray[np.float32]], dict[str, BlockMatrix]]:
    """As `dequantised_tensors`, then the matrices as stored, each expert's by itself. Raises
    MismatchError (not made from a file), MissingInputError, CorruptError.
    """
    file = linked_file(folder)
    matrices = {
        name: matrix
        for name, shape, matrix in raw_tensors(file)
        if len(shape) == 2 and not name.endswith(SHORT_CONVOLUTION)
    }
    others = (one for one in weights(file, apart=True) if one.name not in matrices)
    return stored_dtype(file), {one.name: one.values() for one in others}, matrices


class Shard:
    """A safetensors file, byte for byte as the safetensors package writes it."""

    def __init__(self, name: str, tensors: Sequence[PublishedTensor], dtype: str) -> None:
        self.name, self.tensors, self.dtype = name, tensors, dtype
        described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for tensor in tensors:
            end = at + _num_bytes(tensor, dtype)
            kind, shape = SAFETENSORS_TYPES[dtype], list(tensor.shape)
            described[tensor.name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
            at = end
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.size = len(self.header) + at

    def read(self, begin: int, end: int) -> bytes:
        """The bytes [begin, end); fewer at the end of the file."""
        parts, at = [self.header[begin:end]], len(self.header)
        for tensor in self.tensors:
            past = at + _num_bytes(tensor, self.dtype)
            if begin < past and at < end:
                parts.append(self._read(tensor, max(begin, at) - at, min(end, past) - at))
            at = past
        return b"".join(parts)

    def _read(self, tensor: PublishedTensor, begin: int, end: int) -> bytes:
        width = tensor.shape[-1] * ITEM_BYTES[self.dtype]
        first, last = begin // width, -(-end // width)
        values = tensor.rows(first, last)
        with np.errstate(invalid="ignore"):  # NaN stays NaN
            stored = values if self.dtype == "float32" else values.astype(bfloat16)
        return stored.tobytes()[begin - first * width : end - first * width]


def _num_bytes(tensor: PublishedTensor, dtype: str) -> int:
    return int(np.prod(tensor.shape, dtype=object)) * ITEM_BYTES[dtype]


def published_files(folder: Path) -> tuple[list[Shard], bytes]:
    """The checkpoint's shards and their index. Raises MissingInputError, CorruptError."""
    file = linked_file(folder)
    dtype = stored_dtype(file)
    groups: list[list[PublishedTensor]] = [[]]
    size, total = 0, 0
    for tensor in weights(file):
        own = _num_bytes(tensor, dtype)
        if groups[-1] and size + own > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size, total = size + own, total + own
    shards = [
        Shard(f"model-{number:05d}.safetensors", sorted(group, key=attrgetter("name")), dtype)
        for number, group in enumerate(groups, 1)
    ]
    place = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))}
    return shards, (json.dumps(index, indent=2) + "\n").encode()


def whole_folder(folder: str | Path) -> Path:
    """A target's folder with safetensors files, for transformers and other engines: written once,
    the index last. Raises MissingInputError, CorruptError, StorageFullError.
    """
    root = Path(folder)
    if lies_in_file(root):
        shards, index = published_files(root)
        with storage_errors(str(root)):
            for shard in shards:
                _write(root / shard.name, shard.size, shard.read)
            _write(root / INDEX, len(index), lambda begin, end: index[begin:end])
    return root


def _write(path: Path, size: int, read: Callable[[int, int], bytes]) -> None:
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("wb") as stream:
            for begin in range(0, size, WRITTEN_AT_ONCE):
                stream.write(read(begin, min(size, begin + WRITTEN_AT_ONCE)))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
