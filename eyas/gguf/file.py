"""A GGUF file that is open: its metadata and its tensors, mapped.

The format is read by the `gguf` package of llama.cpp's authors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from eyas.errors import CorruptError, MismatchError

DAMAGED = "download it again; compare its size with its source's"


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file that is open: its metadata, and its tensors, mapped."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, gguf.ReaderTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def of_model(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own; without a default it must be there."""
        full = f"{self.architecture}.{key}"
        if default is None and full not in self.metadata:
            raise CorruptError(f"{self.path} lacks {full} in its metadata", DAMAGED)
        return self.metadata.get(full, default)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of the architecture's own, 1 or more."""
        found = self.of_model(key, default)
        if not isinstance(found, int) or found < 1:
            raise CorruptError(
                f"{self.path} has {found!r:.40} as {self.architecture}.{key}",
                "a whole number is needed, the same for every layer",
            )
        return found

    def of_tokenizer(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)


def open_file(path: Path) -> GgufFile:
    """Read metadata and the table of tensors. Raises CorruptError, MismatchError."""
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        if "GGMLQuantizationType" in str(error):
            raise MismatchError(
                f"{path} holds tensors of a type that the installed gguf does not know: {error}",
                "`pip install -U gguf`, or take a file in another quantisation",
            ) from error
        raise CorruptError(f"{path} is no whole GGUF file: {error}", DAMAGED) from error
    if metadata.get("split.count", 1) > 1:
        raise MismatchError(
            f"{path} is one of {metadata['split.count']} parts",
            "join them: `llama-gguf-split --merge FIRST OUTPUT`",
        )
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def dequantised(tensor: gguf.ReaderTensor) -> NDArray[np.float32]:
    """Its values, in the order of rows and columns that PyTorch has. Raises NotImplementedError."""
    values = dequantised_rows(tensor.data, tensor.tensor_type)
    return values.reshape(tuple(reversed(tensor.shape.tolist())))


def dequantised_rows(data: NDArray[Any], kind: gguf.GGMLQuantizationType) -> NDArray[np.float32]:
    """The values of rows as they lie in a file. Raises NotImplementedError."""
    return np.ascontiguousarray(gguf.dequantize(data, kind), np.float32)
