"""A GGUF file as a target: written once as a folder in Hugging Face's form, in the cache.

    FILE.gguf  ->  config.json  generation_config.json  tokenizer.json  tokenizer_config.json
                   chat_template.jinja  model*.safetensors  source.gguf (a link to the file)

All of it comes from the file: its metadata say configuration, tokenizer and chat template, and the
weights are dequantised by the `gguf` package, into float32 where the matrices are stored so, else
into bfloat16. What comes out is a target in its own right: a model that was quantised to 4 bits is
not the model that its publisher trained, and `config.json` says so (SOURCE).

ggml's own order differs from Hugging Face's in one place: of the `llama` architecture the rows of q
and k are interleaved, as its rotary embedding turns neighbours where transformers turns halves.
The link leads back to the file, for the decoder that multiplies its blocks as they are (`blocks`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from eyas.artifact import cache_folder, storage_errors
from eyas.errors import CorruptError, MismatchError, MissingInputError
from eyas.gguf.configuration import (
    ARCHITECTURES,
    OTHER_ARCHITECTURE,
    ROPE_FACTORS,
    configuration,
)
from eyas.gguf.file import DAMAGED, GgufFile, dequantised_rows, open_file
from eyas.gguf.tokenizer import tokenizer_of

SUFFIX = ".gguf"
LINK = "source.gguf"
SHARD_BYTES = 2 << 30  # of weights, held in memory at a time
IDENTITY_BYTES = 8 << 20  # read at either end, to tell whether a file is one that is known
FORM = "1"  # of the folder: raise it when the same file gives another
SAFETENSORS_TYPES = {"float32": "F32", "bfloat16": "BF16"}
GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BY_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def is_gguf(place: str) -> bool:
    """Whether a name of a target is that of a GGUF file."""
    return place.endswith(SUFFIX) and "://" not in place


def target_folder(file: str | Path) -> Path:
    """The folder in the cache that holds a GGUF file as a Hugging Face model, made when it is first
    asked for.

    Raises MissingInputError, CorruptError (a cut file), MismatchError (an architecture,
    quantisation, tokenizer or rotary scaling that eyas does not read, no chat template),
    StorageFullError.
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
    size = path.stat().st_size
    digest = hashlib.sha256(f"{FORM} {path.name} {size} ".encode())
    with path.open("rb") as stream:
        digest.update(stream.read(IDENTITY_BYTES))
        stream.seek(max(0, size - IDENTITY_BYTES))
        digest.update(stream.read(IDENTITY_BYTES))
    return digest.hexdigest()[:16]


def write_folder(file: GgufFile, folder: Path) -> None:
    """Write everything of a target into an empty folder."""
    config = configuration(file)
    template = file.metadata.get("tokenizer.chat_template")
    if not template:
        raise MismatchError(
            f"{file.path} has no chat template",
            "a head is trained on the answers of a chat model: take the file of an instruct model",
        )
    tokenizer, tokenizer_config = tokenizer_of(file)
    ends = [file.of_tokenizer(f"{name}_token_id") for name in ("eos", "eot")]
    found_ends = list(dict.fromkeys(number for number in ends if number is not None))
    texts = {
        "config.json": _json(config | {"eos_token_id": found_ends}),
        "generation_config.json": _json({"eos_token_id": found_ends}),
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": _json(tokenizer_config),
        "chat_template.jinja": template,
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    write_weights(file, config["dtype"], folder)


def _json(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"


# Weights


def hugging_face_name(name: str) -> str | None:
    """A tensor's name in a Hugging Face checkpoint; None for one that none has."""
    stem, _, kind = name.rpartition(".")
    if stem in GLOBAL:
        return f"{GLOBAL[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or part not in BY_LAYER:
        return None
    return f"model.layers.{layer}.{BY_LAYER[part]}.{kind}"


def half_order(values: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows [heads * D, ...] from ggml's order, in which a turned pair is two neighbours, to
    transformers', in which it is one row of each half.
    """
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def raw_tensors(
    file: GgufFile,
) -> Iterator[tuple[str, gguf.GGMLQuantizationType, NDArray[Any]]]:
    """Every tensor under its name in Hugging Face's form: its type and its rows as they lie in the
    file, in Hugging Face's order. Raises MismatchError.
    """
    query_heads = file.count("attention.head_count")
    heads = {
        "q_proj": query_heads,
        "k_proj": file.count("attention.head_count_kv", query_heads),
    }
    for tensor in file.tensors.values():
        if tensor.name == ROPE_FACTORS:
            continue
        name = hugging_face_name(tensor.name)
        if name is None:
            raise MismatchError(f"{file.path} holds {tensor.name}", OTHER_ARCHITECTURE)
        rows, part = tensor.data, name.split(".")[-2]
        if ARCHITECTURES[file.architecture].interleaves_heads and part in heads:
            # a row's blocks stay whole: whole rows change places
            rows = half_order(rows, heads[part])
        yield name, tensor.tensor_type, rows


def weights(file: GgufFile) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every tensor under its name in Hugging Face's form. Raises MismatchError, CorruptError."""
    for name, kind, rows in raw_tensors(file):
        try:
            yield name, dequantised_rows(rows, kind)
        except NotImplementedError as error:
            raise MismatchError(
                f"{file.path} holds {name} in {kind.name}, which gguf does not dequantise",
                "take a file in another quantisation (Q8_0, Q6_K, Q4_K_M, ...)",
            ) from error
        except (ValueError, IndexError) as error:
            raise CorruptError(f"{file.path}: {name} is cut: {error}", DAMAGED) from error


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
