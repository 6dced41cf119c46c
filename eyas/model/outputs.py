"""What a target's forward and a draft's growth give. Knows no model.

Letters: M rows of the forward, R rows whose logits were asked for, Ht hidden size, V vocabulary; B
requests, C candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """logits [R, V]; best int64 [R], their argmax (ties: the smallest id); aux_hidden [M, 3 * Ht]
    when taps were given, and no cache to put their outputs."""

    aux_hidden: torch.Tensor | None
    logits: torch.Tensor
    best: torch.Tensor


@dataclass(frozen=True, slots=True)
class Proposals:
    """All candidates of B trees, level by level: C = k, then k * k for every further level.

    tokens int64 [B, C]; scores fp32 [B, C]: log-probability of the whole path; parents int32 [B,
    C]: a candidate's index, -1 for the root; depths int32 [C], from 1. The children of the
    frontier's place j in one level stand at j * k .. j * k + k - 1 of the level's candidates.
    """

    tokens: np.ndarray
    scores: np.ndarray
    parents: np.ndarray
    depths: np.ndarray


@dataclass(frozen=True, slots=True)
class Chosen:
    """The trees of B requests, as candidates: of request b those kept, bool [B', C], at line[b] of
    the proposals; at -1 none."""

    line: list[int]
    proposals: Proposals
    kept: np.ndarray
