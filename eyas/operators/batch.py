"""Samples side by side: padded tensors for a head, and which samples share a batch.

Letters: B batch, T longest of the batch, A = 3 * Ht, Ht target hidden size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eyas.shards import Sample

OPEN_PACKS = 32  # packed rows that still take samples


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of samples, padded on the right with zeros: tokens int64, loss_mask bool, hidden states
    in their stored dtype.

    starts_BT: int64, the column where each token's sample begins; -1 in padding. One sample a row,
    or many (`packed`). argmax_BT: int32, the target's best next token; -1 where it is not known.

        tokens    [x0 x1 x2 y0 y1 z0 .  . ]
        starts    [0  0  0  3  3  5  -1 -1]
    """

    keys: tuple[str, ...]
    tokens_BT: Tensor
    loss_mask_BT: Tensor
    aux_hidden_BTA: Tensor
    last_hidden_BTH: Tensor
    starts_BT: Tensor
    argmax_BT: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Batch:
        starts = [0] * len(samples)
        return cls._joined(samples, starts, lambda one, fill: pad_sequence(one, True, fill))

    @classmethod
    def packed(cls, samples: Sequence[Sample], num_tokens: int) -> Batch:
        """One row of the samples one behind the other, of `num_tokens` or as many as they need."""
        lengths = [len(sample.token_ids) for sample in samples]
        padding = max(0, num_tokens - sum(lengths))

        def join(tensors: list[Tensor], fill: int) -> Tensor:
            tail = tensors[0].new_full((padding, *tensors[0].shape[1:]), fill)
            return torch.cat([*tensors, tail])[None]

        return cls._joined(samples, [0, *accumulate(lengths[:-1])], join)

    @classmethod
    def _joined(
        cls,
        samples: Sequence[Sample],
        starts: Sequence[int],
        join: Callable[[list[Tensor], int], Tensor],
    ) -> Batch:
        lengths = [len(sample.token_ids) for sample in samples]
        columns = [torch.full((n,), start) for n, start in zip(lengths, starts, strict=True)]
        return cls(
            keys=tuple(sample.key for sample in samples),
            tokens_BT=join([sample.token_ids.long() for sample in samples], 0),
            loss_mask_BT=join([sample.loss_mask for sample in samples], 0),
            aux_hidden_BTA=join([sample.aux_hidden for sample in samples], 0),
            last_hidden_BTH=join([sample.last_hidden for sample in samples], 0),
            starts_BT=join(columns, -1),
            argmax_BT=join([sample.argmax for sample in samples], -1),
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All fields but the keys."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "keys"}

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


def plan_packs(lengths: Sequence[int], num_tokens: int, seed: str) -> list[list[int]]:
    """Numbers of the samples of each packed row, every sample once: their lengths sum to num_tokens
    at most, unless one sample alone is longer.

    Samples are shuffled, then each goes into the first of the last rows begun that has room for it:
    little padding, and rows that differ from pass to pass. Deterministic.
    """
    rng = random.Random(seed)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    packs: list[list[int]] = []
    rooms: list[int] = []
    for number in order:
        begun = range(max(0, len(packs) - OPEN_PACKS), len(packs))
        place = next((pack for pack in begun if rooms[pack] >= lengths[number]), len(packs))
        if place == len(packs):
            packs.append([])
            rooms.append(num_tokens)
        packs[place].append(number)
        rooms[place] -= lengths[number]
    rng.shuffle(packs)
    return packs
