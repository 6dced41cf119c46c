"""The vocabularies of target and draft, and the target's embedding and output matrices.

Letters: V target vocabulary, W draft vocabulary, Ht target hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.errors import ConfigError
from eyas.model.config import TargetShape
from eyas.operators.shape import StoredMatrices
from eyas.operators.tensors import multiplies_bf16, tensor_of
from eyas.operators.ttt import widened

# of `TargetVocabulary.best`:
ROWS_AT_ONCE = 1024
COLUMNS_AT_ONCE, BLOCK = 8192, 16  # tokens of a product, and of a block in the search
# How far below the best a bf16 logit may be, of 1 + itself: twice the rounding of both, 2^-9 each.
SHORT_OF_BEST = 2**-7
MOST_BLOCKS = 8  # for each row; more are equal logits, as of a hidden state of zeros


def capped(x: Tensor, cap: float | None) -> Tensor:
    """Gemma 2's soft cap: cap * tanh(x / cap)."""
    return x if cap is None else cap * torch.tanh(x / cap)


def products(hidden_RH: Tensor, rows_CH: Tensor) -> Tensor:
    """hidden_RH @ rows_CH.T in float32, or the dtype of rows_CH if wider. A GPU multiplies bf16
    matrices directly: products are exact, sums are float32.
    """
    if rows_CH.is_cuda and hidden_RH.dtype == rows_CH.dtype == torch.bfloat16:
        return torch.mm(hidden_RH, rows_CH.T, out_dtype=torch.float32)
    wide_CH = widened(rows_CH)
    return hidden_RH.to(wide_CH.dtype) @ wide_CH.T


def draft_vocabulary(counts_V: Tensor, draft_vocab_size: int) -> tuple[Tensor, Tensor]:
    """Keep the `draft_vocab_size` most frequent tokens, of equal counts the lower id; ascending.

    counts_V: int64. Returns d2t_offset int64 [W] (target id = draft id + d2t_offset[draft id]) and
    t2d_mask bool [V]. Raises ConfigError for more tokens than the target has.
    """
    V, W = len(counts_V), draft_vocab_size
    if not 0 < W <= V:
        raise ConfigError(
            f"a draft vocabulary of {W} tokens does not fit a target of {V}", f"choose 1 to {V}"
        )
    kept_W = counts_V.sort(descending=True, stable=True).indices[:W].sort().values
    t2d_mask = torch.zeros(V, dtype=torch.bool)
    t2d_mask[kept_W] = True
    return kept_W - torch.arange(W), t2d_mask


@dataclass(frozen=True, slots=True)
class TargetVocabulary:
    """What a head borrows from its target: embed_tokens and lm_head [V, Ht], both frozen.

    lm_head includes the logits' scale; lm_head_sha256 is of the stored matrix. short_lm_head:
    lm_head in bf16, if that is exact and the CPU multiplies it.
    """

    config: TargetShape
    embed_tokens: Tensor
    lm_head: Tensor
    lm_head_sha256: str
    short_lm_head: Tensor | None = None

    @classmethod
    def load(cls, folder: str | Path) -> TargetVocabulary:
        """Read both as float32 from a Hugging Face folder, and no layer. Raises MissingInputError,
        CorruptError, MismatchError.
        """
        read = StoredMatrices.load(folder)
        config, stored = read.config, tensor_of(read.lm_head)
        lm_head, short = stored.float(), None
        if config.logit_scale != 1.0:
            lm_head = lm_head * config.logit_scale
        elif stored.dtype == torch.bfloat16 and multiplies_bf16("cpu"):
            short = stored
        is_one = read.embed_tokens is read.lm_head and config.logit_scale == 1.0
        embed_tokens = lm_head if is_one else tensor_of(read.embed_tokens).float()
        return cls(config, embed_tokens, lm_head, read.lm_head_sha256, short)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """The target's logits [R, V] of last hidden states [R, Ht]."""
        return self.capped(products(hidden_RH.to(self.lm_head.device), self.lm_head))

    def capped(self, logits: Tensor) -> Tensor:
        """lm_head's output, softly capped, which changes no argmax."""
        return capped(logits, self.config.logit_softcap)

    def best(self, hidden_RH: Tensor) -> Tensor:
        """The argmax of the target's logits (`products`), int64 [R]; of equal ones the lowest id.
        hidden_RH: last hidden states as stored.
        """
        return torch.cat([self._best(part) for part in torch.split(hidden_RH, ROWS_AT_ONCE)])

    def _best(self, hidden_RH: Tensor) -> Tensor:
        """Of bf16 states and lm_head on a CPU, bf16 products find the candidates for the best
        token, and only their logits are computed in full: a quarter of the time.
        """
        if self.short_lm_head is not None and hidden_RH.dtype == torch.bfloat16:
            row_N, block_N = self._blocks_of_best(hidden_RH, self.short_lm_head)
            if len(row_N) <= MOST_BLOCKS * len(hidden_RH):
                return self._best_of(hidden_RH.to(self.lm_head.dtype), row_N, block_N)
        if not hidden_RH.is_cpu:  # no cache to stay in: one launch for all columns
            return products(hidden_RH, self.lm_head).argmax(-1)
        hidden_RH = hidden_RH.to(self.lm_head.dtype)
        best_R = hidden_RH.new_full((len(hidden_RH),), -math.inf)
        choice_R = torch.zeros(len(hidden_RH), dtype=torch.int64)
        for first in range(0, len(self.lm_head), COLUMNS_AT_ONCE):
            part_CH = self.lm_head[first : first + COLUMNS_AT_ONCE]
            values_R, places_R = products(hidden_RH, part_CH).max(-1)
            choice_R = torch.where(values_R > best_R, places_R + first, choice_R)
            best_R = torch.maximum(values_R, best_R)
        return choice_R

    @staticmethod
    def _blocks_of_best(hidden_RH: Tensor, short_VH: Tensor) -> tuple[Tensor, Tensor]:
        """The pairs of row and block of BLOCK tokens that can hold the row's best token, int64 [N]
        each. A product's sums are float32: a bf16 logit is off by its own rounding, 2^-9 of it.
        """
        by_column, most = hidden_RH.T.contiguous(), []
        for part_CH in torch.split(short_VH, COLUMNS_AT_ONCE):
            logits_CR = F.pad(
                part_CH @ by_column, (0, 0, 0, -len(part_CH) % BLOCK), value=-math.inf
            )
            most.append(logits_CR.view(-1, BLOCK, len(hidden_RH)).amax(1))
        most_DR = torch.cat(most).float()
        most_R = most_DR.amax(0)
        block_N, row_N = (
            (most_DR >= most_R - SHORT_OF_BEST * (1 + most_R.abs())).nonzero().unbind(1)
        )
        return row_N, block_N

    def _best_of(self, hidden_RH: Tensor, row_N: Tensor, block_N: Tensor) -> Tensor:
        """As `best`, among these blocks of each row; D tokens of a block."""
        V, R = len(self.lm_head), len(hidden_RH)
        # an incomplete last block repeats the last token
        ids_ND = (block_N[:, None] * BLOCK + torch.arange(BLOCK)).clamp(max=V - 1)
        logits_ND = torch.bmm(self.lm_head[ids_ND], hidden_RH[row_N].unsqueeze(2)).squeeze(2)
        best_N, place_N = logits_ND.max(-1)
        best_R = best_N.new_full((R,), -math.inf).scatter_reduce(0, row_N, best_N, "amax")
        ids_N = ids_ND.gather(1, place_N.unsqueeze(1)).squeeze(1)
        ids_N = ids_N.where(best_N == best_R[row_N], V)
        return ids_N.new_full((R,), V).scatter_reduce(0, row_N, ids_N, "amin")

    def to(self, device: str, dtype: torch.dtype = torch.float32) -> TargetVocabulary:
        """The same on a device. dtype bfloat16: a GPU holds a matrix in it if that is exact."""

        def moved(matrix: Tensor) -> Tensor:
            there = matrix.to(device)
            short = there if device == "cpu" else there.to(dtype)
            return short if torch.equal(short.to(there.dtype), there) else there

        lm_head, embed_tokens = moved(self.lm_head), self.embed_tokens
        embed_tokens = lm_head if embed_tokens is self.lm_head else moved(embed_tokens)
        short = self.short_lm_head if device == "cpu" else None
        return replace(self, embed_tokens=embed_tokens, lm_head=lm_head, short_lm_head=short)
