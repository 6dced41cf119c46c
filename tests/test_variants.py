"""Which library a process loads: the best variant that its processor runs, shipped before built,
and never one of other sources.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eyas.artifact import cache_folder
from eyas.errors import ConfigError
from eyas.model import library, variants
from eyas.model.library import Native
from eyas.model.variants import Variant
from eyas.model.weights import keep
from tests.test_native import needs_native

load = library._loaded.__wrapped__
HERE = variants.of_machine()


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "false")
    monkeypatch.delenv(library.CHOICE, raising=False)
    monkeypatch.setattr(variants, "shipped", lambda variant: tmp_path / f"{variant.name}.so")
    return tmp_path


def test_why_there_is_none(no_cache, monkeypatch):
    monkeypatch.setenv("EYAS_NATIVE", "0")
    assert library.unavailable() == "EYAS_NATIVE=0 turns it off"
    monkeypatch.setattr(variants, "processor_features", frozenset)
    assert load() == f"the processor has no {', '.join(sorted(HERE[-1].features))}"
    monkeypatch.setattr(variants, "processor_features", lambda: HERE[-1].features)
    assert "failed" in load()
    monkeypatch.setenv("PATH", str(no_cache))
    assert load() == library.NEITHER
    monkeypatch.setattr(platform, "system", lambda: "Plan 9")
    assert load() == f"there is no library for Plan 9 on {platform.machine()}"


def test_the_best_variant_that_runs_goes_first_and_one_may_be_asked_for(monkeypatch):
    for count, variant in enumerate(HERE, 1):
        monkeypatch.setattr(variants, "processor_features", lambda one=variant: one.features)
        monkeypatch.delenv(library.CHOICE, raising=False)
        assert library.runnable()[0] == variant
        monkeypatch.setenv(library.CHOICE, variant.name)
        assert library.runnable() == [variant]
        better = HERE[count - 2] if count > 1 else None
        if better is not None and not better.features <= variant.features:
            monkeypatch.setenv(library.CHOICE, better.name)
            with pytest.raises(
                ConfigError, match=f"(?s)the processor has no .*take one.*{HERE[-1].name}"
            ):
                library.runnable()
    monkeypatch.setenv(library.CHOICE, "avx1024")
    with pytest.raises(ConfigError, match="no such variant"):
        library.runnable()


def test_a_stamp_names_sources_flags_and_compiler(monkeypatch, tmp_path):
    variant = HERE[0]
    first = variants.stamp(variant)
    others = {
        variants.stamp(replace(variant, flags=("-O1",))),
        variants.stamp(variant, compiler="9"),
    }
    shutil.copytree(variants.SOURCES, tmp_path / "cpp")
    monkeypatch.setattr(variants, "SOURCES", tmp_path / "cpp")
    main = tmp_path / "cpp" / "decoder.cpp"
    assert variants.stamp(variant, main) == first
    (tmp_path / "cpp" / "eyas.h").write_text("// other sources\n")
    others.add(variants.stamp(variant, main))
    assert len(others | {first}) == 4


@needs_native
def test_a_shipped_library_goes_first_and_one_of_other_sources_is_never_loaded(
    no_cache, monkeypatch
):
    ours = library.native()
    monkeypatch.setattr(variants, "processor_features", lambda: ours.variant.features)
    assert isinstance(load(), str)
    shutil.copy(ours.path, variants.shipped(ours.variant))
    found = load()
    assert isinstance(found, Native)
    assert (found.variant, found.is_shipped) == (ours.variant, True)
    monkeypatch.undo()
    place = variants.shipped(ours.variant)
    monkeypatch.setattr(variants, "stamp", lambda *_: "another")
    assert variants.shipped(ours.variant) != place


@needs_native
def test_a_shipped_library_that_cannot_be_loaded_is_said(no_cache, monkeypatch):
    ours = library.native().variant
    monkeypatch.setattr(variants, "processor_features", lambda: ours.features)
    Path(variants.shipped(ours)).write_bytes(b"no library")
    monkeypatch.setenv("PATH", str(no_cache))
    assert str(load()).startswith(f"{ours.name}.so cannot be loaded: ")


# Kernels


@needs_native
@pytest.mark.parametrize("name", ["g++", "clang++"])
@pytest.mark.parametrize("variant", HERE, ids=lambda variant: variant.name)
def test_a_compiler_takes_every_variant(variant, name):
    compiler = shutil.which(name) or shutil.which(f"{name}-14")  # as Debian 12 names it
    if compiler is None:
        pytest.skip(f"there is no {name}")
    taken = f"taken-{variants.stamp(variant, compiler=variants.version_of(compiler))}"
    if (cache_folder("native") / taken).exists():
        return  # these very sources, by this compiler
    flags = [*variants.FLAGS, *variant.flags, "-fsyntax-only"]
    done = subprocess.run([compiler, *flags, str(variants.MAIN)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    keep(cache_folder("native") / taken, "")


@pytest.mark.parametrize("variant", variants.VARIANTS, ids=lambda variant: variant.name)
def test_kernels_of_every_variant_give_the_same(variant):
    """`tests/kernels.cpp`, on this processor or, for ARM, as Debian's qemu-user runs it. Only sums
    of products of bf16 may differ, by their rounding.
    """
    expected, found = results_of(library.native().variant), results_of(variant)
    assert len(found) == len(expected) > 100
    for (name, same, *theirs), (other, _, *ours) in zip(expected, found, strict=True):
        assert name == other
        if same:
            assert theirs == ours, name
        else:
            largest = np.abs(floats(theirs)).max()
            np.testing.assert_allclose(floats(ours), floats(theirs), atol=1e-5 * largest, rtol=0)


def floats(words: list[str]) -> np.ndarray:
    return np.array([int(word, 16) for word in words], dtype=np.uint32).view(np.float32)


@functools.cache
def results_of(variant: Variant) -> list[tuple[str | bool, ...]]:
    """Lines of the program: what was computed, whether all variants must have the same, words."""
    is_foreign = variant not in HERE
    lacking = "" if is_foreign else variant.lacking(variants.processor_features())
    if lacking:
        pytest.skip(f"the processor has no {lacking}")
    compiler, emulator = f"{variant.machine}-linux-gnu-g++", f"qemu-{variant.machine}"
    if is_foreign and not (shutil.which(compiler) and shutil.which(emulator)):
        pytest.skip(f"{compiler} and {emulator} are not installed")
    if not is_foreign:
        compiler = variants.find_compiler()
    main = Path(__file__).with_name("kernels.cpp")
    program = cache_folder("native") / f"kernels-{variants.stamp(variant, main, compiler)}"
    if not program.exists():
        flags = [flag for flag in variants.command(variant) if flag not in ("-O3", "-shared")]
        call = [compiler, "-O0", *flags, "-static", f"-I{variants.SOURCES}", str(main)]
        program.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(f"{program}.{os.getpid()}")  # another worker may compile the same
        subprocess.run([*call, "-o", str(fresh)], check=True)
        fresh.replace(program)
    started = [emulator, str(program)] if is_foreign else [str(program)]
    done = subprocess.run(started, capture_output=True, text=True, check=True)
    lines = []
    for line in done.stdout.splitlines():
        name, sign, words = line.partition(" = ") if " = " in line else line.partition(" ~ ")
        lines.append((name, sign == " = ", *words.split()))
    return lines
