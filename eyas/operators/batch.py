"""Batches of samples: padded tensors, and which samples share a batch.

Letters: B batch, T longest of the batch, A = 3 * Ht, Ht target hidden size.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eyas.shards import Sample


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples, padded on the right with zeros: tokens int64, loss_mask bool, hidden states in their
    stored dtype. lengths: in tokens. argmax_BT int32: the target's best next token, -1 if unknown.
    """

    keys: tuple[str, ...]
    lengths: tuple[int, ...]
    tokens_BT: Tensor
    loss_mask_BT: Tensor
    aux_hidden_BTA: Tensor
    last_hidden_BTH: Tensor
    argmax_BT: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Batch:
        return cls(
            keys=tuple(sample.key for sample in samples),
            lengths=tuple(len(sample.token_ids) for sample in samples),
            tokens_BT=pad_sequence([sample.token_ids.long() for sample in samples], True),
            loss_mask_BT=pad_sequence([sample.loss_mask for sample in samples], True),
            aux_hidden_BTA=pad_sequence([sample.aux_hidden for sample in samples], True),
            last_hidden_BTH=pad_sequence([sample.last_hidden for sample in samples], True),
            argmax_BT=pad_sequence([sample.argmax for sample in samples], True, -1),
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.__slots__[2:]}

    def to(self, device: str) -> Batch:
        """The same on a device; the copy is asynchronous."""
        if device == "cpu":
            return self
        moved: dict[str, Any] = {}
        for name, one in self.tensors.items():
            # a GPU copies pinned memory beside its work
            there = one.pin_memory() if one.is_cpu and torch.cuda.is_available() else one
            moved[name] = there.to(device, non_blocking=True)
        return replace(self, **moved)


def plan_batches(lengths: Sequence[int], max_tokens: int, seed: str) -> list[list[int]]:
    """Numbers of the samples of each batch, every sample once: B * T <= max_tokens, unless one
    sample alone is longer. Deterministic.

    Shuffled samples are sorted by length within windows of some fifty batches, for little padding
    and other batches in each pass; then the batches are shuffled.
    """
    rng = random.Random(seed)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    seen = accumulate(lengths[number] for number in order)
    window_of = {
        number: tokens // (50 * max_tokens) for number, tokens in zip(order, seen, strict=True)
    }
    order.sort(key=lambda number: (window_of[number], lengths[number]))
    batches: list[list[int]] = []
    longest = 0
    for number in order:
        longest = max(longest, lengths[number])
        if not batches or longest * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
            longest = lengths[number]
        batches[-1].append(number)
    rng.shuffle(batches)
    return batches
