"""A watch over production: is a head's tau, by servers' counters, that of its card?

In a window all servers together finish `requests` answers. The head is stale in a window where

    tau_card - MARGIN * (tau_card - 1) - tau  >  z * sqrt(se_card^2 + sd^2 / n)

    tau_card, se_card   of the card, for drafts of the same size; se from its 95 % interval
    sd                  of tau over answers like the card's: se_card * sqrt(answers)
    n                   the window's requests, or the number of the card's answers that have as
                        many rounds, if that is less
    z                   3.09: FALSE_ALARMS for windows that lose just the margin, if sums of answers
                        were normally distributed; they are skewed, and nearly one in 100 was
                        measured, none without a loss (docs/production.md)

Answers are counted, as rounds of one answer are correlated: long ones once, short ones by rounds.
MARGIN allows for other prompts than the card's. docs/decisions/verdict.md has measured rates;
deploy/prometheus-rules.yaml the same formula.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from operator import mul
from statistics import NormalDist
from typing import Any

from eyas.bench.server import (
    ONLY_UP,
    Counters,
    add_counters,
    counted_between,
    is_restarted,
    num_ended,
    read_counters,
    rounds_of,
)
from eyas.card import Z_95, CardTau, at_temperature
from eyas.client import Client
from eyas.errors import CorruptError, EyasError, MismatchError, MissingInputError
from eyas.tau import Interval, acceptance_of_positions

MARGIN = 0.1  # share of the accepted drafts per round; less is not worth a training run
FALSE_ALARMS = 0.001  # share of windows, by a normal distribution
Z = NormalDist().inv_cdf(1 - FALSE_ALARMS)
LOST_S = 300.0  # longer than a server takes to load
# Relative error of judged drafts per round: eyas counts drafts at once, rounds when answers end.
SIZE_APART = 0.25
SEVERAL = 10  # answers without a round, by which there is no head; few may have one token each


def choose(figures: Sequence[CardTau], temperature: float, rounds: Mapping[str, Any]) -> CardTau:
    """The card's figures for a server's size of drafts (`rounds_of` its counters): the nearest, a
    longer chain cut, or auto; the first for an unknown size. Raises MismatchError.
    """
    own = at_temperature(figures, temperature)
    nodes, steps = rounds["nodes_mean"], rounds["num_draft_steps"]  # at least so many steps
    if not nodes:
        return own[0]
    sized = [one for one in own if one.size is not None and one.size[0] >= steps]
    longer = [one for one in sized if one.size and one.size[1] == 1 and one.size[0] > steps > 0]

    def apart(one: CardTau) -> float:
        assert one.size is not None
        return abs(float(nodes) / (one.size[2] - 1) - 1)

    nearest = min([*sized, *(one.cut(steps) for one in longer)], key=apart, default=None)
    if nearest is not None and apart(nearest) <= SIZE_APART:
        return nearest
    if auto := [one for one in own if one.size is None]:
        return auto[0]
    known = ", ".join(f"{one.speculation} at temperature {one.temperature:g}" for one in figures)
    raise MismatchError(
        f"the target judges {nodes:.1f} drafts a round; the card has {known}",
        "measure what is served: `eyas eval` with --trees and --temperatures; auto is a tree too",
    )


@dataclass(frozen=True, slots=True)
class WatchWindow:
    """The counts of all servers in a window, and the card. restarted, lost: servers' addresses."""

    num_requests: int
    num_rounds: int
    tau: float
    acceptance_by_position: tuple[float, ...]  # SGLang does not count it: empty
    card: CardTau
    restarted: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def worth(self) -> float:
        """n of the module's formula."""
        return min(
            self.num_requests, self.num_rounds * self.card.num_answers / self.card.num_rounds
        )

    @property
    def se(self) -> float:
        """Standard error of tau, for answers with the card's variance."""
        return self.card.se * math.sqrt(self.card.num_answers / self.worth)

    @property
    def interval(self) -> Interval:
        """95 % of tau."""
        return max(1.0, self.tau - Z_95 * self.se), self.tau + Z_95 * self.se

    @property
    def least_tau(self) -> float:
        """Below it the head is stale."""
        return self.card.tau - MARGIN * (self.card.tau - 1) - Z * math.hypot(self.card.se, self.se)

    @property
    def is_stale(self) -> bool:
        return self.tau < self.least_tau


def window_of(
    figures: Sequence[CardTau],
    temperature: float,
    counted: Mapping[str, Counters],
    since_start: Mapping[str, Counters],
) -> WatchWindow | None:
    """The window, from servers' counters in it and since their start, by address, without servers
    that did not draft; None if none did. Raises EyasError (a server never drafted), CorruptError
    (impossible counts), MismatchError (sizes of drafts differ, or are not on the card).
    """
    drafting: dict[str, Mapping[str, Any]] = {}
    for url, own in counted.items():
        refuse_impossible(url, own)
        if "num_rounds" in (rounds := rounds_of(own)):
            drafting[url] = rounds
        elif (ended := num_ended(since_start[url])) >= SEVERAL and (
            "num_rounds" not in rounds_of(since_start[url])
        ):
            raise EyasError(
                f"{url} ended {ended:.0f} requests and counts no round of drafts",
                "start it with the head: its card, which `eyas export` writes, has the command",
            )
    if not drafting:
        return None
    cards = {
        url: choose(figures, temperature, {**rounds, **rounds_of(since_start[url])})
        for url, rounds in drafting.items()
    }
    sizes = {card.speculation: url for url, card in cards.items()}
    if len(sizes) > 1:
        found = " and ".join(f"{url} in {size}" for size, url in sizes.items())
        raise MismatchError(f"servers draft differently: {found}", "watch them apart")
    total = sum(rounds["num_rounds"] for rounds in drafting.values())
    by_server = [
        list(accumulate(rounds["acceptance_by_position"], mul, initial=rounds["num_rounds"]))
        for rounds in drafting.values()
    ]
    by_position = [sum(counts) for counts in zip_longest(*by_server, fillvalue=0.0)]
    is_known = all(len(counts) > 1 for counts in by_server)
    return WatchWindow(
        round(sum(num_ended(counted[url]) for url in drafting)),
        round(total),
        sum(rounds["tau"] * rounds["num_rounds"] for rounds in drafting.values()) / total,
        tuple(acceptance_of_positions(total, by_position[1:])) if is_known else (),
        next(iter(cards.values())),
    )


def refuse_impossible(url: str, counted: Counters) -> None:
    """Raise CorruptError for counts that are no number, negative, or of more accepted drafts than
    drafts.
    """
    read = {name: n for name, n in counted.items() if name.startswith(("spec_", *ONLY_UP))}
    impossible = next((f"{name} {n:g}" for name, n in read.items() if not 0 <= n < math.inf), "")
    rounds = rounds_of({} if impossible else counted)
    nodes, accepted = rounds.get("nodes_mean", 0.0), rounds.get("tau", 1.0) - 1
    if nodes and accepted > nodes * (1 + SIZE_APART):
        impossible = f"tau {accepted + 1:.2f} of {nodes:.1f} drafts a round"
    if impossible:
        raise CorruptError(
            f"{url}/metrics counts what cannot be: {impossible}",
            "look at the server, or at what stands between: another one's counters, or two added",
        )


async def windows(
    clients: Sequence[Client],
    figures: Sequence[CardTau],
    temperature: float,
    requests: int,
    poll_s: float,
) -> AsyncIterator[WatchWindow | str]:
    """Endless windows of at least `requests` answers; a line where no request ended for LOST_S.

    Raises MismatchError (a temperature that the card lacks), MissingInputError (a server without
    counters at the start, or no answer for LOST_S), and what `window_of` raises.
    """
    at_temperature(figures, temperature)  # raises before the first window
    last = dict(zip([one.url for one in clients], await _read(clients), strict=True))
    if silent := [url for url, counters in last.items() if not counters]:
        raise MissingInputError(
            f"no counters at {', '.join(f'{url}/metrics' for url in silent)}",
            "check the address; SGLang counts with --enable-metrics",
        )
    counted: dict[str, Counters] = {url: {} for url in last}
    restarted, lost = list[str](), set[str]()
    waited_s, idle_s, ended = 0.0, 0.0, 0.0
    while True:
        await asyncio.sleep(poll_s)
        now = dict(zip(last, await _read(clients), strict=True))
        waited_s = 0.0 if any(now.values()) else waited_s + poll_s
        if waited_s >= LOST_S:
            raise MissingInputError(
                f"no answer from {', '.join(last)} for {waited_s:.0f} s", "look at the servers"
            )
        for url, counters in now.items():
            if not counters:
                lost.add(url)
                continue
            if is_restarted(last[url], counters):
                restarted.append(url)
            counted[url] = add_counters(counted[url], counted_between(last[url], counters))
            last[url] = counters
        before, ended = ended, sum(map(num_ended, counted.values()))
        idle_s = 0.0 if ended != before else idle_s + poll_s
        if idle_s >= LOST_S:
            idle_s = 0.0
            yield f"no request ended in {LOST_S:.0f} s; {ended:.0f} of {requests} so far"
        if ended >= requests:
            window = window_of(figures, temperature, counted, last)
            if window is None or window.num_requests < requests:
                continue
            yield replace(window, restarted=tuple(restarted), lost=tuple(sorted(lost)))
            counted, restarted, lost = {url: {} for url in last}, [], set()


async def _read(clients: Sequence[Client]) -> list[Counters]:
    return await asyncio.gather(*map(read_counters, clients))
