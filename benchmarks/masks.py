"""Loss masks of conversations that eyas did not generate, by tokenizer: taken, wrong, refused, and
rows per second; then the rows on record (tests/goldens/masks.json).

    python benchmarks/masks.py [--quick] [--data FOLDER] [--rows N]

A row is one answer with all turns before it. FOLDER (by default ../shared/data) holds conversations
(JSON lines, .gz) and tokenizers/; the built-in one is always measured. Exits with 1 if a row is
wrong or differs from the record. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas import builtin
from eyas.chat import Chat
from eyas.errors import TemplateError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import mask_rows  # noqa: E402

DATA = ROOT.parent / "shared" / "data"
SETS = ("sgd_dev", "star", "self_dialogue", "gsm8k_train", "tldr", "taskmaster4")
DAY = datetime.date(2026, 1, 1)
OPTIONS = {"enable_thinking": False}  # answers of other models have no thoughts


def answers(folder: Path, count: int) -> Iterator[list[dict[str, Any]]]:
    """Conversations up to one of their answers, as many from each set."""
    for name in SETS:
        path = folder / f"{name}.jsonl.gz"
        if not path.exists():
            sys.exit(f"error: no {path}\n  -> give a folder that holds {', '.join(SETS)}")
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            turns = (
                messages[: at + 1]
                for messages in (json.loads(line)["messages"] for line in lines)
                for at, message in enumerate(messages)
                if message["role"] == "assistant" and at
            )
            yield from itertools.islice(turns, -(-count // len(SETS)))


def measure(name: str, folder: str, rows: list[list[dict[str, Any]]]) -> dict[str, Any]:
    chat = Chat(folder, DAY, OPTIONS)
    outcome: Counter[str] = Counter(taken=0, wrong=0, refused=0)
    started, num_tokens = time.perf_counter(), 0
    for messages in rows:
        try:
            prompt_ids, answer_ids = chat.answered(messages)
        except TemplateError:
            outcome["refused"] += 1
            continue
        said = chat.tokenizer.encode(messages[-1]["content"], add_special_tokens=False).ids
        is_whole = chat.decode(answer_ids) == chat.decode(said)
        outcome["taken" if is_whole and answer_ids[-1] in chat.eos_token_ids else "wrong"] += 1
        num_tokens += len(prompt_ids) + len(answer_ids)
    speed = round(len(rows) / (time.perf_counter() - started))
    return {"tokenizer": name, **outcome, "tokens": num_tokens, "rows_per_s": speed}


def on_record() -> dict[str, int]:
    golden = json.loads(mask_rows.GOLDEN.read_text())
    outcome: Counter[str] = Counter(equal=0, refused=0, different=0)
    with tempfile.TemporaryDirectory() as root:
        for family, (folder, options) in mask_rows.folders(Path(root)).items():
            chat = Chat(folder, mask_rows.DAY, options)
            for name, messages, tools in mask_rows.rows():
                if name not in golden[family]:
                    continue
                try:
                    found = mask_rows.digest(*chat.answered(messages, tools))
                except TemplateError:
                    outcome["refused"] += 1
                else:
                    outcome["equal" if found == golden[family][name] else "different"] += 1
    return dict(outcome)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="300 rows")
    parser.add_argument("--data", type=Path, default=DATA, help="conversations and tokenizers/")
    parser.add_argument("--rows", type=int, default=10_000, help="answers for each tokenizer")
    args = parser.parse_args()
    count = 300 if args.quick else args.rows
    rows = list(answers(args.data, count))[:count]
    folders = {builtin.BUILTIN: builtin.target_folder()}
    folders |= {one.name: one for one in sorted((args.data / "tokenizers").glob("*/"))}
    measured = []
    for name, folder in folders.items():
        measured.append(measure(name, str(folder), rows))
        print(measured[-1], flush=True)
    record = on_record()
    print(f"on record: {record}", flush=True)
    print(json.dumps({"benchmark": "masks", "rows": count, "tokenizers": measured, **record}))
    if record["different"] or any(row["wrong"] for row in measured):
        sys.exit(1)


if __name__ == "__main__":
    main()
