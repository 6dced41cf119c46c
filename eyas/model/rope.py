"""Rotary position embedding: the cosines and sines of positions, and their application to queries
and keys.

Knows Llama's half-rotation convention (channel d turns with channel d + D/2) and the frequency
scalings of RopeConfig. Does not know attention: whoever calls chooses the positions.

Letters: T positions, D head dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eyas.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each channel pair, float32 [D / 2].

    linear: all divided by `factor`. llama3 (Llama 3.1's published scaling): waves that fit
    `high_freq_factor` times or more into the original context stay, those that fit
    `low_freq_factor` times or fewer are divided by `factor`, and those between are interpolated.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        waves_in_context = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (waves_in_context - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        kept = kept.clamp(0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / rope.factor)
    return frequencies


def rotation(rope: RopeConfig, head_dim: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of integer positions [...], float32 [..., D] each; the second half of D
    repeats the first.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * inverse_frequencies(rope, head_dim).to(
        positions.device
    )
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def rope_table(rope: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 .. length - 1, float32 [length, D] each."""
    return rotation(rope, head_dim, torch.arange(length))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [..., D] by cos, sin broadcastable to it; the result has the dtype of x times that of
    the table.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
