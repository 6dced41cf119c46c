"""A forecast of tau held against what came: heads of 1/16, 1/8, 1/4 and 1/2 of the data give tau at
all of it with an interval (`eyas plan --forecast`), and a head of all of it is trained too.

    python benchmarks/learning_curve.py [--quick] [--target smollm2] [--features URL] [--seeds 1]
        [--config run.yaml] [--set epochs=3 ...] [--folder out/learning_curve] [--most 1-2]

Without --features the target's own answers to real dialogues are made and captured first. --config
and --set are those of `eyas train`. Every run is an artifact in --folder, so a second call goes on
where the first was cut. With several seeds, all runs are points of the curve, and what a seed
changes is shown: the standard deviation of tau by the data, as a share of tau.

--most is the largest share, the one that is foretold: half of the data is half of the time.

The last line of stdout is one JSON object: the measured runs, the forecast of the whole, what was
measured there, and whether it lies in the interval.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import real_features
from eyas.plan.learning_curve import learning_curve, read_runs

from eyas.artifact import Artifact
from eyas.bench.machine import machine
from eyas.cli.options import stage_config
from eyas.cli.run import StageFolder
from eyas.log import progress_bar
from eyas.shards import Features
from eyas.train.trainer import TrainConfig, train

SHARES = {"1-16": 1 / 16, "1-8": 1 / 8, "1-4": 1 / 4, "1-2": 1 / 2, "all": 1.0}
HELD_OUT_SHARE = 0.1
QUICK_PROMPTS = 160
QUICK = ("epochs=3", "batches.tokens=256", "stop.measurements=2")


def main() -> None:
    parser = real_features.arguments(__doc__, prompts=2000)
    parser.set_defaults(folder=Path("out/learning_curve"))
    parser.add_argument("--config", type=Path, help="run file; its section train is used")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--most", default="all", choices=[*SHARES][-2:])
    args = parser.parse_args()
    settings = list(args.set)
    if args.quick:
        args.prompts = min(args.prompts, QUICK_PROMPTS)
        settings = [*QUICK, *settings]
    given = Artifact(args.features) if args.features else None
    features = given or real_features.captured(args, HELD_OUT_SHARE)
    config = stage_config(TrainConfig, "train", args.config, settings)
    source, held_out = Features(features, "train"), Features(features, "held_out")
    names = [*SHARES][: [*SHARES].index(args.most) + 1]
    urls: dict[str, list[str]] = {name: [] for name in names}
    for seed in range(args.seeds):
        for name in names:
            changed = config.model_copy(update={"data_share": SHARES[name], "seed": seed})
            output = StageFolder(str(args.folder), "train")
            with progress_bar(f"{name} of the data, seed {seed}") as track:
                train(changed, args.target, source, output, track, held_out)
            urls[name].append(output.url)
    print(json.dumps(compared(urls, args.target)))


def compared(urls: dict[str, list[str]], target: str) -> dict[str, Any]:
    """The forecast from the smaller shares against the heads of the largest, which is the last."""
    *less, most = urls
    whole = read_runs(urls[most])
    smaller = read_runs([url for name in less for url in urls[name]])
    tokens = whole[0].answer_tokens
    curve = learning_curve(smaller, [tokens])
    measured = mean(one.tau for one in whole)
    result: dict[str, Any] = {
        "target": target,
        "runs": [{"answer_tokens": one.answer_tokens, "tau": one.tau} for one in smaller],
        "measured": {"answer_tokens": tokens, "tau": measured},
        "problem": curve.problem,
        "machine": machine(),
    }
    if len(whole) > 1:
        taus = {name: [one.tau for one in read_runs(urls[name])] for name in urls}
        spread = {name: stdev(of_seed) / mean(of_seed) for name, of_seed in taus.items()}
        result["spread_of_seeds"] = spread
    if curve.forecasts:
        forecast = curve.forecasts[0]
        low, high = forecast.interval
        result["forecast"] = forecast.to_json()
        result["is_inside"] = low <= measured <= high
    return result


if __name__ == "__main__":
    main()
