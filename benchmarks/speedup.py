"""tau and speed-up of the head over plain decoding: same engine, precision and prompts, interleaved in one run.

    python benchmarks/speedup.py [--quick] [--dtype bfloat16] [--prompts 60] [--data FILE.jsonl]

One request at a time, greedy. Every prompt is decoded plainly and with the head, one after the other, the order turning
with each prompt. A prompt's TPOT is the time of its decode rounds over the tokens they emitted; the speed-up is the ratio
of the two medians over prompts, given with the median of the per-prompt ratios. The last line of stdout is one JSON.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time

import held_out

from eyas import builtin
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request
from eyas.model.checkpoint import read_head
from eyas.model.target import Target


def timed(engine: Engine, request: Request, speculation: bool) -> tuple[list[int], float, list[int]]:
    """Tokens, ms per token after the first, and num_accepted_drafts of every round."""
    engine.add(dataclasses.replace(request, speculation=speculation))
    engine.prefill()  # its token is not counted
    tokens, accepted, started = [], [], time.perf_counter()
    while engine.has_work:
        for update in engine.step():
            tokens += update.token_ids
            if update.num_accepted_drafts is not None:
                accepted.append(update.num_accepted_drafts)
    return tokens, (time.perf_counter() - started) * 1e3 / max(1, len(tokens)), accepted


def main() -> None:
    parser = held_out.arguments(__doc__, prompts=60)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    defaults = EngineConfig()
    for name in ("num_draft_steps", "tree_topk", "num_verify_tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    args = parser.parse_args()
    if args.quick:
        args.prompts = min(args.prompts, 15)
    target = Target.load(builtin.resolve_target(args.target), args.dtype)
    draft = Draft(*read_head(builtin.resolve_head(args.head)), target)
    sizes = {name: getattr(args, name) for name in ("num_draft_steps", "tree_topk", "num_verify_tokens")}
    engine = Engine(target, draft, EngineConfig(max_batch=1, **sizes))
    requests = held_out.requests(args)
    for speculation in (False, True):  # warm-up
        timed(engine, requests[0], speculation)
    tpot: dict[bool, list[float]] = {False: [], True: []}
    accepted: list[int] = []
    same = 0
    for index, request in enumerate(requests):
        outputs, ms = {}, {}
        for speculation in (False, True) if index % 2 else (True, False):
            outputs[speculation], ms[speculation], rounds = timed(engine, request, speculation)
            accepted += rounds
        if all(outputs.values()):  # an answer of the end token alone has no decode round
            tpot[False].append(ms[False])
            tpot[True].append(ms[True])
        same += outputs[False] == outputs[True]
    hist = [accepted.count(drafts) for drafts in range(args.num_draft_steps + 1)]
    plain, eagle = statistics.median(tpot[False]), statistics.median(tpot[True])
    figures = {
        "tau": round(sum((drafts + 1) * count for drafts, count in enumerate(hist)) / sum(hist), 3),
        "accept_hist": hist,
        "tpot_ms_plain": round(plain, 3),
        "tpot_ms_eagle": round(eagle, 3),
        "speedup": round(plain / eagle, 3),
        "speedup_median_of_ratios": round(statistics.median(p / e for p, e in zip(tpot[False], tpot[True], strict=True)), 3),
        "prompts": len(requests),
        "same_outputs": same,
        "dtype": args.dtype,
        **sizes,
        "machine": held_out.machine(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
