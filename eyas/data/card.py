"""The data card: what was read, searched, changed and dropped, and what is expected to remain, for
the data-protection officer who signs. One HTML file that needs no other file.

Takes the content of ledger.json, the fit report and the record as plain JSON. Knows the meaning of
the counts; knows no row and no value that was found. It says "searched" and "found", never "free
of": each sentence is true when a detector misses.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from eyas.data.pictures import (
    ClassCounts,
    Segment,
    paint_bars,
    paint_distances,
    paint_flow,
    paint_histogram,
    paint_lines,
    paint_shares,
    picture,
)
from eyas.data.recall import measured, recall_of
from eyas.data.record import HEADINGS
from eyas.page import fill
from eyas.privacy.pii import TYPES

TEMPLATE = Path(__file__).with_name("card.html")
MOST_SOURCES = 10  # in the flow; the others are shown as one
MOST_LANGUAGES = 12
NO_LANGUAGE = {"und": "undetermined", "zxx": "code only"}  # codes of ISO 639-2
NUM_TYPE_COLORS = 7  # of types of personal data; rarer types share one more
OTHERS = "others"

# What becomes of a row, by the head of its reason, in the order of the stage, with its meaning.
FATES = {
    "kept": "a prompt",
    "malformed": "could not be read: no JSON, no known shape, or not UTF-8",
    "cut": "a place where a file is cut or damaged; how many rows were lost there is not known",
    "flagged": "its publisher flags it as deleted, or as written by a machine",
    "empty": "the user says nothing in it",
    "too_long": "longer than the limit",
    "quality": "no usable text: repetition, broken encoding, or hardly a letter",
    "language": "taken for a language that is not one of those to keep",
    "contamination": "found to overlap an evaluation set, which must not be trained on",
    "pii": "something was found in it of a type that the policy drops, or that was still there "
    "after it was replaced",
    "duplicate": "says the same as an earlier row, or nearly; or another row goes on from it",
    "match": "not drawn: others resemble the traffic more",
    "mix": "not drawn: more than its source's share",
    "limit": "more than `max_prompts`",
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
    "language": "no recogniser for this language",
    "und": "which language it is was not found",
    "fictional": "its people are stated to be invented",
    "policy": "the policy keeps names and places",
}
MOST_PARTS = 40  # lines of the table by language
KEY_FROM = {
    "variable": "the environment variable EYAS_PRIVACY_KEY",
    "file": "a file that this user alone can read (mode 0600)",
}
SAMPLES = {
    "none": "No changed row was shown or kept by this run. "
    "<code>eyas prompts OUT --diff TYPE</code> shows all of them on a terminal, as long as the "
    "sources are there.",
    "terminal": "A sample of changed rows was for the terminal of the run alone, and is kept in no "
    "file.",
    "encrypted": "A sample of changed rows, before and after, is kept in <code>samples.enc</code>, "
    "encrypted under the privacy key; <code>eyas prompts OUT --samples</code> shows it to who "
    "holds the key.",
}


@dataclass(frozen=True)
class CardContents:
    """What a card shows. Only the ledger is required; absent parts are left out.

    ledger: ledger.json; fit: `fit.fit_report`; evaluation: names of the evaluation sets; record:
    `RecordConfig.facts`, with a date; sources: name, url, sha256, files and bytes of each;
    searched: the types that are searched for, by source; dropping: those whose rows are dropped;
    key: its "id", and "from" where it was read.
    """

    ledger: Mapping[str, Any]
    fit: Mapping[str, Any] | None = None
    evaluation: Sequence[str] = ()
    identity: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    sources: Sequence[Mapping[str, Any]] = ()
    searched: Mapping[str, Sequence[str]] = field(default_factory=dict)
    dropping: Sequence[str] = ()
    key: Mapping[str, str] = field(default_factory=dict)


def write_card(contents: CardContents) -> str:
    """The card as HTML. The same contents give the same text."""
    ledger = contents.ledger
    listed, found = reasons(ledger), personal_data(ledger)
    filters = {
        "number": lambda value: f"{value:,.0f}",
        "percent": lambda value: f"{100 * value:.1f} %",
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
        headings=HEADINGS,
        unstated=[name for name in HEADINGS if not contents.record.get(name)],
        samples=Markup(SAMPLES[contents.record.get("samples", "none")]),
        key_from=KEY_FROM,
        remaining=remaining(contents),
        recall=measured(),
        caveats=_recall_caveats(ledger),
        parts=name_parts(ledger),
        not_searched=NOT_SEARCHED,
        no_language=NO_LANGUAGE,
        kept_types=_kept_types(contents.searched),
        heads=fates(ledger),
        meanings=FATES,
        flow=_flow(ledger["sources"]),
        by_source=picture(
            paint_shares,
            "what became of each source's rows",
            {name: fates(one) for name, one in ledger["sources"].items()},
            {
                name: f"{one['rows_out']:,} of {one['rows_in']:,} kept"
                for name, one in ledger["sources"].items()
            },
        ),
        reasons=listed,
        examples=_examples(listed),
        verdicts=ledger.get("licences", ()),
        personal=found,
        personal_picture=_personal_picture(ledger, found),
        type_colors=[
            (row["type"], f"type-{place}") for place, row in enumerate(found[:NUM_TYPE_COLORS])
        ],
        has_other_types=len(found) > NUM_TYPE_COLORS,
        overlaps=overlaps(ledger, contents.evaluation),
        lengths=_lengths(ledger),
        languages=_languages(ledger),
        fit_pictures=_fit_pictures(contents.fit) if contents.fit else [],
        color=color,
    )


def color(reason: str) -> str:
    """The CSS variable of the colour of a reason, or of "kept"."""
    head = reason.partition(".")[0]
    return f"fate-{head.replace('_', '-')}" if head in FATES else "fate-other"


def fates(account: Mapping[str, Any]) -> list[Segment]:
    """The rows of a source or of all by the head of their reason: kept first, then in the order of
    the stage.
    """
    counts = {**dict.fromkeys([*FATES, OTHERS], 0), "kept": account["rows_out"]}
    for reason, count in account["dropped"].items():
        head = reason.partition(".")[0]
        counts[head if head in FATES else OTHERS] += count
    return [Segment(name, count, color(name)) for name, count in counts.items() if count]


def reasons(ledger: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every reason with its count, in the order of the stage, the most frequent of a head first."""
    order = [*FATES, OTHERS]
    rows = [
        {
            "name": reason,
            "count": count,
            "head": head if (head := reason.partition(".")[0]) in FATES else OTHERS,
        }
        for reason, count in ledger["dropped"].items()
    ]
    return sorted(rows, key=lambda row: (order.index(row["head"]), -row["count"], row["name"]))


def _examples(listed: Sequence[Mapping[str, Any]]) -> list[str]:
    """A reason and its head as examples for --show-dropped, personal data first."""
    first = next(
        (reason for reason in listed if reason["head"] == "pii"), listed[0] if listed else None
    )
    return list(dict.fromkeys([first["name"], first["name"].partition(".")[0]])) if first else []


def personal_data(ledger: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Values found by type, most frequent first: how many were replaced, how many were in rows
    dropped for them, and both by source.
    """
    types = {*ledger["masked"], *ledger["found_in_dropped"]}
    rows = []
    for type in types:
        by_source = {
            name: {
                "replaced": account["masked"].get(type, 0),
                "dropped": account["found_in_dropped"].get(type, 0),
            }
            for name, account in ledger["sources"].items()
        }
        replaced, dropped = ledger["masked"].get(type, 0), ledger["found_in_dropped"].get(type, 0)
        most = max(
            (counts["replaced"] + counts["dropped"] for counts in by_source.values()), default=0
        )
        rows.append(
            {
                "type": type,
                "replaced": replaced,
                "dropped": dropped,
                "by_source": by_source,
                "most": max(most, 1),
            }
        )
    return sorted(rows, key=lambda row: (-row["replaced"] - row["dropped"], row["type"]))


def remaining(contents: CardContents) -> list[dict[str, Any]]:
    """By type that was found: the values found, and how many more are expected to remain in the
    prompts, with the bounds that follow from the interval of the recall; None where that was not
    measured.

    Of a type that is replaced, values in prompts count; of a type that drops its row, values in
    dropped rows: what was missed of it is in rows that became prompts.
    """
    ledger, rows = contents.ledger, []
    for type in sorted({*ledger["masked"], *ledger["found_in_dropped"]}):
        counted = "found_in_dropped" if type in contents.dropping else "masked"
        found = ledger[counted].get(type, 0)
        known = recall_of(type)
        if not found:
            continue
        expected, *between = known.remaining(found) if known else (None, None, None)
        rows.append(
            {
                "type": type,
                "found": found,
                "recall": known,
                "expected": expected,
                "between": between,
            }
        )
    return sorted(rows, key=lambda row: -row["found"])


def _recall_caveats(ledger: Mapping[str, Any]) -> list[str]:
    """In what this run differs from the search whose recall was measured."""
    versions, personal = ledger.get("versions", {}), ledger["policies"].get("personal", {})
    found = [
        f"{name} {version} there, {versions[name]} here"
        for name, version in measured()["versions"].items()
        if name in versions and versions[name] != version
    ]
    used = {"recogniser": personal.get("ner"), "Cloud DLP project": personal.get("cloud_project")}
    return found + [
        f"the {what} {name} of this run was not there" for what, name in used.items() if name
    ]


def name_parts(ledger: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where names were searched, and where not: by source, language, searcher and reason, with
    prompts, characters and their share of the source's; the largest first within a source, the
    smallest of many as one.
    """
    parts = []
    for source, account in ledger["sources"].items():
        own = sorted(account.get("names", ()), key=lambda part: -part["characters"])
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


def _personal_picture(ledger: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> Markup:
    """Values per thousand rows of each source, by type."""
    rows, notes = {}, {}
    for name, account in ledger["sources"].items():
        counts = [sum(row["by_source"][name].values()) for row in found]
        thousands = max(account["rows_in"], 1) / 1000
        summed = [*counts[:NUM_TYPE_COLORS], sum(counts[NUM_TYPE_COLORS:])]
        names = [row["type"] for row in found[:NUM_TYPE_COLORS]] + [OTHERS]
        rows[name] = [
            Segment(type, count / thousands, f"type-{place}")
            for place, (type, count) in enumerate(zip(names, summed, strict=True))
            if count
        ]
        notes[name] = f"{sum(counts) / thousands:,.1f} per 1,000 rows"
    longest = max((sum(part.count for part in parts) for parts in rows.values()), default=0)
    return picture(paint_shares, "personal data by source and type", rows, notes, longest)


def overlaps(ledger: Mapping[str, Any], evaluation: Sequence[str]) -> dict[str, int]:
    """Rows dropped by evaluation set, sets without any included."""
    found = {
        reason.partition(".")[2]: count
        for reason, count in ledger["dropped"].items()
        if reason.startswith("contamination.")
    }
    return {**dict.fromkeys(evaluation, 0), **found}


def _flow(sources: Mapping[str, Mapping[str, Any]]) -> Markup:
    """The sources in the order of reading, the small ones of many as one."""
    by_size = sorted(sources, key=lambda name: -sources[name]["rows_in"])
    shown = set(by_size if len(by_size) <= MOST_SOURCES + 1 else by_size[:MOST_SOURCES])
    parts: dict[str, list[Segment]] = {
        name: fates(one) for name, one in sources.items() if name in shown
    }
    if len(shown) < len(sources):
        others = [one for name, one in sources.items() if name not in shown]
        dropped: Counter[str] = sum((Counter(one["dropped"]) for one in others), Counter())
        rows_out = sum(one["rows_out"] for one in others)
        parts[f"{len(others)} others"] = fates({"rows_out": rows_out, "dropped": dropped})
    # Every source with every fate: then the right side has the order of the stage.
    found = {part.name for of_source in parts.values() for part in of_source}
    complete = {}
    for name, of_source in parts.items():
        counts = {part.name: part.count for part in of_source}
        complete[name] = [
            Segment(fate, counts.get(fate, 0), color(fate))
            for fate in (*FATES, OTHERS)
            if fate in found
        ]
    return picture(paint_flow, "rows from each source to what became of them", complete)


def _lengths(ledger: Mapping[str, Any]) -> Markup | None:
    if not sum(ledger["lengths_in"]):
        return None
    series = [
        ClassCounts("rows in", ledger["lengths_in"], "muted"),
        ClassCounts("prompts", ledger["lengths_out"], "fate-kept"),
    ]
    label = "share of rows by characters that the user says"
    return picture(paint_histogram, label, _classes(ledger["lengths_from"]), series)


def _classes(begins: Sequence[int]) -> list[str]:
    return [f"{begin / 1000:g}k" if begin >= 1000 else str(begin) for begin in begins]


def _languages(ledger: Mapping[str, Any]) -> Markup | None:
    found = sorted(ledger["languages"].items(), key=lambda item: (-item[1], item[0]))
    rest = sum(count for _, count in found[MOST_LANGUAGES:])
    parts = [
        Segment(NO_LANGUAGE.get(name, name), count, "fate-kept")
        for name, count in found[:MOST_LANGUAGES]
    ]
    parts += [Segment(OTHERS, rest, "muted")] if rest else []
    return picture(paint_bars, "prompts by language", parts) if parts else None


def _fit_pictures(fit: Mapping[str, Any]) -> list[tuple[str, Markup, str]]:
    """Heading, picture and note of each."""
    rows = {
        title: (fit[key]["before"], fit[key]["after"], fit[key]["floor"])
        for title, key in (("words, KL", "kl"), ("words, JS", "js"), ("length, JS", "length_js"))
    }
    lengths = fit["lengths"]
    series = [
        ClassCounts("rows to choose from", lengths["before"], "fit-before"),
        ClassCounts("prompts", lengths["after"], "fit-after"),
        ClassCounts("traffic", lengths["traffic"], "ink", dashed=True),
    ]
    return [
        (
            "Distance to the traffic",
            picture(paint_distances, "distance to the traffic before and after", rows),
            DISTANCE_NOTE,
        ),
        (
            "Length beside the traffic",
            picture(paint_lines, "share by characters", _classes(lengths["from"]), series),
            LENGTH_NOTE,
        ),
    ]


DISTANCE_NOTE = (
    "In nats, 0 for no difference, to the half of the traffic that the selection never saw. The "
    "vertical bar is the floor: the distance between the two halves of the traffic. A large "
    "selection may come nearer than that, because it has less noise of its own."
)
LENGTH_NOTE = (
    "Share of prompts by the number of characters of the user's turns; each class begins at the "
    "number below it."
)
