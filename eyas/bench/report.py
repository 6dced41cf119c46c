"""The report of a benchmark, and of the pipeline before it: one HTML file that needs nothing beside it.

Takes the JSON that stages write as plain dicts and a manifest for the lineage. Knows what the figures mean, not who made them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from eyas import lineage
from eyas.artifact import Manifest, storage_errors
from eyas.bench import figures
from eyas.bench.figures import Point, Series

TEMPLATE = Path(__file__).with_name("report.html")
TPOT_NOTE = "Median time per output token after the first; whiskers hold the median with 95 % confidence. Lower is better."
THROUGHPUT_NOTE = "Output tokens of all requests together, prefill and waiting included. Higher is better."
HISTOGRAM_NOTE = (
    "Share of the rounds by how many drafts the target took over; each round emits one token of the target's own besides."
)
POSITION_NOTE = (
    "Where all drafts before it were accepted: how often the next one was. "
    "Served rounds may be trees, and there the end of an answer counts as a miss."
)
BUSY = 1.2  # of the cores: a load average above this says that something else is, or just was, at work


@dataclass(frozen=True)
class Contents:
    """What a report shows. Only the benchmark's summary.json is needed; a part that is absent is left out.

    evaluation is eval.json; ledger is ledger.json; manifest is that of the benchmark, whose inputs tell the lineage.
    """

    bench: Mapping[str, Any]
    evaluation: Mapping[str, Any] | None = None
    ledger: Mapping[str, Any] | None = None
    manifest: Manifest | None = None
    commands: Sequence[str] = field(default=())
    title: str = "eyas report"


def write_report(path: str | Path, contents: Contents) -> str:
    """Write the report and return its path."""
    with storage_errors(str(path)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(render(contents), encoding="utf-8")
    return str(path)


def render(contents: Contents) -> str:
    """The report as HTML."""
    bench = contents.bench
    machine = bench["machine"]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = _number
    environment.filters["pretty"] = lambda value: json.dumps(value, indent=1, ensure_ascii=False)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=contents.title,
        headlines=[headline(bench, compared) for compared in _at_fewest(bench["comparisons"])],
        results=bench["results"],
        comparisons=bench["comparisons"],
        config=bench["config"],
        pictures=[(name, Markup(svg), note) for name, svg, note in pictures(bench, contents.evaluation)],
        evaluation=contents.evaluation,
        ledger=contents.ledger,
        fates=fates(contents.ledger) if contents.ledger else [],
        manifest=contents.manifest,
        stages=lineage.stages(contents.manifest) if contents.manifest else [],
        sources=lineage.sources(contents.manifest) if contents.manifest else [],
        machine=machine,
        is_busy=machine["load_average"][0] > BUSY * machine["cores"],
        commands=contents.commands,
    )


def headline(bench: Mapping[str, Any], compared: Mapping[str, Any]) -> dict[str, Any]:
    """One comparison with the results of its two arms."""
    of_arm = {(result["arm"], result["concurrency"]): result for result in bench["results"]}
    concurrency = compared["concurrency"]
    return {
        "compared": compared,
        "baseline": of_arm[compared["baseline"], concurrency],
        "arm": of_arm[compared["arm"], concurrency],
    }


def pictures(bench: Mapping[str, Any], evaluation: Mapping[str, Any] | None) -> list[tuple[str, str, str]]:
    """Heading, SVG and note of each picture there are figures for."""
    first = _at_fewest(bench["results"])
    arms = {result["arm"]: number for number, result in enumerate(first)}
    tpots = _over_concurrency(bench["results"], arms, _tpot)
    rates = _over_concurrency(bench["results"], arms, _throughput)
    speculative = [result for result in first if sum(result["accept_hist"])]
    hists = [Series(one["arm"], arms[one["arm"]], _numbered(one["accept_hist"], 0)) for one in speculative]
    shares = [
        Series(f"{one['arm']}, served", arms[one["arm"]], _numbered(one["acceptance_by_position"], 1)) for one in speculative
    ]
    if evaluation is not None:
        shares.append(Series("held-out, chain", len(arms), _numbered(evaluation["acceptance_by_position"], 1)))
    drawn = [
        ("Time per output token", figures.against_concurrency, tpots, "TPOT, ms", TPOT_NOTE),
        ("Throughput", figures.against_concurrency, rates, "output tokens/s", THROUGHPUT_NOTE),
        ("Accepted drafts", figures.histogram, hists, "share of rounds by accepted drafts", HISTOGRAM_NOTE),
        ("Acceptance by position", figures.by_position, shares, "share of drafts accepted", POSITION_NOTE),
    ]
    series_with_points = [[one for one in series if one.points] for _, _, series, _, _ in drawn]
    return [
        (name, draw(series, label), note)
        for (name, draw, _, label, note), series in zip(drawn, series_with_points, strict=True)
        if series
    ]


def fates(ledger: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where the rows went: kept first, then each reason for a drop, most frequent first, with its share of the rows."""
    dropped = sorted(ledger["dropped"].items(), key=lambda item: -item[1])
    counts = [("kept", ledger["rows_out"]), *dropped]
    return [{"name": name, "count": count, "share": count / max(ledger["rows_in"], 1)} for name, count in counts]


def _at_fewest(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows with the fewest requests at a time: where a single user's wait is measured."""
    fewest = min((row["concurrency"] for row in rows), default=0)
    return [row for row in rows if row["concurrency"] == fewest]


def _over_concurrency(
    results: Sequence[Mapping[str, Any]], arms: Mapping[str, int], point: Callable[[Mapping[str, Any]], Point | None]
) -> list[Series]:
    """A series per arm of what `point` finds in its results, by concurrency."""
    ordered = sorted(results, key=lambda result: result["concurrency"])
    found = {arm: [point(result) for result in ordered if result["arm"] == arm] for arm in arms}
    return [Series(arm, arms[arm], [one for one in points if one is not None]) for arm, points in found.items()]


def _tpot(result: Mapping[str, Any]) -> Point | None:
    tpot = result["tpot_ms"]
    return tpot and Point(result["concurrency"], tpot["median"], tpot["low"], tpot["high"])


def _throughput(result: Mapping[str, Any]) -> Point | None:
    return result["throughput_tps"] and Point(result["concurrency"], result["throughput_tps"])


def _numbered(values: Sequence[float], first: int) -> list[Point]:
    return [Point(x, y) for x, y in enumerate(values, first)]


def _number(value: float | None, digits: int = 2) -> str:
    """A number with so many digits after the point and thousands apart; a dash for None."""
    return "–" if value is None else f"{value:,.{digits}f}"
