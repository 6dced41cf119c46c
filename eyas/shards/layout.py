"""The layout: a sample is one range of bytes, fifty samples an ordinary safetensors file.

    train-00000.safetensors  train-00001.safetensors  ...  train.index.json    held_out likewise

    shard    [header length, 8 bytes][header, JSON][sample 0][sample 1] ...
    sample   [token_ids i32 T][labels i32 T][hidden states by the codec]; a multiple of 8 bytes
    labels   loss_mask + 2 x (argmax + 1): the target's best next token, or 0 if unknown
             (version 2: loss_mask)

Index and header hold range and SHA-256 of each sample: one request reads a sample, and a killed
writer goes on after the last whole shard.

Letters: T sequence, K tokens whose last hidden state is kept, Ht target hidden size.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import zstandard
from pydantic import BaseModel
from torch import Tensor

from eyas.shards.codecs import Codec, LayerStates, Tables
from eyas.shards.sample import DTYPES, FeatureMeta, Sample, Split, teacher_mask

FORMAT, READ = 3, (2, 3)  # what is written, what is read
TOKEN_BYTES = 8  # of a token: its id and its label
_FORMAT_NAMES = {
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.uint8: "U8",
}


class Entry(BaseModel):
    """A sample's place: bytes [start, start + size) of `shard`; it has `length` tokens."""

    key: str
    source: str
    shard: str
    start: int
    size: int
    length: int
    sha256: str


class EncodedSample(NamedTuple):
    """Its entry has no place yet."""

    entry: Entry
    data: bytes

    @property
    def key(self) -> str:
        return self.entry.key


def index_name(split: Split) -> str:
    """The file with the places of a split's samples."""
    return f"{split}.index.json"


def kept_of(loss_mask: Tensor, meta: FeatureMeta) -> Tensor:
    """bool [T]: the tokens whose last hidden state is stored."""
    return teacher_mask(loss_mask) if meta.teacher == "supervised" else torch.ones_like(loss_mask)


def layers_of(sample: Sample, meta: FeatureMeta) -> tuple[LayerStates, Tensor]:
    """For a codec: three taps [T, Ht], the last hidden states [K, Ht] and kept bool [T]."""
    length, hidden, dtype = len(sample.token_ids), meta.hidden_size, DTYPES[meta.dtype]
    assert sample.loss_mask.shape == (length,)
    assert sample.aux_hidden.shape == (length, 3 * hidden)
    assert sample.last_hidden.shape == (length, hidden)
    kept = kept_of(sample.loss_mask, meta)
    last = sample.last_hidden if meta.teacher == "everywhere" else sample.last_hidden[kept]
    taps = sample.aux_hidden.to(dtype).cpu().view(length, 3, hidden).unbind(1)
    return [*taps, last.to(dtype).cpu()], kept


def encoded(sample: Sample, meta: FeatureMeta, codec: Codec) -> EncodedSample:
    """A sample's bytes, in the dtype of `meta`."""
    layers, kept = layers_of(sample, meta)
    labels = sample.loss_mask + 2 * (sample.argmax + 1)
    tokens = torch.cat([sample.token_ids.to(torch.int32), labels.to(torch.int32)]).cpu()
    data = tokens.numpy().tobytes() + codec.encode(layers, kept)
    entry = Entry(
        key=sample.key,
        source=sample.source,
        shard="",
        start=0,
        size=len(data),
        length=len(sample.token_ids),
        sha256=hashlib.sha256(data).hexdigest(),
    )
    return EncodedSample(entry, data)


def decode_sample(
    data: bytes, entry: Entry, meta: FeatureMeta, codec: Codec | None = None
) -> Sample:
    """The inverse of `encoded`, up to the codec's error. Raises ValueError."""
    assert len(data) == entry.size
    length, hidden = entry.length, meta.hidden_size
    token_ids, loss_mask, argmax = decode_tokens(data[: TOKEN_BYTES * length])
    kept = kept_of(loss_mask, meta)
    try:
        layers = (codec or meta.coder()).decode(memoryview(data)[TOKEN_BYTES * length :], kept)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    last_hidden = layers[3]
    if meta.teacher == "supervised":
        last_hidden = torch.zeros(length, hidden, dtype=layers[3].dtype)
        last_hidden[kept] = layers[3]
    states = torch.cat(layers[:3], dim=1), last_hidden
    return Sample(entry.key, token_ids, loss_mask, *states, entry.source, argmax)


def decode_tokens(data: bytes) -> tuple[Tensor, Tensor, Tensor]:
    """token_ids int32 [T], loss_mask bool [T], argmax int32 [T] from 8 T bytes."""
    token_ids, labels = torch.frombuffer(bytearray(data), dtype=torch.int32).view(2, -1)
    return token_ids, (labels & 1).bool(), (labels >> 1) - 1


def shard_head(entries: Sequence[Entry], meta: FeatureMeta, tables: Tables | None) -> bytes:
    """The header; entries' starts count from its end. Its table lists the tensors of raw features;
    of others, one of bytes.
    """
    hidden, dtype = meta.hidden_size, DTYPES[meta.dtype]
    own = {
        "samples": json.dumps([entry.model_dump() for entry in entries]),
        "meta": meta.model_dump_json(),
        "tables": tables.to_text() if tables else "",
    }
    table: dict[str, Any] = {"__metadata__": own}
    for number, entry in enumerate(entries):
        length, at = entry.length, entry.start
        tensors = [("token_ids", torch.int32, [length]), ("labels", torch.int32, [length])]
        if meta.codec != "raw" or meta.teacher != "everywhere":
            tensors += [("features", torch.uint8, [entry.size - TOKEN_BYTES * length])]
        else:
            tensors += [("aux_hidden", dtype, [length, 3 * hidden])]
            tensors += [("last_hidden", dtype, [length, hidden])]
        for name, kind, shape in tensors:
            end = at + kind.itemsize * math.prod(shape)
            table[f"{number:03d}.{name}"] = {
                "dtype": _FORMAT_NAMES[kind],
                "shape": shape,
                "data_offsets": [at, end],
            }
            at = end
        assert at == entry.start + entry.size
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header
