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

from eyas.data.filters import FILTERS, PRIVACY_REASONS
from eyas.data.logs import LOG_REASONS
from eyas.data.recall import measured, recall_in, recall_of
from eyas.data.selection import SELECTION_REASONS
from eyas.data.streams import READING_REASONS
from eyas.page import fill
from eyas.privacy.pii import NAME_TYPES, TYPES

TEMPLATE = Path(__file__).with_name("card.html")
MOST_LANGUAGES = 12
NO_LANGUAGE = {"und": "undetermined", "zxx": "code only"}  # codes of ISO 639-2

# Why a row was dropped, by the head of the reason, in the order of the stage, with its meaning.
MEANINGS = {
    **READING_REASONS,
    **LOG_REASONS,
    **{entry.name: entry.meaning for entry in FILTERS},
    **PRIVACY_REASONS,
    **SELECTION_REASONS,
}

WEAKNESSES = (
    "A value that no search found is still in the prompts. How many these are is estimated above, "
    "for the types and the languages whose recall was measured, and is not known for the others.",
    "Recall was measured on made-up sentences. On noisy text (lower case, misspelt, without "
    "punctuation, chat, transcribed speech) expect about half of the names to be found.",
    "Where names were not searched, whatever names are there remain: see the table by language.",
    "Data without a form is not searched for: a nickname, an employer, an illness, a story by "
    "which somebody can be recognised.",
    "Some of what was replaced or dropped belongs to no person: a form or a checksum can fit by "
    "chance, and a name can be that of a place, a thing or an invented person.",
    "Overlap with evaluation sets is searched for by words. A translated or reworded item passes, "
    "and so does a set that was not given.",
    "Near-duplicates are searched for by words: the same request in other words stays.",
    "Licences, terms and authors are what the run file states or the registry of known sets "
    "records. The terms of single rows were not read, and a source may hold what its owner had no "
    "right to give.",
    "eyas does not know whether a person has read the prompts.",
)
NOT_SEARCHED = {
    "code": "code, commands, paths or formulas",
    "fictional": "its people are stated to be invented",
    "policy": "the policy keeps names and places",
}
MOST_PARTS = 40  # lines of the table by language
KEY_FROM = {
    "variable": "the environment variable EYAS_PRIVACY_KEY",
    "file": "a file that this user alone can read (mode 0600)",
}


@dataclass(frozen=True)
class CardContents:
    """What a card shows; absent parts are left out.

    ledger: ledger.json; match: `match_report`; evaluation: names of the sets; record: text by
    heading; sources: name, url, sha256, files and bytes of each; searched: types by source;
    dropping: types whose rows are dropped; key: its "id", and "from" where it was read.
    """

    ledger: Mapping[str, Any]
    match: Mapping[str, Any] | None = None
    evaluation: Sequence[str] = ()
    identity: str = ""
    record: Mapping[str, str] = field(default_factory=dict)
    sources: Sequence[Mapping[str, Any]] = ()
    searched: Mapping[str, Sequence[str]] = field(default_factory=dict)
    dropping: Sequence[str] = ()
    key: Mapping[str, str] = field(default_factory=dict)


def write_card(contents: CardContents) -> str:
    """The card as HTML. The same contents give the same text."""
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
        weaknesses=WEAKNESSES,
        ledger=ledger,
        num_dropped=sum(ledger["dropped"].values()),
        key_from=KEY_FROM,
        remaining=remaining(contents),
        spoken=recall_by_language(ledger),
        recall=measured(),
        caveats=_recall_caveats(ledger),
        parts=name_parts(ledger),
        not_searched=NOT_SEARCHED,
        no_language=NO_LANGUAGE,
        kept_types=_kept_types(contents.searched),
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
    rows = []
    for reason, count in ledger["dropped"].items():
        head = reason.partition(".")[0]
        rows.append(
            {"name": reason, "count": count, "head": head, "meaning": MEANINGS.get(head, "")}
        )
    return sorted(
        rows, key=lambda row: (order.get(row["head"], len(order)), -row["count"], row["name"])
    )


def personal_data(ledger: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Values found by type, most frequent first: how many were replaced, how many were in rows
    dropped for them, and both by source.
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
    """By type that was found: the values found, and how many more are expected to remain in the
    prompts, with the bounds of `Recall.remaining`; None where recall was not measured.

    Of a type that is replaced values in prompts count, of one that drops its row values in dropped
    rows: what was missed of it is in rows that became prompts.
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
    """For each language of the rows, the most frequent first: its share of them, and the type with
    the lowest measured recall of values with a form and of names, as (type, recall); None where no
    recall was measured.
    """
    rows, total = [], sum(ledger["languages"].values()) or 1
    for code, count in sorted(ledger["languages"].items(), key=lambda item: (-item[1], item[0])):
        known = sorted(recall_in(code).items(), key=lambda item: item[1].interval[0])
        parts = (
            [one for one in known if one[0] not in NAME_TYPES],
            [one for one in known if one[0] in NAME_TYPES],
        )
        forms, names = (next(iter(part), None) for part in parts)
        language = NO_LANGUAGE.get(code, code)
        rows.append({"language": language, "share": count / total, "forms": forms, "names": names})
    return rows


def _recall_caveats(ledger: Mapping[str, Any]) -> list[str]:
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
    """Where names were searched, and where not: the ledger's `names` with source and share of its
    characters; the largest first within a source, the smallest of many as one.
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


def _kept_types(searched: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Types that are searched for in no or not in every source, with where they are not."""
    kept = []
    for type in TYPES if searched else ():
        without = [name for name, types in searched.items() if type not in types]
        if without:
            kept.append(
                (type, "any source" if len(without) == len(searched) else ", ".join(without))
            )
    return kept


def overlaps(ledger: Mapping[str, Any], evaluation: Sequence[str]) -> dict[str, int]:
    """Rows dropped by evaluation set, sets without any included."""
    found = {
        reason.partition(".")[2]: count
        for reason, count in ledger["dropped"].items()
        if reason.startswith("contamination.")
    }
    return {**dict.fromkeys(evaluation, 0), **found}
