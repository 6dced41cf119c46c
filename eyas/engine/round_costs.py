"""What the parts of a round cost with these models on this machine: the work that `costs` times. Knows the rounds' caches.

Called before anything runs: it writes into pages that nobody holds yet.
"""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import torch

from eyas.engine.costs import CostIdentity, CostTable, kept_or_measured, measure
from eyas.engine.draft import Growth
from eyas.engine.rounds import Rounds, one_torch_thread
from eyas.model.rows import Rows, rows_of

POINTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
TYPICAL_LENGTH = 200  # columns that a row sees


def round_costs(rounds: Rounds) -> CostTable:
    """The cost table of these rounds: kept from an earlier start on the same machine, or measured now, in about two seconds."""
    assert rounds.draft is not None
    identity = CostIdentity(
        target=rounds.target.fingerprint,
        head=rounds.draft.fingerprint,
        dtype=str(rounds.target.dtype),
        device=device_name(rounds.target.device),
        threads=torch.get_num_threads(),
        torch_version=torch.__version__,
        native=rounds.target.is_native,
    )
    table, _ = kept_or_measured(identity, lambda: _measured(rounds))
    return table


def device_name(device: str) -> str:
    """The processor as the system names it."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


@torch.inference_mode()
def _measured(rounds: Rounds) -> CostTable:
    target, draft, size = rounds.target, rounds.draft, rounds.cache.page_size
    assert draft is not None
    length = max(2, min(TYPICAL_LENGTH, rounds.cache.num_pages * size // 2))
    num_slots, k = rounds.cache.num_pages * size, rounds.growth.tree_topk
    one_step = Growth(num_draft_steps=2, tree_topk=k)
    table = np.arange(rounds.cache.num_pages, dtype=np.int32)[None]

    def rows(M: int, first_column: int) -> Rows:
        column = length + np.arange(M, dtype=np.int64) % (num_slots - length)
        nothing = np.zeros(M, dtype=np.int64)
        prefix = np.full(M, length, dtype=np.int64)
        return rows_of((nothing, nothing, prefix, column, prefix, nothing), table, target.device, first_column)

    def forward(M: int) -> None:
        target.forward(rows(M, 0), rounds.cache, draft.config.taps).best.tolist()

    def extend(M: int) -> None:
        features = torch.zeros(M, 3 * target.config.hidden_size, dtype=target.dtype, device=target.device)
        h = draft.extend(rows(M, 1), features, rounds.draft_cache)
        draft.proposals(h[-1:], k)[0].tolist()

    def step(R: int) -> None:
        B = max(1, R // k)
        h = torch.zeros(B, draft.config.hidden_size, dtype=target.dtype, device=target.device)
        first = draft.proposals(h, k)
        lens = [min(length, num_slots - k - 2)] * B
        draft.propose(lens, h, first, np.repeat(table, B, axis=0), rounds.draft_cache, one_step, [0.0])

    with one_torch_thread(target.is_native):
        return measure(forward, step, extend, POINTS)
