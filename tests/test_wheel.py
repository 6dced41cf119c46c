"""The wheel: it carries every variant for this kind of machine, and serves without a compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from eyas.model import library, variants
from tests.test_native import needs_native

ROOT = Path(__file__).resolve().parents[1]
LARGE = ("*.safetensors", "*.gz", "*.egg-info", "__pycache__", "libraries")
PROGRAM = """
import json
from eyas.model import library, variants
ours = library.native()
found = [library.__file__, ours.variant.name, ours.is_shipped, variants.find_compiler()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy without the packaged models; in place of compiling every variant, the
    library of this process is said to be each of them.
    """
    compiler = variants.find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    cache = tmp_path_factory.mktemp("cache")
    (cache / "native").mkdir()
    for one in variants.of_machine():
        shutil.copy(library.native().path, cache / "native" / variants.file_of(one, compiler))
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT / "eyas", source / "eyas", ignore=shutil.ignore_patterns(*LARGE))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
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
    small = sum(
        info.compress_size for info in ZipFile(wheel).infolist() if info.filename in shipped
    )
    assert small < len(shipped) * 1_000_000


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
