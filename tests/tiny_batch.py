"""A tiny head with random weights and made-up conversations for it, in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.model.architecture import TargetConfig
from eyas.model.config import HeadConfig, HeadOptions, RopeConfig
from eyas.operators.batch import Batch
from eyas.operators.head import Head
from eyas.operators.vocab import TargetVocabulary, draft_vocabulary
from eyas.shards import Sample
from tests.plain_eagle import Example
from tests.tiny_head import PLAIN_NORMS

TINY_TARGET = TargetConfig(
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=40,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    rope=RopeConfig(theta=100.0),
    family="llama",
    tie_word_embeddings=False,
    attention_bias=False,
    attention_out_bias=False,
    mlp_bias=False,
    eos_token_ids=(2,),
    dtype="float32",
)


def waves(*shape: int, seed: int) -> Tensor:
    """Numbers that no version of a random generator changes: sines of far-apart angles, float32."""
    count = torch.Size(shape).numel()
    angles = torch.arange(count, dtype=torch.float64) * 12.9898 + 78.233 * (seed + 1)
    return ((torch.sin(angles) * 43758.5453).frac() * 2).float().view(shape)


def tiny_vocabulary(dtype: torch.dtype = torch.float32) -> TargetVocabulary:
    V, H = TINY_TARGET.vocab_size, TINY_TARGET.hidden_size
    return TargetVocabulary(
        TINY_TARGET, waves(V, H, seed=1).to(dtype), waves(V, H, seed=2).to(dtype), "made up"
    )


def wavy_head(draft_vocab_size: int = 30, **options: Any) -> Head:
    """Every weight matters, norms too; draft tokens are spread. options: HeadOptions', with plain
    EAGLE-3's norms by default.
    """
    options = {**PLAIN_NORMS, **options}
    wanted = HeadOptions(draft_vocab_size=draft_vocab_size, **options)
    head = Head(HeadConfig.for_target(TINY_TARGET, wanted))
    with torch.no_grad():
        for number, weight in enumerate(head.parameters()):
            values = waves(*weight.shape, seed=10 + number)
            is_norm = weight.ndim == 1
            weight.copy_(1 + 0.5 * values if is_norm else 2 * values * weight.shape[1] ** -0.5)
    counts_V = waves(TINY_TARGET.vocab_size, seed=3).mul(100).long()
    head.set_vocabulary(*draft_vocabulary(counts_V, draft_vocab_size))
    return head


def made_up_samples(masks: Sequence[Sequence[bool]], seed: int = 0) -> list[Sample]:
    samples = []
    for number, mask in enumerate(masks):
        T, H, at = len(mask), TINY_TARGET.hidden_size, 1000 * seed + 10 * number
        ids = waves(T, seed=at + 4).add(2).mul(TINY_TARGET.vocab_size / 4).long()
        ids = ids.clamp(0, TINY_TARGET.vocab_size - 1).int()
        loss_mask = torch.tensor(list(mask), dtype=torch.bool)
        states = waves(T, 3 * H, seed=at + 5), waves(T, H, seed=at + 6)
        samples.append(Sample(f"made-up-{number}", ids, loss_mask, *states))
    return samples


def made_up_batch(masks: Sequence[Sequence[bool]], seed: int = 0) -> Batch:
    return Batch.of(made_up_samples(masks, seed))


def as_examples(samples: Sequence[Sample]) -> list[Example]:
    ids_and_masks = ((s.token_ids.tolist(), s.loss_mask.tolist()) for s in samples)
    states = ((s.aux_hidden.double(), s.last_hidden.double()) for s in samples)
    return [Example(*one, *of) for one, of in zip(ids_and_masks, states, strict=True)]


def doubled(batch: Batch) -> Batch:
    return replace(
        batch,
        aux_hidden_BTA=batch.aux_hidden_BTA.double(),
        last_hidden_BTH=batch.last_hidden_BTH.double(),
    )


def write_golden(path: Path, made_by: str, **made: object) -> None:
    text = json.dumps({"made by": made_by, **made})
    kept = json.loads(text, parse_float=lambda number: float(f"{float(number):.9g}"))
    path.write_text(json.dumps(kept).replace("}, ", "},\n") + "\n")  # a case a line
