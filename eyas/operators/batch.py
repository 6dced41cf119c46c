"""Samples side by side: padded tensors for a head, and which samples share a batch.

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
    """Rows of samples, padded on the right with zeros: tokens int64, loss_mask bool, hidden states
    in their stored dtype.

    lengths: tokens of each. argmax_BT: int32, the target's best next token; -1 where it is not
    known.
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
        def joined(tensors: list[Tensor], fill: int = 0) -> Tensor:
            return pad_sequence(tensors, True, fill)

        return cls(
            keys=tuple(sample.key for sample in samples),
            lengths=tuple(len(sample.token_ids) for sample in samples),
            tokens_BT=joined([sample.token_ids.long() for sample in samples]),
            loss_mask_BT=joined([sample.loss_mask for sample in samples]),
            aux_hidden_BTA=joined([sample.aux_hidden for sample in samples]),
            last_hidden_BTH=joined([sample.last_hidden for sample in samples]),
            argmax_BT=joined([sample.argmax for sample in samples], -1),
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By their names."""
        return {name: getattr(self, name) for name in self.__slots__[2:]}

    def to(self, device: str) -> Batch:
        """The same on a device; nobody waits for the copy."""
        if device == "cpu":
            return self
        moved: dict[str, Any] = {}
        for name, one in self.tensors.items():
            # memory from which a GPU copies beside its work
            there = one.pin_memory() if one.is_cpu and torch.cuda.is_available() else one
            moved[name] = there.to(device, non_blocking=True)
        return replace(self, **moved)


def plan_batches(lengths: Sequence[int], max_tokens: int, seed: str) -> list[list[int]]:
    """Numbers of the samples of each batch, every sample once: B * T <= max_tokens, unless one
    sample alone is longer.

    Samples are shuffled, and sorted by length within windows of some fifty batches: little padding,
    and batches that differ from pass to pass; then the batches are shuffled. Deterministic.
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
