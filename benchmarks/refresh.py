"""A head of dialogue meets traffic of mathematics: the watch, then `eyas run runs/refresh.yaml`,
with the old mix and without.

    python benchmarks/refresh.py [--quick] [--target builtin]
    python benchmarks/refresh.py --target smollm2 --features out/smollm2/features

A head is trained on dialogues alone: on answers made here, or on those samples of --features (of
`eyas run runs/smollm2.yaml`) that come from dialogues. Its card is measured on held-out dialogues,
and it is served. The server answers other dialogues, then word problems, and a watch reads its
/metrics (see watch.py). The bodies of the word problems are the gateway's log; some refuse. Two
refreshes from that log follow, which share all but their training:

    forgotten  no dialogue is learned again, and the learning rate is ten times as high
    kept       half of the training is dialogue (`keep.share`, `train.start.keep_share`)

tau of both heads on both mixes, with paired intervals, is in each refresh's decision. The last line
of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import watch
import yaml
from eyas.cli.decision import DECISION
from held_out import DATA, SGD_DEV, dialogues, rows

from eyas.artifact import Artifact, identity
from eyas.data.prompts import PromptsConfig, make_prompts
from eyas.features.capture import SPLITS, CaptureConfig, capture, split_of
from eyas.features.generate import GenerateConfig, generate
from eyas.hub import resolve_target
from eyas.log import console
from eyas.shards import Features
from eyas.shards.layout import index_name
from eyas.train.trainer import TrainConfig, train

ROOT = Path(__file__).resolve().parents[1]
DIALOGUES, PROBLEMS = DATA / "sgd_train.jsonl.gz", DATA / "gsm8k_train.jsonl.gz"
# sources of runs/smollm2.yaml in which people talk, and their share that no head learns from
TALKS, TALKS_HELD_OUT = ("multidogo", "self-dialogue", "star", "taskmaster-4"), 0.15
FIRST_RATE = 2.5e-3  # of runs/builtin_head.yaml
MAX_TOKENS = 64  # of an answer
REFUSING = 7  # each so manieth request does not consent
REFRESHES = {"forgotten": (0.0, 3e-3), "kept": (0.5, 2e-4)}  # share of dialogue, learning rate
WATCHED = "fixed(4,1,5)"  # the drafts of runs/refresh.yaml
Done = TypeVar("Done")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="builtin", help="builtin, smollm2 or a folder")
    parser.add_argument("--features", help="finished features with dialogues among their sources")
    parser.add_argument("--output", type=Path, default=Path("out/refresh-benchmark"))
    parser.add_argument("--prompts", type=int, help="requests in the log")
    parser.add_argument("--quick", action="store_true", help="few prompts: wide intervals")
    args = parser.parse_args()
    size = args.prompts or (240 if args.quick else 1500)
    output: Path = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Done]) -> Done:
        started = time.monotonic()
        done = work()
        seconds[name] = round(time.monotonic() - started, 1)
        console.print(f"{name}: {seconds[name]} s")
        return done

    kept: dict[str, Any]
    if args.features:
        talks = only_talks(Artifact(args.features), output / "dialogues")
        train_section = yaml.safe_load((ROOT / "runs/smollm2.yaml").read_text())["train"]
        quickly = {"epochs": 1, "stop": {"measurements": 2}, "data_share": 0.5 if args.quick else 1}
        training = TrainConfig.model_validate({**train_section, **quickly})
        kept = {"keep_mix": talks.url}
    else:
        own = rows(DIALOGUES)[: 2 * size]
        write(output / "dialogues.jsonl", own[:size])
        write(output / "old_mix.jsonl", own[size:])
        talks = timed("features", lambda: made_here(args.target, output, size))
        training = TrainConfig.model_validate(
            {"epochs": 4, "learning_rate": FIRST_RATE, "batches": {"tokens": 1024}}
        )
        kept = {"prompts": prompts_of(output / "old_mix.jsonl", size)}
    head = timed("head", lambda: head_of_dialogue(args.target, talks, training, output / "head"))
    log = output / "gateway.jsonl"
    write(log, [logged(number, row) for number, row in enumerate(rows(PROBLEMS)[:size])])
    result: dict[str, Any] = {"target": args.target, "prompts": size, "quick": args.quick}
    result["watch"] = timed("watch", lambda: watched(args.target, head, rows(log), output))
    shared = refresh(args.target, head, log, size, str(output / "refresh"))
    for name, (share, rate) in REFRESHES.items():
        content = with_kept(shared, kept, share)
        content["train"]["learning_rate"] = rate
        code = timed(name, partial(run, content, output / f"{name}.yaml"))
        decision = json.loads((output / "refresh" / DECISION).read_text())
        (output / f"{name}.json").write_text(json.dumps(decision, indent=1))
        exports = list((output / "refresh").glob("export-*"))
        result[name] = {"exit_code": code, "any_export": bool(exports), **decision}
    print(json.dumps({**result, "seconds": seconds}))


def made_here(target: str, output: Path, size: int) -> Artifact:
    """Answers to dialogues and their features; found done the second time."""
    parts = {name: Artifact(f"{output}/head-{name}") for name in ("prompts", "answers", "features")}
    folder = resolve_target(target)
    config = PromptsConfig.model_validate(prompts_of(output / "dialogues.jsonl", size))
    make_prompts(config, parts["prompts"])
    settings = GenerateConfig(target=folder, max_tokens=MAX_TOKENS, max_batch=32)
    generate(settings, parts["prompts"], parts["answers"])
    capture(CaptureConfig(target=folder, held_out_share=0.05), parts["answers"], parts["features"])
    return parts["features"]


def only_talks(features: Artifact, output: Path) -> Artifact:
    """Features of TALKS alone: an index of their own over the same shards, which are linked.

    What the general head learned is split anew: for a head from scratch all of it is unseen.
    """
    made = features.manifest("capture")
    config = {**made.config, "sources": TALKS, "held_out_share": TALKS_HELD_OUT}
    talks = Artifact(str(output))
    if not talks.begin(identity("capture", config, made.inputs)):
        return talks
    index = features.read_json(index_name("train"))  # the other split has tables of its own
    samples = [one for one in index["samples"] if one["source"] in TALKS]
    for shard in {one["shard"] for one in samples}:
        place = features.local_path(shard)
        assert place is not None, "--features is a folder of this machine"
        (output / shard).unlink(missing_ok=True)
        (output / shard).symlink_to(Path(place).resolve())
        talks.remember(shard, made.files[shard])
    counts = {}
    for split in SPLITS:
        mine = [
            one
            for one in samples
            if split_of(one["key"].rsplit("/", 1)[0], TALKS_HELD_OUT) == split
        ]
        talks.write_json(index_name(split), {**index, "samples": mine})
        counts[split] = len(mine)
    talks.finish("capture", config, made.inputs, counts, made.facts)
    return talks


def prompts_of(path: Path, size: int) -> dict[str, Any]:
    """Settings of prompts: one file of dialogues."""
    source = {"path": str(path), "licence": "CC-BY-SA-4.0", "prompts_by": "human"}
    source |= {"name": "schema-guided-dialogue", "fictional": True}
    return {"sources": [source], "max_prompts": size}


def head_of_dialogue(target: str, talks: Artifact, config: TrainConfig, output: Path) -> str:
    """A head from scratch; found done the second time."""
    head = Artifact(str(output))
    held_out = Features(talks, "held_out")
    train(config, target, Features(talks, "train"), head, held_out=held_out)
    return head.url


def logged(number: int, row: dict[str, Any]) -> dict[str, Any]:
    """A request body as a gateway logs it."""
    asked = [message for message in row["messages"] if message["role"] == "user"][:1]
    return {
        **watch.body(asked, MAX_TOKENS),
        "user": f"user-{number % 50}",
        "metadata": {"training": "no" if number % REFUSING == 0 else "yes"},
    }


def watched(target: str, head: str, log: list[dict[str, Any]], output: Path) -> dict[str, Any]:
    """The head's card on dialogues, and a watch over its server: dialogues, then the log."""
    size = min(100, len(log) // 4)
    asked = dialogues(SGD_DEV, 2 * size)
    args = argparse.Namespace(
        target=target, head=head, speculation=WATCHED, max_tokens=MAX_TOKENS, requests=size // 2
    )
    card = watch.measured_card(args, asked[:size], str(output / f"card-{size}"))
    old = [watch.body(messages, MAX_TOKENS) for messages in asked[size:]]
    with watch.server(args) as url:
        found = asyncio.run(watch.live(args, card, url, old, log))
    before, after = found.pop("rows")
    return {
        "card": {"tau": round(card.tau, 3), "interval": card.interval},
        "tau_before": round(watch.tau_of(np.array(before)), 3),
        "tau_after": round(watch.tau_of(np.array(after)), 3),
        "requests": args.requests,
        **found,
    }


def refresh(target: str, head: str, log: Path, size: int, output: str) -> dict[str, Any]:
    """runs/refresh.yaml with the sizes of this benchmark."""
    content: dict[str, Any] = yaml.safe_load((ROOT / "runs/refresh.yaml").read_text())
    content.update(target=target, output=output)
    traffic = content["prompts"]["sources"][0]
    traffic.update(path=str(log), fictional=True)
    traffic["traffic"].update(share=1.0)
    content["prompts"].update(workers=1, max_prompts=size)
    content["generate"].update(max_tokens=MAX_TOKENS)
    content["capture"]["held_out_share"] = 0.3
    content["train"]["start"]["head"] = head
    content["eval"].update(num_prompts=size, max_tokens=MAX_TOKENS)
    content["serve"]["engine"].update(max_batch=1, max_length=1024)
    content["bench"].update(num_prompts=8, max_tokens=32)
    return content


def with_kept(content: dict[str, Any], kept: dict[str, Any], share: float) -> dict[str, Any]:
    """A copy whose old mix is features (`keep_mix`), or prompts to answer and capture first."""
    content = copy.deepcopy(content)
    if "keep_mix" in kept:
        del content["keep"]
        content["train"]["start"].update(kept, keep_share=share)
    else:
        content["keep"].update(kept, share=share)
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
