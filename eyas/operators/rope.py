"""The rotary embedding of the head that trains: at any positions, on any device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from eyas.model.config import RopeConfig
from eyas.model.rope import inverse_frequencies


def rotation(rope: RopeConfig, dims: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of integer positions [...], float32 [..., dims] each; the second half
    repeats the first.
    """
    frequencies = frequencies_on(rope, dims, positions.device)
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


@functools.cache
def frequencies_on(rope: RopeConfig, dims: int, device: torch.device) -> Tensor:
    """`inverse_frequencies`, copied to a device once."""
    return torch.from_numpy(inverse_frequencies(rope, dims)).to(device)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [..., dims] by cos, sin broadcastable to it; the result has the dtype of x times that
    of the table.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
