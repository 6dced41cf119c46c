"""Recall by type under the default policy, as the data card states it.

    python benchmarks/recall.py [--quick] [--write] [--labelled FILE] [--name TEXT] [--languages en]

FILE is labelled texts as presidio-research writes them: [{"full_text", "spans": [{"entity_type",
"start_position", "end_position"}]}], gzip or not. A value is found when no letter or digit of it is
left, whatever the type under which it was found; types that the default policy keeps are not
searched for and not counted. --write puts the counts into eyas/data/recall.json, with what they
were measured on: run it when a detector changes, or on texts like your own. The last line of stdout
is one JSON object.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import sys
from collections import Counter
from pathlib import Path

from privacy import LABELLED, OURS, is_covered

from eyas.artifact import VERSION
from eyas.data.recall import MEASURED, Recall
from eyas.privacy import detector
from eyas.privacy.detector import Detector
from eyas.privacy.policy import TYPES, PrivacyConfig

QUICK = 300  # texts


def main() -> None:
    """Read the arguments, measure, print, and write the table where that is asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"the first {QUICK} texts")
    parser.add_argument("--write", action="store_true", help=f"into {MEASURED.name}")
    parser.add_argument("--labelled", type=Path, default=LABELLED)
    parser.add_argument("--name", default="presidio_synth_v2: made-up English sentences")
    parser.add_argument("--languages", nargs="*", default=["en"], help="of the texts")
    args = parser.parse_args()
    if not args.labelled.exists():
        sys.exit(f"error: no file at {args.labelled}\n  -> give labelled texts: --labelled FILE")
    raw = args.labelled.read_bytes()
    texts = json.loads(gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw)
    texts = texts[: QUICK if args.quick else None]
    policy = PrivacyConfig()
    find = Detector(policy).find
    found, of = Counter[str](), Counter[str]()
    for text in texts:
        findings = find(text["full_text"])
        for span in text["spans"]:
            type = OURS.get(span["entity_type"], span["entity_type"])
            if type in TYPES and policy.action(type) != "keep":
                start, end = span["start_position"], span["end_position"]
                of[type] += 1
                found[type] += is_covered(text["full_text"], start, end, findings)
    for type, count in sorted(of.items()):
        low, high = Recall(found[type], count).interval
        print(f"{type:20}{found[type] / count:7.3f}  {low:.3f}-{high:.3f}  {count:6}")
    table = {
        "set": args.name,
        "texts": len(texts),
        "languages": args.languages,
        "policy": "the default: surrogates, places and links kept, no extra recogniser",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {"eyas": VERSION, **detector.versions()},
        "types": {type: {"found": found[type], "of": of[type]} for type in sorted(of)},
    }
    if args.write:
        MEASURED.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(table))


if __name__ == "__main__":
    main()
