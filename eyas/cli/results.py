"""A benchmark's summary.json as tables on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from eyas.bench.headline import not_drafting


def show_table(summary: dict[str, Any]) -> None:
    """Print to stdout a table per load with a column per arm; the others are compared with the
    first.
    """
    _show_tables(summary, "concurrency", "at a time")
    _show_tables(summary["open_loop"], "rate", "a second")


def _show_tables(summary: dict[str, Any], load: str, unit: str) -> None:
    compared = {(one[load], one["arm"]): one for one in summary["comparisons"]}
    for value in sorted({result[load] for result in summary["results"]}):
        results = [result for result in summary["results"] if result[load] == value]
        comparisons = [compared.get((value, result["arm"])) for result in results]
        table = Table("", *(result["arm"] for result in results), title=f"{value:g} {unit}")
        table.add_row("tau, tokens per round", *(_tau(result) for result in results))
        table.add_row(
            "rounds by accepted drafts", *(_histogram(result["accept_hist"]) for result in results)
        )
        table.add_row(
            "TTFT, ms (median)", *(_number(_median(result["ttft_ms"])) for result in results)
        )
        table.add_row(
            "TPOT, ms (median)", *(_number(_median(result["tpot_ms"])) for result in results)
        )
        table.add_row("output tokens/s", *(_number(result["throughput_tps"]) for result in results))
        table.add_row("speed-up (TPOT)", *(_speedup(one) for one in comparisons))
        table.add_row("identical greedy answers", *(_identical(one) for one in comparisons))
        Console().print(table)


def _histogram(accept_hist: list[int]) -> str:
    return ", ".join(f"{accepted}: {rounds}" for accepted, rounds in enumerate(accept_hist)) or "-"


def _identical(comparison: dict[str, Any] | None) -> str:
    if comparison is None or comparison["identical"] is None:
        return "-"
    return f"{comparison['identical']} of {comparison['num_pairs']}"


def _tau(result: dict[str, Any]) -> str:
    return _number(result["tau"]) + (" (per chunk)" if result["tau_from"] == "chunks" else "")


def _speedup(comparison: dict[str, Any] | None) -> str:
    if comparison is None:
        return "-"
    interval = comparison["speedup_interval"]
    around = "" if interval is None else f" ({_number(interval[0])} to {_number(interval[1])})"
    return (
        _number(comparison["speedup"])
        + around
        + (", hardly drafted" if not_drafting(comparison) else "")
    )


def _median(spread: dict[str, Any] | None) -> float | None:
    return None if spread is None else spread["median"]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
