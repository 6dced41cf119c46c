"""What each option of a head and of its objective is worth: held-out tau of heads that differ from
the default in one option.

    python benchmarks/options.py [--quick] [--features URL] [--options default,mask-t,...] [--seeds
    3] [--epochs 2]
                                 [--part 1/2] [--folder out/options]

All heads see the same features in the same order for a seed, and are measured on the same held-out
conversations, in chains of 7 and of 3 drafts that are fed with their own tokens. The intervals are
of the ratio to the default head of the same seed, over conversations (95 %): they show what the
choice of held-out text leaves open. What a seed leaves open shows in tau_by_seed.

A run is short: two passes over 130,000 tokens take three minutes on one core (OMP_NUM_THREADS=1).
Every run is an artifact in --folder, so a second call goes on where the first was cut, and --part
1/2 and 2/2 share the runs between two processes. All options are run with the first seed before the
second begins. What is not run yet is left out of the table.

The last line of stdout is one JSON object: by option, tau in chains of 7 and 3 (mean and by seed),
their ratio to the default with its interval, and the CPU seconds of training.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import real_features
import torch

from eyas.artifact import Artifact, identity
from eyas.bench.machine import machine
from eyas.hub import resolve_target
from eyas.log import progress_bar
from eyas.model.batch import Batch, plan_batches
from eyas.model.chain import measure
from eyas.model.config import HeadOptions
from eyas.model.head import load_head
from eyas.model.vocab import TargetVocabulary
from eyas.shards import Features
from eyas.tau import RoundCounts, bootstrap, ratio_of_sums
from eyas.train.batches import BatchConfig
from eyas.train.loss import ObjectiveConfig
from eyas.train.state import StopConfig
from eyas.train.trainer import TrainConfig, train

DEFAULT = "default"
CHAINS = (7, 3)
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    DEFAULT: {},
    "mask-t": {"objective": {"loss_mask": "t"}},
    "mask-t+1": {"objective": {"loss_mask": "t+1"}},
    "steps-3": {"objective": {"num_ttt_steps": 3}},
    "steps-5": {"objective": {"num_ttt_steps": 5}},
    "decay-0.9": {"objective": {"step_decay": 0.9}},
    "decay-1.0": {"objective": {"step_decay": 1.0}},
    "steps-3-decay-1.0": {"objective": {"num_ttt_steps": 3, "step_decay": 1.0}},
    "out-of-vocabulary-kept": {"objective": {"out_of_vocabulary": "keep"}},
    "normaliser-positions": {"objective": {"normaliser": "positions"}},
    "lk-alpha": {"objective": {"loss": "lk_alpha"}},
    "lk-lambda": {"objective": {"loss": "lk_lambda"}},
    "norm-before-residual": {"head": {"norm_before_residual": True}},
    "norm-before-fc": {"head": {"norm_before_fc": True}},
    "fc-norm": {"head": {"fc_norm": True}},
    "norm-output": {"head": {"norm_output": True}},
    "eagle-3.1": {"head": {"fc_norm": True, "norm_output": True}},
    "frozen-lm-head": {"head": {"train_lm_head": False}},
    "W-1000": {"head": {"draft_vocab_size": 1000}},
    "W-4000": {"head": {"draft_vocab_size": 4000}},
    "W-all": {"head": {"draft_vocab_size": 0}},  # 0: the whole vocabulary
    "half-width": {"head": {"hidden_size": 0}},  # 0: half the target's, in whole heads
    "packed": {"batches": {"packed": True}},
}


def configured(
    args: argparse.Namespace, option: str, seed: int, vocabulary: TargetVocabulary
) -> TrainConfig:
    """The default run with one option changed."""
    changes, target = OPTIONS[option], vocabulary.config
    head: dict[str, Any] = dict(changes.get("head", {}))
    if head.get("draft_vocab_size") == 0:
        head["draft_vocab_size"] = target.vocab_size
    if head.get("hidden_size") == 0:
        head["hidden_size"] = max(1, target.hidden_size // target.head_dim // 2) * target.head_dim
    return TrainConfig(
        head=HeadOptions(**{"draft_vocab_size": 2048, **head}),
        objective=ObjectiveConfig(**changes.get("objective", {})),
        epochs=args.epochs,
        batches=BatchConfig(tokens=args.batch_tokens, **changes.get("batches", {})),
        learning_rate=args.learning_rate,
        stop=StopConfig(measurements=0),
        seed=seed,
    )


def counted(folder: str, held_out: Features, vocabulary: TargetVocabulary) -> dict[str, Any]:
    """Tokens emitted and rounds of each held-out conversation, by the length of chains."""
    head = load_head(folder)
    counts = {str(steps): [[0, 0] for _ in range(len(held_out))] for steps in CHAINS}
    batches = plan_batches(held_out.lengths, 4096, "held out")
    for numbers, samples in zip(batches, held_out.batches(batches), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            measured = measure(head, vocabulary, Batch.of(samples), max(CHAINS))
        for place, matches in measured.spans:
            for steps in CHAINS:
                tally = RoundCounts(steps)
                tally.add_answer(matches)
                row = counts[str(steps)][numbers[place]]
                row[0] += tally.emitted
                row[1] += tally.rounds
    return counts


def run(
    args: argparse.Namespace,
    option: str,
    seed: int,
    features: Artifact,
    vocabulary: TargetVocabulary,
) -> None:
    """Train and measure one head, unless that is done."""
    config = configured(args, option, seed, vocabulary)
    head, output = (
        Artifact(str((folder_of(args, option, seed) / part).resolve()))
        for part in ("head", "counts")
    )
    was_done, begun = head.is_done(), time.process_time()
    with progress_bar(f"{option} {seed}") as track:
        made = train(config, args.target, Features(features, "train"), head, track)
    seconds = None if was_done else time.process_time() - begun
    if output.begin(identity("eval", {}, {"head": made})):
        counts = counted(head.url, Features(features, "held_out"), vocabulary)
        output.write_json("counts.json", {"counts": counts, "cpu_seconds": seconds})
        output.finish("eval", {}, {"head": made}, {})


def folder_of(args: argparse.Namespace, option: str, seed: int) -> Path:
    """Where a run is kept: other settings, another folder."""
    settings = f"{args.features_identity}-{args.epochs}-{args.batch_tokens}-{args.learning_rate}"
    return Path(args.folder / "options" / settings / f"{option}-{seed}")


def read(args: argparse.Namespace, option: str, seed: int) -> dict[str, Any] | None:
    """What a run was counted to, if it is done."""
    output = Artifact(str((folder_of(args, option, seed) / "counts").resolve()))
    return output.read_json("counts.json") if output.is_done() else None  # type: ignore[no-any-return]


def ratio(ours: list[np.ndarray], theirs: list[np.ndarray]) -> dict[str, Any]:
    """Mean over seeds of tau by the default's tau, and its interval. [conversations, 2] of each
    seed: emitted, rounds.
    """

    def mean_ratio(table: np.ndarray) -> np.ndarray:
        pairs = np.split(table, len(ours) + len(theirs), axis=-1)
        taus = [ratio_of_sums(pair) for pair in pairs]
        return np.mean(np.array(taus[: len(ours)]) / np.array(taus[len(ours) :]), axis=0)

    interval = bootstrap(np.concatenate([*ours, *theirs], axis=1), mean_ratio, least=1)
    assert interval is not None
    exact = mean(tau(one) / tau(other) for one, other in zip(ours, theirs, strict=True))
    return {"ratio": round(exact, 4), "interval": [round(end, 4) for end in interval]}


def tau(counts: np.ndarray) -> float:
    return float(ratio_of_sums(counts))


def table(args: argparse.Namespace, options: list[str]) -> dict[str, Any]:
    """A row for each option that has a run."""
    rows = {}
    found = {
        (option, seed): read(args, option, seed)
        for option in {DEFAULT, *options}
        for seed in range(args.seeds)
    }
    for option in options:
        seeds = [seed for seed in range(args.seeds) if found[option, seed]]
        if not seeds:
            continue
        runs = {seed: found[option, seed] or {} for seed in seeds}
        seconds = [one["cpu_seconds"] for one in runs.values() if one["cpu_seconds"] is not None]
        row: dict[str, Any] = {"cpu_seconds": round(mean(seconds)) if seconds else None}
        both = [seed for seed in seeds if found[DEFAULT, seed]]
        for steps in map(str, CHAINS):
            counts = {
                seed: np.array(one["counts"][steps], dtype=float) for seed, one in runs.items()
            }
            row[f"tau_{steps}"] = round(mean(tau(one) for one in counts.values()), 4)
            row[f"tau_{steps}_by_seed"] = {seed: round(tau(one), 4) for seed, one in counts.items()}
            if both and option != DEFAULT:
                defaults = [(found[DEFAULT, seed] or {})["counts"][steps] for seed in both]
                theirs = [np.array(one, dtype=float) for one in defaults]
                row[f"to_default_{steps}"] = ratio([counts[seed] for seed in both], theirs)
        rows[option] = row
    return rows


def main() -> None:
    parser = real_features.arguments(__doc__, prompts=1500)
    parser.add_argument("--options", default=",".join(OPTIONS), help="comma-separated names")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--held-out-share", type=float, default=0.15)
    parser.add_argument("--part", default="1/1", help="which part of the runs, of how many")
    parser.set_defaults(folder=Path("out/options"))
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.seeds, args.epochs = min(args.prompts, 120), 1, 1
        args.options = (
            "default,mask-t,lk-lambda,eagle-3.1"
            if args.options == ",".join(OPTIONS)
            else args.options
        )
    options = args.options.split(",")
    unknown = set(options) - OPTIONS.keys()
    if unknown:
        parser.error(
            f"no such option: {', '.join(sorted(unknown))}; there are {', '.join(OPTIONS)}"
        )
    features = real_features.captured(args, args.held_out_share)
    args.features_identity = features.manifest().identity
    vocabulary = TargetVocabulary.load(resolve_target(args.target))
    part, parts = map(int, args.part.split("/"))
    jobs = [(option, seed) for seed in range(args.seeds) for option in options]
    for option, seed in jobs[part - 1 :: parts]:
        run(args, option, seed, features, vocabulary)
        counts = (read(args, option, seed) or {})["counts"]
        taus = ", ".join(
            f"chain of {steps}: {tau(np.array(counts[str(steps)], dtype=float)):.3f}"
            for steps in CHAINS
        )
        print(f"{option:24} seed {seed}  {taus}", flush=True)
    settings = {
        "epochs": args.epochs,
        "batch_tokens": args.batch_tokens,
        "learning_rate": args.learning_rate,
    }
    print(json.dumps({"options": table(args, options), **settings, "machine": machine()}))


if __name__ == "__main__":
    main()
