"""What benchmarks run on: held-out dialogues cut before an answer, prompts by task, and
real features.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import fsspec

from eyas import hub
from eyas.artifact import Artifact, identity
from eyas.chat import Chat
from eyas.engine.request import Request, SamplingParams
from eyas.features.capture import CaptureConfig, capture
from eyas.features.generate import GenerateConfig, generate
from eyas.log import progress_bar
from eyas.model.threads import num_threads
from eyas.records import Prompt
from eyas.shards import Features

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SGD_DEV = DATA / "sgd_dev.jsonl.gz"
# Spec-Bench's six tasks by its categories; all others are MT-Bench's
SPEC_BENCH = {
    "translation": "translation",
    "summarization": "summarization",
    "qa": "questions",
    "math_reasoning": "maths",
    "rag": "retrieval",
}


def add_sources(parser: argparse.ArgumentParser, prompts: int, target: str) -> None:
    """The options that say what is measured on what."""
    parser.add_argument("--quick", action="store_true", help="a minute's worth")
    parser.add_argument("--target", default=target, help="folder, smollm2 or builtin")
    parser.add_argument(
        "--data",
        type=Path,
        default=SGD_DEV,
        help="conversations, JSON lines (.gz too) with messages",
    )
    parser.add_argument("--prompts", type=int, default=prompts, help="how many")


def arguments(
    description: str | None, prompts: int, model: str = "smollm2"
) -> argparse.ArgumentParser:
    """The options of all benchmarks on held-out prompts. model: target and head by default."""
    parser = argparse.ArgumentParser(description=description)
    add_sources(parser, prompts, model)
    parser.add_argument("--head", default=model, help="folder, smollm2 or builtin")
    parser.add_argument("--max-tokens", type=int, default=128)
    return parser


def dialogues(path: Path, count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """`count` conversations, each cut after a user turn chosen by the seed."""
    conversations = [row["messages"] for row in rows(path)]
    rng = random.Random(seed)
    rng.shuffle(conversations)
    cut = []
    for messages in conversations[:count]:
        ends = [index for index, message in enumerate(messages) if message["role"] == "user"]
        cut.append(messages[: rng.choice(ends) + 1])
    return cut


def spec_bench(folder: Path) -> dict[str, list[list[dict[str, str]]]]:
    """The first turns of Spec-Bench's prompts by task, in its own order; nothing is trained on
    them.
    """
    by_task: dict[str, list[list[dict[str, str]]]] = {}
    for row in rows(folder / "prompts" / "spec_bench.jsonl"):
        task = SPEC_BENCH.get(row["category"], "chat")
        by_task.setdefault(task, []).append([{"role": "user", "content": row["turns"][0]}])
    return by_task


def not_trained_on(folder: Path, count: int) -> dict[str, list[list[dict[str, str]]]]:
    """Up to `count` prompts a task from sets that recipes/head_prompts.py takes prompts from, or
    leaves alone: dialogues of a set of their own, cut before an answer; word problems and commands
    from the end of the order whose beginning the recipe takes.
    """
    found = {"dialogues": dialogues(folder / "sgd_dev.jsonl.gz", count)}
    for task, name in (("word problems", "gsm8k_train"), ("commands", "tldr")):
        everything = rows(folder / f"{name}.jsonl.gz")
        random.Random(0).shuffle(everything)  # as the recipe does
        found[task] = [row["messages"][:1] for row in everything[-count:]]
    return found


def short(
    conversations: list[list[dict[str, str]]], most_characters: int
) -> list[list[dict[str, str]]]:
    """Those whose turns have so many characters together, or fewer."""
    return [
        one for one in conversations if sum(len(turn["content"]) for turn in one) <= most_characters
    ]


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines; ends the program where it is not there."""
    if not path.exists():
        sys.exit(
            f"error: no prompts at {path}\n  -> give the file or folder that has them with --data"
        )
    with fsspec.open(str(path), "rt", encoding="utf-8", compression="infer") as lines:
        return [json.loads(line) for line in lines]


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
    return f"{num_threads()} threads"


def feature_arguments(description: str | None, prompts: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_sources(parser, prompts, "smollm2")
    parser.add_argument(
        "--features", help="a finished capture artifact to take instead, of codec raw or lossless"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("out/features"),
        help="where everything goes; a second run goes on",
    )
    return parser


def captured(args: argparse.Namespace, held_out_share: float) -> Artifact:
    """Exact features: those given, or the target's answers to the first turns of real dialogues,
    made once and kept.
    """
    if args.features:
        given = Artifact(args.features)
        if Features(given).meta.codec not in ("raw", "lossless"):
            sys.exit(
                f"error: {args.features} holds no exact features\n  -> capture with codec: lossless"
            )
        return given
    made = args.folder / f"{args.data.name.split('.')[0]}-{args.prompts}"
    answers, features = Artifact(str(made / "answers")), Artifact(str(made / "features"))
    generation = GenerateConfig(target=args.target, dtype="bfloat16", max_tokens=128, max_batch=32)
    with progress_bar("generate") as track:
        generate(generation, prompts_artifact(args, str(made / "prompts")), answers, track)
    with progress_bar("capture") as track:
        capture(
            CaptureConfig(target=args.target, held_out_share=held_out_share, codec="lossless"),
            answers,
            features,
            track,
        )
    return features


def prompts_artifact(args: argparse.Namespace, url: str) -> Artifact:
    """The user's turns of the dialogues, as the prompts stage would hand them on."""
    output = Artifact(url)
    rows = []
    for messages in dialogues(args.data, args.prompts):
        turns = tuple(message["content"] for message in messages if message["role"] == "user")[:4]
        name = hashlib.sha256("\n".join(turns).encode()).hexdigest()[:16]
        rows.append(Prompt(id=name, source=args.data.name.split(".")[0], licence="", turns=turns))
    rows = list({row.id: row for row in rows}.values())
    settings = {"benchmark": f"{args.data.name} {args.prompts}"}
    if output.begin(identity("prompts", settings, {})):
        output.write_jsonl("prompts-00000.jsonl", [row.to_json() for row in rows])
        output.finish("prompts", settings, {}, {"prompts": len(rows)})
    return Artifact(url)
