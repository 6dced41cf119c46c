"""How fast a target's features are computed: our own decoder, transformers' with hooks, or a vLLM
server; common beginnings once or each time.

    python benchmarks/capture.py [--quick] [--target smollm2] [--dtype float32] [--samples 48]
    [--system 0,64,256] [--rounds 3] [--vllm PYTHON]

    python benchmarks/capture.py --data FILE.jsonl.gz --data ... --template FOLDER --template ...

First form: samples are prompts that ship in the package, behind a system prompt of so many tokens,
with an answer of English filler; every method computes the same batches, in turns, and the median
of the rounds counts. Tokens a second are of samples: what is computed once for many counts for each
of them. Nothing is stored. With --vllm, an interpreter that has vLLM, a server of the target is
started by the command that `eyas capture --server` prints, proved, and measured as a third method,
over HTTP and its files; bytes a second are of three taps and the last hidden state.

Second form: which share of real conversations' tokens is a beginning that others have too, under
each target's own template: what computing it once saves within a window of `capture`, and what
storing it once would save within a shard.

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from eyas.bench.machine import machine
from eyas.builtin import demo_prompts
from eyas.chat import Chat
from eyas.errors import TemplateError
from eyas.features.capture import FeatureForward, request_of
from eyas.features.decoder import FeatureDecoder, HookedDecoder, OwnDecoder
from eyas.features.fleet import FleetConfig
from eyas.features.samples import (
    WINDOW,
    SamplePlan,
    forward_batches,
    plan_samples,
    shared_groups,
)
from eyas.features.state_proof import prove_by
from eyas.features.states import StateFleet, connector_folder, vllm_arguments
from eyas.hub import resolve_target
from eyas.model.vocab import target_shape
from eyas.plan.needs import FILLER
from eyas.records import Answer, Message

BATCH_TOKENS = 4096
SHARD = 50  # samples
ANSWER = FILLER * 4


def made_samples(chat: Chat, count: int, system_tokens: int) -> list[SamplePlan]:
    """Real prompts behind a system prompt of about so many tokens, each with an answer."""
    with gzip.open(demo_prompts(), "rt", encoding="utf-8") as lines:
        questions = (first_question(line) for line in lines)
        texts = list(islice(filter(None, questions), count))
    system = ""
    while (
        system_tokens
        and len(chat.prompt_ids([{"role": "system", "content": system + FILLER}]))
        <= system_tokens + 8
    ):
        system += FILLER
    made = []
    for number, text in enumerate(texts):
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": ANSWER}]
        prompt_ids, answer_ids = chat.answered(messages)
        ids = np.array(prompt_ids + answer_ids, dtype=np.int32)
        mask = np.arange(len(ids)) >= len(prompt_ids)
        made.append(SamplePlan(str(number), "", str(number), ids, mask))
    return made


def first_question(line: str) -> str:
    """What the user says first in a row of any shape; nothing for a row that is none, of which the
    package ships some.
    """
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return ""
    turns = row.get("messages") or row.get("conversations") or []
    return str(
        row.get("prompt") or next((turn.get("content") or turn.get("value") for turn in turns), "")
    )


def tokens_per_s(decoder: FeatureDecoder, samples: Sequence[SamplePlan], shares: bool) -> float:
    """Tokens of samples a second, of one pass over all of them."""
    forward, started = FeatureForward(decoder), time.perf_counter()
    for batch in forward_batches(samples, BATCH_TOKENS, shares):
        for sample in forward(batch):
            assert len(sample.last_hidden)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return sum(map(len, samples)) / (time.perf_counter() - started)


@contextmanager
def vllm_server(python: str, folder: str, dtype: str, length: int, *options: str) -> Iterator[str]:
    """The address of a server of the target, started for as long as the block lasts."""
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
                    "PYTHONPATH": connector_folder(),
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


def served(args: argparse.Namespace, folder: str, samples: Sequence[SamplePlan]) -> float:
    """Tokens a second of a vLLM server that was proved, the median of the rounds; without its
    prefix cache, which would hold the round before.
    """
    length = max(map(len, samples))
    options = folder, args.dtype, length, "--no-enable-prefix-caching"
    with vllm_server(args.vllm, *options) as url:
        requests = [request_of(one) for one in samples]
        decoder = OwnDecoder.load(folder, args.dtype)
        proof = prove_by(decoder, args.dtype, requests)
        tails, found = decoder.tails(), []
        for _ in range(args.rounds):
            fleet = StateFleet.open([url], FleetConfig(timeout_s=3600), proof, tails, "bench", "")
            with closing(fleet):
                started = time.perf_counter()
                for states in fleet.states(iter(requests)):
                    assert len(states.last_hidden)
                found.append(sum(map(len, samples)) / (time.perf_counter() - started))
        return statistics.median(found)


def speeds(args: argparse.Namespace) -> dict[str, Any]:
    """By length of the system prompt and method."""
    folder = resolve_target(args.target)
    chat = Chat(folder)
    decoders: dict[str, FeatureDecoder] = {
        "own": OwnDecoder.load(folder, args.dtype),
        "hooks": HookedDecoder.load(folder, args.dtype),
    }
    rows: dict[str, Any] = {}
    for system_tokens in args.system:
        samples = made_samples(chat, args.samples, system_tokens)
        methods = [
            (name, shares)
            for name in decoders
            for shares in ((False, True) if system_tokens else (False,))
        ]
        found: dict[tuple[str, bool], list[float]] = {method: [] for method in methods}
        for _ in range(args.rounds):
            for name, shares in methods:
                found[name, shares].append(tokens_per_s(decoders[name], samples, shares))
        if args.vllm:
            found["vllm", False] = [served(args, folder, samples)]
        mean_length = sum(map(len, samples)) / len(samples)
        row = {
            f"{name}{' shared' if shares else ''}": round(statistics.median(of))
            for (name, shares), of in found.items()
        }
        by_token = 4 * decoders["own"].shape.hidden_size * getattr(torch, args.dtype).itemsize
        rows[str(system_tokens)] = {
            "tokens_per_sample": round(mean_length),
            **row,
            "mb_per_s": {name: round(speed * by_token / 1e6, 2) for name, speed in row.items()},
        }
        print(f"system prompt of {system_tokens}: {rows[str(system_tokens)]}", flush=True)
    return {"benchmark": "capture", "dtype": args.dtype, "tokens_per_s": rows, "machine": machine()}


def answers_of(path: Path, chat: Chat, count: int) -> Iterator[Answer]:
    """So many conversations of a file, drawn with a fixed seed; what the assistant says in the file
    stands for the answers.
    """
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    random.Random(0).shuffle(rows)
    for number, row in enumerate(rows[:count]):
        turn = 0
        for end, message in enumerate(row["messages"], start=1):
            if message["role"] == "assistant" and any(
                one["role"] == "user" for one in row["messages"][:end]
            ):
                said = tuple(row["messages"][:end])
                with suppress(TemplateError):
                    ids = map(tuple, chat.answered(said))
                    key, name = f"{number}/{turn}", str(number)
                    yield Answer(key, name, path.name, "", turn, said, *ids, "stop", 0.0)
                turn += 1


def saved_share(samples: Sequence[SamplePlan], window: int) -> float:
    """Tokens that need not be done again, by all tokens, when common beginnings are done once in
    every `window` samples.
    """
    saved = 0
    for at in range(0, len(samples), window):
        saved += sum(
            shared * (len(group) - 1) for shared, group in shared_groups(samples[at : at + window])
        )
    return saved / sum(map(len, samples))


def shares(args: argparse.Namespace) -> dict[str, Any]:
    """By template and file."""
    rows: dict[str, Any] = {}
    for folder in args.template or [args.target]:
        chat = Chat(resolve_target(folder))
        for path in args.data:
            samples = plan_samples(answers_of(path, chat, args.samples), 1 << 30, ()).samples
            row = {
                "samples": len(samples),
                "tokens_per_sample": round(sum(map(len, samples)) / len(samples)),
                "computed_once_saves": round(saved_share(samples, WINDOW), 3),
                "stored_once_saves": round(saved_share(samples, SHARD), 3),
            }
            rows[f"{Path(folder).name} {path.name}"] = row
            print(f"{Path(folder).name} {path.name}: {row}", flush=True)
    return {"benchmark": "capture beginnings", "shares": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="few samples, one round: shows that it works"
    )
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--samples", type=int, default=None, help="48; of --data 768 conversations a file"
    )
    parser.add_argument(
        "--system", type=lambda text: [int(one) for one in text.split(",")], default=[0, 64, 256]
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", help="an interpreter that has vLLM: measure a server of it too")
    parser.add_argument(
        "--data", type=Path, action="append", help="gzip JSON lines of {'messages': [...]}"
    )
    parser.add_argument(
        "--template", action="append", help="folder of a tokenizer with its template"
    )
    args = parser.parse_args()
    args.samples = args.samples or (768 if args.data else 48)
    if args.quick:
        args.samples, args.rounds = (40 if args.data else 16), 1
    print(json.dumps(shares(args) if args.data else speeds(args)))


if __name__ == "__main__":
    main()
