"""Whether a run that continues from a head may export the new one: decision.json, and exit code 3
where it may not.

Two conditions, each on conversations that both heads answered and neither learned from, paired by
prompt, with a bootstrap interval (`train.held_out`):

    new traffic   tau through the engine is higher: the interval's lower end is above 0
    old mix       tau does not fall by more than `train.start.keep_tolerance` (checked by train)

So too few prompts to tell refuse a head: no evidence is no improvement.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from eyas.artifact import Artifact
from eyas.errors import MismatchError, WorseHeadError
from eyas.train.held_out import HeadComparison, compare_heads
from eyas.train.trainer import KEEP

DECISION = "decision.json"


def on_new_traffic(before: Artifact, after: Artifact) -> HeadComparison:
    """Two outputs of eval on the same prompts, in the first tree at the first temperature.

    Raises MismatchError for other prompts, or an eval.json of a version that kept no prompts.
    """
    counts = [
        (one.read_json("eval.json").get("trees") or [{}])[0].get("by_prompt")
        for one in (before, after)
    ]
    old, new = counts
    if not old or not new or old.keys() != new.keys():
        raise MismatchError(
            f"{before.url} and {after.url} do not hold counts of the same prompts",
            "delete both folders and run again",
        )
    return compare_heads(*(torch.tensor([one[id] for id in old]) for one in (old, new)))


def write_decision(root: str, **figures: Any) -> None:
    """decision.json: what was measured, and `exported` or the reason against it."""
    Artifact(root).write_json(DECISION, figures)


def refused_by_old_mix(root: str, head: Artifact, refusal: WorseHeadError) -> None:
    """Write the decision of a run whose training refused its head by the old mix."""
    kept = head.read_json(KEEP) if head.exists(KEEP) else None
    write_decision(root, exported=False, why=refusal.what, old_mix=kept, new_traffic=None)
    print(json.dumps({"exported": False, "why": refusal.what}))


def require_better(
    root: str, before: Artifact, after: Artifact, old_mix: dict[str, Any] | None
) -> HeadComparison:
    """Write the decision. Raises WorseHeadError unless tau is shown to be higher on the new
    traffic.
    """
    comparison = on_new_traffic(before, after)
    told = comparison.line("the new traffic")
    is_better = comparison.interval[0] > 0
    why = told if is_better else f"the new head is not shown to be better: {told}"
    figures = {"old_mix": old_mix, "new_traffic": comparison.to_json(0.0)}
    write_decision(root, exported=is_better, why=why, **figures)
    if is_better:
        return comparison
    print(json.dumps({"exported": False, "why": why}))
    remedy = (
        "the old head stays; if more was expected, take more traffic or train for longer "
        "(train.epochs)"
    )
    if comparison.change > 0:
        remedy = "take more prompts to measure with (capture.held_out_share, eval.num_prompts)"
    raise WorseHeadError(why, remedy)
