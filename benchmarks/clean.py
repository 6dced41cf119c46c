"""What the default policy changes in texts that hold nobody's personal data: it should be nothing.

    python benchmarks/clean.py [--quick] [--show N] [--half 0|1] [KIND=PATH ...]

By kind of text (a language's code, or a name such as `code`): rows, the share that was searched for
names, rows that changed or were dropped with Wilson's 95 % interval, and those in which a name, an
address or a place did it. "first": the types of the first finding of those rows; --show N prints N
of them with what stands around. --half takes every second row only, so that rules can be written on
one half and measured on the other.

KIND=PATH is a file or a folder: JSON lines (`text`, `prompt` or the user's `messages`), gettext
catalogues (.po), manual pages (.1.gz), fortunes (% between), source files (Python by function,
others by blank line), HTML and plain text (by paragraph). Without any it takes what is here: the
library of this Python, manual pages and fortunes of the system, and sets beside the checkout. What
stands in the same words under two kinds is left out: a paragraph that nobody has translated. Word
problems (`wordproblems`) hold invented people, and are shown with and without `fictional: true`.
The last line of stdout is one JSON.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import hashlib
import html
import json
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eyas.data.filters import PersonalData
from eyas.data.ledger import Drop, SourceRow
from eyas.data.recall import Recall
from eyas.privacy.policy import NAME_TYPES, Finding, PrivacyConfig

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SHORTEST, LONGEST = 15, 2000  # characters of a row
ROWS, QUICK_ROWS = 2000, 200
FILES = 400  # of a folder, drawn
KEY = b"benchmark"
SOURCES = {".c", ".h", ".cpp", ".js", ".ts", ".go", ".rs", ".java", ".rb", ".pl", ".sh", ".sql"}
# Lines of manual pages that are text, and marks within them.
MARKED = re.compile(r"\.(?:B|I|BR|IR|RB|RI|BI|IB)\s+(.*)")
ROFF = re.compile(r"\\f(?:\[[^]]*\]|\(..|.)|\\s[+-]?\d|\\&|\\")
PO = re.compile(r'^msgstr(?:\[\d\])? ((?:"(?:[^"\\]|\\.)*"\s*)+)', re.M)
NO_PROSE = re.compile(r"@|https?:|[Cc]opyright|©")


def rows_of(path: Path) -> Iterator[str]:
    """The texts of a file, by its ending and its form; none of one that is no UTF-8."""
    try:
        packed = path.read_bytes()
        text = (gzip.decompress(packed) if path.suffix == ".gz" else packed).decode()
    except (OSError, EOFError, UnicodeDecodeError):
        return
    name = path.name.removesuffix(".gz")
    if name.endswith((".jsonl", ".json")):
        yield from filter(None, map(_said, text.splitlines()))
    elif name.endswith(".po"):
        for match in PO.finditer(text):
            parts = re.findall(r'"((?:[^"\\]|\\.)*)"', match[1])
            yield "".join(parts).replace("\\n", "\n").replace('\\"', '"')
    elif re.search(r"\.\d\w*$", name):
        yield from (one for one in _manual(text) if not NO_PROSE.search(one))
    elif name.endswith(".py"):
        yield from _functions(text)
    elif name.endswith((".html", ".htm")):
        for one in re.findall(r"<p\b[^>]*>(.*?)</p>", text, re.S):
            yield " ".join(html.unescape(re.sub(r"<[^>]+>", "", one)).split())
    elif re.search(r"^%+$", text, re.M):
        yield from re.split(r"^%+\n", text, flags=re.M)
    elif path.suffix in {"", ".txt", ".md", ".u8"} | SOURCES:
        yield from re.split(r"\n\s*\n", text)


def _said(line: str) -> str:
    try:
        row = json.loads(line)
    except ValueError:
        return ""
    if not isinstance(row, dict):
        return ""
    if "messages" in row:
        return "\n".join(one["content"] for one in row["messages"] if one["role"] == "user")
    return str(row.get("text") or row.get("prompt") or "")


def _manual(text: str) -> Iterator[str]:
    held: list[str] = []
    for line in [*text.split("\n"), "."]:
        marked = MARKED.match(line)
        if marked:
            held.append(marked[1].replace('"', ""))
        elif line[:1] in (".", "'"):
            yield ROFF.sub("", " ".join(held).replace("\\-", "-").replace("\\(aq", "'"))
            held = []
        else:
            held.append(line)


def _functions(text: str) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield ast.get_source_segment(text, node) or ""


def texts_of(paths: list[Path]) -> set[str]:
    """The different texts of files and folders: of a folder FILES files, by a hash of their names,
    so that folders of several languages give the same pages.
    """
    found = set()
    for path in paths:
        files = [one for one in path.rglob("*") if one.is_file() and not one.is_symlink()]
        files.sort(key=lambda one: hashlib.sha256(one.name.encode()).digest())
        for file in files[:FILES] if path.is_dir() else [path]:
            found |= {text.strip() for text in rows_of(file)}
    return {text for text in found if SHORTEST <= len(text) <= LONGEST}


def drawn(texts: set[str], most: int, half: int | None) -> list[str]:
    """At most so many of the texts, with a fixed seed."""
    ordered = sorted(texts)
    random.Random(0).shuffle(ordered)
    return ordered[slice(half, None, 2 if half is not None else None)][:most]


def sets_here() -> dict[str, list[Path]]:
    """What this machine has, by kind."""
    sets = {
        "code": sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")),
        "wordproblems": [DATA / "gsm8k_train.jsonl.gz"],
        "en": [DATA / "tldr.jsonl.gz"],
    }
    for folder in sorted(Path("/usr/share/man").glob("[a-z][a-z]*")):
        if not folder.name.startswith("man"):
            sets.setdefault(folder.name[:2], []).append(folder)
    for folder in sorted(Path("/usr/share/games/fortunes").glob("[a-z][a-z]")):
        sets.setdefault(folder.name, []).append(folder)
    there = {kind: [path for path in paths if path.exists()] for kind, paths in sets.items()}
    return {kind: paths for kind, paths in there.items() if paths}


def judge(texts: list[str], config: PrivacyConfig, show: int) -> dict[str, Any]:
    """What a policy does to texts, each a row."""
    rows = [SourceRow("clean", "", "", None, (text,)) for text in texts]
    changed = dropped = by_name = searched = 0
    first = Counter[str]()
    examples: list[str] = []
    for row, result in zip(rows, PersonalData(config, KEY).many(rows), strict=True):
        found = result.found if isinstance(result, Drop) else result.masked
        searched += isinstance(result, SourceRow) and any(part.by for part in result.names)
        dropped += isinstance(result, Drop)
        if found:
            changed += 1
            by_name += any(one.type in NAME_TYPES for one in found)
            first[min(found, key=lambda one: one.start).type] += 1
            examples.append(_around(row.turns[0], found[0]))
    low, high = Recall(changed, len(rows)).interval
    for example in random.Random(0).sample(examples, min(show, len(examples))):
        print(f"      {example}")
    return {
        "rows": len(rows),
        "searched": round(searched / len(rows), 4),
        "changed": changed,
        "share": round(changed / len(rows), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "by_name": round(by_name / len(rows), 4),
        "dropped": dropped,
        "first": dict(first.most_common(3)),
    }


def _around(text: str, found: Finding) -> str:
    value = text[found.start : found.end]
    before, after = text[max(0, found.start - 30) : found.start], text[found.end : found.end + 20]
    return f"{found.type}: {before}[{value}]{after}".replace("\n", " | ")


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROWS} rows a kind")
    parser.add_argument("--show", type=int, default=0, help="changed rows to print, a kind")
    parser.add_argument("--half", type=int, choices=(0, 1), help="every second row only")
    parser.add_argument("sets", nargs="*", metavar="KIND=PATH", help="files and folders")
    args = parser.parse_args()
    sets: dict[str, list[Path]] = {}
    for given in args.sets:
        kind, separator, path = given.partition("=")
        if not separator or not Path(path).exists():
            parser.error(f"there is nothing at {path or given!r}: give KIND=PATH")
        sets.setdefault(kind, []).append(Path(path))
    result: dict[str, Any] = {"quick": args.quick, "half": args.half}
    print("kind             rows searched changed  95 %             names dropped first")
    found = {kind: texts_of(paths) for kind, paths in (sets or sets_here()).items()}
    kinds = Counter(text for texts in found.values() for text in texts)
    for kind, all_texts in found.items():
        own = {text for text in all_texts if kinds[text] == 1}
        texts = drawn(own, QUICK_ROWS if args.quick else ROWS, args.half)
        policies = {kind: PrivacyConfig()}
        if kind == "wordproblems":
            policies["fictional"] = PrivacyConfig(fictional=True)
        for name, config in policies.items() if texts else ():
            one = result[name] = judge(texts, config, args.show)
            print(
                f"{name:14}{one['rows']:7}{one['searched']:9.3f}{one['share']:8.4f}"
                f"  {one['low']:.4f}-{one['high']:.4f}{one['by_name']:8.4f}{one['dropped']:8} "
                f"{one['first'] or ''}"
            )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
