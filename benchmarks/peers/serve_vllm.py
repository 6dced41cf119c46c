"""vLLM's server on a CPU with simulated acceptance, which its CPU build lacks: the greedy part of
its rejection sampler. VLLM_PYTHON serve_vllm.py OPTIONS; its other processes import this file too.
"""

from __future__ import annotations

import runpy
from typing import Any

from vllm.utils import cpu_triton_utils

compiled = cpu_triton_utils._rejection_greedy_sample_kernel_impl


def simulated(
    kept_BK: Any, ends_B: Any, drafts_N: Any, argmax_N: Any, bonus_B: Any, *others: Any
) -> None:
    """Accept each draft with the probability of its position, whatever the target says. Letters: B
    requests, K tokens a round, N drafts of all requests.
    """
    *_, uniform_N, rates_K, is_simulated = others
    if not is_simulated:
        compiled(kept_BK, ends_B, drafts_N, argmax_N, bonus_B, *others)
        return
    first = 0
    for b, end in enumerate(ends_B.tolist()):
        num = int((uniform_N[first:end] < rates_K[: end - first]).cumprod(0).sum())
        kept_BK[b, :num] = drafts_N[first : first + num]
        rejected = num < end - first
        kept_BK[b, num] = argmax_N[first + num] if rejected else bonus_B.flatten()[b]
        first = end


cpu_triton_utils._rejection_greedy_sample_kernel_impl = simulated

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
