"""What may be quoted from a benchmark's summary.json, and the sentence that says it.

A ratio is claimed where its interval does not contain 1; an interval needs LEAST_TURNS turns of
each arm. An arm that did not draft has no speed-up. A claim also names the p90 and p99 that got
worse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

from eyas.bench.summary import RATIOS, RequestLoad, most_possible
from eyas.tau import LEAST_TURNS, Interval

Row = Mapping[str, Any]
MEANINGS = {  # each of RATIOS with its adjective
    "speedup": ("time per token (TPOT)", "fast"),
    "throughput_ratio": ("throughput", "high"),
    "e2e_speedup": ("whole answers (end to end)", "fast"),
}
LATENCIES = {"tpot_ms": "TPOT", "e2e_ms": "end to end", "ttft_ms": "TTFT"}
LOCAL = ("127.0.0.1", "localhost", "::1")


def not_drafting(compared: Row) -> str:
    """The remark in place of a speed-up; "" for an arm with a tau."""
    if compared["tau"] is not None:
        return ""
    if compared["tokens_per_forward"] is not None:
        return "did not draft"
    return "" if compared["speedup"] is None else "is not known to have drafted"


def is_plain(compared: Row) -> bool:
    """Whether the arm hardly drafted, by its server's report: its ratios are noise."""
    return (
        compared["same_engine"]
        and compared["tau"] is None
        and compared["tokens_per_forward"] is not None
    )


def is_certain(interval: Interval | None) -> bool:
    """Whether the interval excludes 1, in the two digits that are shown."""
    return interval is not None and not round(interval[0], 2) <= 1 <= round(interval[1], 2)


def too_few(compared: Row) -> str:
    """Why no ratio of so few turns is claimed, or ""."""
    turns = compared["num_turns"]
    if turns >= LEAST_TURNS:
        return ""
    counted = f"{compared['num_pairs']} answers of each in {turns} turn{'s' * (turns != 1)}"
    return f"{counted}, and below {LEAST_TURNS} turns chance alone may look like a difference"


def quotable(compared: Row) -> dict[str, Any]:
    """A comparison in which an uncertain ratio is None and `note` gives the reason; its interval
    stays. Without drafts all ratios are noise.
    """
    claimed = dict(compared)
    if note := not_drafting(compared):
        claimed["note"] = note
        if is_plain(compared):
            names = [*RATIOS, *(f"{name}_interval" for name in RATIOS)]
            return {**claimed, **dict.fromkeys(names)}
    unsure = [name for name in RATIOS if not is_certain(compared[f"{name}_interval"])]
    claimed |= dict.fromkeys(unsure)
    if "speedup" in unsure:
        few = too_few(compared) or "no certain difference from 1"
        claimed["note"] = "; ".join(filter(None, [note, few]))
    return claimed


def load_of(row: Row) -> str:
    """The load of a result or comparison, as shown."""
    return str(RequestLoad(row.get("concurrency", 0), row.get("rate")))


def at_lowest_load(rows: Sequence[Row]) -> list[Row]:
    """The rows of the first load."""
    return [row for row in rows if load_of(row) == load_of(rows[0])]


def headlines(bench: Row, arm: str | None = None) -> list[dict[str, Any]]:
    """The comparison of each arm, or of one, at the lowest load, both results, and `sentence`."""
    of_arm = {(result["arm"], load_of(result)): result for result in bench["results"]}
    found = []
    for compared in at_lowest_load(bench["comparisons"]):
        if arm in (None, compared["arm"]):
            baseline, own = (
                of_arm[compared[side], load_of(compared)] for side in ("baseline", "arm")
            )
            found.append(
                {
                    "compared": quotable(compared),
                    "baseline": baseline,
                    "arm": own,
                    "sentence": sentence(bench, compared, baseline, own),
                }
            )
    return found


def sentence(bench: Row, compared: Row, baseline: Row, arm: Row) -> str:
    """Model, machine and load; TPOT, throughput and end to end; tails that got worse; differences
    between the arms.
    """
    where = place(bench, compared)
    both = f"{compared['arm']} and {compared['baseline']}"
    if is_plain(compared):
        return f"{where}: {compared['arm']} did not draft, so there is no speed-up by a head."
    if compared["withheld"]:
        return f"{where}: no speed-up is claimed, {compared['withheld']}."
    if all(compared[name] is None for name in RATIOS):
        return f"{where}: {both} have no answers that can be compared."
    if few := too_few(compared):
        num = 2 * LEAST_TURNS * compared.get("concurrency", 1)
        return (
            f"{where}: nothing is claimed of {both}: {few}. "
            f"Ask for {num} prompts or more (--set num_prompts={num})."
        )
    over = f"{where}, {compared['num_pairs']} answers of each: "
    if any(is_certain(compared[f"{name}_interval"]) for name in RATIOS):
        over += f"{compared['arm']} against {compared['baseline']}, "
        parts = [f"{name} {in_words(compared, key, how)}" for key, (name, how) in MEANINGS.items()]
        parts += [_worse(baseline, arm), _above_tau(compared)]
    else:
        over += f"no difference between {both} is certain: "
        parts = [f"{name} {_within(compared, key)}" for key, (name, _) in MEANINGS.items()]
    parts += [_slower_elsewhere(bench, compared), *_unlike(bench, compared, baseline, arm)]
    return f"{over}{'; '.join(filter(None, parts))}."


def in_words(compared: Row, ratio: str, how: str) -> str:
    """One ratio in words, with its interval."""
    value, interval = compared[ratio], compared[f"{ratio}_interval"]
    if value is None or interval is None:
        return "not known" if value is None else "not claimed"
    if not is_certain(interval):
        return f"no certain difference ({_within(compared, ratio)})"
    slower = "slower, " if value < 1 else ""
    return f"{slower}{number(value)} times as {how} ({_within(compared, ratio)})"


def _within(compared: Row, ratio: str) -> str:
    interval = compared[f"{ratio}_interval"]
    return "not known" if interval is None else f"{number(interval[0])} to {number(interval[1])}"


def place(bench: Row, compared: Row) -> str:
    """Model, machine and load."""
    server = bench["servers"][compared["arm"]]
    machine, host = bench["machine"], urlsplit(server["url"]).hostname
    client = f"{machine['processor']}, {machine['cores']} cores"
    on = f"on {client}" if host in LOCAL else f"at {host}, asked from {client}"
    precision = f" ({server['precision']})" if server["precision"] else ""
    count, _, per = load_of(compared).partition(" ")
    load = f"{count} {'request' if count == '1' else 'requests'} {per}"
    # some servers call a model by its folder
    return f"{PurePath(server['model']).name}{precision} {on}, {load}"


def _worse(baseline: Row, arm: Row) -> str:
    tails = []
    for latency, name in LATENCIES.items():
        before, after = baseline[latency], arm[latency]
        for part in ("p90", "p99") if before and after else ():
            values = number(before[part]), number(after[part])
            if after[part] > before[part] and values[0] != values[1]:
                tails.append(f"{part} of {name} {values[0]} → {values[1]} ms")
    return f"worse in the tail: {', '.join(tails)}" if tails else ""


def _above_tau(compared: Row) -> str:
    if compared["tau"] is None:
        return "the server reports no tau that would bound these ratios"
    certain = [name for name in RATIOS if is_certain(compared[f"{name}_interval"])]
    above = max((compared[name] for name in certain), default=0.0)
    if above <= compared["tau"]:
        return ""
    bound = f"{number(above)} is above tau, {number(compared['tau'])}"
    if most_possible(compared) is None:
        return f"{bound}: the two engines or hosts differ in more than the head"
    return f"{bound}, and no head gives that: the arms were not measured alike"


def _slower_elsewhere(bench: Row, compared: Row) -> str:
    loads = [
        f"{load_of(other)} ({names} {number(other[ratio])} times)"
        for other in bench["comparisons"]
        if other["arm"] == compared["arm"] and load_of(other) != load_of(compared)
        for ratio, names in (("speedup", "TPOT"), ("throughput_ratio", "throughput"))
        if is_certain(interval := other[f"{ratio}_interval"]) and interval[1] < 1
    ]
    return f"slower with {', '.join(loads)}" if loads else ""


def _unlike(bench: Row, compared: Row, baseline: Row, arm: Row) -> Iterator[str]:
    refused = [one for one in bench["differences"] if one["refused"]]
    if bench["compared_anyway"] and compared["arm"] in [one["arm"] for one in refused]:
        yield "compared on demand, although they did not do the same work"
    for result in (baseline, arm):
        if failed := result["num_failed"]:
            yield f"{failed} of {result['num_requests']} requests to {result['arm']} failed"
    same, pairs = compared["identical"], compared["num_pairs"]
    if same is not None and same < pairs:
        yield f"{pairs - same} of {pairs} answers were not the same"


def headline_figures(bench: Row, arm: str) -> dict[str, Any]:
    """An arm's headline as JSON. Times are medians; an unclaimed ratio is None. identical: whether
    all greedy answers are; None for sampled ones.
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
    """A number with a comma between thousands; a dash for None."""
    return "–" if value is None else f"{value:,.{digits}f}"
