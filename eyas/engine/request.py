"""What goes into the engine and what comes out of it. Knows no tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from eyas.errors import InputError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn from the target's distribution.

    temperature 0 is greedy; top_k 0 and top_p 1 keep the whole vocabulary. With the same seed a request gives the same
    tokens, with and without speculation. Raises InputError for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 256
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 100):
            raise InputError(f"temperature {self.temperature} is out of range", "give a number from 0 (greedy) to 100")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p {self.top_p} is out of range", "give a number above 0, up to 1")
        if self.top_k < 0:
            raise InputError(f"top_k {self.top_k} is out of range", "give 0 (off) or a positive number")
        if self.max_tokens < 1:
            raise InputError(f"max_tokens {self.max_tokens} is out of range", "give 1 or more")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to go on from. `speculation=False` decodes it plainly: the same tokens, one per round."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    speculation: bool = True


@dataclass(frozen=True, slots=True)
class Update:
    """What one step gave one request. num_accepted_drafts is None for a prefill or a plain round."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    num_accepted_drafts: int | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request. token_ids includes the end token when finish_reason is "stop".

    accept_hist[a] counts the speculative rounds that accepted a drafts: tau = sum((a + 1) * n) / sum(n).
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason
    accept_hist: list[int]
