"""Which library a process loads: the best variant that its processor runs, shipped before built,
and never one of other sources.
"""

from __future__ import annotations

import platform
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from eyas.errors import ConfigError
from eyas.model import library, variants
from eyas.model.library import Native
from tests.test_native import needs_native

load = library._loaded.__wrapped__
HERE = variants.of_machine()


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    """A machine on which nothing has been built, whose compiler builds nothing."""
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
    assert load() == "there is no C++ compiler (g++)"
    monkeypatch.setattr(variants, "of_machine", list)
    assert load() == f"there is no library for {platform.machine()}"


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
