"""A run's state, and its checkpoint: one file, whole or not at all, from which the run goes on to
the same weights.

Knows the head, the optimizer and the counters. Does not know batches: which come next follows from
the number of steps done.

The best head so far is part of the file: two files could be of two different moments.
"""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from eyas.artifact import Artifact
from eyas.model.head import Head
from eyas.train.stopping import Drift, Patience

CHECKPOINT, METRICS = "checkpoint.pt", "metrics.jsonl"


@dataclass(slots=True)
class Run:
    """What training changes: the head, the optimizer's state, the number of steps done, and what
    stopping asks.

    best: the weights of the best measured head, on the CPU; None before a measurement. metrics: a
    row a step, on the first rank; the others' begin where they resumed.
    """

    head: Head
    optimizer: torch.optim.AdamW
    step: int = 0
    patience: Patience = field(default_factory=Patience)
    drift: Drift = field(default_factory=Drift)
    best: dict[str, Tensor] | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)

    def keep_best(self) -> None:
        """Remember the weights as they are."""
        self.best = {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in self.head.state_dict().items()
        }


def pack(run: Run) -> bytes:
    """The state but for the metrics."""
    stream = io.BytesIO()
    state = {
        "step": run.step,
        "head": run.head.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "patience": asdict(run.patience),
        "drift": asdict(run.drift),
        "best": run.best,
    }
    torch.save(state, stream)
    return stream.getvalue()


def unpack(run: Run, data: bytes) -> None:
    """Take a packed state over, in place; the weights stay on their device."""
    state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    run.head.load_state_dict(state["head"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.step, run.best = state["step"], state["best"]
    run.patience, run.drift = Patience(**state["patience"]), Drift(**state["drift"])


def save(run: Run, output: Artifact) -> None:
    """Metrics first: a checkpoint never lies beside fewer rows than it has steps."""
    output.write_jsonl(METRICS, run.metrics)
    output.write(CHECKPOINT, pack(run))


def resume(run: Run, output: Artifact) -> None:
    """Go on from the folder's checkpoint, if there is one."""
    if not output.exists(CHECKPOINT):
        return
    unpack(run, output.read(CHECKPOINT))
    run.metrics = [row for row in output.read_jsonl(METRICS) if row["step"] <= run.step]
