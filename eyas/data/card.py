"""The data card: what was read, searched, changed and dropped, and what is expected to remain, for
the data-protection officer who signs. One HTML file that needs no other file.

It says "searched" and "found", never "free of": each sentence is true when a detector misses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.artifact import Manifest
from eyas.data.filters import FILTERS, PRIVACY_REASONS
from eyas.data.logs import LOG_REASONS
from eyas.data.recall import measured, recall_in, recall_of
from eyas.data.selection import SELECTION_REASONS
from eyas.data.streams import READING_REASONS
from eyas.page import fill
from eyas.privacy.pii import NAME_TYPES, TYPES

TEMPLATE = Path(__file__).with_name("card.html")
MOST_LANGUAGES = 12
NO_LANGUAGE = {"und": "undetermined", "zxx": "code only"}  # ISO 639-2

# By the head of a drop's reason, in the order of the stage
MEANINGS = {
    **READING_REASONS,
    **LOG_REASONS,
    **{entry.name: entry.meaning for entry in FILTERS},
    **PRIVACY_REASONS,
    **SELECTION_REASONS,
}

MOST_PARTS = 40  # lines of the table by language


@dataclass(frozen=True)
class CardContents:
    """What a card shows; an absent part is left out.

    ledger: ledger.json; match: `match_report`; record: text by heading; sources: as inputs, by
    name; searched: types by source; dropping: types whose rows are dropped; key: its "id", and
    "from": `key_place`.
    """

    ledger: Mapping[str, Any]
    match: Mapping[str, Any] | None = None
    evaluation: Sequence[str] = ()
    identity: str = ""
    record: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, Manifest] = field(default_factory=dict)
    searched: Mapping[str, Sequence[str]] = field(default_factory=dict)
    dropping: Sequence[str] = ()
    key: Mapping[str, str] = field(default_factory=dict)


def write_card(contents: CardContents) -> str:
    """The card as HTML, the same for the same contents."""
    ledger = contents.ledger
    listed = reasons(ledger)
    shown = next((one for one in listed if one["head"] == "pii"), listed[0] if listed else None)
    most_spoken = sorted(ledger["languages"].items(), key=lambda item: (-item[1], item[0]))
    languages = [(NO_LANGUAGE.get(code, code), count) for code, count in most_spoken]
    if rest := sum(count for _, count in languages[MOST_LANGUAGES:]):
        languages = [*languages[:MOST_LANGUAGES], ("others", rest)]
    filters = {
        "number": lambda value: f"{value:,.0f}",
        "percent": lambda value: f"{100 * value:.1f} %",
        "truncated": lambda names: ", ".join([*names[:4], *(["..."] if len(names) > 4 else [])]),
        "pretty": lambda value: json.dumps(value, indent=1, ensure_ascii=False),
        "about": lambda value: f"{value:,.1f}" if value < 10 else f"{value:,.0f}",
        "pii_rows": lambda dropped: sum(
            count for reason, count in dropped.items() if reason.startswith("pii")
        ),
    }
    return fill(
        TEMPLATE,
        filters,
        contents=contents,
        ledger=ledger,
        num_dropped=sum(ledger["dropped"].values()),
        remaining=remaining(contents),
        spoken=recall_by_language(ledger),
        recall=measured(),
        caveats=recall_caveats(ledger),
        parts=name_parts(ledger),
        no_language=NO_LANGUAGE,
        kept_types=kept_types(contents.searched),
        reasons=listed,
        examples=list(dict.fromkeys([shown["name"], shown["head"]])) if shown else [],
        verdicts=ledger["licences"],
        personal=personal_data(ledger),
        overlaps=overlaps(ledger, contents.evaluation),
        languages=languages,
    )


def reasons(ledger: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every reason with its count, in the order of the stage, the most frequent of a head first."""
    order = {head: place for place, head in enumerate(MEANINGS)}
    rows: list[dict[str, Any]] = []
    for reason, count in ledger["dropped"].items():
        head = reason.partition(".")[0]
        meaning = MEANINGS.get(head, "")
        rows.append({"name": reason, "count": count, "head": head, "meaning": meaning})
    return sorted(
        rows, key=lambda row: (order.get(row["head"], len(order)), -row["count"], row["name"])
    )


def personal_data(ledger: Mapping[str, Any]) -> list[dict[str, Any]]:
    """By type, the most frequent first: values replaced, values in rows dropped for them, and both
    by source.
    """

    def counts(account: Mapping[str, Any], type: str) -> dict[str, int]:
        found = {"replaced": account["masked"], "dropped": account["found_in_dropped"]}
        return {name: by_type.get(type, 0) for name, by_type in found.items()}

    rows: list[dict[str, Any]] = []
    for type in {*ledger["masked"], *ledger["found_in_dropped"]}:
        by_source = {name: counts(one, type) for name, one in ledger["sources"].items()}
        most = max([1, *(sum(found.values()) for found in by_source.values())])
        rows.append({"type": type, **counts(ledger, type), "by_source": by_source, "most": most})
    return sorted(rows, key=lambda row: (-row["replaced"] - row["dropped"], row["type"]))


def remaining(contents: CardContents) -> list[dict[str, Any]]:
    """By type: the values found, and how many more are expected to remain in the prompts, with the
    bounds of `Recall.remaining`; None where recall was not measured.

    What was missed of a type that drops its rows is in rows that became prompts, so of such a type
    the values in dropped rows count.
    """
    ledger, rows = contents.ledger, []
    for type in sorted({*ledger["masked"], *ledger["found_in_dropped"]}):
        counted = "found_in_dropped" if type in contents.dropping else "masked"
        found = ledger[counted].get(type, 0)
        known = recall_of(type)
        expected, *between = known.remaining(found) if known else (None, None, None)
        row = {"type": type, "found": found, "recall": known}
        rows += [{**row, "expected": expected, "between": between}] if found else []
    return sorted(rows, key=lambda row: -row["found"])


def recall_by_language(ledger: Mapping[str, Any]) -> list[dict[str, Any]]:
    """By language of the rows, the most frequent first: its share, and the lowest measured recall
    among values with a form and among names, as (type, recall) or None.
    """
    rows, total = [], sum(ledger["languages"].values()) or 1
    for code, count in sorted(ledger["languages"].items(), key=lambda item: (-item[1], item[0])):
        known = sorted(recall_in(code).items(), key=lambda item: item[1].interval[0])
        forms = next((one for one in known if one[0] not in NAME_TYPES), None)
        names = next((one for one in known if one[0] in NAME_TYPES), None)
        language = NO_LANGUAGE.get(code, code)
        rows.append({"language": language, "share": count / total, "forms": forms, "names": names})
    return rows


def recall_caveats(ledger: Mapping[str, Any]) -> list[str]:
    """In what this run differs from the search whose recall was measured."""
    versions, personal = ledger["versions"], ledger["policies"].get("personal", {})
    found = [
        f"{name} {version} there, {versions[name]} here"
        for name, version in measured()["versions"].items()
        if name in versions and versions[name] != version
    ]
    project = personal.get("cloud_project")
    return found + [f"the Cloud DLP project {project} of this run was not there"] * bool(project)


def name_parts(ledger: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The ledger's `names` with source and share of its characters, the largest first within a
    source; the smallest of many as one.
    """
    parts = []
    for source, account in ledger["sources"].items():
        own = sorted(account["names"], key=lambda part: -part["characters"])
        total = sum(part["characters"] for part in own) or 1
        parts += [{**part, "source": source, "share": part["characters"] / total} for part in own]
    if len(parts) <= MOST_PARTS:
        return parts
    smallest = sorted(parts, key=lambda part: part["characters"])[: len(parts) - MOST_PARTS]
    return [part for part in parts if part not in smallest] + [
        {
            "source": f"{len(smallest)} smaller parts",
            "language": "",
            "by": "in part" if any(part["by"] for part in smallest) else "",
            "reason": "",
            "rows": sum(part["rows"] for part in smallest),
            "characters": sum(part["characters"] for part in smallest),
            "share": None,
        }
    ]


def kept_types(searched: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Types that are not searched for in every source, with the sources."""
    kept = []
    for type in TYPES if searched else ():
        without = [name for name, types in searched.items() if type not in types]
        where = "any source" if len(without) == len(searched) else ", ".join(without)
        kept += [(type, where)] if without else []
    return kept


def overlaps(ledger: Mapping[str, Any], evaluation: Sequence[str]) -> dict[str, int]:
    """Rows dropped by evaluation set, sets without any included."""
    found = {
        reason.partition(".")[2]: count
        for reason, count in ledger["dropped"].items()
        if reason.startswith("contamination.")
    }
    return {**dict.fromkeys(evaluation, 0), **found}
