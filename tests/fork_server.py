"""Processes without the seconds of their imports: one has made them, and forks all others.

`fork_server` is for commands: each has its own process, folder, environment and streams; signals
to the program reach it, and it ends with the program. `imported_once` is for workers and ranks.
"""

from __future__ import annotations

import atexit
import importlib
import json
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from eyas import executor
from eyas.train import ranks

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = [f"eyas.cli.{name}" for name in ("run", "check", "serve", "verify", "watch", "lineage")]
COMMAND = "from eyas.cli.main import main; main()"
CLIENT = """
import json, os, signal, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect(PATH)
asked = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(link, [len(asked).to_bytes(4, "big")], [0, 1, 2])
link.sendall(asked)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: link.send(bytes([number])))
code = link.recv(1)
sys.exit(code[0] if code else "the fork server is gone")
"""


@contextmanager
def fork_server(code: str = COMMAND) -> Iterator[Path]:
    """An executable that stands for `eyas`. code: what a command's process runs."""
    with tempfile.TemporaryDirectory() as folder:
        path, program = f"{folder}/socket", Path(folder, "eyas")
        program.write_text(f"#!{sys.executable} -IS\n{CLIENT.replace('PATH', repr(path))}")
        program.chmod(0o755)
        command = [sys.executable, "-m", "tests.fork_server", path, code]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, cwd=ROOT, **pipes) as server:
            assert server.stdout.readline() == b"ready\n"
            yield program


@contextmanager
def imported_once() -> Iterator[None]:
    """Workers and ranks fork from a process of imports, where the product spawns them."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    forked = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("forkserver"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "multiprocessing", forked)
        launch = partial(ranks.LaunchConfig, start_method="forkserver")
        patch.setattr(ranks, "LaunchConfig", launch)
        yield


def serve(path: str) -> None:
    """Returns in the process of each command; ends with the process that started it."""
    for name in IMPORTED:
        importlib.import_module(name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
        link, _ = listener.accept()
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            begin(link)
            return
        link.close()
    os._exit(0)


def begin(link: socket.socket) -> None:
    """Returns in a child; this process passes signals on to it, and its exit code back."""
    size, streams, *_ = socket.recv_fds(link, 4, 3)
    with link.makefile("rb") as asked:
        words, folder, env = json.loads(asked.read(int.from_bytes(size, "big")))
    pid = os.fork()
    for number, stream in enumerate(streams):
        if not pid:
            os.dup2(stream, number)
        os.close(stream)
    if not pid:
        link.close()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["eyas", *words]
        return
    ended = os.pidfd_open(pid)
    while ended not in select.select([ended, link], [], [])[0]:
        number = link.recv(1)
        os.kill(pid, number[0] if number else signal.SIGKILL)
        if not number:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(OSError):
        link.send(bytes([code if code >= 0 else 128 - code]))
    os._exit(0)


if __name__ == "__main__":
    _, socket_path, its_code = sys.argv
    serve(socket_path)
    ended = 0
    try:
        exec(its_code)
    except SystemExit as error:
        ended = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        ended = 130 if isinstance(error, KeyboardInterrupt) else 1
        traceback.print_exc()
    # as any process ends, but without tearing down its modules, which takes a forked one seconds
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ended)
