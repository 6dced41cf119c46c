"""Milliseconds of a forward of the native CPU path by number of rows, held against reading the
weights once.

    python benchmarks/step.py [--quick] [--shape smollm2|builtin|110m|1b] [--dtype
    bfloat16|float32|packed] [--threads 2] [--context 200]

Weights are random: time does not depend on their values, but for float32, whose weights are stored
as bfloat16 where that loses nothing (--wide: as full float32 numbers). packed: the target's
matrices in Q4_1 and its embeddings in Q8_0, as in SmolLM2's file; the draft stays bfloat16. `floor`
is the time to read as many bytes as the packed weights have. Times are the tenth percentile of
calls: what the code costs when nothing else wants the cores.
The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable

import gguf
import numpy as np
import torch

from eyas.gguf.blocks import BlockMatrix, Kind
from eyas.model.architecture import TargetConfig
from eyas.model.config import HeadConfig, HeadOptions, RopeConfig
from eyas.model.native import NativeTarget
from eyas.model.native_draft import NativeDraft
from eyas.model.packed import in_eight_bits
from eyas.model.rows import PagedCache, Roots, Rows, prompt_rows, rows_of, slots_of
from eyas.model.target import DTYPES

# hidden, intermediate, layers, query heads, key heads, head dimension, vocabulary, draft vocabulary
SHAPES = {
    "smollm2": (576, 1536, 30, 9, 3, 64, 49152, 8192),
    "builtin": (320, 864, 12, 5, 5, 64, 8000, 2048),
    "110m": (768, 2048, 12, 12, 12, 64, 32000, 8192),
    "1b": (2048, 8192, 16, 32, 8, 64, 128256, 32000),
}
ROWS = (1, 2, 4, 8, 12, 16, 32, 64)
PREFILL, PAGE_SIZE = 256, 16
TAPS = (1, 5, 8)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "packed"), default="bfloat16")
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--context", type=int, default=200)
    return parser.parse_args()


def milliseconds(call: Callable[[], object], seconds: float) -> float:
    """The tenth percentile of the calls that fit into so many seconds, five at least."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[len(times) // 10]


def configs(shape: str) -> tuple[TargetConfig, HeadConfig]:
    H, inner, L, Hq, Hk, D, V, W = SHAPES[shape]
    target = TargetConfig(
        family="llama",
        hidden_size=H,
        intermediate_size=inner,
        num_hidden_layers=L,
        num_attention_heads=Hq,
        num_key_value_heads=Hk,
        head_dim=D,
        vocab_size=V,
        rms_norm_eps=1e-5,
        max_position_embeddings=2048,
        rope=RopeConfig(),
        tie_word_embeddings=True,
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        eos_token_ids=(),
        dtype="bfloat16",
    )
    return target, HeadConfig.for_target(target, HeadOptions(draft_vocab_size=W))


def layer_tensors(
    H: int, X: int, inner: int, heads: tuple[int, int, int], random: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    """One layer's weights, X being the width of what q, k and v take."""
    Hq, Hk, D = heads
    sizes = {"q": (Hq * D, X), "k": (Hk * D, X), "v": (Hk * D, X), "o": (H, Hq * D)}
    tensors = {f"self_attn.{name}_proj.weight": random(*size) for name, size in sizes.items()}
    sizes = {"gate": (inner, H), "up": (inner, H), "down": (H, inner)}
    return tensors | {f"mlp.{name}_proj.weight": random(*size) for name, size in sizes.items()}


def block_matrix(tensor: torch.Tensor, kind: Kind) -> BlockMatrix | None:
    """A matrix in a format of ggml's; None for a norm."""
    if tensor.ndim < 2:
        return None
    return BlockMatrix(kind, gguf.quantize(tensor.float().numpy(), kind))


def decoders(
    args: argparse.Namespace,
) -> tuple[NativeTarget, NativeDraft, torch.dtype]:
    """A target whose layers have the same weights, each in a place of its own, and a draft."""
    H, inner, L, Hq, Hk, D, V, W = SHAPES[args.shape]
    dtype = DTYPES[args.dtype]
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        weight = torch.randn(size, generator=generator) * 0.02
        return weight if args.wide else weight.bfloat16()

    target, head = configs(args.shape)
    norm = torch.ones(H)
    layer = layer_tensors(H, H, inner, (Hq, Hk, D), random) | {
        f"{name}.weight": norm for name in ("input_layernorm", "post_attention_layernorm")
    }
    tensors = {
        f"model.layers.{i}.{name}": tensor for i in range(L) for name, tensor in layer.items()
    }
    tensors |= {"model.embed_tokens.weight": random(V, H), "model.norm.weight": norm}
    midlayer = layer_tensors(H, 2 * H, inner, (Hq, Hk, D), random)
    midlayer |= {
        f"{name}.weight": norm
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    }
    draft = {f"midlayer.{name}": tensor for name, tensor in midlayer.items()}
    draft |= {"fc.weight": random(H, 3 * H), "lm_head.weight": random(W, H), "norm.weight": norm}
    embed_tokens = tensors["model.embed_tokens.weight"]
    blocks = {}
    if args.dtype == "packed":
        packed = {name: block_matrix(tensor, Kind.Q4_1) for name, tensor in layer.items()}
        blocks = {
            f"model.layers.{i}.{name}": matrix
            for i in range(L)
            for name, matrix in packed.items()
            if matrix is not None
        }
        blocks["model.embed_tokens.weight"] = block_matrix(embed_tokens, Kind.Q8_0)
    eight_bits = in_eight_bits(draft) if dtype == torch.bfloat16 else None  # as the engine does
    return (
        NativeTarget(target, tensors, dtype, blocks),
        NativeDraft(head, draft, embed_tokens, embed_tokens, dtype, eight_bits),
        dtype,
    )


def tree(M: int, context: int, page_table: np.ndarray, first_column: int = 0) -> Rows:
    """M nodes of a chain behind `context` columns."""
    column, request = context + np.arange(M), np.zeros(M, dtype=np.int64)
    seen = np.array([(1 << (i + 1)) - 1 for i in range(M)], dtype=np.uint64).view(np.int64)
    slot, prefix = slots_of(page_table, request, column, PAGE_SIZE), np.full(M, context)
    return rows_of(
        (7 + np.arange(M), request, column - first_column, slot, prefix, seen),
        page_table,
        "cpu",
        first_column,
    )


def floor_ms(num_bytes: int, seconds: float) -> float:
    """Of reading the bytes once, on `threads` (torch.set_num_threads)."""
    data = torch.ones(num_bytes // 8, dtype=torch.int64)
    return milliseconds(data.sum, seconds)


def main() -> None:
    args = arguments()
    seconds = 0.1 if args.quick else 1.0
    torch.set_num_threads(args.threads)
    target, draft, dtype = decoders(args)
    config, _ = configs(args.shape)
    pages = (max(args.context, PREFILL) + 128) // PAGE_SIZE + 1
    page_table = np.arange(pages, dtype=np.int32)[None]
    cache = PagedCache(config.num_hidden_layers, pages, PAGE_SIZE, config.slot_width, dtype)
    draft_cache = PagedCache(1, pages, PAGE_SIZE, config.slot_width, dtype)
    figures: dict[str, float] = {}

    def report(name: str, call: Callable[[], object]) -> None:
        figures[name] = round(milliseconds(call, seconds), 4)
        print(f"{name:<24}{figures[name]:>10.3f} ms")

    print(
        f"{args.shape} {args.dtype}: {target.num_bytes / 1e6:.1f} MB of weights, {args.threads} "
        f"threads, context {args.context}"
    )
    figures["floor"] = round(floor_ms(target.num_bytes, seconds), 4)
    print(
        f"{'floor':<24}{figures['floor']:>10.3f} ms   "
        f"{target.num_bytes / figures['floor'] / 1e6:.0f} GB/s"
    )
    for M in ROWS:
        rows = tree(M, args.context, page_table)
        report(f"target M={M}", lambda rows=rows: target.forward(rows, cache, TAPS))
    prompt = prompt_rows([list(range(5, 5 + PREFILL))], [0], page_table, PAGE_SIZE, "cpu")
    last = torch.tensor([PREFILL - 1])
    report(f"target prefill {PREFILL}", lambda: target.forward(prompt, cache, TAPS, last))

    figures["draft floor"] = round(floor_ms(draft.num_bytes, seconds), 4)
    print(f"{'draft floor':<24}{figures['draft floor']:>10.3f} ms   {draft.num_bytes / 1e6:.1f} MB")
    aux = torch.randn(4, 3 * config.hidden_size).to(dtype)
    rows = tree(4, args.context, page_table, first_column=1)
    report("draft extend M=4", lambda: draft.extend(rows, aux, draft_cache))
    h = draft.extend(rows, aux, draft_cache)
    one = tree(1, args.context, page_table, first_column=1)
    report("draft step M=1", lambda: draft.step(one, h[:1], draft_cache))
    report("draft proposals R=1 k=3", lambda: draft.proposals(h[:1], 3))
    roots = Roots([args.context], [args.context], [], page_table)
    for K, k in ((6, 1), (6, 3), (6, 8)):
        first = draft.proposals(h[:1], k)
        grow = functools.partial(
            draft.propose,
            roots,
            h[:1],
            first,
            draft_cache,
            (K, k, k),
            [0.0] * K,
        )
        report(f"draft propose K={K} k={k}", grow)
    facts = {
        "shape": args.shape,
        "dtype": args.dtype,
        "threads": args.threads,
        "context": args.context,
    }
    print(json.dumps({**facts, "megabytes": round(target.num_bytes / 1e6, 1), "ms": figures}))


if __name__ == "__main__":
    main()
