"""One training step: batches, teachers, loss, backward, update.

Losses are divided by what carries loss in all batches of the step, on all ranks: n batches make the
step of one batch with all their samples. No step waits for the device: figures stay there until
`rows_of` reads those of several steps, and from a loss or gradient that is not finite on, updates
are left out on the device.

Letters: B batch, T sequence, V target vocabulary, W draft vocabulary, H hidden, K steps of the
unroll.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from eyas.model.config import HeadConfig
from eyas.model.dialects import LM_HEAD
from eyas.operators.batch import Batch
from eyas.operators.head import Head
from eyas.operators.tensors import multiplies_bf16
from eyas.operators.ttt import sent
from eyas.operators.vocab import TargetVocabulary
from eyas.train.loss import (
    BatchLoss,
    ObjectiveConfig,
    StepPlan,
    Teacher,
    batch_loss,
    plan_of,
    teach,
    trained_slots,
)
from eyas.train.muon import Muon
from eyas.train.ranks import Ranks, reduce_gradients
from eyas.train.state import TrainingState

Precision = Literal["bfloat16", "float32"]
Dtype = Literal["auto", "bfloat16", "float32"]
BETAS = (0.9, 0.95)  # EAGLE's; SpecForge leaves torch's
MAX_GRAD_NORM = 0.5  # EAGLE's and SpecForge's
DRAW_STEP = 2**0.5 - 1  # between two training steps: no multiple of another sequence's
# of lm_head's rate: it begins as the target's rows, and Adam moves all tokens' logits at once
ROWS_RATE_SHARE = 0.2
# for `usual_learning_rate`
MOST_LEARNING_RATE, PUBLISHED_RATE, PUBLISHED_HIDDEN_SIZE = 1e-3, 1e-4, 4096
LONG_RUN, MOST_FOR_SHORT = 1000, 4.0
# dense bf16 teraflops by a part of the card's name, from NVIDIA's data sheets
PEAKS = {"H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "H200": 989.0, "B200": 2250.0}
PEAKS |= {"A100": 312.0, "L40S": 362.0}


class RateConfig(BaseModel):
    """A linear warm-up to the peak, then down to 0 or constant. A number alone is the peak.

    peak: null takes `usual_learning_rate` of the head and the run. warmup_share: EAGLE's and
    SpecForge's is .015, speculators' .01.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    peak: float | None = Field(None, gt=0)
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="from the peak down to 0, or at the peak"
    )
    warmup_share: float = Field(0.03, ge=0, lt=1, description="share of all steps")

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return value if isinstance(value, dict | RateConfig) else {"peak": value}

    def at(self, step: int, num_steps: int) -> float:
        """The rate of a step, counted from 0."""
        assert self.peak is not None, "the default depends on the head"
        warmup = max(1, round(self.warmup_share * num_steps))
        if step < warmup:
            return self.peak * (step + 1) / warmup
        done = (step - warmup) / max(1, num_steps - warmup)
        shares = {
            "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
            "linear": 1.0 - done,
            "constant": 1.0,
        }
        return self.peak * shares[self.schedule]


def quickest(device: str) -> Precision:
    """What dtype "auto" computes in on a device."""
    return "bfloat16" if multiplies_bf16(device) else "float32"


def usual_learning_rate(hidden_size: int, num_steps: int = LONG_RUN) -> float:
    """SpecForge's 1e-4 at hidden size 4096 (EAGLE: 5e-5), inverse to the width (Yang et al., arXiv
    2203.03466), at most 1e-3; times sqrt(LONG_RUN / num_steps) for a new head's short run
    (docs/decisions/training.md).
    """
    rate = min(MOST_LEARNING_RATE, PUBLISHED_RATE * PUBLISHED_HIDDEN_SIZE / hidden_size)
    return rate * min(MOST_FOR_SHORT, max(1.0, math.sqrt(LONG_RUN / num_steps)))


def optimizers_of(head: Head, weight_decay: float = 0.0) -> list[torch.optim.Optimizer]:
    """Of the head's float32 weights: Muon for the matrices inside the layer (Jordan,
    kellerjordan.github.io/posts/muon; steps as large as AdamW's: Liu et al., arXiv 2502.16982),
    AdamW for norms and lm_head.
    """
    trained = {name: weight for name, weight in head.named_parameters() if weight.requires_grad}
    rows = [trained.pop(LM_HEAD)] if LM_HEAD in trained else []
    norms, inside = ([one for one in trained.values() if one.ndim == n] for n in (1, 2))
    # `training_step` sets the rate of a group: the run's times its share
    by_share = [(norms, 1.0, 0.0), (rows, ROWS_RATE_SHARE, weight_decay)]
    groups = [
        {"params": weights, "share": share, "weight_decay": decay}
        for weights, share, decay in by_share
        if weights
    ]
    return [
        Muon([{"params": inside, "share": 1.0, "weight_decay": weight_decay}]),
        torch.optim.AdamW(groups, betas=BETAS, fused=True),
    ]


class PlannedBatch(NamedTuple):
    """On one device."""

    batch: Batch
    plan: StepPlan


class LossModule(nn.Module):
    """Head and loss as one module: torch's sharding hooks into its forward.

    embed_tokens [V, H]: the target's, in the precision of the maths.
    """

    def __init__(
        self, head: Head, vocabulary: TargetVocabulary, config: ObjectiveConfig, dtype: Precision
    ) -> None:
        super().__init__()
        self.head, self.vocabulary, self.config = head, vocabulary, config
        self.embed_tokens = vocabulary.embed_tokens.to(getattr(torch, dtype))

    def planned(self, batch: Batch, step: int) -> PlannedBatch:
        """A batch of the CPU on the head's device, planned for this step (from 0)."""
        device, draw = self.embed_tokens.device, step * DRAW_STEP % 1.0
        plan = plan_of(batch, self.config, self.head.config, draw, device.type)
        return PlannedBatch(batch.to(str(device)), sent(plan, device))

    def teach(self, planned: PlannedBatch) -> Teacher:
        batch, plan = planned
        return teach(batch, self.vocabulary, self.head, plan)

    def trained_slots(self, teachers: Sequence[Teacher]) -> Tensor:
        """Sums over these batches, float64 [K]."""
        K, device = self.config.num_ttt_steps, self.embed_tokens.device
        counts = [trained_slots(teacher, K).double() for teacher in teachers]
        return sum(counts, torch.zeros(K, dtype=torch.float64, device=device))

    def forward(self, batch: Batch | None, teacher: Teacher | None, divisor_K: Tensor) -> BatchLoss:
        """One batch's share of the step's loss; without a batch 0, with zero gradients.

        divisor_K: `trained_slots` of the step on all ranks [K].
        """
        if batch is None or teacher is None:
            zero = sum(0.0 * weight.sum() for weight in self.head.parameters())
            return BatchLoss(zero, *(torch.zeros_like(divisor_K) for _ in range(4)))  # type: ignore[arg-type]
        device, dtype = batch.tokens_BT.device, self.embed_tokens.dtype
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            return batch_loss(self.head, self.embed_tokens, batch, teacher, self.config, divisor_K)


class StepFigures(NamedTuple):
    """step: from 1. keys: of this rank's samples. On the device, float64: this rank's sums [1 + 4 K
    + 2], the gradient's norm [1].
    """

    step: int
    keys: tuple[str, ...]
    rate: float
    sums: Tensor
    norm: Tensor


def training_step(
    state: TrainingState,
    module: LossModule,
    batches: Sequence[PlannedBatch],
    ranks: Ranks,
    rate: float,
) -> StepFigures:
    """One update of the weights, from these batches and those of the other ranks. If loss or
    gradient is not finite, this step and all later ones change no weight.
    """
    teachers = [module.teach(one) for one in batches]
    divisor_K = ranks.all_reduce(module.trained_slots(teachers))

    # in the last step a rank may have no batch: it takes part in the sums with a loss of 0
    pairs: list[tuple[Batch | None, Teacher | None]]
    pairs = [(one.batch, of) for one, of in zip(batches, teachers, strict=True)] or [(None, None)]
    sums = torch.zeros(3 + 4 * len(divisor_K), dtype=torch.float64, device=divisor_K.device)
    for number, (batch, teacher) in enumerate(pairs, 1):
        reduce_gradients(module, now=number == len(pairs))
        loss: BatchLoss = module(batch, teacher, divisor_K)
        loss.loss.backward()  # type: ignore[no-untyped-call]
        sizes = teacher.plan.counts[-2:] if teacher else sums.new_zeros(2)
        sums += torch.cat([loss.loss.detach().view(1), *loss[1:], sizes])

    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    weights = [weight for group in groups for weight in group["params"]]
    norm = nn.utils.clip_grad_norm_(weights, MAX_GRAD_NORM)  # of the whole gradient, unclipped
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    state.broken = ~(norm.isfinite() & (state.broken == 0))
    for optimizer in state.optimizers:
        optimizer.found_inf = state.broken.float()  # type: ignore[attr-defined]  # torch's own name
        for group in optimizer.param_groups:
            group["lr"] = rate * group["share"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state.step += 1
    keys = tuple(key for one in batches for key in one.batch.keys)
    return StepFigures(state.step, keys, rate, sums, norm.double().view(1))


def step_flops(shape: HeadConfig, num_tokens: float, judged_K: Sequence[float]) -> float:
    """The floating-point operations that a step over so many tokens and judged slots needs.

    Products with weights, without padding: 2 operations for each number of a matrix and row in the
    forward, and in each of its two gradients; no attention scores, norms, optimizer, recomputation.
    Ht: the target's hidden size, I the MLP's, Hq and Hk query and key heads, D head dimension.

        a token               keys and values 2 H x 2 Hk D; fc 3 Ht x H, whose input has no gradient
        a slot of each step   queries 2 H x Hq D, o_proj Hq D x H, MLP 3 x H I, lm_head H x W
        a slot from step 1    keys and values of its own
        a teacher's row       Ht x W, without gradients
    """
    H, Ht, W = shape.hidden_size, shape.target_hidden_size, shape.draft_vocab_size
    queries = shape.num_attention_heads * shape.head_dim
    keys_and_values = 2 * H * 2 * shape.num_key_value_heads * shape.head_dim
    slot = 2 * H * queries + queries * H + 3 * H * shape.intermediate_size + H * W
    with_gradients = (num_tokens + sum(judged_K[1:])) * keys_and_values + sum(judged_K) * slot
    return 6 * with_gradients + 4 * num_tokens * 3 * Ht * H + 2 * judged_K[0] * Ht * W


def peak_flops(device: str, dtype: str) -> float | None:
    """A card's operations a second; None for a CPU, an unknown card, and dtypes but bf16."""
    if device == "cpu" or dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for part, peak in PEAKS.items() if part in name), None)


def rows_of(
    figures: Sequence[StepFigures], ranks: Ranks, shape: HeadConfig
) -> list[dict[str, Any]]:
    """The rows of metrics of these steps, on every rank: one sum and one copy from the device. All
    ranks call it.
    """
    sums = ranks.all_reduce(torch.stack([one.sums for one in figures]))
    numbers = torch.cat([sums, torch.stack([one.norm for one in figures])], dim=1).tolist()
    rows = []
    for one, (loss, *summed, num_samples, num_tokens, norm) in zip(figures, numbers, strict=True):
        K = len(summed) // 4
        # the four fields of BatchLoss behind the loss, [K] each
        by_step, judged, trained, hits = (summed[K * part :][:K] for part in range(4))
        row = {
            "step": one.step,
            "loss": loss,
            "step_losses": by_step,
            "accuracy": [hit / max(count, 1.0) for hit, count in zip(hits, judged, strict=True)],
            "samples": int(num_samples),
            "tokens": int(num_tokens),
            "judged": int(judged[0]),
            "trained": int(trained[0]),
            "learning_rate": one.rate,
            "grad_norm": norm,
            "flops": step_flops(shape, num_tokens, judged),
        }
        rows.append(row)
    return rows
