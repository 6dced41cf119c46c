"""One training step: batches, teachers, loss, backward, update of the weights.

The losses of a step are divided by what carries loss in all of its batches, on all ranks. So a step
of n batches is the step of one batch that holds their samples, whichever rank computes them.

Letters: B batch, T sequence, M = B T, V target vocabulary, H hidden, A = 3 * the target's hidden
size, K steps of the unroll.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from eyas.errors import EyasError
from eyas.model.dialects import LM_HEAD
from eyas.operators.batch import Batch
from eyas.operators.head import Head
from eyas.operators.tensors import multiplies_bf16
from eyas.operators.vocab import TargetVocabulary
from eyas.train.loss import BatchLoss, ObjectiveConfig, Teacher, batch_loss, divisors, teach
from eyas.train.muon import Muon
from eyas.train.ranks import Ranks, reduce_gradients
from eyas.train.state import TrainingState

Precision = Literal["bfloat16", "float32"]
Dtype = Literal["auto", "bfloat16", "float32"]
BETAS = (0.9, 0.95)  # EAGLE's; SpecForge leaves torch's
MAX_GRAD_NORM = 0.5  # EAGLE's and SpecForge's
DRAW_STEP = 2**0.5 - 1  # between two training steps: no multiple of another sequence's
# Of the rate, for lm_head and embeddings: they begin as the target's rows, and a step of Adam moves
# the logits of all tokens at once.
ROWS_RATE_SHARE = 0.2
# for `usual_learning_rate`
MOST_LEARNING_RATE, PUBLISHED_RATE, PUBLISHED_HIDDEN_SIZE = 1e-3, 1e-4, 4096
LONG_RUN, MOST_FOR_SHORT = 1000, 4.0


class RateConfig(BaseModel):
    """The learning rate: a linear warm-up to its peak, then down to 0 or constant. A number alone
    is the peak.

    peak: null takes `usual_learning_rate` of the head and the run. warmup_share: EAGLE's and
    SpecForge's is .015, speculators' .01.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    peak: float | None = Field(None, gt=0)
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="from the peak down to 0, or at the peak"
    )
    warmup_share: float = Field(0.03, ge=0, lt=1, description="of all steps")

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
    """SpecForge's 1e-4 at hidden size 4096 (EAGLE: 5e-5), in inverse proportion at others.

    That is how Adam's rate goes with the width (Yang et al., arXiv 2203.03466). At most 1e-3, which
    was good at hidden size 320. num_steps: of a new head's run; below LONG_RUN it has no time for
    small steps, and the rate is sqrt(LONG_RUN / num_steps) times that (docs/decisions/training.md).
    """
    rate = min(MOST_LEARNING_RATE, PUBLISHED_RATE * PUBLISHED_HIDDEN_SIZE / hidden_size)
    return rate * min(MOST_FOR_SHORT, max(1.0, math.sqrt(LONG_RUN / num_steps)))


def optimizers_of(head: Head, weight_decay: float = 0.0) -> list[torch.optim.Optimizer]:
    """The optimizers of the head's float32 weights, whatever the precision of the maths.

    Muon (Jordan, kellerjordan.github.io/posts/muon; its steps as large as AdamW's: Liu et al.,
    arXiv 2502.16982) for the matrices inside the layer, AdamW for norms and lm_head.
    """
    trained = {name: weight for name, weight in head.named_parameters() if weight.requires_grad}
    rows = [trained.pop(LM_HEAD)] if LM_HEAD in trained else []
    inside = [weight for weight in trained.values() if weight.ndim == 2]
    norms = [weight for weight in trained.values() if weight.ndim == 1]
    # `training_step` sets the rate before every update: the run's times the group's share
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


class LossModule(nn.Module):
    """The head and the loss of a batch as one module: torch's sharding works around its forward.

    embed_tokens [V, H]: the target's, in the precision of the maths.
    """

    def __init__(
        self, head: Head, vocabulary: TargetVocabulary, config: ObjectiveConfig, dtype: Precision
    ) -> None:
        super().__init__()
        self.head, self.vocabulary, self.config = head, vocabulary, config
        self.embed_tokens = vocabulary.embed_tokens.to(getattr(torch, dtype))

    def teach(self, batch: Batch, draw: float) -> Teacher:
        """The target at the batch's judged positions: see `loss.teach`."""
        return teach(batch, self.vocabulary, self.head, draw)

    def divisors(self, batches: Sequence[Batch], teachers: Sequence[Teacher]) -> Tensor:
        """The sums over these batches of `loss.divisors`, int64 [K] on the CPU."""
        counts_K = torch.zeros(self.config.num_ttt_steps, dtype=torch.int64)
        for batch, teacher in zip(batches, teachers, strict=True):
            counts_K += divisors(batch, teacher, self.config).cpu()
        return counts_K

    def forward(self, batch: Batch | None, teacher: Teacher | None, divisor_K: Tensor) -> BatchLoss:
        """One batch's share of the step's loss; without a batch a loss of 0 with zero gradients.

        divisor_K: the divisors of all batches of the step on all ranks, int64 [K].
        """
        if batch is None or teacher is None:
            zero = sum((0.0 * weight.sum() for weight in self.head.parameters()), torch.zeros(()))
            return BatchLoss(zero, *(torch.zeros_like(divisor_K) for _ in range(4)))
        return self.batch_loss(batch, teacher, divisor_K)

    def batch_loss(self, batch: Batch, teacher: Teacher, divisor_K: Tensor) -> BatchLoss:
        """As `forward`, which torch's sharding works around: all ranks call that equally often."""
        device, dtype = batch.tokens_BT.device, self.embed_tokens.dtype
        divisor_K = divisor_K.to(device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            return batch_loss(self.head, self.embed_tokens, batch, teacher, self.config, divisor_K)


@contextmanager
def teaching_in_tf32(dtype: Dtype) -> Iterator[None]:
    """While the block runs, a GPU may multiply float32 as TF32, unless that is the `dtype`.

    The float32 products are the teacher's then, and TF32 has all digits of weights and features
    that are stored in bf16.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = before or dtype != "float32"
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch.backends.cuda.matmul.allow_tf32 = before


def training_step(
    state: TrainingState,
    module: LossModule,
    batches: Sequence[Batch],
    ranks: Ranks,
    rate: float,
) -> dict[str, Any]:
    """One update of the weights, from these batches and those of the other ranks.

    Returns the step's row of metrics, the same on every rank. Raises EyasError, with the names of
    the samples, when the loss or the gradient is not finite; the weights are unchanged then.
    """
    draw = state.step * DRAW_STEP % 1.0
    teachers = [module.teach(batch, draw) for batch in batches]
    divisor_K = torch.tensor(ranks.total(module.divisors(batches, teachers).tolist()))

    # in the last step of a run a rank may have no batch: it takes part in the sums with a loss of 0
    pairs: list[tuple[Batch | None, Teacher | None]]
    pairs = [*zip(batches, teachers, strict=True)] or [(None, None)]
    losses: list[BatchLoss] = []
    for number, (batch, teacher) in enumerate(pairs, 1):
        reduce_gradients(module, now=number == len(pairs))
        loss: BatchLoss = module(batch, teacher, divisor_K)
        loss.loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss)

    row = metrics_row(losses, batches, ranks)
    norm = gradient_norm(state.optimizers)
    if not math.isfinite(row["loss"] + norm):
        raise not_finite(state.step, row["loss"], norm, batches, ranks)
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group["share"]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state.step += 1
    return {"step": state.step, **row, "learning_rate": rate, "grad_norm": norm}


def gradient_norm(of: Sequence[torch.optim.Optimizer]) -> float:
    """The norm of the whole gradient before it is clipped to MAX_GRAD_NORM, in place."""
    groups = [group for optimizer in of for group in optimizer.param_groups]
    weights = [weight for group in groups for weight in group["params"]]
    norm = nn.utils.clip_grad_norm_(weights, MAX_GRAD_NORM)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def metrics_row(
    losses: Sequence[BatchLoss], batches: Sequence[Batch], ranks: Ranks
) -> dict[str, Any]:
    """A row of metrics without step and rate, summed over all ranks. All ranks call it."""
    K = len(losses[0].step_losses)
    sums = torch.zeros(1 + 4 * K, dtype=torch.float64)
    for one in losses:
        parts = (one.loss.detach().view(1), *one[1:])
        sums += torch.cat([part.to("cpu", torch.float64) for part in parts])
    sizes = [sum(len(batch.keys) for batch in batches), sum(b.tokens_BT.numel() for b in batches)]
    *summed, num_samples, num_tokens = ranks.total([*sums.tolist(), *sizes])
    # the four fields of BatchLoss behind the loss, [K] each
    by_step, judged, trained, hits = (summed[1 + K * part :][:K] for part in range(4))
    return {
        "loss": summed[0],
        "step_losses": by_step,
        "accuracy": [hit / max(count, 1.0) for hit, count in zip(hits, judged, strict=True)],
        "samples": int(num_samples),
        "tokens": int(num_tokens),
        "judged": int(judged[0]),
        "trained": int(trained[0]),
    }


def not_finite(
    step: int, loss: float, norm: float, batches: Sequence[Batch], ranks: Ranks
) -> EyasError:
    """The error of a step whose loss or gradient is not finite. All ranks call it.

    It names the step's samples, and in the hint those with features that are not finite.
    """
    keys = ranks.listed(key for batch in batches for key in batch.keys)
    broken = ranks.listed(key for batch in batches for key in broken_samples(batch))
    hint = (
        f"the features of {', '.join(broken)} are not finite: capture them again"
        if broken
        else "try a lower learning_rate"
    )
    return EyasError(
        f"step {step + 1} has loss {loss} and gradient norm {norm}; its samples: {', '.join(keys)}",
        hint,
    )


def broken_samples(batch: Batch) -> list[str]:
    """The keys of the batch's samples whose features hold NaN or infinity."""
    finite_BT = batch.aux_hidden_BTA.isfinite().all(-1) & batch.last_hidden_BTH.isfinite().all(-1)
    begins_BT = batch.starts_BT == torch.arange(finite_BT.shape[1], device=finite_BT.device)
    # the number of each token's sample; padding has that of the sample before, and is finite
    sample_M = begins_BT.flatten().cumsum(0) - 1
    return [batch.keys[number] for number in sorted(set(sample_M[~finite_BT.flatten()].tolist()))]
