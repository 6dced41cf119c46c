"""A GGUF file as a target: written once as a folder in Hugging Face's form, in the cache.

    FILE.gguf  ->  config.json  generation_config.json  tokenizer.json  tokenizer_config.json
                   chat_template.jinja  model*.safetensors  source.gguf (a link to the file)

All of it comes from the file: its metadata say configuration, tokenizer and chat template, and the
weights are dequantised by the `gguf` package, into float32 where the matrices are stored so, else
into bfloat16. What comes out is a target in its own right: a model that was quantised to 4 bits is
not the model that its publisher trained, and `config.json` says so (SOURCE). A template in
FILE.jinja beside the file comes before its own: files of base models have none.

The link leads back to the file, for the decoder that multiplies its blocks as they are (`blocks`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.artifact import cache_folder, storage_errors
from eyas.errors import MismatchError, MissingInputError, TemplateError, template_hint
from eyas.gguf.configuration import configuration
from eyas.gguf.file import GgufFile, open_file
from eyas.gguf.tensors import check_types, published_names, weights
from eyas.gguf.tokenizer import tokenizer_of

SUFFIX = ".gguf"
LINK = "source.gguf"
TEMPLATE_SUFFIX = ".jinja"  # of a chat template beside a file
SHARD_BYTES = 2 << 30  # of weights, held in memory at a time
IDENTITY_BYTES = 8 << 20  # read at either end, to tell whether a file is one that is known
FORM = "2"  # of the folder: raise it when the same file gives another
SAFETENSORS_TYPES = {"float32": "F32", "bfloat16": "BF16"}


def is_gguf(place: str) -> bool:
    """Whether a name of a target is that of a GGUF file."""
    return place.endswith(SUFFIX) and "://" not in place


def target_folder(file: str | Path) -> Path:
    """The folder in the cache that holds a GGUF file as a Hugging Face model, made when it is first
    asked for.

    Raises MissingInputError, CorruptError (a cut file), MismatchError (an architecture,
    quantisation, tokenizer or rotary scaling that eyas does not read), TemplateError (no chat
    template), StorageFullError.
    """
    path = Path(file)
    if not path.is_file():
        raise MissingInputError(f"no file at {path}", "give the path of a GGUF file")
    folder = cache_folder("gguf") / _identity(path)
    if folder.is_dir():
        _link(folder, path)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with storage_errors(str(folder)):
        made = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
        try:
            write_folder(open_file(path), made)
            _link(made, path)
            os.rename(made, folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder


def _link(folder: Path, path: Path) -> None:
    """Let the folder lead to the file, wherever it lies now. A cache that cannot be written to
    keeps the link that it has.
    """
    link, place = folder / LINK, str(path.absolute())
    if link.is_symlink() and os.readlink(link) == place:
        return
    fresh = folder / f"{LINK}.{os.getpid()}-{threading.get_ident()}"
    with suppress(OSError):
        fresh.symlink_to(place)
        fresh.replace(link)


def linked_file(folder: Path) -> GgufFile:
    """The file that a folder was made from. Raises MismatchError where it was made from none,
    MissingInputError, CorruptError.
    """
    link = folder / LINK
    if not link.is_symlink():
        raise MismatchError(
            f"{folder} is not made from a GGUF file",
            "dtype packed is for a target that is one: --target FILE.gguf",
        )
    path = Path(os.readlink(link))
    if not path.is_file() or _identity(path) != folder.name:
        raise MissingInputError(
            f"the file {path} is no longer there, or another one",
            "give --target the path of the file once more",
        )
    return open_file(path)


def _identity(path: Path) -> str:
    size, beside = path.stat().st_size, path.with_suffix(TEMPLATE_SUFFIX)
    digest = hashlib.sha256(f"{FORM} {path.name} {size} ".encode())
    if beside.is_file():
        digest.update(beside.read_bytes())
    with path.open("rb") as stream:
        digest.update(stream.read(IDENTITY_BYTES))
        stream.seek(max(0, size - IDENTITY_BYTES))
        digest.update(stream.read(IDENTITY_BYTES))
    return digest.hexdigest()[:16]


def write_folder(file: GgufFile, folder: Path) -> None:
    """Write everything of a target into an empty folder."""
    config, template = configuration(file), chat_template(file)
    published_names(file)
    check_types(file)
    tokenizer, tokenizer_config = tokenizer_of(file)
    ends = [file.of_tokenizer(f"{name}_token_id") for name in ("eos", "eot")]
    found_ends = list(dict.fromkeys(number for number in ends if number is not None))
    texts = {
        "config.json": _json(
            config
            | {"eos_token_id": found_ends}
            | {
                f"{name}_token_id": file.of_tokenizer(f"{key}_token_id")
                for name, key in (("bos", "bos"), ("pad", "padding"))
            }
        ),
        "generation_config.json": _json({"eos_token_id": found_ends}),
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": _json(tokenizer_config),
        "chat_template.jinja": template,
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    write_weights(file, config["dtype"], folder)


def chat_template(file: GgufFile) -> str:
    """The template beside the file, else the one in it. Raises TemplateError."""
    beside = file.path.with_suffix(TEMPLATE_SUFFIX)
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    template = file.metadata.get("tokenizer.chat_template")
    if not template:
        raise TemplateError(
            f"{file.path} has no chat template",
            template_hint(str(beside)),
        )
    return str(template)


def _json(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"


# Weights


def write_weights(file: GgufFile, dtype: str, folder: Path) -> None:
    """Write the tensors in `dtype` (bfloat16 or float32) as shards of safetensors with an index."""
    shard: dict[str, NDArray[Any]] = {}
    place: dict[str, int] = {}
    size, total, number = 0, 0, 0
    for name, values in weights(file):
        stored = values if dtype == "float32" else bfloat16_bits(values)
        if shard and size + stored.nbytes > SHARD_BYTES:
            _write_shard(shard, dtype, folder / _shard_name(number))
            shard, size, number = {}, 0, number + 1
        shard[name], place[name] = stored, number
        size, total = size + stored.nbytes, total + stored.nbytes
    _write_shard(shard, dtype, folder / _shard_name(number))
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: _shard_name(at) for name, at in sorted(place.items())},
    }
    (folder / "model.safetensors.index.json").write_text(_json(index))


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16 of each number, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    nearest = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, nearest).astype(np.uint16)


def _write_shard(shard: Mapping[str, NDArray[Any]], dtype: str, path: Path) -> None:
    """A safetensors file, as its own package writes it, which knows no NumPy array of bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    names, at = sorted(shard), 0
    for name in names:
        end = at + shard[name].nbytes
        kind, shape = SAFETENSORS_TYPES[dtype], list(shard[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            stream.write(np.ascontiguousarray(shard[name]).data)


def _shard_name(number: int) -> str:
    return f"model-{number + 1:05d}.safetensors"
