"""Figures of answers and of parts of them: by source, by language. Knows counts of rounds, no
model.

A unit is what was decoded of one prompt; figures of several are those of all their rounds, with the
interval that the bootstrap over the units gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.tau import RoundCounts, tau_interval


@dataclass(frozen=True, slots=True)
class Unit:
    """The rounds of one answer, and what the prompt was."""

    source: str
    language: str
    tally: RoundCounts


def total(tallies: Sequence[RoundCounts], num_draft_steps: int) -> RoundCounts:
    """All rounds together."""
    whole = RoundCounts(num_draft_steps)
    for tally in tallies:
        whole.add(tally)
    return whole


def figures(units: Sequence[Unit], num_draft_steps: int) -> dict[str, Any]:
    """tau with its interval, accepted drafts, acceptance by position given all before, and of how
    much this is told.
    """
    whole = total([unit.tally for unit in units], num_draft_steps)
    return {
        "tau": whole.tau,
        "tau_interval": _interval(units),
        "accept_hist": whole.accept_hist,
        "acceptance_by_position": whole.acceptance_by_position,
        "rounds": whole.rounds,
        "answers": len(units),
    }


def by_source(units: Sequence[Unit]) -> dict[str, dict[str, Any]]:
    """Of each source: tau, tau_interval, rounds, answers."""
    return _by(units, lambda unit: unit.source)


def by_language(units: Sequence[Unit]) -> dict[str, dict[str, Any]]:
    """The same of each language."""
    return _by(units, lambda unit: unit.language)


def _by(units: Sequence[Unit], name_of: Callable[[Unit], str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Unit]] = {}
    for unit in units:
        groups.setdefault(name_of(unit), []).append(unit)
    return {name: _short(group) for name, group in sorted(groups.items())}


def _short(units: Sequence[Unit]) -> dict[str, Any]:
    rounds, emitted = (
        sum(getattr(unit.tally, name) for unit in units) for name in ("rounds", "emitted")
    )
    return {
        "tau": emitted / max(rounds, 1),
        "tau_interval": _interval(units),
        "rounds": rounds,
        "answers": len(units),
    }


def _interval(units: Sequence[Unit]) -> list[float] | None:
    found = tau_interval(
        [unit.tally.emitted for unit in units], [unit.tally.rounds for unit in units]
    )
    return None if found is None else list(found)
