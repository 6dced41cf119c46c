"""The C++ library of `cpp/` for x86-64 with AVX-512, built when first used, and how it is called.

Without a compiler or AVX-512 there is none, and PyTorch and NumPy do its work. A call that finds no
memory raises MemoryError.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.artifact import cache_folder
from eyas.model.structs import STRUCTS, check_sizes

SOURCES = Path(__file__).parent / "cpp"
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++20",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-shared",
    "-fPIC",
    "-pthread",
)
NO_MEMORY = 6  # kNoMemory of decoder.cpp; negative of OF_LEVELS
OF_LEVELS = ("eyas_propose", "eyas_grow")
NEEDED = ("avx512f", "avx512bw", "avx512dq", "avx512vl")

logger = logging.getLogger(__name__)


def unavailable() -> str | None:
    """Why this machine or process has no native path, in one line; None when it has. Builds the
    library when there is none.
    """
    if os.environ.get("EYAS_NATIVE") == "0":
        return "EYAS_NATIVE=0 turns it off"
    return _loaded()[1]


def library() -> ctypes.CDLL:
    """The library, built at need. Only for a process in which `unavailable()` is None."""
    lib, why = _loaded()
    assert lib is not None, why
    return lib


def build() -> str:
    """Names the build of the library: its sources, compiler and processor; "" if there is none."""
    lib, _ = _loaded()
    return "" if lib is None else Path(lib._name).stem


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    missing = sorted(set(NEEDED) - set(_cpu().split()))
    if platform.machine() != "x86_64" or missing:
        return None, f"the processor has no {', '.join(missing) or 'AVX-512'}"
    compiler = find_compiler()
    if compiler is None:
        return None, "there is no C++ compiler (g++)"
    try:
        return _declared(ctypes.CDLL(str(built(SOURCES / "decoder.cpp", compiler)))), None
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or str(error)).strip().splitlines()
        return (
            None,
            f"{compiler} failed: {next((line for line in lines if 'error' in line), lines[0])}",
        )
    except OSError as error:
        return None, f"the library cannot be built or loaded: {error}"


def _cpu() -> str:
    """Model and flags of the processor, as Linux says it: what -march=native compiles for."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    kept = {
        line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in reversed(lines)
    }
    return f"{kept.get('model name', '')} {kept.get('flags', '')}"


def find_compiler() -> str | None:
    """The C++ compiler: $CXX, or the first of g++, c++ and clang++ that is there."""
    names = (os.environ.get("CXX") or "g++", "c++", "clang++")
    return next(filter(None, map(shutil.which, names)), None)


def built(main: Path, compiler: str) -> Path:
    """The library's file of a source, built unless there is one of these sources, this compiler and
    this processor.
    """
    sources = sorted({*SOURCES.glob("*.*"), main})
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True
    ).stdout
    parts = [*(source.read_text() for source in sources), *FLAGS, version, _cpu()]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    folder = cache_folder("native")
    library_file = folder / f"{main.stem}-{key}.so"
    if library_file.exists():
        return library_file
    logger.warning("building the native decoder, once for this machine (%s)", library_file)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch) / library_file.name
        command = [compiler, *FLAGS, f"-I{SOURCES}", str(main), "-o", str(fresh)]
        subprocess.run(command, capture_output=True, text=True, check=True)
        fresh.replace(library_file)
    return library_file


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions. Raises OSError where its structs are others."""
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    lib.eyas_sizes.argtypes, lib.eyas_sizes.restype = [pointer, integer], integer
    sizes = (integer * (len(STRUCTS) + 1))()
    check_sizes(sizes[: lib.eyas_sizes(sizes, len(sizes))])
    calls = {
        "eyas_set_positions": "Positions",
        "eyas_forward": "ForwardCall",
        "eyas_verify": "VerifyCall",
        "eyas_extend": "StatesCall",
        "eyas_step": "StatesCall",
        "eyas_proposals": "ProposalsCall",
        "eyas_propose": "Growth",
        "eyas_grow": "Growth",
    }
    makers = {"eyas_linear": "Weights", "eyas_quantised": "Weights", "eyas_new": "DecoderParts"}
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "eyas_free_linear": (None, [pointer]),
        "eyas_linear_bytes": (integer, [pointer]),
        "eyas_free": (None, [pointer]),
        "eyas_score": (integer, [pointer, integer, integer, integer, pointer, pointer]),
        "eyas_draw": (integer, [pointer, pointer, integer, integer, pointer]),
    }
    for name, struct in makers.items():
        signatures[name] = (pointer, [ctypes.POINTER(STRUCTS[struct])])
    for name, struct in calls.items():
        signatures[name] = (integer, [pointer, ctypes.POINTER(STRUCTS[struct])])
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
        if name in makers:
            function.errcheck = _checked(None)
        elif result is integer and name != "eyas_linear_bytes":
            function.errcheck = _checked(-NO_MEMORY if name in OF_LEVELS else NO_MEMORY)
    return lib


def _checked(failure: int | None) -> Callable[..., Any]:
    """Passes on what a function returns, and raises MemoryError for its sign of failure."""

    def check(result: Any, *_: object) -> Any:
        if result == failure:
            raise MemoryError("no memory, or no thread, for the native decoder")
        return result

    return check


# Arguments of a call


@contextmanager
def one_torch_thread(enabled: bool) -> Iterator[None]:
    """Keep PyTorch's small operators on one thread while the native path's own threads work beside
    them: two pools on the same cores wait for each other, and a copy of a few kilobytes takes
    milliseconds.
    """
    threads = torch.get_num_threads()
    if enabled:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def address(array: np.ndarray | torch.Tensor | None) -> int | None:
    """Where the numbers of a contiguous array lie, in half the time that `array.ctypes` takes."""
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0]  # type: ignore[no-any-return]
    return None if array is None else array.data_ptr()


def addresses(
    arrays: Sequence[np.ndarray | torch.Tensor | None],
) -> ctypes.Array[ctypes.c_void_p]:
    """The same of several."""
    return (ctypes.c_void_p * len(arrays))(*map(address, arrays))
