"""The engine on held-out prompts, without a server: what it emits and how many drafts it accepts.

Knows engines and requests. Does not know what the figures are of, nor time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request
from eyas.log import Track
from eyas.model.checkpoint import read_head
from eyas.model.target import Target
from eyas.tau import RoundCounts


class ModelsConfig(BaseModel):
    """How target and head run: as they will be served. threads None: torch's own choice."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    threads: int | None = Field(None, ge=1)
    max_batch: int = Field(16, ge=1)
    max_length: int = Field(1024, ge=2)


@dataclass(frozen=True, slots=True)
class Models:
    """A target and its head, loaded once for engines of any speculation."""

    target: Target
    draft: Draft
    folder: str
    config: ModelsConfig
    t2d_V: Tensor  # bool: in the draft vocabulary

    @classmethod
    def load(cls, folder: str, head: str | Path, config: ModelsConfig) -> Models:
        """Raises MissingInputError, CorruptError, and MismatchError for a head of another target."""
        target = Target.load(folder, config.dtype, config.device)
        shape, tensors = read_head(head, target.config)
        return cls(target, Draft(shape, tensors, target), folder, config, tensors["t2d"])

    def engine(
        self, speculation: str, kind: type[Engine] = Engine, max_batch: int | None = None
    ) -> Engine:
        """An engine of its own, with an empty cache. max_batch None: the config's."""
        config = EngineConfig(
            speculation=speculation,
            max_batch=max_batch or self.config.max_batch,
            max_length=self.config.max_length,
        )
        return kind(self.target, self.draft, config, self.folder)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many of torch's threads, and the ones before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class Decoded:
    """One answer: its tokens, and the drafts accepted in each of its speculative rounds, in order."""

    token_ids: list[int]
    accepted: list[int]

    def tally(self, num_draft_steps: int) -> RoundCounts:
        """Its rounds counted."""
        tally = RoundCounts(num_draft_steps)
        tally.add_rounds(self.accepted)
        return tally


def stretch(track: Track, start: int, end: int) -> Track:
    """A Track for a part of the work that begins when `start` of `end` are done."""

    def moved(done: int, total: int | None = None, note: str = "") -> None:
        track(start + done, end, note)

    return moved


def decode(engine: Engine, requests: Sequence[Request], track: Track) -> list[Decoded]:
    """All answers, in the order of the requests; `track` counts those that are done."""
    answers = {request.id: Decoded([], []) for request in requests}
    for request in requests:
        engine.add(request)
    done = 0
    while engine.has_work:
        for update in engine.step():
            answer = answers[update.request_id]
            answer.token_ids.extend(update.token_ids)
            if update.num_accepted_drafts is not None:
                answer.accepted.append(update.num_accepted_drafts)
            if update.finish_reason is not None:
                done += 1
                track(done, len(requests))
    return list(answers.values())
