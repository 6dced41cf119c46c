"""The summary of a benchmark's rows: a result per arm and load, and each arm's comparison with the
baseline at the same load, over the prompts that both answered:

    speedup            median TPOT of the baseline / median TPOT of the arm
    throughput_ratio   output tokens per second of the arm / of the baseline
    e2e_speedup        median time of a whole answer of the baseline / of the arm
    identical          greedy only: prompts with the same text, token count and finish reason

The ratios' simultaneous 95 % intervals are over whole turns (blocks), None below LEAST_TURNS. A
speed-up above tau is None, and `withheld` gives the reason; for an arm that hardly drafted tau is
None, and a speed-up beyond noise is withheld too. tau_from is the source of tau: "usage" (a
histogram in every answer), "metrics" (the server's counters) or "timings" (llama.cpp's).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from eyas.bench import metrics
from eyas.bench.server import Counters, rounds_of
from eyas.bench.stream import Reply
from eyas.tau import (
    LEAST_ROWS,
    Interval,
    acceptance_by_position,
    bootstrap,
    intervals_of_turns,
    num_emitted,
    ratio_of_medians,
    ratio_of_sums,
    sum_hists,
    tau_of,
    tokens_per_forward,
)

RARE = 0.3  # an arm whose rounds emit at most this share of its tokens decodes plainly
NOISE = 1.1  # ratio of two equal arms on a busy machine
RATIOS = ("speedup", "throughput_ratio", "e2e_speedup")


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """Requests at a time (a closed loop) or requests per second (an open loop)."""

    concurrency: int = 0  # 0 in an open loop
    rate: float | None = None

    @property
    def value(self) -> float:
        return self.concurrency if self.rate is None else self.rate

    @property
    def num_warm_up(self) -> int:
        """Requests that warm up: one for each slot."""
        return max(self.concurrency, 2)

    def __str__(self) -> str:
        return f"{self.concurrency} at a time" if self.rate is None else f"{self.rate:g} a second"

    def to_json(self) -> dict[str, Any]:
        return {"concurrency": self.concurrency} if self.rate is None else {"rate": self.rate}


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One request and its reply. started_s: from the start of the run."""

    arm: str
    load: RequestLoad
    block: int
    prompt_id: str
    category: str
    started_s: float
    reply: Reply

    @property
    def is_answered(self) -> bool:
        return not self.reply.error

    @property
    def tpot_ms(self) -> float | None:
        """None without an answer, or where the whole text arrived at once."""
        reply = self.reply
        if reply.error or reply.e2e_ms == reply.ttft_ms:
            return None
        return metrics.tpot_ms(reply.ttft_ms, reply.e2e_ms, reply.num_output_tokens)

    @property
    def num_decoded(self) -> int:
        """Tokens after the first, which the prefill emits."""
        return max(self.reply.num_output_tokens - 1, 0)

    def to_json(self) -> dict[str, Any]:
        """All fields, those of load and reply too, and tpot_ms, in one object."""
        row = asdict(self)
        return {**row.pop("load"), **row.pop("reply"), **row, "tpot_ms": self.tpot_ms}


def summarise(
    rows: Sequence[BenchRow],
    arms: Sequence[str],
    is_greedy: bool,
    counted: Mapping[tuple[str, RequestLoad], Counters] | None = None,
    engines: Mapping[str, str] | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """`results`, `comparisons` and `by_task` of a run, closed loops first, by load.

    The first arm is the baseline. counted: servers' counters by arm and load. engines: engine and
    host by arm. by_task leaves out tasks of fewer than LEAST_ROWS prompts.
    """
    counted, engines = counted or {}, engines or {}
    baseline, *others = arms
    results, comparisons, by_task = [], [], []
    loads = {row.load for row in rows}
    for load in sorted(loads, key=lambda one: (one.rate is not None, one.value)):
        own = [row for row in rows if row.load == load]
        of_arm = {arm: [row for row in own if row.arm == arm] for arm in arms}
        rounds = {arm: rounds_of(counted.get((arm, load), {})) for arm in arms}
        results += [
            {"arm": arm, **load.to_json(), **result(of_arm[arm], rounds[arm])} for arm in arms
        ]
        categories = sorted({row.category for row in own})
        for arm in others:
            names = {"arm": arm, "baseline": baseline, **load.to_json()}
            same = engines.get(arm) == engines.get(baseline)
            both = comparison(of_arm[baseline], of_arm[arm], is_greedy, rounds[arm], same)
            comparisons.append({**names, **both})
            for category in categories if len(categories) > 1 else ():
                base, other = (
                    [row for row in of_arm[one] if row.category == category]
                    for one in (baseline, arm)
                )
                if min(len(base), len(other)) >= LEAST_ROWS:
                    both = comparison(base, other, is_greedy, None, same)
                    by_task.append({**names, "category": category, **both})
    return {"results": results, "comparisons": comparisons, "by_task": by_task}


def result(rows: Sequence[BenchRow], rounds: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The figures of one arm at one load. rounds: `rounds_of` the server's counters."""
    rounds = rounds or {}
    answered = [row for row in rows if row.is_answered]
    accept_hist = sum_hists(row.reply.accept_hist for row in answered)
    return {
        "num_requests": len(rows),
        "num_failed": len(rows) - len(answered),
        "errors": dict(Counter(row.reply.error for row in rows if not row.is_answered)),
        "ttft_ms": metrics.spread([row.reply.ttft_ms for row in answered]),
        "tpot_ms": metrics.spread([row.tpot_ms for row in answered if row.tpot_ms is not None]),
        "itl_ms": metrics.spread([gap for row in answered for gap in row.reply.itl_ms]),
        "e2e_ms": metrics.spread([row.reply.e2e_ms for row in answered]),
        "num_prompt_tokens": sum(row.reply.num_prompt_tokens for row in answered),
        "num_output_tokens": sum(row.reply.num_output_tokens for row in answered),
        "counted_by": sorted({row.reply.counted_by or "none" for row in answered}),
        "throughput_tps": _throughput_tps(answered),
        "throughput_tps_interval": _throughput_interval(answered),
        "accept_hist": accept_hist,
        "acceptance_by_position": acceptance_by_position(accept_hist)
        or rounds.get("acceptance_by_position", []),
        "speculation": dict(rounds),
        **_tau(answered, rounds),
    }


def _tau(answered: Sequence[BenchRow], rounds: Mapping[str, Any]) -> dict[str, Any]:
    replies = [row.reply for row in answered]
    num_decoded = sum(row.num_decoded for row in answered)
    names = ("tau", "tau_from", "tau_interval", "tokens_per_forward")
    found: dict[str, Any] = dict.fromkeys(names)
    if any(reply.tells_rounds or reply.accept_hist for reply in replies):
        accept_hist = sum_hists(reply.accept_hist for reply in replies)
        found["tau_from"] = "usage"
        found["tokens_per_forward"] = tokens_per_forward(num_decoded, accept_hist)
        if num_emitted(accept_hist) <= RARE * num_decoded:
            return found
        hists = [reply.accept_hist for reply in replies if sum(reply.accept_hist)]
        of_answers = [(num_emitted(hist), sum(hist)) for hist in hists]
        interval = bootstrap(of_answers, ratio_of_sums)
        return found | {"tau": tau_of(accept_hist), "tau_interval": interval}
    if "tau" in rounds:
        return found | {"tau": rounds["tau"], "tau_from": "metrics"}
    if any(reply.num_accepted_drafts is not None for reply in replies) and num_decoded:
        forwards = [
            (row.num_decoded, row.num_decoded - (row.reply.num_accepted_drafts or 0))
            for row in answered
        ]
        tau = float(ratio_of_sums(np.asarray(forwards)))
        interval = bootstrap(forwards, ratio_of_sums)
        known = {"tau_from": "timings", "tau_interval": interval, "tokens_per_forward": tau}
        return found | {"tau": tau, **known}
    return found


def comparison(
    baseline: Sequence[BenchRow],
    arm: Sequence[BenchRow],
    is_greedy: bool,
    rounds: Mapping[str, Any] | None = None,
    same_engine: bool = True,
) -> dict[str, Any]:
    """One arm against the baseline, prompt by prompt."""
    by_prompt = {row.prompt_id: row for row in baseline if row.is_answered}
    pairs = [
        (by_prompt[row.prompt_id], row)
        for row in arm
        if row.is_answered and row.prompt_id in by_prompt
    ]
    tpots_ms = [
        (base.tpot_ms, row.tpot_ms)
        for base, row in pairs
        if base.tpot_ms is not None and row.tpot_ms is not None
    ]
    e2es_ms = [(base.reply.e2e_ms, row.reply.e2e_ms) for base, row in pairs]
    turns = _turns(baseline, arm, pairs)
    with np.errstate(divide="ignore", invalid="ignore"):  # where no tokens were counted
        of_tpot, of_throughput, of_e2e = intervals_of_turns(
            turns,
            [
                lambda rows: ratio_of_medians(rows[..., :2]),
                lambda rows: ratio_of_sums(rows[..., 4:6]) / ratio_of_sums(rows[..., 6:8]),
                lambda rows: ratio_of_medians(rows[..., 2:4]),
            ],
        )
    parts = ("text", "num_output_tokens", "finish_reason")
    same = [
        all(getattr(base.reply, part) == getattr(row.reply, part) for part in parts)
        for base, row in pairs
    ]
    ours, theirs = (
        _throughput_tps([row for row in side if row.is_answered]) for side in (arm, baseline)
    )
    compared = {
        "num_pairs": len(pairs),
        "num_turns": len(turns),
        "same_engine": same_engine,
        "identical": sum(same) if is_greedy else None,
        "speedup": float(ratio_of_medians(np.asarray(tpots_ms))) if tpots_ms else None,
        "speedup_interval": of_tpot,
        "throughput_ratio": ours / theirs if ours and theirs else None,
        "throughput_ratio_interval": of_throughput,
        "e2e_speedup": float(ratio_of_medians(np.asarray(e2es_ms))) if e2es_ms else None,
        "e2e_speedup_interval": of_e2e,
        **_tau([row for _, row in pairs], rounds or {}),
    }
    if why := impossible(compared):
        return {**compared, "speedup": None, "speedup_interval": None, "withheld": why}
    return {**compared, "withheld": None}


def _turns(
    baseline: Sequence[BenchRow],
    arm: Sequence[BenchRow],
    pairs: Sequence[tuple[BenchRow, BenchRow]],
) -> list[np.ndarray]:
    """The rows [n, 8] of each block: a pair's TPOTs and e2e times, baseline and arm; in the first
    row also tokens and seconds of the arm's turn and of the baseline's. NaN: not known.
    """
    turns = []
    for block in sorted({row.block for _, row in pairs}):
        own = [pair for pair in pairs if pair[1].block == block]
        rows = np.full((len(own), 8), np.nan)
        for values, (base, row) in zip(rows, own, strict=True):
            values[2:4] = base.reply.e2e_ms, row.reply.e2e_ms
            if base.tpot_ms is not None and row.tpot_ms is not None:
                values[:2] = base.tpot_ms, row.tpot_ms
        for place, side in ((4, arm), (6, baseline)):
            answered = [row for row in side if row.block == block and row.is_answered]
            num_tokens = sum(row.reply.num_output_tokens for row in answered)
            rows[0, place : place + 2] = num_tokens or np.nan, _busy_s(answered)
        turns.append(rows)
    return turns


def most_possible(compared: Mapping[str, Any]) -> float | None:
    """The largest possible speed-up by a head: tau, as a round costs at least a plain step; for an
    arm that hardly drafted NOISE times its tokens per forward. None against another engine, or
    where the server reports no rounds.
    """
    if not compared["same_engine"]:
        return None
    if compared["tau"] is not None:
        return float(compared["tau"])
    per_forward = compared["tokens_per_forward"]
    return None if per_forward is None else NOISE * float(per_forward)


def impossible(compared: Mapping[str, Any]) -> str | None:
    """Why a comparison's speed-up is noise of few prompts or of a busy machine; None if it is
    possible.
    """
    speedup, most = compared["speedup"], most_possible(compared)
    if most is None or speedup is None or speedup <= most:
        return None
    bound = f"tau is {most:.2f}" if compared["tau"] is not None else "hardly any token was drafted"
    return (
        f"{speedup:.2f} over {compared['num_pairs']} prompts is impossible, {bound}: "
        "run again with more prompts on a machine that does nothing else"
    )


def _busy_s(answered: Sequence[BenchRow]) -> float:
    begins_s: dict[int, float] = {}
    ends_s: dict[int, float] = {}
    for row in answered:
        end_s = row.started_s + row.reply.e2e_ms / 1000
        begins_s[row.block] = min(begins_s.get(row.block, row.started_s), row.started_s)
        ends_s[row.block] = max(ends_s.get(row.block, end_s), end_s)
    return sum(ends_s.values()) - sum(begins_s.values())


def _throughput_tps(answered: Sequence[BenchRow]) -> float | None:
    num_output_tokens = sum(row.reply.num_output_tokens for row in answered)
    seconds = _busy_s(answered)
    return num_output_tokens / seconds if num_output_tokens and seconds else None


def _throughput_interval(answered: Sequence[BenchRow]) -> Interval | None:
    """Bootstrap over requests: their tokens / seconds, times the mean number of running ones."""
    requests = [(row.reply.num_output_tokens, row.reply.e2e_ms / 1000) for row in answered]
    interval = bootstrap(requests, ratio_of_sums)
    seconds = _busy_s(answered)
    if interval is None or not seconds or not any(tokens for tokens, _ in requests):
        return None
    at_once = sum(e2e_s for _, e2e_s in requests) / seconds
    return interval[0] * at_once, interval[1] * at_once
