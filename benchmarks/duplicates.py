"""Duplicates, contamination, quality and language on real prompts: what is found, what goes
wrongly, and how fast.

    python benchmarks/duplicates.py [--quick] [--show] [--data FOLDER]

FOLDER holds gsm8k_train, tldr, sgd_dev, self_dialogue (JSON lines, .gz, with messages) and
prompts/spec_bench.jsonl; by default ../shared/data beside the checkout. Near-duplicates are planted
by edits; recall is of those whose Jaccard really is at least the threshold. Contamination is
planted in disguises and by edits, and compared with the rules that others use: any 10-gram and any
13-gram in common. GSM8K's training half is also cut in two, 1,319 problems as an evaluation set
against the rest, since its problems come in families: --show prints the pairs, to be judged by eye.
The last line of stdout is one JSON.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eyas.data.contamination import Contamination
from eyas.data.duplicates import (
    BANDS,
    NONE,
    SHINGLE,
    exact,
    jaccard,
    near,
    plain_words,
    row_text,
    shingles,
    signature,
    text_hash,
    text_key,
)
from eyas.data.filters import Quality, row_language
from eyas.data.ledger import Drop, SourceRow
from eyas.data.sources import SourceConfig
from eyas.language import language

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SETS = ("gsm8k_train", "tldr", "sgd_dev", "self_dialogue")
SPEC_BENCH = "prompts/spec_bench.jsonl"
THRESHOLD = 0.85
HELD_OUT = 1319  # GSM8K's test half has as many
PLANTED = 400  # of them
PROMPT = 1000  # characters

Edit = Callable[[str], str]


def row(*turns: str) -> SourceRow:
    return SourceRow("set", "MIT", "set.jsonl:1", None, turns)


def read(folder: Path, name: str, limit: int | None) -> list[SourceRow]:
    """The user's side of the first conversations of a set."""
    path = folder / (name if name.endswith(".jsonl") else f"{name}.jsonl.gz")
    if not path.exists():
        sys.exit(
            f"error: no {path}\n  -> give a folder that holds {', '.join(SETS)} and {SPEC_BENCH} "
            "with --data FOLDER"
        )
    with (
        gzip.open(path, "rt", encoding="utf-8")
        if path.suffix == ".gz"
        else path.open(encoding="utf-8") as lines
    ):
        values = [
            json.loads(line) for line, _ in zip(lines, range(limit or sys.maxsize), strict=False)
        ]
    users = [
        [one["content"] for one in value.get("messages", []) if one["role"] == "user"]
        for value in values
    ]
    return [row(*(value.get("turns") or turns)) for value, turns in zip(values, users, strict=True)]


def edits(rng: random.Random, vocabulary: Sequence[str]) -> dict[str, Edit]:
    """Ways to write a text a second time."""

    def words(share: float) -> Edit:
        def edit(text: str) -> str:
            def other(word: str) -> str:
                return rng.choice((rng.choice(vocabulary), "", f"{word} {rng.choice(vocabulary)}"))

            return " ".join(
                other(word) if rng.random() < share else word for word in text.split(" ")
            )

        return edit

    def number(text: str) -> str:
        found = list(re.finditer(r"\d+", text))
        if not found:
            return text
        one = rng.choice(found)
        return f"{text[: one.start()]}{rng.randrange(2, 999)}{text[one.end() :]}"

    def sentences(text: str) -> str:
        parts = re.split(r"(?<=[.?!])\s+", text)
        return " ".join(rng.sample(parts, len(parts)))

    return {
        "case and spacing": lambda text: text.upper().replace(" ", " \n"),
        "no punctuation": lambda text: re.sub(r"[.,?!]", "", text),
        "2 % of words": words(0.02),
        "5 % of words": words(0.05),
        "10 % of words": words(0.1),
        "20 % of words": words(0.2),
        "sentences shuffled": sentences,
        "a greeting before": lambda text: f"Hello! Could you please help me with this? {text}",
        "one number": number,
        "all numbers": lambda text: re.sub(r"\d+", lambda _: str(rng.randrange(2, 999)), text),
    }


LIKES = str.maketrans("aceiopxysBHKMT", "асеіорхуѕВНКМТ")  # Latin letters and Cyrillic ones


def disguises(rng: random.Random) -> dict[str, Edit]:
    """Ways to hide a text from a search for its words, not from a reader."""
    numbers = ("two", "seven", "eleven", "forty")
    return {
        "punctuation stripped": lambda text: re.sub(r"[^\w\s]", "", text),
        "punctuation to spaces": lambda text: re.sub(r"[^\w\s]", " ", text),
        "other quotes and dashes": lambda text: text.translate(str.maketrans("'\"-", "’“—")),
        "homoglyphs": lambda text: text.translate(LIKES),
        "half of them homoglyphs": lambda text: "".join(
            letter.translate(LIKES) if rng.random() < 0.5 else letter for letter in text
        ),
        "accents": lambda text: re.sub("[aeiou]", lambda found: f"{found[0]}\u0301", text),
        "signs within words": lambda text: re.sub(r"(?<=\w\w)(?=\w\w)", "-", text),
        "no white space": lambda text: re.sub(r"\s", "", text),
        "letters apart": lambda text: " ".join(re.sub(r"\s", "", text)),
        "all numbers as words": lambda text: re.sub(r"\d+", lambda _: rng.choice(numbers), text),
    }


def likeness(rows: Sequence[SourceRow]) -> np.ndarray:
    bands = np.stack([signature(one) for one in rows])
    return near(bands, lambda index: row_text(rows[index]), np.ones(len(rows), bool), THRESHOLD)


def planted_duplicates(rows: Sequence[SourceRow], ways: dict[str, Edit]) -> dict[str, Any]:
    """Per edit: the share of copies that are alike enough, the share found, and the recall of those
    alike enough.
    """
    figures = {}
    for name, edit in ways.items():
        pairs = [(one, copy) for one in rows if (copy := row(*map(edit, one.turns))) != one]
        found = likeness([*rows, *(copy for _, copy in pairs)])[len(rows) :] != NONE
        alike = np.array([similarity(*pair) >= THRESHOLD for pair in pairs])
        shares = {
            "alike": alike.mean(),
            "found": found.mean(),
            "recall": found[alike].mean() if alike.any() else 0,
        }
        figures[name] = {
            "copies": len(pairs),
            **{key: round(float(share), 4) for key, share in shares.items()},
        }
        print(f"near-duplicates: {name}: {figures[name]}", flush=True)
    return figures


def similarity(one: SourceRow, other: SourceRow) -> float:
    return jaccard(
        shingles("\n".join(one.turns), SHINGLE), shingles("\n".join(other.turns), SHINGLE)
    )


def unplanted_duplicates(rows: Sequence[SourceRow]) -> dict[str, int]:
    """How many rows of a set go as they are, by threshold."""
    same = exact(np.stack([text_key(text_hash(one)) for one in rows])) != NONE
    bands = np.stack([signature(one) for one in rows])
    found = {
        one: near(bands, lambda index: row_text(rows[index]), ~same, one) != NONE
        for one in (0.9, 0.85, 0.8, 0.7)
    }
    return {
        "rows": len(rows),
        "exact": int(same.sum()),
        **{f"near {one}": int(each.sum()) for one, each in found.items()},
    }


def any_gram(items: Iterable[SourceRow], size: int) -> Callable[[SourceRow], bool]:
    """The rule of others: a row goes if it shares a run of so many words with an item."""

    def grams(one: SourceRow) -> set[tuple[str, ...]]:
        found = [plain_words(turn) for turn in one.turns]
        return {
            tuple(words[start : start + size])
            for words in found
            for start in range(len(words) - size + 1)
        }

    known = set().union(*map(grams, items))
    return lambda one: not known.isdisjoint(grams(one))


def rules(path: Path) -> dict[str, Callable[[SourceRow], bool]]:
    """Ours and others' over an evaluation set."""
    ours = Contamination([SourceConfig(path=str(path), name="exam")])
    items = [row(*json.loads(line)["turns"]) for line in path.open(encoding="utf-8")]
    return {
        "ours": lambda one: isinstance(ours(one), Drop),
        "any 10-gram": any_gram(items, 10),
        "any 13-gram": any_gram(items, 13),
    }


def contamination(
    folder: Path, sets: dict[str, list[SourceRow]], ways: dict[str, Edit]
) -> dict[str, Any]:
    """Planted turns that are found by each rule, and rows of ordinary sets that go."""
    bench = read(folder, SPEC_BENCH, None)
    tests = rules(folder / SPEC_BENCH)
    turns = [row(turn) for one in bench for turn in one.turns]

    def around(text: str) -> str:
        return (
            f"I found this somewhere. {text} Please think about it and tell me what you make of it."
        )

    planted = {
        "verbatim": lambda text: text,
        "in a longer prompt": around,
        **ways,
        **disguises(random.Random(0)),
    }
    figures: dict[str, Any] = {"turns": len(turns), "planted": {}, "ordinary": {}}
    for name, edit in planted.items():
        copies = [row(*map(edit, one.turns)) for one in turns]
        figures["planted"][name] = {
            rule: round(sum(map(test, copies)) / len(copies), 4) for rule, test in tests.items()
        }
        print(f"contamination: {name}: {figures['planted'][name]}", flush=True)
    for name, rows in sets.items():
        figures["ordinary"][name] = {
            "rows": len(rows),
            **{rule: sum(map(test, rows)) for rule, test in tests.items()},
        }
        print(f"contamination: {name}: {figures['ordinary'][name]}", flush=True)
    return figures


def families(
    rows: Sequence[SourceRow], rng: random.Random, ways: dict[str, Edit], show: bool
) -> dict[str, Any]:
    """GSM8K's training half against 1,319 problems of itself."""
    shuffled = rng.sample(rows, len(rows))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "exam.jsonl")
        path.write_text(
            "".join(json.dumps({"turns": one.turns}) + "\n" for one in shuffled[:HELD_OUT]),
            encoding="utf-8",
        )
        tests = rules(path)
        ours = Contamination([SourceConfig(path=str(path))])
        hidden = {**ways, **disguises(random.Random(0))}
        planted = {
            name: round(
                sum(isinstance(ours(row(edit(one.turns[0]))), Drop) for one in shuffled[:PLANTED])
                / PLANTED,
                4,
            )
            for name, edit in hidden.items()
        }
        print(f"contamination: GSM8K, planted: {planted}", flush=True)
        rest = shuffled[HELD_OUT:]
        for one in rest if show else ():
            if isinstance(found := ours(one), Drop):
                item = shuffled[int(re.findall(r"jsonl:(\d+)", found.note)[0]) - 1]
                print(f"--- {found.note}\n  row:  {one.turns[0]}\n  item: {item.turns[0]}")
        counts = {rule: sum(map(test, rest)) for rule, test in tests.items()}
        return {"planted": planted, "rows": len(rest), **counts}


def speeds(rows: Sequence[SourceRow], folder: Path) -> dict[str, int]:
    """Microseconds of CPU time for a prompt of 1,000 characters, the best of three rounds."""
    text = " ".join(turn for one in rows for turn in one.turns)
    prompts = [
        row(text[start : start + PROMPT])
        for start in range(0, min(len(text) - PROMPT, 300 * PROMPT), PROMPT)
    ]
    clean = Contamination([SourceConfig(path=str(folder / SPEC_BENCH))])
    steps = {
        "quality": Quality(),
        "language": lambda one: language.__wrapped__(one.turns[0]),
        "contamination": clean,
        "text_hash": text_hash,
        "signature": signature,
    }
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(3):
        for name, step in steps.items():
            started = time.process_time()
            for one in prompts:
                step(one)
            best[name] = min(best[name], (time.process_time() - started) / len(prompts))
    figures = {name: round(1e6 * seconds) for name, seconds in best.items()}
    return {**figures, "all": sum(figures.values())}


def crowd(count: int) -> dict[str, Any]:
    """Rows of Jaccard .8: they meet in large buckets, and none is alike enough to go. The worst
    case of `near`.
    """
    rng = random.Random(0)
    form = " ".join(f"word{rng.randrange(5000)}" for _ in range(100))
    texts = [
        f"{form} {' '.join(f'word{rng.randrange(5000)}' for _ in range(12))}" for _ in range(count)
    ]
    with tempfile.TemporaryDirectory() as folder:
        bands = np.lib.format.open_memmap(
            Path(folder, "bands.npy"), "w+", np.uint64, (count, BANDS)
        )
        for index, text in enumerate(texts):
            bands[index] = signature(row(text))
        bands.flush()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.process_time()
        found = near(bands, lambda index: row_text(row(texts[index])), np.ones(count, bool))
        seconds = time.process_time() - started
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        biggest = int(np.unique(bands[:, 0], return_counts=True)[1].max())
    return {
        "rows": count,
        "biggest_bucket": biggest,
        "dropped": int((found != NONE).sum()),
        "rows_per_cpu_second": round(count / seconds),
        "bytes_per_row": round(1024 * grown / count),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a part of the rows")
    parser.add_argument(
        "--show",
        action="store_true",
        help="print the pairs of GSM8K that are taken for contamination",
    )
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the sets")
    args = parser.parse_args()
    rng = random.Random(0)
    sets = {name: read(args.data, name, 1500 if args.quick else None) for name in SETS}
    plain = [*sets["gsm8k_train"][:1000], *sets["self_dialogue"][:1000]][:: 4 if args.quick else 1]
    ways = edits(rng, [word for one in plain for word in " ".join(one.turns).split()])
    figures: dict[str, Any] = {"us_per_1000_characters": speeds(sets["gsm8k_train"], args.data)}
    print(f"speed: {figures['us_per_1000_characters']}", flush=True)
    figures["planted_duplicates"] = planted_duplicates(plain, ways)
    figures["duplicates"] = {name: unplanted_duplicates(rows) for name, rows in sets.items()}
    print(f"duplicates: {figures['duplicates']}", flush=True)
    figures["contamination"] = contamination(args.data, sets, ways)
    figures["gsm8k_against_itself"] = (
        families(sets["gsm8k_train"], rng, ways, args.show) if not args.quick else None
    )
    keep = Quality()
    figures["quality"] = {
        name: sum(isinstance(keep(one), Drop) for one in rows) for name, rows in sets.items()
    }
    figures["language"] = {
        name: dict(Counter(map(row_language, rows)).most_common(4)) for name, rows in sets.items()
    }
    figures["crowd"] = crowd(5_000 if args.quick else 100_000)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
