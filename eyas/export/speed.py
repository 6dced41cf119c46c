"""The speed of a head in a serving engine, foretold from the cost of its rounds and measured tau.

    TPOT      = round_ms(load, drafts) / tau(drafts)         plain decoding has tau 1
    tokens/s  = 1000 load / (TPOT + wait_ms(load, drafts))   wait: prefill and queue, per token

Costs hold for one engine, card and target, measured with simulated acceptance near a head's tau
(SGLANG_SIMULATE_ACC_LEN; vLLM's `"rejection_sample_method": "synthetic"`): the larger tau, the more
do prefills lengthen rounds. Load: concurrent requests; costs are interpolated over its square root,
and nothing is foretold beyond the measured loads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import fsspec
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eyas.card import CardTau, of_size
from eyas.errors import CorruptError, MismatchError
from eyas.settings import Settings

MEASURED_ON = ("engine", "version", "card", "target", "dtype")
SPEED = "speed.json"  # of an export
ADAPTIVE = "sglang/adaptive.json"


class DraftSize(Settings):
    """A tree, or a chain if topk is 1; `verify` counts the root."""

    steps: int = Field(ge=1)
    topk: int = Field(ge=1)
    verify: int = Field(ge=2)

    def __str__(self) -> str:
        return f"fixed({self.steps},{self.topk},{self.verify})"


class CostRow(BaseModel):
    """The cost of a round at a load. arm: None is plain decoding, whose round is a step. tau: as
    simulated. ttft_ms: a median.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    load: int = Field(ge=1)
    arm: DraftSize | None
    round_ms: float = Field(gt=0)
    tau: float = Field(ge=1)
    ttft_ms: float = Field(ge=0)
    output_tokens_per_s: float = Field(gt=0)

    @property
    def wait_ms(self) -> float:
        """Time of a request's token beside TPOT."""
        return max(0.0, 1000 * self.load / self.output_tokens_per_s - self.round_ms / self.tau)


class EngineCosts(Settings):
    """Costs of an engine's rounds. Rows of one load and arm are repetitions."""

    engine: str
    version: str
    card: str
    target: str
    dtype: str
    rows: tuple[CostRow, ...]

    def loads(self, arm: DraftSize | None) -> list[int]:
        """The measured loads of an arm, ascending."""
        return sorted({row.load for row in self.rows if row.arm == arm})

    def costs(self, arm: DraftSize | None, load: int) -> tuple[float, float] | None:
        """round_ms and wait_ms; None beyond the measured loads."""
        loads = self.loads(arm)
        if not loads or not loads[0] <= load <= loads[-1]:
            return None
        own = [[row for row in self.rows if (row.arm, row.load) == (arm, one)] for one in loads]
        of_load = [
            (median(row.round_ms for row in rows), median(row.wait_ms for row in rows))
            for rows in own
        ]
        round_ms, wait_ms = (
            float(np.interp(np.sqrt(load), np.sqrt(loads), values))
            for values in zip(*of_load, strict=True)
        )
        return round_ms, wait_ms


def cost_table(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The table as JSON from rows {engine, version, card, target, dtype, arm: {steps, topk, verify}
    or None, load, tpot_ms, ttft_ms, output_tokens_per_s, tau}; other fields are ignored.

    Raises MismatchError for rows of several engines, cards or targets, CorruptError.
    """
    places, made = set(), []
    for row in rows:
        places.add(tuple(str(row.get(name)) for name in MEASURED_ON))
        tau = row["tau"] if row["arm"] else 1.0
        if tau is None or row["tpot_ms"] is None:
            raise CorruptError(
                f"no tau or no TPOT of {row['arm'] or 'plain decoding'} at {row['load']} requests",
                "measure a server that counts its rounds (SGLang: --enable-metrics)",
            )
        kept = {name: row[name] for name in ("load", "arm", "ttft_ms", "output_tokens_per_s")}
        made.append({**kept, "round_ms": row["tpot_ms"] * tau, "tau": tau})
    if len(places) != 1:
        raise MismatchError(
            f"rows of {len(places)} engines, cards or targets, not of one: {sorted(places)}",
            f"make a table of each; its rows have the same {', '.join(MEASURED_ON)}",
        )
    table = {**dict(zip(MEASURED_ON, *places, strict=True)), "rows": made}
    return _checked(json.dumps(table), "these rows").model_dump(mode="json")


def read_costs(url: str) -> EngineCosts:
    """Read a table. Raises CorruptError, FileNotFoundError."""
    with fsspec.open(url, "rb") as stream:
        return _checked(stream.read(), url)


def _checked(text: str | bytes, where: str) -> EngineCosts:
    try:
        table = EngineCosts.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise CorruptError(
            f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg']}",
            "give what eyas.export.speed.cost_table makes",
        ) from error
    if not table.loads(None):
        raise CorruptError(f"{where}: no row of plain decoding", "measure it without a head too")
    return table


@dataclass(frozen=True, slots=True)
class Foretold:
    """Speed at one load. times_plain: plain TPOT over this TPOT."""

    load: int
    arm: DraftSize | None
    tau: float
    tpot_ms: float
    output_tokens_per_s: float
    times_plain: float


def foretell(table: EngineCosts, figures: Sequence[CardTau], load: int) -> list[Foretold]:
    """Speed at a load: of plain decoding, and of each measured size of drafts with a known tau (a
    chain's from a longer one); none if plain decoding was not measured.
    """
    plain, found = table.costs(None, load), []
    for arm in dict.fromkeys([None, *(row.arm for row in table.rows)]):
        costs = table.costs(arm, load)
        taus = [1.0] if arm is None else [one.tau for one in of_size(figures, str(arm))]
        if plain and costs and taus:
            tpot_ms = costs[0] / taus[0]
            tokens_per_s = 1000 * load / (tpot_ms + costs[1])
            ratio = plain[0] / tpot_ms
            found.append(Foretold(load, arm, taus[0], tpot_ms, tokens_per_s, ratio))
    return found


def steps_by_load(table: EngineCosts, figures: Sequence[CardTau]) -> list[tuple[int, int, int]]:
    """The fastest chain by range of load: first (from 1), last, draft steps (0: plain decoding)."""
    loads, ranges = table.loads(None), list[tuple[int, int, int]]()
    for load in range(loads[0], loads[-1] + 1):
        chains = [
            (one.tpot_ms, one.arm.steps if one.arm else 0)
            for one in foretell(table, figures, load)
            if one.arm is None or one.arm.topk == 1
        ]
        first, steps = load if ranges else 1, min(chains)[1]
        if ranges and ranges[-1][2] == steps:
            first = ranges.pop()[0]
        ranges.append((first, load, steps))
    return ranges


def speed_of(table: EngineCosts, figures: Sequence[CardTau]) -> dict[str, Any]:
    """speed.json: the measured loads, and powers of two between them. settings: steps_by_load in
    the engine's form; empty if it has none or plain decoding is always faster.

    Raises MismatchError for an evaluation without drafts of a size in the table.
    """
    loads = table.loads(None)
    powers = {2**power for power in range(loads[0].bit_length(), loads[-1].bit_length())}
    shown = sorted({*loads, *powers})
    foretold = [one for load in shown for one in foretell(table, figures, load)]
    if not any(one.arm for one in foretold):
        sizes = sorted({str(row.arm) for row in table.rows if row.arm}) or ["fixed(4,1,5)"]
        raise MismatchError(
            f"the evaluation has no tau of drafts that the costs are of: {', '.join(sizes)}",
            f"""measure one: eyas eval -s 'trees=["{sizes[0]}"]'""",
        )
    ranges = steps_by_load(table, figures)
    return {
        **table.model_dump(include=set(MEASURED_ON)),
        "foretold": [{**asdict(one), "arm": one.arm and one.arm.model_dump()} for one in foretold],
        "steps_by_load": ranges,
        "settings": settings_of(table.engine.lower(), ranges),
    }


def settings_of(engine: str, ranges: Sequence[tuple[int, int, int]]) -> dict[str, Any]:
    """steps_by_load as fields of vLLM 0.32's --speculative-config (v1/spec_decode/dynamic/utils.py)
    or the file of SGLang 0.5.23's --speculative-adaptive-config, by the least number of requests
    (speculative/adaptive_spec_params.py).
    """
    steps = max(steps for *_, steps in ranges)
    if engine == "vllm" and steps:
        fields = {"num_speculative_tokens": steps}
        return {**fields, "num_speculative_tokens_per_batch_size": list(map(list, ranges))}
    if engine == "sglang" and steps:
        return {str(first): {"candidate_steps": [own]} for first, _, own in ranges}
    return {}
