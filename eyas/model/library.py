"""The C++ library of `cpp/`: the best variant that this processor runs, shipped with the package or
built at first use, and how it is called. A call that finds no memory raises MemoryError.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyas.artifact import cache_folder
from eyas.errors import ConfigError
from eyas.model import variants
from eyas.model.structs import STRUCTS, check_sizes
from eyas.model.variants import Variant

NO_MEMORY = 6  # kNoMemory of decoder.h; negative of OF_LEVELS
NUMBERS = ("eyas_linear_bytes", "eyas_read")  # may be any
OF_LEVELS = ("eyas_propose", "eyas_grow")
CHOICE = "EYAS_NATIVE_VARIANT"
NEITHER = "no built library came with eyas: install its wheel, or a C++ compiler (g++)"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Native:
    """The library of this process."""

    lib: ctypes.CDLL
    variant: Variant
    path: Path
    is_shipped: bool


def unavailable() -> str | None:
    """Why there is no native path, in one line; None where there is. Builds the library when there
    is none. Raises ConfigError for a variant that is none.
    """
    if os.environ.get("EYAS_NATIVE") == "0":
        return "EYAS_NATIVE=0 turns it off"
    found = _loaded()
    return found if isinstance(found, str) else None


def native() -> Native:
    """Only where `unavailable()` is None."""
    found = _loaded()
    assert isinstance(found, Native), found
    return found


def library() -> ctypes.CDLL:
    """Only where `unavailable()` is None."""
    return native().lib


def build() -> str:
    """Names the build of the library: its variant, sources and flags; "" if there is none."""
    found = _loaded()
    return "" if isinstance(found, str) else found.path.stem


def runnable() -> list[Variant]:
    """The variants that this processor runs, the best first; the one that is asked for alone.
    Raises ConfigError.
    """
    here, features = variants.of_machine(), variants.processor_features()
    found = [one for one in here if one.features <= features]
    asked = os.environ.get(CHOICE)
    if not asked:
        return found
    chosen = next((one for one in here if one.name == asked), None)
    if chosen in found:
        return [chosen]
    names = ", ".join(one.name for one in found) or "none"
    why = "there is no such variant"
    if chosen is not None:
        why = f"the processor has no {chosen.lacking(features)}"
    raise ConfigError(f"{CHOICE}={asked}: {why}", f"take one that runs here: {names}, or unset it")


@functools.cache
def _loaded() -> Native | str:
    here, failures = runnable(), []
    if not here:
        if not (known := variants.of_machine()):
            return f"there is no library for {platform.system()} on {platform.machine()}"
        return f"the processor has no {known[-1].lacking(variants.processor_features())}"
    for variant in here:
        if (path := variants.shipped(variant)).exists():
            try:
                return Native(_declared(ctypes.CDLL(str(path))), variant, path, is_shipped=True)
            except OSError as error:
                failures.append(f"{path.name} cannot be loaded: {error}")
    compiler = variants.find_compiler()
    if compiler is None:
        return "; ".join([*failures, NEITHER])
    for variant in here:  # an old compiler does not know every processor
        try:
            path = built(variant, compiler)
            return Native(_declared(ctypes.CDLL(str(path))), variant, path, is_shipped=False)
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or str(error)).strip().splitlines()
            said = next((line for line in lines if "error" in line), lines[0])
            failures.append(f"{compiler} failed: {said}")
        except OSError as error:
            failures.append(f"the library cannot be built or loaded: {error}")
    return failures[0]


def built(variant: Variant, compiler: str, main: Path = variants.MAIN) -> Path:
    """The file of a variant's library in this machine's cache, compiled if needed."""
    return variants.built(variant, compiler, cache_folder("native"), main, logger.warning)


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    lib.eyas_sizes.argtypes, lib.eyas_sizes.restype = [pointer, integer], integer
    sizes = (integer * (len(STRUCTS) + 1))()
    check_sizes(sizes[: lib.eyas_sizes(sizes, len(sizes))])
    calls = {
        "eyas_multiply": "ProductCall",
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
        "eyas_read": (integer, [pointer, integer, integer]),
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
        elif result is integer and name not in NUMBERS:
            function.errcheck = _checked(-NO_MEMORY if name in OF_LEVELS else NO_MEMORY)
    return lib


def _checked(failure: int | None) -> Callable[..., Any]:
    def check(result: Any, *_: object) -> Any:
        if result == failure:
            raise MemoryError("no memory, or no thread, for the native decoder")
        return result

    return check


def address(array: np.ndarray | None) -> int | None:
    """Where a contiguous array's numbers lie, in half the time of `array.ctypes`."""
    return None if array is None else array.__array_interface__["data"][0]
