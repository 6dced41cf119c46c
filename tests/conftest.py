"""For all tests: one thread per process, no deadlines, and a key of the tests' own.

Tiny models gain nothing from threads, and on a busy machine threads that wait for each other are
many times slower than one. Set before torch is imported, and inherited by new processes.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["EYAS_PRIVACY_KEY"] = "the tests' own, and no secret"
settings.register_profile("eyas", deadline=None)
settings.load_profile("eyas")
# httpx reads the certificates of all authorities for each client: 28 ms; no test speaks TLS.
_http = importlib.import_module("httpx._transports.default")
_http.create_ssl_context = functools.cache(_http.create_ssl_context)


def pytest_configure(config: pytest.Config) -> None:
    """Compile the native library once, before the workers of xdist; if all tests are to run, its
    build with sanitizers too.
    """
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    builds, is_all = [], config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if is_all and not config.option.keyword:
        builds.append(subprocess.Popen([sys.executable, "-m", "tests.sanitized", "build"]))
    importlib.import_module("eyas.model.library").unavailable()
    for build in builds:  # a failure is that of the test that needs it
        build.wait()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What runs on Ray waits for `-m ray`; `test_executor.test_all_on_ray` gives it."""
    if config.option.markexpr != "ray":
        on_ray = [one for one in items if one.get_closest_marker("ray")]
        config.hook.pytest_deselected(items=on_ray)
        items[:] = [one for one in items if one not in on_ray]


def pytest_make_parametrize_id(val: object) -> str | None:
    """gzip writes the time: the test's name would differ between processes."""
    return "gzip" if isinstance(val, bytes) and val.startswith(b"\x1f\x8b") else None


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny random target whose answers end at max_tokens or a stop string (`serving.World`)."""
    # imported here only: it loads torch, which the number of threads has to precede
    serving = importlib.import_module("tests.serving")
    return serving.World.make(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A target that can end an answer, as one that follows a grammar must."""
    serving = importlib.import_module("tests.serving")
    return serving.World.make(tmp_path_factory.mktemp("ending"), eos_token_id=2)


@pytest.fixture(scope="session")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One whose template has tools."""
    serving = importlib.import_module("tests.serving")
    return serving.World.tooled(tmp_path_factory.mktemp("tooled"))


@pytest.fixture(scope="module")
def client(world: Any) -> Iterator[Any]:
    """The official client of a server of it."""
    with world.served() as client:
        yield client


@pytest.fixture(autouse=True)
def _no_handler_outlives_its_test() -> Iterator[None]:
    """A command run in this process logs to the test's stderr, which pytest closes after it."""
    yield
    logging.getLogger("eyas").handlers.clear()
