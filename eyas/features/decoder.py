"""What computes features: our own decoder, or transformers' (see hooks), asked alike.

Knows forwards of token ids and the reuse of a common beginning. Does not know samples, masks or
where features go.

Letters: B batch, T longest of it, P tokens of a common beginning, H the target's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from eyas.model.config import TargetShape
from eyas.model.rows import prompt_rows
from eyas.model.target import PAGE_SIZE, Target


@dataclass(frozen=True, slots=True)
class Streams:
    """What a target thought: aux_hidden [..., 3 * H], the taps side by side, and last_hidden [...,
    H], which feeds lm_head.
    """

    aux_hidden: Tensor
    last_hidden: Tensor


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first P tokens of several samples, computed: their streams [P, ...], and what attention
    to them needs.
    """

    num_tokens: int
    streams: Streams
    kept: Any  # the decoder's own


class Decoder(Protocol):
    """A target that tells what it thinks."""

    @property
    def shape(self) -> TargetShape:
        """Of the target."""

    @property
    def lm_head_sha256(self) -> str:
        """Of the target's output matrix, as TargetVocabulary has it."""

    @property
    def reuses(self) -> bool:
        """Can it go on from a Beginning?"""

    def begin(self, tokens: Sequence[int]) -> Beginning:
        """Compute a common beginning, a multiple of planned.SHARED_STEP tokens."""

    def streams(self, tokens: Sequence[Sequence[int]], after: Beginning | None = None) -> Streams:
        """B x T of these tokens, each row behind the beginning if one is given; what is beyond a
        row's end is of no meaning.
        """


class OwnDecoder:
    """Our own decoder: the values that the built-in engine computes."""

    reuses = True

    def __init__(self, target: Target) -> None:
        self._target = target

    @classmethod
    def load(cls, folder: str | Path, dtype: str) -> OwnDecoder:
        """On a GPU where there is one. Raises what Target.load raises."""
        return cls(Target.load(folder, dtype, "cuda" if torch.cuda.is_available() else "cpu"))

    @property
    def shape(self) -> TargetShape:
        return self._target.config

    @property
    def lm_head_sha256(self) -> str:
        return self._target.lm_head_sha256

    @torch.inference_mode()
    def begin(self, tokens: Sequence[int]) -> Beginning:
        assert len(tokens) % PAGE_SIZE == 0
        streams, kept = self._forward([tokens], None)
        return Beginning(len(tokens), Streams(streams.aux_hidden[0], streams.last_hidden[0]), kept)

    @torch.inference_mode()
    def streams(self, tokens: Sequence[Sequence[int]], after: Beginning | None = None) -> Streams:
        return self._forward(tokens, after)[0]

    def _forward(
        self, tokens: Sequence[Sequence[int]], after: Beginning | None
    ) -> tuple[Streams, Tensor]:
        """The streams, and keys and values of all slots. The pages of the beginning come first, and
        are every row's.
        """
        target, B, T = self._target, len(tokens), max(map(len, tokens))
        num_before = after.num_tokens if after else 0
        num_shared, num_own = num_before // PAGE_SIZE, -(-T // PAGE_SIZE)
        shared = np.broadcast_to(np.arange(num_shared, dtype=np.int32), (B, num_shared))
        own = np.arange(num_shared, num_shared + B * num_own, dtype=np.int32).reshape(B, num_own)
        cache = target.new_cache(num_shared + B * num_own)
        if after is not None:
            cache.data[:, :num_before] = after.kept[:, :num_before]
        padded = [[*row, *[0] * (T - len(row))] for row in tokens]
        page_table = np.concatenate([shared, own], axis=1)
        rows = prompt_rows(padded, [num_before] * B, page_table, PAGE_SIZE, target.device)
        last_hidden, aux_hidden = target.layers.hidden(rows, cache, target.config.default_taps)
        assert aux_hidden is not None
        return Streams(aux_hidden.view(B, T, -1), last_hidden.view(B, T, -1)), cache.data
