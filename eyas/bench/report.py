"""The report of a benchmark and its pipeline: an HTML page that needs no other file, and its main
table as Markdown and on the terminal.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Console
from rich.table import Table

from eyas import lineage
from eyas.artifact import Artifact, Manifest
from eyas.bench.claims import at_lowest_load, headlines, is_certain, load_of, not_drafting, number
from eyas.bench.summary import RATIOS, impossible
from eyas.errors import InputError
from eyas.figure import Point, Series, line_chart
from eyas.page import fill

TEMPLATE = Path(__file__).with_name("report.html")
COLUMNS = (
    *("arm", "load", "TPOT, times as fast", "throughput, times", "end to end, times"),
    *("identical", "failed", "tau", "TPOT ms", "tokens/s", "TTFT ms", "TTFT p99", "end to end ms"),
)
TASK_COLUMNS = ("task", "arm", "load", "prompts", "TPOT, times as fast", "tau")
CHARTS = (  # key of a result or comparison, label, note
    ("tpot_ms", "TPOT, ms", "Median time per output token after the first. Lower is better."),
    ("throughput_tps", "output tokens/s", "All requests together, prefill and waiting included."),
    ("speedup", "times as fast", "Median TPOT of the baseline over that of the arm."),
)
BUSY = 1.2  # load average per core above which something else is running
# A path that is absolute or leads out of the working folder, up to its last name; with spaces in
# quotes or as the whole text. No URL, and no endpoint of an API.
FOLDERS = re.compile(
    r"^(?:file://|~|\.\.)?/(?!v1/)(?:(?!://)[^\n'\"])*/(?=[^\s/]+$)"
    r"|(?P<quote>['\"])(?:file://)?[~/](?!v1/)[^'\"]*/(?=[^'\"/]*(?P=quote))"
    r"|(?<![\w.:/~*-])(?:(?:file://|~)?/(?!v1/)|(?:\.\./)+)(?:[^\s/'\"=,;:]+/)*(?=[^\s/'\"])"
)
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Contents:
    """bench: summary.json. evaluation: eval.json. ledger: ledger.json. manifest: the benchmark's,
    for the lineage. arm: of the headline; None: every arm.
    """

    bench: Row
    evaluation: Row | None = None
    ledger: Row | None = None
    manifest: Manifest | None = None
    commands: Sequence[str] = ()
    title: str = "eyas report"
    arm: str | None = None


def without_folders(value: Any) -> Any:
    """JSON with file names in place of this machine's paths, for publication."""
    if isinstance(value, str):
        return FOLDERS.sub(lambda found: found["quote"] or "", value)
    if isinstance(value, Mapping):
        return {without_folders(name): without_folders(one) for name, one in value.items()}
    if isinstance(value, Sequence):
        return [without_folders(one) for one in value]
    return value


def write_reports(folder: Artifact, contents: Contents) -> str:
    """Write report.html and report.md into a folder; returns the page's address. Raises InputError
    for a summary that claims an impossible speed-up, or of an older version.
    """
    manifest = contents.manifest
    if manifest is not None:
        manifest = Manifest.model_validate(without_folders(manifest.model_dump(mode="json")))
    names = ("bench", "evaluation", "ledger", "commands")
    changed = {name: without_folders(getattr(contents, name)) for name in names}
    contents = replace(contents, manifest=manifest, **changed)
    page, table = render(contents), markdown(contents)
    folder.write("report.html", page.encode())
    folder.write("report.md", table.encode())
    return f"{folder.url}/report.html"


def render(contents: Contents) -> str:
    """The report as HTML. Raises InputError."""
    bench = contents.bench
    if not all("num_turns" in one for one in bench["comparisons"]) or "open_loop" in bench:
        what = "this summary.json is of an older version of eyas, and lacks what a report shows"
        raise InputError(what, "run `eyas bench` again")
    for compared in (*bench["comparisons"], *bench["by_task"]):
        if why := impossible(compared):
            raise InputError(
                f"this summary.json has a wrong speed-up: {why}", "run `eyas bench` again"
            )
    machine, manifest = bench["machine"], contents.manifest
    stages = lineage.stages(manifest) if manifest else []
    return fill(
        TEMPLATE,
        {
            "number": number,
            "pretty": lambda value: json.dumps(value, indent=1, ensure_ascii=False),
        },
        title=contents.title,
        headlines=headlines(bench, contents.arm),
        columns=COLUMNS,
        rows=table_rows(bench),
        task_columns=TASK_COLUMNS,
        tasks=task_rows(bench),
        charts=charts(contents),
        bench=bench,
        notes=notes(bench),
        evaluation=contents.evaluation,
        ledger=contents.ledger,
        fates=fates(contents.ledger) if contents.ledger else [],
        stages=stages,
        sources=[  # of prompts; a head that training starts from is a source too
            one for made in stages if made.stage == "prompts" for one in lineage.read_by(made)
        ],
        machine=machine,
        servers={arm: server_line(server) for arm, server in bench["servers"].items()},
        is_busy=machine["load_average"][0] > BUSY * machine["cores"],
        commands=contents.commands,
    )


def table_rows(bench: Row) -> list[tuple[str, ...]]:
    """A row of COLUMNS per arm and load; intervals hold with 95 %."""
    compared = {(one["arm"], load_of(one)): one for one in bench["comparisons"]}
    rows = []
    for row in bench["results"]:
        pair = compared.get((row["arm"], load_of(row)), dict.fromkeys([*RATIOS, "identical"]))
        same = pair["identical"]
        cells = (
            *(row["arm"], load_of(row), *(ratio_cell(pair, one) for one in RATIOS)),
            *("–" if same is None else f"{same} of {pair['num_pairs']}", str(row["num_failed"])),
            *(_within(row["tau"], row["tau_interval"]), _median(row["tpot_ms"])),
            _within(row["throughput_tps"], row["throughput_tps_interval"], 0),
            *(_median(row["ttft_ms"], 1), number((row["ttft_ms"] or {}).get("p99"), 0)),
            _median(row["e2e_ms"], 0),
        )
        rows.append(cells)
    return rows


def task_rows(bench: Row) -> list[tuple[str, ...]]:
    """A row of TASK_COLUMNS per task, arm and load."""
    return [
        (
            *(row["category"] or "–", row["arm"], load_of(row), str(row["num_pairs"])),
            *(ratio_cell(row, "speedup"), number(row["tau"])),
        )
        for row in bench["by_task"]
    ]


def ratio_cell(row: Row, name: str) -> str:
    """A ratio with its interval; only the interval if it is not certain."""
    value = row[name]
    if value is None:
        return "–"
    interval = row[f"{name}_interval"]
    note = not_drafting(row) if name == "speedup" else ""
    if interval is None:
        cell = "too few turns"
    elif is_certain(interval):
        cell = _within(value, interval)
    else:
        cell = f"no difference ({number(interval[0])}–{number(interval[1])})"
    return f"{cell}, {note}" if note else cell


def markdown(contents: Contents) -> str:
    """The report's sentences, tables and notes."""
    bench = contents.bench
    lines = [f"# {_escaped(contents.title)}", ""]
    for head in headlines(bench, contents.arm):
        lines += [f"**{_escaped(head['sentence'])}**", ""]
    for columns, rows in ((COLUMNS, table_rows(bench)), (TASK_COLUMNS, task_rows(bench))):
        if rows:
            lines += [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
            lines += [f"| {' | '.join(map(_escaped, row))} |" for row in rows]
            lines.append("")
    lines += [f"- {_escaped(note)}" for note in notes(bench)]
    lines += [
        f"- {_escaped(arm)}: {_escaped(server_line(one))}" for arm, one in bench["servers"].items()
    ]
    made = lineage.lines(contents.manifest, with_settings=True) if contents.manifest else []
    return "\n".join([*lines, "", "```", *contents.commands, *made, "```", ""])


def show_table(bench: Row, arm: str | None = None) -> None:
    """Print a table per load with a column per arm, then the headlines of one arm or of all."""
    for load, rows in itertools.groupby(table_rows(bench), key=lambda row: row[1]):
        of_arms = list(rows)
        table = Table("", *(row[0] for row in of_arms), title=load)
        for place, column in enumerate(COLUMNS[2:], start=2):
            table.add_row(column, *(row[place] for row in of_arms))
        Console().print(table)
    for head in headlines(bench, arm):
        Console().print(head["sentence"], markup=False, highlight=False, soft_wrap=True)


def notes(bench: Row) -> list[str]:
    """The notes by which a reader judges the figures."""
    config, machine = bench["config"], bench["machine"]
    found = [
        f"{config['num_prompts']} prompts or more of {config['prompts']}, up to "
        f"{config['max_tokens']} tokens, temperature {config['temperature']:g}, seed "
        f"{config['seed']}; the arms take turns, block by block. Intervals hold with 95 %.",
        f"Client: {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}.",
    ]
    if cut := bench["num_cut_prompts"]:
        found.append(cut_note(cut))
    if unsalted := [arm for arm in bench["servers"] if arm not in bench["salted_arms"]]:
        found.append(
            f"The server of {', '.join(unsalted)} is not known to take `cache_salt`: it may have "
            "cached the prompts, and TTFT and throughput may profit from that."
        )
    found += [
        f"{one['arm']} and {one['baseline']} differ in {one['what']}: {one['text']}"
        + (" (not comparable)" if one["refused"] else "")
        for one in bench["differences"]
    ]
    for row in bench["results"]:
        found += [
            f"{row['arm']}, {load_of(row)}: {count} × {error}"
            for error, count in row["errors"].items()
        ]
        if row["counted_by"] != ["usage"]:
            found.append(
                f"{row['arm']}, {load_of(row)}: the server reports no usage; tokens were counted "
                f"by {', '.join(row['counted_by'])}."
            )
    return found


def cut_note(num_cut_prompts: int) -> str:
    """The note that only first turns were asked."""
    return f"First turns only: the later turns of {num_cut_prompts} conversations were not asked."


def server_line(server: Row) -> str:
    """A server's facts in one line."""
    head = {True: "with a head", False: "without a head", None: "head unknown"}[server["has_head"]]
    length, fingerprint = server["max_length"], server["target_fingerprint"]
    parts = (
        server["kind"],
        server["version"] or "version unknown",
        server["model"],
        server["precision"] or "precision unknown",
        server["speculation"] or head,
        f"{length} tokens a request" if length else None,
        f"target {fingerprint[:16]}" if fingerprint else None,
        f"at {server['url']}",
    )
    return ", ".join(part for part in parts if part)


def charts(contents: Contents) -> list[tuple[Markup, str]]:
    """SVG and note of each picture: CHARTS over each kind of load, and acceptance by position."""
    bench = contents.bench
    arms = {arm: place for place, arm in enumerate(bench["servers"])}
    found = []
    for load, label in (("concurrency", "requests at a time"), ("rate", "requests a second")):
        results, comparisons = (
            [row for row in bench[kind] if load in row] for kind in ("results", "comparisons")
        )
        for key, y_label, note in CHARTS:
            is_ratio = key == "speedup"
            rows = comparisons if is_ratio else results
            series = [
                Series(arm, number, points)
                for arm, number in arms.items()
                if (points := _points([row for row in rows if row["arm"] == arm], load, key))
            ]
            if series and not (is_ratio and len(series[0].points) < 2):
                found.append((line_chart(series, label, y_label, 1 if is_ratio else 0), note))
    first = [row for row in at_lowest_load(bench["results"]) if row["tau"] is not None]
    by_arm = {row["arm"]: row["acceptance_by_position"] for row in first}
    if contents.evaluation is not None:
        by_arm["held-out, eval"] = contents.evaluation.get("acceptance_by_position") or []
    series = [
        Series(name, arms.get(name, len(arms)), [Point(x, y) for x, y in enumerate(shares, 1)])
        for name, shares in by_arm.items()
        if shares
    ]
    if series:
        note = "Where all drafts before it were accepted: how often the next one was."
        found.append((line_chart(series, "draft position", "acceptance"), note))
    return found


def _points(rows: Sequence[Row], load: str, key: str) -> list[Point]:
    points = []
    for row in rows:
        value, (low, high) = row[key], row.get(f"{key}_interval") or (None, None)
        if isinstance(value, Mapping):
            value, low, high = value["median"], value["low"], value["high"]
        if value is not None and (key != "speedup" or low is not None):
            points.append(Point(row[load], value, low, high))
    return points


def fates(ledger: Row) -> list[dict[str, Any]]:
    """Kept rows, then each reason for a drop, the most frequent first, with shares of the rows."""
    dropped = sorted(ledger["dropped"].items(), key=lambda item: -item[1])
    counts = [("kept", ledger["rows_out"]), *dropped]
    rows_in = max(ledger["rows_in"], 1)
    return [{"name": name, "count": count, "share": count / rows_in} for name, count in counts]


def _escaped(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _median(spread: Row | None, digits: int = 2) -> str:
    if spread is None:
        return "–"
    interval = None if spread["low"] is None else (spread["low"], spread["high"])
    return _within(spread["median"], interval, digits)


def _within(value: float | None, interval: Sequence[float] | None, digits: int = 2) -> str:
    if interval is None:
        return number(value, digits)
    return f"{number(value, digits)} ({number(interval[0], digits)}–{number(interval[1], digits)})"
