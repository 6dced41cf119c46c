"""Compiles the kernels of triton_attention to machine code of an A100 and prints their names. Needs
no GPU.

A program of its own: in a process that interprets Triton, nothing can be compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from eyas.model.triton_attention import _add_parts, _attend

TARGET = GPUTarget("cuda", 80, 32)
INT64 = ("tile_first", "tile_stop", "order", "request_M", "prefix_len_M", "seen_M", "position_M")


def compile_kernel(
    kernel, pointers: dict[str, str], constants: dict[str, object], num_warps: int
) -> None:
    types = (
        pointers
        | dict.fromkeys(INT64, "*i64")
        | {"page_table": "*i32", "scale": "fp32"}
        | dict.fromkeys(constants, "constexpr")
    )
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "i32") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    compiled = triton.compile(
        source,
        target=TARGET,
        options={"num_warps": num_warps, "num_stages": 2, "enable_fp_fusion": True},
    )
    assert len(compiled.asm["cubin"]) > 0
    print(kernel.__name__)


def main() -> None:
    sizes = {"GROUP": 5, "ROWS": 3, "D": 96, "PAGE": 16, "BLOCK_M": 16, "BLOCK_D": 128}
    halves = {"q": "*bf16", "kv": "*bf16", "parts": "*bf16", "weights": "*fp32"}
    whole = sizes | {"S": 1, "WINDOW": 0, "BLOCK_N": 64, "DOT": tl.bfloat16}
    compile_kernel(_attend, halves, whole, num_warps=4)
    floats = dict.fromkeys(halves, "*fp32")
    split = sizes | {"S": 3, "WINDOW": 512, "BLOCK_N": 32, "DOT": tl.float32}
    compile_kernel(_attend, floats, split, num_warps=8)
    parts = {"parts": "*fp32", "weights": "*fp32", "mixed": "*bf16"}
    compile_kernel(_add_parts, parts, {"D": 96, "S": 3, "BLOCK_S": 4, "BLOCK_D": 128}, num_warps=1)


if __name__ == "__main__":
    main()
