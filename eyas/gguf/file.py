"""An open GGUF file: its metadata, and its tensors, mapped. The header is read here, since the
`gguf` package needs 14 s for a vocabulary of 262,144 strings; its tables describe the types.

    "GGUF"  version  number of tensors  number of metadata
    metadata: key  type  value             an array: type of its entries  length  entries
    tensors:  name  dimensions  shape (the fastest first)  type  offset
    padding to a multiple of general.alignment, then the tensors' bytes

A large model comes as parts NAME-00001-of-00003.gguf, each such a file; the first has the metadata.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import gguf
import numpy as np
from numpy.typing import NDArray
from pydantic import Field, StrictBool, StrictStr, TypeAdapter, ValidationError

from eyas.errors import CorruptError, MismatchError, MissingInputError, refuse_pointer

Kind = gguf.GGMLQuantizationType
DAMAGED = "download it again; compare its size with its source's"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9  # types of metadata; the others are numbers
_CODES = ((0, "BbHhIif?"), (10, "Qqd"))
NUMBERS = {first + i: code for first, codes in _CODES for i, code in enumerate(codes)}
ALIGNMENT = 32
Whole = Annotated[int, Field(strict=True, ge=0)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# Types of values by key, without the architecture's name; `count` and `number` check others.
VALUES: dict[Any, str] = {
    StrictStr: "general.architecture general.type rope.scaling.type tokenizer.chat_template "
    "tokenizer.ggml.model tokenizer.ggml.pre",
    StrictBool: "attention.causal rope.scaling.finetuned tokenizer.ggml.add_bos_token "
    "tokenizer.ggml.add_space_prefix",
    Annotated[int, Field(strict=True, ge=8, multiple_of=8)]: "general.alignment",
    Whole: "split.no split.count split.tensors.count pooling_type expert_count shortconv.l_cache "
    "attention.sliding_window "
    + " ".join(
        f"tokenizer.ggml.{role}_token_id"
        for role in ("bos", "eos", "eot", "eom", "unknown", "padding")
    ),
    Number: "rope.freq_base rope.scaling.factor rope.scale_linear attention.temperature_scale",
    list[StrictStr]: "tokenizer.ggml.tokens tokenizer.ggml.merges",
    list[Number]: "tokenizer.ggml.scores",
    list[Whole]: "tokenizer.ggml.token_type",
}
KINDS = {key: TypeAdapter(kind) for kind, keys in VALUES.items() for key in keys.split()}
MOST_DIMENSIONS = 4
PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as stored. shape: in PyTorch's order. data: uint8 [..., bytes of a row]."""

    name: str
    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open GGUF file, its tensors mapped. path: of the first part."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def of_model(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own key. Raises CorruptError without value and default."""
        full = f"{self.architecture}.{key}"
        if default is None and full not in self.metadata:
            raise CorruptError(f"{self.path} lacks {full} in its metadata", DAMAGED)
        return self.metadata.get(full, default)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number, 1 or more; a list may repeat it by layer. Raises CorruptError."""
        found = self.of_model(key, default)
        if isinstance(found, list) and len(set(found)) == 1:
            found = found[0]
        if type(found) is not int or found < 1:
            raise CorruptError(
                f"{self.path} has {found!r:.40} as {self.architecture}.{key}",
                "a whole number is needed, the same for every layer",
            )
        return found

    def number(self, key: str, default: float | None = None) -> float:
        """A number: the shortest decimal of the file's float32. Raises CorruptError."""
        found = self.of_model(key, default)
        if not isinstance(found, float | int):
            what = f"{self.path} has {found!r:.40} as {self.architecture}.{key}"
            raise CorruptError(what, "a number is needed")
        return float(str(np.float32(found)))

    def of_tokenizer(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)


class _Header:
    """Reads one value after another. Raises struct.error and ValueError."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.at = content, 0

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{count}{code}", self.content, self.at)
        self.at += struct.calcsize(f"<{count}{code}")
        return found

    def string(self) -> str:
        (found,) = self.strings(1)
        return found

    def strings(self, count: int) -> Iterator[str]:
        content, size, at = self.content, len(self.content), self.at
        for _ in range(count):
            begin = at + 8
            at = begin + int.from_bytes(content[at:begin], "little")
            if at > size:
                raise ValueError("a text is longer than the file")
            yield content[begin:at].decode()
        self.at = at

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.numbers(NUMBERS[kind])[0]
        inner, count = *self.numbers("I"), *self.numbers("Q")
        if count > len(self.content):
            raise ValueError("a list is longer than the file")
        if inner in NUMBERS:
            return list(self.numbers(NUMBERS[inner], count))
        if inner == STRING:
            return list(self.strings(count))
        return [self.value(inner) for _ in range(count)]


def part_names(path: Path) -> list[Path]:
    """All parts of a model, by the name of one; the path alone if it names no part."""
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    names = (f"{match['name']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1))
    return [path.with_name(name) for name in names]


def open_file(path: Path) -> GgufFile:
    """Read metadata and the table of tensors, of all parts. Raises CorruptError, MismatchError,
    MissingInputError.
    """
    given = _open_one(path)
    count, number = (given.metadata.get(f"split.{key}", 0) for key in ("count", "no"))
    if type(count) is not int or count < 2:
        return given
    names = part_names(path)
    if len(names) != count or type(number) is not int or names.index(path) != number:
        raise MismatchError(
            f"{path} is part {number + 1} of {count}, which its name does not say",
            f"name the parts as they were published: ...-00001-of-{count:05d}.gguf",
        )
    if missing := [name.name for name in names if not name.is_file()]:
        raise MissingInputError(
            f"{path} is one of {count} parts, and {', '.join(missing)} is not beside it",
            "download all parts into one folder",
        )
    return _joined([given if name == path else _open_one(name) for name in names])


def _joined(parts: list[GgufFile]) -> GgufFile:
    first = parts[0]
    tensors: dict[str, StoredTensor] = {}
    for number, part in enumerate(parts):
        said = [part.metadata.get(f"split.{key}") for key in ("no", "count")]
        if said != [number, len(parts)]:
            what = f"{part.path} says that it is part {said[0]} (from 0) of {said[1]}"
            raise CorruptError(what, DAMAGED)
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            raise CorruptError(f"{part.path} holds {twice[0]}, as a part before it does", DAMAGED)
        tensors |= part.tensors
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        what = f"the parts of {first.path} hold {len(tensors)} tensors of {expected}"
        raise CorruptError(what, DAMAGED)
    return replace(first, tensors=tensors)


def _open_one(path: Path) -> GgufFile:
    try:
        with path.open("rb") as stream:
            content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return _read(path, content)
    except (
        ValueError,
        KeyError,
        OverflowError,
        MemoryError,
        RecursionError,
        struct.error,
    ) as error:
        refuse_pointer(path)
        raise CorruptError(f"{path} is no whole GGUF file: {error}", DAMAGED) from error


def _read(path: Path, content: mmap.mmap) -> GgufFile:
    header = _Header(content)
    if content[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    _, version = header.numbers("I", 2)
    if version in {one << 24 for one in VERSIONS}:
        hint = "take a file for this machine (little-endian), or convert it: gguf-convert-endian"
        raise MismatchError(f"{path} is big-endian", hint)
    if version not in VERSIONS:
        raise ValueError(f"version {version}, known: {', '.join(map(str, VERSIONS))}")
    num_tensors, num_values = header.numbers("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = header.string()
        if not key or key in metadata:
            raise ValueError(f"the key {key!r} is there twice" if key else "a key is empty")
        metadata[key] = header.value(*header.numbers("I"))
    _check_values(path, metadata)
    table = []
    for _ in range(num_tensors):
        name = header.string()
        (dimensions,) = header.numbers("I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        shape = tuple(reversed(header.numbers("Q", dimensions)))
        table.append((name, shape, *header.numbers("I"), *header.numbers("Q")))
    alignment = metadata.get("general.alignment", ALIGNMENT)
    begin = -(-header.at // alignment) * alignment
    whole, end = np.frombuffer(content, np.uint8), 0
    tensors: dict[str, StoredTensor] = {}
    for name, shape, number, offset in table:
        if number not in set(Kind):
            raise MismatchError(
                f"{path} holds {name} in type {number}, which the installed gguf does not know",
                "`pip install -U gguf`, or take a file in another quantisation",
            )
        kind = Kind(number)
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        width = shape[-1] // block * num_bytes
        size = int(np.prod(shape[:-1], dtype=object)) * width
        if name in tensors or 0 in shape or offset < end:
            why = "is there twice" if name in tensors else f"is {shape} at {offset}, behind {end}"
            raise ValueError(f"the tensor {name} {why}")
        end = offset + size
        data = whole[begin + offset : begin + end]
        if len(data) != size or shape[-1] % block or (block > 1 and len(shape) == 1):
            raise ValueError(f"{name} is cut")
        tensors[name] = StoredTensor(name, kind, shape, data.reshape(*shape[:-1], width))
    return GgufFile(path, metadata, tensors)


def _check_values(path: Path, metadata: Mapping[str, Any]) -> None:
    of_model = f"{metadata.get('general.architecture')}."
    for key, value in metadata.items():
        kind = KINDS.get(key.removeprefix(of_model))
        try:
            if kind is not None:
                kind.validate_python(value)
        except ValidationError as error:
            why = error.errors()[0]["msg"]
            raise CorruptError(f"{path} has {value!r:.40} as {key}: {why}", DAMAGED) from error


def release(data: NDArray[Any]) -> None:
    """Give back the memory of a mapped file that an array lies in; do nothing for other arrays."""
    owner: Any = data
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if isinstance(owner, mmap.mmap):
        owner.madvise(mmap.MADV_DONTNEED)


def dequantised_rows(data: NDArray[Any], kind: gguf.GGMLQuantizationType) -> NDArray[np.float32]:
    """The values of rows as stored, in memory of their own. Raises NotImplementedError."""
    values = np.ascontiguousarray(gguf.dequantize(data, kind), np.float32)
    return values if values.flags.writeable else values.copy()
