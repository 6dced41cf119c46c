"""The figures of a benchmark for its readers: CSV for a spreadsheet, Markdown for a README, tables
on a terminal. Pure functions of summary.json and a manifest.
"""

from __future__ import annotations

import csv as comma_separated
import io
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from eyas import lineage
from eyas.artifact import Manifest
from eyas.bench.headline import (
    RATIOS,
    Row,
    are_many_arms,
    arms_at_lowest_load,
    every,
    headlines,
    is_certain,
    load_of,
    not_drafting,
    number,
)

STATED = "The head is the one given with --head: servers do not tell which they run."
ARM_COLUMNS = (
    *("", "tau (95 %)", "tokens/s (95 %)"),
    *("time per token, times as fast (95 %)", "identical"),
)
SPREADS = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
INTERVALS = ("tau", "throughput", *RATIOS)
COLUMNS = (
    *("kind", "arm", "baseline", "concurrency", "rate", "task"),
    *("num_requests", "num_failed", "num_pairs", "num_turns", "identical"),
    *("num_prompt_tokens", "num_output_tokens", "throughput_tps", "requests_per_s"),
    *("tokens_per_chunk", "tau", "tau_from", "tokens_per_forward"),
    *("tau_low", "tau_high", "throughput_low", "throughput_high"),
    *(f"{name}{part}" for name in RATIOS for part in ("", "_low", "_high")),
    *("round_cost", "tpot_ms_baseline"),
    *(f"{name}_{part}" for name in SPREADS for part in ("median", "low", "high", "p90", "p99")),
    *("tree_nodes_mean", "plain_rounds_share"),
)


# CSV


def csv(bench: Row) -> str:
    """A line per result, comparison and comparison by task; a column that a line has nothing for is
    empty.
    """
    written = io.StringIO()
    writer = comma_separated.DictWriter(
        written, COLUMNS, extrasaction="ignore", lineterminator="\n"
    )
    writer.writeheader()
    for kind in ("results", "comparisons", "by_task"):
        writer.writerows(map(_line, every(bench, kind)))
    return written.getvalue()


def _line(row: Row) -> dict[str, Any]:
    line = {**row, "kind": "task" if "category" in row else "comparison"}
    if "baseline" in row:
        line |= {"task": row.get("category"), "tpot_ms_median": row["tpot_ms"]}
        line["round_cost"] = (row["round_cost"] or {}).get("median")
    else:
        rounds = row["speculation"]
        line |= {"kind": "result", "tokens_per_forward": None}
        line |= {"tree_nodes_mean": rounds.get("nodes_mean")}
        line |= {"plain_rounds_share": rounds.get("plain_share")}
        for name in SPREADS:
            line |= {f"{name}_{part}": value for part, value in (row[name] or {}).items()}
    for name in INTERVALS:
        line[f"{name}_low"], line[f"{name}_high"] = row.get(f"{name}_interval") or (None, None)
    return line


# Markdown


def markdown(
    bench: Row,
    manifest: Manifest | None,
    commands: Sequence[str],
    title: str,
    arm: str | None = None,
) -> str:
    """The tables of the report, with what a reader needs to judge them. arm: see `headlines`."""
    lines = [f"# {_cell(title)}", ""]
    for head in headlines(bench, arm):
        lines += [f"**{_cell(head['sentence'])}**", ""]
    if are_many_arms(bench):
        lines += _table("|".join(ARM_COLUMNS), arm_rows(bench))
    lines += [*_body(bench), *_provenance(bench, manifest, commands)]
    return "\n".join(lines) + "\n"


def _body(bench: Row) -> Iterable[str]:
    results, comparisons = every(bench, "results"), every(bench, "comparisons")
    yield from _table(
        "arm|load|answers|failed|TTFT ms|TPOT ms (95 %)|TPOT p90 / p99|tokens/s (95 %)|tau",
        (
            (
                row["arm"],
                load_of(row),
                row["num_requests"] - row["num_failed"],
                row["num_failed"],
                _parts(row["ttft_ms"], "median"),
                _with_interval(row["tpot_ms"]),
                _parts(row["tpot_ms"], "p90", "p99"),
                _within(row["throughput_tps"], row["throughput_interval"], 0),
                _tau(row),
            )
            for row in results
        ),
    )
    yield from _table(
        "arm|load|ITL ms p50 / p99|e2e ms p50 / p90 / p99|tokens per chunk",
        (
            (
                row["arm"],
                load_of(row),
                _parts(row["itl_ms"], "median", "p99"),
                _parts(row["e2e_ms"], "median", "p90", "p99"),
                number(row["tokens_per_chunk"]),
            )
            for row in results
        ),
    )
    told = [row for row in results if row["tau"] is not None and row["acceptance_by_position"]]
    most = max((len(row["acceptance_by_position"]) for row in told), default=0)
    if told:
        shares = [[f"{100 * one:.0f} %" for one in row["acceptance_by_position"]] for row in told]
        yield from _table(
            "|".join(["accepted, by position", "load", *map(str, range(1, most + 1))]),
            (
                (row["arm"], load_of(row), *own, *["–"] * (most - len(own)))
                for row, own in zip(told, shares, strict=True)
            ),
        )
    for row in comparisons:
        if why := not_drafting(row):
            what = f"{_cell(row['arm'])} {why}, {load_of(row)}: no speed-up is a head's there."
            yield from (f"**{what}**", "")
    if comparisons:
        yield from _table(
            "comparison|load|TPOT (95 %)|throughput (95 %)|end to end (95 %)|tau|identical",
            (
                (
                    f"{row['arm']} over {row['baseline']}",
                    load_of(row),
                    *(ratio_cell(row, name) for name in RATIOS),
                    _tau(row),
                    _identical(row),
                )
                for row in comparisons
            ),
        )
    if bench["by_task"]:
        yield from _table(
            "task|comparison|load|prompts|TPOT ms|TPOT (95 %)|tau",
            (
                (
                    row["category"] or "–",
                    f"{row['arm']} over {row['baseline']}",
                    load_of(row),
                    row["num_pairs"],
                    f"{number(row['tpot_ms_baseline'])} → {number(row['tpot_ms'])}",
                    ratio_cell(row, "speedup"),
                    _tau(row),
                )
                for row in bench["by_task"]
            ),
        )
    if bench["compared_anyway"] and any(one["refused"] for one in bench["differences"]):
        yield from ("**Unlike is compared with unlike here, on demand.**", "")
    for one in bench["differences"]:
        yield f"- {one['arm']} and {one['baseline']}, {one['what']}: {_cell(one['text'])}"


def _provenance(bench: Row, manifest: Manifest | None, commands: Sequence[str]) -> Iterable[str]:
    machine, config = bench["machine"], bench["config"]
    yield from (
        "",
        f"{config['num_prompts']} prompts of `{config['prompts']}`, up to {config['max_tokens']} "
        f"tokens, temperature {config['temperature']:g}, seed {config['seed']}; arms in turns, "
        "block by block. Medians over requests.",
        *filter(None, [turns_note(bench)]),
        cache_note(bench),
        f"Client's machine: {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, {machine['system']}.",
    )
    for arm, server in bench["servers"].items():
        yield f"{_cell(arm)}: {_cell(server_line(server))}."
    if commands:
        yield from ("", "```", *commands, "```")
    if manifest is not None:
        yield from ("", "```", *lineage.lines(manifest), "```")


def server_line(server: Row) -> str:
    """What a server tells about itself, and which important facts it does not."""
    head = {True: "with a head", False: "without a head", None: "head unknown"}[server["has_head"]]
    length, fingerprint = server["max_length"], server.get("target_fingerprint")
    parts = (
        server["kind"],
        server["version"] or "version unknown",
        server["model"],
        server["precision"] or "precision unknown",
        server.get("speculation") or head,
        f"{length} tokens a request" if length else None,
        f"target {fingerprint[:16]}" if fingerprint else None,
    )
    return ", ".join(part for part in parts if part)


def turns_note(bench: Row) -> str:
    """Where conversations were cut, that they were; else nothing."""
    cut = bench.get("num_cut_prompts")
    return (
        f"First turns only: the later turns of {cut} conversations were not asked." if cut else ""
    )


def cache_note(bench: Row) -> str:
    """Whether servers may have known the prompts before an arm asked them at a load."""
    unknown = [arm for arm in bench["servers"] if arm not in bench.get("salted_arms", ())]
    if not unknown:
        return (
            "Every arm asked at every load under a `cache_salt` of its own: no server knew a "
            "prompt from before."
        )
    return (
        f"Prompts may have been cached by the server of {', '.join(unknown)}, which is not known "
        "to take `cache_salt`: TTFT and throughput may be those of prompts that it knew already."
    )


# All arms side by side


def arm_rows(bench: Row) -> list[tuple[str, ...]]:
    """ARM_COLUMNS of each arm at the lowest load: what a reader asks first."""
    rows: list[tuple[str, ...]] = []
    for row, pair in arms_at_lowest_load(bench):
        rows.append(
            (
                row["arm"],
                _within(row["tau"], row["tau_interval"])
                + (" (per chunk)" if row["tau_from"] == "chunks" else ""),
                _within(row["throughput_tps"], row["throughput_interval"], 0),
                "–" if pair is None else ratio_cell(pair, "speedup"),
                "–" if pair is None else _identical(pair),
            )
        )
    return rows


# A terminal


def show_arms(bench: Row, arm: str | None = None) -> None:
    """Print to stdout the arms side by side, then what may be quoted. arm: see `headlines`."""
    table = Table(*ARM_COLUMNS)
    for row in arm_rows(bench):
        table.add_row(*row)
    Console().print(table)
    for head in headlines(bench, arm):
        Console().print(head["sentence"], markup=False, highlight=False, soft_wrap=True)


def show_table(bench: Row) -> None:
    """Print to stdout a table per load with a column per arm, the others compared with the first;
    then what may be quoted, a sentence an arm.
    """
    compared = {(load_of(row), row["arm"]): row for row in every(bench, "comparisons")}
    results = every(bench, "results")
    for load in dict.fromkeys(map(load_of, results)):
        own = [row for row in results if load_of(row) == load]
        pairs = [compared.get((load, row["arm"])) for row in own]
        hists = (row["accept_hist"] for row in own)
        lines = {
            "tau, tokens per round": map(_tau, own),
            "rounds by accepted drafts": (
                ", ".join(f"{accepted}: {rounds}" for accepted, rounds in enumerate(hist)) or "–"
                for hist in hists
            ),
            "TTFT, ms (median)": (_parts(row["ttft_ms"], "median") for row in own),
            "TPOT, ms (median)": (_parts(row["tpot_ms"], "median") for row in own),
            "output tokens/s": (number(row["throughput_tps"]) for row in own),
            **{
                name: ["–" if row is None else ratio_cell(row, ratio) for row in pairs]
                for name, ratio in zip(("TPOT", "throughput", "end to end"), RATIOS, strict=True)
            },
            "identical greedy answers": ("–" if row is None else _identical(row) for row in pairs),
        }
        table = Table("", *(row["arm"] for row in own), title=load)
        for name, cells in lines.items():
            table.add_row(name, *cells)
        Console().print(table)
    for head in headlines(bench):
        Console().print(head["sentence"], markup=False, highlight=False, soft_wrap=True)


# Cells


def _table(header: str, rows: Iterable[Sequence[Any]]) -> Iterable[str]:
    names = header.split("|")
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"
    yield from (f"| {' | '.join(_cell(value) for value in row)} |" for row in rows)
    yield ""


def _cell(value: Any) -> str:
    """A value that cannot end its cell, its line, or begin a tag."""
    return str(value).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _tau(row: Row) -> str:
    return number(row["tau"]) + (" (per chunk)" if row["tau_from"] == "chunks" else "")


def ratio_cell(row: Row, name: str) -> str:
    """A ratio with its interval, in a cell: what is not certain has no figure of its own."""
    value, interval = row[name], row[f"{name}_interval"]
    note = not_drafting(row) if name == "speedup" else ""
    if value is None:
        return "–"
    if interval is None:
        cell = "too few turns"
    elif is_certain(interval):
        cell = _within(value, interval)
    else:
        cell = f"no difference ({number(interval[0])}–{number(interval[1])})"
    return f"{cell}, {note}" if note else cell


def _identical(row: Row) -> str:
    return "–" if row["identical"] is None else f"{row['identical']} of {row['num_pairs']}"


def _with_interval(spread: Row | None) -> str:
    if spread is None:
        return "–"
    interval = None if spread["low"] is None else (spread["low"], spread["high"])
    return _within(spread["median"], interval)


def _parts(spread: Row | None, *names: str) -> str:
    return "–" if spread is None else " / ".join(number(spread[name]) for name in names)


def _within(value: float | None, interval: Sequence[float] | None, digits: int = 2) -> str:
    if interval is None:
        return number(value, digits)
    return f"{number(value, digits)} ({number(interval[0], digits)}–{number(interval[1], digits)})"
