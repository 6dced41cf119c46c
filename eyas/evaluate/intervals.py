"""How sure a tau is: the bootstrap over prompts. Pure function; knows counts only.

tau is a ratio of sums, emitted tokens over rounds. The rounds of one answer go up and down
together: an answer that copies its prompt is accepted all along, one that the head has never seen
the like of is not. To draw rounds anew would take them for independent and promise too much; to
draw prompts anew asks what is meant: how tau would be for other prompts of the kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NUM_DRAWS, AT_ONCE = 2000, 100
LEAST_PROMPTS = 6  # below it the percentiles of resamples say less than nothing


def tau_interval(
    emitted: Sequence[int], rounds: Sequence[int], confidence: float = 0.95, seed: int = 0
) -> tuple[float, float] | None:
    """Percentile bootstrap of sum(emitted) / sum(rounds), one count of each a prompt (Efron, 1979).
    None for few prompts.

    The same counts give the same interval.
    """
    by_prompt = np.array([emitted, rounds], dtype=np.float64)
    num_prompts = by_prompt.shape[1]
    if num_prompts < LEAST_PROMPTS or not sum(rounds):
        return None
    rng = np.random.default_rng(seed)
    drawn = np.concatenate(
        [
            by_prompt[:, rng.integers(num_prompts, size=(AT_ONCE, num_prompts))].sum(-1)
            for _ in range(NUM_DRAWS // AT_ONCE)
        ],
        1,
    )
    taus = drawn[0] / np.maximum(drawn[1], 1)
    low, high = np.quantile(taus, [(1 - confidence) / 2, (1 + confidence) / 2]).tolist()
    return low, high
