"""The weights a head starts from. Knows the head's parts and the target's output matrix, no optimizer.

Letters: H hidden, W draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn

from eyas.model.head import Head
from eyas.model.vocab import TargetVocabulary


@torch.no_grad()
def initialise(head: Head, vocabulary: TargetVocabulary, seed: int) -> None:
    """Draw all weights in place; equal seeds give equal weights.

    Norms are ones; matrices are normal with variance 1 / fan_in, those that write to the residual are zero; lm_head is the
    target's own, row by row of the draft vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in head.named_parameters():
        if weight.ndim == 1:
            nn.init.ones_(weight)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)
        elif name != "lm_head.weight":
            weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
    head.lm_head.weight.copy_(vocabulary.lm_head[head.target_ids_W])
