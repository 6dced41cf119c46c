"""Tree attention over the paged cache: time and error of the kernel, of the torch path and of one
dense-mask attention.

    python benchmarks/attention.py [--quick]

Methods, on the same rows: `triton` (the kernel, on CUDA), `torch` (gather, then
scaled_dot_product_attention), and `dense`: scaled_dot_product_attention alone, keys already
gathered and the mask already made, which is the floor of doing it without a kernel of one's own.
Planning, once a forward, is timed with the first layer after it. Errors are the largest against the
float64 definition. Where one call's keys fit the GPU's L2 cache, they are read from there: the rate
in GB/s then says little. Without a GPU only `torch` and `dense` run, at a small size. The last line
of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from eyas.model.attention import TorchPlan, attention_plan, tree_attention, tree_attention_reference
from eyas.model.rows import Rows, prompt_rows, rows_of

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """B requests of `prefix` tokens, each with N rows: a random tree, or a chunk of its prompt."""

    B: int
    prefix: int
    N: int
    tree: bool = True

    @property
    def name(self) -> str:
        return (
            f"{self.B} x {self.N} {'nodes' if self.tree else 'prompt tokens'} behind {self.prefix}"
        )


def rows_of_case(case: Case, device: str) -> Rows:
    rng = np.random.default_rng(0)
    P = -(-(case.prefix + case.N) // PAGE_SIZE)
    page_table = rng.permutation(case.B * P).astype(np.int32).reshape(case.B, P)
    if not case.tree:
        return prompt_rows(
            [[0] * case.N] * case.B, [case.prefix] * case.B, page_table, PAGE_SIZE, device
        )
    seen = np.zeros((case.B, case.N), dtype=np.uint64)
    for b in range(case.B):
        for node in range(case.N):
            parent = seen[b, rng.integers(0, node)] if node else np.uint64(0)
            seen[b, node] = parent | np.uint64(1 << node)
    M = case.B * case.N
    unused, prefix_len = np.zeros(M, dtype=np.int64), np.full(M, case.prefix, dtype=np.int64)
    request = np.repeat(np.arange(case.B, dtype=np.int64), case.N)
    return rows_of(
        (unused, request, unused, unused, prefix_len, seen.view(np.int64).ravel()),
        page_table,
        device,
    )


def dense_attention(
    q: torch.Tensor, kv: torch.Tensor, rows: Rows, case: Case
) -> Callable[[], torch.Tensor]:
    """scaled_dot_product_attention over keys and mask made beforehand, once each: heads of a group
    side by side.
    """
    (_, Hq, D), Hk = q.shape, kv.shape[2]
    (bucket,) = TorchPlan.of(rows, PAGE_SIZE).buckets
    C, group = bucket.mask.shape[-1], Hq // Hk
    k, v = (
        part.contiguous()
        for part in kv[bucket.slots].view(case.B, C, 2, Hk, D).permute(2, 0, 3, 1, 4)
    )
    wide_q = (
        q.view(case.B, case.N, Hk, group, D)
        .permute(0, 2, 3, 1, 4)
        .reshape(case.B, Hk, group * case.N, D)
    )
    mask = torch.zeros(bucket.mask.shape, dtype=q.dtype, device=q.device).masked_fill_(
        ~bucket.mask, -torch.inf
    )
    mask = mask.repeat(1, 1, group, 1)

    def attend() -> torch.Tensor:
        mixed = F.scaled_dot_product_attention(wide_q, k, v, attn_mask=mask)
        return mixed.view(case.B, Hk, group, case.N, D).permute(0, 3, 1, 2, 4).reshape(-1, Hq, D)

    return attend


def median_ms(call: Callable[[], object], device: str, repeats: int) -> float:
    """The median over calls; on CUDA between events, where the host counts only if launching
    outlasts running.
    """
    for _ in range(3):
        call()
    if device == "cpu":
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e3)
        return statistics.median(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def measured(
    case: Case, heads: tuple[int, int, int], dtype: torch.dtype, device: str, repeats: int
) -> dict[str, object]:
    """heads: (Hq, Hk, D)."""
    Hq, Hk, D = heads
    rows = rows_of_case(case, device)
    q = torch.randn(len(rows), Hq, D, device=device).to(dtype)
    kv = torch.randn(rows.page_table.numel() * PAGE_SIZE, 2, Hk, D, device=device).to(dtype)
    plans = {"torch": TorchPlan.of(rows, PAGE_SIZE)}
    device_plan = attention_plan(rows, PAGE_SIZE)
    if not isinstance(device_plan, TorchPlan):
        plans = {"triton": device_plan, **plans}
    calls: dict[str, Callable[[], torch.Tensor]] = {
        name: (lambda plan=plan: tree_attention(q, kv, plan)) for name, plan in plans.items()
    }
    calls["dense"] = dense_attention(q, kv, rows, case)
    # The definition goes row by row: a few rows of each request tell enough.
    some = torch.arange(0, len(rows), max(1, len(rows) // 32), device=device)
    picked = (
        array[some]
        for array in (
            rows.token,
            rows.request,
            rows.position,
            rows.slot,
            rows.prefix_len,
            rows.seen,
        )
    )
    expected = tree_attention_reference(q[some], kv, Rows(*picked, rows.page_table), PAGE_SIZE)
    figures: dict[str, object] = {
        "case": case.name,
        "heads": heads,
        "dtype": str(dtype).removeprefix("torch."),
    }
    kv_bytes = case.B * (case.prefix + case.N) * 2 * Hk * D * q.element_size()
    for name, call in calls.items():
        ms = median_ms(call, device, repeats)
        error = (call()[some].double() - expected).abs().max().item()
        figures[name] = {
            "ms": round(ms, 4),
            "kv_gb_per_s": round(kv_bytes / ms / 1e6, 1),
            "max_error": float(f"{error:.2e}"),
        }
    planned = median_ms(
        lambda: tree_attention(q, kv, attention_plan(rows, PAGE_SIZE)), device, repeats
    )
    figures["plan_and_first_layer_ms"] = round(planned, 4)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer cases, fewer repeats")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        heads, dtypes, repeats = (
            (32, 8, 128),
            [torch.bfloat16, torch.float16],
            20 if args.quick else 100,
        )
        cases = [
            Case(1, 2048, 8),
            Case(8, 2048, 8),
            Case(64, 2048, 8),
            Case(64, 2048, 1),
            Case(1, 2048, 512, tree=False),
        ]
        cases += (
            []
            if args.quick
            else [Case(1, 2048, 1), Case(1, 16384, 8), Case(8, 8192, 13), Case(64, 512, 60)]
        )
    else:
        print(
            "no CUDA device: the kernel is not measured, the figures are the torch path's at a "
            "small size",
            file=sys.stderr,
        )
        heads, dtypes, repeats = (
            (8, 2, 64),
            [torch.float32, torch.bfloat16],
            5 if args.quick else 20,
        )
        cases = [Case(1, 256, 8), Case(4, 256, 8), Case(1, 128, 64, tree=False)]
    results = []
    for dtype in dtypes:
        for case in cases:
            results.append(measured(case, heads, dtype, device, repeats))
            print(json.dumps(results[-1]), file=sys.stderr)
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"cpu, {torch.get_num_threads()} threads"
    )
    print(
        json.dumps(
            {
                "device": name,
                "torch": torch.__version__,
                "gpu_measured": device == "cuda",
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
