"""What a head's card promises: tau with its uncertainty, and how it falls with the depth of drafts.
Knows files, no server.

Looked for where stages and people put it, the first that has a tau counts:

    eval.json         as `eyas eval` writes it
    manifest.json     of an export: eval.json's keys under "measured", among its facts
    README.md         the card: "tau 3.39 on held-out answers", "accept_hist: 760, 377, ..."
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Z95 = 1.96
_EVAL, _MANIFEST, _CARD = "eval.json", "manifest.json", "README.md"
_TAU = re.compile(
    r"\btau (\d+\.\d+)\b(?:[^\d\n]{0,40}?\b(?:95 ?%[^\d\n]{0,20})?(\d+\.\d+) ?(?:-|to|–) ?(\d+\.\d+))?"
)
_HIST = re.compile(r"^accept_hist: (\d+(?:, \d+)*)\s*$", re.M)


@dataclass(frozen=True, slots=True)
class Reference:
    """tau: emitted tokens a round; low: the lower end of its 95 % interval; survival[p]: share of
    rounds that accept more than p drafts, empty where that is not known; source: where it was
    found.
    """

    tau: float
    low: float
    survival: tuple[float, ...]
    source: str

    def lowest(self, depths: Mapping[int, int]) -> float:
        """What `low` comes to where the drafts were so deep: {levels: rounds}. The card's own depth
        where nothing is known.

        A server that drafts less under load emits less a round, and that is no drift.
        """
        rounds = sum(depths.values())
        if not rounds or not self.survival:
            return self.low
        reached = (
            sum(count * (1 + sum(self.survival[:depth])) for depth, count in depths.items())
            / rounds
        )
        return self.low * min(reached / (1 + sum(self.survival)), 1.0)


def stated(tau: float) -> Reference:
    """A tau that somebody gives: taken as it is."""
    return Reference(tau, tau, (), "expect_tau")


def promised(head: str | Path) -> Reference | None:
    """What the card of a head's folder says; for an exported form the folder above has the card.
    None for nothing.
    """
    folder = Path(head)
    for place in (folder, folder.parent) if folder.name in ("sglang", "vllm") else (folder,):
        for name, measured in _found(place):
            if (reference := _reference(measured, name)) is not None:
                return reference
    return None


def _found(folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Sections that may tell of tau, with their file's name."""
    for name in (_EVAL, _MANIFEST):
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if name == _MANIFEST and isinstance(content, dict):
            facts = content.get("facts")
            content = facts.get("measured") if isinstance(facts, dict) else None
        if isinstance(content, dict):
            yield name, content
    try:
        text = (folder / _CARD).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return
    yield _CARD, _of_card(text)


def _of_card(text: str) -> dict[str, Any]:
    """eval.json's keys out of the card's words."""
    tau, hist = _TAU.search(text), _HIST.search(text)
    if tau is None:
        return {}
    measured: dict[str, Any] = {"tau": float(tau[1])}
    if tau[2] is not None:
        measured["tau_interval"] = [float(tau[2]), float(tau[3])]
    if hist is not None:
        measured["accept_hist"] = [int(count) for count in hist[1].split(", ")]
    return measured


def _reference(measured: Mapping[str, Any], source: str) -> Reference | None:
    tau, hist, interval = (measured.get(name) for name in ("tau", "accept_hist", "tau_interval"))
    if not isinstance(tau, int | float) or not math.isfinite(tau) or tau < 1:
        return None
    hist = (
        hist
        if isinstance(hist, list) and all(isinstance(count, int) and count >= 0 for count in hist)
        else []
    )
    rounds = sum(hist)
    survival = (
        tuple(sum(hist[depth + 1 :]) / rounds for depth in range(len(hist) - 1)) if rounds else ()
    )
    low = float(tau)
    if (
        isinstance(interval, list)
        and len(interval) == 2
        and isinstance(interval[0], int | float)
        and 0 < interval[0] <= tau
    ):
        low = float(interval[0])
    elif rounds:
        mean = sum(count * accepted for accepted, count in enumerate(hist)) / rounds
        variance = (
            sum(count * (accepted - mean) ** 2 for accepted, count in enumerate(hist)) / rounds
        )
        low = float(tau) - Z95 * math.sqrt(variance / rounds)
    return Reference(float(tau), low, survival, source)
