"""One step: the batches of all ranks, one loss over them, one update of the weights.

Knows the objective and the ranks. Does not know where batches come from, nor when the run ends.

The losses of a step are divided by what carries loss in all of its batches, on all ranks. So a step
of n batches is the step of one batch that holds their samples, whoever computes which of them.

Letters: B batch, T sequence, M = B T, K steps of the unroll.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.model.batch import Batch
from eyas.model.head import Head
from eyas.model.vocab import TargetVocabulary
from eyas.train.checkpoint import Run
from eyas.train.loss import ObjectiveConfig, Outcome, Teacher, divisors, objective, teach
from eyas.train.ranks import Ranks

Precision = Literal["bfloat16", "float32"]


@dataclass(frozen=True, slots=True)
class Given:
    """What does not change while a run goes on. embed_tokens [V, H]: the target's, in the precision
    of the maths.
    """

    objective: ObjectiveConfig
    max_grad_norm: float
    vocabulary: TargetVocabulary
    embed_tokens: Tensor
    ranks: Ranks

    @classmethod
    def of(
        cls,
        objective: ObjectiveConfig,
        max_grad_norm: float,
        dtype: Precision,
        vocabulary: TargetVocabulary,
        ranks: Ranks,
    ) -> Given:
        """For maths in `dtype`."""
        return cls(
            objective,
            max_grad_norm,
            vocabulary,
            vocabulary.embed_tokens.to(getattr(torch, dtype)),
            ranks,
        )


@contextmanager
def teaching_in_tf32(dtype: Precision) -> Iterator[None]:
    """With maths in bf16, a GPU multiplies the teacher's float32 numbers as TF32: it has all digits
    of bf16.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = before or dtype == "bfloat16"
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch.backends.cuda.matmul.allow_tf32 = before


def update(
    run: Run, batches: Sequence[Batch], given: Given, learning_rate: float
) -> dict[str, Any]:
    """One step on these batches and those of the other ranks; returns its row of metrics, the same
    on every rank.

    Raises EyasError, naming the samples, when loss or gradient is no finite number; the weights are
    then as they were.
    """
    ranks, head = given.ranks, run.head
    teachers, counts = ranks.together(lambda: taught(head, batches, given))
    divisor_K = torch.tensor(ranks.total(counts))
    outcomes = ranks.together(lambda: backward(head, batches, teachers, divisor_K, given))
    trained = [weight for group in run.optimizer.param_groups for weight in group["params"]]
    for weight in trained:
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    ranks.add_up([weight.grad for weight in trained])
    norm = float(torch.nn.utils.clip_grad_norm_(trained, given.max_grad_norm))
    row = totals(outcomes, batches, given)
    if not math.isfinite(row["loss"] + norm):
        raise not_finite(run.step, row["loss"], norm, batches, ranks)
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    run.step += 1
    return {"step": run.step, **row, "learning_rate": learning_rate, "grad_norm": norm}


def taught(head: Head, batches: Sequence[Batch], given: Given) -> tuple[list[Teacher], list[float]]:
    """The teacher of each batch, and what carries loss in all of them, by step [K]."""
    teachers = [teach(batch, given.vocabulary, head, given.objective) for batch in batches]
    counts_K = torch.zeros(given.objective.num_ttt_steps, dtype=torch.int64)
    for batch, teacher in zip(batches, teachers, strict=True):
        counts_K += divisors(batch, teacher, given.objective).cpu()
    return teachers, counts_K.tolist()


def backward(
    head: Head,
    batches: Sequence[Batch],
    teachers: Sequence[Teacher],
    divisor_K: Tensor,
    given: Given,
) -> list[Outcome]:
    """The gradients of these batches' part of the loss, added to the weights'."""
    outcomes = []
    for batch, teacher in zip(batches, teachers, strict=True):
        device, dtype = batch.tokens_BT.device, given.embed_tokens.dtype
        with torch.autocast(device.type, dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
            outcome = objective(
                head, given.embed_tokens, batch, teacher, given.objective, divisor_K.to(device)
            )
        outcome.loss.backward()  # type: ignore[no-untyped-call]
        outcomes.append(outcome)
    return outcomes


def totals(outcomes: Sequence[Outcome], batches: Sequence[Batch], given: Given) -> dict[str, Any]:
    """What a row of metrics says of the batches of all ranks."""
    K = given.objective.num_ttt_steps
    sums = torch.zeros(1 + 4 * K, dtype=torch.float64)
    for one in outcomes:
        by_step = (one.step_losses, one.num_judged, one.num_trained, one.num_hits)
        parts = [one.loss.detach().view(1), *by_step]
        sums += torch.cat([part.to("cpu", torch.float64) for part in parts])
    tokens = sum(int(batch.tokens_BT.numel()) for batch in batches)
    *summed, num_samples, num_tokens = given.ranks.total(
        [*sums.tolist(), sum(len(batch.keys) for batch in batches), tokens]
    )
    losses, judged, trained, hits = (summed[1 + K * part : 1 + K * (part + 1)] for part in range(4))
    return {
        "loss": summed[0],
        "step_losses": losses,
        "accuracy": [hit / max(count, 1.0) for hit, count in zip(hits, judged, strict=True)],
        "samples": int(num_samples),
        "tokens": int(num_tokens),
        "judged": int(judged[0]),
        "trained": int(trained[0]),
    }


def not_finite(
    step: int, loss: float, norm: float, batches: Sequence[Batch], ranks: Ranks
) -> EyasError:
    """The error of a step that would have spoilt the weights, naming its samples and those with
    broken features.
    """
    said = ranks.gathered([(batch.keys, broken_samples(batch)) for batch in batches])
    keys = [key for of_rank in said for all_keys, _ in of_rank for key in all_keys]
    broken = [key for of_rank in said for _, broken_keys in of_rank for key in broken_keys]
    hint = (
        f"the features of {', '.join(broken)} are not finite: capture them again"
        if broken
        else "try a lower optimizer.learning_rate"
    )
    return EyasError(
        f"step {step + 1} has loss {loss} and gradient norm {norm}; its samples: {', '.join(keys)}",
        hint,
    )


def broken_samples(batch: Batch) -> list[str]:
    """Keys of the samples with features that are no finite numbers; a row may hold several samples."""
    finite_BT = batch.aux_hidden_BTA.isfinite().all(-1) & batch.last_hidden_BTH.isfinite().all(-1)
    begins_BT = batch.starts_BT == torch.arange(finite_BT.shape[1], device=finite_BT.device)
    # padding counts to the sample before it, and is finite
    sample_M = begins_BT.flatten().cumsum(0) - 1
    return [batch.keys[number] for number in sorted(set(sample_M[~finite_BT.flatten()].tolist()))]
