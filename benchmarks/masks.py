"""Loss masks found in two ways on real conversations, for each tokenizer: how many agree, what is
refused, how fast.

    python benchmarks/masks.py [--quick] [--data FOLDER] [--rows N]

A row is one answer with all that came before it. FOLDER holds conversations (JSON lines, .gz, with
messages) and tokenizers/ with one folder each; by default ../shared/data beside the checkout. The
built-in tokenizer is always there. Then the planted faults of tests/template_faults.py, and which
of them are caught. The last line of stdout is one JSON.
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
from eyas.chat import Chat, MaskDisagreement
from eyas.errors import TemplateError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the faults are the tests'

from tests.template_faults import FAULTS, caught  # noqa: E402

DATA = ROOT.parent / "shared" / "data"
SETS = ("sgd_dev", "star", "self_dialogue", "gsm8k_train", "tldr", "taskmaster4")
DAY = datetime.date(2026, 1, 1)


def answers(folder: Path, count: int) -> Iterator[list[dict[str, Any]]]:
    """Conversations up to one of their answers, equally many from each set."""
    for name in SETS:
        path = folder / f"{name}.jsonl.gz"
        if not path.exists():
            sys.exit(
                f"error: no {path}\n  -> give a folder that holds {', '.join(SETS)} with --data "
                "FOLDER"
            )
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            yield from itertools.islice(_turns(lines), -(-count // len(SETS)))


def _turns(lines: Iterator[str]) -> Iterator[list[dict[str, Any]]]:
    for line in lines:
        messages = json.loads(line)["messages"]
        for at, message in enumerate(messages):
            if message["role"] == "assistant" and at:
                yield messages[: at + 1]


def tokenizers(folder: Path) -> dict[str, str]:
    """Folders by name: the built-in one and those that the data has."""
    others = sorted(path for path in (folder / "tokenizers").glob("*") if path.is_dir())
    return {
        builtin.BUILTIN: str(builtin.target_folder()),
        **{path.name: str(path) for path in others},
    }


def measure(name: str, folder: str, rows: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Every row through both ways. A disagreement is counted here, where a run would stop."""
    chat = Chat(folder, DAY)
    outcome: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    started, num_tokens = time.perf_counter(), 0
    for messages in rows:
        try:
            ids, mask = chat.answered(messages)
        except MaskDisagreement:
            outcome["differ"] += 1
        except TemplateError as error:
            outcome["refused"] += 1
            reasons[error.what.removeprefix(f"the chat template of {folder} ")] += 1
        else:
            written = [token for token, kept in zip(ids, mask, strict=True) if kept]
            spelled = chat.decode(written) == chat.decode(
                chat.tokenizer.encode(messages[-1]["content"], add_special_tokens=False)
            )
            outcome["agree" if spelled and written[-1] in chat.eos_token_ids else "wrong"] += 1
            num_tokens += len(ids)
    seconds = time.perf_counter() - started
    return {
        "tokenizer": name,
        "rows": len(rows),
        **{one: outcome[one] for one in ("agree", "differ", "wrong", "refused")},
        "reasons": dict(reasons),
        "tokens": num_tokens,
        "seconds": round(seconds, 1),
        "rows_per_s": round(len(rows) / seconds),
    }


def main() -> None:
    """Run all and print one JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="300 rows")
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder of conversations and tokenizers/"
    )
    parser.add_argument("--rows", type=int, default=10_000, help="answers for each tokenizer")
    args = parser.parse_args()
    rows = list(answers(args.data, 300 if args.quick else args.rows))[
        : 300 if args.quick else args.rows
    ]
    measured = []
    for name, folder in tokenizers(args.data).items():
        measured.append(measure(name, folder, rows))
        line = (
            "{tokenizer}: {agree} of {rows} agree, {differ} differ, {wrong} wrong, "
            "{refused} refused, {rows_per_s} rows/s"
        )
        print(line.format(**measured[-1]), measured[-1]["reasons"], flush=True)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for fault in FAULTS:
            found[fault.name] = caught(fault, Path(folder) / fault.name)
            print(f"{fault.name}: {found[fault.name] or 'NOT CAUGHT'}", flush=True)
    print(
        json.dumps({"masks": measured, "faults": found, "caught": sum(map(bool, found.values()))})
    )


if __name__ == "__main__":
    main()
