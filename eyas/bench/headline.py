"""What may be quoted of a benchmark, and the one sentence that says it. Pure functions of
summary.json.

A ratio is claimed where its interval does not hold 1. An interval takes LEAST_TURNS turns of each
arm, since turns are what a busy minute hits, and fewer may agree by chance (eyas/tau.py). An arm
that did not draft has no ratio that is its head's, and none is above tau without a word on it.
Medians may gain where tails lose: once anything is claimed, the p90 and p99 that got worse are
named too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

from eyas.bench.summary import most_possible
from eyas.tau import LEAST_TURNS, Interval

Row = Mapping[str, Any]
RATIOS = ("speedup", "throughput_ratio", "e2e_speedup")
LATENCIES = {"tpot_ms": "TPOT", "e2e_ms": "end to end", "ttft_ms": "TTFT"}
HERE = ("127.0.0.1", "localhost", "::1")


def not_drafting(compared: Row) -> str:
    """What to say of an arm in place of a speed-up by its head; "" where it has a tau."""
    if compared["tau"] is not None:
        return ""
    if compared["tokens_per_forward"] is not None:
        return "did not draft"
    return "" if compared["speedup"] is None else "is not known to have drafted"


def is_certain(interval: Interval | None) -> bool:
    """Whether a ratio with this interval is not 1, in the two digits that are shown."""
    return interval is not None and not round(interval[0], 2) <= 1 <= round(interval[1], 2)


def too_few(compared: Row) -> str:
    """Why no ratio of so few turns is claimed; "" where there are enough."""
    turns = compared["num_turns"]
    if turns >= LEAST_TURNS:
        return ""
    told = f"{compared['num_pairs']} answers of each in {turns} {'turn' if turns == 1 else 'turns'}"
    return f"{told}, and below {LEAST_TURNS} turns chance alone may look like a difference"


def quotable(compared: Row) -> dict[str, Any]:
    """A comparison as it may be quoted: a ratio that is not certain is None, its interval stays,
    and `note` says why.

    Without drafts ratios are noise, whatever their intervals; between two engines they are the
    engines' ratios, drafts or none.
    """
    told = dict(compared)
    if note := not_drafting(compared):
        told["note"] = note
        if compared["same_engine"]:
            none = dict.fromkeys([*RATIOS, *(f"{name}_interval" for name in RATIOS)])
            return {**told, **none, "paired_speedup": None}
    unsure = [name for name in RATIOS if not is_certain(compared[f"{name}_interval"])]
    told |= dict.fromkeys(unsure)
    if "speedup" in unsure:
        told["paired_speedup"] = None
        few = too_few(compared) or "no certain difference from 1"
        told["note"] = "; ".join(filter(None, [note, few]))
    return told


def every(bench: Row, kind: str) -> list[Row]:
    """The results or comparisons of closed loops, then those of open ones."""
    return [*bench[kind], *bench["open_loop"][kind]]


def at_lowest_load(rows: Sequence[Row]) -> list[Row]:
    """The rows with the fewest requests at a time, or a second: a single user's wait."""
    loads = [row.get("concurrency", row.get("rate")) for row in rows]
    lowest = min(loads, default=0)
    return [row for row, load in zip(rows, loads, strict=True) if load == lowest]


def arms_at_lowest_load(bench: Row) -> list[tuple[Row, Row | None]]:
    """The results at the lowest load, each with its comparison, None for the baseline; of closed
    loops where there are any.
    """
    part = bench if bench["results"] else bench["open_loop"]
    compared = {row["arm"]: row for row in at_lowest_load(part["comparisons"])}
    return [(row, compared.get(row["arm"])) for row in at_lowest_load(part["results"])]


def are_many_arms(bench: Row) -> bool:
    """Whether there is more to see than one arm against the baseline."""
    return len(bench["servers"]) > 2


def headlines(bench: Row, arm: str | None = None) -> list[dict[str, Any]]:
    """Of each arm, or of one, the comparison at the lowest load, of closed loops where there are
    any, with the results of its two arms and the `sentence` on them.
    """
    part = bench if bench["comparisons"] else bench["open_loop"]
    of_arm = {(result["arm"], load_of(result)): result for result in part["results"]}
    found = []
    for compared in at_lowest_load(part["comparisons"]):
        if arm not in (None, compared["arm"]):
            continue
        sides = [of_arm[compared[side], load_of(compared)] for side in ("baseline", "arm")]
        found.append(
            {
                "compared": quotable(compared),
                "baseline": sides[0],
                "arm": sides[1],
                "sentence": sentence(bench, compared, *sides),
            }
        )
    return found


def sentence(bench: Row, compared: Row, baseline: Row, arm: Row) -> str:
    """The headline: model, machine and load; TPOT, throughput and end to end; the tails that got
    worse; what was not alike. compared: of these two results.
    """
    where = place(bench, compared)
    both = f"{compared['arm']} and {compared['baseline']}"
    note, few = not_drafting(compared), too_few(compared)
    if note and compared["same_engine"]:
        return f"{where}: {compared['arm']} {note}, so there is no speed-up by a head to tell."
    if compared["withheld"]:
        return f"{where}: no speed-up is claimed, {compared['withheld']}."
    if all(compared[name] is None for name in RATIOS):
        return f"{where}: {both} have no answers that can be compared."
    if few:
        return f"{where}: nothing is claimed of {both}: {few}. {_more(compared)}"
    figures = (
        ("time per token (TPOT)", "speedup", "fast"),
        ("throughput", "throughput_ratio", "high"),
        ("whole answers (end to end)", "e2e_speedup", "fast"),
    )
    said = [f"{name} {told_of(compared, ratio, how)}" for name, ratio, how in figures]
    over = f"{where}, {compared['num_pairs']} answers of each: "
    if not any(is_certain(compared[f"{name}_interval"]) for name in RATIOS):
        over += f"no difference between {both} is certain: "
        said = [f"{name} {_within(compared, ratio)}" for name, ratio, _ in figures]
    else:
        over += f"{compared['arm']} against {compared['baseline']}, "
        said += [_worse(baseline, arm), _above_tau(compared)]
    said += [_slower_elsewhere(bench, compared), *_unlike(bench, compared, baseline, arm)]
    return f"{over}{'; '.join(filter(None, said))}."


def told_of(compared: Row, ratio: str, how: str = "") -> str:
    """One ratio in words, with its interval, as far as it may be quoted."""
    value, interval = compared[ratio], compared[f"{ratio}_interval"]
    if value is None or interval is None:
        return "not known" if value is None else "not claimed"
    within = f"({_within(compared, ratio)})"
    if not is_certain(interval):
        return f"no certain difference {within}"
    slower = "slower, " if value < 1 else ""
    return f"{slower}{number(value)} times{f' as {how}' if how else ''} {within}"


def _within(compared: Row, ratio: str) -> str:
    interval = compared[f"{ratio}_interval"]
    return "not known" if interval is None else f"{number(interval[0])} to {number(interval[1])}"


def place(bench: Row, compared: Row) -> str:
    """Model, machine and load."""
    server = bench["servers"][compared["arm"]]
    machine, host = bench["machine"], urlsplit(server["url"]).hostname
    client = f"{machine['processor']}, {machine['cores']} cores"
    on = f"on {client}" if host in HERE else f"at {host}, asked from {client}"
    precision = f" ({server['precision']})" if server["precision"] else ""
    count, _, per = load_of(compared).partition(" ")
    load = f"{count} {'request' if count == '1' else 'requests'} {per}"
    # some servers call a model by its folder
    return f"{PurePath(server['model']).name}{precision} {on}, {load}"


def load_of(row: Row) -> str:
    """The load of a result or comparison."""
    if "concurrency" in row:
        return f"{row['concurrency']} at a time"
    return f"{row['rate']:g} a second"


def _more(compared: Row) -> str:
    """How to come to enough turns."""
    num = 2 * LEAST_TURNS * compared.get("concurrency", 1)
    return f"Ask for {num} prompts or more (--set num_prompts={num})."


def _worse(baseline: Row, arm: Row) -> str:
    """The tails that got worse, as far as two digits show it; "" for none."""
    tails = []
    for latency, name in LATENCIES.items():
        before, after = baseline[latency], arm[latency]
        for part in ("p90", "p99") if before and after else ():
            values = number(before[part]), number(after[part])
            if after[part] > before[part] and values[0] != values[1]:
                tails.append(f"{part} of {name} {values[0]} → {values[1]} ms")
    return f"worse in the tail: {', '.join(tails)}" if tails else ""


def _above_tau(compared: Row) -> str:
    """What a reader must know of ratios above tau, which no head gives; "" for none."""
    if compared["tau"] is None or compared["tau_from"] == "chunks":
        return "the server tells no tau that would bound these ratios"
    certain = [name for name in RATIOS if is_certain(compared[f"{name}_interval"])]
    above = max((compared[name] for name in certain), default=0.0)
    if above <= compared["tau"]:
        return ""
    law = f"{number(above)} is above tau, {number(compared['tau'])}"
    if most_possible(compared) is None:
        return f"{law}: the two engines or hosts differ in more than the head"
    return f"{law}, and no head gives that: the arms were not measured alike"


def _slower_elsewhere(bench: Row, compared: Row) -> str:
    """The other loads at which the arm is slower for certain; "" for none."""
    loads = [
        f"{load_of(other)} ({names} {number(other[ratio])} times)"
        for other in every(bench, "comparisons")
        if other["arm"] == compared["arm"] and load_of(other) != load_of(compared)
        for ratio, names in (("speedup", "TPOT"), ("throughput_ratio", "throughput"))
        if is_certain(interval := other[f"{ratio}_interval"]) and interval[1] < 1
    ]
    return f"slower with {', '.join(loads)}" if loads else ""


def _unlike(bench: Row, compared: Row, baseline: Row, arm: Row) -> Iterator[str]:
    """In what the arms did not do the same work: a ratio is worth less with every one."""
    refused = [one for one in bench["differences"] if one["refused"]]
    if bench["compared_anyway"] and compared["arm"] in [one["arm"] for one in refused]:
        yield "compared on demand, although they did not do the same work"
    for result in (baseline, arm):
        if failed := result["num_failed"]:
            yield f"{failed} of {result['num_requests']} requests to {result['arm']} failed"
    same, pairs = compared["identical"], compared["num_pairs"]
    if same is not None and same < pairs:
        yield f"{pairs - same} of {pairs} answers were not the same"


def figures_of(bench: Row, arm: str) -> dict[str, Any]:
    """An arm's headline for the last line of JSON; times are medians, and the speed-up is None
    where none is claimed.

    `identical`: whether all pairs of greedy answers are; None where answers were sampled.
    """
    (head,) = headlines(bench, arm)
    compared, same = head["compared"], head["compared"]["identical"]
    tpots_ms = {side: head[side]["tpot_ms"] for side in ("baseline", "arm")}
    return {
        "headline": head["sentence"],
        "tau": head["arm"]["tau"],
        "accept_hist": head["arm"]["accept_hist"],
        "tpot_ms_plain": tpots_ms["baseline"] and tpots_ms["baseline"]["median"],
        "tpot_ms_eagle": tpots_ms["arm"] and tpots_ms["arm"]["median"],
        **{name: compared[name] for name in RATIOS},
        "identical": None if same is None else same == compared["num_pairs"],
        "num_identical": same,
        "num_pairs": compared["num_pairs"],
    }


def number(value: float | None, digits: int = 2) -> str:
    """A number with so many digits after the point and thousands apart; a dash for None."""
    return "–" if value is None else f"{value:,.{digits}f}"
