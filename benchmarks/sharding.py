"""What a rank of a training run holds, by their number, and what a step keeps, by its tokens.

    python benchmarks/sharding.py [--quick] [--ranks 1 2 4] [--hidden 512] [--tokens 1024 2048 4096]

Random weights and features. Every run of ranks is processes of this machine, joined by gloo, as
torchrun would start them; what they hold is the same on GPUs.

ranks: bytes of weights, gradients and the optimizer's state that lie on a rank between steps (the
largest and the sum over ranks), the loss of each step, and how far it is from that of one process.
In a step a rank also holds the whole weights and gradients, which FSDP2 gathers and frees:
step_bytes.

activations: for one process, by the tokens of a batch, with and without objective.recompute: the
bytes that the loss keeps for its backward (kept), the most that a forward and backward have at a
time (peak, by torch's profiler: weights and features not counted), and seconds.

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from generate import free_port
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from train_step import LEARNING_RATE, sample, world

from eyas.bench.machine import machine
from eyas.model.batch import Batch
from eyas.train.loss import ObjectiveConfig
from eyas.train.ranks import Ranks
from eyas.train.state import TrainingState
from eyas.train.step import LossModule, optimizers_of, training_step

BATCHES, STEPS = 4, 3  # of a step, shared by the ranks; of a run


def local_bytes(tensors: list[Any]) -> int:
    """Bytes of what lies on this rank."""
    rows = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
    return sum(one.numel() * one.element_size() for one in rows)


def rank_of_many(rank: int, size: int, port: int, folder: str, args: argparse.Namespace) -> None:
    """STEPS steps of one rank; what it holds, as a file."""
    torch.set_num_threads(1)
    if size > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo", rank=rank, world_size=size)
    args.tokens = args.tokens[0]
    samples = [[sample(args, args.tokens, 1.0, number)] for number in range(BATCHES)]
    made = world(args, samples[0], "cpu")
    whole = sum(weight.numel() * 4 for weight in made.head.parameters())
    objective = LossModule(made.head, made.vocabulary, ObjectiveConfig(), args.dtype)
    ranks = Ranks(rank, size)
    ranks.shard(objective)
    state = TrainingState(made.head, optimizers_of(made.head))
    batches = [Batch.packed(one, args.tokens, "cpu") for one in ranks.share(samples)]
    losses = []
    gradients = 0

    def note(*_: Any) -> None:
        nonlocal gradients
        gradients = local_bytes([w.grad for w in made.head.parameters() if w.grad is not None])

    state.optimizers[0].register_step_pre_hook(note)
    for _ in range(STEPS):
        losses.append(training_step(state, objective, batches, ranks, LEARNING_RATE)["loss"])
    kept = [
        value
        for optimizer in state.optimizers
        for of_weight in optimizer.state.values()
        for value in of_weight.values()
        if isinstance(value, torch.Tensor)
    ]
    held = {
        "weights": local_bytes([*made.head.parameters()]),
        "gradients": gradients,
        "optimizer": local_bytes(kept),
        "losses": losses,
        "step_bytes": 2 * whole if size > 1 else 0,
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(held))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


def of_ranks(size: int, args: argparse.Namespace) -> dict[str, Any]:
    """A run of `size` processes."""
    with TemporaryDirectory() as folder:
        port = free_port()
        torch.multiprocessing.spawn(rank_of_many, (size, port, folder, args), size)
        held = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]
    parts = ("weights", "gradients", "optimizer")
    each = {part: [one[part] for one in held] for part in parts}
    return {
        "ranks": size,
        **{part: max(values) for part, values in each.items()},
        "on_a_rank": max(sum(of) for of in zip(*each.values(), strict=True)),
        "on_all_ranks": sum(map(sum, each.values())),
        "step_bytes": held[0]["step_bytes"],
        "losses": held[0]["losses"],
    }


class Living(TorchDispatchMode):
    """Remembers every storage that operators make within it."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        results = func(*args, **(kwargs or {}))
        for one in tree_leaves(results):
            if isinstance(one, torch.Tensor) and (at := id_of(one)) not in given:
                storage = one.untyped_storage()
                self._made[at] = StorageWeakRef(storage), storage.nbytes()
        return results

    @property
    def bytes(self) -> int:
        """Of those that are alive."""
        return sum(size for made, size in self._made.values() if not made.expired())


def id_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def kept_bytes(forward: Callable[[], Any]) -> int:
    """What a forward leaves behind, its result's graph included."""
    with Living() as living:
        result = forward()
        size = living.bytes
    del result
    return size


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most bytes that `work` has allocated at a time, beyond what there was."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        work()
    found = [one for one in profile.profiler.kineto_results.events() if one.name() == "[memory]"]
    now = most = 0
    for one in sorted(found, key=lambda one: one.start_ns()):
        now += one.nbytes()
        most = max(most, now)
    return most


def activations(tokens: int, recompute: bool, args: argparse.Namespace) -> dict[str, Any]:
    """One batch of so many tokens, all of them an answer's."""
    args = argparse.Namespace(**{**vars(args), "tokens": tokens})
    made = world(args, [sample(args, tokens, 1.0, 0)], "cpu")
    config = ObjectiveConfig(recompute=recompute)
    objective = LossModule(made.head, made.vocabulary, config, args.dtype)
    teacher = objective.teach(made.batch, 0.0)
    divisor_K = objective.divisors([made.batch], [teacher])

    def forward() -> Any:
        return objective(made.batch, teacher, divisor_K)

    def step() -> None:
        forward().loss.backward()

    step()
    begun = time.perf_counter()
    step()
    seconds = time.perf_counter() - begun
    return {
        "tokens": tokens,
        "recompute": recompute,
        "kept": kept_bytes(forward),
        "peak": peak_bytes(step),
        "seconds": round(seconds, 2),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small shapes")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", help="of a batch")
    parser.add_argument("--hidden", type=int, help="the other sizes go with it")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    args.hidden = args.hidden or (128 if args.quick else 512)
    args.tokens = args.tokens or ([64, 128, 256] if args.quick else [1024, 2048, 4096, 8192])
    # the proportions of Llama-3.3-70B and its published heads
    args.intermediate, args.head_dim = args.hidden * 7 // 2, 64
    args.heads, args.kv_heads = args.hidden // 64, max(1, args.hidden // 512)
    args.vocab, args.draft_vocab = args.hidden * 16, args.hidden * 4
    return args


def main() -> None:
    args = arguments()
    runs = []
    for size in args.ranks:
        runs.append(of_ranks(size, args))
        apart = [
            abs(one / two - 1)
            for one, two in zip(runs[-1]["losses"], runs[0]["losses"], strict=True)
        ]
        runs[-1]["losses_apart"] = max(apart)
        print(runs[-1], flush=True)
    rows = []
    for tokens in args.tokens:
        for recompute in (False, True):
            rows.append(activations(tokens, recompute, args))
            print(rows[-1], flush=True)
    names = ("hidden", "intermediate", "heads", "kv_heads", "vocab", "draft_vocab", "dtype")
    shape = {name: getattr(args, name) for name in names}
    print(json.dumps({"ranks": runs, "activations": rows, "shape": shape, "machine": machine()}))


if __name__ == "__main__":
    main()
