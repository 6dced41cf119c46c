"""What a feature sample is: tokens, mask and hidden states of one conversation; what it is features
of; and what training asks of a source of samples, be it a store or a target in the same process.

Knows no bytes and no store.

Letters: T sequence, Ht target hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from eyas.artifact import Manifest

Split = Literal["train", "held_out"]
CodecName = Literal["raw", "lossless", "within1", "within2", "within4", "within8"]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
EXACT = ("raw", "lossless")  # codecs that give every bit back
NUM_LAYERS = 4  # of hidden states in a sample: three taps and the last
# of the bytes of the hidden states, on the built-in target: benchmarks/features.py
SHARES: dict[CodecName, float] = {
    "raw": 1.0,
    "lossless": 0.71,
    "within1": 0.40,
    "within2": 0.34,
    "within4": 0.28,
    "within8": 0.22,
}


class FeatureMeta(BaseModel):
    """What the features are features of: `taps` are after_layer indices, `last_hidden` is after the
    target's final norm.

    codec: how hidden states are kept. teacher: where the last hidden state is kept: "supervised" is
    every token under the loss mask and its two neighbours, all that any form of the objective and
    `eyas eval` look at; elsewhere it reads as zeros.
    """

    model_config = ConfigDict(frozen=True)

    taps: tuple[int, int, int]
    hidden_size: int
    vocab_size: int
    lm_head_sha256: str
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    last_hidden: Literal["post_norm"] = "post_norm"
    codec: CodecName = "lossless"
    teacher: Literal["everywhere", "supervised"] = "everywhere"

    @property
    def decoded_bytes_per_token(self) -> int:
        return 8 + NUM_LAYERS * self.hidden_size * DTYPES[self.dtype].itemsize

    @property
    def bytes_per_token(self) -> int:
        """Stored, every token supervised: exact for "raw", otherwise what the codec made of the
        built-in target's features.
        """
        return 8 + round(SHARES[self.codec] * (self.decoded_bytes_per_token - 8))


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation as the target saw it, with what the target thought.

    token_ids int32 [T]; loss_mask bool [T], true on the tokens that the target wrote (several spans
    where several turns are the target's); aux_hidden [T, 3*Ht], the three taps side by side;
    last_hidden [T, Ht]. `source` is the data set.
    """

    key: str
    token_ids: Tensor
    loss_mask: Tensor
    aux_hidden: Tensor
    last_hidden: Tensor
    source: str = ""


def teacher_mask(loss_mask: Tensor) -> Tensor:
    """bool [T]: the supervised tokens and the neighbours of each, where some form of the objective
    asks the teacher.
    """
    near = loss_mask.clone()
    near[1:] |= loss_mask[:-1]
    near[:-1] |= loss_mask[1:]
    return near


class FeatureSource(Protocol):
    """The samples of one split, by number.

    inputs: what they were made from, for the identity of what is made from them: {"features": a
    manifest of stage `capture`}, with the url of the store, or without one where the features were
    never stored.
    """

    @property
    def meta(self) -> FeatureMeta:
        """What the features are features of."""

    @property
    def inputs(self) -> Mapping[str, Manifest]:
        """Manifests by role; equal ones mean equal features."""

    @property
    def lengths(self) -> list[int]:
        """T of each sample, without computing or reading one."""

    def __len__(self) -> int:
        """The number of samples."""

    def all_tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        """token_ids int32 [T] and loss_mask bool [T] of every sample in order: cheap, to count."""

    def batches(self, batches: Sequence[Sequence[int]]) -> Iterator[list[Sample]]:
        """The samples of each list of numbers; to go on after n batches, give batches[n:]."""
