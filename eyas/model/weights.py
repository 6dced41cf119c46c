"""Weights on disk: safetensors, single or sharded, GGUF files, EAGLE's pickled tensors, and the
hashes that identify them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from eyas.artifact import cache_folder
from eyas.errors import CorruptError, MissingInputError, refuse_pointer
from eyas.gguf.blocks import BlockMatrix
from eyas.gguf.checkpoint import dequantised_tensors, file_shapes, lies_in_file, published_files
from eyas.model.arrays import BFLOAT16, RESTORE, Array, cast, refuse_nonfinite
from eyas.model.pickled import pickled_arrays

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLE_INDEX, PICKLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
TYPES: dict[str, np.dtype[Any]] = {
    **{f"F{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "BF16": BFLOAT16,
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
# `fingerprint` reads these in full, and samples of each weight file
CONFIG_SUFFIXES = (".json", ".jinja", ".txt", ".model")
SAMPLE_BYTES, NUM_SAMPLES = 1 << 16, 256
ROWS_AT_ONCE = 4096  # dequantised at a time to be hashed


def read_arrays(
    folder: str | Path, wanted: Collection[str] | None = None, pickled: bool = False
) -> dict[str, Array]:
    """Tensors of a folder, by name, in their stored dtype: all, or those `wanted` that are there.

    They are mapped from the files, not copied; those of a GGUF file are dequantised. pickled: take
    pytorch_model.bin where there are no safetensors. Raises MissingInputError, CorruptError.
    """
    root = Path(folder)
    if lies_in_file(root):
        dtype, dequantised = dequantised_tensors(root, wanted)
        return {name: rounded(values, dtype) for name, values in dequantised.items()}
    for index, single in ((INDEX, SINGLE), (PICKLE_INDEX, PICKLE))[: 2 if pickled else 1]:
        if (root / index).exists():
            found = sharded_arrays(root, index, wanted)
            if not pickled:
                _refuse_twin(root)
            return found
        if (root / single).exists():
            return file_arrays(root / single, wanted)
    raise _without_weights(root)


def _refuse_twin(root: Path) -> None:
    """Raise CorruptError where one file beside the shards holds other weights: compared once."""
    names = {*shards_of(root, INDEX).values()}
    files = [root / name for name in (SINGLE, *sorted(names))]
    if SINGLE in names or not all(map(os.path.isfile, files)):
        return
    # some file systems have no ctime
    now = [
        (at.st_dev, at.st_ino, at.st_size, at.st_ctime_ns, at.st_mtime_ns)
        for at in map(os.stat, files)
    ]
    seen = cache_folder("twins") / hashlib.sha256(repr(now).encode()).hexdigest()
    if os.path.exists(seen):  # false if it cannot be read
        return
    shards = sharded_arrays(root, INDEX, None)
    for name, twin in file_arrays(files[0], None).items():
        if name not in shards or not np.array_equal(twin, shards[name]):
            what = f"{root}: {name} differs in {SINGLE} and {INDEX}"
            raise CorruptError(f"{what}: loaders take either", "delete one")
    keep(seen, "")


def rounded(values: NDArray[np.float32], dtype: str) -> Array:
    """A GGUF file's values in the dtype of its checkpoint."""
    return cast(values, np.dtype(dtype))


class LazyArrays(Mapping[str, Array]):
    """Arrays that are made each time they are asked for; their shapes are known."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Array]) -> None:
        self.shapes, self._read = shapes, read

    def __getitem__(self, name: str) -> Array:
        if name not in self.shapes:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def with_matrices(
    tensors: Mapping[str, Array], matrices: Mapping[str, BlockMatrix], dtype: str
) -> LazyArrays:
    """Tensors and the matrices of a GGUF file, dequantised to dtype. Reading one raises
    CorruptError for values that are NaN or infinite.
    """

    def read(name: str) -> Array:
        if name not in matrices:
            return tensors[name]
        values = rounded(matrices[name].dequantised(), dtype)
        matrices[name].release()
        refuse_nonfinite("the GGUF file", {name: values})
        return values

    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return LazyArrays(shapes | {name: one.shape for name, one in matrices.items()}, read)


def shards_of(root: Path, index: str) -> dict[str, str]:
    """The shard of each tensor in an index. Raises CorruptError."""
    try:
        listed = json.loads((root / index).read_bytes())["weight_map"]
        return {str(key): str(shard) for key, shard in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{root / index} is no index of shards: {error!r}", RESTORE) from error


def sharded_arrays(root: Path, index: str, wanted: Collection[str] | None) -> dict[str, Array]:
    """Tensors by an index: all that it lists, each in one shard of the folder itself."""
    shard_of = shards_of(root, index)
    promised = {key for key in shard_of if wanted is None or key in wanted}
    tensors: dict[str, Array] = {}
    twice: list[str] = []
    for name in sorted({shard_of[key] for key in promised}):
        if name in ("", "..") or Path(name).name != name or "\0" in name:
            raise CorruptError(
                f"{root / index} names the shard {name!r:.128}, which is no file of this folder",
                "put the shards beside their index, and name them there without a path",
            )
        if not (root / name).exists():
            raise MissingInputError(f"{root} lacks the shard {name}", "download the missing file")
        found = file_arrays(root / name, wanted)
        twice += [f"{key} lies in {name}" for key in sorted(tensors.keys() & found.keys())]
        tensors |= found
    if lost := sorted(promised - tensors.keys()):
        raise CorruptError(
            f"{root}: {shard_of[lost[0]]} lacks {lost[0]}, which {index} promises", RESTORE
        )
    if twice:
        raise CorruptError(
            f"{root}: {twice[0]} and in another shard: loaders differ in which they take", RESTORE
        )
    return tensors


def read_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a folder, from the headers alone. Raises MissingInputError,
    CorruptError.
    """
    if lies_in_file(Path(folder)):
        return file_shapes(Path(folder))
    shapes = {}
    for path in _safetensors(Path(folder)):
        with _opened(path) as shard:
            for key in shard.keys():  # noqa: SIM118
                shapes[key] = tuple(shard.get_slice(key).get_shape())
    return shapes


def _safetensors(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _without_weights(folder)
    return files


def _without_weights(folder: Path) -> MissingInputError:
    return MissingInputError(
        f"{folder} has no safetensors weights", f"expected {SINGLE} or {INDEX} with shards"
    )


def file_arrays(path: Path, wanted: Collection[str] | None) -> dict[str, Array]:
    """Tensors of one file of either kind."""
    if path.suffix != ".safetensors":
        found = pickled_arrays(path)
        return {name: found[name] for name in found if wanted is None or name in wanted}
    with _opened(path) as shard:
        names = [name for name in shard.keys() if wanted is None or name in wanted]  # noqa: SIM118
        for name in names:
            if (kind := shard.get_slice(name).get_dtype()) not in TYPES:
                raise CorruptError(f"{path}: {name} is {kind}, which is not read", RESTORE)
    return mapped(path, names)


def mapped(path: Path, names: Collection[str]) -> dict[str, Array]:
    """Tensors of a sound safetensors file, in its mapped memory; writes stay in this process."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        described = json.loads(stream.read(length))
    has_data = path.stat().st_size > 8 + length
    data = np.memmap(path, np.uint8, "c", offset=8 + length) if has_data else np.empty(0, np.uint8)
    found = {}
    for name in names:
        entry = described[name]
        first, end = entry["data_offsets"]
        found[name] = (
            np.asarray(data[first:end]).view(TYPES[entry["dtype"]]).reshape(entry["shape"])
        )
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(str(path), framework="np") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        refuse_pointer(path)
        raise CorruptError(f"{path} cannot be read: {error}", RESTORE) from error


def weight_files(
    tensors: Mapping[str, Array], max_shard_bytes: int | None = None
) -> dict[str, bytes]:
    """Tensors as safetensors files by name: one, or shards of at most so many bytes with an index,
    as Hugging Face names them. A larger tensor has a shard of its own.

    Equal tensors give equal bytes, whatever their order.
    """
    shards: list[dict[str, Array]] = [{}]
    size = 0
    for name, tensor in sorted(tensors.items()):
        if max_shard_bytes is not None and shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    total = len(shards)
    names = [f"model-{n:05d}-of-{total:05d}.safetensors" for n in range(1, total + 1)]
    files = {
        name: save(shard, metadata={"format": "pt"})
        for name, shard in zip([SINGLE] if total == 1 else names, shards, strict=True)
    }
    if total == 1:
        return files
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return {INDEX: (json.dumps(index, indent=1) + "\n").encode(), **files}


def array_sha256(array: Array) -> str:
    """SHA-256 of an array's values in bfloat16, so that precision at load does not change it."""
    values = np.ascontiguousarray(cast(array, BFLOAT16))
    return hashlib.sha256(values.view(np.uint8).data).hexdigest()


def fingerprint(folder: str | Path) -> str:
    """Which target a folder holds: 16 hex digits over config, tokenizer and template, and over
    samples of each weight file: 64 KiB at 256 places, all of a file up to 16 MiB.

    A moved target is the same, a retrained one another; a single changed value can escape. Raises
    MissingInputError.
    """
    root = Path(folder)
    files = [
        (path.name, path.stat().st_size, _reader(path))
        for path in ([] if lies_in_file(root) else _safetensors(root))
    ]
    configs = {
        path.name: path.read_bytes()
        for path in root.iterdir()
        if path.suffix in CONFIG_SUFFIXES and path.is_file()
    }
    if not files:
        # of the files that the folder could hold: `gguf.checkpoint.whole_folder`
        shards, configs[INDEX] = published_files(root)
        files = [(shard.name, shard.size, shard.read) for shard in shards]
    digest = hashlib.sha256()
    for name, content in sorted(configs.items()):
        digest.update(f"{name} ".encode() + hashlib.sha256(content).digest())

    def whole() -> str:
        for name, size, read in files:
            digest.update(f"{name} {size} ".encode())
            gaps = NUM_SAMPLES - 1
            for number in range(NUM_SAMPLES):
                begin = number * max(size - SAMPLE_BYTES, SAMPLE_BYTES * gaps) // gaps
                digest.update(read(begin, begin + SAMPLE_BYTES))
        return digest.hexdigest()[:16]

    if not lies_in_file(root):
        return whole()
    return remembered(root / f"fingerprint-{digest.hexdigest()[:16]}", whole)


def remembered(path: Path, compute: Callable[[], str]) -> str:
    """What is computed once of a GGUF file, and kept in its folder in the cache."""
    with suppress(OSError):
        return path.read_text()
    found = compute()
    keep(path, found)
    return found


def keep(path: Path, text: str) -> None:
    """Write a file of the cache, if possible."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        fresh.write_text(text)
        fresh.replace(path)


def matrix_sha256(matrix: BlockMatrix) -> str:
    """`array_sha256` of a matrix of a GGUF file, some rows at a time."""
    digest = hashlib.sha256()
    for first in range(0, matrix.shape[0], ROWS_AT_ONCE):
        values = matrix[first : first + ROWS_AT_ONCE].dequantised()
        digest.update(rounded(values, "bfloat16").view(np.uint8).data)
    matrix.release()
    return digest.hexdigest()


def _reader(path: Path) -> Callable[[int, int], bytes]:
    def read(begin: int, end: int) -> bytes:
        with path.open("rb") as stream:
            stream.seek(begin)
            return stream.read(end - begin)

    return read
