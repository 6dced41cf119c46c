"""The normal loop against the overlapped one: the same tokens, time per token, and how long the
device waits between jobs.

    python benchmarks/loops.py [--quick] [--dtype bfloat16] [--concurrency 1 4 16] [--speculation
    auto] [--temperature 0]
        [--turns 4] [--data FILE.jsonl]

Two engines on one target and head. At each concurrency the same prompts run through both, in turns,
the order changing from turn to turn; the first turn of each is a warm-up. The ratio is the normal
loop's median TPOT over the overlapped one's. The idle share is the device's time between jobs,
while there was work, over all of its time. The last line of stdout is one JSON.
"""

from __future__ import annotations

import dataclasses
import json
import statistics

import held_out
from speedup import Measured, turn

from eyas import hub
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request
from eyas.model.checkpoint import read_head
from eyas.model.target import Target


def device_s(engine: Engine) -> tuple[float, float]:
    metrics = engine.metrics()
    return metrics["device_busy_s"], metrics["device_idle_s"]


def compare(
    engines: dict[str, Engine], requests: list[Request], concurrency: int, turns: int
) -> dict[str, object]:
    """Figures at one concurrency; prompts differ from turn to turn while they last."""
    per_turn = max(concurrency * 2, 6)
    measured = {name: Measured() for name in engines}
    before: dict[str, tuple[float, float]] = {}
    for number in range(turns + 1):
        batch = [
            dataclasses.replace(
                requests[(number * per_turn + at) % len(requests)], id=f"{number}-{at}"
            )
            for at in range(per_turn)
        ]
        for name in engines if number % 2 else reversed(engines):
            turn(engines[name], batch, concurrency, measured[name] if number else Measured())
            if number == 0:
                before[name] = device_s(engines[name])
    row: dict[str, object] = {"concurrency": concurrency}
    for name, engine in engines.items():
        busy_s, idle_s = (
            now - then for now, then in zip(device_s(engine), before[name], strict=True)
        )
        row[f"tpot_ms_{name}"] = round(statistics.median(measured[name].tpot_ms), 3)
        row[f"idle_share_{name}"] = round(idle_s / (busy_s + idle_s), 4)
        row[f"tokens_per_s_{name}"] = round(measured[name].tokens / measured[name].seconds)
    normal, overlapped = (measured[name] for name in ("normal", "overlap"))
    row["tpot_ratio"] = round(
        statistics.median(normal.tpot_ms) / statistics.median(overlapped.tpot_ms), 3
    )
    row["requests"] = len(normal.outputs)
    row["same_outputs"] = sum(
        normal.outputs[one] == overlapped.outputs[one] for one in normal.outputs
    )
    return row


def main() -> None:
    parser = held_out.arguments(__doc__, prompts=48)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--speculation", default="auto", help="off, auto or fixed(6,3,12)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--turns", type=int, default=4)
    args = parser.parse_args()
    if args.quick:
        args.turns = min(args.turns, 2)
    folder = hub.resolve_target(args.target)
    target = Target.load(folder, args.dtype)
    draft = Draft(*read_head(hub.resolve_head(args.head)), target)
    engines = {
        name: Engine(
            target,
            draft,
            EngineConfig(
                speculation=args.speculation,
                overlap=name == "overlap",
                max_batch=max(args.concurrency),
            ),
        )
        for name in ("normal", "overlap")
    }
    requests = [
        dataclasses.replace(
            one, params=dataclasses.replace(one.params, temperature=args.temperature, seed=index)
        )
        for index, one in enumerate(held_out.requests(args))
    ]
    rows = []
    for concurrency in args.concurrency:
        rows.append(compare(engines, requests, concurrency, args.turns))
        print(json.dumps(rows[-1]), flush=True)
    figures = {
        "by_concurrency": rows,
        "speculation": args.speculation,
        "temperature": args.temperature,
        "dtype": args.dtype,
        "native": target.is_native,
        "machine": held_out.machine(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
