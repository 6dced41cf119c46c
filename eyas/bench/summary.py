"""What the rows of a benchmark say: one result per arm and load, one comparison per pair of arms.
Pure functions.

A comparison is of one arm with the baseline at the same load in the same run, over the prompts that
both answered:

    speedup            median TPOT of the baseline / median TPOT of the arm
    paired_speedup     median over prompts of (TPOT of the baseline / TPOT of the arm)
    round_cost         of a round, in tokens of the baseline: median over prompts of tau / speed-up
    throughput_ratio   output tokens per second of the arm / of the baseline
    e2e_speedup        median time of a whole answer of the baseline / of the arm
    identical          greedy only: prompts with the same text, token count and finish reason

The intervals of these three ratios hold together with 95 %: a comparison is one statement. They
come from whole turns (blocks) of the arms, and are None below LEAST_TURNS of them.

No speed-up above tau is reported: it is None, and `withheld` says why. An arm that hardly drafted
has no tau, and its speed-up is 1 and noise: more is withheld.

tau is tokens a round; tau_from is its source: "usage" (every answer's histogram), "metrics" (the
server's counters), "timings" (llama.cpp's counts of every answer), or "chunks": tokens per chunk of
the stream, which is tau only where a server sends each round as one chunk, and is never compared
with a speed-up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
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

RARE = 0.3  # of an arm's tokens: if no more came from rounds, it decoded plain
NOISE = 1.1  # how far apart two arms that decode alike may be on a busy machine
NOT_ALIKE = "the arms were not measured alike, run again on a machine that does nothing else"
SOURCES = ("usage", "metrics", "timings")  # of a tau that is more than a guess


@dataclass(frozen=True, slots=True)
class RequestLoad:
    """What a server is under: so many requests at a time (a closed loop), or so many a second (an
    open one).
    """

    concurrency: int = 0
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
    """One request: where in the run it stood and what came back. started_s counts from the
    beginning of the run.
    """

    arm: str
    concurrency: int  # 0 in an open loop
    block: int
    prompt_id: str
    category: str
    started_s: float
    reply: Reply
    rate: float | None = None

    @property
    def load(self) -> RequestLoad:
        return RequestLoad(self.concurrency, self.rate)

    @property
    def is_answered(self) -> bool:
        return not self.reply.error

    @property
    def tpot_ms(self) -> float | None:
        """None without an answer, or where the whole text came at once and has no time."""
        reply = self.reply
        if reply.error or reply.e2e_ms == reply.ttft_ms:
            return None
        return metrics.tpot_ms(reply.ttft_ms, reply.e2e_ms, reply.num_output_tokens)

    @property
    def num_decoded(self) -> int:
        """Tokens after the first, which comes with the prompt."""
        return max(self.reply.num_output_tokens - 1, 0)

    def to_json(self) -> dict[str, Any]:
        """The row with its reply's fields beside its own, and tpot_ms."""
        row = asdict(self)
        reply = row.pop("reply")
        return {**row, **reply, "tpot_ms": self.tpot_ms}


@dataclass(frozen=True, slots=True)
class RunContext:
    """A run without its rows; the first arm is the baseline.

    counted: the servers' counters of each arm and load. engines: engine and host of each arm.
    """

    arms: Sequence[str]
    is_greedy: bool
    counted: Mapping[tuple[str, RequestLoad], Counters] = field(default_factory=dict)
    engines: Mapping[str, str] = field(default_factory=dict)


def summarise(rows: Sequence[BenchRow], run: RunContext) -> dict[str, Any]:
    """Results and comparisons of a run.

    results, comparisons and by_task are of closed loops, by concurrency; open_loop has the same
    three by rate. by_task leaves out tasks of fewer than LEAST_ROWS prompts.
    """
    closed = [row for row in rows if row.rate is None]
    opened = [row for row in rows if row.rate is not None]
    return {**_summary(closed, run), "open_loop": _summary(opened, run)}


def _summary(rows: Sequence[BenchRow], run: RunContext) -> dict[str, list[dict[str, Any]]]:
    baseline, *others = run.arms
    results, comparisons, by_task = [], [], []
    for load in sorted({row.load for row in rows}, key=lambda one: one.value):
        own = [row for row in rows if row.load == load]
        of_arm = {arm: [row for row in own if row.arm == arm] for arm in run.arms}
        rounds = {arm: rounds_of(run.counted.get((arm, load), {})) for arm in run.arms}
        results += [
            {"arm": arm, **load.to_json(), **result(of_arm[arm], rounds[arm])} for arm in run.arms
        ]
        for arm in others:
            names = {"arm": arm, "baseline": baseline, **load.to_json()}
            same = run.engines.get(arm) == run.engines.get(baseline)
            both = comparison(of_arm[baseline], of_arm[arm], run.is_greedy, rounds[arm], same)
            comparisons.append({**names, **both})
            for category in _categories(own):
                base, other = (
                    [row for row in of_arm[one] if row.category == category]
                    for one in (baseline, arm)
                )
                if min(len(base), len(other)) >= LEAST_ROWS:
                    both = comparison(base, other, run.is_greedy, None, same)
                    by_task.append({**names, "category": category, **both})
    return {"results": results, "comparisons": comparisons, "by_task": by_task}


def _categories(rows: Sequence[BenchRow]) -> list[str]:
    """The tasks in a run of more than one, in order; a run of one has no table by task."""
    found = sorted({row.category for row in rows})
    return found if len(found) > 1 else []


def result(rows: Sequence[BenchRow], rounds: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The figures of one arm at one load. rounds: `rounds_of` the server's counters."""
    rounds = rounds or {}
    answered = [row for row in rows if row.is_answered]
    accept_hist = sum_hists(row.reply.accept_hist for row in answered)
    chunks = [
        (row.reply.num_output_tokens, row.reply.num_chunks)
        for row in answered
        if row.reply.num_chunks
    ]
    seconds = _busy_s(answered)
    return {
        "num_requests": len(rows),
        "num_failed": len(rows) - len(answered),
        "errors": dict(Counter(row.reply.error for row in rows if not row.is_answered)),
        "finish_reasons": dict(Counter(row.reply.finish_reason for row in answered)),
        "ttft_ms": metrics.spread([row.reply.ttft_ms for row in answered]),
        "tpot_ms": metrics.spread([row.tpot_ms for row in answered if row.tpot_ms is not None]),
        "itl_ms": metrics.spread([gap for row in answered for gap in row.reply.itl_ms]),
        "e2e_ms": metrics.spread([row.reply.e2e_ms for row in answered]),
        "num_prompt_tokens": sum(row.reply.num_prompt_tokens for row in answered),
        "num_output_tokens": sum(row.reply.num_output_tokens for row in answered),
        "counted_by": sorted({row.reply.counted_by or "none" for row in answered}),
        "throughput_tps": _throughput_tps(rows),
        "throughput_interval": _throughput_interval(answered),
        "requests_per_s": len(answered) / seconds if seconds else None,
        "tokens_per_chunk": float(ratio_of_sums(_table(chunks))) if chunks else None,
        "accept_hist": accept_hist,
        "acceptance_by_position": acceptance_by_position(accept_hist)
        or rounds.get("acceptance_by_position", []),
        "speculation": dict(rounds),
        **_tau(answered, rounds),
    }


def _tau(answered: Sequence[BenchRow], rounds: Mapping[str, Any]) -> dict[str, Any]:
    """tau, its source and interval, and tokens per forward of the target, as far as they are known.

    No tau for an arm that decoded plain but for a few rounds: they say nothing of its speed.
    """
    replies = [row.reply for row in answered]
    num_decoded = sum(row.num_decoded for row in answered)
    found: dict[str, Any] = {
        "tau": None,
        "tau_from": None,
        "tau_interval": None,
        "tokens_per_forward": None,
        "num_plain_steps": 0,
    }
    if any(reply.tells_rounds or reply.accept_hist for reply in replies):
        accept_hist = sum_hists(reply.accept_hist for reply in replies)
        emitted = num_emitted(accept_hist)
        found |= {
            "tau_from": "usage",
            "tokens_per_forward": tokens_per_forward(num_decoded, accept_hist),
            "num_plain_steps": max(num_decoded - emitted, 0),
        }
        if emitted <= RARE * num_decoded:
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
        tau = float(ratio_of_sums(_table(forwards)))
        interval = bootstrap(forwards, ratio_of_sums)
        known = {"tau_from": "timings", "tau_interval": interval, "tokens_per_forward": tau}
        return found | {"tau": tau, **known}
    chunks = [
        (row.num_decoded, row.reply.num_chunks - 1)
        for row in answered
        if row.reply.num_chunks > 1 and row.num_decoded
    ]
    if chunks:
        return found | {"tau": float(ratio_of_sums(_table(chunks))), "tau_from": "chunks"}
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
    timed = [
        (base.tpot_ms, row.tpot_ms, row)
        for base, row in pairs
        if base.tpot_ms is not None and row.tpot_ms is not None
    ]
    tpots_ms = [(base, own) for base, own, _ in timed]
    e2es_ms = [(base.reply.e2e_ms, row.reply.e2e_ms) for base, row in pairs]
    turns = _turns(baseline, arm, pairs)
    of_tpot, of_e2e, of_throughput = intervals_of_turns(
        turns,
        [
            lambda rows: ratio_of_medians(rows[..., :2]),
            lambda rows: ratio_of_medians(rows[..., 2:4]),
            _ratio_of_rates,
        ],
    )
    found = _tau([row for _, row in pairs], rounds or {})
    # tokens for each forward of the target in an answer, over the speed-up of that answer
    costs = [
        tau * own / base
        for base, own, row in timed
        if sum(row.reply.accept_hist)
        and (tau := tokens_per_forward(row.num_decoded, row.reply.accept_hist))
    ]
    ours, theirs = _throughput_tps(arm), _throughput_tps(baseline)
    compared = {
        "num_pairs": len(pairs),
        "num_turns": len(turns),
        "same_engine": same_engine,
        "identical": sum(_is_same(*pair) for pair in pairs) if is_greedy else None,
        "tpot_ms_baseline": metrics.median([base for base, _ in tpots_ms]) if tpots_ms else None,
        "tpot_ms": metrics.median([own for _, own in tpots_ms]) if tpots_ms else None,
        "speedup": float(ratio_of_medians(_table(tpots_ms))) if tpots_ms else None,
        "speedup_interval": of_tpot,
        "withheld": None,
        "paired_speedup": metrics.spread([base / own for base, own in tpots_ms]),
        "round_cost": metrics.spread(costs) if found["tau"] is not None else None,
        "throughput_ratio": ours / theirs if ours and theirs else None,
        "throughput_ratio_interval": of_throughput,
        "e2e_speedup": float(ratio_of_medians(_table(e2es_ms))) if e2es_ms else None,
        "e2e_speedup_interval": of_e2e,
        **found,
    }
    return _withheld(compared)


def _turns(
    baseline: Sequence[BenchRow],
    arm: Sequence[BenchRow],
    pairs: Sequence[tuple[BenchRow, BenchRow]],
) -> list[np.ndarray]:
    """Of each block that both arms answered something of, its rows [n, 8]: TPOT and e2e of a pair,
    baseline and arm; in the first row also tokens and seconds of the arm's turn, and of the
    baseline's. NaN for what is not known.
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


def _ratio_of_rates(table: np.ndarray) -> np.ndarray:
    """[..., n, 8] of `_turns` -> [...]: tokens per second of the arm over those of the baseline."""
    with np.errstate(divide="ignore", invalid="ignore"):  # where no tokens were counted
        return np.asarray(ratio_of_sums(table[..., 4:6]) / ratio_of_sums(table[..., 6:8]))


def _withheld(compared: dict[str, Any]) -> dict[str, Any]:
    """Without a speed-up that no head gives; `withheld` says why."""
    why = impossible(compared)
    if why is None:
        return compared
    nothing = dict.fromkeys(("speedup", "speedup_interval", "paired_speedup"))
    return {**compared, **nothing, "withheld": why}


def most_possible(compared: Mapping[str, Any]) -> float | None:
    """The largest possible speed-up: tau; of an arm that hardly drafted, its tokens per forward and
    noise. None where no law holds: against another engine, or where the server tells no rounds.
    """
    if not compared["same_engine"] or compared["tau_from"] not in SOURCES:
        return None
    if compared["tau"] is not None:
        return float(compared["tau"])
    forward = compared["tokens_per_forward"]
    return None if forward is None else NOISE * float(forward)


def impossible(compared: Mapping[str, Any]) -> str | None:
    """Why no head gives the speed-up of a comparison; None where one may.

    A round costs at least a plain step, so no speed-up is above tau, and no median round costs,
    with certainty, less than a plain token. What is measured so all the same is noise of a few
    prompts, or a machine that was busy with something else during one of the arms.
    """
    speedup, interval, tau, cost, most = (
        compared["speedup"],
        compared["speedup_interval"],
        compared["tau"],
        compared["round_cost"],
        most_possible(compared),
    )
    if most is None or speedup is None:
        return None
    around = "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"
    measured = f"{speedup:.2f}{around} over {compared['num_pairs']} prompts"
    if speedup > most:
        hardly = f"more than {most:.2f} is impossible, hardly any token was drafted"
        held = hardly if tau is None else f"tau is {most:.2f}"
        if tau is None or interval is None or interval[0] <= most:
            return f"{measured} is noise: {held}"
        return f"{measured} is impossible, since {held}: {NOT_ALIKE}"
    if tau is not None and cost is not None and cost["high"] is not None and cost["high"] < 1:
        return (
            f"{measured} is impossible, since its rounds cost {cost['median']:.2f} of a plain "
            f"step: {NOT_ALIKE}"
        )
    return None


def _is_same(base: BenchRow, row: BenchRow) -> bool:
    names = ("text", "num_output_tokens", "finish_reason")
    return all(getattr(base.reply, name) == getattr(row.reply, name) for name in names)


def _busy_s(answered: Sequence[BenchRow]) -> float:
    """Seconds while the arm's blocks ran: each block from its first request to its last answer."""
    blocks: dict[int, list[BenchRow]] = {}
    for row in answered:
        blocks.setdefault(row.block, []).append(row)
    ends_s = (
        max(row.started_s + row.reply.e2e_ms / 1000 for row in block) for block in blocks.values()
    )
    begins_s = (min(row.started_s for row in block) for block in blocks.values())
    return sum(ends_s) - sum(begins_s)


def _throughput_tps(rows: Sequence[BenchRow]) -> float | None:
    """Output tokens per second while the arm's blocks ran; None where none were counted."""
    answered = [row for row in rows if row.is_answered]
    num_output_tokens, seconds = (
        sum(row.reply.num_output_tokens for row in answered),
        _busy_s(answered),
    )
    return num_output_tokens / seconds if num_output_tokens and seconds else None


def _throughput_interval(answered: Sequence[BenchRow]) -> Interval | None:
    """Bootstrap over requests: tokens of a request over its seconds, times the requests that were
    under way on average.
    """
    requests = [(row.reply.num_output_tokens, row.reply.e2e_ms / 1000) for row in answered]
    interval = bootstrap(requests, ratio_of_sums)
    seconds = _busy_s(answered)
    if interval is None or not seconds or not any(tokens for tokens, _ in requests):
        return None
    under_way = sum(e2e_s for _, e2e_s in requests) / seconds
    return interval[0] * under_way, interval[1] * under_way


def _table(rows: Sequence[tuple[float, float]]) -> np.ndarray:
    return np.asarray(rows, float)
