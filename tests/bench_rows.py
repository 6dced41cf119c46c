"""Rows of a benchmark made up by hand, for what counts and shows them."""

from __future__ import annotations

from eyas.artifact import Artifact, identity
from eyas.bench.bench import ArmConfig, BenchConfig
from eyas.bench.stream import Reply
from eyas.bench.summary import BenchRow, RequestLoad, summarise


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


def bench_output(folder, rows):
    """A finished output of `eyas bench` with these rows, as far as eval reads it; its URL."""
    arms = list(dict.fromkeys(one.arm for one in rows))
    output = Artifact(str(folder))
    output.begin(identity("bench", {}, {}))
    summary = {
        **summarise(rows, arms, is_greedy=True),
        "config": BenchConfig(arms=dict.fromkeys(arms, ArmConfig())).model_dump(mode="json"),
        "machine": {"cores": 2},
        "servers": {"plain": {"model": "a"}},
    }
    output.write_json("summary.json", summary)
    output.finish("bench", {}, {}, {})
    return output.url
