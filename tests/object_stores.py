"""Object stores to test against: a GCS emulator that can be killed, and a line that can be bad."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec

BUCKET = "features"
BROKEN = "a connection that a fault broke"


def free_port() -> int:
    """A port that stays free until it is used: programs that ask for any get others."""
    any_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = 1024 + secrets.randbelow(max(1, any_from - 1024))
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def wait_until_it_listens(port: int) -> None:
    for _ in range(6000):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens at {port}")


def forget_clients() -> None:
    """fsspec keeps its clients, with the address that they first had."""
    for protocol in ("s3", "gs"):
        with contextlib.suppress(ImportError):
            fsspec.get_filesystem_class(protocol).clear_instance_cache()


GCS_PROGRAM = """
import sys, time
from gcp_storage_emulator.server import create_server
port, folder = int(sys.argv[1]), sys.argv[2]
options = {"in_memory": False, "default_bucket": "features", "data_dir": folder}
server = create_server("127.0.0.1", port, **options)
server.start()
time.sleep(600)
"""


class GcsServer:
    """The emulator with its objects in a folder: a killed one can be started again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.port = folder, free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-c", GCS_PROGRAM, str(self.port), str(self._folder)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until_it_listens(self.port)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


class Line:
    """A TCP proxy in front of a server, with a fault until `healthy`.

    "reset": the connection breaks after `after` bytes from the client; "cut": after that many bytes
    of the answer; "stall": nothing comes through; "503": the answer is one.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._fault, self._after, self._times = "", 0, 0
        self.num_faults = 0
        self._serving: set[threading.Thread] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def fault(self, kind: str, after: int = 0, times: int = 1 << 30) -> None:
        """From now on, `times` connections; those that are open break."""
        self._fault, self._after, self._times = kind, after, times

    def healthy(self) -> None:
        """No more faults; the server has ended what a fault left it."""
        self._fault = ""
        for thread in [one for one in self._serving if one.name == BROKEN]:
            thread.join(timeout=10)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._serving = {one for one in self._serving if one.is_alive()} | {thread}
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            client,
            socket.create_connection(("127.0.0.1", self._server_port)) as server,
        ):
            back = threading.Thread(target=self._pump, args=(server, client, "cut"), daemon=True)
            back.start()
            self._pump(client, server, "reset")
            back.join()
            with contextlib.suppress(OSError):
                while server.recv(1 << 14):  # until the server has closed: it is done
                    pass

    def _pump(self, source: socket.socket, target: socket.socket, breaks: str) -> None:
        """Bytes one way until an end or a fault, which open connections have too."""
        passed, seen = 0, ""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                if self._fault != seen:
                    passed, seen = 0, self._fault
                passed += len(data)
                if self._strikes(breaks, passed, source, target):
                    return
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _strikes(
        self, breaks: str, passed: int, source: socket.socket, target: socket.socket
    ) -> bool:
        kind = self._fault
        is_early = kind in ("reset", "cut") and (kind != breaks or passed <= self._after)
        if not kind or self._times <= 0 or is_early or (kind, breaks) == ("503", "cut"):
            return False
        self._times -= 1
        self.num_faults += 1
        server = target if breaks == "reset" else source
        if kind == "stall":
            time.sleep(30)
        if kind == "503":
            refusal = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            source.sendall(refusal)
        linger = b"\0" * 8 if kind == "503" else b"\1" + b"\0" * 7
        for end in (source, target):
            is_written = end is server and kind == "reset"
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                end.shutdown(socket.SHUT_WR if is_written else socket.SHUT_RDWR)
        if kind == "reset":
            threading.current_thread().name = BROKEN
        return True


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
