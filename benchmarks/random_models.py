"""GGUF files of real models' shapes with random weights, and heads of them: enough to measure
speed, which does not depend on the values.

    write_target("llama-1b", "Q4_K_M", path)     5 GB in seconds: blocks are drawn as they lie

A file's matrices are in the types that llama.cpp's quantiser gives them under that name
(llama-quant.cpp, `llama_tensor_get_type`): Q4_K_M is Q6_K for the output and for half of attn_v
and ffn_down, Q4_K else, and Q5_0 and Q8_0 where a row is no multiple of 256. Scales are such that
weights have a deviation of .02, and hidden states stay as large as a real model's.

Letters: N rows, K columns, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from numpy.typing import NDArray

from eyas.model.architecture import TargetConfig
from eyas.model.config import HeadConfig, HeadOptions
from eyas.operators.tensors import write_head

FORMATS = ("Q4_K_M", "Q4_0", "Q8_0", "BF16")
DEVIATION = 0.02
SUPER_BLOCK = 256
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes. of: the published model. experts: of each layer, and how many of them a
    token takes; 0 is a dense MLP.
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
    draft_vocabulary: int = 32000


SHAPES = {
    "smollm2": Shape(
        "SmolLM2 135M", "llama", 576, 1536, 30, 9, 3, 64, 49152, True, draft_vocabulary=8192
    ),
    "llama-1b": Shape("Llama 3.2 1B", "llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    "llama-3b": Shape("Llama 3.2 3B", "llama", 3072, 8192, 28, 24, 8, 128, 128256, True),
    "llama-8b": Shape("Llama 3.1 8B", "llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
    "qwen3-4b": Shape("Qwen3 4B", "qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True),
    "qwen3-moe": Shape(
        "12 of the 48 layers of Qwen3 30B-A3B",
        *("qwen3moe", 2048, 768, 12, 32, 4, 128, 151936, False),
        experts=(128, 8),
    ),
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


def vectors(shape: Shape) -> Iterator[tuple[str, int]]:
    """The norms."""
    of_layer = {"attn_norm": shape.hidden, "ffn_norm": shape.hidden}
    if shape.architecture != "llama":
        of_layer |= {"attn_q_norm": shape.head_dim, "attn_k_norm": shape.head_dim}
    for layer in range(shape.layers):
        yield from ((f"blk.{layer}.{name}", size) for name, size in of_layer.items())
    yield "output_norm", shape.hidden


def kind_of(shape: Shape, name: str, columns: int, format: str) -> Kind:
    """The type of a matrix in a file of that format."""
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
    return Kind.Q8_0 if format == "Q4_0" and is_output else Kind[format]


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


def write_target(name: str, format: str, path: Path) -> None:
    """A GGUF file of a shape in a format."""
    shape, half = SHAPES[name], path.with_suffix(".half")
    writer = GGUFWriter(half, shape.architecture)
    writer.add_name(f"random {shape.of}")
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.key_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(5e5 if shape.architecture == "llama" else 1e6)
    writer.add_layer_norm_rms_eps(1e-5)
    if shape.experts[0]:
        writer.add_expert_count(shape.experts[0])
        writer.add_expert_used_count(shape.experts[1])
        writer.add_expert_feed_forward_length(shape.intermediate)
    add_vocabulary(writer, shape.vocabulary)
    kinds = {part: kind_of(shape, part, size[-1], format) for part, size in matrices(shape)}
    for part, size in matrices(shape):
        row = gguf.quant_shape_to_byte_shape(size, kinds[part])
        writer.add_tensor_info(
            f"{part}.weight", row, np.dtype(np.uint8), int(np.prod(row)), raw_dtype=kinds[part]
        )
    for part, length in vectors(shape):
        writer.add_tensor_info(f"{part}.weight", (length,), np.dtype(np.float32), 4 * length)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.Generator(np.random.SFC64(0))
    for part, size in matrices(shape):
        writer.write_tensor_data(random_blocks(rng, kinds[part], size))
    for _, length in vectors(shape):
        writer.write_tensor_data(np.ones(length, dtype=np.float32))
    writer.close()
    half.rename(path)


def add_vocabulary(writer: GGUFWriter, count: int) -> None:
    """So many tokens: the bytes, one merge, made-up words, an end."""
    bytes_ = [chr(code if 33 <= code < 127 else code + 256) for code in range(256)]
    words = [f"w{number}" for number in range(count - 258)]
    kinds = [gguf.TokenType.NORMAL] * (count - 1) + [gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*bytes_, "ab", *words, "<|end|>"])
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(count - 1)
    writer.add_bos_token_id(count - 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def bytes_per_token(name: str, format: str) -> int:
    """What a token's forward reads of a file: all matrices, but of embeddings that are not the
    output's too one row, and of experts those that it takes.
    """
    shape, total = SHAPES[name], 0.0
    all_experts, taken = shape.experts
    for part, size in matrices(shape):
        if part == "token_embd" and not shape.tied:
            continue
        block, num_bytes = gguf.GGML_QUANT_SIZES[kind_of(shape, part, size[-1], format)]
        share = taken / all_experts if part.endswith("_exps") else 1.0
        total += share * float(np.prod(size)) / block * num_bytes
    return int(total)


def write_random_head(name: str, target: TargetConfig, folder: Path) -> None:
    """A head of a target of that shape, in bfloat16. Its logits are as wide as a trained head's."""
    H, W = target.hidden_size, SHAPES[name].draft_vocabulary
    config = HeadConfig.for_target(
        target, HeadOptions(draft_vocab_size=W, fc_norm=False, norm_output=False)
    )
    q, kv = (
        count * config.head_dim
        for count in (config.num_attention_heads, config.num_key_value_heads)
    )
    inner = config.intermediate_size
    sizes = {"q": (q, 2 * H), "k": (kv, 2 * H), "v": (kv, 2 * H), "o": (H, q)}
    sizes = {f"self_attn.{part}_proj": size for part, size in sizes.items()}
    sizes |= {f"mlp.{part}_proj": (inner, H) for part in ("gate", "up")}
    sizes |= {"mlp.down_proj": (H, inner)}
    sizes = {f"midlayer.{part}": size for part, size in sizes.items()}
    sizes |= {"fc": (H, 3 * H), "lm_head": (W, H)}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{part}.weight": (torch.randn(size, generator=generator) * DEVIATION).bfloat16()
        for part, size in sizes.items()
    }
    norms = [f"midlayer.{part}" for part in ("input_layernorm", "hidden_norm")]
    norms += ["midlayer.post_attention_layernorm", "norm"]
    tensors |= {f"{part}.weight": torch.ones(H).bfloat16() for part in norms}
    t2d = torch.zeros(target.vocab_size, dtype=torch.bool)
    t2d[:W] = True
    tensors |= {"d2t": torch.zeros(W, dtype=torch.int64), "t2d": t2d}
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in write_head(config, tensors, "eyas").items():
        (folder / file).write_bytes(data)
