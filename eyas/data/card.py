"""The data card: where the rows went and why, for the person who signs. One HTML file that needs no
other file.

Takes the content of ledger.json and the fit report as plain JSON. Knows the meaning of the counts;
knows no row and no value that was found.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from eyas.page import fill

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
    "language": "not in one of the languages to keep",
    "contamination": "overlaps an evaluation set, which must not be trained on",
    "pii": "holds personal data or a secret of a type that the policy drops",
    "duplicate": "says the same as an earlier row, or nearly",
    "match": "not drawn: others resemble the traffic more",
    "mix": "not drawn: more than its source's share",
    "limit": "more than `max_prompts`",
}

WEAKNESSES = (
    "Names, street addresses and places are found without a language model. On noisy text (lower "
    "case, misspelt, without punctuation, transcribed speech) no more than about half of the names "
    "are found: the others are still in the prompts.",
    "How well names are found was measured on English texts. In other languages and scripts expect "
    "less.",
    "Data without a form is not found: a nickname, an employer, an illness, a story by which "
    "somebody can be recognised.",
    "Some of what was replaced or dropped was no personal data: a form or a checksum can fit by "
    "chance.",
    "Overlap with evaluation sets is found by their words. A translated or reworded item passes, "
    "and so does a set that was not given.",
    "Near-duplicates are found by their words: the same request in other words stays.",
    "Licences, terms and authors are what the run file states or the registry of known sets "
    "records. The terms of single rows were not read, and a source may hold what its owner had no "
    "right to give.",
    "No person read the prompts.",
)


@dataclass(frozen=True)
class CardContents:
    """What a card shows. Only the ledger is required; absent parts are left out.

    ledger: ledger.json; fit: `fit.fit_report`; evaluation: names of the evaluation sets.
    """

    ledger: Mapping[str, Any]
    fit: Mapping[str, Any] | None = None
    evaluation: Sequence[str] = ()
    identity: str = ""


def write_card(contents: CardContents) -> str:
    """The card as HTML. The same contents give the same text."""
    ledger = contents.ledger
    listed, found = reasons(ledger), personal_data(ledger)
    filters = {
        "number": lambda value: f"{value:,.0f}",
        "percent": lambda value: f"{100 * value:.1f} %",
        "pretty": lambda value: json.dumps(value, indent=1, ensure_ascii=False),
    }
    return fill(
        TEMPLATE,
        filters,
        contents=contents,
        weaknesses=WEAKNESSES,
        ledger=ledger,
        num_dropped=sum(ledger["dropped"].values()),
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
