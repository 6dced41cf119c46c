"""SGLang on a CPU as a worker of engines.py: its engine, with its scheduler and its draft
worker in processes of their own, as its server starts it.

Its innermost loops are torch's (sglang_cpu/sgl_kernel.py), so seconds say nothing about SGLang.
"""

from __future__ import annotations

import time
from typing import Any

import sglang
from wire import Decoded, serve


class SGLang:
    """One engine with a head; a round is a verification, of which it keeps count."""

    def __init__(self, settings: dict[str, Any]) -> None:
        steps = settings["num_draft_steps"]
        self.engine = sglang.Engine(
            model_path=settings["target"],
            dtype=settings["precision"],
            device="cpu",
            attention_backend="torch_native",
            # named one by one: as `attention_backend` SGLang would replace the kernels' one where
            # the real package is not there
            prefill_attention_backend="intel_amx",
            decode_attention_backend="intel_amx",
            disable_overlap_schedule=True,
            grammar_backend="none",
            disable_radix_cache=True,
            # a tree's drafts lie behind the request's tokens
            context_length=settings["max_length"] + 128,
            max_total_tokens=4 * settings["max_length"],
            max_running_requests=1,
            mem_fraction_static=0.3,
            speculative_algorithm="EAGLE3",
            speculative_draft_model_path=settings["head_sglang"],
            speculative_num_steps=steps,
            speculative_eagle_topk=settings.get("tree_topk", 1),
            speculative_num_draft_tokens=settings.get("num_verify_tokens", steps + 1),
        )

    def decode(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> Decoded:
        asked = time.perf_counter()
        params = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": ignore_eos}
        answer = self.engine.generate(input_ids=prompt, sampling_params=params)
        tokens: list[int] = answer["output_ids"]
        rounds = answer["meta_info"].get("spec_verify_ct", 0)
        return Decoded(tokens, time.perf_counter() - asked, rounds)


if __name__ == "__main__":
    serve(SGLang)
