"""Synthetic rows of a benchmark."""

from __future__ import annotations

from eyas.bench.stream import Reply
from eyas.bench.summary import BenchRow, RequestLoad


def row(
    arm,
    prompt_id,
    tokens=11,
    ttft_ms=100.0,
    tpot_ms=10.0,
    hist=(),
    concurrency=1,
    block=0,
    started_s=0.0,
    **fields,
):
    """fields: the row's category and rate, and the reply's."""
    e2e_ms = ttft_ms + tpot_ms * (tokens - 1)
    category, rate = fields.pop("category", ""), fields.pop("rate", None)
    text, itl_ms = fields.pop("text", "same"), [tpot_ms]
    reply = Reply(ttft_ms, e2e_ms, itl_ms, 5, tokens, "stop", text, list(hist), **fields)
    load = RequestLoad(concurrency, rate)
    return BenchRow(arm, load, block, prompt_id, category, started_s, reply)
