"""Figures of answers, whole and by source or language; the draft vocabulary's ceiling on tau."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eyas.engine.tree import Speculation
from eyas.tau import RoundCounts, tau_interval

# eval.json's words for how a figure was measured.
WAYS = {
    "engine": "our own engine answered the prompts, with the head's drafts in every round",
    "features": "stored features: the head drafts along the target's own answers, and no target "
    "runs",
}


@dataclass(frozen=True, slots=True)
class AnswerCounts:
    """The rounds of one answer. prompt: its id, or a key of its features."""

    prompt: str
    source: str
    language: str
    counts: RoundCounts


def prompt_of(key: str) -> str:
    """The prompt of a sample by its key. An interval has one row per prompt, since its turns and
    answers are easy or hard together.
    """
    return key.rpartition("/")[0] or key


def summed_by_prompt(prompts: Sequence[str], counts: Sequence[Sequence[float]]) -> np.ndarray:
    """Sums [prompts, k] of the rows [n, k] of each prompt. prompts [n]: of each row."""
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
    sums = np.zeros((len(places), len(counts[0])))
    np.add.at(sums, [places[prompt] for prompt in prompts], np.asarray(counts))
    return sums


def figures(answers: Sequence[AnswerCounts], num_draft_steps: int) -> dict[str, Any]:
    """tau with its interval over prompts, in all and by source and language; accepted drafts, and
    acceptance by position given all positions before.
    """
    total = RoundCounts(num_draft_steps)
    for answer in answers:
        total.add(answer.counts)
    return {
        **_tau(answers),
        "accept_hist": total.accept_hist,
        "acceptance_by_position": total.acceptance_by_position,
        **{
            f"by_{kind}": {
                name: _tau([one for one in answers if getattr(one, kind) == name])
                for name in sorted({getattr(one, kind) for one in answers})
            }
            for kind in ("source", "language")
        },
    }


def _tau(answers: Sequence[AnswerCounts]) -> dict[str, Any]:
    counts = [(answer.counts.emitted, answer.counts.rounds) for answer in answers] or [(0, 0)]
    sums = summed_by_prompt([answer.prompt for answer in answers] or [""], counts)
    emitted, rounds = sums.sum(0).astype(int).tolist()
    interval = tau_interval(*sums.astype(int).T.tolist())
    return {
        "tau": emitted / max(rounds, 1),
        "tau_interval": None if interval is None else list(interval),
        "rounds": rounds,
        "answers": len(answers),
    }


def tree_entry(
    tree: Speculation,
    temperature: float | None,
    answers: Sequence[AnswerCounts],
    is_known: Sequence[Sequence[bool]],
    **facts: Any,
) -> dict[str, Any]:
    """An entry of eval.json's `trees`. is_known: whether the draft vocabulary has each token."""
    return {
        "speculation": str(tree),
        "temperature": temperature,
        "num_draft_steps": tree.num_draft_steps,
        **figures(answers, tree.num_draft_steps),
        **vocabulary_figures(is_known, tree.num_draft_steps),
        "tokens": sum(map(len, is_known)),
        **facts,
    }


def vocabulary_figures(answers: Sequence[Sequence[bool]], num_draft_steps: int) -> dict[str, float]:
    """Share of tokens in the draft vocabulary, its ceiling on tau, and a full vocabulary's (which
    the ends of answers keep below num_draft_steps + 1). answers: whether tokens are in it.
    """
    known, count = sum(map(sum, answers)), sum(map(len, answers))
    full = [[True] * len(answer) for answer in answers]
    return {
        "draft_vocabulary_coverage": known / max(count, 1),
        "tau_ceiling": tau_ceiling(answers, num_draft_steps),
        "tau_ceiling_full_vocabulary": tau_ceiling(full, num_draft_steps),
    }


def tau_ceiling(answers: Iterable[Sequence[bool]], num_draft_steps: int) -> float:
    """The highest tau on these answers: of drafts that are right wherever the vocabulary allows.

    A round accepts num_draft_steps drafts, or those before the first token that the vocabulary
    lacks. No chain or tree needs fewer rounds, since a round from a later token never ends earlier.

        in the vocabulary   y  y  y  n  y  y  y  y  y        3 draft steps
        rounds              0  [1  2  3] [4  5  6  7] [8]    the first token is the prefill's
    """
    counts = RoundCounts(num_draft_steps)
    for answer in answers:
        matches, length = [], 0
        for is_known in reversed(answer[1:]):
            length = length + 1 if is_known else 0
            matches.append(length)
        counts.add_answer(matches[::-1])
    return counts.tau
