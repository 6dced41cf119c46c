"""The taus on a head's card, by size of drafts and temperature, as `eyas eval` measured them.

`eyas watch` and Prometheus compare traffic with them: our server exports them as series, `eyas
export` writes them as rules for other engines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from statistics import NormalDist
from typing import Any, get_args

from eyas.artifact import Artifact
from eyas.errors import CorruptError, InputError, MismatchError, MissingInputError
from eyas.model.dialects import Form
from eyas.tau import Interval

Z_95 = NormalDist().inv_cdf(0.975)
EVAL = "eval.json"
_FIXED = re.compile(r"fixed\((\d+),(\d+),(\d+)\)")


@dataclass(frozen=True, slots=True)
class CardTau:
    """The figures for one size of drafts. speculation: as `eyas serve` takes it."""

    speculation: str
    temperature: float
    tau: float
    interval: Interval
    num_answers: int
    num_rounds: int
    acceptance_by_position: tuple[float, ...]

    @property
    def size(self) -> tuple[int, int, int] | None:
        """Draft steps, branches, tokens that the target judges (root included); None for auto."""
        found = _FIXED.fullmatch(self.speculation)
        return (int(found[1]), int(found[2]), int(found[3])) if found else None

    @property
    def se(self) -> float:
        """Standard error of tau."""
        return (self.interval[1] - self.interval[0]) / (2 * Z_95)

    @property
    def series(self) -> dict[str, float]:
        """Values of the series `eyas:card_NAME` of deploy/prometheus-rules.yaml, by NAME."""
        counts = {"answers": float(self.num_answers), "rounds": float(self.num_rounds)}
        return {"tau": self.tau, "se": self.se, **counts}

    def cut(self, num_draft_steps: int) -> CardTau:
        """A chain's figures with fewer draft steps and the same acceptance by position."""
        shares = list(accumulate(self.acceptance_by_position, mul))
        kept = sum(shares[:num_draft_steps]) / (sum(shares) or 1.0)  # a head may be of no use
        tau, low, high = (1 + kept * (one - 1) for one in (self.tau, *self.interval))
        return replace(
            self,
            speculation=f"fixed({num_draft_steps},1,{num_draft_steps + 1})",
            tau=tau,
            interval=(low, high),
            num_rounds=round(self.num_rounds * self.tau / tau),
            acceptance_by_position=self.acceptance_by_position[:num_draft_steps],
        )


def read_card(place: str) -> list[CardTau]:
    """The figures in an eval.json, or a folder or URL with one. Raises MissingInputError,
    CorruptError, and InputError where no tau has an interval.
    """
    output = Artifact(place.removesuffix(EVAL).rstrip("/") or ".")
    if not output.exists(EVAL):
        raise MissingInputError(
            f"no {EVAL} in {output.url}", "give the output of `eyas eval` or `eyas export`"
        )
    try:
        figures = figures_of(json.loads(output.read(EVAL)))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CorruptError(
            f"{output.url}/{EVAL} cannot be read ({type(error).__name__}: {error})",
            "make it again with `eyas eval` or `eyas export`",
        ) from error
    if not figures:
        raise InputError(
            f"{output.url}/{EVAL} has no tau with its interval",
            "measure the head with `eyas eval` (6 answers or more), and give its output",
        )
    return figures


def figures_of(result: Mapping[str, Any]) -> list[CardTau]:
    """The figures of an eval.json: trees, then the chain on features. Answers drawn at several
    temperatures have none.
    """
    found = [(one, one["speculation"], one["temperature"]) for one in result.get("trees", [])]
    if "tau_by_num_draft_steps" in result:
        steps = result["num_draft_steps"]
        chain = f"fixed({steps},1,{steps + 1})"
        found.append((result, chain, result.get("answers_temperature", 0.0)))
    figures = []
    for one, size, temperature in found:
        if one["tau_interval"] and one["rounds"] and temperature is not None:
            low, high = one["tau_interval"]
            counts, shares = (one["answers"], one["rounds"]), tuple(one["acceptance_by_position"])
            figures.append(CardTau(size, temperature, one["tau"], (low, high), *counts, shares))
    return figures


def at_temperature(figures: Sequence[CardTau], temperature: float) -> list[CardTau]:
    """The card's figures at one temperature. Raises MismatchError where it has none."""
    own = [one for one in figures if one.temperature == temperature]
    if not own:
        known = ", ".join(f"{one:g}" for one in sorted({one.temperature for one in figures}))
        raise MismatchError(
            f"the card has no figures at temperature {temperature:g}, only at {known}",
            "give one of them as --temperature, or measure: `eyas eval` with --temperatures",
        )
    return own


def of_size(figures: Sequence[CardTau], speculation: str) -> list[CardTau]:
    """The figures for drafts of this size, one for each temperature; a chain's may be those of a
    longer one, cut.
    """
    found = {one.temperature: one for one in figures if one.speculation == speculation}
    wanted = _FIXED.fullmatch(speculation)
    for one in figures:
        if wanted is None:
            if one.size is None and speculation.startswith("auto"):
                found.setdefault(one.temperature, one)
        elif one.size and one.size[1] == 1 == int(wanted[2]) and one.size[0] > int(wanted[1]):
            found.setdefault(one.temperature, one.cut(int(wanted[1])))
    return list(found.values())


def card_of_head(place: str) -> list[CardTau]:
    """The figures in a head's folder, or in the export that the folder is a form of; [] without a
    card. Raises what `read_card` raises.
    """
    above, _, name = place.rstrip("/").rpartition("/")
    for folder in (place, above or ".") if name in get_args(Form) else (place,):
        if Artifact(folder).exists(EVAL):
            return read_card(folder)
    return []
