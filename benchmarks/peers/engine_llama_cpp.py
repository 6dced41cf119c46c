"""llama.cpp as a worker of engines.py and sizes.py: a llama-server of its own, asked over HTTP.

Times are the server's, from the end of the prompt to the last token. Greedy by top_k 1 alone, so
that no other sampler runs.
"""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from wire import Decoded, serve

HERE = Path(__file__).parent
OUTTYPES = {"bfloat16": "bf16", "float32": "f32"}
START_SECONDS = 120
ROUNDS = "llamacpp:spec_decode_num_drafts_total"


class LlamaCpp:
    """One server, plain or with an EAGLE-3 head."""

    def __init__(self, settings: dict[str, Any]) -> None:
        build, threads = Path(settings["llama_cpp"]), str(settings["threads"])
        target = settings["gguf"] if settings.get("as_is") else gguf(settings, settings["target"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        options = {"-m": target, "--host": "127.0.0.1", "--port": port, "-t": threads}
        options |= {"-tb": threads, "-np": 1, "-c": settings["max_length"], "--cache-ram": 0}
        self.rounds = 0
        self.speculates = "num_draft_steps" in settings
        if self.speculates:
            options |= {"--spec-type": "draft-eagle3", "-md": gguf(settings, settings["head_vllm"])}
            options |= {"--spec-draft-n-max": settings["num_draft_steps"], "--spec-draft-p-min": 0}
        words = [str(word) for option in options.items() for word in option]
        command = [str(build / "bin" / "llama-server"), *words, "--metrics"]
        self.server = subprocess.Popen(command, stdout=sys.stderr)
        atexit.register(self.server.kill)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.server.poll() is not None:
                raise RuntimeError(f"llama-server ended with code {self.server.returncode}")
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        raise RuntimeError(f"llama-server was not ready after {START_SECONDS} s")

    def decode(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> Decoded:
        sampling = {"temperature": 0.0, "top_k": 1, "samplers": ["top_k"], "ignore_eos": ignore_eos}
        body = {"prompt": prompt, "n_predict": max_tokens, "cache_prompt": False}
        body |= {"return_tokens": True, **sampling}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            self.url + "/completion", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            reply = json.load(answer)
        timings = reply["timings"]
        rounds = self._new_rounds() if self.speculates else int(timings["predicted_n"]) - 1
        return Decoded(reply["tokens"], timings["predicted_ms"] / 1e3, rounds)

    def _new_rounds(self) -> int:
        """Verification steps since the last call. (An answer's accepted drafts would count some
        that its end cut off.)
        """
        with urllib.request.urlopen(self.url + "/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        before = self.rounds
        self.rounds = int(next(float(line.split()[1]) for line in lines if line.startswith(ROUNDS)))
        return self.rounds - before


def gguf(settings: dict[str, Any], folder: str) -> str:
    """The model of a Hugging Face folder as a GGUF file, converted once by llama.cpp's own
    converter.
    """
    outtype = OUTTYPES[settings["precision"]]
    made = Path(settings["work"], f"{Path(folder).name}-{outtype}.gguf")
    if not made.exists():
        cache = (Path(settings["llama_cpp"]) / "CMakeCache.txt").read_text()
        source = next(
            line.split("=", 1)[1]
            for line in cache.splitlines()
            if line.startswith("CMAKE_HOME_DIRECTORY:")
        )
        half = made.with_suffix(".half")
        command = [sys.executable, str(HERE / "convert_gguf.py"), source, folder]
        command += [settings["target"], str(half), outtype]
        subprocess.run(command, check=True, stdout=sys.stderr)
        half.rename(made)
    return str(made)


if __name__ == "__main__":
    serve(LlamaCpp)
