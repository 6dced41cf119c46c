"""Speed-up by arithmetic, for any engine: what a tree accepts against what forwards cost.

A plain server that decodes c requests runs one forward of c rows for a token of each, so its time
per output token at c requests is the cost of a forward of c rows. With trees of n nodes (root
included) a round is a forward of c n rows behind the draft's steps, and emits tau tokens of each
request:

    speedup(c, n) = tau(n) TPOT(c) / (TPOT(c n) + draft)

TPOT comes from the plain arm of an `eyas bench` of the server. It holds what the server does
besides (scheduling, other requests' prompts), which is larger at c n requests than in a round of c,
and c n requests read c n prefixes where c trees read c: on the whole the result errs to the low
side. Pure functions but for `read_bench`; knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.artifact import Artifact
from eyas.engine.tree import Speculation
from eyas.errors import ConfigError

# Where a server reports no rounds, tau is tokens a chunk: of a plain server 1 or a little more.
MOST_PLAIN_TAU = 1.05


@dataclass(frozen=True, slots=True)
class CostCurve:
    """ms of a forward at some numbers of rows, ascending; between them a straight line.

    A forward reads the weights once and computes for each row, so its cost is a constant and a part
    that grows with the rows. More rows never take less: a measurement that says so is noise.
    """

    rows: tuple[int, ...]
    forward_ms: tuple[float, ...]

    @classmethod
    def of(cls, points: Mapping[int, float]) -> CostCurve:
        """From ms by number of rows, in any order, at least one."""
        rows = sorted(points)
        highest = np.maximum.accumulate([points[number] for number in rows])
        return cls(tuple(rows), tuple(highest.tolist()))

    def at(self, rows: int) -> float | None:
        """None outside of what was measured."""
        if not self.rows[0] <= rows <= self.rows[-1]:
            return None
        return float(np.interp(rows, self.rows, self.forward_ms))


@dataclass(frozen=True, slots=True)
class DraftCost:
    """What a draft step costs: step_ms where it was measured, else a share of the target's forward
    of as many rows: the head's weights by the target's, since decoding is bound by reading them.
    """

    weights_share: float
    step_ms: float | None = None

    def of_round(self, curve: CostCurve, tree: Speculation, num_requests: int) -> float | None:
        """ms of all steps; None where a forward of as many rows was not measured."""
        step_ms = self.step_ms
        if step_ms is None:
            forward_ms = curve.at(num_requests * tree.tree_topk)
            if forward_ms is None:
                return None
            step_ms = self.weights_share * forward_ms
        return tree.num_draft_steps * step_ms


def predicted_speedup(
    curve: CostCurve, draft: DraftCost, tree: Speculation, tau: float, num_requests: int
) -> dict[str, Any]:
    """A row of eval.json: times per output token in ms, and their ratio.

    Where the curve does not reach, the figures are None and `missing` names the load to measure.
    The speed-up never exceeds tau, as the curve does not fall.
    """
    num_rows = num_requests * tree.num_verify_tokens
    plain_ms, verify_ms = curve.at(num_requests), curve.at(num_rows)
    draft_ms = draft.of_round(curve, tree, num_requests)
    row: dict[str, Any] = {
        "concurrency": num_requests,
        "speculation": str(tree),
        "tau": tau,
        "num_rows": num_rows,
        "tpot_ms_plain": plain_ms,
        "tpot_ms": None,
        "speedup": None,
    }
    if plain_ms is None or verify_ms is None or draft_ms is None:
        loads = f"{curve.rows[0]} to {curve.rows[-1]}"
        return {**row, "missing": f"TPOT at {num_rows} requests (measured: {loads})"}
    tpot_ms = (verify_ms + draft_ms) / tau
    return {**row, "tpot_ms": tpot_ms, "speedup": plain_ms / tpot_ms}


def predictions(
    curve: CostCurve, draft: DraftCost, taus: Sequence[tuple[Speculation, float]]
) -> list[dict[str, Any]]:
    """Rows of every tree at every load that was measured; of trees of one size, not of `auto`."""
    return [
        predicted_speedup(curve, draft, tree, tau, num_requests)
        for num_requests in curve.rows
        for tree, tau in taus
        if tree.mode == "fixed"
    ]


def read_bench(url: str) -> tuple[CostCurve, dict[str, Any]]:
    """The plain arm of a finished `eyas bench`: its curve, and where the figures are from.

    Raises MissingInputError, CorruptError, and ConfigError where no timed arm is plain.
    """
    folder = Artifact(url)
    identity = folder.manifest("bench").identity
    summary = folder.read_json("summary.json")
    for arm in summary["config"]["arms"]:
        results = [one for one in summary["results"] if one["arm"] == arm and one["tpot_ms"]]
        if results and all((one["tau"] or 1.0) <= MOST_PLAIN_TAU for one in results):
            points = {one["concurrency"]: one["tpot_ms"]["median"] for one in results}
            return CostCurve.of(points), {
                "bench": identity,
                "arm": arm,
                "server": summary["servers"].get(arm),
                "machine": summary["machine"],
                "tpot_ms": points,
            }
    raise ConfigError(
        f"{url} has no arm that decodes without speculation at some concurrency",
        "measure such a server at 1 to as many requests as a round has rows: eyas bench URL "
        "--concurrency 1,2,4,8,16,32",
    )
