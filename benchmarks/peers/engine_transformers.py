"""transformers as a worker of the peers benchmark: its own model and static cache, compiled, in a
loop without `generate`.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StaticCache
from wire import Decoded, serve


def with_cache(module: Any, cache: Any) -> dict[str, Any]:
    """Arguments of a forward of transformers that reads and extends a cache; before 5.24 it is
    called `past_key_values`.
    """
    names = inspect.signature(module.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache, "use_cache": True}


class Transformers:
    """One model; the prompt runs eagerly, the steps compiled."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        dtype = getattr(torch, settings["precision"])
        self.model = AutoModelForCausalLM.from_pretrained(settings["target"], dtype=dtype).eval()
        self.eos_token_id = settings["eos_token_id"]
        self.cache = StaticCache(config=self.model.config, max_cache_len=settings["max_length"])
        self.kept = with_cache(self.model, self.cache)
        self.step = torch.compile(self._step) if settings.get("compile", True) else self._step

    @torch.inference_mode()
    def decode(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> Decoded:
        self.cache.reset()
        T, asked = len(prompt), time.perf_counter()
        positions = torch.arange(T)[None]
        out = self.model(
            torch.tensor([prompt]), **self.kept, position_ids=positions, logits_to_keep=1
        )
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        tokens = [int(token)]
        started = time.perf_counter()
        while len(tokens) < max_tokens and (ignore_eos or tokens[-1] != self.eos_token_id):
            token = self.step(token, torch.tensor([[T + len(tokens) - 1]]))
            tokens.append(int(token))
        seconds = time.perf_counter() - started
        return Decoded(tokens, seconds, len(tokens) - 1, started - asked)

    def _step(self, token_11: torch.Tensor, position_11: torch.Tensor) -> torch.Tensor:
        logits = self.model(token_11, **self.kept, position_ids=position_11).logits
        return logits[:, -1].argmax(-1, keepdim=True)


if __name__ == "__main__":
    serve(Transformers)
