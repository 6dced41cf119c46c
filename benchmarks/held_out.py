"""Held-out prompts for the benchmarks: real dialogues cut before one of their answers. Knows JSONL
and the chat template.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import fsspec
import torch

from eyas import hub
from eyas.chat import Chat
from eyas.engine.request import Request, SamplingParams

SGD_DEV = Path(__file__).resolve().parents[2] / "shared" / "data" / "sgd_dev.jsonl.gz"


def arguments(description: str | None, prompts: int) -> argparse.ArgumentParser:
    """The options that every benchmark on held-out prompts has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a minute's worth")
    parser.add_argument("--target", default="builtin", help="target folder, or builtin")
    parser.add_argument("--head", default="builtin", help="head folder, or builtin")
    parser.add_argument(
        "--data",
        type=Path,
        default=SGD_DEV,
        help="conversations, JSON lines (.gz too) with messages",
    )
    parser.add_argument("--prompts", type=int, default=prompts, help="how many")
    parser.add_argument("--max-tokens", type=int, default=128)
    return parser


def dialogues(path: Path, count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """`count` conversations, each cut after a user turn chosen by the seed."""
    if not path.exists():
        sys.exit(f"error: no conversations at {path}\n  -> give your own with --data FILE.jsonl")
    with fsspec.open(str(path), "rt", encoding="utf-8", compression="infer") as lines:
        rows = [json.loads(line)["messages"] for line in lines]
    rng = random.Random(seed)
    rng.shuffle(rows)
    cut = []
    for messages in rows[:count]:
        ends = [index for index, message in enumerate(messages) if message["role"] == "user"]
        cut.append(messages[: rng.choice(ends) + 1])
    return cut


def requests(
    args: argparse.Namespace, max_length: int = 1024, temperature: float = 0.0
) -> list[Request]:
    """Requests over held-out dialogues, those that leave no room for an answer excluded."""
    chat = Chat(hub.resolve_target(args.target))
    params = SamplingParams(max_tokens=args.max_tokens, temperature=temperature)
    made = []
    for index, messages in enumerate(dialogues(args.data, args.prompts)):
        ids = chat.prompt_ids(messages)
        if len(ids) + args.max_tokens <= max_length:
            made.append(Request(f"{index}", tuple(ids), params))
    return made


def machine() -> str:
    return f"{torch.get_num_threads()} threads, torch {torch.__version__}"
