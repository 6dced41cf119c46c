"""The target on held-out dialogues: how many greedy answers end by themselves, and how long they
are.

    python benchmarks/target_quality.py [--quick] [--prompts 400] [--data FILE.jsonl]

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import json
import statistics

import held_out

from eyas import hub
from eyas.engine.engine import Engine, EngineConfig


def main() -> None:
    args = held_out.arguments(__doc__, prompts=400).parse_args()
    if args.quick:
        args.prompts = min(args.prompts, 60)
    config = EngineConfig(max_batch=16, speculation="off")
    engine = Engine.load(hub.resolve_target(args.target), config=config)
    results = list(engine.run(held_out.requests(args)))
    lengths = [len(result.token_ids) for result in results]
    figures = {
        "answers": len(results),
        "stopped_share": round(
            sum(result.finish_reason == "stop" for result in results) / len(results), 4
        ),
        "max_tokens": args.max_tokens,
        "median_tokens": statistics.median(lengths),
        "machine": held_out.machine(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
