"""Which answers become samples of features, and which samples are computed together. Pure functions
over arrays of tokens.

Where a conversation's next prompt begins with the very tokens of the turn before, prompt and
answer, the two are one sample with two spans in its mask: attention is causal, so the features are
the same, and dialogues of six turns cost a quarter of the time and of the disk. Where a template
rewrites the past (Qwen3 drops earlier thoughts) they stay apart.

Samples that begin alike, by a system prompt or by examples, are computed together: their beginning
once, their ends beside each other.

    [s s s s s s][a a a]
    [s s s s s s][b b b b b]      one forward of the 6 shared tokens, one of 3 x 5 behind them
    [s s s s s s][c c c c]

Letters: T tokens of a sample.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from eyas.features.marks import Mark
from eyas.records import Answer

# Samples among which those of a similar length, or with a common beginning, are put together.
WINDOW = 256
SHARED_STEP = 16  # tokens: a page of our own decoder's cache, so that shared pages are whole
LEAST_SAVED = 512  # tokens that are not computed again: less does not pay for a forward more


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
    """What is to be captured, in the answers' order, and what became of the other answers.

    answers = samples + merged + dropped.
    """

    samples: list[SamplePlan] = field(default_factory=list)
    dropped: list[dict[str, Any]] = field(default_factory=list)
    num_answers: int = 0
    num_merged: int = 0

    @property
    def reasons(self) -> dict[str, int]:
        """Of dropped answers, counted."""
        return dict(Counter(row["reason"] for row in self.dropped))


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Samples of one forward; their first `num_shared` tokens are the same and computed once."""

    samples: list[SamplePlan]
    num_shared: int = 0

    @property
    def prefix(self) -> np.ndarray:
        """The shared tokens, int32."""
        return self.samples[0].token_ids[: self.num_shared]


def plan_samples(
    answers: Iterable[Answer], max_length: int, leave_out: Collection[Mark]
) -> CapturePlan:
    """Decide on every answer; what lies behind a prompt carries loss. max_length: the target's
    context in tokens.
    """
    plan, of_key = CapturePlan(), Counter[str]()
    for answer in answers:
        plan.num_answers += 1
        token_ids = np.array(answer.prompt_ids + answer.answer_ids, np.int32)
        loss_mask = np.arange(len(token_ids)) >= len(answer.prompt_ids)
        reason = None
        if answer.marked in leave_out:
            reason = answer.marked
        elif len(token_ids) > max_length:
            reason = "too_long"
        # slot t predicts x_{t+2} after x_{t+1}: both are to be the target's
        elif not (loss_mask[1:-1] & loss_mask[2:]).any():
            reason = "no_supervised_slot"
        if reason is not None:
            where = {"prompt_id": answer.prompt_id, "turn": answer.turn}
            plan.dropped.append({**where, "reason": reason})
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


def forward_batches(
    samples: Sequence[SamplePlan], batch_tokens: int, shares: bool = True
) -> Iterator[ForwardBatch]:
    """Every sample once, within each window those of a common beginning or a similar length
    together.

    A batch has batch_tokens at most, padding included and shared tokens not, unless it is one
    sample.
    """
    for at in range(0, len(samples), WINDOW):
        here = samples[at : at + WINDOW]
        for num_shared, group in shared_groups(here) if shares else [(0, list(here))]:
            for batch in of_similar_lengths(group, batch_tokens, num_shared):
                yield ForwardBatch(batch, num_shared)


def of_similar_lengths(
    samples: Sequence[SamplePlan], batch_tokens: int, num_shared: int
) -> Iterator[list[SamplePlan]]:
    """Samples of similar lengths together, batch_tokens at most behind the shared tokens."""
    batch: list[SamplePlan] = []
    for sample in sorted(samples, key=len):
        if batch and (len(batch) + 1) * (len(sample) - num_shared) > batch_tokens:
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch


def shared_groups(samples: Sequence[SamplePlan]) -> list[tuple[int, list[SamplePlan]]]:
    """Samples by their common beginnings, such that as few tokens as possible are computed: (the
    beginning's length, its samples in the order given). The first group, of length 0, has those
    for which no beginning pays. Each sample keeps a token of its own.
    """
    order = sorted(
        range(len(samples)), key=lambda number: samples[number].token_ids.astype(">i4").tobytes()
    )
    common = [_common(samples[one], samples[other]) for one, other in itertools.pairwise(order)]
    found = _best(common, 0, len(order))[1]
    grouped = {place for _, places in found for place in places}
    alone = [place for place in range(len(order)) if place not in grouped]
    return [
        (shared, [samples[number] for number in sorted(order[at] for at in places)])
        for shared, places in [(0, alone), *found]
    ]


def _common(one: SamplePlan, other: SamplePlan) -> int:
    """How many first tokens two samples share, in whole steps, one token of each left out."""
    length = min(len(one), len(other)) - 1
    differs = np.flatnonzero(one.token_ids[:length] != other.token_ids[:length])
    return (int(differs[0]) if len(differs) else length) // SHARED_STEP * SHARED_STEP


def _best(common: list[int], low: int, high: int) -> tuple[int, list[tuple[int, list[int]]]]:
    """Tokens saved at most among the sorted samples low .. high - 1, and the groups that save them:
    (shared, its places).

    common[i]: what samples i and i + 1 share. What all share cuts the range into runs that share
    more; each of these saves more by groups of its own, or joins the others.
    """
    if high - low < 2:
        return 0, []
    least = min(common[low : high - 1])
    ends = [at + 1 for at in range(low, high - 1) if common[at] == least] + [high]
    runs = [
        (first, end, *_best(common, first, end))
        for first, end in zip([low, *ends], ends, strict=False)
    ]
    joining = [run for run in runs if least * (run[1] - run[0]) >= run[2]]
    places = [place for first, end, *_ in joining for place in range(first, end)]
    if least * (len(places) - 1) - LEAST_SAVED <= sum(saved for _, _, saved, _ in joining):
        return sum(run[2] for run in runs), [group for run in runs for group in run[3]]
    apart = [run for run in runs if run not in joining]
    saved = least * (len(places) - 1) - LEAST_SAVED + sum(run[2] for run in apart)
    return saved, [(least, places), *(group for run in apart for group in run[3])]
