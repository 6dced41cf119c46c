"""Servers in processes of their own, and their memory; a part of concurrency, hostile and storm."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from eyas.serve.server import ServeConfig

START_SECONDS = 60


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def ready(command: list[str], port: int) -> Iterator[tuple[int, str]]:
    """The process id and the URL of a server, once /health answers."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}  # as installed packages start
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, **silent) as process:
        try:
            url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
            while not is_up(url):
                if process.poll() is not None or time.monotonic() > until:
                    sys.exit(f"error: the server does not start: {command}")
                time.sleep(0.02)
            yield process.pid, url
        finally:
            process.terminate()


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


@contextmanager
def started(config: ServeConfig) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of eyas, for scripts that end it themselves or need its process; and its URL."""
    command = [sys.executable, "-m", "eyas.serve", config.model_dump_json()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = next((line.strip() for line in process.stdout if line.startswith("http://")), "")
            if not url:
                sys.exit("error: the server did not start")
            yield process, url
        finally:
            process.kill()


def memory_mb(pid: int) -> float:
    """Of a process and its descendants (PSS); 0 where it has ended."""
    mb = 0.0
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        mb = sum(int(one.split()[1]) for one in lines if one.startswith("Pss:")) * 1.024e-3
        threads = Path(f"/proc/{pid}/task").glob("*/children")
        mb += sum(memory_mb(int(one)) for two in threads for one in two.read_text().split())
    return mb
