"""The native path's memory: reads and writes out of bounds, by the compiler's sanitizers, and calls
that find none.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from eyas.model.library import unavailable
from eyas.model.rows import prompt_rows
from eyas.model.target import Target
from tests.tiny import tiny_target

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
    """The library is built with the sanitizers once for each of its versions, in two minutes: in
    advance where all tests run (conftest.py).
    """
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


def starve() -> None:
    """Forwards of a target in a process whose memory ends: MemoryError, and the next call is whole.
    The buffers of 40,000 rows take some 60 MB.
    """
    target = Target.load(tiny_target(Path(tempfile.mkdtemp())), "float32")
    many, few = (
        prompt_rows([[7]] * count, [0] * count, np.zeros((count, 1), np.int32), 16)
        for count in (40_000, 3)
    )
    cache, first = target.new_cache(1), np.zeros(1, np.int64)
    expected = target.forward(few, cache).logits.copy()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    for megabytes in (1, 8, 20, 36):
        limit = pages * resource.getpagesize() + (megabytes << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        with pytest.raises(MemoryError, match="no memory"):
            target.forward(many, cache, logits_of=first)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        assert np.array_equal(target.forward(few, cache).logits, expected)
    assert np.array_equal(target.forward(many, cache, logits_of=first).logits, expected[:1])


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_a_call_without_memory_is_an_error_and_no_abort():
    program = "from tests.test_native_memory import starve; starve()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
