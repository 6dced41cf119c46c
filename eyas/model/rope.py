"""Rotary position embedding: the table of cosines and sines, and its application to queries and keys.

Knows Llama's half-rotation convention (channel d turns with channel d + D/2) and the frequency scalings of RopeConfig.
Does not know attention: whoever calls chooses the positions.

Letters: T positions, D head dimension.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eyas.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each channel pair, float32 [D / 2].

    linear: all divided by `factor`. llama3 (Llama 3.1's published scaling): waves that fit `high_freq_factor` times or more
    into the original context stay, those that fit `low_freq_factor` times or fewer are divided by `factor`, and those between
    are interpolated.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        waves_in_context = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (waves_in_context - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / rope.factor)
    return frequencies


def rope_table(rope: RopeConfig, head_dim: int, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 .. length - 1, float32 [length, D] each; the second half repeats the first."""
    frequencies = inverse_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [..., T, D] by the table's rows cos, sin [..., T, D]; the result has the dtype of x times the table's."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
