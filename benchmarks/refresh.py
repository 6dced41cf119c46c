"""A head of dialogue meets traffic of mathematics: `eyas run runs/refresh.yaml`, accepted and
refused.

A head is trained on dialogues alone. Then its server is asked word problems, which a log holds as
OpenAI bodies; some do not consent. Two refreshes from the same log:

    accepted   a fifth of the training is dialogue again (`keep.share`)
    refused    none of it is, and the learning rate is ten times as high: dialogue is forgotten

tau of both heads on both mixes, with paired intervals, is in each refresh's decision.json. The last
line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from held_out import DATA, rows

from eyas.artifact import Artifact
from eyas.cli.decision import DECISION
from eyas.data.prompts import PromptsConfig, make_prompts
from eyas.features.capture import CaptureConfig, capture
from eyas.features.generate import GenerateConfig, generate
from eyas.hub import resolve_target
from eyas.shards import Features
from eyas.train.trainer import TrainConfig, train

ROOT = Path(__file__).resolve().parents[1]
DIALOGUES, PROBLEMS = DATA / "sgd_train.jsonl.gz", DATA / "gsm8k_train.jsonl.gz"
FIRST_RATE = 2.5e-3  # of runs/builtin_head.yaml
REFUSING = 7  # each so manieth request does not consent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="builtin", help="builtin, smollm2 or a folder")
    parser.add_argument("--output", type=Path, default=Path("out/refresh-benchmark"))
    parser.add_argument("--quick", action="store_true", help="few prompts: wide intervals")
    given = parser.parse_args()
    size = 240 if given.quick else 1500
    output: Path = given.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    first, kept = output / "dialogues.jsonl", output / "old_mix.jsonl"
    conversations = rows(DIALOGUES)[: 2 * size]
    write(first, conversations[:size])
    write(kept, conversations[size:])
    log = output / "gateway.jsonl"
    write(log, [logged(number, row) for number, row in enumerate(rows(PROBLEMS)[:size])])
    started = time.monotonic()
    head = head_of_dialogue(given.target, first, output / "head", size)
    seconds = {"head": round(time.monotonic() - started, 1)}
    result: dict[str, Any] = {"target": given.target, "prompts": size, "quick": given.quick}
    for name, keep_share, rate in (("accepted", 0.2, 3e-4), ("refused", 0.0, 3e-3)):
        started = time.monotonic()
        content = refresh(given.target, head, log, kept, size)
        content["output"] = str(output / name)
        content["keep"]["share"] = keep_share
        content["train"]["learning_rate"] = rate
        code = run(content, output / f"{name}.yaml")
        decision = json.loads((output / name / DECISION).read_text())
        exported = bool(list((output / name).glob("export-*")))
        result[name] = {"exit_code": code, "any_export": exported, **decision}
        seconds[name] = round(time.monotonic() - started, 1)
    print(json.dumps({**result, "seconds": seconds}))


def logged(number: int, row: dict[str, Any]) -> dict[str, Any]:
    """A request body as a gateway logs it."""
    asked = [message for message in row["messages"] if message["role"] == "user"][:1]
    return {
        "model": "target",
        "messages": asked,
        "user": f"user-{number % 50}",
        "metadata": {"training": "no" if number % REFUSING == 0 else "yes"},
    }


def head_of_dialogue(target: str, prompts: Path, output: Path, size: int) -> str:
    """A head from scratch on dialogues; found done the second time."""
    folder = resolve_target(target)
    parts = {name: Artifact(f"{output}/{name}") for name in ("prompts", "answers", "features")}
    source = {"path": str(prompts), "licence": "CC-BY-SA-4.0", "prompts_by": "human"}
    make_prompts(
        PromptsConfig(sources=[{**source, "name": "schema-guided-dialogue", "fictional": True}]),
        parts["prompts"],
    )
    settings = {"target": folder, "max_tokens": 64, "max_batch": 32}
    generate(GenerateConfig(**settings), parts["prompts"], parts["answers"])
    capture(CaptureConfig(target=folder, held_out_share=0.05), parts["answers"], parts["features"])
    config = TrainConfig(epochs=4, learning_rate=FIRST_RATE, batches={"tokens": 1024})
    head = Artifact(f"{output}/train")
    train(
        config,
        target,
        Features(parts["features"], "train"),
        head,
        held_out=Features(parts["features"], "held_out"),
    )
    return head.url


def refresh(target: str, head: str, log: Path, kept: Path, size: int) -> dict[str, Any]:
    """runs/refresh.yaml with the sizes of this benchmark."""
    content: dict[str, Any] = yaml.safe_load((ROOT / "runs/refresh.yaml").read_text())
    content["target"] = target
    traffic = content["prompts"]["sources"][0]
    traffic.update(path=str(log), fictional=True)
    traffic["traffic"].update(share=1.0)
    content["prompts"].update(workers=1, max_prompts=size)
    content["generate"].update(max_tokens=64)
    content["capture"]["held_out_share"] = 0.3
    source = {"path": str(kept), "licence": "CC-BY-SA-4.0", "prompts_by": "human"}
    source |= {"name": "schema-guided-dialogue", "fictional": True}
    content["keep"]["prompts"] = {"sources": [source], "max_prompts": size}
    content["train"]["start"] = {"head": head, "keep_tolerance": 0.02}
    content["eval"].update(num_prompts=size, max_tokens=64)
    content["serve"]["engine"].update(max_batch=1, max_length=1024)
    content["bench"].update(num_prompts=8, max_tokens=32)
    return content


def run(content: dict[str, Any], file: Path) -> int:
    """The exit code of `eyas run`; its output goes to stderr."""
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    command = [sys.executable, "-m", "eyas.cli.main", "run", str(file)]
    return subprocess.run(command, stdout=sys.stderr, check=False).returncode


def write(path: Path, content: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))


if __name__ == "__main__":
    main()
