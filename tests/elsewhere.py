"""A device for machines without a GPU that refuses what a GPU refuses: operators that mix its
tensors with the CPU's, and `numpy()`. It computes on the CPU, under the name "lazy", which torch
knows without a driver and whose backward runs in this thread. test_gpu.py has a GPU's kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from eyas.operators import ttt
from eyas.train import batches

NAME = "lazy"
aten = torch.ops.aten
CROSSING = {aten.copy_.default, aten._to_copy.default}
# whose indices may be on the CPU, as with CUDA
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class Elsewhere(torch.Tensor):
    """A tensor on the device, its numbers in `host`."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> Elsewhere:
        how = {"dtype": host.dtype, "device": NAME, "strides": host.stride()}
        made = torch.Tensor._make_wrapper_subclass(
            cls, host.shape, storage_offset=host.storage_offset(), **how
        )
        made.host = host
        return made

    def __getitem__(self, at: Any) -> Any:
        # torch itself would make tensors of lists, past the operators
        parts = at if isinstance(at, tuple) else (at,)
        made = tuple(torch.tensor(one) if isinstance(one, list) else one for one in parts)
        return super().__getitem__(made)

    def tolist(self) -> Any:
        return self.host.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {NAME} tensor to numpy: copy it to host memory first")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _computed(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Factories, which take no tensor, make tensors of the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _computed(func, args, kwargs or {})


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    there = [one for one in given if isinstance(one, Elsewhere)]
    asked = kwargs.get("device")
    onto = None if asked is None else torch.device(asked).type
    if not there and onto != NAME:
        return func(*args, **kwargs)
    if there and func not in CROSSING:
        looked_at = [args[0]] if func in INDEXED else given
        if any(not isinstance(one, Elsewhere) and one.ndim for one in looked_at):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    if onto is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map(_host, (args, kwargs))
    result = func(*args, **kwargs)
    same = {id(one.host): one for one in there}
    if onto not in (None, NAME) or (func is aten.copy_.default and id(args[0]) not in same):
        return result

    def wrapped(one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or isinstance(one, Elsewhere):
            return one
        return same[id(one)] if id(one) in same else Elsewhere(one)

    return tree_map(wrapped, result)


def _host(one: Any) -> Any:
    return one.host if isinstance(one, Elsewhere) else one


@contextlib.contextmanager
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device's name, while it exists. Autocast, which does not know it, casts nothing there."""
    autocast, is_enabled, tensor = torch.autocast, torch.is_autocast_enabled, torch.tensor

    def made(data: Any, *, device: Any = None, **named: Any) -> torch.Tensor:
        here = tensor(data, **named)
        return here if device is None else here.to(device)

    def cast(device_type: str, *args: Any, **named: Any) -> Any:
        if device_type != NAME:
            return autocast(device_type, *args, **named)
        return contextlib.nullcontext()

    with monkeypatch.context() as patched, _Mode():
        patched.setattr(torch, "autocast", cast)
        patched.setattr(torch, "tensor", made)
        # in this thread, where the mode holds
        patched.setattr(batches, "ahead", lambda made, jobs, *_: (made(one) for one in jobs))
        # checkpoint asks torch for a module of the device
        patched.setattr(ttt, "checkpoint", lambda function, *given, **_: function(*given))
        # views of a subclass are not made in inference mode
        patched.setattr(torch._C, "_InferenceMode", lambda mode: torch.no_grad())
        patched.setattr(torch, "is_autocast_enabled", lambda of=NAME: of != NAME and is_enabled(of))
        yield NAME
