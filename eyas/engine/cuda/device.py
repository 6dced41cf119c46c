"""Graphs, copies that the host need not wait for, the state of each slot, the device's own clock.

On CPU tensors each does the plain thing. Knows no request and no model.

Letters: S slots, H draft hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from eyas.engine.rounds import Trace

JobEvents = tuple[torch.cuda.Event, torch.cuda.Event]  # where a job starts and where it ends


class Graphs:
    """Work of fixed shapes, recorded once for each key and then replayed: one launch instead of
    hundreds.

    Work may change buffers that outlive it (caches, `FutureMap`): these are found again at every
    replay. What it returns is overwritten by the next call, whatever its key.
    """

    def __init__(self, enabled: bool) -> None:
        """enabled False: nothing is recorded, work is simply done."""
        self._enabled = enabled
        self._recorded: dict[
            Hashable,
            tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]],
        ] = {}
        self._pool = torch.cuda.graph_pool_handle() if enabled else None

    def prepare(
        self,
        key: Hashable,
        work: Callable[..., tuple[torch.Tensor, ...]],
        harmless: Callable[[], tuple[torch.Tensor, ...]],
    ) -> None:
        """Record the work if need be. harmless gives inputs with which it may run at any time, to
        no effect.
        """
        if self._enabled and key not in self._recorded:
            self._recorded[key] = self._record(work, harmless())

    def __call__(
        self,
        key: Hashable,
        work: Callable[..., tuple[torch.Tensor, ...]],
        inputs: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, ...]:
        """work(*inputs), which is prepared."""
        if not self._enabled:
            return work(*inputs)
        graph, own_inputs, outputs = self._recorded[key]
        for own, given in zip(own_inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        graph.replay()
        return outputs

    def _record(
        self, work: Callable[..., tuple[torch.Tensor, ...]], inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Runs the work first, on a stream of its own: kernels are compiled and workspaces made
        before anything is recorded.
        """
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                work(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = work(*inputs)
        return graph, inputs, outputs


class HostCopies:
    """tuple[torch.Tensor, ...] on their way to the host."""

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._event: torch.cuda.Event | None = None
        is_cuda = any(tensor.is_cuda for tensor in tensors)
        self._copies = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda).copy_(
                tensor, non_blocking=True
            )
            for tensor in tensors
        ]
        if is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[np.ndarray]:
        """The values, once everything launched before the copies is done."""
        if self._event is not None:
            self._event.synchronize()
        return [copy.numpy() for copy in self._copies]


class FutureMap:
    """What one job leaves on the device for the next, by slot: the host does not know it.

    root, length int64 [S]: the last token emitted and its column. h [S, H]: the draft's output at
    the root's entry.
    """

    def __init__(self, slots: int, H: int, dtype: torch.dtype, device: str) -> None:
        self.root = torch.zeros(slots, dtype=torch.int64, device=device)
        self.length = torch.zeros(slots, dtype=torch.int64, device=device)
        self.h = torch.zeros(slots, H, dtype=dtype, device=device)


class DeviceTrace(Trace):
    """Busy and idle seconds by events on the device: the host only notes them and adds up those
    that have passed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._marks: deque[JobEvents | None] = deque()
        self._last_end: torch.cuda.Event | None = None
        self.newest: JobEvents | None = None

    @contextmanager
    def job(self) -> Iterator[None]:
        """Around the launch of one job."""
        start, end = _timed_event(), _timed_event()
        start.record()
        try:
            yield
        finally:
            end.record()
            self.newest = start, end
            self._marks.append(self.newest)

    def rest(self) -> None:
        """There is nothing to do: the time until the next job does not count."""
        self.add_up()
        self._marks.append(None)

    def add_up(self) -> None:
        """Take in the jobs that are over."""
        while self._marks and (self._marks[0] is None or _is_over(self._marks[0])):
            mark = self._marks.popleft()
            if mark is None:
                self._last_end = None
                continue
            start, end = mark
            self.busy_s += start.elapsed_time(end) / 1e3
            if self._last_end is not None:
                self.idle_s += self._last_end.elapsed_time(start) / 1e3
            self._last_end = end


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _is_over(job: JobEvents) -> bool:
    return bool(job[1].query())  # type: ignore[no-untyped-call]
