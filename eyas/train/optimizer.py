"""AdamW and its learning rate. Knows parameters and steps, no head and no loss."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn


class OptimizerConfig(BaseModel):
    """AdamW with a linear warm-up and half a cosine down to `final_share` of the learning rate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    learning_rate: float = Field(1e-3, gt=0)
    warmup_share: float = Field(0.03, ge=0, lt=1)
    final_share: float = Field(0.0, ge=0, le=1)
    max_grad_norm: float = Field(0.5, gt=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)


def adamw(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """The optimizer of these float32 weights, whatever the precision of the maths."""
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(
        parameters, config.learning_rate, betas, weight_decay=config.weight_decay, fused=True
    )


def learning_rate(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """The rate of a step, counted from 0."""
    warmup = max(1, round(config.warmup_share * num_steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    cosine = 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))
    return config.learning_rate * (config.final_share + (1.0 - config.final_share) * cosine)
