"""Reads and writes out of bounds on the native path, by the compiler's sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eyas.model.library import unavailable

PARTS = ["planted", "shapes", "blocks", "drafts", "ids", "rounds", "draws"]


def runtimes() -> list[str]:
    """AddressSanitizer's runtime and the C++ library whose exceptions it follows, as files."""
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        pytest.skip("there is no g++")
    found = []
    for name in ("libasan.so", "libstdc++.so"):
        command = [compiler, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(path).is_absolute():
            pytest.skip(f"{compiler} has no {name}: it cannot build with -fsanitize=address")
        found.append(path)
    return found


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_no_read_or_write_is_out_of_bounds():
    """The library is built with the sanitizers once for each of its versions: half a minute."""
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes()),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.sanitized"],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    assert done.stdout.split() == PARTS
