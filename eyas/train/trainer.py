"""The train stage: features -> head. Optimizer, schedule, checkpoints and metrics around the objective of `loss`.

Knows one process and one device. Does not know how features were made, nor what a head is exported to.

A run is a fixed list of batches, drawn from the seed; a checkpoint is the number of batches done, the weights and the
optimizer's state. So a run that was killed goes on to the same weights, bit for bit, on the same machine.

Letters: V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from eyas.artifact import Artifact, Manifest, identity
from eyas.builtin import resolve_target
from eyas.errors import EmptyInputError, EyasError, MismatchError
from eyas.log import Track, quiet
from eyas.model.batch import Batch, plan_batches
from eyas.model.config import HeadConfig, HeadOptions
from eyas.model.head import Head, head_files
from eyas.model.vocab import TargetVocabulary, draft_vocabulary
from eyas.shards import FeatureMeta, Features
from eyas.train.initial import initialise
from eyas.train.loss import ObjectiveConfig, judged_positions, objective, teach

CHECKPOINT, METRICS = "checkpoint.pt", "metrics.jsonl"


class TrainConfig(BaseModel):
    """Settings of the train stage. batch_tokens counts padding; checkpoint_every counts batches."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    draft_vocab_size: int = Field(2048, ge=1)
    num_ttt_steps: int = Field(7, ge=1, le=16)
    step_decay: float = Field(0.8, gt=0, le=1)
    epochs: int = Field(3, ge=1)
    batch_tokens: int = Field(4096, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    warmup_share: float = Field(0.03, ge=0, lt=1)
    max_grad_norm: float = Field(0.5, gt=0)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    checkpoint_every: int = Field(200, ge=1)
    seed: int = 0


@dataclass(slots=True)
class Run:
    """What training changes: the head, the optimizer's state, the number of batches done and a row of metrics of each."""

    head: Head
    optimizer: torch.optim.AdamW
    step: int
    metrics: list[dict[str, Any]]


def train(config: TrainConfig, target: str, features: Artifact, output: Artifact, track: Track = quiet) -> Manifest:
    """Train a head on the `train` split of a capture artifact; an interrupted run resumes from its last checkpoint.

    target: a folder, or "builtin". Writes eyas_head.json, model.safetensors (in config.dtype) and metrics.jsonl, a row a batch.
    Raises MismatchError for features of another target, EmptyInputError for features without a trainable answer, and
    EyasError, naming the batch, when a loss or gradient is no finite number.
    """
    settings, inputs = config.model_dump(mode="json"), {"features": features.manifest("capture")}
    source = Features(features, "train")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vocabulary = TargetVocabulary.load(resolve_target(target)).to(device)
    check_same_target(source.meta, vocabulary)
    if not output.begin(identity("train", settings, inputs)):
        return output.manifest("train")
    counts_V, usable = survey(source)
    batches = plan(config, [source.lengths[number] for number in usable])
    run = start(config, source.meta, vocabulary, counts_V)
    resume(run, output)
    for samples in source.batches([[usable[number] for number in numbers] for numbers in batches[run.step :]]):
        batch = Batch.of(samples, device)
        row = update(run, batch, vocabulary, config, schedule(run.step, len(batches), config))
        if run.step % config.checkpoint_every == 0 and run.step < len(batches):
            save(run, output)
        track(run.step, len(batches), f"loss {row['loss']:.3f} accuracy {row['accuracy'][0]:.3f}")
    for name, data in head_files(run.head.to(getattr(torch, config.dtype))).items():
        output.write(name, data)
    output.write_jsonl(METRICS, run.metrics)
    output.delete(CHECKPOINT)
    size = sum(weight.numel() for weight in run.head.parameters())
    counts = {"batches": len(batches), "samples": len(usable), "parameters": size}
    facts = {
        "last_batches": mean_of_last(run.metrics),
        "draft_vocabulary_coverage": float(counts_V[run.head.t2d.cpu()].sum() / counts_V.sum()),
    }
    return output.finish("train", settings, inputs, counts, facts)


def check_same_target(meta: FeatureMeta, vocabulary: TargetVocabulary) -> None:
    """Raise MismatchError unless the features are of this target."""
    ours = vocabulary.config
    if (meta.hidden_size, meta.vocab_size) != (ours.hidden_size, ours.vocab_size):
        raise MismatchError(
            f"the features are of a target of hidden size {meta.hidden_size} and a vocabulary of {meta.vocab_size}; "
            f"this one has {ours.hidden_size} and {ours.vocab_size}",
            "give the target that the features were captured from",
        )
    if meta.lm_head_sha256 != vocabulary.lm_head_sha256:
        raise MismatchError(
            "the features are of another target of the same shape (its lm_head has another hash)",
            "give the target that the features were captured from, or capture them again",
        )


def survey(source: Features) -> tuple[Tensor, list[int]]:
    """Counts int64 [V] of tokens under the loss mask, and the numbers of the samples with a position to train on."""
    counts_V = torch.zeros(source.meta.vocab_size, dtype=torch.int64)
    usable = []
    for number, (token_ids, loss_mask) in enumerate(source.all_tokens()):
        counts_V += torch.bincount(token_ids[loss_mask], minlength=len(counts_V))
        if judged_positions(loss_mask[None]).any():
            usable.append(number)
    if not usable:
        raise EmptyInputError(
            "the features hold no answer of two tokens or more", "generate and capture answers with more prompts"
        )
    return counts_V, usable


def plan(config: TrainConfig, lengths: list[int]) -> list[list[int]]:
    """The batches of the whole run in order."""
    passes = (plan_batches(lengths, config.batch_tokens, f"{config.seed}/{epoch}") for epoch in range(config.epochs))
    return [numbers for batches in passes for numbers in batches]


def start(config: TrainConfig, meta: FeatureMeta, vocabulary: TargetVocabulary, counts_V: Tensor) -> Run:
    """A fresh head for this target and an optimizer for it; weights are float32 whatever the precision of the maths."""
    shape = HeadConfig.for_target(vocabulary.config, HeadOptions(draft_vocab_size=config.draft_vocab_size), meta.taps)
    head = Head(shape.model_copy(update={"target_lm_head_sha256": vocabulary.lm_head_sha256}))
    head.set_vocabulary(*draft_vocabulary(counts_V, config.draft_vocab_size))
    initialise(head, vocabulary, config.seed)
    head.to(vocabulary.embed_tokens.device)
    optimizer = torch.optim.AdamW(head.parameters(), config.learning_rate, (0.9, 0.95), weight_decay=0.0, fused=True)
    return Run(head, optimizer, 0, [])


def schedule(step: int, num_steps: int, config: TrainConfig) -> float:
    """The learning rate of a step: linear warm-up, then half a cosine down to zero."""
    warmup = max(1, round(config.warmup_share * num_steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))


def update(run: Run, batch: Batch, vocabulary: TargetVocabulary, config: TrainConfig, learning_rate: float) -> dict[str, Any]:
    """One step on one batch; returns its row of metrics. Raises EyasError when loss or gradient is not finite."""
    dtype = getattr(torch, config.dtype)
    wanted = ObjectiveConfig(num_ttt_steps=config.num_ttt_steps, step_decay=config.step_decay)
    teacher = teach(batch, vocabulary, run.head, wanted)
    with torch.autocast(batch.tokens_BT.device.type, dtype, enabled=dtype != torch.float32):
        embed_tokens = vocabulary.embed_tokens.to(dtype)
        outcome = objective(run.head, embed_tokens, batch, teacher, wanted)
    outcome.loss.backward()  # type: ignore[no-untyped-call]
    norm = float(torch.nn.utils.clip_grad_norm_(run.head.parameters(), config.max_grad_norm))
    loss = float(outcome.loss.detach())
    if not math.isfinite(loss + norm):
        raise not_finite(run.step, loss, norm, batch)
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    run.step += 1
    row = {
        "step": run.step,
        "loss": loss,
        "step_losses": outcome.step_losses.tolist(),
        "accuracy": (outcome.num_hits / outcome.num_judged.clamp(min=1)).tolist(),
        "learning_rate": learning_rate,
        "grad_norm": norm,
        "samples": len(batch.keys),
        "judged": int(outcome.num_judged[0]),
        "trained": int(outcome.num_trained[0]),
    }
    run.metrics.append(row)
    return row


def not_finite(step: int, loss: float, norm: float, batch: Batch) -> EyasError:
    """The error of a batch that would have spoilt the weights, naming its samples and those with broken features."""
    finite_B = batch.aux_hidden_BTA.isfinite().all(-1).all(-1) & batch.last_hidden_BTH.isfinite().all(-1).all(-1)
    broken = [key for key, fine in zip(batch.keys, finite_B.tolist(), strict=True) if not fine]
    hint = f"the features of {', '.join(broken)} are not finite: capture them again" if broken else "try a lower learning rate"
    return EyasError(f"step {step + 1} has loss {loss} and gradient norm {norm}; its samples: {', '.join(batch.keys)}", hint)


def mean_of_last(metrics: list[dict[str, Any]], count: int = 50) -> dict[str, Any]:
    """Loss and accuracy per step, averaged over the last batches."""
    last = metrics[-count:]
    accuracy = [sum(column) / len(last) for column in zip(*(row["accuracy"] for row in last), strict=True)]
    return {"loss": sum(row["loss"] for row in last) / len(last), "accuracy": accuracy}


# Checkpoints


def save(run: Run, output: Artifact) -> None:
    """Metrics first: a checkpoint never lies beside fewer rows than it has steps."""
    output.write_jsonl(METRICS, run.metrics)
    stream = io.BytesIO()
    torch.save({"step": run.step, "head": run.head.state_dict(), "optimizer": run.optimizer.state_dict()}, stream)
    output.write(CHECKPOINT, stream.getvalue())


def resume(run: Run, output: Artifact) -> None:
    """Continue from the folder's checkpoint, if there is one."""
    if not output.exists(CHECKPOINT):
        return
    state = torch.load(io.BytesIO(output.read(CHECKPOINT)), map_location=run.head.d2t.device, weights_only=True)
    run.head.load_state_dict(state["head"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.step = state["step"]
    run.metrics = [row for row in output.read_jsonl(METRICS) if row["step"] <= run.step]
