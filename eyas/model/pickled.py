"""Weights that PyTorch pickled (pytorch_model.bin), read without it: a zip file of a pickle of
named tensors, and their numbers. No code of the file is run.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eyas.errors import CorruptError
from eyas.model.arrays import BFLOAT16, FLOAT16, FLOAT32, Array

CONVERT = "nothing else is read from a pickle: convert it to safetensors where you trust it"
STORAGES: dict[str, np.dtype[Any]] = {
    "FloatStorage": FLOAT32,
    "DoubleStorage": np.dtype(np.float64),
    "HalfStorage": FLOAT16,
    "BFloat16Storage": BFLOAT16,
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "BoolStorage": np.dtype(np.bool_),
}


class _Reader(pickle.Unpickler):
    """Knows tensors, their storages and ordered dictionaries, and refuses the rest."""

    def __init__(self, stream: io.BytesIO, read: Callable[[str], bytes]) -> None:
        super().__init__(stream)
        self._read = read
        self._storages: dict[str, Array] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        raise pickle.UnpicklingError(f"it holds a {module}.{name}")

    def persistent_load(self, pid: Any) -> Array:
        _, dtype, key, _, size = pid
        if key not in self._storages:
            self._storages[key] = np.frombuffer(bytearray(self._read(key)), dtype, size)
        return self._storages[key]


def _tensor(
    storage: Array, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any
) -> Any:
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if math.prod(size) and not (0 <= offset <= last < len(storage) and min(stride, default=0) >= 0):
        raise pickle.UnpicklingError("a tensor lies outside of its numbers")
    steps = [step * storage.itemsize for step in stride]
    view = np.lib.stride_tricks.as_strided(storage[offset:], tuple(size), steps)
    return view.copy()


def pickled_arrays(path: Path) -> dict[str, Array]:
    """The tensors of a pickled state dict, by name. Raises CorruptError for anything else."""
    try:
        with zipfile.ZipFile(path) as archive:
            inside = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            root = inside.removesuffix("data.pkl")
            stream = io.BytesIO(archive.read(inside))
            found = _Reader(stream, lambda key: archive.read(f"{root}data/{key}")).load()
    except Exception as error:  # a pickle of another kind may raise anything
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptError(f"{path} cannot be read as plain tensors: {said}", CONVERT) from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(one, np.ndarray) for name, one in found.items()
    ):
        raise CorruptError(f"{path} holds more than named tensors", CONVERT)
    return dict(found)
