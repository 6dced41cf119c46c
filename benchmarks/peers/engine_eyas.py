"""eyas as a worker of the peers benchmark, through Engine.load, add and step."""

from __future__ import annotations

import time
from typing import Any

import torch
from wire import Decoded, serve

from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams


class Eyas:
    """One engine; a round is an update that says how many drafts it accepted, or a plain round's
    single token.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self.speculates = settings.get("speculation", "off") != "off"
        config = EngineConfig(
            max_batch=1,
            max_length=settings["max_length"],
            speculation=settings.get("speculation", "off"),
        )
        head = settings["head_eyas"] if self.speculates else None
        self.engine = Engine.load(settings["target"], head, settings["precision"], config)

    def decode(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> Decoded:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
        self.engine.add(Request("0", tuple(prompt), params, speculation=self.speculates))
        tokens: list[int] = []
        first = last = 0.0
        rounds = 0
        while self.engine.has_work:
            for update in self.engine.step():
                last = time.perf_counter()
                rounds += bool(tokens) and bool(update.token_ids)
                first = first if tokens else last
                tokens += update.token_ids
        return Decoded(tokens, last - first, rounds)


if __name__ == "__main__":
    serve(Eyas)
