"""Take a sample of the user turns of conversation files: the raw prompts that the packaged heads
are trained on.

    python recipes/head_prompts.py --out out/head_prompts --take 1500 a.jsonl.gz --take 800
    b.jsonl.gz

Writes one JSONL file a source, {"id", "messages": [{"role": "user", ...}]}, drawn by a seed. A
row's source is its field "source" up to a slash. Assistant text stays behind: the answers will be
the target's own. runs/smollm2.yaml and runs/builtin_head.yaml go on from there.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import fsspec


def sample(path: Path, count: int, seed: int) -> dict[str, list[dict[str, object]]]:
    """Up to `count` conversations' user turns by source, in random order."""
    with fsspec.open(str(path), "rt", encoding="utf-8", compression="infer") as lines:
        rows = [json.loads(line) for line in lines]
    random.Random(seed).shuffle(rows)
    by_source: dict[str, list[dict[str, object]]] = {}
    for row in rows[:count]:
        turns = [message for message in row["messages"] if message["role"] == "user"]
        by_source.setdefault(row["source"].split("/")[0], []).append(
            {"id": row["id"], "messages": turns}
        )
    return by_source


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--take", nargs=2, action="append", metavar=("COUNT", "FILE"), required=True
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for count, file in args.take:
        for source, rows in sample(Path(file), int(count), args.seed).items():
            (args.out / f"{source}.jsonl").write_text(
                "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            )
            print(f"{source}: {len(rows)} conversations")


if __name__ == "__main__":
    main()
