"""Samples side by side: padded tensors for a head, and which samples share a batch. Knows no files and no loss.

Letters: B batch, T longest of the batch, A = 3 * Ht, Ht target hidden size.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class FeaturesOfOne(Protocol):
    """What a batch takes from a sample (see shards.Sample)."""

    @property
    def key(self) -> str: ...
    @property
    def token_ids(self) -> Tensor: ...
    @property
    def loss_mask(self) -> Tensor: ...
    @property
    def aux_hidden(self) -> Tensor: ...
    @property
    def last_hidden(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """B samples padded on the right with zeros: tokens int64, loss_mask bool, hidden states in their stored dtype."""

    keys: tuple[str, ...]
    tokens_BT: Tensor
    loss_mask_BT: Tensor
    aux_hidden_BTA: Tensor
    last_hidden_BTH: Tensor

    @classmethod
    def of(cls, samples: Sequence[FeaturesOfOne], device: str = "cpu") -> Batch:
        """Pad and stack, on `device`."""

        def padded(tensors: list[Tensor]) -> Tensor:
            return pad_sequence(tensors, batch_first=True).to(device)

        return cls(
            keys=tuple(sample.key for sample in samples),
            tokens_BT=padded([sample.token_ids.long() for sample in samples]),
            loss_mask_BT=padded([sample.loss_mask for sample in samples]),
            aux_hidden_BTA=padded([sample.aux_hidden for sample in samples]),
            last_hidden_BTH=padded([sample.last_hidden for sample in samples]),
        )


def plan_batches(lengths: Sequence[int], max_tokens: int, seed: str) -> list[list[int]]:
    """Numbers of the samples of each batch, every sample once: B * T <= max_tokens, unless one sample alone is longer.

    Samples are shuffled, and sorted by length within windows of some fifty batches, so that padding stays low and
    batches still differ from pass to pass; then the batches are shuffled. Depends on nothing but the arguments.
    """
    rng = random.Random(seed)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    seen = accumulate(lengths[number] for number in order)
    window_of = {number: tokens // (50 * max_tokens) for number, tokens in zip(order, seen, strict=True)}
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
