"""This checkout's engine against another checkout's: tokens per second, and the same tokens?

    python benchmarks/versions.py --other CHECKOUT [--quick] [--samples 6] [--data FILE.jsonl.gz]

Packaged target and head, one request, greedy, 2 threads, 10 dialogues, 128 tokens past the answers'
ends; plain decoding and a chain of 4, in bf16 and fp32. Each engine lives in a process of its own,
the worker of benchmarks/peers; samples alternate, the figure is the median. The last line of stdout
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import held_out

from eyas import hub
from eyas.chat import Chat

ROOT = Path(__file__).resolve().parents[1]
WAYS = {"plain": "off", "chain of 4": "fixed(4,1,5)"}
WARM_UP = 2  # samples that do not count


class Worker:
    """A checkout's engine in a process of its own, by the wire of benchmarks/peers."""

    def __init__(self, root: Path, settings: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "benchmarks/peers/engine_eyas.py"],
            cwd=root,
            env={**os.environ, "PYTHONPATH": f"{root}:{root}/benchmarks/peers"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.ask("load", **settings)

    def ask(self, do: str, **command: Any) -> dict[str, Any]:
        """One command and its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **command}) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        if "error" in answer:
            raise SystemExit(answer["error"])
        return answer

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def compared(other: Path, prompts: list[list[int]], settings: dict[str, Any], samples: int) -> Any:
    """Both checkouts on the same prompts, in turns."""
    workers = {"other": Worker(other, settings), "here": Worker(ROOT, settings)}
    speeds: dict[str, list[float]] = {name: [] for name in workers}
    tokens: dict[str, list[list[int]]] = {}
    for turn in range(WARM_UP + samples):
        for name in sorted(workers, reverse=turn % 2 == 1):
            given = workers[name].ask("decode", prompts=prompts, max_tokens=128, ignore_eos=True)
            answers = given["answers"]
            tokens[name] = [one["tokens"] for one in answers]
            if turn >= WARM_UP:
                decoded = sum(len(one["tokens"]) - 1 for one in answers)
                speeds[name].append(decoded / sum(one["seconds"] for one in answers))
    for worker in workers.values():
        worker.close()
    ratios = [here / other for here, other in zip(speeds["here"], speeds["other"], strict=True)]
    return {
        "tokens_per_s": {name: round(statistics.median(many), 1) for name, many in speeds.items()},
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(min(ratios), 3), round(max(ratios), 3)],
        "same_tokens": tokens["here"] == tokens["other"],
    }


def main() -> None:
    """Measure, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", type=Path, required=True, help="the other checkout")
    parser.add_argument("--data", type=Path, default=held_out.SGD_DEV)
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="two samples")
    arguments = parser.parse_args()
    target, head = hub.resolve_target("builtin"), hub.resolve_head("builtin")
    chat = Chat(target)
    dialogues = held_out.dialogues(arguments.data, 10)
    prompts = [list(chat.prompt_ids(messages)) for messages in dialogues]
    found = {}
    for precision in ("bfloat16", "float32"):
        for way, speculation in WAYS.items():
            settings = {
                "threads": 2,
                "max_length": 1024,
                "target": str(target),
                "head_eyas": str(head),
                "precision": precision,
                "speculation": speculation,
            }
            samples = 2 if arguments.quick else arguments.samples
            one = compared(arguments.other.resolve(), prompts, settings, samples)
            print(f"{way}, {precision}: {one}", flush=True)
            found[f"{way}, {precision}"] = one
    print(json.dumps({**found, "machine": held_out.machine()}))


if __name__ == "__main__":
    main()
