"""eyas as a worker of engines.py, through Engine.load, add and step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wire import Decoded, serve, timed

from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.model.threads import set_num_threads


class Eyas:
    def __init__(self, settings: dict[str, Any]) -> None:
        set_num_threads(settings["threads"])
        self.speculates = settings.get("speculation", "off") != "off"
        config = EngineConfig(
            max_batch=1,
            max_length=settings["max_length"],
            speculation=settings.get("speculation", "off"),
        )
        head = settings["head_eyas"] if self.speculates else None
        self.engine = Engine.load(settings["target"], head, settings["precision"], config)
        self.asked = 0

    def decode(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> Decoded:
        """Under a salt of its own: neither the prompt nor the answer of a pass before helps."""
        self.asked += 1
        name = f"{self.asked}"
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
        self.engine.add(Request(name, tuple(prompt), params, self.speculates, cache_salt=name))
        return timed(self._updates())

    def _updates(self) -> Iterator[list[int]]:
        while self.engine.has_work:
            for update in self.engine.step():
                yield list(update.token_ids)


if __name__ == "__main__":
    serve(Eyas)
