"""What `eyas eval` predicts, held against what `eyas bench` measures on a server: tau, and speed-up
by concurrency.

    python benchmarks/prediction.py --quick
    python benchmarks/prediction.py --prompts 120 --turns 3

Each turn is an eval of the held-out prompts in this process, then for each way to speculate a
server in a process of its own and `eyas bench` on it with the same prompts, precision, threads and
sizes. Figures are medians over the turns, the errors are predicted / measured - 1: asked are tau
within 3 % and speed-up within 10 %. `speedup_interval` is the measured one's own, over prompts. The
last line is one JSON; `is_met` says whether all errors are within what is asked.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import held_out

from eyas.artifact import Artifact
from eyas.bench.bench import ArmConfig, BenchConfig, bench
from eyas.cli.eval import questions_of
from eyas.evaluate.evaluate import EvalConfig, HeldOut, evaluate
from eyas.serve.server import ServeConfig, running_server

TAU_WITHIN, SPEEDUP_WITHIN = 0.03, 0.10
WAYS = ("fixed(4,1,5)", "fixed(6,3,12)", "auto")


def predicted(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The rows of eval's prediction."""
    predict = {
        "concurrencies": args.concurrency,
        "speculations": args.ways,
        "overhead_s": args.overhead_s,
    }
    config = EvalConfig.model_validate(
        {
            "trees": [way for way in args.ways if way.startswith("fixed")] or ["fixed(6,3,12)"],
            "temperatures": [args.temperature],
            "num_prompts": args.prompts,
            "max_tokens": args.max_tokens,
            "models": {
                "dtype": args.dtype,
                "threads": args.threads,
                "max_batch": max(args.concurrency),
            },
            "predict": predict,
        }
    )
    output = Artifact(str(folder / "eval"))
    evaluate(
        config,
        args.target,
        args.head,
        HeldOut(questions=questions_of(str(args.data), config)),
        output,
    )
    rows: list[dict[str, Any]] = output.read_json("eval.json")["predicted"]["by_concurrency"]
    return rows


def measured(args: argparse.Namespace, way: str, folder: Path) -> list[dict[str, Any]]:
    """The comparisons of bench on a server that speculates in this way."""
    serve = ServeConfig.model_validate(
        {
            "target": args.target,
            "head": args.head,
            "dtype": args.dtype,
            "threads": args.threads,
            "port": 0,
            "engine": {"speculation": way, "max_batch": max(args.concurrency)},
        }
    )
    output = Artifact(str(folder / f"bench-{way}"))
    with running_server(serve) as url:
        config = BenchConfig(
            prompts=str(args.data),
            url=url,
            arms={"plain": ArmConfig(speculation=False), "eagle": ArmConfig(speculation=True)},
            num_prompts=args.prompts,
            concurrencies=args.concurrency,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            compare_anyway=True,  # in bf16 some answers differ with the shape of a forward
        )
        bench(config, output)
    summary = output.read_json("summary.json")
    of_arm = {(one["arm"], one["concurrency"]): one for one in summary["results"]}
    return [
        {
            **compared,
            "tau": of_arm["eagle", compared["concurrency"]]["tau"],
            "tpot_ms": of_arm["eagle", compared["concurrency"]]["tpot_ms"]["median"],
            "tpot_ms_plain": of_arm["plain", compared["concurrency"]]["tpot_ms"]["median"],
        }
        for compared in summary["comparisons"]
    ]


def held_against(
    predictions: list[dict[str, Any]], measurements: list[dict[str, Any]]
) -> dict[str, Any]:
    """The medians of a figure's turns, and how far apart they are."""
    row: dict[str, Any] = {}
    for name in ("tau", "speedup", "tpot_ms", "tpot_ms_plain"):
        both = [[one[name] for one in turns] for turns in (predictions, measurements)]
        if any(value is None for values in both for value in values):
            continue
        said, was = map(statistics.median, both)
        row |= {
            f"{name}_predicted": round(said, 3),
            f"{name}_measured": round(was, 3),
            f"{name}_error": round(said / was - 1, 4),
        }
    row["speedup_by_turn"] = [round(one["speedup"], 3) for one in measurements]
    return row


def arguments() -> argparse.Namespace:
    parser = held_out.arguments(__doc__, prompts=120)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="of either engine; the other core is for the server's loop",
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--overhead-s", type=float, default=1.0)
    args = parser.parse_args()
    if args.quick:
        args.turns, args.prompts, args.overhead_s = 1, min(args.prompts, 32), 0.5
    return args


def main() -> None:
    args = arguments()
    turns: dict[tuple[str, int], tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(args.turns):
            folder = Path(scratch) / str(turn)
            said = {
                (one["speculation"], one["concurrency"]): one for one in predicted(args, folder)
            }
            for way in args.ways:
                for was in measured(args, way, folder):
                    name = next(
                        known
                        for known in (way, f"{way}(6,3,12)")
                        if (known, was["concurrency"]) in said
                    )
                    both = turns.setdefault((way, was["concurrency"]), ([], []))
                    both[0].append(said[name, was["concurrency"]])
                    both[1].append(was)
    rows = []
    for (way, concurrency), both in turns.items():
        rows.append({"speculation": way, "concurrency": concurrency, **held_against(*both)})
        print(json.dumps(rows[-1]), flush=True)
    worst = {
        name: max(abs(row[f"{name}_error"]) for row in rows if f"{name}_error" in row)
        for name in ("tau", "speedup")
    }
    figures = {
        "by_concurrency": rows,
        "worst_tau_error": worst["tau"],
        "worst_speedup_error": worst["speedup"],
        "is_met": worst["tau"] <= TAU_WITHIN and worst["speedup"] <= SPEEDUP_WITHIN,
        "prompts": args.prompts,
        "turns": args.turns,
        "dtype": args.dtype,
        "machine": held_out.machine(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
