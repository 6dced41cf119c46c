"""Rotary embedding, in Llama's convention: of D turned channels, d turns with d + D / 2."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from eyas.model.config import RopeConfig

Floats = NDArray[np.float32]
STEP = 1e-30  # in place of a division by zero


def inverse_frequencies(rope: RopeConfig, dims: int) -> Floats:
    """Radians per position of each channel pair, float32 [dims / 2].

    linear: all divided by `factor`. llama3: waves that fit `high_freq_factor` times or more into
    the original context stay, those that fit `low_freq_factor` times or fewer are divided by
    `factor`, those between are interpolated. yarn (arXiv 2309.00071): the same, interpolated by the
    channel's number. longrope (arXiv 2402.13753): each divided by its own factor.
    """
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    # rounded once, as PyTorch's power: the tables are those of transformers
    powers = (rope.theta ** exponents.astype(np.float64)).astype(np.float32)
    frequencies: Floats = np.float32(1) / powers
    if rope.kind == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.kind == "longrope":
        return np.float32(1) / (np.array(rope.factors, np.float32) * powers)
    if rope.kind == "yarn":
        first, last = _yarn_range(rope, dims)
        if first == last:
            last += 0.001  # as the reference
        pairs = np.arange(dims // 2, dtype=np.float32)
        ramp = ((pairs - np.float32(first)) / np.float32(last - first)).clip(0, 1)
        frequencies = frequencies / np.float32(rope.factor) * ramp + frequencies * (1 - ramp)
    if rope.kind == "llama3":
        length, low = rope.original_max_position_embeddings, rope.low_freq_factor
        waves_in_context = np.float32(length) * frequencies / np.float32(2 * math.pi)
        span = rope.high_freq_factor - low or STEP  # Llama 4 Scout has nothing between them
        kept = (waves_in_context - np.float32(low)) / np.float32(span)
        kept = kept.clip(0, 1)
        return frequencies * (kept + (1 - kept) / np.float32(rope.factor))
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


def rope_table(rope: RopeConfig, dims: int, length: int) -> tuple[Floats, Floats]:
    """Cosines and sines of positions 0 .. length - 1, float32 [length, dims / 2] each."""
    angles = np.arange(length, dtype=np.float32)[:, None] * inverse_frequencies(rope, dims)
    exact, factor = angles.astype(np.float64), np.float32(rope.attention_factor)
    cos, sin = (turned.astype(np.float32) * factor for turned in (np.cos(exact), np.sin(exact)))
    return cos, sin
