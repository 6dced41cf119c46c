"""Real features for the benchmarks of the store: the target's own answers to real
dialogues. Knows the stages.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from held_out import SGD_DEV, dialogues

from eyas.artifact import Artifact, identity
from eyas.features.capture import CaptureConfig, capture
from eyas.features.generate import GenerateConfig, generate
from eyas.log import progress_bar
from eyas.records import Prompt
from eyas.shards import Features


def arguments(description: str | None, prompts: int) -> argparse.ArgumentParser:
    """Options of the benchmarks on features."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a minute's worth")
    parser.add_argument("--target", default="smollm2", help="folder, smollm2 or builtin")
    parser.add_argument(
        "--data",
        type=Path,
        default=SGD_DEV,
        help="conversations, JSON lines (.gz too) with messages",
    )
    parser.add_argument("--prompts", type=int, default=prompts, help="how many")
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
