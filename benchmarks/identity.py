"""Greedy outputs with and without speculation, token by token, in fp32: are they the same?

    python benchmarks/identity.py [--quick] [--prompts 200] [--data FILE.jsonl]

Half of the speculating requests run in mixed batches of up to 4, half alone; every one is held against plain decoding
alone. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json

import held_out
import torch

from eyas import builtin
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request
from eyas.model.checkpoint import read_head
from eyas.model.target import Target


def decode(engine: Engine, requests: list[Request], speculation: bool) -> dict[str, list[int]]:
    asked = [dataclasses.replace(request, speculation=speculation) for request in requests]
    return {result.request_id: result.token_ids for result in engine.run(asked)}


def main() -> None:
    args = held_out.arguments(__doc__, prompts=200).parse_args()
    if args.quick:
        args.prompts = min(args.prompts, 20)
    target = Target.load(builtin.resolve_target(args.target), "float32")
    draft = Draft(*read_head(builtin.resolve_head(args.head)), target)
    alone, batched = Engine(target, draft, EngineConfig(max_batch=1)), Engine(target, draft, EngineConfig(max_batch=4))
    requests = held_out.requests(args)
    half = len(requests) // 2
    plain = decode(alone, requests, speculation=False)
    eagle = decode(alone, requests[:half], True) | decode(batched, requests[half:], True)
    differing = [request for request in requests if plain[request.id] != eagle[request.id]]
    for request in differing:
        report_difference(target, request, plain[request.id], eagle[request.id])
    figures = {
        "prompts": len(requests),
        "tokens": sum(map(len, plain.values())),
        "identical": len(requests) - len(differing),
        "dtype": "float32",
        "machine": held_out.machine(),
    }
    print(json.dumps(figures))


def report_difference(target: Target, request: Request, plain: list[int], eagle: list[int]) -> None:
    """Where two outputs part, and how far apart the two best logits were there: a tie of rounding, or a fault?"""
    place = next(i for i, (a, b) in enumerate(zip(plain, eagle, strict=False)) if a != b)
    logits_V = target.logits(torch.tensor([[*request.prompt_ids, *plain[:place]]]))[0, -1]
    best, second = logits_V.topk(2).values.tolist()
    gap = best - second
    parted = f"plain {plain[place]}, eagle {eagle[place]}"
    print(f"prompt {request.id} parts at token {place}: {parted}; gap of the best two {gap:.2e}")


if __name__ == "__main__":
    main()
