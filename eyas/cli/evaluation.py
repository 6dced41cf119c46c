"""What an eval ends with: tables for people and one JSON line for machines. Knows eval.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def headline(result: dict[str, Any]) -> dict[str, Any]:
    """tau with its interval, of each tree and temperature, and what is predicted of each
    speculation by concurrency.
    """
    predicted = result.get("predicted", {}).get("by_concurrency", [])
    names = "speculation", "temperature", "tau", "tau_interval", "tau_ceiling"
    return {
        "tau": result["tau"],
        "tau_interval": result["tau_interval"],
        "accept_hist": result["accept_hist"],
        "trees": [{name: one[name] for name in names} for one in result.get("trees", [])],
        "predicted": predicted,
    }


def foretold(result: dict[str, Any]) -> dict[str, Any]:
    """What eval said of the first of its trees before anything was served: tau with its interval;
    and, if it was predicted, the speed-up at the lowest concurrency: of auto where that is served,
    else of this tree."""
    first = (result.get("trees") or [result])[0]
    rows = result.get("predicted", {}).get("by_concurrency", [])
    own = [one for one in rows if one["speculation"].startswith("auto")] or [
        one for one in rows if one["speculation"] == first.get("speculation")
    ]
    told = {"tau_foretold": first["tau"], "tau_interval": first["tau_interval"]}
    return {**told, "speedup_foretold": own[0]["speedup"]} if own else told


def in_one_line(result: dict[str, Any]) -> str:
    """The same for people."""
    told, first = foretold(result), (result.get("trees") or [result])[0]
    how = first.get("speculation", f"a chain of {result['num_draft_steps']}")
    speedup = told.get("speedup_foretold")
    faster = "" if speedup is None else f"; speed-up {speedup:.2f}"
    return (
        f"foretold by eval, before serving: tau {told['tau_foretold']:.2f} "
        f"({_interval(first)}) "
        f"with {how}{faster}"
    )


def show_table(result: dict[str, Any]) -> None:
    """Print to stdout: tau of all that was measured, of its parts, and the prediction."""
    out = Console()
    measured = Table(
        "",
        "tau",
        "95 %",
        "ceiling",
        "accepted given all before, by position",
        "answers",
        title="tokens per round",
    )
    if "tau_by_num_draft_steps" in result:
        measured.add_row(f"chain of {result['num_draft_steps']}, on features", *_cells(result))
    for one in result.get("trees", []):
        measured.add_row(f"{one['speculation']}, temperature {one['temperature']:g}", *_cells(one))
    out.print(measured)
    for name, part in (("source", result["by_source"]), ("language", result["by_language"])):
        table = Table(name, "tau", "95 %", "answers", "rounds")
        for value, one in part.items():
            row = (
                value or "-",
                f"{one['tau']:.2f}",
                _interval(one),
                str(one["answers"]),
                str(one["rounds"]),
            )
            table.add_row(*row)
        out.print(table)
    out.print(
        f"of the answers' tokens {result['draft_vocabulary_coverage']:.1%} are in the draft "
        "vocabulary: the ceiling on tau is "
        f"{result['tau_ceiling']:.2f}, with all tokens in it "
        f"{result['tau_ceiling_full_vocabulary']:.2f}"
    )
    if "predicted" in result:
        out.print(_predicted(result["predicted"]["by_concurrency"]))


def _predicted(figures: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "at a time",
        "speculation",
        "tau",
        "TPOT plain, ms",
        "TPOT, ms",
        "speed-up",
        title="predicted, of a server here",
    )
    for one in figures:
        numbers = (_number(one[name]) for name in ("tau", "tpot_ms_plain", "tpot_ms", "speedup"))
        table.add_row(str(one["concurrency"]), one["speculation"], *numbers)
    return table


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    positions = " ".join(f"{share:.2f}" for share in one["acceptance_by_position"])
    return (
        f"{one['tau']:.2f}",
        _interval(one),
        f"{one['tau_ceiling']:.2f}",
        positions,
        str(one["answers"]),
    )


def _interval(one: dict[str, Any]) -> str:
    interval = one["tau_interval"]
    return "-" if interval is None else f"{interval[0]:.2f} - {interval[1]:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
