"""Recorded rounds: answers with the draft's proposals at every token, on which any rule of drafting
can be played without a model.

    answer       y0      y1      y2      y3 ...        the target's own, one token a round
    proposals    of y1   of y2   of y3   of y4         all levels; nothing is verified, so every
                                                       token but the last is once a root

What a draft proposes at a root depends on the tokens up to it alone, and with one seed an answer is
the same whatever was proposed (docs/decisions/engine.md). So a round of any depth, size
or rule that begins there emits what these two give: the longest path of kept candidates along the
answer, and one token of the target.

Letters: B requests, C candidates of a root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from eyas.engine.request import Request
from eyas.evaluate.trees import Models, decode
from eyas.log import Track
from eyas.model.rows import Proposals

# ids of B answers and their roots' proposals -> which candidates are verified, bool [B, C]. Parents
# of a kept candidate must be kept.
DraftingRule = Callable[[list[str], Proposals], np.ndarray]


@dataclass(slots=True)
class RecordedAnswer:
    """n tokens; tokens, scores and parents [C] of the candidates behind each of the first n - 1."""

    prompt_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    candidates: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RecordedRounds:
    """Answers by the request's id; depths [C] as in Proposals, the same for every root."""

    depths: np.ndarray
    answers: dict[str, RecordedAnswer]

    def proposals(self, roots: Sequence[tuple[str, int]], num_draft_steps: int) -> Proposals:
        """Of B roots (id, number of the token in the answer), cut after num_draft_steps levels."""
        end = int(np.searchsorted(self.depths, num_draft_steps, side="right"))
        rows = [self.answers[name].candidates[number] for name, number in roots]
        tokens, scores, parents = (np.stack([row[part][:end] for row in rows]) for part in range(3))
        return Proposals(
            tokens.astype(np.int64), scores, parents.astype(np.int32), self.depths[:end]
        )

    def play(
        self, rule: DraftingRule, num_draft_steps: int, concurrency: int = 1
    ) -> dict[str, list[int]]:
        """Accepted drafts of each round of each answer, with so many answers at a time."""
        accepted: dict[str, list[int]] = {name: [] for name in self.answers}
        waiting = [name for name, one in self.answers.items() if len(one.token_ids) > 1][::-1]
        at: dict[str, int] = {}  # of the answers under way: the number of the root
        while waiting or at:
            while waiting and len(at) < concurrency:
                at[waiting.pop()] = 0
            proposals = self.proposals(list(at.items()), num_draft_steps)
            kept = rule(list(at), proposals)
            for line, (name, root) in enumerate(list(at.items())):
                left = self.answers[name].token_ids[root + 1 :]
                count = num_accepted(proposals, line, kept[line], left)
                accepted[name].append(min(count, len(left) - 1))
                at[name] += count + 1
                if count + 1 >= len(left):
                    del at[name]
        return accepted


def num_accepted(
    proposals: Proposals, line: int, kept_C: np.ndarray, following: Sequence[int]
) -> int:
    """How many tokens that follow the root are a path of kept candidates."""
    tokens, parents = proposals.tokens[line], proposals.parents[line]
    node, count = -1, 0
    for token in following:
        children = np.flatnonzero(kept_C & (parents == node) & (tokens == token))
        if not len(children):
            break
        node, count = int(children[0]), count + 1
    return count


def levels(depths: np.ndarray) -> list[slice]:
    """The candidates of each depth, from 1 on."""
    depth = int(depths[-1]) if len(depths) else 0
    bounds = depths.searchsorted(np.arange(1, depth + 2)).tolist()
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def of_best_path(proposals: Proposals) -> np.ndarray:
    """Which candidates, bool [B, C], a narrow tree has: levels grown from the best one alone."""
    found = np.zeros(proposals.parents.shape, dtype=bool)
    above = np.full((len(found), 1), -1)
    for level in levels(proposals.depths):
        own = proposals.parents[:, level] == above
        found[:, level] = own
        best = np.where(own, proposals.scores[:, level], -np.inf).argmax(1)[:, None]
        above = np.where(own.any(1, keepdims=True), level.start + best, -2)
    return found


def record(
    models: Models, num_draft_steps: int, tree_topk: int, requests: Sequence[Request], track: Track
) -> RecordedRounds:
    """Decode all requests, and keep what the head proposes at each of their tokens."""
    engine = models.engine(f"fixed({num_draft_steps},{tree_topk},2)")
    answers = {request.id: RecordedAnswer(request.prompt_ids) for request in requests}
    depths = np.empty(0, dtype=np.int32)

    def keep(names: list[str], proposals: Proposals) -> None:
        nonlocal depths
        depths = proposals.depths
        columns = zip(
            proposals.tokens.astype(np.int32),
            proposals.scores.copy(),
            proposals.parents.astype(np.int16),
            strict=True,
        )
        for name, row in zip(names, columns, strict=True):
            answers[name].candidates.append(row)

    engine.rounds.recorder = keep
    for request, decoded in zip(requests, decode(engine, requests, track), strict=True):
        answers[request.id].token_ids = decoded.token_ids
    for answer in answers.values():
        assert len(answer.candidates) == len(answer.token_ids) - 1, "every token but one is a root"
    return RecordedRounds(depths, answers)
