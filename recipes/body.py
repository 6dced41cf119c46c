"""SmolLM2 in the body of a larger model: its target and its head, padded with zeros to the shape
of 1 B or 8 B. The logits and the drafts are SmolLM2's, the price of a token is the larger model's.

    python recipes/body.py --size 1b --out out/body-1b [--dtype float32]
        [--target smollm2] [--head smollm2]

writes out/body-1b/target, a folder in Hugging Face's form, and out/body-1b/head in eyas' own form,
of which `eyas export` makes SGLang's and vLLM's. Anything that `eyas.hub` resolves can be padded if
it is a Llama without biases: a GGUF file too, by its path. No PyTorch is needed; one tensor of the
original is in memory at a time, and of the target only what is not zero is written where the file
system has holes, so that 8 B take seconds and less than 2 GB of disk.

How the function is kept, of a hidden size d in one of D, and heads of h in heads of H:

    hidden      the first d places; all others stay 0
    norms       weight * sqrt(d / D), eps * d / D: the mean is over D places
    heads       pair (j, j + h/2) of the rotary embedding lies at (j * H/h, H/2 + j * H/h), which
                turn at the same frequency; queries * sqrt(H / h), as attention divides by sqrt(H)
    groups      a key-value head has its own query heads first, then empty ones
    layers      those beyond the original's are all zero and add nothing. The others keep their
                numbers, and so do the head's taps
    head        the same; inputs of several streams (fc, q, k, v) have each in its own D places

What it is not: a draft vocabulary stays as small as the original's, and a processor that clocks by
power may be a little faster on zeros. Whoever quotes a figure says that it is of a body.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from eyas import hub
from eyas.errors import EyasError, MismatchError
from eyas.gguf.checkpoint import lies_in_file
from eyas.gguf.folder import linked_file
from eyas.gguf.tensors import half_order, published_names, weights
from eyas.model.architecture import TargetConfig
from eyas.model.arrays import Array, cast
from eyas.model.checkpoint import read_head
from eyas.model.config import DecoderConfig, HeadConfig, read_config
from eyas.model.dialects import MAPS
from eyas.model.forms import write_head
from eyas.model.target import DTYPES
from eyas.model.weights import CONFIG_SUFFIXES, INDEX, array_sha256, read_arrays, read_shapes

Sizes = Mapping[str, int]
# 1b: as narrow heads as SmolLM2's, in its groups of three. 8b: Llama 3.1 8B's shape.
SIZES: dict[str, Sizes] = {
    "1b": {
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
SHARD_BYTES = 4 << 30
SUPER_BLOCK = 256  # numbers of a K-quant
TYPES = {"bfloat16": "BF16", "float32": "F32"}  # by safetensors' names


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in that of the body. shape: of the body's. at: of each axis, the places
    of the original's entries. factor: what they are multiplied by.
    """

    shape: tuple[int, ...]
    at: tuple[NDArray[np.intp], ...]
    factor: float = 1.0

    def put(self, values: NDArray[np.float32], into: Array) -> None:
        """Write the original's values into a tensor of zeros of the body's shape."""
        into[np.ix_(*self.at)] = values * np.float32(self.factor)


class Body:
    """A model's shape in that of a body, for a target or a head. `sizes`: fields of DecoderConfig.

    Raises MismatchError for a body that does not hold the model.
    """

    def __init__(self, own: DecoderConfig, sizes: Sizes) -> None:
        share = own.hidden_size / sizes["hidden_size"]
        self.own, self.sizes = own, {**sizes, "rms_norm_eps": own.rms_norm_eps * share}
        self._refuse_small()
        own_heads, groups = own.num_attention_heads, own.num_key_value_heads
        h, H = own.head_dim, sizes["head_dim"]
        of_group, wide = own_heads // groups, sizes["num_attention_heads"] // self._key_heads
        query, key = np.arange(own_heads), np.arange(groups)
        query = query // of_group * wide + query % of_group
        half, plain = np.arange(h // 2) * (H // h), np.arange(h)
        turned = np.concatenate((half, H // 2 + half))

        def axis(heads: NDArray[np.intp], within: NDArray[np.intp], count: int) -> Axis:
            return count * H, (heads[:, None] * H + within).reshape(-1)

        num_queries = sizes["num_attention_heads"]
        inner = sizes["intermediate_size"], np.arange(own.intermediate_size)
        self._outputs: dict[str, Axis] = {
            "q_proj": axis(query, turned, num_queries),
            "k_proj": axis(key, turned, self._key_heads),
            "v_proj": axis(key, plain, self._key_heads),
            **dict.fromkeys(("gate_proj", "up_proj"), inner),
        }
        self._inputs: dict[str, Axis] = {
            "o_proj": axis(query, plain, num_queries),
            "down_proj": inner,
        }
        self._norm, self._query = math.sqrt(share), math.sqrt(H / h)

    @property
    def _key_heads(self) -> int:
        return self.sizes["num_key_value_heads"]

    def _refuse_small(self) -> None:
        own, sizes = self.own, self.sizes
        faults = [
            f"{name} {getattr(own, name)} does not fit into {size}"
            for name, size in sizes.items()
            if name != "rms_norm_eps" and getattr(own, name) > size
        ]
        if sizes["num_attention_heads"] % self._key_heads:
            faults.append("the heads are not shared evenly by the key-value heads")
        elif (
            sizes["num_attention_heads"] * own.num_key_value_heads
            < self._key_heads * own.num_attention_heads
        ):
            faults.append("fewer query heads share a key-value head")
        if sizes["head_dim"] % own.head_dim:
            faults.append(f"head_dim {sizes['head_dim']} is no multiple of {own.head_dim}")
        if own.rope.kind in ("yarn", "longrope"):
            faults.append(f"rotary scaling {own.rope.kind} depends on head_dim")
        if faults:
            raise MismatchError(f"no body of this model: {'; '.join(faults)}", "give larger sizes")

    def place(self, name: str, shape: tuple[int, ...]) -> Place:
        """Where a tensor of that name and shape lies. Raises MismatchError for one that is no
        Llama's.
        """
        part = name.split(".")[-2]
        if len(shape) == 1 and name.endswith(".weight"):
            size, at = self._hidden(name, shape[0])
            return Place((size,), (at,), self._norm)
        if part not in PARTS or len(shape) != 2:
            raise MismatchError(f"{name} has no place in a body", "give a Llama without biases")
        whole = shape[0], np.arange(shape[0])
        of_outputs = whole if part in VOCABULARIES else None
        rows = of_outputs or self._outputs.get(part) or self._hidden(name, shape[0])
        columns = self._inputs.get(part) or self._hidden(name, shape[1])
        if (len(rows[1]), len(columns[1])) != shape:
            raise MismatchError(f"{name} is {shape}: not what the config says", "restore the model")
        factor = self._query if part == "q_proj" else 1.0
        return Place((rows[0], columns[0]), (rows[1], columns[1]), factor)

    def _hidden(self, name: str, size: int) -> Axis:
        """An axis of one or several streams of the hidden size."""
        d, D = self.own.hidden_size, self.sizes["hidden_size"]
        streams, rest = divmod(size, d)
        if rest or not streams:
            raise MismatchError(f"{name} has no place in a body", "give a Llama without biases")
        return streams * D, (np.arange(streams)[:, None] * D + np.arange(d)).reshape(-1)


Axis = tuple[int, NDArray[np.intp]]  # its size in the body, and where the original's entries lie
VOCABULARIES = ("embed_tokens", "lm_head")
PARTS = (
    *(f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")),
    *VOCABULARIES,
    "fc",
)


# The target


def originals(folder: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The tensors of a target, one after the other; those of a GGUF file as it has them, not
    rounded.
    """
    if lies_in_file(folder):
        for tensor in weights(linked_file(folder)):
            yield tensor.name, tensor.values()
    else:
        for name, array in read_arrays(folder).items():
            yield name, cast(array, DTYPES["float32"])


def write_target(target: str, sizes: Sizes, folder: Path, dtype: str = "bfloat16") -> None:
    """The body of a target as a folder in Hugging Face's form. Raises MismatchError, and what
    `hub.resolve_target` raises.
    """
    source = Path(hub.resolve_target(target))
    own, config = TargetConfig.from_folder(source), read_config(source)
    if own.family != "llama":
        raise MismatchError(f"{target} is a {own.family} model", "give a Llama")
    body = Body(own, sizes)
    places = {name: body.place(name, shape) for name, shape in read_shapes(source).items()}
    shapes = {name: place.shape for name, place in places.items()}
    first = "model.layers.0."
    for layer in range(own.num_hidden_layers, sizes["num_hidden_layers"]):
        shapes |= {
            name.replace(first, f"model.layers.{layer}."): shape
            for name, shape in shapes.items()
            if name.startswith(first)
        }
    folder.mkdir(parents=True)
    mapped = zeros(folder, shapes, dtype)
    for name, values in originals(source):
        places[name].put(values, mapped[name])
    for path in source.iterdir():
        if path.suffix in CONFIG_SUFFIXES and path.name != INDEX:
            shutil.copy(path, folder)
    dropped = ("gguf", "torch_dtype")
    kept = {key: value for key, value in config.items() if key not in dropped}
    written = {**kept, **body.sizes, "dtype": dtype, "body_of": target}
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")


def zeros(folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> dict[str, Array]:
    """Safetensors files of zeros with their index, mapped: what is put into the tensors is written.
    The files are as long as they say, and take no room where nothing is put.
    """
    item = DTYPES[dtype].itemsize
    sizes = {name: math.prod(shape) * item for name, shape in sorted(shapes.items())}
    shards: list[dict[str, int]] = [{}]
    for name, size in sizes.items():
        if shards[-1] and sum(shards[-1].values()) + size > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = size
    mapped, shard_of = {}, {}
    for number, shard in enumerate(shards, 1):
        path = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, size in shard.items():
            offsets = [at, at := at + size]
            described[name] = {
                "dtype": TYPES[dtype],
                "shape": shapes[name],
                "data_offsets": offsets,
            }
        header = json.dumps(described).encode()
        header += b" " * (-len(header) % 8)
        with path.open("wb") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            stream.truncate(8 + len(header) + at)
        data = np.memmap(path, np.uint8, "r+", offset=8 + len(header))
        for name in shard:
            first, end = described[name]["data_offsets"]
            mapped[name] = data[first:end].view(DTYPES[dtype]).reshape(shapes[name])
            shard_of[name] = path.name
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": shard_of}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return mapped


# The head


def write_body_head(
    head: str, sizes: Sizes, target: str | Path, folder: Path, dtype: str = "bfloat16"
) -> None:
    """The body of a head in eyas' own form, for a target that is the body of the head's target: a
    folder, or what a GGUF file became. Raises MismatchError, and what `read_head` raises.
    """
    own, tensors = read_head(hub.resolve_head(head))
    body = Body(own, {**sizes, "num_hidden_layers": 1})
    tied = TargetConfig.from_folder(target).tie_word_embeddings
    name = f"{'model.embed_tokens' if tied else 'lm_head'}.weight"
    config = HeadConfig(
        **{
            **own.model_dump(),
            **body.sizes,
            "target_hidden_size": sizes["hidden_size"],
            "target_lm_head_sha256": array_sha256(read_arrays(target, [name])[name]),
        }
    )
    padded = {}
    for name, values in tensors.items():
        if name in MAPS:
            padded[name] = values
            continue
        place = body.place(name, values.shape)
        padded[name] = np.zeros(place.shape, DTYPES[dtype])
        place.put(cast(values, DTYPES["float32"]), padded[name])
    folder.mkdir(parents=True)
    for file, data in write_head(config, padded, "eyas").items():
        (folder / file).write_bytes(data)


# As ggml has it


class Blocks:
    """The tensors of the body of a target that is a GGUF file, by ggml's names and in its order of
    rows. benchmarks/random_models.py writes files of them.
    """

    def __init__(self, target: str, sizes: Sizes) -> None:
        folder = Path(hub.resolve_target(target))
        file = linked_file(folder)
        own = {tensor.name: tensor for tensor in weights(file)}
        self._own = {ggml: own[name] for ggml, name in published_names(file).items()}
        self._body = Body(TargetConfig.from_folder(folder), sizes)
        names = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        self._heads = {part: sizes[name] for part, name in names.items()}

    def values(self, part: str, size: tuple[int, ...]) -> NDArray[np.float32]:
        """Float32, of that shape."""
        found = np.zeros(size, np.float32)
        if (tensor := self._own.get(f"{part}.weight")) is None:  # of a layer beyond the original's
            return found
        self._body.place(tensor.name, tensor.shape).put(tensor.values(), found)
        if heads := self._heads.get(part.split(".")[-1]):
            found[half_order(len(found), heads)] = found.copy()
        return found

    def blocks(self, part: str, size: tuple[int, ...], kind: Kind) -> NDArray[np.uint8]:
        """Rows of a type's blocks, uint8 [N, bytes of a row]. Zeros are zeros in all types."""
        values = self.values(part, size)
        found = np.zeros(gguf.quant_shape_to_byte_shape(size, kind), np.uint8)
        if len(filled := np.flatnonzero(values.any(axis=1))):
            found[filled] = nearest(values[filled], kind)
        return found


def nearest(values_NK: NDArray[np.float32], kind: Kind) -> NDArray[np.uint8]:
    """Each number's nearest code in a type of ggml; of K-quants, which the gguf package only reads,
    with the least and the largest of a block as its bounds.
    """
    if kind not in K_QUANTS:
        return gguf.quantize(values_NK, kind).view(np.uint8)
    blocks = values_NK.reshape(-1, SUPER_BLOCK)
    found = [K_QUANTS[kind](part) for part in np.array_split(blocks, len(blocks) // 65536 + 1)]
    return np.concatenate(found).reshape(len(values_NK), -1)


def steps(values: NDArray[np.float32], most: int) -> tuple[NDArray[np.float16], Any]:
    """A half-precision step for the numbers of a row [N, S], and how many of them each is."""
    step = (values.max(axis=1, keepdims=True) / most).astype(np.float16)
    return step, np.round(over(values, step)).clip(0, most)


def over(values: NDArray[Any], steps: NDArray[Any]) -> NDArray[np.float32]:
    """values / steps; 0 where a step is 0."""
    steps = steps.astype(np.float32)
    return np.divide(values, steps, out=np.zeros_like(values), where=steps != 0)


def q4_k(blocks: NDArray[np.float32]) -> NDArray[np.uint8]:
    """scale * code - min, of eight times 32 numbers: codes of 4 bits, scales and mins of 6."""
    x = blocks.reshape(-1, 8, 32)
    below = np.maximum(-x.min(axis=2), 0)
    d, scales = steps((np.maximum(x.max(axis=2), 0) + below) / 15, 63)
    dmin, mins = steps(below, 63)
    offset, scale = (one[..., None].astype(np.float32) for one in (dmin * mins, d * scales))
    codes = np.round(over(x + offset, np.broadcast_to(scale, x.shape))).clip(0, 15).astype(np.uint8)
    scales, mins = (one.astype(np.uint8) for one in (scales, mins))
    six = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, mins)]
    six.append(scales[:, 4:] & 15 | (mins[:, 4:] & 15) << 4)
    pairs = codes.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([d.view(np.uint8), dmin.view(np.uint8), *six, nibbles], axis=1)


def q6_k(blocks: NDArray[np.float32]) -> NDArray[np.uint8]:
    """scale * (code - 32), of sixteen times 16 numbers: codes of 6 bits, scales of 8."""
    x = blocks.reshape(-1, 16, 16)
    d, scales = steps(np.abs(x).max(axis=2) / 31, 127)
    scale = np.broadcast_to((d.astype(np.float32) * scales)[..., None], x.shape)
    codes = (np.round(over(x, scale)).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (codes[:, :, :2] & 15 | codes[:, :, 2:] << 4).reshape(-1, 128)
    high = codes >> 4
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = [low, high.reshape(-1, 64), scales.astype(np.int8).view(np.uint8), d.view(np.uint8)]
    return np.concatenate(parts, axis=1)


K_QUANTS = {Kind.Q4_K: q4_k, Kind.Q6_K: q6_k}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument("--target", default="smollm2", help="a name, a folder or a GGUF file")
    parser.add_argument("--head", default="smollm2", help="a name or a folder")
    parser.add_argument("--dtype", choices=TYPES, default="bfloat16")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} is there already: delete it, or name another folder")
    sizes = SIZES[args.size]
    try:
        write_target(args.target, sizes, args.out / "target", args.dtype)
        write_body_head(args.head, sizes, args.out / "target", args.out / "head", args.dtype)
    except EyasError as error:
        parser.exit(error.exit_code, f"error: {error.what}\n  -> {error.hint}\n")
    total = json.loads((args.out / "target" / INDEX).read_text())["metadata"]["total_size"]
    print(f"{args.out}: a body of {total / 1e9:.1f} GB for {args.target}, and its head")


if __name__ == "__main__":
    main()
