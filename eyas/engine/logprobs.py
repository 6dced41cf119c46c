"""Log-probabilities of a token and of the best ones, from the target's raw logits: before
penalties, bias, mask and temperature, as OpenAI's API and vLLM's default give them. Pure
function."""

from __future__ import annotations

import numpy as np

from eyas.engine.request import TokenLogprob
from eyas.engine.sampling import Ids, Logits, best_ids


def token_logprob(logits_V: Logits, token: int, num_top: int) -> TokenLogprob:
    """log_softmax(logits) in fp64 at `token` and at the num_top best tokens, best first, of equal
    ones the smaller id.
    """
    best = float(logits_V.max())
    norm = best + float(np.log(np.exp(np.subtract(logits_V, best, dtype=np.float64)).sum()))
    top: Ids = best_ids(logits_V, num_top) if num_top else np.empty(0, np.int64)
    top = top[np.argsort(-logits_V[top], kind="stable")]
    pairs = tuple((int(one), float(logits_V[one]) - norm) for one in top)
    return TokenLogprob(token, float(logits_V[token]) - norm, pairs)
