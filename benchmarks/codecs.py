"""The tau that a codec costs: the same head, seeds and batches, trained on features of each codec.

    python benchmarks/codecs.py [--quick] [--seeds 3] [--codecs lossless,within4,...]

"/supervised" behind a codec: FeatureMeta.teacher. Features are captured once, exactly, and written
anew by each codec; `eyas eval` measures every head on the exact held-out features. Every part is an
artifact in --folder: a second run resumes. The last line of stdout is one JSON object.
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


def encoded(exact: Artifact, codec: str, url: str) -> Artifact:
    name, _, teacher = codec.partition("/")
    output = Artifact(url)
    made = exact.manifest("capture")
    settings, inputs = {"codec": codec}, {"exact": made}
    if not output.begin(identity("capture", settings, inputs)):
        return output
    for split in ("train", "held_out"):
        source = Features(exact, split)  # type: ignore[arg-type]
        own = {"codec": name, "teacher": teacher or "everywhere"}
        writer = ShardWriter(output, split, FeatureMeta(**source.meta.model_dump() | own))  # type: ignore[arg-type]
        todo = (at for at, entry in enumerate(source.entries) if entry.key not in writer.keys)
        for sample in source.stream(todo):
            writer.add(sample)
        writer.close()
    output.finish("capture", settings, inputs, {})
    return output


def share(features: Artifact) -> float:
    """Bytes of the training samples / those of plain bf16."""
    source = Features(features)
    plain = source.meta.model_copy(update={"codec": "raw", "dtype": "bfloat16"}).bytes_per_token
    return sum(entry.size for entry in source.entries) / (plain * sum(source.lengths))


def tau_of(
    args: argparse.Namespace, codec: str, seed: int, exact: Artifact, features: Artifact
) -> float:
    folder = args.folder / "heads" / f"{args.epochs}-{codec.replace('/', '-')}-{seed}"
    config = TrainConfig(
        epochs=args.epochs,
        learning_rate=args.learning_rate,
        seed=seed,
        stop=StopConfig(measurements=0),
        **args.training,
    )
    with progress_bar(f"{codec} {seed}") as track:
        train(config, args.target, Features(features), Artifact(f"{folder}/head"), track)
    head, output = Artifact(f"{folder}/head"), Artifact(f"{folder}/eval")
    evaluate(EvalConfig(), args.target, head.url, output, Features(exact, "held_out"))
    return float(output.read_json("eval.json")["tau"])


def compared(taus: dict[str, list[float]], shares: dict[str, float]) -> dict[str, Any]:
    found = {}
    for codec, of_seeds in taus.items():
        ratios = (tau / exact for tau, exact in zip(of_seeds, taus[BASELINE], strict=True))
        found[codec] = {
            "share_of_bf16": round(shares[codec], 4),
            "tau": round(mean(of_seeds), 4),
            "tau_by_seed": [round(tau, 4) for tau in of_seeds],
            "tau_to_lossless": round(mean(ratios), 4),
        }
    return found


def main() -> None:
    parser = held_out.feature_arguments(__doc__, prompts=1500)
    parser.add_argument("--codecs", default=CODECS, help="comma-separated, beside lossless")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, help="as `eyas train` takes it, if none")
    parser.add_argument("--held-out-share", type=float, default=0.15)
    args = parser.parse_args()
    args.training = {"head": {"draft_vocab_size": 2048}}
    if args.quick:
        args.prompts, args.seeds, args.epochs = min(args.prompts, 120), 1, 2
        args.training = {"head": {"draft_vocab_size": 512}, "batches": {"tokens": 1024}}
        args.training["objective"] = {"num_ttt_steps": 3}
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
