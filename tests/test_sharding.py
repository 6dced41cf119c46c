"""Muon of split weights is Muon of whole ones, to the bit; a step keeps little of each token; ranks
begin as one process does, on their share of the cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import train_step
from eyas.cores import cores
from eyas.operators.tensors import multiplies_bf16
from eyas.train.loss import ObjectiveConfig
from eyas.train.muon import Muon
from eyas.train.ranks import Ranks, threads_of_rank
from eyas.train.step import LossModule
from tests.object_stores import free_port
from tests.tiny_batch import waves

# wide, tall, square, fewer rows than ranks, and some of one shape, made orthogonal at once
SHAPES = ((6, 20), (21, 5), (9, 9), (2, 7), (1, 3), (6, 20), (20, 6))
STEPS = 3


class Matrices(nn.Module):
    """Their gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        self.of = nn.ParameterList(
            nn.Parameter(waves(*shape, seed=number)) for number, shape in enumerate(SHAPES)
        )

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        products = [(one * weight).sum() for one, weight in zip(given, self.of, strict=True)]
        return torch.stack(products).sum()


def stepped(module: Matrices, optimizer: torch.optim.Optimizer, num_ranks: int) -> None:
    """STEPS updates; gradients sum to the same on any number of ranks."""
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        given = [waves(*shape, seed=100 * step + at) for at, shape in enumerate(SHAPES)]
        module([one / num_ranks for one in given]).backward()
        optimizer.step()
        optimizer.zero_grad()


def forked(work: Callable[..., None], size: int, folder: Path) -> None:
    args = size, free_port(), str(folder)
    torch.multiprocessing.start_processes(work, args, size, start_method="fork")


def join(rank: int, size: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=size)


def rank_of_many(rank: int, size: int, port: int, folder: str) -> None:
    join(rank, size, port)
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
    plain = Muon(module.parameters())
    stepped(module, plain, 1)
    forked(rank_of_many, size, tmp_path)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for one in found:
        weights, momenta = one["whole"]
        for ours, theirs in zip(weights, module.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        for ours, weight in zip(momenta, module.parameters(), strict=True):
            assert torch.equal(ours, plain.state[weight]["momentum_buffer"])
    for number, (rows, _) in enumerate(SHAPES):
        for part in range(2):  # momentum, weights: every row lies on one rank
            assert sum(one["rows"][part][number] for one in found) == rows
            assert max(one["rows"][part][number] for one in found) == -(-rows // size)


def test_whole_matrices_step_as_torchs():
    ours, theirs = Matrices(), Matrices()
    stepped(ours, Muon(ours.parameters()), 1)
    torchs = torch.optim.Muon(theirs.parameters(), weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    stepped(theirs, torchs, 1)
    if multiplies_bf16("cpu"):
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    for one, other, begun in zip(ours.of, theirs.of, Matrices().of, strict=True):
        assert (one - other).norm() < 0.03 * (other - begun).norm()


class Living(TorchDispatchMode):
    """Remembers every storage that operators make within it."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {id_of(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        results = func(*args, **(kwargs or {}))
        for one in tree_leaves(results):
            if isinstance(one, torch.Tensor) and (at := id_of(one)) not in given:
                storage = one.untyped_storage()
                self._made[at] = StorageWeakRef(storage), storage.nbytes()
        return results

    @property
    def bytes(self) -> int:
        return sum(size for made, size in self._made.values() if not made.expired())


def id_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def kept_bytes(args: argparse.Namespace, tokens: int, recompute: bool) -> int:
    """What a forward keeps for its backward."""
    args.tokens = tokens
    made = train_step.world(args, [train_step.sample(args, tokens, 1.0, 0)], "cpu")
    module = LossModule(
        made.head, made.vocabulary, ObjectiveConfig(recompute=recompute), "bfloat16"
    )
    teacher = module.teach(module.planned(made.batch, 0))
    divisor_K = module.trained_slots([teacher])
    module(made.batch, teacher, divisor_K).loss.backward()  # what is made once
    with Living() as living:
        result = module(made.batch, teacher, divisor_K)
        size = living.bytes
    del result
    return size


def test_a_step_keeps_little_of_each_token():
    args = argparse.Namespace(hidden=128, intermediate=448, heads=2, kv_heads=1, head_dim=64)
    args.vocab, args.draft_vocab = 2048, 512
    kept = {tokens: kept_bytes(args, tokens, True) for tokens in (128, 256)}
    # bf16 numbers of a slot and step: embedding, the layer's output, once more and sorted for the
    # loss, their gradient; queries, keys, values, their mixture; a tenth for tables of integers
    per_step = 2 * (6 * args.hidden + 2 * 64 * (args.heads + args.kv_heads)) * 1.1
    first = 2 * (8 * args.hidden)  # what step 0 keeps of every token
    assert kept[256] - kept[128] <= 128 * (7 * per_step + first)
    assert kept[256] < 0.3 * kept_bytes(args, 256, False)


def test_ranks_share_the_cores_unless_their_number_is_stated(tmp_path, monkeypatch):
    """torchrun states 1 where its user stated nothing."""
    script = tmp_path / "ranks.py"
    script.write_text(
        "from eyas.train.ranks import joined, threads_of_rank\nimport torch\n"
        "with joined() as ranks:\n"
        "    print(ranks.all_gather((threads_of_rank(), torch.get_num_threads())))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    share = max(1, cores() // 2)
    env = {name: one for name, one in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([*command, script], env=env, capture_output=True, text=True, check=False)
    assert done.stdout.count(str([(share, share)] * 2)) == 2, done.stderr
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for stated, expected in (({}, share), ({"OMP_NUM_THREADS": "1"}, None)):
        with subprocess.Popen(["sleep", "60"], env={**env, **stated}) as launcher:
            monkeypatch.setattr(os, "getppid", lambda pid=launcher.pid: pid)
            # empty until the kernel has set up its stack
            while not Path(f"/proc/{launcher.pid}/environ").read_bytes():
                time.sleep(0.01)
            assert threads_of_rank() == expected
            launcher.kill()
