"""vLLM as it answers for hidden states (0.32 on a CPU, recorded), with a tiny target behind it, and
what can be wrong with one.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from eyas.features.states import CONNECTOR, vllm_arguments
from eyas.operators.shape import target_shape
from tests.bench_servers import JsonHandler, running


@dataclass
class Behaviour:
    """layers: 0-based. mixes: from the second answer to the same tokens on, states of other tokens;
    loses_cached: without the first ones. dies_after: answers.
    """

    target: Path
    layers: tuple[int, ...]
    folder: Path
    engine: str = "vllm"
    dtype: torch.dtype = torch.float32
    has_states: bool = True
    loses_cached: bool = False
    mixes: bool = False
    length: int = 512
    dies_after: int = 1 << 30


class StateHTTP(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, behaviour: Behaviour) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behaviour, self.asked, self.lock = behaviour, [], threading.Lock()
        model: Any = AutoModelForCausalLM.from_pretrained(behaviour.target, dtype=behaviour.dtype)
        self.model = model.eval()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone."""

    def streams(self, ids: list[int]) -> torch.Tensor:
        """[T, S, H], before the final norm."""
        seen: dict[int, torch.Tensor] = {}
        with self.lock, torch.inference_mode():
            hooks = [
                layer.register_forward_hook(
                    lambda _m, _i, out, at=at: seen.__setitem__(
                        at, (out[0] if isinstance(out, tuple) else out)[0].clone()
                    )
                )
                for at, layer in enumerate(self.model.model.layers)
            ]
            self.model(torch.tensor([ids]))
            for hook in hooks:
                hook.remove()
        return torch.stack([seen[layer] for layer in self.behaviour.layers], dim=1)


class _Handler(JsonHandler):
    server: StateHTTP

    def do_GET(self) -> None:
        of = self.server.behaviour
        if self.path == "/v1/models":
            card = {"id": "m", "owned_by": of.engine, "max_model_len": of.length}
            self.send_json({"data": [card]})
        elif self.path == "/version":
            self.send_json({"version": "0.0.1"})
        else:
            self.send_json({}, 404)

    def do_POST(self) -> None:
        of = self.server.behaviour
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        ids = body["prompt"]
        self.server.asked.append(tuple(ids))
        if len(self.server.asked) > of.dies_after:
            self.close_connection = True
            return
        again = self.server.asked.count(tuple(ids)) > 1
        states = self.server.streams(ids[::-1] if of.mixes and again else ids)
        self._answer(body, ids, states[3:] if of.loses_cached and again else states)

    def _answer(self, body: dict[str, Any], ids: list[int], states: torch.Tensor) -> None:
        """Locks, answers, writes, unlocks."""
        choice = {"index": 0, "text": "", "finish_reason": "length"}
        answer: dict[str, Any] = {"id": "cmpl", "choices": [choice], "kv_transfer_params": None}
        of = self.server.behaviour
        if not of.has_states:
            self.send_json(answer)
            return
        of.folder.mkdir(exist_ok=True)
        path = of.folder / f"cmpl-{body['request_id']}-0-9256bd1b.safetensors"
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.send_json({**answer, "kv_transfer_params": {"hidden_states_path": str(path)}})
            save_file(
                {"hidden_states": states.contiguous(), "token_ids": torch.tensor(ids)}, str(path)
            )


@contextmanager
def serving_states(behaviour: Behaviour) -> Iterator[StateHTTP]:
    with running(StateHTTP(behaviour)) as server:
        yield server


@contextmanager
def vllm_server(python: str, folder: str, dtype: str, length: int, *options: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as work, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        states = vllm_arguments(folder, target_shape(folder), dtype, length, f"{work}/states")
        log = Path(work, "log")
        # not `vllm serve`: the command of the CPU's package does not find its own version
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", *states]
        with log.open("w") as lines:
            process = subprocess.Popen(
                [*command, "--port", str(port), "--enforce-eager", *options],
                env={
                    **os.environ,
                    "PYTHONPATH": str(CONNECTOR),
                    "OMP_NUM_THREADS": str(os.cpu_count()),
                    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
                },
                cwd=work,
                stdout=lines,
                stderr=subprocess.STDOUT,
            )
        url = f"http://127.0.0.1:{port}"
        try:
            while not is_up(url):
                if process.poll() is not None:
                    raise SystemExit(f"vLLM ended: {log.read_text()[-2000:]}")
                time.sleep(1)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
