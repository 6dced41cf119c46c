"""A cost table from measurements, and a head's foretold speed beside its measured one.

    python benchmarks/gpu/foretold.py out/gpu/rows.jsonl --eval out/eval/eval.json
    python benchmarks/gpu/foretold.py out/bench/summary.json --eval ... --card H100 --dtype bfloat16

Rows are of benchmarks/gpu/serve.py (greedy, overlap, all tasks), or of `eyas bench` with servers
named plain, "fixed(3,1,4) simulated" and "fixed(3,1,4)" (docs/decisions/verdict.md). Plain and
simulated rows make the table (eyas.export.speed), others are the head's. The last line is one JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from eyas.card import figures_of
from eyas.export.speed import EngineCosts, cost_table, foretell

FIGURES = ("tau", "tpot_ms", "output_tokens_per_s", "times_plain")


def rows_of(summary: dict[str, Any], card: str, dtype: str) -> list[dict[str, Any]]:
    """A benchmark's results as serve.py's rows."""
    found = []
    for one in summary["results"]:
        server, (size, _, simulated) = summary["servers"][one["arm"]], one["arm"].partition(" ")
        sizes = [] if size == "plain" else map(int, size[6:-1].split(","))
        row = {"engine": server["kind"], "version": server["version"], "target": server["model"]}
        row |= {"card": card, "dtype": dtype, "load": one["concurrency"], "tau": one["tau"]}
        row |= {"arm": dict(zip(("steps", "topk", "verify"), sizes, strict=False)) or None}
        row |= {name: one[name]["median"] for name in ("tpot_ms", "ttft_ms")}
        row |= {"simulated": simulated, "output_tokens_per_s": one["throughput_tps"]}
        found.append(row)
    return found


def compared(rows: list[dict[str, Any]], evaluation: dict[str, Any]) -> dict[str, Any]:
    """The table, and pairs of foretold and measured figures of each row of the head."""
    costs = cost_table(row for row in rows if row["arm"] is None or row["simulated"])
    table, found = EngineCosts.model_validate(costs), list[dict[str, Any]]()
    plain_ms = {row["load"]: row["tpot_ms"] for row in rows if row["arm"] is None}
    for row in rows:
        own = row["arm"] is not None and not row["simulated"]
        for one in foretell(table, figures_of(evaluation), row["load"]) if own else ():
            if one.arm and one.arm.model_dump() == row["arm"]:
                was = {**row, "times_plain": plain_ms[row["load"]] / row["tpot_ms"]}
                pairs = {name: (getattr(one, name), was[name]) for name in FIGURES}
                found.append({"load": row["load"], "drafts": str(one.arm), **pairs})
    off = {
        name: statistics.median(abs(one[name][0] / one[name][1] - 1) for one in found)
        for name in FIGURES[:3]
    }
    wrong = sum((told > 1) != (was > 1) for told, was in (one["times_plain"] for one in found))
    return {"foretold_and_measured": found, "median_off": off, "wrong_signs": wrong, "costs": costs}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path)
    parser.add_argument("--eval", type=Path, required=True, help="eval.json of the head")
    parser.add_argument("--costs", type=Path, help="the table is written here")
    parser.add_argument("--card", default="CPU", help="what a benchmark's servers computed on")
    parser.add_argument("--dtype", default="float32", help="what they computed in")
    args = parser.parse_args()
    text = args.measured.read_text()
    if args.measured.suffix == ".jsonl":
        rows = [one for one in map(json.loads, text.splitlines()) if "arm" in one]
        rows = [one for one in rows if one["overlap"] and one["repeat"] >= 0]
        rows = [one for one in rows if not (one["task"] or one["temperature"])]
    else:
        rows = rows_of(json.loads(text), args.card, args.dtype)
    found = compared(rows, json.loads(args.eval.read_text()))
    if args.costs:
        args.costs.write_text(json.dumps(found["costs"], indent=1))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
