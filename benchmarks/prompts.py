"""Cleaning prompts: how many a second with everything on, where the time goes, and how much memory
many rows need.

    python benchmarks/prompts.py [--quick] [--rows 20000] [--characters 1000] [--workers 2]
    [--executor local]

Rows are put together from the packaged demo prompts, sentence by sentence, until they are long
enough; one in twenty is there twice. The stage runs as `eyas prompts` in a process of its own, with
an evaluation set, languages to keep and a traffic to match. Its memory is the largest sum of the
resident memory of all its processes, looked at ten times a second; what they share counts for each
of them. The time by filter is processor time of this process, on rows that pass the filters before.

    --rows 200000 --characters 80 and --rows 1000000 --characters 80 show what memory does as rows
    grow.

The last line of stdout is one JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import string
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from held_out import machine
from packaged import user_turns

from eyas.data import fit
from eyas.data.contamination import Contamination
from eyas.data.filters import (
    Empty,
    Language,
    PersonalData,
    Quality,
    TooLong,
    row_language,
)
from eyas.data.ledger import SourceRow
from eyas.data.prompts import SELECTION
from eyas.data.selection import row_digests
from eyas.data.sources import SourceConfig, read_source
from eyas.privacy.policy import PrivacyConfig

LOOK_EVERY_S = 0.1
NUM_ITEMS, NUM_TRAFFIC = 300, 2000  # of the evaluation set, and of the sample of traffic
LANGUAGES = ["en"]
KEY = "of the benchmark, and no secret"


def made_rows(known: list[str], count: int, characters: int, seed: int) -> Iterator[str]:
    """Prompts of about so many characters from these sentences; every twentieth is one that was
    there.
    """
    rng = random.Random(seed)
    recent: deque[str] = deque(maxlen=100)
    for number in range(count):
        if number % 20 == 19:
            yield rng.choice(recent)
            continue
        parts = [rng.choice(known)]
        while sum(map(len, parts)) + len(parts) < characters:
            parts.append(rng.choice(known))
        # short ones would repeat each other by chance
        own = "".join(rng.choices(string.ascii_lowercase, k=8))
        recent.append(f"{' '.join(parts)[:characters]} {own}")
        yield recent[-1]


def write_rows(path: Path, rows: Iterator[str]) -> str:
    """Prompts as JSON lines; the path."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"prompt": row}, ensure_ascii=False) + "\n" for row in rows)
    return str(path)


def config(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The run file's section with everything on."""
    mine = {"licence": "CC0-1.0", "prompts_by": "human"}
    known = user_turns()
    # words as common, and no sentence of a row
    backwards = [" ".join(reversed(text.split())) for text in known]
    sets = {
        "rows": made_rows(known, args.rows, args.characters, 0),
        "items": made_rows(backwards, NUM_ITEMS, 200, 1),
        "traffic": made_rows(known, NUM_TRAFFIC, args.characters, 2),
    }
    written = {name: write_rows(folder / f"{name}.jsonl", rows) for name, rows in sets.items()}
    return {
        "sources": [{"path": written["rows"], **mine}],
        "evaluation": [{"path": written["items"]}],
        "languages": LANGUAGES,
        "match": {"traffic": written["traffic"], "num_prompts": max(1, args.rows * 3 // 4)},
        "executor": args.executor,
        "workers": args.workers,
    }


def timed_by_filter(section: dict[str, Any], count: int) -> dict[str, float]:
    """Milliseconds a row by filter, each on the rows that pass those before it."""
    rows = [
        row
        for row, _ in zip(
            read_source(SourceConfig(**section["sources"][0])), range(count), strict=False
        )
    ]
    kept = [row for row in rows if isinstance(row, SourceRow)]
    filters: dict[str, Callable[[SourceRow], Any]] = {
        "empty": Empty(),
        "too_long": TooLong(8000),
        "quality": Quality(),
        "language": Language(LANGUAGES),
        "contamination": Contamination([SourceConfig(**one) for one in section["evaluation"]]),
        "personal": PersonalData(PrivacyConfig(), KEY.encode()),
    }
    spent: dict[str, float] = {}
    for name, keep in filters.items():
        keep(kept[0])  # what is built with the first row
        started = time.process_time()
        results = [keep(row) for row in kept]
        spent[name] = (time.process_time() - started) / len(kept)
        kept = [one for one in results if isinstance(one, SourceRow)]
    digests: dict[str, Callable[[SourceRow], Any]] = {
        "language of what is left": row_language,
        "fingerprint and signature": lambda row: row_digests([row]),
        "n-grams for the fit": lambda row: fit.gram_digest([row]),
    }
    for name, digest in digests.items():
        started = time.process_time()
        for row in kept:
            digest(row)
        spent[name] = (time.process_time() - started) / len(kept)
    return {name: round(1000 * seconds, 3) for name, seconds in spent.items()}


def process_tree(root: int) -> list[int]:
    """A process and all below it."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int(
                    (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
                )
            except OSError:
                continue  # it has ended
    tree = [root]
    for process in tree:
        tree += [one for one, parent in parents.items() if parent == process]
    return tree


def resident_mb(processes: list[int]) -> list[float]:
    """Resident memory of each, of those that are still there."""
    found = []
    for process in processes:
        try:
            pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
        except OSError:
            continue
        found.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
    return found


def run(folder: Path, section: dict[str, Any]) -> dict[str, Any]:
    """The stage in a process of its own: seconds in all and by step, and the peak of its memory."""
    run_file, output = folder / "run.yaml", folder / "out"
    run_file.write_text(yaml.safe_dump({"prompts": section}))
    command = [
        sys.executable,
        "-m",
        "eyas.cli.main",
        "prompts",
        "-c",
        str(run_file),
        "-o",
        str(output),
    ]
    environment = {**os.environ, "EYAS_PRIVACY_KEY": KEY}
    started = time.perf_counter()
    peak, peak_parent, decided, num_blocks = 0.0, 0.0, 0.0, 0
    sifted = 0.0
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            memory = resident_mb(process_tree(process.pid))
            peak, peak_parent = max(peak, sum(memory)), max([peak_parent, *memory[:1]])
            now = time.perf_counter() - started
            if (output / f"work/block-{num_blocks:05d}.jsonl").exists():
                num_blocks, sifted = num_blocks + 1, now
            decided = decided or (now if (output / SELECTION).exists() else 0.0)
            time.sleep(LOOK_EVERY_S)
    seconds = time.perf_counter() - started
    if process.returncode:
        sys.exit(
            f"error: eyas prompts ended with {process.returncode}\n  -> run it by hand: "
            f"{' '.join(command)}"
        )
    ledger = json.loads((output / "ledger.json").read_text())
    return {
        "seconds": round(seconds, 1),
        "steps_s": {
            "sift": round(sifted, 1),
            "decide": round(decided - sifted, 1),
            "write": round(seconds - decided, 1),
        },
        "peak_mb": round(peak),
        "peak_parent_mb": round(peak_parent),
        "rows_out": ledger["rows_out"],
        "dropped": ledger["dropped"],
    }


def main() -> None:
    """Print the time by filter, then the whole stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2,000 rows")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--characters", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--executor", choices=["local", "ray"], default="local")
    parser.add_argument(
        "--by-filter", type=int, default=1000, help="rows for the time by filter; 0 leaves it out"
    )
    args = parser.parse_args()
    if args.quick:
        args.rows, args.by_filter = min(args.rows, 2000), min(args.by_filter, 200)
    with tempfile.TemporaryDirectory() as name:
        section = config(Path(name), args)
        by_filter = timed_by_filter(section, args.by_filter) if args.by_filter else {}
        for filter_name, milliseconds in by_filter.items():
            print(f"{filter_name:<26} {milliseconds:8.3f} ms a row", flush=True)
        measured = run(Path(name), section)
    rate = args.rows / measured["seconds"]
    print(
        f"{args.rows:,} rows of {args.characters} characters, {args.workers} workers "
        f"({args.executor}): {rate:.0f} prompts/s"
    )
    print(
        f"peak memory of all processes {measured['peak_mb']} MB, of the parent "
        f"{measured['peak_parent_mb']} MB"
    )
    figures = {
        "rows": args.rows,
        "characters": args.characters,
        "workers": args.workers,
        "executor": args.executor,
    }
    print(
        json.dumps(
            {
                **figures,
                "prompts_per_s": round(rate, 1),
                "ms_by_filter": by_filter,
                **measured,
                "machine": machine(),
            }
        )
    )


if __name__ == "__main__":
    main()
