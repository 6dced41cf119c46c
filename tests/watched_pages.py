"""Pages of /metrics for tests of the watch: vLLM's recorded, SGLang's written."""

from __future__ import annotations

import json
from pathlib import Path

STREAMS = Path(__file__).with_name("streams")


def vllm_pages():
    """After 40 dialogues, and after further summaries: a live vLLM 0.32.0 (tests/streams)."""
    lines = json.loads((STREAMS / "vllm_watched.json").read_text())["lines"]
    both = (
        [one] * 2 if isinstance(one, str) else [f"{one[0]} {at}" for at in one[1:]] for one in lines
    )
    return ["".join(f"{line}\n" for line in page) for page in zip(*both, strict=True)]


def sglang_page(requests, rounds, tokens, steps=4, num_draft_tokens=5, waiting=0):
    """Written after the source of SGLang 0.5.23 (sglang/srt/observability/metrics_collector.py:
    names, labels, kinds; tokenizer_manager.py: counted as an answer is over), and not recorded: its
    server did not run here. Its TokenizerMetricsCollector, run alone on 10 made-up answers, writes
    the counters below to the letter; the gauges are from reading. Two schedulers (dp_rank), as with
    data parallelism. `num_draft_tokens` counts the root.
    """
    one, streamed = 'engine_type="unified",model_name="m"', requests // 2
    return f"""\
# HELP sglang:spec_accept_length Mean acceptance length of speculative decoding.
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{{{one},tp_rank="0",dp_rank="0"}} 1.75
# TYPE sglang:spec_num_steps gauge
sglang:spec_num_steps{{{one},tp_rank="0",dp_rank="0"}} {steps}.0
sglang:spec_num_steps{{{one},tp_rank="0",dp_rank="1"}} {steps}.0
# TYPE sglang:spec_num_draft_tokens gauge
sglang:spec_num_draft_tokens{{{one},tp_rank="0",dp_rank="0"}} {num_draft_tokens}.0
sglang:spec_num_draft_tokens{{{one},tp_rank="0",dp_rank="1"}} {num_draft_tokens}.0
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{{{one},tp_rank="0",dp_rank="0"}} 3.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{{{one},tp_rank="0",dp_rank="0"}} {waiting}.0
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{{{one},tp_rank="0",dp_rank="0"}} 400000.0
# HELP sglang:generation_tokens_total Number of generation tokens processed.
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{{one},is_streaming="true"}} {tokens // 2}.0
sglang:generation_tokens_total{{{one},is_streaming="false"}} {tokens - tokens // 2}.0
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total{{{one}}} {rounds}.0
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{{{one},is_streaming="true"}} {streamed}.0
sglang:num_requests_total{{{one},is_streaming="false"}} {requests - streamed}.0
"""
