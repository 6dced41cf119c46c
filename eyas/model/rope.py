"""Rotary embedding, in Llama's convention: of D turned channels, d turns with d + D / 2."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eyas.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, dims: int) -> Tensor:
    """Radians per position of each channel pair, float32 [dims / 2].

    linear: all divided by `factor`. llama3 (Llama 3.1's published scaling): waves that fit
    `high_freq_factor` times or more into the original context stay, those that fit
    `low_freq_factor` times or fewer are divided by `factor`, and those between are interpolated.
    yarn (arXiv 2309.00071): the same, interpolated by the channel's number. longrope (arXiv
    2402.13753): each divided by its own factor.
    """
    exponents = torch.arange(0, dims, 2, dtype=torch.float32) / dims
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.factors) * rope.theta**exponents)
    if rope.kind == "yarn":
        first, last = _yarn_range(rope, dims)
        if first == last:
            last += 0.001  # as the reference: a step, not a division by zero
        ramp = ((torch.arange(dims // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
        return frequencies / rope.factor * ramp + frequencies * (1 - ramp)
    if rope.kind == "llama3":
        waves_in_context = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (waves_in_context - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        kept = kept.clamp(0.0, 1.0)
        return frequencies * (kept + (1.0 - kept) / rope.factor)
    return frequencies


def _yarn_range(rope: RopeConfig, dims: int) -> tuple[float, float]:
    """The channel pairs between which yarn interpolates: whose waves fit beta_fast and beta_slow
    times into the original context.
    """

    def pair(waves: float) -> float:
        length = rope.original_max_position_embeddings
        return dims * math.log(length / (waves * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    return max(first, 0), min(last, dims - 1)


def rotation(rope: RopeConfig, dims: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of integer positions [...], float32 [..., dims] each; the second half
    repeats the first.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * inverse_frequencies(rope, dims).to(
        positions.device
    )
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


def rope_table(rope: RopeConfig, dims: int, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 .. length - 1, float32 [length, dims] each."""
    return rotation(rope, dims, torch.arange(length))


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [..., dims] by cos, sin broadcastable to it; the result has the dtype of x times that
    of the table.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
