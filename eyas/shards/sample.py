"""What a feature sample is: tokens, mask and hidden states of one conversation, and what they are
features of.

Knows the nouns of the feature format. Knows no bytes and no store.

Letters: T sequence, Ht target hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

Split = Literal["train", "held_out"]
CodecName = Literal["raw", "lossless", "int8", "fp8", "within1", "within2", "within4", "within8"]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
EXACT = ("raw", "lossless")  # codecs that give every bit back
NUM_LAYERS = 4  # of hidden states in a sample: three taps and the last
# of the bytes of the hidden states, on the built-in target: benchmarks/features.py
SHARES: dict[CodecName, float] = {
    "raw": 1.0,
    "lossless": 0.71,
    "int8": 0.5,
    "fp8": 0.51,
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


def taught(loss_mask: Tensor) -> Tensor:
    """bool [T]: the supervised tokens and the neighbours of each, where some form of the objective
    asks the teacher.
    """
    near = loss_mask.clone()
    near[1:] |= loss_mask[:-1]
    near[:-1] |= loss_mask[1:]
    return near
