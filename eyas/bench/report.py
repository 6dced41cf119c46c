"""The report of a benchmark, and of the pipeline before it: one HTML file that needs nothing beside
it, Markdown, and CSV.

Takes the JSON that stages write as plain dicts and a manifest for the lineage. Knows what the
figures mean, not who made them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from eyas import lineage
from eyas.artifact import Artifact, Manifest
from eyas.bench import figures, headline, tables
from eyas.bench.figures import Point, Series
from eyas.bench.summary import impossible
from eyas.errors import InputError
from eyas.page import fill

TEMPLATE = Path(__file__).with_name("report.html")
NAMES = ("report.html", "report.md", "report.csv")
TPOT_NOTE = "Median time per output token after the first, with its 95 % interval. Lower is better."
THROUGHPUT_NOTE = (
    "Output tokens of all requests together, prefill and waiting included, with a 95 % interval. "
    "Higher is better."
)
SPEEDUP_NOTE = (
    "Median TPOT of the baseline over that of the arm, with a 95 % interval. Above 1 is faster. "
    "Loads of too few turns for an interval are left out."
)
TTFT_NOTE = "Median time from the request to the first text, with its 95 % interval."
TREE_NOTE = (
    "Drafted tokens that the target judged, for each answer and round, on average over the "
    "stretch; the size is the server's "
    "choice, round by round, where it has one. Rounds left plain count as 0 where answers tell of "
    "them, and else are left out."
)
HISTOGRAM_NOTE = (
    "Share of the rounds by how many drafts the target took over; each round emits "
    "one token of the target's own besides."
)
POSITION_NOTE = (
    "Where all drafts before it were accepted: how often the next one was. "
    "Served rounds may be trees, and there the end of an answer counts as a miss."
)
SAID_BY = {
    "usage": "counted in every answer",
    "metrics": "by the server's counters",
    "timings": "by the server's timings of every answer",
    "chunks": "not told: tokens per chunk of the stream, which may be another number",
}
SPECULATIONS = ("auto", "fixed")  # what the engine's ways to speculate begin with
# of the cores: a load average above this says that something else is, or just was, at work
BUSY = 1.2
# An absolute path, or one that leads out of the working folder, up to its last name; within quotes,
# and where it is the whole text, it may hold spaces. No URL, and no endpoint of an API.
FOLDERS = re.compile(
    r"^(?:file://|~|\.\.)?/(?!v1/)(?:(?!://)[^\n'\"])*/(?=[^\s/]+$)"
    r"|(?P<quote>['\"])(?:file://)?[~/](?!v1/)[^'\"]*/(?=[^'\"/]*(?P=quote))"
    r"|(?<![\w.:/~-])(?:(?:file://|~)?/(?!v1/)|(?:\.\./)+)(?:[^\s/'\"=,;:]+/)*(?=[^\s/'\"])"
)
Picture = tuple[str, Markup, str]  # heading, SVG, note
Known = tuple[float, float | None, float | None]  # a figure, and what it lies between


@dataclass(frozen=True)
class Contents:
    """What a report shows. Only the benchmark's summary.json is needed; a part that is absent is
    left out.

    evaluation is eval.json; ledger is ledger.json; manifest is that of the benchmark, whose inputs
    tell the lineage. head_is_stated: the manifest's head is stated by the user. arm: whose headline
    is told; None tells that of every arm.
    """

    bench: Mapping[str, Any]
    evaluation: Mapping[str, Any] | None = None
    ledger: Mapping[str, Any] | None = None
    manifest: Manifest | None = None
    commands: Sequence[str] = field(default=())
    title: str = "eyas report"
    head_is_stated: bool = False
    arm: str | None = None


def without_folders(value: Any) -> Any:
    """JSON with files' names in place of their paths on this machine: a report is passed on."""
    if isinstance(value, str):
        return FOLDERS.sub(lambda found: found["quote"] or "", value)
    if isinstance(value, Mapping):
        return {without_folders(name): without_folders(one) for name, one in value.items()}
    if isinstance(value, Sequence):
        return [without_folders(one) for one in value]
    return value


def _to_pass_on(contents: Contents) -> Contents:
    manifest = contents.manifest
    if manifest is not None:
        manifest = Manifest.model_validate(without_folders(manifest.model_dump(mode="json")))
    return replace(
        contents,
        bench=without_folders(contents.bench),
        evaluation=without_folders(contents.evaluation),
        ledger=without_folders(contents.ledger),
        manifest=manifest,
        commands=without_folders(list(contents.commands)),
    )


def write_reports(folder: Artifact, contents: Contents) -> str:
    """Write the three files into a folder and return where the page is. Raises what `render`
    raises.
    """
    page = render(contents)
    contents = _to_pass_on(contents)
    notes = [*contents.commands, *([f"# {tables.STATED}"] if contents.head_is_stated else [])]
    markdown = tables.markdown(
        contents.bench, contents.manifest, notes, contents.title, contents.arm
    )
    csv = tables.csv(contents.bench)
    for name, text in zip(NAMES, (page, markdown, csv), strict=True):
        folder.write(name, text.encode())
    return f"{folder.url}/{NAMES[0]}"


def render(contents: Contents) -> str:
    """The report as HTML. Raises InputError for a summary that claims a speed-up above tau, or of
    an older kind.
    """
    contents = _to_pass_on(contents)
    bench = contents.bench
    comparisons = headline.every(bench, "comparisons") if "open_loop" in bench else []
    if "open_loop" not in bench or not all("num_turns" in one for one in comparisons):
        raise InputError(
            "this summary.json was made by an older eyas, and lacks what a report shows",
            "run `eyas bench` again",
        )
    for compared in (*comparisons, *bench["by_task"]):
        if why := impossible(compared):
            raise InputError(
                f"this summary.json claims a speed-up above tau: {why}", "run `eyas bench` again"
            )
    machine = bench["machine"]
    return fill(
        TEMPLATE,
        {
            "number": headline.number,
            "pretty": lambda value: json.dumps(value, indent=1, ensure_ascii=False),
        },
        title=contents.title,
        headlines=headline.headlines(bench, contents.arm),
        arm_columns=tables.ARM_COLUMNS,
        arm_rows=tables.arm_rows(bench) if headline.are_many_arms(bench) else [],
        arms_picture=arms_picture(bench),
        results=headline.every(bench, "results"),
        comparisons=comparisons,
        tasks=tasks(bench),
        bench=bench,
        config=bench["config"],
        turns_note=tables.turns_note(bench),
        cache_note=tables.cache_note(bench).replace("`", ""),
        pictures=pictures(contents),
        said_by=SAID_BY,
        evaluation=contents.evaluation,
        taus=taus(contents),
        predictions=predictions(contents),
        ledger=contents.ledger,
        ratio_of=tables.ratio_cell,
        is_certain=headline.is_certain,
        server_line=tables.server_line,
        head_is_stated=tables.STATED if contents.head_is_stated else "",
        fates=fates(contents.ledger) if contents.ledger else [],
        stages=lineage.stages(contents.manifest) if contents.manifest else [],
        sources=lineage.sources(contents.manifest) if contents.manifest else [],
        machine=machine,
        is_busy=machine["load_average"][0] > BUSY * machine["cores"],
        commands=contents.commands,
    )


def arms_picture(bench: Mapping[str, Any]) -> Markup | None:
    """The speed of more than two arms as one picture; None for fewer."""
    arms = [
        (row, pair) for row, pair in headline.arms_at_lowest_load(bench) if row["throughput_tps"]
    ]
    if not (arms and headline.are_many_arms(bench)):
        return None
    bars = []
    for place, (row, pair) in enumerate(arms):
        ratio = pair and headline.quotable(pair)["speedup"]
        said = [f"{row['throughput_tps']:.0f} tokens/s"]
        said += [f"tau {row['tau']:.2f}"] if row["tau"] is not None else []
        said += [f"{ratio:.2f} times as fast"] if ratio else []
        low, high = row["throughput_interval"] or (None, None)
        point = Point(0, row["throughput_tps"], low, high)
        bars.append((Series(row["arm"], place, [point]), ", ".join(said)))
    return figures.arms(bars, "output tokens/s by arm")


def taus(contents: Contents) -> list[tuple[str, str, str]]:
    """Name, value and meaning of every tau in the report: they are different numbers."""
    found: list[tuple[str, float | None, str]] = []
    bench, evaluation = contents.bench, contents.evaluation
    for row in headline.at_lowest_load(bench["results"] or bench["open_loop"]["results"]):
        of = f"({row['arm']}, {headline.load_of(row)})"
        if row["tau"] is not None and row["tau_from"] != "chunks":
            what = "tokens of a round that drafted: no speed-up by a head can be above it"
            found.append((f"tau {of}", row["tau"], what))
        if row["num_plain_steps"] and row["tokens_per_forward"]:
            what = "the same over all rounds, those left plain too: what this arm gained at most"
            found.append((f"tokens a forward {of}", row["tokens_per_forward"], what))
        if row["tokens_per_chunk"]:
            what = "of the stream: a tau only where a server sends a round as one chunk"
            found.append((f"tokens per chunk {of}", row["tokens_per_chunk"], what))
    if evaluation is not None:
        what = (
            f"before any server ran ({evaluation['assumes']}): of the draft that was evaluated, "
            "which may be another than the served one"
        )
        found.append(("tau on held-out answers", evaluation["tau"], what))
    for one in predictions(contents)[:1]:
        what = "what the evaluation expected of the served draft at this load"
        of = f"({one['arm']}, {one['concurrency']} at a time)"
        found.append((f"tau predicted {of}", one["predicted"].get("tau"), what))
    return [(name, headline.number(value), what) for name, value, what in found]


def tasks(bench: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A table per compared arm: a row per task, a comparison (or None) per concurrency."""
    found: list[dict[str, Any]] = []
    for arm in dict.fromkeys(one["arm"] for one in bench["by_task"]):
        own = {
            (one["category"], one["concurrency"]): one
            for one in bench["by_task"]
            if one["arm"] == arm
        }
        categories, loads = (sorted({key[place] for key in own}) for place in (0, 1))
        rows = {category: [own.get((category, load)) for load in loads] for category in categories}
        baseline = next(iter(own.values()))["baseline"]
        found.append({"arm": arm, "baseline": baseline, "loads": loads, "rows": rows})
    return found


def predictions(contents: Contents) -> list[dict[str, Any]]:
    """What `eyas eval` predicted for each arm and concurrency, beside what the arm
    did at it.
    """
    return [
        {"arm": one["arm"], "concurrency": one["concurrency"], "predicted": row, "measured": one}
        for one in contents.bench["comparisons"]
        if (row := predicted(contents, one["arm"]).get(one["concurrency"])) is not None
    ]


def predicted(contents: Contents, arm: str) -> dict[int, Mapping[str, Any]]:
    """eval.json's predictions for an arm by concurrency: of the speculation that its server runs,
    as far as that is known.

    It is known from the run file's server, or from the arm's name, "auto" or "fixed(4,1,5)". Else
    the only speculation that is predicted is meant, or auto; none where what is known was not
    predicted.
    """
    if contents.arm not in (None, arm):
        return {}  # the evaluation is of the head that the headline is about
    rows = ((contents.evaluation or {}).get("predicted") or {}).get("by_concurrency") or []
    rows = [row for row in rows if row["speedup"] is not None]
    names = list(dict.fromkeys(row["speculation"] for row in rows))
    served = contents.manifest.inputs.get("serve") if contents.manifest is not None else None
    known = str(served.config["engine"]["speculation"]) if served is not None else arm
    if served is None and not arm.startswith(SPECULATIONS):
        known = names[0] if len(names) == 1 else "auto"
    own = next(
        (name for name in names if name.replace(" ", "").startswith(known.replace(" ", ""))), None
    )
    return {row["concurrency"]: row for row in rows if row["speculation"] == own}


def pictures(contents: Contents) -> list[Picture]:
    """Heading, SVG and note of each picture there are figures for."""
    bench = contents.bench
    every = headline.every(bench, "results")
    arms = {arm: place for place, arm in enumerate(dict.fromkeys(row["arm"] for row in every))}
    expected = []
    for arm in dict.fromkeys(one["arm"] for one in bench["comparisons"]):
        if rows := predicted(contents, arm):
            points = [Point(x, row["speedup"]) for x, row in sorted(rows.items())]
            expected.append(Series(f"{arm}, predicted", arms[arm], points, is_expected=True))
    closed = _of_loads(bench, "concurrency", arms, "requests at a time", expected)
    opened = _of_loads(bench["open_loop"], "rate", arms, "requests a second", [])
    return [*closed, *_of_rounds(bench["results"] or every, arms, contents.evaluation), *opened]


def _of_loads(
    bench: Mapping[str, Any],
    load: str,
    arms: Mapping[str, int],
    x_label: str,
    expected: Sequence[Series],
) -> list[Picture]:
    """Pictures with the load along the bottom."""
    results, comparisons = bench["results"], bench["comparisons"]
    drafting = {row["arm"] for row in results if nodes_of_all(row)}

    def series(
        rows: Sequence[Mapping[str, Any]], figure: Callable[[Mapping[str, Any]], Known | None]
    ) -> list[Series]:
        points: dict[str, list[Point]] = {}
        for row in sorted(rows, key=lambda row: row[load]):
            if (known := figure(row)) is not None:
                points.setdefault(row["arm"], []).append(Point(row[load], *known))
        return [Series(arm, arms[arm], points[arm]) for arm in arms if arm in points]

    tpots = series(results, lambda row: _spread(row["tpot_ms"]))
    ttfts = series(results, lambda row: _spread(row["ttft_ms"]))
    rates = series(
        results, lambda row: _interval(row["throughput_tps"], row["throughput_interval"])
    )
    sizes = series(
        [row for row in results if row["arm"] in drafting],
        lambda row: _interval(nodes_of_all(row), None),
    )
    speedups = series(
        [row for row in comparisons if row["speedup_interval"] is not None],
        lambda row: _interval(row["speedup"], row["speedup_interval"]),
    )
    if speedups:
        speedups += expected
    if len({row[load] for row in results}) < 2:
        speedups = []
    if load != "rate":  # in a closed loop it says more of the prompts than of the load
        ttfts = []
    drawn = (
        ("Time per output token", tpots, "TPOT, ms", TPOT_NOTE),
        ("Throughput", rates, "output tokens/s", THROUGHPUT_NOTE),
        ("Speed-up", speedups, "speed-up", SPEEDUP_NOTE),
        ("Time to the first text", ttfts, "TTFT, ms", TTFT_NOTE),
        ("Tree sizes chosen", sizes, "drafted tokens a round", TREE_NOTE),
    )
    under = "" if load == "concurrency" else f", by {x_label}"
    return [
        (
            f"{name}{under}",
            figures.against_load(found, label, x_label, label == "speed-up"),
            note,
        )
        for name, found, label, note in drawn
        if found
    ]


def nodes_of_all(result: Mapping[str, Any]) -> float | None:
    """Drafted tokens for each answer and round: plain rounds count as 0 where answers tell of
    rounds, and else not at all.
    """
    nodes: float | None = result["speculation"].get("nodes_mean")
    if result["tau_from"] != "usage":
        return nodes
    drafting, plain = sum(result["accept_hist"]), result["num_plain_steps"]
    if not drafting:
        return 0.0 if plain else None
    return None if nodes is None else nodes * drafting / (drafting + plain)


def _of_rounds(
    results: Sequence[Mapping[str, Any]],
    arms: Mapping[str, int],
    evaluation: Mapping[str, Any] | None,
) -> list[Picture]:
    """Pictures of what rounds accepted, at the lowest load."""
    # of the others, a few rounds say nothing
    first = [one for one in headline.at_lowest_load(results) if one["tau"] is not None]
    hists = [
        Series(one["arm"], arms[one["arm"]], _numbered(one["accept_hist"], 0))
        for one in first
        if sum(one["accept_hist"])
    ]
    shares = [
        Series(
            f"{one['arm']}, served", arms[one["arm"]], _numbered(one["acceptance_by_position"], 1)
        )
        for one in first
        if one["acceptance_by_position"]
    ]
    if evaluation is not None and evaluation.get("acceptance_by_position"):
        points = _numbered(evaluation["acceptance_by_position"], 1)
        shares.append(Series("held-out, eval", len(arms), points, is_expected=True))
    made: list[Picture] = []
    if hists:
        drawn = figures.histogram(hists, "share of rounds by accepted drafts")
        made.append(("Accepted drafts", drawn, HISTOGRAM_NOTE))
    if shares:
        drawn = figures.by_position(shares, "share of drafts accepted")
        made.append(("Acceptance by position", drawn, POSITION_NOTE))
    return made


def fates(ledger: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where the rows went: kept first, then each reason for a drop, most frequent first, with its
    share of the rows.
    """
    dropped = sorted(ledger["dropped"].items(), key=lambda item: -item[1])
    counts = [("kept", ledger["rows_out"]), *dropped]
    return [
        {"name": name, "count": count, "share": count / max(ledger["rows_in"], 1)}
        for name, count in counts
    ]


def _spread(spread: Mapping[str, Any] | None) -> Known | None:
    return None if spread is None else (spread["median"], spread["low"], spread["high"])


def _interval(value: float | None, interval: Sequence[float] | None) -> Known | None:
    if value is None:
        return None
    low, high = interval or (None, None)
    return value, low, high


def _numbered(values: Sequence[float], first: int) -> list[Point]:
    return [Point(x, y) for x, y in enumerate(values, first)]
