"""What is found of labelled personal data, what each policy does to ordinary prompts, and how fast.

    python benchmarks/privacy.py [--quick] [--labelled FILE] [--prompts FILE ...]

By type: recall over the labelled spans (found when all of its letters and digits lie in findings,
of whatever type: it is gone from the text) and precision over the findings (right when one overlaps
a labelled span of its type), with Wilson's 95 % intervals. The same for Presidio as it comes,
without a model. "unlabelled": findings of types that the set does not label have no precision.

Ordinary prompts: of all rows, how many each policy changes or drops, and for which types. Speed:
one process, texts of 1,000 characters made of the prompts, everything on. The last line of stdout
is one JSON.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import tldextract
from presidio_analyzer import AnalyzerEngine, RecognizerRegistry
from presidio_analyzer.nlp_engine import NoOpNlpEngine

from eyas.data.filters import PersonalData
from eyas.data.ledger import Drop, SourceRow
from eyas.data.recall import wilson
from eyas.privacy.detector import Detector
from eyas.privacy.findings import Finding
from eyas.privacy.pii import EVERY_TYPE, TYPES, PrivacyConfig

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
LABELLED = DATA / "pii" / "presidio_synth_v2.json.gz"
PROMPTS = [DATA / "gsm8k_train.jsonl.gz", DATA / "tldr.jsonl.gz"]
POLICIES: tuple[Literal["mask", "surrogate", "drop"], ...] = ("mask", "surrogate", "drop")
QUICK_TEXTS, QUICK_ROWS = 300, 1000
SPEED_CHARACTERS, SPEED_TEXTS = 1000, 300
KEY = b"benchmark"
# The set's names for our types; Presidio's own names are its own.
OURS = {
    "GPE": "LOCATION",
    "ZIP_CODE": "STREET_ADDRESS",
    "DOMAIN_NAME": "URL",
    "US_DRIVER_LICENSE": "NATIONAL_ID",
}
GROUPS = {
    "by patterns": (
        "EMAIL_ADDRESS",
        "CREDIT_CARD",
        "IBAN_CODE",
        "PHONE_NUMBER",
        "US_SSN",
        "IP_ADDRESS",
        "DOMAIN_NAME",
    ),
    "names": ("PERSON",),
    "addresses and places": ("STREET_ADDRESS", "GPE"),
}
GROUPS["all that we look for"] = (
    *itertools.chain.from_iterable(GROUPS.values()),
    "ZIP_CODE",
    "US_DRIVER_LICENSE",
)
# either is right
WITHIN = {
    "STREET_ADDRESS": ("LOCATION", "STREET_ADDRESS"),
    "LOCATION": ("LOCATION", "STREET_ADDRESS"),
}

Find = Callable[[str], list[Finding]]


def presidio_defaults() -> Find:
    """Presidio's predefined recognisers for English on its engine without a model, kept from
    fetching a list.
    """
    tldextract.extract = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)
    nothing = NoOpNlpEngine([{"lang_code": "en", "model_name": "none"}])
    registry = RecognizerRegistry()
    registry.load_predefined_recognizers(languages=["en"], nlp_engine=nothing)
    engine = AnalyzerEngine(registry=registry, nlp_engine=nothing)

    def find(text: str) -> list[Finding]:
        return [
            Finding(one.entity_type, one.start, one.end)
            for one in engine.analyze(text, language="en")
        ]

    return find


def ours() -> Find:
    """All types, whatever the policy."""
    return Detector(EVERY_TYPE).find


def is_covered(text: str, start: int, end: int, findings: Iterable[Finding]) -> bool:
    """Whether no letter or digit of the span is left."""
    hidden = {
        place for one in findings for place in range(max(one.start, start), min(one.end, end))
    }
    return all(place in hidden for place in range(start, end) if text[place].isalnum())


def is_right(finding: Finding, spans: list[dict[str, Any]]) -> bool:
    """Whether it overlaps a labelled span of its type."""
    types = WITHIN.get(finding.type, (finding.type,))
    return any(
        span["start_position"] < finding.end
        and finding.start < span["end_position"]
        and OURS.get(span["entity_type"], span["entity_type"]) in types
        for span in spans
    )


def judge(texts: list[dict[str, Any]], find: Find) -> dict[str, Any]:
    """Recall by labelled type and group, precision by found type, and the texts of which nothing
    labelled is left.
    """
    labelled, masked, found, right = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    whole = with_spans = 0
    wanted = set(GROUPS["all that we look for"])
    for text in texts:
        findings, spans = find(text["full_text"]), text["spans"]
        covered = [
            is_covered(text["full_text"], span["start_position"], span["end_position"], findings)
            for span in spans
        ]
        for span, is_gone in zip(spans, covered, strict=True):
            labelled[span["entity_type"]] += 1
            masked[span["entity_type"]] += is_gone
        for finding in findings:
            found[finding.type] += 1
            right[finding.type] += is_right(finding, spans)
        looked_for = [
            is_gone
            for span, is_gone in zip(spans, covered, strict=True)
            if span["entity_type"] in wanted
        ]
        with_spans += bool(looked_for)
        whole += bool(looked_for) and all(looked_for)
    recall = {type: share(masked[type], labelled[type]) for type in sorted(labelled)}
    for name, types in {**GROUPS, "all spans of the set": tuple(labelled)}.items():
        recall[name] = share(
            sum(masked[type] for type in types), sum(labelled[type] for type in types)
        )
    known = {OURS.get(type, type) for type in labelled}
    precision = {type: share(right[type], found[type]) for type in sorted(found) if type in known}
    return {
        "recall": recall,
        "precision": precision,
        "texts without a rest": share(whole, with_spans),
        "unlabelled": {type: count for type, count in sorted(found.items()) if type not in known},
    }


def share(num: int, of: int) -> dict[str, float]:
    """A share as counts, value and interval."""
    low, high = wilson(num, of)
    return {
        "num": num,
        "of": of,
        "share": round(num / of, 4) if of else 0.0,
        "low": round(low, 4),
        "high": round(high, 4),
    }


def show(name: str, judged: dict[str, Any]) -> None:
    """The table of one way of finding."""
    print(
        f"\n{name}\n{'':24}{'recall':>8}{'95 %':>16}{'spans':>7}"
        f"{'precision':>12}{'95 %':>16}{'found':>7}"
    )
    for type, recall in judged["recall"].items():
        precision = judged["precision"].get(OURS.get(type, type)) if type.isupper() else None
        print(f"{type:24}{column(recall)}" + (f"    {column(precision)}" if precision else ""))
    print(f"{'texts without a rest':24}{column(judged['texts without a rest'])}")
    print(f"unlabelled: {judged['unlabelled'] or 'none'}")


def column(one: dict[str, float]) -> str:
    """A share with its interval and its base."""
    return f"{one['share']:8.3f}{one['low']:10.3f}-{one['high']:.3f}{one['of']:7}"


def rows_of(path: Path, limit: int | None) -> Iterator[SourceRow]:
    """The user turns of a set."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(itertools.islice(lines, limit)):
            turns = tuple(
                one["content"] for one in json.loads(line)["messages"] if one["role"] == "user"
            )
            yield SourceRow(path.name, "", f"{path.name}:{number}", None, turns)


def ordinary(rows: list[SourceRow]) -> dict[str, Any]:
    """What each policy makes of rows, with the default action of each type; all look for the same
    types.
    """
    report: dict[str, Any] = {"rows": len(rows)}
    detector = Detector(PrivacyConfig())
    suspects = [row for row in rows if any(detector.find_all(row.turns))]
    for policy in POLICIES:
        changed, dropped, types = 0, 0, Counter[str]()
        for result in PersonalData(PrivacyConfig(policy=policy), KEY).many(suspects):
            found = result.found if isinstance(result, Drop) else result.masked
            changed += not isinstance(result, Drop)
            dropped += isinstance(result, Drop)
            types.update({one.type for one in found})
        report[policy] = {
            "changed": changed,
            "dropped": dropped,
            "rows by type": dict(types.most_common()),
        }
    return report


def speed(rows: Iterable[SourceRow]) -> dict[str, float]:
    """The row filter on texts of SPEED_CHARACTERS characters, everything on."""
    text = " ".join(turn for row in rows for turn in row.turns)
    starts = range(
        0, min(len(text), SPEED_CHARACTERS * SPEED_TEXTS) - SPEED_CHARACTERS + 1, SPEED_CHARACTERS
    )
    made = [
        SourceRow("", "", "", None, (text[start : start + SPEED_CHARACTERS],)) for start in starts
    ]
    keep = PersonalData(PrivacyConfig(actions=dict.fromkeys(TYPES, "mask")), KEY)
    for row in made[:10]:
        keep(row)
    started = time.perf_counter()
    for row in made:
        keep(row)
    seconds = time.perf_counter() - started
    return {
        "texts": len(made),
        "texts_per_s": round(len(made) / seconds, 1),
        "ms_per_text": round(seconds / len(made) * 1e3, 3),
    }


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a part of the texts and rows")
    parser.add_argument("--labelled", type=Path, default=LABELLED, help="presidio_synth_v2.json.gz")
    parser.add_argument(
        "--prompts", type=Path, nargs="*", default=PROMPTS, help="gzip JSON lines with `messages`"
    )
    args = parser.parse_args()
    for path in (args.labelled, *args.prompts):
        if not path.exists():
            sys.exit(
                f"error: no file at {path}\n  -> give the labelled texts with --labelled and "
                "prompts with --prompts"
            )
    texts = json.loads(gzip.decompress(args.labelled.read_bytes()))[
        : QUICK_TEXTS if args.quick else None
    ]
    result: dict[str, Any] = {"texts": len(texts), "quick": args.quick}
    for name, find in (("eyas", ours()), ("presidio without a model", presidio_defaults())):
        result[name] = judge(texts, find)
        show(f"{name}, {len(texts)} texts", result[name])
    result["ordinary"] = {}
    pool = []
    for path in args.prompts:
        rows = list(rows_of(path, QUICK_ROWS if args.quick else None))
        report = result["ordinary"][path.name] = ordinary(rows)
        print(f"\n{path.name}: {len(rows)} rows")
        for policy in POLICIES:
            did = report[policy]
            print(
                f"  {policy:10} changed {did['changed']}, dropped {did['dropped']}; rows by type "
                f"{did['rows by type']}"
            )
        pool += rows[:QUICK_ROWS]
    result["speed"] = speed(pool)
    print(f"\n{SPEED_CHARACTERS} characters, one process: {result['speed']}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
