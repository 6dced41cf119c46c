"""What may be quoted of a benchmark: the page's first lines, the last line of JSON and the end of
`eyas run` all take it from here. Pure functions of summary.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

RATIOS = ("speedup", "speedup_interval", "paired_speedup", "throughput_ratio")


def not_drafting(compared: Mapping[str, Any]) -> str:
    """What to say of an arm in place of a speed-up by its head; "" where it has a tau."""
    if compared["tau"] is not None:
        return ""
    if compared["tokens_per_forward"] is not None:
        return "did not draft"
    return "" if compared["speedup"] is None else "is not known to have drafted"


def quotable(compared: Mapping[str, Any]) -> dict[str, Any]:
    """A comparison as it may be quoted. Without drafts its ratios are noise, and `note` says so;
    between two engines they are the engines' ratios, drafts or none.
    """
    note = not_drafting(compared)
    if not note:
        return dict(compared)
    ratios = RATIOS if compared["same_engine"] else ()
    return {**compared, **dict.fromkeys(ratios), "note": note}


def at_lowest_load(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows with the fewest requests at a time, or a second: a single user's wait."""
    loads = [row.get("concurrency", row.get("rate")) for row in rows]
    lowest = min(loads, default=0)
    return [row for row, load in zip(rows, loads, strict=True) if load == lowest]


def headlines(bench: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of each arm the comparison at the lowest concurrency, with the results of its two arms."""
    of_arm = {(result["arm"], result["concurrency"]): result for result in bench["results"]}
    return [
        {
            "compared": quotable(compared),
            "baseline": of_arm[compared["baseline"], compared["concurrency"]],
            "arm": of_arm[compared["arm"], compared["concurrency"]],
        }
        for compared in at_lowest_load(bench["comparisons"])
    ]


def figures_of(bench: Mapping[str, Any], arm: str) -> dict[str, Any]:
    """An arm's headline for the last line of JSON; times are medians.

    `identical`: whether all pairs of greedy answers are; None where answers were sampled.
    """
    head = next(one for one in headlines(bench) if one["compared"]["arm"] == arm)
    compared, same = head["compared"], head["compared"]["identical"]
    tpots_ms = {side: head[side]["tpot_ms"] for side in ("baseline", "arm")}
    return {
        "tau": head["arm"]["tau"],
        "accept_hist": head["arm"]["accept_hist"],
        "tpot_ms_plain": tpots_ms["baseline"] and tpots_ms["baseline"]["median"],
        "tpot_ms_eagle": tpots_ms["arm"] and tpots_ms["arm"]["median"],
        "speedup": compared["speedup"],
        "identical": None if same is None else same == compared["num_pairs"],
        "num_identical": same,
        "num_pairs": compared["num_pairs"],
    }
