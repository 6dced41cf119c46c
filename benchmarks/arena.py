"""Rules of drafting side by side on the same recorded rounds, without a model.

    python benchmarks/arena.py --quick
    python benchmarks/arena.py --prompts 100 --costs out/bench-1234 --concurrency 1 4

Held-out prompts are decoded once, with the head's proposals at every token. A rule says which
candidates of a round are verified: the n most probable, all paths above a probability, or all.
For each: tau, drafted nodes a round and request, and with --costs (an `eyas bench` with a plain
arm) the speed-up on that server's costs. "All candidates" has the tau of an oracle. The last line
is one JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import held_out
import numpy as np

from eyas.engine.tree import Speculation, most_probable
from eyas.evaluate.recording import RecordedRounds, record
from eyas.evaluate.speedup import CostCurve, DraftCost, read_bench
from eyas.evaluate.trees import Models, ModelsConfig
from eyas.hub import resolve_head, resolve_target
from eyas.log import progress_bar
from eyas.model.rows import Proposals

Rule = Callable[[Proposals], np.ndarray]
RULES: dict[str, Rule] = {
    **{
        f"{n} most probable": lambda proposals, n=n: most_probable(proposals.scores, n)
        for n in (3, 7, 11, 15, 23)
    },
    **{
        f"paths above {p:g}": lambda proposals, p=p: proposals.scores >= math.log(p)
        for p in (0.4, 0.2, 0.1, 0.05)
    },
    "all candidates": lambda proposals: np.ones_like(proposals.tokens, dtype=bool),
}


def played(
    rounds: RecordedRounds, tree: Speculation, rule: Rule, concurrency: int
) -> tuple[dict[str, float], list[tuple[int, int]]]:
    """tau and nodes; requests and rows of each round."""
    sizes: list[tuple[int, int]] = []

    def watched(names: list[str], proposals: Proposals) -> np.ndarray:
        kept = rule(proposals)
        sizes.append((len(names), len(names) + int(kept.sum())))
        return kept

    accepted = rounds.play(watched, tree.num_draft_steps, concurrency)
    num_rounds = sum(map(len, accepted.values()))
    num_nodes = sum(rows - requests for requests, rows in sizes)
    tau = 1 + sum(map(sum, accepted.values())) / num_rounds
    return {"tau": round(tau, 4), "nodes": round(num_nodes / num_rounds, 3)}, sizes


def speedup(
    curve: CostCurve, draft: DraftCost, tree: Speculation, tau: float, sizes: list[tuple[int, int]]
) -> float | None:
    """Over plain rounds of the same requests; None beyond the loads that were measured."""
    plain_ms = [curve.at(requests) for requests, _ in sizes]
    verify_ms = [curve.at(rows) for _, rows in sizes]
    draft_ms = [draft.of_round(curve, tree, requests) for requests, _ in sizes]
    if None in plain_ms or None in verify_ms or None in draft_ms:
        return None
    return float(tau * np.sum(plain_ms) / (np.sum(verify_ms) + np.sum(draft_ms)))


def main() -> None:
    parser = held_out.arguments(__doc__, prompts=60)
    parser.add_argument("--tree", default="fixed(6,3,12)", help="whose levels and branches grow")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1])
    parser.add_argument("--costs", help="output of eyas bench with a plain arm")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.max_tokens = min(args.prompts, 12), min(args.max_tokens, 48)
    tree = Speculation.parse(args.tree)
    config = ModelsConfig(dtype=args.dtype)
    models = Models.load(resolve_target(args.target), resolve_head(args.head), config)
    requests = held_out.requests(args, config.max_length, args.temperature)
    with progress_bar("record") as track:
        rounds = record(models, tree.num_draft_steps, tree.tree_topk, requests, track)
    curve = read_bench(args.costs)[0] if args.costs else None
    rows: list[dict[str, Any]] = []
    for concurrency in args.concurrency:
        for name, rule in RULES.items():
            figures, sizes = played(rounds, tree, rule, concurrency)
            rows.append({"rule": name, "concurrency": concurrency, **figures})
            if curve is not None:
                draft = DraftCost(models.weights_share)
                rows[-1]["speedup"] = speedup(curve, draft, tree, figures["tau"], sizes)
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    print(json.dumps({"rules": rows, "prompts": len(requests), "tree": str(tree)}))


if __name__ == "__main__":
    main()
