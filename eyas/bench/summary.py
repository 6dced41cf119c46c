"""What the rows of a benchmark say: one result per arm and concurrency, one comparison per pair of arms. Pure functions.

A comparison is of one arm with the baseline at the same concurrency in the same run, over the prompts that both answered:

    speedup            median tpot_ms of the baseline / median tpot_ms of the arm
    paired_speedup     median over prompts of (tpot_ms of the baseline / tpot_ms of the arm), with its 95 % interval
    round_cost         what a round of the arm costs in tokens of the baseline: median over prompts of tau / speed-up
    throughput_ratio   output tokens per second of the arm / of the baseline
    identical          greedy only: prompts whose text, token count and finish reason are the same in both arms
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eyas.bench import metrics
from eyas.bench.client import Reply
from eyas.errors import EyasError

NOISE = 0.1  # by how much the timing of a busy machine may flatter a ratio


@dataclass(frozen=True, slots=True)
class Row:
    """One request: where in the run it stood and what came back. started_s counts from the beginning of the run."""

    arm: str
    concurrency: int
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
        """None without an answer, or where the whole text came at once: nothing can be timed then."""
        reply = self.reply
        if reply.error or reply.e2e_ms == reply.ttft_ms:
            return None
        return metrics.tpot_ms(reply.ttft_ms, reply.e2e_ms, reply.num_output_tokens)

    def to_json(self) -> dict[str, Any]:
        """The row with its reply's fields beside its own, and tpot_ms."""
        row = asdict(self)
        reply = row.pop("reply")
        return {**row, **reply, "tpot_ms": self.tpot_ms}


def summarise(rows: Sequence[Row], arms: Sequence[str], is_greedy: bool) -> dict[str, Any]:
    """Results and comparisons of a run; the first arm is the baseline. Raises EyasError for an impossible figure."""
    results, comparisons = [], []
    for concurrency in sorted({row.concurrency for row in rows}):
        of_arm = {arm: [row for row in rows if (row.arm, row.concurrency) == (arm, concurrency)] for arm in arms}
        results += [{"arm": arm, "concurrency": concurrency, **result(of_arm[arm])} for arm in arms]
        for arm in arms[1:]:
            compared = comparison(of_arm[arms[0]], of_arm[arm], is_greedy)
            comparisons.append({"arm": arm, "baseline": arms[0], "concurrency": concurrency, **compared})
    return {"results": results, "comparisons": comparisons}


def result(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures of one arm at one concurrency."""
    answered = [row for row in rows if row.is_answered]
    accept_hist = metrics.sum_hists(row.reply.accept_hist for row in answered)
    return {
        "num_requests": len(rows),
        "num_failed": len(rows) - len(answered),
        "errors": dict(Counter(row.reply.error for row in rows if not row.is_answered)),
        "finish_reasons": dict(Counter(row.reply.finish_reason for row in answered)),
        "ttft_ms": metrics.spread([row.reply.ttft_ms for row in answered]),
        "tpot_ms": metrics.spread([row.tpot_ms for row in answered if row.tpot_ms is not None]),
        "itl_ms": metrics.spread([gap for row in answered for gap in row.reply.itl_ms]),
        "e2e_ms": metrics.spread([row.reply.e2e_ms for row in answered]),
        "num_output_tokens": sum(row.reply.num_output_tokens for row in answered),
        "throughput_tps": _throughput_tps(rows),
        "accept_hist": accept_hist,
        "acceptance_by_position": metrics.acceptance_by_position(accept_hist),
        "tau": metrics.tau(accept_hist),
    }


def comparison(baseline: Sequence[Row], arm: Sequence[Row], is_greedy: bool) -> dict[str, Any]:
    """One arm against the baseline, prompt by prompt. Raises EyasError for a speed-up that cannot be."""
    by_prompt = {row.prompt_id: row for row in baseline if row.is_answered}
    pairs = [(by_prompt[row.prompt_id], row) for row in arm if row.is_answered and row.prompt_id in by_prompt]
    timed = [(base.tpot_ms, row.tpot_ms, row) for base, row in pairs if base.tpot_ms is not None and row.tpot_ms is not None]
    medians_ms = [metrics.median(tpots_ms) for tpots_ms in ([one[0] for one in timed], [one[1] for one in timed]) if tpots_ms]
    taus = [(base, own, _decode_tau(row)) for base, own, row in timed]
    compared = {
        "num_pairs": len(pairs),
        "identical": sum(_is_same(*pair) for pair in pairs) if is_greedy else None,
        "speedup": _ratio(*medians_ms) if medians_ms else None,
        "paired_speedup": metrics.spread([base / own for base, own, _ in timed]),
        "round_cost": metrics.spread([tau * own / base for base, own, tau in taus if tau is not None]),
        "throughput_ratio": _ratio(_throughput_tps(arm), _throughput_tps(baseline)),
    }
    check_possible(compared)
    return compared


def check_possible(compared: Mapping[str, Any]) -> None:
    """A round costs at least a plain step, so no answer gets faster than its tau. Raises EyasError when the median one did.

    It takes 6 prompts for an interval of the median; below that, nothing is certain enough to be impossible.
    """
    cost = compared["round_cost"]
    if cost is not None and cost["high"] is not None and cost["high"] < 1 - NOISE:
        raise EyasError(
            f"internal error: a speed-up of {compared['speedup']:.2f} was measured with rounds that cost {cost['median']:.2f} "
            "of a plain step, so it is above tau, which cannot be",
            "the arms were not measured alike: see rows.jsonl; run again on a machine that does nothing else",
        )


def _decode_tau(row: Row) -> float | None:
    """Tokens per round of one answer, its first token aside; None where the server tells of no rounds."""
    rounds = sum(row.reply.accept_hist)
    return (row.reply.num_output_tokens - 1) / rounds if rounds else None


def _is_same(base: Row, row: Row) -> bool:
    one, other = base.reply, row.reply
    return (one.text, one.num_output_tokens, one.finish_reason) == (other.text, other.num_output_tokens, other.finish_reason)


def _throughput_tps(rows: Sequence[Row]) -> float | None:
    """Output tokens per second while the arm's blocks ran: each block from its first request to its last answer."""
    blocks: dict[int, list[Row]] = {}
    for row in rows:
        if row.is_answered:
            blocks.setdefault(row.block, []).append(row)
    ends_s = (max(row.started_s + row.reply.e2e_ms / 1000 for row in block) for block in blocks.values())
    begins_s = (min(row.started_s for row in block) for block in blocks.values())
    num_output_tokens = sum(row.reply.num_output_tokens for block in blocks.values() for row in block)
    return metrics.throughput_tps(num_output_tokens, sum(ends_s) - sum(begins_s)) if blocks else None


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over and under else None
