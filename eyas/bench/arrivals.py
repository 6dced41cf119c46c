"""When requests arrive in an open loop, drawn by seed. Pure functions of numbers: knows no clock
and no request.

constant   |  |  |  |  |  |        gaps of 1 / rate
poisson    | |    |  ||   |        exponential gaps: independent users
gamma      |||        ||    |||    gamma gaps of shape `burstiness`; below 1 they come in bursts, 1 is poisson
"""

from __future__ import annotations

from itertools import accumulate
from random import Random
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Process = Literal["poisson", "gamma", "constant"]


class OpenLoop(BaseModel):
    """Requests that arrive at given rates (a second) whether others are answered or not."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rates: tuple[float, ...] = ()
    process: Process = "poisson"
    burstiness: float = Field(default=0.25, gt=0)  # of gamma alone


def arrival_times_s(loop: OpenLoop, rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the beginning at which each of `count` requests is sent; the first at 0. The
    mean gap is 1 / rate.
    """
    random = Random(f"{seed} {rate} {count}")
    gaps_s = (_gap_s(loop, rate, random) for _ in range(count - 1))
    return list(accumulate(gaps_s, initial=0.0))


def _gap_s(loop: OpenLoop, rate: float, random: Random) -> float:
    if loop.process == "constant":
        return 1 / rate
    shape = loop.burstiness if loop.process == "gamma" else 1.0
    return random.gammavariate(shape, 1 / (shape * rate))
