"""SGLang on a CPU without its CUDA dependencies: what is not installed is a stub.

Python reads a file of this name at every start, so that SGLang's own processes have the stubs too:

    PYTHONPATH=benchmarks/peers/sglang_cpu PYTHON -m sglang.launch_server --device cpu ...

Nothing of a stub's is called on the ways that are taken here. sgl_kernel.py beside this file is no
stub: it computes.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

STUBS = (
    "compressed_tensors",
    "interegular",
    "llguidance",
    "openai",
    "openai_harmony",
    "outlines",
    "partial_json_parser",
    "sentencepiece",
    "setproctitle",
    "soundfile",
    "torchvision",
    "tvm_ffi",
    "vllm",
    "xgrammar",
)


def any_schema() -> Any:
    """pydantic's, for a field of a type that is a stub."""
    return importlib.import_module("pydantic_core.core_schema").any_schema()


class StubBase:
    """What stands for a class of a stub among the bases of another."""

    def __init_subclass__(cls, **_: Any) -> None:
        """Takes any keyword, as TypedDict does."""

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        return any_schema()


class Stub(types.ModuleType):
    """A module that has every name, each again such a module; as a decorator it changes nothing."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __get_pydantic_core_schema__(self, *_: Any) -> Any:
        return any_schema()

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (StubBase,)


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that are not here."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in STUBS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = "0.0.0"  # type: ignore[attr-defined]


sys.meta_path.append(Stubs())  # last: for what is not installed
