"""The weights a head starts from. Knows the head's parts and the target's two matrices, no
optimizer.

Letters: H hidden, Ht the target's, W draft vocabulary, V target vocabulary, R rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.model.head import Head
from eyas.model.vocab import TargetVocabulary

OF_THE_TARGET = ("embed_tokens", "lm_head.weight")


@torch.no_grad()
def initialise(head: Head, vocabulary: TargetVocabulary, seed: int) -> None:
    """Draw all weights in place; equal seeds give equal weights.

    Norms are ones; matrices are normal with variance 1 / fan_in, those that write to the residual
    are zero; lm_head is the target's own, row by row of the draft vocabulary. A head of another
    width takes the target's two matrices as far as they go into it.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in head.named_parameters():
        if weight.ndim == 1:
            nn.init.ones_(weight)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(weight)
        elif name not in OF_THE_TARGET:
            weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
    head.lm_head.weight.copy_(
        of_width(vocabulary.lm_head[head.target_ids_W], head.config.hidden_size)
    )
    if head.embed_tokens is not None:
        head.embed_tokens.copy_(of_width(vocabulary.embed_tokens, head.config.hidden_size))


def of_width(rows_RH: Tensor, hidden_size: int) -> Tensor:
    """Rows [R, Ht] in hidden_size columns: as they are, padded with zeros, or along their
    hidden_size principal directions.
    """
    width = rows_RH.shape[1]
    if hidden_size >= width:
        return F.pad(rows_RH, (0, hidden_size - width))
    wide = rows_RH.double()
    directions: Tensor = torch.linalg.eigh(wide.T @ wide).eigenvectors[:, -hidden_size:]
    return (wide @ directions).to(rows_RH.dtype)
