"""Stage `capture`: finished conversations become feature samples: tokens, loss mask, three taps, last hidden state.

Knows which rows become samples and in which split they go. Does not know how tokens and masks are found (chat), what the
target computes (model) or how samples lie on disk (shards).

Only answers that the target ended by itself are taken. Where a conversation's next turn begins with the very tokens
of the turn before, the two are one sample with two spans in its mask: attention is causal, so the features are the same,
and task dialogues of six turns cost a quarter of the time and of the disk. Where a template rewrites the past (Qwen3
drops earlier thoughts) they stay apart.
"""

from __future__ import annotations

import datetime
import hashlib
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from eyas.artifact import Artifact, Manifest, identity
from eyas.builtin import resolve_target
from eyas.chat import Chat
from eyas.errors import EmptyInputError, MismatchError, StorageFullError, TemplateError
from eyas.features.generate import read_answers
from eyas.log import Track, quiet
from eyas.model.fingerprint import fingerprint
from eyas.model.target import Target
from eyas.records import Answer
from eyas.shards import CodecName, FeatureMeta, Sample, ShardWriter, Split

Reason = Literal["cut", "template", "too_long", "no_supervised_slot"]
BATCH_TOKENS = 4096  # of one forward, padding included
WINDOW = 256  # samples among which those of a similar length are put together


class CaptureConfig(BaseModel):
    """Settings of the stage. `dtype` is what the target computes in, `store_dtype` what is kept, `codec` and `teacher` how
    (see shards.FeatureMeta)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    store_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    codec: CodecName = "lossless"
    teacher: Literal["everywhere", "supervised"] = "everywhere"
    samples_per_shard: int = Field(default=50, ge=1)
    held_out_share: float = Field(default=0.05, ge=0, lt=1)


@dataclass(slots=True)
class Planned:
    """A sample before its features: token_ids int32 [T], loss_mask bool [T]."""

    key: str
    source: str
    prompt_id: str
    token_ids: np.ndarray
    loss_mask: np.ndarray

    def continues(self, other: Planned) -> bool:
        """True when this one begins with all tokens of the other, of the same conversation."""
        length = len(other.token_ids)
        return self.prompt_id == other.prompt_id and np.array_equal(self.token_ids[:length], other.token_ids)


@dataclass(slots=True)
class Plan:
    """What is to be captured, in the answers' order, and what became of the other answers.

    answers = samples + merged + dropped. `retokenised` counts answers whose text has other tokens than the target wrote.
    """

    samples: list[Planned] = field(default_factory=list)
    dropped: list[dict[str, Any]] = field(default_factory=list)
    num_answers: int = 0
    num_merged: int = 0
    num_retokenised: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)


def plan_samples(answers: Iterable[Answer], chat: Chat, max_length: int) -> Plan:
    """Decide on every answer. max_length: the target's context in tokens."""
    plan = Plan()
    for answer in answers:
        plan.num_answers += 1
        taken = _planned(answer, chat, max_length)
        if isinstance(taken, str):
            plan.dropped.append({"prompt_id": answer.prompt_id, "turn": answer.turn, "reason": taken})
            continue
        plan.num_retokenised += int(taken.loss_mask.sum()) != answer.num_answer_tokens
        if plan.samples and taken.continues(plan.samples[-1]):
            earlier = plan.samples.pop()
            taken.loss_mask[: len(earlier.loss_mask)] |= earlier.loss_mask
            plan.num_merged += 1
        plan.samples.append(taken)
    assert plan.num_answers == len(plan.samples) + plan.num_merged + len(plan.dropped)
    return plan


def _planned(answer: Answer, chat: Chat, max_length: int) -> Planned | Reason:
    if answer.finish_reason != "stop":
        return "cut"
    try:
        token_ids, loss_mask = chat.answered(answer.messages, answer.finish_reason)
    except TemplateError:
        return "template"
    if len(token_ids) > max_length:
        return "too_long"
    mask = np.array(loss_mask, dtype=bool)
    if not (mask[1:-1] & mask[2:]).any():  # slot t predicts x_{t+2} after x_{t+1}: both are to be the target's
        return "no_supervised_slot"
    key = f"{answer.prompt_id}/{answer.turn}"
    return Planned(key, answer.source, answer.prompt_id, np.array(token_ids, dtype=np.int32), mask)


def split_of(prompt_id: str, held_out_share: float) -> Split:
    """The split of all samples of a prompt: a hash of its id alone, so it stays the same when other prompts come or go."""
    number = int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:8], "big")
    return "held_out" if number < held_out_share * 2**64 else "train"


def batches(samples: list[Planned], batch_tokens: int, window: int) -> Iterator[list[Planned]]:
    """Samples of similar length together: sorted within each window, at most batch_tokens a batch, padding included."""
    for at in range(0, len(samples), window):
        batch: list[Planned] = []
        for sample in sorted(samples[at : at + window], key=lambda sample: len(sample.token_ids)):
            if batch and (len(batch) + 1) * len(sample.token_ids) > batch_tokens:
                yield batch
                batch = []
            batch.append(sample)
        yield batch


def capture_batch(target: Target, batch: list[Planned]) -> Iterator[Sample]:
    """The samples of one forward, in the target's dtype. Padding is on the right, where causal attention never looks."""
    tokens_BT = torch.zeros(len(batch), max(len(one.token_ids) for one in batch), dtype=torch.long)
    for row, one in enumerate(batch):
        tokens_BT[row, : len(one.token_ids)] = torch.from_numpy(one.token_ids)
    aux_hidden, last_hidden = target.features(tokens_BT.to(target.device))
    for row, one in enumerate(batch):
        length = len(one.token_ids)
        ids, mask = torch.from_numpy(one.token_ids), torch.from_numpy(one.loss_mask)
        yield Sample(one.key, ids, mask, aux_hidden[row, :length], last_hidden[row, :length], one.source)


def capture(config: CaptureConfig, answers: Artifact, output: Artifact, track: Track = quiet) -> Manifest:
    """Capture all finished answers into `output`; resumes.

    Raises MismatchError (another target wrote the answers), EmptyInputError, StorageFullError, and what loading raises.
    """
    made = answers.manifest("generate")
    folder = resolve_target(config.target)
    target_fingerprint = fingerprint(folder)
    if made.config["target_fingerprint"] != target_fingerprint:
        raise MismatchError(
            f"the answers in {answers.url} were written by another target than {config.target}",
            f"give the same target ({made.facts['target']}), or run `eyas generate` with this one",
        )
    chat = Chat(folder, datetime.date.fromisoformat(made.config["date"]))
    settings = {**config.model_dump(mode="json", exclude={"target"}), "target_fingerprint": target_fingerprint}
    if not output.begin(identity("capture", settings, {"answers": made})):
        return output.manifest()
    target = Target.load(folder, config.dtype)
    plan = plan_samples(read_answers(answers), chat, target.config.max_position_embeddings)
    output.write_jsonl("dropped.jsonl", plan.dropped)
    if not plan.samples:
        reasons = ", ".join(f"{reason} {count}" for reason, count in _reasons(plan).items())
        raise EmptyInputError(
            f"none of the {plan.num_answers} answers can be used ({reasons})",
            "a larger max_tokens in `generate` lets more answers end by themselves",
        )
    meta = FeatureMeta(
        taps=target.config.default_taps,
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        lm_head_sha256=target.lm_head_sha256,
        dtype=config.store_dtype,
        codec=config.codec,
        teacher=config.teacher,
    )
    writers = {split: ShardWriter(output, split, meta, config.samples_per_shard) for split in get_args(Split)}
    done = {key for writer in writers.values() for key in writer.keys}
    check_room(output, sum(len(one.token_ids) for one in plan.samples if one.key not in done) * meta.bytes_per_token)
    _capture_missing(target, plan, writers, config.held_out_share, track)
    counts = {
        "answers": plan.num_answers,
        "merged": plan.num_merged,
        **{f"dropped_{reason}": count for reason, count in _reasons(plan).items()},
        **{split: len(writer) for split, writer in writers.items()},
        "tokens": plan.num_tokens,
    }
    facts = {"target": config.target, "features": meta.model_dump(mode="json"), "num_retokenised": plan.num_retokenised}
    return output.finish("capture", settings, {"answers": made}, counts, facts)


def check_room(output: Artifact, num_bytes: int) -> None:
    """Refuse work that the disk cannot hold before it begins. Object stores have no end that can be asked for."""
    folder = output.local_path("")
    if folder is None:
        return
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise StorageFullError(
            f"the features need {num_bytes / 1e9:,.2f} GB at {output.url}, {free / 1e9:,.2f} GB are free",
            "free some space, choose another folder or an object store, or capture fewer answers",
        )


def _capture_missing(
    target: Target, plan: Plan, writers: dict[Split, ShardWriter], held_out_share: float, track: Track
) -> None:
    """All samples that no whole shard holds yet. A batch is computed as a whole or not at all, so that its values, down to
    the last bit, do not depend on where an earlier run was cut."""
    done, started, num_tokens = 0, time.monotonic(), 0
    for batch in batches(plan.samples, BATCH_TOKENS, WINDOW):
        to = {one.key: writers[split_of(one.prompt_id, held_out_share)] for one in batch}
        missing = {key for key, writer in to.items() if key not in writer.keys}
        if missing:
            num_tokens += sum(len(one.token_ids) for one in batch)
            for sample in capture_batch(target, batch):
                if sample.key in missing:
                    to[sample.key].add(sample)
        done += len(batch)
        track(done, len(plan.samples), f"{num_tokens / (time.monotonic() - started):.0f} tokens/s")
    for writer in writers.values():
        writer.close()


def _reasons(plan: Plan) -> dict[str, int]:
    return dict(Counter(row["reason"] for row in plan.dropped))
