"""What a server will give: time per token with and without the head, by concurrency, before one
runs.

Held-out answers are played back (`replay`) as `eyas bench` asks for them: so many clients, blocks
of a few prompts a client, the arms in turns, one load after the other, all at one engine, where an
arm at a load finds no prompt of another's in the cache. A time per token is a client's: from the
first token to the last, with what prefills of others take in between.

No round with trees is shorter than a plain round of the same requests, so no answer gets faster
than its tokens per round: `held_to_tau` holds the prediction to that.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import fsspec
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from eyas.engine.costs import CostTable
from eyas.engine.request import Request
from eyas.engine.round_costs import device_name, round_costs
from eyas.engine.tree import Speculation
from eyas.errors import ConfigError, CorruptError, EyasError, MissingInputError
from eyas.evaluate.decoding import Models
from eyas.evaluate.overheads import Overheads, overheads
from eyas.evaluate.recording import Recording, record
from eyas.evaluate.replay import Pace, Played, Theatre
from eyas.log import Track
from eyas.tau import RoundCounts

PLAIN, HEAD = "plain", "head"
AUTO = "auto"
LEAST_BLOCKS = 4
ROUNDING = 1 + 1e-9
# how far from 1 a speed-up may be where nothing was drafted, but clients waited for each other's
# prompts
NOISE = 1.1


class PredictConfig(BaseModel):
    """What is predicted, and for which machine. No concurrencies: nothing is.

    costs: a file with another machine's cost table: eval.json of an eval there, or a file of its
    cache folder (~/.cache/eyas/costs). None: this machine's, measured if it is not kept. block:
    prompts of each client between changes of the arm. overhead_s: for measuring real rounds at each
    load. chunk_ms and arrival_ms: what a server adds, as in Pace.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    concurrencies: tuple[int, ...] = (1, 4, 8)
    speculations: tuple[str, ...] = (AUTO,)
    costs: str | None = None
    block: int = Field(4, ge=1)
    overhead_s: float = Field(0.5, gt=0)
    chunk_ms: float = Field(0.05, ge=0)
    arrival_ms: float = Field(3.0, ge=0)

    @model_validator(mode="after")
    def _can_be_played(self) -> PredictConfig:
        if any(concurrency < 1 for concurrency in self.concurrencies):
            raise ConfigError(
                f"predict.concurrencies: {list(self.concurrencies)}", "give numbers above 0"
            )
        for way in self.speculations:
            speculating(way)
        return self


def speculating(text: str) -> Speculation:
    """A way to speculate. Raises ConfigError, also for `off`."""
    speculation = Speculation.parse(text)
    if speculation.mode == "off":
        raise ConfigError(
            "with speculation off there is no tau",
            "give fixed(6,3,12), a chain such as fixed(4,1,5), or auto",
        )
    return speculation


def predict(
    config: PredictConfig,
    models: Models,
    trees: Sequence[Speculation],
    requests: Sequence[Request],
    track: Track,
) -> dict[str, Any]:
    """Figures of each of the trees and of config.speculations at each concurrency, and the costs
    that they follow from.

    Raises EyasError for an impossible one.
    """
    speculations = list(dict.fromkeys([*trees, *map(speculating, config.speculations)]))
    table, machine = costs_of(config, models, speculations[0]), machine_of(config, models)
    found = overheads_of(config, models, table, speculations, requests)
    figures = []
    for recording, group in recorded(models, speculations, requests, track):
        for speculation in group:
            pace = Pace(table, found[str(speculation)], config.chunk_ms, config.arrival_ms)
            theatre = Theatre(models, recording, speculation, pace, max(config.concurrencies))
            for concurrency in config.concurrencies:
                arms = play(
                    theatre, blocks(list(recording.answers), concurrency, config.block), concurrency
                )
                what = {
                    "concurrency": concurrency,
                    "speculation": str(speculation),
                    "round_cost": theatre.round_cost(),
                }
                figures.append(held_to_tau({**what, **compared(*arms)}))
    return {
        "by_concurrency": sorted(figures, key=lambda one: one["concurrency"]),
        "temperature": requests[0].params.temperature,
        "machine": machine,
        "costs": table.to_json(),
        "overheads": {way: one.to_json() for way, one in found.items()},
    }


def fixed(speculation: Speculation) -> str:
    """The same sizes, in every round."""
    return str(replace(speculation, mode="fixed"))


def costs_of(config: PredictConfig, models: Models, speculation: Speculation) -> CostTable:
    """The table of the file, or of this machine. Raises what `read_costs` raises."""
    return (
        read_costs(config.costs)
        if config.costs is not None
        else round_costs(models.engine(fixed(speculation)).rounds)
    )


def machine_of(config: PredictConfig, models: Models) -> dict[str, Any]:
    """What the times are of: processor (or GPU), cores of this process, torch's threads, precision;
    of another machine what its file says. Empty where that says nothing."""
    if config.costs is not None:
        return read_machine(config.costs)
    return {
        "processor": device_name(models.target.device),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": str(models.target.dtype).removeprefix("torch."),
        "native": models.target.is_native,
        "system": platform.platform(),
        "torch": torch.__version__,
    }


def read_machine(url: str) -> dict[str, Any]:
    """The machine that a file of `read_costs` is of, as far as it says: as in eval.json, or out of
    the cache's identity.
    """
    with fsspec.open(url, "rt", encoding="utf-8") as stream:
        content = json.load(stream)
    if "predicted" in content:
        return dict(content["predicted"].get("machine") or {})
    known = content.get("identity") or {}
    names = {
        "processor": "device",
        "threads": "threads",
        "dtype": "dtype",
        "native": "native",
        "torch": "torch_version",
    }
    found = {name: known[own] for name, own in names.items() if own in known}
    return found | {
        name: found[name].removeprefix("torch.") for name in ("dtype",) if name in found
    }


def read_costs(url: str) -> CostTable:
    """The table in a file as PredictConfig takes it. Raises MissingInputError, CorruptError."""
    try:
        with fsspec.open(url, "rt", encoding="utf-8") as stream:
            content = json.load(stream)
        return CostTable.from_json(
            content["predicted"]["costs"] if "predicted" in content else content
        )
    except FileNotFoundError as error:
        raise MissingInputError(
            f"no cost table at {url}", "give eval.json of an eval on that machine"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        what = f"{url} holds no cost table of this version: {type(error).__name__}"
        raise CorruptError(
            what, "give eval.json of an eval on that machine, or a file of its ~/.cache/eyas/costs"
        ) from error


def overheads_of(
    config: PredictConfig,
    models: Models,
    table: CostTable,
    speculations: Sequence[Speculation],
    requests: Sequence[Request],
) -> dict[str, Overheads]:
    """By way to speculate. None for another machine: what its rounds take besides is not known
    here.
    """
    ways = list(map(str, speculations))
    if config.costs is not None:
        return dict.fromkeys(ways, Overheads())
    return overheads(models, table, ways, requests, config.concurrencies, config.overhead_s)


def recorded(
    models: Models, speculations: Sequence[Speculation], requests: Sequence[Request], track: Track
) -> Iterator[tuple[Recording, list[Speculation]]]:
    """A recording for each number of branches, with those that it is enough for: shallower trees
    are the upper part of it.
    """
    for tree_topk in sorted({one.tree_topk for one in speculations}):
        group = [one for one in speculations if one.tree_topk == tree_topk]
        yield (
            record(models, (max(one.num_draft_steps for one in group), tree_topk), requests, track),
            group,
        )


def blocks(names: Sequence[str], concurrency: int, block: int) -> list[Sequence[str]]:
    """What is asked between two changes of the arm: `block` prompts of each client, or half of that
    for more changes.
    """
    size = max(
        concurrency * -(-block // 2), min(concurrency * block, -(-len(names) // LEAST_BLOCKS))
    )
    return [names[start : start + size] for start in range(0, len(names), size)]


def play(
    theatre: Theatre, parts: Sequence[Sequence[str]], concurrency: int
) -> tuple[dict[str, Played], dict[str, Played]]:
    """The answers without and with the head, by name: the arms take turns, after a few answers that
    are not counted.
    """
    arms: dict[str, dict[str, Played]] = {PLAIN: {}, HEAD: {}}
    for arm in arms:
        theatre.ask(
            f"{arm} before {concurrency}",
            parts[-1][: max(concurrency, 2)],
            concurrency,
            arm == HEAD,
        )
    for number, names in enumerate(parts):
        for arm in arms if number % 2 == 0 else reversed(arms):
            arms[arm].update(
                theatre.ask(f"{arm} at {concurrency}", names, concurrency, arm == HEAD)
            )
    return arms[PLAIN], arms[HEAD]


def compared(plain: Mapping[str, Played], head: Mapping[str, Played]) -> dict[str, Any]:
    """tau of the rounds with trees, medians of TPOT, and their ratio: the speed-up, as `eyas bench`
    has it.

    A figure is None where nothing was drafted, or no answer has two tokens.
    """
    tally = RoundCounts(max((count for one in head.values() for count in one.accepted), default=0))
    for one in head.values():
        tally.add_rounds(one.accepted)
    times = [(plain[name].tpot_ms, one.tpot_ms) for name, one in head.items()]
    pairs = [(before, after) for before, after in times if before is not None and after is not None]
    found: dict[str, Any] = dict.fromkeys(("tau", "tpot_ms_plain", "tpot_ms", "speedup"))
    if tally.rounds:
        found["tau"] = tally.tau
    if pairs:
        found["tpot_ms_plain"], found["tpot_ms"] = (
            statistics.median(one) for one in zip(*pairs, strict=True)
        )
        found["speedup"] = found["tpot_ms_plain"] / found["tpot_ms"]
        timed = [
            one for name, one in head.items() if None not in (plain[name].tpot_ms, one.tpot_ms)
        ]
        found["median_tokens_per_round"] = statistics.median(one.tokens_per_round for one in timed)
    return found


def held_to_tau(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures; in place of a speed-up above tau, `withheld` says why there is none. Raises
    EyasError for what cannot be.

    A round takes as long as a plain one of the same requests at least. One client waits for nothing
    else: its medians are no further apart than the median answer's tokens per round, which may be
    above tau, a mean. With more clients a time per token also holds the prompts of others, unlike
    in both arms; there the law holds for the rounds, and the ratio may miss it.
    """
    tau, speedup, cost = figures["tau"], figures["speedup"], figures["round_cost"]
    if speedup is None:
        return dict(figures)
    is_alone, median = (
        figures["concurrency"] == 1,
        1.0 if tau is None else figures["median_tokens_per_round"],
    )
    said = "no tau, nothing being drafted" if tau is None else f"a tau of {tau:.2f}"
    if (is_alone and speedup > median * ROUNDING) or (cost is not None and cost * ROUNDING < 1):
        rounds = "" if cost is None else f", with rounds that take {cost:.2f} of a plain one"
        raise EyasError(
            f"internal error: a speed-up of {speedup:.2f} is predicted at {said} and {median:.2f} "
            "tokens a round in the median "
            f"answer{rounds}, which cannot be",
            "the costs contradict themselves: delete ~/.cache/eyas/costs, and measure on a machine "
            "that does nothing else",
        )
    if speedup <= (NOISE if tau is None else tau * ROUNDING):
        return dict(figures)
    why = (
        f"half of the answers have {median:.2f} tokens a round or more"
        if is_alone
        else "clients waited unlike for others' prompts"
    )
    return {
        **figures,
        "speedup": None,
        "withheld": f"{speedup:.2f} would be above what can be, with {said}: {why}",
    }
