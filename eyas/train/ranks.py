"""The processes of one run, as torchrun starts them: what is summed over all of them, and how all
stop when one does.

Knows processes and tensors. Does not know a head, a loss or a file.

Each rank does its own share inside `together`, and sums stand between the shares:

    rank 0   together(read) -> total -> together(backward) -> add_up -> ...
    rank 1   together(read) -> total -> together(backward) -> add_up -> ...
                     ^ an error here is told to all before anybody waits for a sum that never comes

Gradients are summed in one buffer of fixed layout, not by torch's DistributedDataParallel: that one
sorts its buckets anew after the first step, so from three ranks on a resumed run would add in
another order than one that was never cut.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from eyas.errors import EyasError

Made = TypeVar("Made")
SPREAD_BYTES = 256 << 20  # sent at a time


class Ranks:
    """This process's place among those of a run; of a run of one process, the one place there is."""

    def __init__(self, rank: int = 0, size: int = 1, device: str = "cpu") -> None:
        self.rank, self.size, self.device = rank, size, device

    @property
    def is_first(self) -> bool:
        """Is it the one rank that writes?"""
        return self.rank == 0

    def share(self, batches: Sequence[Made]) -> Sequence[Made]:
        """This rank's among the batches of a step: every size-th, so that which batches a step has
        depends on no number of ranks.
        """
        return batches[self.rank :: self.size]

    def together(self, work: Callable[[], Made]) -> Made:
        """What `work` returns here, once it has returned on every rank. What it raises on one rank
        stops all.

        That rank raises its own error; the others raise an EyasError that names it. `work` must not
        wait for other ranks.
        """
        if self.size == 1:
            return work()
        try:
            made, error = work(), None
        except Exception as raised:  # told to the others, and raised below
            error = raised
        if self.total([float(error is not None)])[0]:
            said = self.gathered(_described(error))
            if error is not None:
                raise error
            rank, (what, hint) = next(
                (rank, said) for rank, said in enumerate(said) if said is not None
            )
            raise EyasError(f"stopped, because rank {rank} failed: {what}", hint)
        return made

    def first(self, work: Callable[[], Made]) -> Made:
        """What `work` returns on the first rank, which alone does it; what it raises there stops
        all.
        """
        if self.size == 1:
            return work()
        made = self.together(lambda: pickle.dumps(work()) if self.is_first else b"")
        here: Made = pickle.loads(self._spread(made))  # bytes of our own first rank
        return here

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sums over all ranks, in float64: counts are exact. The same on every rank."""
        if self.size == 1:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        with _somebody_may_be_gone():
            dist.all_reduce(sums)
        return [float(number) for number in sums]

    def gathered(self, value: Made) -> list[Made]:
        """The values of all ranks, in their order."""
        if self.size == 1:
            return [value]
        values: list[Made] = [value] * self.size
        with _somebody_may_be_gone():
            dist.all_gather_object(values, value)
        return values

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype by their sums over all ranks, in place."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        with _somebody_may_be_gone():
            dist.all_reduce(flat)
        for tensor, summed in zip(
            tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.copy_(summed.view_as(tensor))

    def _spread(self, data: bytes) -> bytes:
        """The first rank's bytes on every rank."""
        (size,) = self.total([float(len(data))])
        whole = torch.empty(int(size), dtype=torch.uint8)
        if self.is_first:
            whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with _somebody_may_be_gone():
            for piece in torch.split(whole, SPREAD_BYTES):
                dist.broadcast(piece, 0)
        return whole.numpy().tobytes()


@contextmanager
def joined() -> Iterator[Ranks]:
    """This process's rank, by the environment that torchrun sets; without it, a run of one process.

    Each rank has a GPU of its own where there are any. Raises EyasError when there are fewer GPUs
    than ranks on a machine.
    """
    size, local = world_size(), int(os.environ.get("LOCAL_RANK", "0"))
    device = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        if local >= torch.cuda.device_count():
            raise EyasError(
                f"rank {local} of this machine has no GPU: there are {torch.cuda.device_count()}",
                "start as many processes as there are GPUs: torchrun --nproc-per-node",
            )
        torch.cuda.set_device(device)
    if size == 1:
        yield Ranks(device=device)
        return
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def world_size() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Is this the process that writes and reports? Known before ranks are joined."""
    return int(os.environ.get("RANK", "0")) == 0


def _described(error: Exception | None) -> tuple[str, str] | None:
    """What and hint of an error, for other processes."""
    if error is None:
        return None
    return (
        (error.what, error.hint)
        if isinstance(error, EyasError)
        else (f"{type(error).__name__}: {error}", "")
    )


@contextmanager
def _somebody_may_be_gone() -> Iterator[None]:
    """A sum that cannot be finished, since a process was killed, as an error that says so."""
    try:
        yield
    except RuntimeError as error:
        raise EyasError(
            "another rank of this run is gone",
            "its own message, if it had one, is above; start all ranks again: they go on from the "
            "last checkpoint",
        ) from error
