"""What training changes, its checkpoint, and the rules that end a run early.

The checkpoint is one file of whole tensors for any number of ranks, best head included: two files
could be of two moments. metrics.jsonl is written row by row; a resume drops rows behind the
checkpoint, and half a row, and makes them again.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from eyas.artifact import Artifact
from eyas.operators.head import Head
from eyas.stores import storage_errors
from eyas.train.ranks import Ranks

CHECKPOINT, METRICS = "checkpoint.pt", "metrics.jsonl"
MEMORY = 0.9  # of the running mean of the loss
SETTLED = 20  # steps before a running mean is one
DIVERGED_AT = 3.0  # times the lowest running mean: a loss that recovers stays below
FLOOR = 0.05  # of the first loss: near zero, many times the lowest is still nothing
UPLOAD_S = 20.0  # between two versions of the metrics in an object store, which takes whole files


class StopConfig(BaseModel):
    """When tau is measured while training, and when a run stops before its last step.

    measurements: of tau in a run, at equal distances, after one at the start; 0 measures nothing.
    patience: stop after so many measurements in a row without a gain; null never stops. The head
    that is kept is the best measured, be it an existing head's start. max_steps: the rate's
    schedule ends there too; null does all passes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    measurements: int = Field(8, ge=0)
    patience: int | None = Field(None, ge=1)
    keep: bool = Field(False, description="write every measured head, into measured/STEP/")
    max_steps: int | None = Field(None, ge=1, description="updates of the weights, at most")


def measured_steps(num_steps: int, config: StopConfig) -> set[int]:
    """Numbers of steps done at which tau is measured, the last included."""
    count = min(config.measurements, num_steps)
    return {math.ceil(num_steps * (number + 1) / count) for number in range(count)}


@dataclass(slots=True)
class Patience:
    """best_step: the last step with the best tau (0 is the start). misses: measurements in a row
    without a gain. start: tau of the start, 0 before it is measured.
    """

    best: float = 0.0
    best_step: int = 0
    misses: int = 0
    start: float = 0.0

    def add(self, step: int, tau: float) -> bool:
        """Count a tau above 0. Is it the best, or equal to it?"""
        self.misses = 0 if tau > self.best else self.misses + 1
        if tau < self.best:
            return False
        self.best, self.best_step = tau, step
        return True

    def is_over(self, config: StopConfig) -> bool:
        return config.patience is not None and self.misses >= config.patience


@dataclass(slots=True)
class LossTrend:
    """The first loss, the running mean, and its lowest value once settled."""

    num_losses: int = 0
    first: float = 0.0
    mean: float = 0.0
    lowest: float = math.inf

    def add(self, loss: float) -> None:
        if self.num_losses == 0:
            self.first = self.mean = loss
        self.mean = MEMORY * self.mean + (1.0 - MEMORY) * loss
        self.num_losses += 1
        if self.num_losses >= SETTLED:
            self.lowest = min(self.lowest, self.mean)

    def has_diverged(self) -> bool:
        return self.mean > DIVERGED_AT * max(self.lowest, FLOOR * self.first)


@dataclass(slots=True)
class TrainingState:
    """dtype: of the computation. best: weights of the best measured head, on the first rank's CPU.
    metrics: a row a step; other ranks' begin where they resumed. broken: bool, a gradient was not
    finite: nothing is updated since.
    """

    head: Head
    optimizers: list[torch.optim.Optimizer]
    dtype: str
    step: int = 0
    patience: Patience = field(default_factory=Patience)
    trend: LossTrend = field(default_factory=LossTrend)
    best: dict[str, Tensor] | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    broken: Tensor | bool = False
    _uploaded: float = 0.0  # when, by time.monotonic

    def add_row(self, row: dict[str, Any], output: Artifact, ranks: Ranks) -> None:
        """Append a step's row of metrics. All ranks call it, the first one writes."""
        self.metrics.append(row)
        with ranks.raised_on_all():
            path = output.local_path(METRICS)
            if not ranks.is_first:
                return
            if path is not None:
                line = json.dumps(row, ensure_ascii=False) + "\n"
                with storage_errors(output.url), open(path, "ab", buffering=0) as file:
                    file.write(line.encode())
            elif time.monotonic() - self._uploaded >= UPLOAD_S:
                output.write_jsonl(METRICS, self.metrics)
                self._uploaded = time.monotonic()

    def weights(self, of: StateDictOptions | None = None) -> dict[str, Tensor]:
        """The head's whole float32 weights. All ranks call it."""
        options = of or StateDictOptions(full_state_dict=True)
        return cast("dict[str, Tensor]", get_model_state_dict(self.head, options=options))

    def keep_best(self) -> None:
        """All ranks call it."""
        self.best = {name: tensor.clone() for name, tensor in self.weights(_WHOLE).items()}

    def restore_best(self, ranks: Ranks) -> None:
        """All ranks call it."""
        best = cast("dict[str, Any]", self.best)
        set_model_state_dict(self.head, best, options=_given_by_first(ranks))

    def save(self, output: Artifact, ranks: Ranks) -> None:
        """All ranks call it, the first one writes; metrics first: a checkpoint never has more steps
        than rows.
        """
        content = {
            "head": self.weights(_WHOLE),
            "optimizer": get_optimizer_state_dict(self.head, self.optimizers, options=_WHOLE),
            "best": self.best,
            "dtype": self.dtype,
            "step": self.step,
            "patience": asdict(self.patience),
            "trend": asdict(self.trend),
        }
        with ranks.raised_on_all():
            if ranks.is_first:
                stream = io.BytesIO()
                torch.save(content, stream)
                output.write_jsonl(METRICS, self.metrics)
                output.write(CHECKPOINT, stream.getvalue())

    def resume(self, content: dict[str, Any], output: Artifact, ranks: Ranks) -> None:
        """Continue from the `checkpoint`, if any. All ranks call it."""
        names = ("step", "patience", "trend") if content else ()
        counters = ranks.broadcast_object(lambda: {name: content[name] for name in names})
        if not counters:
            if ranks.is_first:
                output.delete(METRICS)
            return
        options = _given_by_first(ranks)
        set_model_state_dict(self.head, content.get("head", {}), options=options)
        state = content.get("optimizer", {})
        set_optimizer_state_dict(self.head, self.optimizers, state, options=options)
        self.step, self.best = counters["step"], content.get("best")
        self.patience = Patience(**counters["patience"])
        self.trend = LossTrend(**counters["trend"])
        if self.patience.best and self.best is None:
            self.best = {}  # the first rank has them
        if ranks.is_first:
            lines = itertools.islice(output.read(METRICS).splitlines(), self.step)
            self.metrics = list(map(json.loads, lines))
            output.write_jsonl(METRICS, self.metrics)


def checkpoint(output: Artifact, ranks: Ranks) -> dict[str, Any]:
    """What `TrainingState.save` wrote; empty without it, and on other ranks."""
    content: dict[str, Any] = {}
    with ranks.raised_on_all():
        if ranks.is_first and output.exists(CHECKPOINT):
            stream = io.BytesIO(output.read(CHECKPOINT))
            content = torch.load(stream, map_location="cpu", weights_only=True)
    return content


# Whole tensors on the CPU of the first rank; of other ranks nothing.
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def _given_by_first(ranks: Ranks) -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=ranks.size > 1)
