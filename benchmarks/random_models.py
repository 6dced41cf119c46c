"""GGUF files of real models' shapes with random weights, which are enough to measure speed; and of
bodies (recipes/body.py), which answer as SmolLM2 and so have its head's acceptance.

A file's matrices are in the types of llama.cpp's quantiser (llama-quant.cpp,
`llama_tensor_get_type`): Q4_K_M is Q6_K for the output and for half of attn_v and ffn_down, Q4_K
else, and Q5_0 and Q8_0 where a row is no multiple of 256. Weights have a deviation of .02, so that
hidden states stay as large as a real model's.

Letters: N rows, K columns, E experts.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from numpy.typing import NDArray

from eyas import hub
from eyas.gguf.file import open_file

FORMATS = ("Q4_K_M", "Q4_0", "Q4_1", "Q8_0", "BF16")
DEVIATION = 0.02
SUPER_BLOCK = 256
EPS = "attention.layer_norm_rms_epsilon"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def recipe() -> Any:
    """recipes/body.py as a module: recipes are no package."""
    path = Path(__file__).resolve().parents[1] / "recipes" / "body.py"
    spec = importlib.util.spec_from_file_location("body", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules.setdefault("body", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(module)
    return module


body = recipe()


@dataclass(frozen=True, slots=True)
class Shape:
    """of: the published model. experts: of each layer, and how many a token takes; 0 is a dense
    MLP. body_of: a GGUF target whose weights it has, padded; else random.
    """

    of: str
    architecture: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    experts: tuple[int, int] = (0, 0)
    body_of: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        """As recipes/body.py names them."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads,
            "head_dim": self.head_dim,
        }


SHAPES = {
    "smollm2": Shape("SmolLM2 135M", "llama", 576, 1536, 30, 9, 3, 64, 49152, True),
    "llama-1b": Shape("Llama 3.2 1B", "llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    "llama-3b": Shape("Llama 3.2 3B", "llama", 3072, 8192, 28, 24, 8, 128, 128256, True),
    "llama-8b": Shape("Llama 3.1 8B", "llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
    "qwen3-4b": Shape("Qwen3 4B", "qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True),
    "qwen3-moe": Shape(
        "12 of the 48 layers of Qwen3 30B-A3B",
        *("qwen3moe", 2048, 768, 12, 32, 4, 128, 151936, False),
        experts=(128, 8),
    ),
    **{
        f"body-{size}": Shape(
            f"SmolLM2 135M in a body of {size[:-1]} B",
            *("llama", *sizes.values(), 49152, True),
            body_of="smollm2",
        )
        for size, sizes in body.SIZES.items()
    },
}


def matrices(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """ggml's names of all tensors but norms, with their shapes [N, K] or [E, N, K], in the order of
    llama.cpp's files.
    """
    H, inner, D = shape.hidden, shape.intermediate, shape.head_dim
    q, kv, (E, _) = shape.heads * D, shape.key_heads * D, shape.experts
    if not shape.tied:
        yield "output", (shape.vocabulary, H)
    yield "token_embd", (shape.vocabulary, H)
    suffix, stacked = ("_exps", (E,)) if E else ("", ())
    for layer in range(shape.layers):
        of_layer: dict[str, tuple[int, ...]] = {
            "attn_k": (kv, H),
            "attn_output": (H, q),
            "attn_q": (q, H),
            "attn_v": (kv, H),
            f"ffn_down{suffix}": (*stacked, H, inner),
            f"ffn_gate{suffix}": (*stacked, inner, H),
            f"ffn_up{suffix}": (*stacked, inner, H),
        }
        if E:
            of_layer["ffn_gate_inp"] = (E, H)
        for name, size in of_layer.items():
            yield f"blk.{layer}.{name}", size


def norms(shape: Shape) -> Iterator[tuple[str, int]]:
    of_layer = {"attn_norm": shape.hidden, "ffn_norm": shape.hidden}
    if shape.architecture != "llama":
        of_layer |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
    for layer in range(shape.layers):
        yield from ((f"blk.{layer}.{name}", size) for name, size in of_layer.items())
    yield "output_norm", shape.hidden


def kind_of(shape: Shape, name: str, columns: int, format: str) -> Kind:
    """The type of a matrix in a file of that format; Q4_1 as in SmolLM2's packaged file."""
    part = name.split(".")[-1]
    is_output = part == "output" or (part == "token_embd" and shape.tied)
    if part == "ffn_gate_inp":
        return Kind.F32
    if format == "Q4_K_M":
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        eighth = shape.layers // 8
        more_bits = (
            layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2
        ) and part in ("attn_v", "ffn_down", "ffn_down_exps")
        fits = columns % SUPER_BLOCK == 0
        if is_output or more_bits:
            return Kind.Q6_K if fits else Kind.Q8_0
        return Kind.Q4_K if fits else Kind.Q5_0
    if format == "Q4_0" and is_output and columns % SUPER_BLOCK == 0:
        return Kind.Q6_K
    return Kind.Q8_0 if format in ("Q4_0", "Q4_1") and is_output else Kind[format]


def random_blocks(rng: np.random.Generator, kind: Kind, size: tuple[int, ...]) -> NDArray[np.uint8]:
    """Rows of a type's blocks as they lie in a file, uint8 [..., bytes of a row]."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    count = int(np.prod(size)) // block
    drawn = rng.integers(0, 1 << 64, -(-count * num_bytes // 8), dtype=np.uint64)
    blocks = drawn.view(np.uint8)[: count * num_bytes].reshape(count, num_bytes)
    if kind in (Kind.F32, Kind.BF16):
        values = blocks.reshape(-1).view("<u2").reshape(count, -1)
        # a sign, an exponent of .008 to .03, and any mantissa
        values[:, -1] = values[:, -1] & 0x807F | 0x3C00 | values[:, -1] & 0x0080
    for at, scale in SCALES.get(kind, {}).items():
        bits = np.float16(scale * DEVIATION).view(np.uint16)
        blocks[:, at], blocks[:, at + 1] = bits & 0xFF, bits >> 8
    return blocks.reshape(*size[:-1], -1)


# Where the half-precision scales lie in a block: one that gives random codes a deviation of 1, and
# of mins the one that centres them.
SCALES = {
    Kind.Q4_0: {0: 0.217},
    Kind.Q5_0: {0: 0.108},
    Kind.Q8_0: {0: 0.0135},
    Kind.Q4_K: {0: 0.00387, 2: 0.029},
    Kind.Q6_K: {208: 0.000732},
}


def write_target(shape: Shape, format: str, path: Path) -> None:
    """A GGUF file of a shape in a format."""
    half = path.with_suffix(".half")
    writer = GGUFWriter(half, shape.architecture)
    for key, value in {**vocabulary(shape.vocabulary), **metadata(shape)}.items():
        add = {list: writer.add_array, str: writer.add_string, bool: writer.add_bool}
        add |= {float: writer.add_float32}
        add.get(type(value), writer.add_uint32)(key, value)
    kinds = {part: kind_of(shape, part, size[-1], format) for part, size in matrices(shape)}
    for part, size in matrices(shape):
        row = gguf.quant_shape_to_byte_shape(size, kinds[part])
        writer.add_tensor_info(
            f"{part}.weight", row, np.dtype(np.uint8), int(np.prod(row)), raw_dtype=kinds[part]
        )
    for part, length in norms(shape):
        writer.add_tensor_info(f"{part}.weight", (length,), np.dtype(np.float32), 4 * length)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    padded = body.Blocks(shape.body_of, shape.sizes) if shape.body_of else None
    rng = np.random.Generator(np.random.SFC64(0))
    for part, size in matrices(shape):
        kind = kinds[part]
        writer.write_tensor_data(
            padded.blocks(part, size, kind) if padded else random_blocks(rng, kind, size)
        )
    for part, length in norms(shape):
        ones = np.ones(length, dtype=np.float32)
        writer.write_tensor_data(padded.values(part, (length,)) if padded else ones)
    writer.close()
    half.rename(path)


def metadata(shape: Shape) -> dict[str, Any]:
    """A body's are those of the original's file, with its own sizes."""
    of_sizes = {
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.intermediate,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.key_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.head_dim,
    }
    kept: dict[str, Any] = {"general.name": f"random {shape.of}"}
    if shape.body_of:
        file = open_file(Path(hub.locate(shape.body_of, "target")))
        left = ("general.architecture", "general.file_type")
        kept = {key: value for key, value in file.metadata.items() if key not in left}
        kept["general.name"] = shape.of
        eps = file.number(EPS) * file.count("embedding_length") / shape.hidden
        of_sizes |= {EPS: eps}
    else:
        theta = 5e5 if shape.architecture == "llama" else 1e6
        of_sizes |= {"context_length": 8192, "rope.freq_base": theta, EPS: 1e-5}
    if shape.experts[0]:
        of_sizes["expert_count"], of_sizes["expert_used_count"] = shape.experts
        of_sizes["expert_feed_forward_length"] = shape.intermediate
    return kept | {f"{shape.architecture}.{key}": value for key, value in of_sizes.items()}


def vocabulary(count: int) -> dict[str, Any]:
    """So many tokens: the bytes, one merge, made-up words, an end."""
    bytes_ = [chr(code if 33 <= code < 127 else code + 256) for code in range(256)]
    words = [f"w{number}" for number in range(count - 258)]
    kinds = [int(gguf.TokenType.NORMAL)] * (count - 1) + [int(gguf.TokenType.CONTROL)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": [*bytes_, "ab", *words, "<|end|>"],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": count - 1,
        "tokenizer.ggml.bos_token_id": count - 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def bytes_per_token(shape: Shape, format: str) -> int:
    """What a token's forward reads: all matrices but untied embeddings, and of experts those that
    it takes.
    """
    all_experts, taken = shape.experts
    total = 0.0
    for part, size in matrices(shape):
        if part == "token_embd" and not shape.tied:
            continue
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind_of(shape, part, size[-1], format)]
        share = taken / all_experts if part.endswith("_exps") else 1.0
        total += share * float(np.prod(size)) / block * num_bytes
    return int(total)
