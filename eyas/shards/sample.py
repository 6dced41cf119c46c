"""A feature sample: tokens, mask and hidden states of one conversation; what it is features of; and
what training asks of a source of samples, be it a store or a target in the same process.

Letters: T sequence, Ht target hidden size.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from eyas.artifact import Manifest
from eyas.shards.codecs import CODECS, NUM_LAYERS, Codec, CodecName, Tables

Split = Literal["train", "held_out"]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NONE_KNOWN = torch.empty(0, dtype=torch.int32)  # of a sample's best tokens


class FeatureMeta(BaseModel):
    """taps: after_layer indices; `last_hidden` is after the target's final norm.

    codec: of hidden states. teacher: where the last hidden state is stored: "supervised" is every
    token under the loss mask and its two neighbours (all that training and `eyas eval` read);
    others read as zeros.
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
    def is_exact(self) -> bool:
        return CODECS[self.codec].error == 0

    @property
    def decoded_bytes_per_token(self) -> int:
        return 8 + NUM_LAYERS * self.hidden_size * DTYPES[self.dtype].itemsize

    @property
    def bytes_per_token(self) -> int:
        """Stored, all tokens supervised; an estimate, exact for "raw"."""
        return 8 + round(CODECS[self.codec].share * (self.decoded_bytes_per_token - 8))

    def coder(self, tables: Tables | None = None) -> Codec:
        """tables: see `codecs.calibrate`."""
        return CODECS[self.codec].make(self.hidden_size, DTYPES[self.dtype], tables)


@dataclass(frozen=True, slots=True)
class Sample:
    """token_ids int32 [T]; loss_mask bool [T], true on the tokens that the target wrote; aux_hidden
    [T, 3*Ht], the three taps side by side; last_hidden [T, Ht]; source: the data set; argmax int32
    [T]: the target's best next token, -1 if unknown.
    """

    key: str
    token_ids: Tensor
    loss_mask: Tensor
    aux_hidden: Tensor
    last_hidden: Tensor
    source: str = ""
    argmax: Tensor = NONE_KNOWN

    def __post_init__(self) -> None:
        if self.argmax is NONE_KNOWN:
            unknown = torch.full_like(self.token_ids, -1, dtype=torch.int32)
            object.__setattr__(self, "argmax", unknown)


def teacher_mask(loss_mask: Tensor) -> Tensor:
    """bool [T]: the supervised tokens and their neighbours, which the objective reads."""
    near = loss_mask.clone()
    near[1:] |= loss_mask[:-1]
    near[:-1] |= loss_mask[1:]
    return near


class FeatureSource(Protocol):
    """The samples of one split, by number."""

    @property
    def meta(self) -> FeatureMeta: ...

    @property
    def inputs(self) -> Mapping[str, Manifest]:
        """For identities: {"features": a manifest of stage `capture`}. Equal ones mean equal
        features.
        """

    @property
    def lengths(self) -> list[int]: ...

    def __len__(self) -> int: ...

    def all_tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        """token_ids int32 [T] and loss_mask bool [T] of every sample: cheap."""

    def batches(self, batches: Sequence[Sequence[int]]) -> Generator[list[Sample]]:
        """The samples of each list of numbers; to go on after n batches, give batches[n:]."""
