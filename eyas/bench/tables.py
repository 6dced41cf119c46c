"""The figures of a benchmark as Markdown, for a README, and as CSV, for a spreadsheet. Knows
summary.json and a manifest.
"""

from __future__ import annotations

import csv as comma_separated
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eyas import lineage
from eyas.artifact import Manifest
from eyas.bench.headline import not_drafting

STATED = "The head is the one given with --head: servers do not tell which they run."
SPREADS = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
OF_RESULTS = (
    "num_requests",
    "num_failed",
    "num_prompt_tokens",
    "num_output_tokens",
    "throughput_tps",
    "requests_per_s",
    "tokens_per_chunk",
    "tau",
    "tau_from",
)
OF_COMPARISONS = (
    "num_pairs",
    "identical",
    "speedup",
    "throughput_ratio",
    "tau",
    "tau_from",
    "tokens_per_forward",
)
COLUMNS = (
    "kind",
    "arm",
    "baseline",
    "concurrency",
    "rate",
    "task",
    *OF_RESULTS[:2],
    "num_pairs",
    "identical",
    *OF_RESULTS[2:],
    "tokens_per_forward",
    "tau_low",
    "tau_high",
    "throughput_low",
    "throughput_high",
    "speedup",
    "speedup_low",
    "speedup_high",
    "throughput_ratio",
    "round_cost",
    "tpot_ms_baseline",
    *(f"{name}_{part}" for name in SPREADS for part in ("median", "low", "high", "p90", "p99")),
    "tree_nodes_mean",
    "plain_rounds_share",
)


def csv(bench: Mapping[str, Any]) -> str:
    """A line per result, comparison and comparison by task; a column that a line has nothing for is
    empty.
    """
    written = io.StringIO()
    writer = comma_separated.DictWriter(written, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    opened = bench["open_loop"]
    writer.writerows(_result_line(row) for row in (*bench["results"], *opened["results"]))
    for row in (
        *bench["comparisons"],
        *opened["comparisons"],
        *bench["by_task"],
        *opened["by_task"],
    ):
        writer.writerow(_comparison_line(row))
    return written.getvalue()


def _result_line(row: Mapping[str, Any]) -> dict[str, Any]:
    spreads = {
        f"{name}_{part}": value
        for name in SPREADS
        for part, value in (row[name] or {}).items()
        if part != "count"
    }
    rounds = row["speculation"]
    more = {
        "tree_nodes_mean": rounds.get("nodes_mean"),
        "plain_rounds_share": rounds.get("plain_share"),
    }
    line = {
        "kind": "result",
        **_where(row),
        **{name: row[name] for name in OF_RESULTS},
        **spreads,
        **more,
    }
    return {
        **line,
        **_ends("tau", row["tau_interval"]),
        **_ends("throughput", row["throughput_interval"]),
    }


def _comparison_line(row: Mapping[str, Any]) -> dict[str, Any]:
    kind = "task" if "category" in row else "comparison"
    cost = (row["round_cost"] or {}).get("median")
    line = {
        "kind": kind,
        **_where(row),
        **{name: row[name] for name in OF_COMPARISONS},
        "round_cost": cost,
    }
    times = {"tpot_ms_baseline": row["tpot_ms_baseline"], "tpot_ms_median": row["tpot_ms"]}
    return {
        **line,
        **times,
        **_ends("speedup", row["speedup_interval"]),
        **_ends("tau", row["tau_interval"]),
    }


def _where(row: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "arm": "arm",
        "baseline": "baseline",
        "concurrency": "concurrency",
        "rate": "rate",
        "category": "task",
    }
    return {column: row[name] for name, column in names.items() if name in row}


def _ends(name: str, interval: Sequence[float] | None) -> dict[str, float]:
    return {} if interval is None else {f"{name}_low": interval[0], f"{name}_high": interval[1]}


def markdown(
    bench: Mapping[str, Any], manifest: Manifest | None, commands: Sequence[str], title: str
) -> str:
    """The tables of the report, with what a reader needs to judge them."""
    return (
        "\n".join([f"# {_cell(title)}", "", *_body(bench), *_provenance(bench, manifest, commands)])
        + "\n"
    )


def _body(bench: Mapping[str, Any]) -> Iterable[str]:
    results = [*bench["results"], *bench["open_loop"]["results"]]
    comparisons = [*bench["comparisons"], *bench["open_loop"]["comparisons"]]
    yield from _table(
        (
            "arm",
            "load",
            "answers",
            "failed",
            "TTFT ms",
            "TPOT ms (95 %)",
            "TPOT p90 / p99",
            "tokens/s (95 %)",
            "tau",
        ),
        (
            (
                row["arm"],
                _load(row),
                row["num_requests"] - row["num_failed"],
                row["num_failed"],
                _median(row["ttft_ms"]),
                _with_interval(row["tpot_ms"]),
                _parts(row["tpot_ms"], "p90", "p99"),
                _within(row["throughput_tps"], row["throughput_interval"], 0),
                _tau(row),
            )
            for row in results
        ),
    )
    yield from _table(
        ("arm", "load", "ITL ms p50 / p99", "e2e ms p50 / p90 / p99", "tokens per chunk"),
        (
            (
                row["arm"],
                _load(row),
                _parts(row["itl_ms"], "median", "p99"),
                _parts(row["e2e_ms"], "median", "p90", "p99"),
                _number(row["tokens_per_chunk"]),
            )
            for row in results
        ),
    )
    yield from _positions(
        [row for row in results if row["tau"] is not None and row["acceptance_by_position"]]
    )
    for row in comparisons:
        if not_drafting(row):
            yield from (
                f"**{_cell(row['arm'])} {not_drafting(row)}, {_load(row)}: no speed-up is a head's "
                "there.**",
                "",
            )
    if comparisons:
        yield from _table(
            ("comparison", "load", "speed-up (95 %)", "tau", "throughput", "identical"),
            (
                (
                    f"{row['arm']} over {row['baseline']}",
                    _load(row),
                    _speedup(row),
                    _tau(row),
                    _number(row["throughput_ratio"]),
                    _identical(row),
                )
                for row in comparisons
            ),
        )
    if bench["by_task"]:
        yield from _table(
            ("task", "comparison", "load", "prompts", "TPOT ms", "speed-up (95 %)", "tau"),
            (
                (
                    row["category"] or "–",
                    f"{row['arm']} over {row['baseline']}",
                    _load(row),
                    row["num_pairs"],
                    f"{_number(row['tpot_ms_baseline'])} → {_number(row['tpot_ms'])}",
                    _speedup(row),
                    _tau(row),
                )
                for row in bench["by_task"]
            ),
        )
    if bench["compared_anyway"] and any(one["refused"] for one in bench["differences"]):
        yield from ("**Unlike is compared with unlike here, on demand.**", "")
    yield from (
        f"- {one['arm']} and {one['baseline']}, {one['what']}: {_cell(one['text'])}"
        for one in bench["differences"]
    )


def _positions(results: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """How often a draft was accepted where all before it were, by its position."""
    if not results:
        return
    most = max(len(row["acceptance_by_position"]) for row in results)
    shares = (
        [f"{100 * share:.0f} %" for share in row["acceptance_by_position"]] for row in results
    )
    yield from _table(
        ("accepted, by position", "load", *(str(position) for position in range(1, most + 1))),
        (
            (row["arm"], _load(row), *own, *["–"] * (most - len(own)))
            for row, own in zip(results, shares, strict=True)
        ),
    )


def _provenance(
    bench: Mapping[str, Any], manifest: Manifest | None, commands: Sequence[str]
) -> Iterable[str]:
    machine, config = bench["machine"], bench["config"]
    yield from (
        "",
        f"{config['num_prompts']} prompts of `{config['prompts']}`, up to {config['max_tokens']} "
        "tokens, temperature "
        f"{config['temperature']:g}, seed {config['seed']}; arms in turns, block by block. Medians "
        "over requests.",
        *filter(None, [turns_note(bench)]),
        cache_note(bench),
        f"Client's machine: {machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, "
        f"{machine['system']}.",
    )
    for arm, server in bench["servers"].items():
        yield f"{_cell(arm)}: {_cell(server_line(server))}."
    if commands:
        yield from ("", "```", *commands, "```")
    if manifest is not None:
        yield from ("", "```", *lineage.lines(manifest), "```")


def server_line(server: Mapping[str, Any]) -> str:
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


def turns_note(bench: Mapping[str, Any]) -> str:
    """Where conversations were cut, that they were; else nothing."""
    number = bench.get("num_cut_prompts")
    return (
        f"First turns only: the later turns of {number} conversations were not asked."
        if number
        else ""
    )


def cache_note(bench: Mapping[str, Any]) -> str:
    """Whether servers may have known the prompts before an arm asked them at a load."""
    unknown = [arm for arm in bench["servers"] if arm not in bench.get("salted_arms", ())]
    if not unknown:
        return (
            "Every arm asked at every load under a `cache_salt` of its own: no server knew a "
            "prompt from before."
        )
    return (
        f"Prompts may have been cached by the server of {', '.join(unknown)}, which is not known "
        "to take `cache_salt`: "
        "TTFT and throughput may be those of prompts that it knew already."
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterable[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    yield from (f"| {' | '.join(_cell(value) for value in row)} |" for row in rows)
    yield ""


def _cell(value: Any) -> str:
    """A value that cannot end its cell, its line, or begin a tag."""
    return str(value).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _load(row: Mapping[str, Any]) -> str:
    return (
        f"{row['concurrency']} at a time" if "concurrency" in row else f"{row['rate']:g} a second"
    )


def _tau(row: Mapping[str, Any]) -> str:
    return _number(row["tau"]) + (" (per chunk)" if row["tau_from"] == "chunks" else "")


def _speedup(row: Mapping[str, Any]) -> str:
    return _within(row["speedup"], row["speedup_interval"]) + (
        f", {not_drafting(row)}" if not_drafting(row) else ""
    )


def _identical(row: Mapping[str, Any]) -> str:
    return "–" if row["identical"] is None else f"{row['identical']} of {row['num_pairs']}"


def _median(spread: Mapping[str, Any] | None) -> str:
    return "–" if spread is None else _number(spread["median"])


def _with_interval(spread: Mapping[str, Any] | None) -> str:
    if spread is None:
        return "–"
    return _within(
        spread["median"], None if spread["low"] is None else (spread["low"], spread["high"])
    )


def _parts(spread: Mapping[str, Any] | None, *names: str) -> str:
    return "–" if spread is None else " / ".join(_number(spread[name]) for name in names)


def _within(value: float | None, interval: Sequence[float] | None, digits: int = 2) -> str:
    around = (
        ""
        if interval is None
        else f" ({_number(interval[0], digits)}–{_number(interval[1], digits)})"
    )
    return _number(value, digits) + around


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
