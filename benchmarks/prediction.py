"""What `eyas eval --costs` predicts, held against what `eyas bench` measures on our own server.

    python benchmarks/prediction.py --quick
    python benchmarks/prediction.py --prompts 80 --concurrency 1 2 4

A plain server is measured at every load that the trees need, an eval predicts from it, then for
each tree a server that drafts is measured at the given loads with the same prompts, precision,
threads and sizes. Errors are predicted / measured - 1. Intervals of the measured speed-up are over
prompts. The last line is one JSON with all rows and the worst errors.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import held_out

from eyas.artifact import Artifact
from eyas.bench.bench import ArmConfig, BenchConfig, bench
from eyas.cli.eval import eval_prompts
from eyas.engine.tree import Speculation
from eyas.evaluate.evaluate import EvalConfig, evaluate
from eyas.serve.server import ServeConfig, running_server

TREES = ("fixed(4,1,5)", "fixed(6,3,12)")
PLAIN = ArmConfig(speculation=False)


def loads_of(args: argparse.Namespace) -> list[int]:
    """The loads of the plain server: the given ones, those that rounds' rows stand for, and the
    powers of two between.
    """
    sizes = [Speculation.parse(tree).num_verify_tokens for tree in args.trees]
    needed = {load * size for load in args.concurrency for size in (1, *sizes)}
    return sorted(needed | {2**n for n in range(8) if 2**n < max(needed)})


def measured(
    args: argparse.Namespace, tree: str, arms: dict[str, ArmConfig], loads: list[int], folder: Path
) -> Artifact:
    """A benchmark of a server with this speculation."""
    serve = ServeConfig.model_validate(
        {
            "target": args.target,
            "head": args.head,
            "dtype": args.dtype,
            "threads": args.threads,
            "port": 0,
            "engine": {"speculation": tree, "max_batch": max(loads_of(args))},
        }
    )
    output = Artifact(str(folder))
    with running_server(serve) as url:
        config = BenchConfig(
            prompts=str(args.data),
            url=url,
            arms=arms,
            num_prompts=args.prompts,
            concurrencies=tuple(loads),
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            compare_anyway=True,  # in bf16 some answers differ with the shape of a forward
        )
        bench(config, output)
    return output


def predicted(args: argparse.Namespace, costs: Artifact, folder: Path) -> dict[str, Any]:
    """eval.json's part."""
    config = EvalConfig.model_validate(
        {
            "trees": args.trees,
            "temperatures": [args.temperature],
            "num_prompts": args.prompts,
            "max_tokens": args.max_tokens,
            "models": {"dtype": args.dtype, "threads": args.threads},
            "costs": costs.url,
            "draft_step_ms": args.draft_ms,
        }
    )
    output = Artifact(str(folder))
    prompts = eval_prompts(str(args.data), config)
    evaluate(config, args.target, args.head, output, prompts=prompts)
    found: dict[str, Any] = output.read_json("eval.json")["predicted"]
    return found


def compared(said: dict[str, Any], was: dict[str, Any], tau: float) -> dict[str, Any]:
    """A row: what was predicted, what was measured, and the errors."""
    row = {"speculation": said["speculation"], "concurrency": said["concurrency"]}
    figures = {
        "tau": (said["tau"], tau),
        "tpot_ms_plain": (said["tpot_ms_plain"], was["tpot_ms_baseline"]),
        "tpot_ms": (said["tpot_ms"], was["tpot_ms"]),
        "speedup": (said["speedup"], was["speedup"]),
    }
    for name, (one, other) in figures.items():
        row |= {f"{name}_predicted": round(one, 3), f"{name}_measured": round(other, 3)}
        row[f"{name}_error"] = round(one / other - 1, 4)
    return row | {"speedup_interval": was["speedup_interval"]}


def arguments() -> argparse.Namespace:
    parser = held_out.arguments(__doc__, prompts=80)
    parser.add_argument("--trees", nargs="+", default=TREES, help="of one size, no auto")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="of either engine; the other core is for the server's loop",
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--draft-ms", type=float, help="of a draft step; else by the weights")
    args = parser.parse_args()
    if args.quick:
        args.trees, args.concurrency = TREES[:1], [1, 2]
        args.prompts, args.max_tokens = min(args.prompts, 16), min(args.max_tokens, 64)
    return args


def main() -> None:
    args = arguments()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder, loads = Path(scratch), loads_of(args)
        costs = measured(args, args.trees[0], {"plain": PLAIN}, loads, folder / "plain")
        found = predicted(args, costs, folder / "eval")
        said = {(one["speculation"], one["concurrency"]): one for one in found["by_concurrency"]}
        arms = {"plain": PLAIN, "eagle": ArmConfig(speculation=True)}
        for tree in args.trees:
            name = str(Speculation.parse(tree))
            output = measured(args, tree, arms, args.concurrency, folder / name)
            summary = output.read_json("summary.json")
            for was in summary["comparisons"]:
                rows.append(compared(said[name, was["concurrency"]], was, was["tau"]))
                print(json.dumps(rows[-1]), flush=True)
    worst = {
        f"worst_{name}_error": max((row[f"{name}_error"] for row in rows), key=abs)
        for name in ("tau", "tpot_ms_plain", "speedup")
    }
    figures = {
        **worst,
        "by_concurrency": rows,
        "plain_tpot_ms": found["tpot_ms"],
        "draft_weights_share": round(found["draft_weights_share"], 4),
        "prompts": args.prompts,
        "dtype": args.dtype,
        "machine": held_out.machine(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
