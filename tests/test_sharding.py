"""Muon of weights split over ranks is torch's Muon of whole ones, to the bit; what a rank holds,
and what a step keeps, by the benchmark.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.tensor import DTensor

from eyas.train.muon import Muon
from eyas.train.ranks import Ranks
from tests.nursery import ROOT
from tests.object_stores import free_port
from tests.tiny_batch import waves

# wide, tall, square, and fewer rows than ranks
SHAPES = ((6, 20), (21, 5), (9, 9), (2, 7), (1, 3))
STEPS = 3


class Matrices(nn.Module):
    """Matrices whose gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.ParameterList(
            nn.Parameter(waves(*shape, seed=number)) for number, shape in enumerate(SHAPES)
        )

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        products = [(one * weight).sum() for one, weight in zip(given, self.of, strict=True)]
        return torch.stack(products).sum()


def stepped(module: Matrices, optimizer: torch.optim.Optimizer, num_ranks: int) -> None:
    """STEPS updates, of gradients that sum to the same on any number of ranks."""
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        given = [waves(*shape, seed=100 * step + at) for at, shape in enumerate(SHAPES)]
        module([one / num_ranks for one in given]).backward()
        optimizer.step()
        optimizer.zero_grad()


def rank_of_many(rank: int, size: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size)
    module = Matrices()
    Ranks(rank, size).shard(module)
    optimizer = Muon(module.parameters())
    stepped(module, optimizer, size)
    kept = [optimizer.state[weight]["momentum_buffer"] for weight in module.parameters()]
    assert all(isinstance(one, DTensor) for one in kept)
    rows = [[len(one.to_local()) for one in part] for part in (kept, [*module.parameters()])]
    whole = [[one.full_tensor() for one in part] for part in ([*module.parameters()], kept)]
    torch.save({"rows": rows, "whole": whole}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_split_matrices_step_as_whole_ones(tmp_path):
    size = 4
    module = Matrices()
    torchs = torch.optim.Muon(module.parameters(), weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    stepped(module, torchs, 1)
    port = free_port()
    torch.multiprocessing.spawn(rank_of_many, (size, port, str(tmp_path)), size)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for one in found:
        weights, momenta = one["whole"]
        for ours, theirs in zip(weights, module.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        for ours, weight in zip(momenta, module.parameters(), strict=True):
            assert torch.equal(ours, torchs.state[weight]["momentum_buffer"])
    for number, (rows, _) in enumerate(SHAPES):
        for part in range(2):  # momentum, weights: every row lies on one rank
            assert sum(one["rows"][part][number] for one in found) == rows
            assert max(one["rows"][part][number] for one in found) == -(-rows // size)


def test_whole_matrices_step_as_torchs():
    ours, theirs = Matrices(), Matrices()
    stepped(ours, Muon(ours.parameters()), 1)
    torchs = torch.optim.Muon(theirs.parameters(), weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    stepped(theirs, torchs, 1)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def test_a_rank_holds_its_share_and_a_step_little_of_each_token():
    command = [sys.executable, "benchmarks/sharding.py", "--quick", "--ranks", "1", "2"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    one, two = found["ranks"]
    for part in ("weights", "gradients", "optimizer"):
        assert two[part] == pytest.approx(one[part] / 2, rel=0.01), part
    assert two["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
    # after a step of Muon in bf16, see test_trainer_ranks.assert_like_one
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-3)
    kept = {(row["tokens"], row["recompute"]): row["kept"] for row in found["activations"]}
    config = found["shape"]
    # bf16 numbers of a slot and step: embedding, the layer's output, once more and sorted for the
    # loss, their gradient; queries, keys, values, their mixture; a tenth for tables of integers
    per_step = 2 * (6 * config["hidden"] + 2 * 64 * (config["heads"] + config["kv_heads"])) * 1.1
    first = 2 * (8 * config["hidden"])  # what step 0 keeps of every token
    assert kept[256, True] - kept[128, True] <= 128 * (7 * per_step + first)
    assert kept[256, True] < 0.3 * kept[256, False]
