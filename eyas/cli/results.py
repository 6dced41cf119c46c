"""What a run ends with: a table for people, a report, and one JSON line for machines. Knows the benchmark's summary."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

PLAIN, EAGLE = "plain", "eagle"


def headline(summary: dict[str, Any]) -> dict[str, Any]:
    """The figures of one request at a time, or of the fewest at once: medians; `identical` says whether all pairs were.

    identical is None where answers were sampled, since there is nothing to compare then.
    """
    first = min(result["concurrency"] for result in summary["results"])
    arms = {result["arm"]: result for result in summary["results"] if result["concurrency"] == first}
    compared = next(one for one in summary["comparisons"] if (one["arm"], one["concurrency"]) == (EAGLE, first))
    same = compared["identical"]
    return {
        "tau": arms[EAGLE]["tau"],
        "accept_hist": arms[EAGLE]["accept_hist"],
        "tpot_ms_plain": (arms[PLAIN]["tpot_ms"] or {}).get("median"),
        "tpot_ms_eagle": (arms[EAGLE]["tpot_ms"] or {}).get("median"),
        "speedup": compared["speedup"],
        "identical": None if same is None else same == compared["num_pairs"],
        "num_identical": same,
        "num_pairs": compared["num_pairs"],
    }


def show(figures: dict[str, Any], report: str, seconds: float) -> None:
    """Print the table, the report's path and, as the last line of stdout, the figures as one JSON object."""
    table = Table("", "", show_header=False, title="one request at a time, greedy")
    table.add_row("tau (tokens per round)", _number(figures["tau"]))
    table.add_row("accept histogram (rounds by accepted drafts)", _histogram(figures["accept_hist"]))
    table.add_row("TPOT plain", f"{_number(figures['tpot_ms_plain'])} ms")
    table.add_row("TPOT with the head", f"{_number(figures['tpot_ms_eagle'])} ms")
    table.add_row("speed-up", f"{_number(figures['speedup'])} x")
    table.add_row("identical answers", f"{figures['num_identical']} of {figures['num_pairs']}")
    Console().print(table)
    print(f"report: {report}")
    print(json.dumps({**figures, "seconds": round(seconds, 1), "report": report}))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _histogram(accept_hist: list[int]) -> str:
    return "  ".join(f"{accepted}: {rounds}" for accepted, rounds in enumerate(accept_hist))
