"""vLLM on CPU as a worker of engines.py: its engine in this process, stepped by hand and
timed from outside.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch
from vllm import LLM, SamplingParams, TokensPrompt
from wire import Decoded, serve, timed


class Vllm:
    """One engine; a round is a step that gave tokens."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        speculative = {
            "method": "eagle3",
            "model": settings["head_vllm"],
            "num_speculative_tokens": settings["num_draft_steps"],
        }
        self.engine = LLM(
            settings["target"],
            dtype=settings["precision"],
            max_model_len=settings["max_length"],
            max_num_seqs=1,
            max_num_batched_tokens=settings["max_length"],
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            enforce_eager=True,
            speculative_config=speculative,
        ).llm_engine
        torch.set_num_threads(settings["threads"])
        self.asked = 0

    def decode(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> Decoded:
        self.asked += 1
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, detokenize=False
        )
        self.engine.add_request(str(self.asked), TokensPrompt(prompt_token_ids=prompt), params)
        return timed(self._updates())

    def _updates(self) -> Iterator[list[int]]:
        count = 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                now = list(output.outputs[0].token_ids)
                if len(now) > count:
                    yield now[count:]
                    count = len(now)


if __name__ == "__main__":
    serve(Vllm)
