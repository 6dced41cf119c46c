"""Which answers become samples, and which samples share a forward.

If a conversation's next prompt begins with the tokens of the turn before, both are one sample with
two spans in its mask: attention is causal, so the features are the same, at a quarter of the cost
for six turns. Templates that rewrite the past (Qwen3 drops thoughts) keep them apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eyas.features.marks import Mark
from eyas.records import Answer

WINDOW = 256  # samples, among which those of a similar length are put together


@dataclass(slots=True)
class SamplePlan:
    """A sample before its features: token_ids int32 [T], loss_mask bool [T]."""

    key: str
    source: str
    prompt_id: str
    token_ids: np.ndarray
    loss_mask: np.ndarray

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class CapturePlan:
    """What is to be captured, in order; answers = samples + merged + dropped."""

    samples: list[SamplePlan] = field(default_factory=list)
    dropped: list[dict[str, Any]] = field(default_factory=list)
    num_answers: int = 0
    num_merged: int = 0

    @property
    def reasons(self) -> dict[str, int]:
        return dict(Counter(row["reason"] for row in self.dropped))


def plan_samples(
    answers: Iterable[Answer], max_length: int, leave_out: Collection[Mark]
) -> CapturePlan:
    """Decide on every answer; the loss mask covers the tokens after the prompt. max_length: the
    target's context.
    """
    plan, of_key = CapturePlan(), Counter[str]()
    for answer in answers:
        plan.num_answers += 1
        token_ids = np.array(answer.prompt_ids + answer.answer_ids, np.int32)
        loss_mask = np.arange(len(token_ids)) >= len(answer.prompt_ids)
        reason: str | None = None
        if answer.marked in leave_out:
            reason = answer.marked
        elif len(token_ids) > max_length:
            reason = "too_long"
        # slot t predicts x_{t+2} after x_{t+1}: both are to be the target's
        elif not (loss_mask[1:-1] & loss_mask[2:]).any():
            reason = "no_supervised_slot"
        if reason is not None:
            row = {"prompt_id": answer.prompt_id, "turn": answer.turn, "reason": reason}
            plan.dropped.append(row)
            continue
        earlier = plan.samples[-1] if plan.samples else None
        if (
            earlier is not None
            and earlier.prompt_id == answer.prompt_id
            and len(earlier) <= len(answer.prompt_ids)
            and np.array_equal(token_ids[: len(earlier)], earlier.token_ids)
        ):
            loss_mask[: len(earlier)] |= earlier.loss_mask
            plan.samples.pop()
            plan.num_merged += 1
        key = f"{answer.prompt_id}/{answer.turn}"
        of_key[key] += 1
        if of_key[key] > 1:  # another conversation with the same prompt
            key = f"{key}+{of_key[key]}"
        plan.samples.append(SamplePlan(key, answer.source, answer.prompt_id, token_ids, loss_mask))
    assert plan.num_answers == len(plan.samples) + plan.num_merged + len(plan.dropped)
    return plan


def forward_batches(samples: Sequence[SamplePlan], batch_tokens: int) -> Iterator[list[SamplePlan]]:
    """Every sample once, sorted by length within a window; at most batch_tokens with padding,
    unless it is one sample.
    """
    for at in range(0, len(samples), WINDOW):
        batch: list[SamplePlan] = []
        for sample in sorted(samples[at : at + WINDOW], key=len):
            if batch and (len(batch) + 1) * len(sample) > batch_tokens:
                yield batch
                batch = []
            batch.append(sample)
        yield batch
