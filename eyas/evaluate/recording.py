"""Answers with all that the head would have proposed at every place of them: enough to replay any
tree of as many branches.

    answer       y0      y1      y2      y3 ...        the target's own, one token a round
    proposals    of y1   of y2   of y3   of y4         all levels, nothing verified, so that every token is once a root

What a tree proposes at a root depends on the tokens up to it alone, and with the same seed an
answer is the same whatever was proposed (docs/decisions/one-draw-a-token.md). So a round of any
depth, size or policy that begins there emits what these two say: a walk down the kept candidates
along the answer. Knows the engine's rounds; no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from eyas.engine.engine import Engine
from eyas.engine.policy import RoundPlan
from eyas.engine.request import Request
from eyas.engine.rounds import Rounds
from eyas.engine.running import Outcome
from eyas.engine.scheduler import Job
from eyas.evaluate.decoding import Models
from eyas.log import Track
from eyas.model.rows import Proposals
from eyas.model.target import Target


@dataclass(slots=True)
class Recorded:
    """One answer. Of its n tokens: tokens, scores and parents [C] of the candidates behind each but
    the last.
    """

    prompt_ids: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    candidates: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Recording:
    """Answers by the request's id, with the growth of their proposals; depths [C] as in Proposals."""

    num_draft_steps: int
    tree_topk: int
    temperature: float
    depths: np.ndarray
    answers: dict[str, Recorded]

    def proposals(self, roots: Sequence[tuple[str, int]], depth: int) -> Proposals:
        """Of the answers' tokens by number (request's id, number of the root), cut after `depth`
        levels.
        """
        end = int(np.searchsorted(self.depths, depth, side="right"))
        rows = [self.answers[name].candidates[number] for name, number in roots]
        tokens, scores, parents = (np.stack([row[part][:end] for row in rows]) for part in range(3))
        return Proposals(
            tokens.astype(np.int64), scores, parents.astype(np.int32), self.depths[:end]
        )


class RecordingRounds(Rounds):
    """Rounds that grow whole trees and keep what is in them; of which nothing is verified."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.candidates: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
        self.depths = np.empty(0, dtype=np.int32)

    def _propose(
        self, job: Job, drafting: list[int], plan: RoundPlan
    ) -> tuple[Proposals, np.ndarray]:
        assert self.entries is not None
        assert drafting, "all requests draft in every round"
        proposals = self.entries.grow(job, drafting, self.speculation, plan.thresholds)
        self.depths = proposals.depths
        for line, b in enumerate(drafting):
            row = (
                proposals.tokens[line].astype(np.int32),
                proposals.scores[line],
                proposals.parents[line].astype(np.int16),
            )
            self.candidates.setdefault(job.runnings[b].request.id, []).append(row)
        return proposals, np.zeros(proposals.tokens.shape, dtype=bool)

    def _decode(self, job: Job) -> list[Outcome]:
        """Nothing was offered, so nothing was refused."""
        return [replace(outcome, num_accepted_drafts=None) for outcome in super()._decode(job)]


class RecordingEngine(Engine):
    """An engine whose rounds are recorded."""

    @staticmethod
    def kind_of_rounds(target: Target) -> type[Rounds]:
        return RecordingRounds


def record(
    models: Models, sizes: tuple[int, int], requests: Sequence[Request], track: Track
) -> Recording:
    """Decode all requests and keep what a head of `sizes` (num_draft_steps, tree_topk) proposes at
    each of their tokens.
    """
    num_draft_steps, tree_topk = sizes
    engine = models.engine(f"fixed({num_draft_steps},{tree_topk},2)", RecordingEngine)
    assert isinstance(engine.rounds, RecordingRounds)
    answers = {request.id: Recorded(request.prompt_ids) for request in requests}
    done = 0
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for update in engine.step():
            answers[update.request_id].token_ids.extend(update.token_ids)
            if update.finish_reason is not None:
                done += 1
                track(done, len(requests))
    for name, answer in answers.items():
        answer.candidates = engine.rounds.candidates.get(name, [])
        assert len(answer.candidates) == len(answer.token_ids) - 1, (
            "every token but the last is a root"
        )
    temperature = requests[0].params.temperature
    return Recording(num_draft_steps, tree_topk, temperature, engine.rounds.depths, answers)
