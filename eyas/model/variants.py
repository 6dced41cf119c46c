"""The variants of the C++ library of `cpp/`: what each is compiled with, and what it runs on.
Standard library only: setup.py reads this file before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

SOURCES = Path(__file__).parent / "cpp"
MAIN = SOURCES / "decoder.cpp"
FLAGS = (
    "-O3",
    "-std=c++20",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-shared",
    "-fPIC",
    "-pthread",
)
# unused parts of libstdc++ need glibc 2.36, a static libgcc 2.35
LINKED = ("-s", "-static-libstdc++", "-Wl,--gc-sections", "-Wl,--exclude-libs,ALL")


@dataclass(frozen=True, slots=True)
class Variant:
    """machine: as of `platform.machine()`. flags: of the compiler. features: needed of the
    processor, named as in /proc/cpuinfo.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    features: frozenset[str]

    def lacking(self, features: frozenset[str]) -> str:
        return ", ".join(sorted(self.features - features))


def _x86(name: str, flags: str, features: str, base: Variant | None = None) -> Variant:
    own, needed = tuple(flags.split()), frozenset(features.split())
    if base is not None:
        own, needed = base.flags + own, base.features | needed
    return Variant(name, "x86_64", own, needed)


_AVX512 = _x86(
    "avx512", "-march=x86-64-v4", "avx512f avx512bw avx512cd avx512dq avx512vl avx2 fma f16c bmi2"
)
_VNNI = _x86("avx512_vnni", "-mavx512vnni", "avx512_vnni", _AVX512)
_BF16 = _x86("avx512_vnni_bf16", "-mavx512bf16 -mavx512vbmi", "avx512_bf16 avx512vbmi", _VNNI)
_AMX = _x86("amx", "-mamx-tile -mamx-int8 -mamx-bf16", "amx_tile amx_int8 amx_bf16", _BF16)
_AVX2 = _x86("avx2", "-march=x86-64-v3", "avx2 fma f16c bmi2")
_AVX2_VNNI = _x86("avx2_vnni", "-mavxvnni", "avx_vnni", _AVX2)
_NEON = Variant("neon", "aarch64", ("-march=armv8.2-a+dotprod",), frozenset(["asimd", "asimddp"]))
_NEON_BF16 = replace(
    _NEON,
    name="neon_bf16",
    flags=("-march=armv8.2-a+dotprod+bf16",),
    features=_NEON.features | {"bf16"},
)
# the best first
VARIANTS = (_AMX, _BF16, _VNNI, _AVX512, _AVX2_VNNI, _AVX2, _NEON_BF16, _NEON)


def of_machine(machine: str | None = None) -> list[Variant]:
    """The variants for a kind of machine, this one's by default. The threads of cpp/pool.h need
    Linux.
    """
    if machine is None and platform.system() != "Linux":
        return []
    found = (machine or platform.machine()).lower()
    names = {"amd64": "x86_64", "arm64": "aarch64"}
    return [one for one in VARIANTS if one.machine == names.get(found, found)]


def processor_features() -> frozenset[str]:
    """Of this processor, as Linux says."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else []:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def stamp(variant: Variant, main: Path = MAIN, compiler: str = "") -> str:
    """Names what a library is made of: sources and flags, and a compiler's version."""
    sources = sorted({*SOURCES.glob("*.*"), main})
    parts = [*(source.read_text(encoding="utf-8") for source in sources), *command(variant)]
    return hashlib.sha256("\0".join([*parts, compiler]).encode()).hexdigest()[:24]


def command(variant: Variant) -> list[str]:
    """The compiler's flags."""
    return [*FLAGS, *LINKED, *variant.flags]


def find_compiler() -> str | None:
    """The C++ compiler: $CXX, or the first of g++, c++ and clang++ that is there."""
    names = (os.environ.get("CXX") or "g++", "c++", "clang++")
    return next(filter(None, map(shutil.which, names)), None)


def version_of(compiler: str) -> str:
    """Raises OSError, CalledProcessError."""
    call = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    return call.stdout


def file_of(variant: Variant, compiler: str, main: Path = MAIN) -> str:
    """Raises OSError, CalledProcessError."""
    return f"{main.stem}-{variant.name}-{stamp(variant, main, version_of(compiler))}.so"


def built(
    variant: Variant,
    compiler: str,
    folder: Path,
    main: Path = MAIN,
    say: Callable[..., object] = print,
) -> Path:
    """The variant's library in a folder, compiled unless it is there. Raises OSError,
    CalledProcessError.
    """
    library = folder / file_of(variant, compiler, main)
    if library.exists():
        return library
    say(f"building the native library {library}, once: half a minute or more")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fresh = Path(scratch) / library.name
        call = [compiler, *command(variant), f"-I{SOURCES}", str(main), "-o", str(fresh)]
        subprocess.run(call, capture_output=True, text=True, check=True)
        fresh.replace(library)
    return library


def shipped(variant: Variant) -> Path:
    """Where a wheel carries the variant's library of these very sources."""
    return Path(__file__).parent / "libraries" / f"{variant.name}-{stamp(variant)}.so"
