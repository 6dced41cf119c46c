"""The processes of a training run, as torchrun starts them: sums, errors, sharded weights.

torch's FSDP2 splits weights, gradients and optimizer state by a fixed layout, so a resumed run sums
in the same order. `raised_on_all` raises one rank's error on all. A rank that dies elsewhere ends
the others by the broken connection or by torchrun.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from eyas.cores import cores
from eyas.errors import EyasError
from eyas.model.threads import set_num_threads
from eyas.operators.ttt import refuse_no_compiler

T = TypeVar("T")
LAST_RESULT_S = 0.5
MOST_WAIT = timedelta(minutes=60)  # the first rank reads all tokens alone


class Ranks:
    """This process's place among those of a run; by default the only one."""

    def __init__(self, rank: int = 0, size: int = 1, device: str = "cpu") -> None:
        self.rank, self.size, self.device = rank, size, device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, batches: Sequence[T]) -> Sequence[T]:
        """This rank's part, every size-th."""
        return batches[self.rank :: self.size]

    @contextmanager
    def raised_on_all(self) -> Iterator[None]:
        """What the block raises on one rank stops all: the others raise an EyasError that names it.
        The block must not wait for other ranks.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:  # raised again below, after the others know
            error = raised
        if self.size > 1:
            described = error and (getattr(error, "what", repr(error)), getattr(error, "hint", ""))
            for rank, failure in enumerate(self.all_gather(described)):
                if failure and error is None:
                    what, hint = failure
                    raise EyasError(f"stopped, because rank {rank} failed: {what}", hint)
        if error is not None:
            raise error

    def broadcast_object(self, work: Callable[[], T]) -> T:
        """What `work` returns on the first rank, which alone runs it; its errors stop all."""
        result: list[T | None] = [None]
        with self.raised_on_all():
            if self.is_first:
                result = [work()]
        if self.size > 1:
            dist.broadcast_object_list(result)
        (found,) = result
        return found  # type: ignore[return-value]  # T may be None

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """The first rank's numbers, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor.detach(), 0)

    def all_reduce(self, numbers: Tensor) -> Tensor:
        """Sums over all ranks, in place; does not wait for the device."""
        if self.size > 1:
            dist.all_reduce(numbers)
        return numbers

    def all_gather(self, value: T) -> list[T]:
        values: list[T] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def all_gather_flat(self, values: Iterable[T]) -> list[T]:
        return [value for of_rank in self.all_gather([*values]) for value in of_rank]

    def shard(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        """Split the weights over the ranks, in place; gradients become sums over ranks.

        dtype: of the gathered weights; split ones, and the sums, are float32.
        """
        if self.size > 1:
            # the module casts what it is given itself: counts stay whole numbers
            policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
            sharded = fully_shard(module, reshard_after_forward=False, mp_policy=policy)
            # the loss is divided by what carries loss on all ranks: see train/step.py
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def reduce_gradients(module: nn.Module, now: bool) -> None:
    """Whether the next backward sums the gradients over the ranks, or only accumulates here."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(now)
        module.set_reshard_after_backward(now)
        module.set_is_last_backward(now)


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Within the block, weights are plain tensors. All ranks enter."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    try:
        yield
    finally:
        module.reshard()


@contextmanager
def joined() -> Iterator[Ranks]:
    """This process's rank, from torchrun's environment.

    Each rank has its own GPU if there are any. Raises EyasError if a machine has fewer GPUs than
    ranks, and when another rank dies.
    """
    size, local = world_size(), int(os.environ.get("LOCAL_RANK", "0"))
    if count := threads_of_rank():
        torch.set_num_threads(count)
        set_num_threads(count)
    device = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    if device != "cpu":
        if local >= torch.cuda.device_count():
            raise EyasError(
                f"rank {local} of this machine has no GPU: there are {torch.cuda.device_count()}",
                "start as many processes as there are GPUs: torchrun --nproc-per-node",
            )
        torch.cuda.set_device(device)
        refuse_no_compiler()
    if size == 1:
        yield Ranks(device=device)
        return
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=MOST_WAIT)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise EyasError(
            f"another rank of this run is gone, or gave no sign for {MOST_WAIT}",
            "its own message, if it had one, is above; start all ranks again: they resume from the "
            "last checkpoint",
        ) from error
    finally:
        dist.destroy_process_group()
        # a thread of gloo that frees the last tensors while the interpreter ends aborts the process
        time.sleep(LAST_RESULT_S)


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], int]]:
    """Within the block SIGINT and SIGTERM (a cluster that wants its machine back) stop nothing: the
    callable gives the signal that came, 0 for none. A second one does what it did before.
    """
    found: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, _frame: object) -> None:
        found.append(number)
        signal.signal(number, before[number])

    if threading.current_thread() is threading.main_thread():  # no other may set them
        before = {one: signal.signal(one, note) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: found[0] if found else 0
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def in_processes(count: int, function: Callable[..., T], *args: object) -> T:
    """The first result of `function` in `count` processes of this machine, as torchrun starts them:
    each has a rank, they end together and free their GPUs.

    Function and arguments are picklable. Raises EyasError if one fails; SIGINT and SIGTERM go to
    them, and to this process when all have ended.
    """
    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT")
    config = LaunchConfig(
        1, 1, count, run_id="eyas", rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", max_restarts=0
    )
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # tells it again
    signals = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    came: int | None = None
    try:
        found: dict[int, T] = elastic_launch(config, _reported)(function, *args)
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if first.exitcode < 0:
            how = f"by {signal.Signals(-first.exitcode).name}: there may be no memory left"
        else:
            how = f"with exit code {first.exitcode}: its message is above"
        raised = EyasError(
            f"a process of this stage ended {how}", "the same command goes on with what is done"
        )
        raised.exit_code = max(first.exitcode, 1)
        raise raised from error
    except SignalException as error:
        came = int(error.sigval)
    finally:
        for number, handler in signals.items():
            if threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)
    if came is not None:
        signal.raise_signal(came)
        raise KeyboardInterrupt
    return found[0]


def _reported(function: Callable[..., T], *args: object) -> T:
    """In a session of its own: a Ctrl-C comes once, by the parent."""
    os.setsid()
    try:
        return function(*args)
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error
    except Exception:  # torch would keep it from people
        traceback.print_exc()
        raise


def threads_of_rank() -> int | None:
    """This rank's share of the cores; None if the user set OMP_NUM_THREADS (torchrun sets 1)."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with suppress(OSError):  # what torchrun was started with, on Linux
        given = Path(f"/proc/{os.getppid()}/environ").read_bytes()
        if num_ranks > 1 and b"\0OMP_NUM_THREADS=" not in b"\0" + given:
            return max(1, cores() // num_ranks)
    return None


def world_size() -> int:
    """The number of processes that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Whether this process writes and reports; known before ranks are joined."""
    return int(os.environ.get("RANK", "0")) == 0
