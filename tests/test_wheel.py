"""The wheel has every variant for this kind of machine, and serves without a compiler; the source
archive holds the same sources.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest

from eyas.model import library, variants
from tests.test_native import needs_native

ROOT = Path(__file__).resolve().parents[1]
ROOT_FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE")
LARGE = ("*.safetensors", "*.gz", "*.egg-info", "__pycache__", "libraries")
ARCHIVE = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
PROGRAM = """
import json
from eyas.model import library, variants
ours = library.native()
found = [library.__file__, ours.variant.name, ours.is_shipped, variants.find_compiler()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the checkout without the packaged models."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "eyas", source / "eyas", ignore=shutil.ignore_patterns(*LARGE))
    for name in ROOT_FILES:
        shutil.copy(ROOT / name, source)
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    """This process's library stands for every variant."""
    compiler = variants.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    cache = tmp_path_factory.mktemp("cache")
    (cache / "native").mkdir()
    for one in variants.of_machine():
        shutil.copy(library.native().path, cache / "native" / variants.file_of(one, compiler))
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(folder)]
    environment = os.environ | {"EYAS_CACHE": str(cache)}
    command = [sys.executable, "-m", "pip", "wheel", str(source), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


@needs_native
def test_it_carries_every_variant_and_the_sources(wheel):
    names = ZipFile(wheel).namelist()
    shipped = {name for name in names if name.endswith(".so")}
    assert {Path(name).name for name in shipped} == {
        variants.shipped(one).name for one in variants.of_machine()
    }
    assert "eyas/model/cpp/eyas.h" in names
    assert "-py3-none-manylinux_2_" in wheel.name
    assert {"LICENSE", "NOTICE"} <= {Path(name).name for name in names}
    small = sum(
        info.compress_size for info in ZipFile(wheel).infolist() if info.filename in shipped
    )
    assert small < len(shipped) * 1_000_000


@pytest.fixture(scope="module")
def source_archive(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    command = [sys.executable, "-c", ARCHIVE, str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.tar.gz")
    return found


@needs_native
def test_the_source_archive_holds_what_the_wheel_holds(wheel, source_archive):
    with tarfile.open(source_archive) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    names = {name for name in ZipFile(wheel).namelist() if name.startswith("eyas/")}
    assert not {name for name in names - held if not name.endswith(".so")}
    assert {*ROOT_FILES, "eyas/__init__.pyi"} <= held


@needs_native
def test_a_package_index_takes_both(wheel, source_archive):
    pytest.importorskip("twine", reason="the group `dev` has it")
    command = [sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(source_archive)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


@needs_native
def test_it_serves_without_a_compiler(wheel, tmp_path):
    options = ["--no-deps", "--no-index", "-q", "--target", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True)
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "", "EYAS_CACHE": str(tmp_path / "none")}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path, variant, is_shipped, compiler = json.loads(done.stdout)
    assert path.startswith(str(tmp_path))
    assert (variant, is_shipped, compiler) == (library.runnable()[0].name, True, None)
    assert not (tmp_path / "none").exists()
