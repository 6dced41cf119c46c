"""The tau that a codec costs: the same head, the same seed and the same order of batches, trained
on features from each codec.

    python benchmarks/codecs.py [--quick] [--seeds 3] [--codecs lossless,within4,...] [--features
    URL] [--folder out/features]

A codec may have "/supervised" behind it: the last hidden state is kept only where somebody asks it
(FeatureMeta.teacher). Features are captured once, exactly, and written anew by each codec; every
head is measured by `eyas eval` on the exact held-out features, since those are what a server has.
Three seeds tell what a codec costs from what a seed costs: a head trained twice from the same
features with other seeds differs too. Every part is an artifact in --folder, so a second run goes
on where the first was cut.

The last line of stdout is one JSON object: by codec, its share of bf16, tau of each seed, their
mean, and the mean of the ratios to the lossless head of the same seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

import held_out

from eyas.artifact import Artifact, identity
from eyas.bench.machine import machine
from eyas.evaluate.evaluate import EvalConfig, evaluate
from eyas.log import progress_bar
from eyas.shards import FeatureMeta, Features, ShardWriter
from eyas.train.state import StopConfig
from eyas.train.trainer import TrainConfig, train

CODECS = "lossless,within4,within4/supervised"
BASELINE = "lossless"
# while training: `eyas eval` judges the last head of each
NOT_MEASURED = StopConfig(measurements=0)


def encoded(exact: Artifact, codec: str, url: str) -> Artifact:
    name, _, teacher = codec.partition("/")
    output = Artifact(url)
    made = exact.manifest("capture")
    settings, inputs = {"codec": codec}, {"exact": made}
    if not output.begin(identity("capture", settings, inputs)):
        return output
    for split in ("train", "held_out"):
        source = Features(exact, split)  # type: ignore[arg-type]
        meta = FeatureMeta(
            **{**source.meta.model_dump(), "codec": name, "teacher": teacher or "everywhere"}
        )
        writer = ShardWriter(output, split, meta)  # type: ignore[arg-type]
        for sample in source.stream(
            number for number, entry in enumerate(source.entries) if entry.key not in writer.keys
        ):
            writer.add(sample)
        writer.close()
    output.finish("capture", settings, inputs, {})
    return output


def share(features: Artifact) -> float:
    """Bytes of the training samples, tokens and all, by those of plain bf16."""
    source = Features(features)
    plain = source.meta.model_copy(update={"codec": "raw", "dtype": "bfloat16"}).bytes_per_token
    return sum(entry.size for entry in source.entries) / (plain * sum(source.lengths))


def tau_of(
    args: argparse.Namespace, codec: str, seed: int, exact: Artifact, features: Artifact
) -> float:
    """Train and measure one head."""
    folder = args.folder / "heads" / f"{args.epochs}-{codec.replace('/', '-')}-{seed}"
    config = TrainConfig(
        epochs=args.epochs,
        learning_rate=args.learning_rate,
        stop=NOT_MEASURED,
        seed=seed,
        **args.training,
    )
    with progress_bar(f"{codec} {seed}") as track:
        train(config, args.target, Features(features), Artifact(f"{folder}/head"), track)
    head, output = Artifact(f"{folder}/head"), Artifact(f"{folder}/eval")
    evaluate(EvalConfig(), args.target, head.url, output, Features(exact, "held_out"))
    return float(output.read_json("eval.json")["tau"])


def compared(taus: dict[str, list[float]], shares: dict[str, float]) -> dict[str, Any]:
    return {
        codec: {
            "share_of_bf16": round(shares[codec], 4),
            "tau": round(mean(of_seeds), 4),
            "tau_by_seed": [round(tau, 4) for tau in of_seeds],
            "tau_to_lossless": round(
                mean(tau / exact for tau, exact in zip(of_seeds, taus[BASELINE], strict=True)), 4
            ),
        }
        for codec, of_seeds in taus.items()
    }


def main() -> None:
    parser = held_out.feature_arguments(__doc__, prompts=1500)
    parser.add_argument(
        "--codecs", default=CODECS, help="comma-separated; lossless is always among them"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, help="as `eyas train` takes it, if none")
    parser.add_argument("--held-out-share", type=float, default=0.15)
    args = parser.parse_args()
    args.training = {"head": {"draft_vocab_size": 2048}}
    if args.quick:
        args.prompts, args.seeds, args.epochs = min(args.prompts, 120), 1, 2
        args.training = {
            "head": {"draft_vocab_size": 512},
            "batches": {"tokens": 1024},
            "objective": {"num_ttt_steps": 3},
        }
    exact = held_out.captured(args, args.held_out_share)
    codecs = [BASELINE, *(codec for codec in args.codecs.split(",") if codec != BASELINE)]
    taus: dict[str, list[float]] = {}
    shares: dict[str, float] = {}
    for codec in codecs:
        where = args.folder / "codecs" / f"{exact.manifest().identity}-{codec.replace('/', '-')}"
        features = encoded(exact, codec, str(Path(where).resolve()))
        shares[codec] = share(features)
        taus[codec] = [tau_of(args, codec, seed, exact, features) for seed in range(args.seeds)]
        print(f"{codec:20} {compared(taus, shares)[codec]}", flush=True)
    print(
        json.dumps({"codecs": compared(taus, shares), "epochs": args.epochs, "machine": machine()})
    )


if __name__ == "__main__":
    main()
