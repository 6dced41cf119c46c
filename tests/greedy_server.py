"""A server of any target that transformers runs, as vLLM answers: greedy, by tokens, with ids."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from eyas.operators.foreign import auto_class, transformers_config
from eyas.operators.shape import target_shape
from tests.bench_servers import JsonHandler, running


def with_cache(module: Any, cache: Any) -> dict[str, Any]:
    """Before transformers 5.24 the cache is called `past_key_values`."""
    names = inspect.signature(module.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache, "use_cache": True}


class GreedyServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, target: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        model: Any = auto_class(transformers_config(target)).from_pretrained(target)
        self.model, self.lock = model.eval(), threading.Lock()
        self.end_ids = target_shape(target).eos_token_ids

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @torch.inference_mode()
    def answer(self, prompt_ids: list[int], max_tokens: int) -> list[int]:
        ids, answer = torch.tensor([prompt_ids]), list[int]()
        cache = DynamicCache(config=self.model.config)
        with self.lock:
            while len(answer) < max_tokens and not set(answer[-1:]) & set(self.end_ids):
                output = self.model(ids, **with_cache(self.model, cache))
                answer.append(int(output.logits[0, -1].argmax()))
                ids = torch.tensor([answer[-1:]])
        return answer


class _Handler(JsonHandler):
    server: GreedyServer

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.send_json({"data": [{"id": "tiny", "owned_by": "vllm", "max_model_len": 512}]})
        else:
            self.send_json({"version": "0.0.1"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["temperature"] == 0
        ids = self.server.answer(body["prompt"], body["max_tokens"])
        ended = ids[-1] in self.server.end_ids
        choice: dict[str, Any] = {
            "index": 0,
            "text": "",
            "finish_reason": "stop" if ended else "length",
        }
        self.send_json(
            {"choices": [choice | {"token_ids": ids, "prompt_token_ids": body["prompt"]}]}
        )


@contextmanager
def serving_greedily(target: Path) -> Iterator[str]:
    with running(GreedyServer(target)) as server:
        yield server.url
