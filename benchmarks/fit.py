"""How near a selection comes to the traffic: divergence, lengths and sources before and after, on
real sets.

The pool is every set's user turns; the traffic half of SGD's dev part, or a mixture of three sets,
taken out of the pool, of which one half is fitted and the other measures. Beside it: as many rows
at random, and importance resampling as published (sums of log-ratios, one round).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from eyas.bench.machine import machine
from eyas.data import fit
from eyas.data.fit import GramBlock, Profile, RowMask
from eyas.data.ledger import SourceRow

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
SETS = ("sgd_train", "sgd_dev", "star", "self_dialogue", "gsm8k_train", "tldr", "taskmaster4")
TRAFFIC = {"sgd": {"sgd_dev": 1049}, "mixed": {"sgd_dev": 500, "tldr": 300, "gsm8k_train": 200}}
BLOCK = 1000  # rows


def rows_of(name: str) -> Iterator[SourceRow]:
    """The user's turns of a set."""
    path = SHARED / f"{name}.jsonl.gz"
    if not path.exists():
        sys.exit(f"error: no conversations at {path}")
    with fsspec.open(str(path), "rt", encoding="utf-8", compression="infer") as lines:
        for number, line in enumerate(lines, start=1):
            turns = tuple(
                message["content"]
                for message in json.loads(line)["messages"]
                if message["role"] == "user"
            )
            yield SourceRow(
                source=name, licence="", where=f"{path.name}:{number}", id=None, turns=turns
            )


def split(rows: list[SourceRow], parts: dict[str, int]) -> tuple[list[SourceRow], list[SourceRow]]:
    """(traffic, pool): so many rows of each set for the traffic, all others for the pool."""
    rng = random.Random(0)
    places = {
        name: [place for place, row in enumerate(rows) if row.source == name] for name in parts
    }
    taken = {place for name, count in parts.items() for place in rng.sample(places[name], count)}
    return [rows[place] for place in sorted(taken)], [
        row for place, row in enumerate(rows) if place not in taken
    ]


def measure(name: str, rows: list[SourceRow], num: int, seed: int) -> dict[str, object]:
    """The report of one traffic, with the other ways to select beside it."""
    traffic, pool = split(rows, TRAFFIC[name])
    started = time.perf_counter()
    blocks = [fit.gram_digest(pool[start : start + BLOCK]) for start in range(0, len(pool), BLOCK)]
    digest_s = time.perf_counter() - started
    fitted, measured = fit.traffic_halves(traffic)
    keys = np.array([zlib.crc32(row.where.encode()) for row in pool], np.uint64)
    alive = np.ones(len(pool), np.bool_)

    def pick(log_weights: np.ndarray) -> RowMask:
        return fit.sample(log_weights, keys, num, seed)

    started = time.perf_counter()
    chosen = fit.select_like(lambda: blocks, alive, fitted.grams, pick)
    select_s = time.perf_counter() - started
    ways = {
        "random": pick(np.zeros(len(pool))),
        "as published": pick(published(blocks, fitted, alive)),
        "eyas": chosen,
    }
    before = described(blocks, pool, alive)
    reports = {
        way: fit.fit_report(before, described(blocks, pool, keep), fitted, measured)
        for way, keep in ways.items()
    }
    for way, one in reports.items():
        print(f"{name:6} {way:13} {line(one)}", flush=True)
    return {
        "traffic": name,
        "num_prompts": num,
        **{
            way: {key: one[key] for key in ("kl", "js", "length_js", "sources")}
            for way, one in reports.items()
        },
        "digest_rows_per_s": round(len(pool) / digest_s),
        "select_rows_per_s": round(len(pool) / select_s),
    }


def published(blocks: list[GramBlock], fitted: Profile, alive: RowMask) -> np.ndarray:
    """Log-weights by the paper: the sum of the log-ratios of a row's n-grams."""
    ratio = fit.log_ratio(fitted.grams, fit.gram_counts(lambda: blocks, alive))
    weights = [
        np.bincount(
            np.repeat(np.arange(len(one.counts)), one.counts),
            ratio[one.grams],
            len(one.counts),
        )
        for one in blocks
    ]
    return np.concatenate(weights)


def described(blocks: list[GramBlock], pool: list[SourceRow], keep: RowMask) -> Profile:
    """A profile with its sources."""
    made = fit.profile(lambda: blocks, keep)
    made.sources = Counter(pool[place].source for place in np.flatnonzero(keep))
    return made


def line(one: dict[str, Any]) -> str:
    """One way in a line: each figure before, after, and between two halves of the traffic."""
    figures = (
        f"{key} {one[key]['before']:.4f} -> {one[key]['after']:.4f} (floor {one[key]['floor']:.4f})"
        for key in FIGURES
    )
    sources = (f"{name} {counts['after']}" for name, counts in one["sources"].items())
    return f"{', '.join(figures)}; {', '.join(sources)}"


FIGURES = ("kl", "js", "length_js")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="the small sets, one traffic: some seconds"
    )
    parser.add_argument("--prompts", type=int, default=2000, help="how many to select")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = [row for name in SETS for row in rows_of(name)]
    if args.quick:
        rows, args.prompts = (
            [
                row
                for row in rows
                if row.source == "sgd_dev" or zlib.crc32(row.where.encode()) % 8 == 0
            ],
            500,
        )
    found = [
        measure(name, rows, args.prompts, args.seed)
        for name in (["sgd"] if args.quick else TRAFFIC)
    ]
    print(json.dumps({"pool": len(rows), "traffic": found, "machine": machine()}))


if __name__ == "__main__":
    main()
