"""Our training step on random numbers, for benchmarks/gpu/train.py and tests."""

from __future__ import annotations

import argparse
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import torch

from eyas.model.architecture import TargetConfig
from eyas.model.config import HeadConfig, HeadOptions, RopeConfig
from eyas.operators.batch import Batch
from eyas.operators.head import Head
from eyas.operators.vocab import TargetVocabulary, draft_vocabulary
from eyas.shards import Sample
from eyas.train.batches import feed
from eyas.train.loss import ObjectiveConfig
from eyas.train.ranks import Ranks
from eyas.train.start import initialise
from eyas.train.state import TrainingState
from eyas.train.step import LossModule, optimizers_of, quickest, rows_of, training_step

TURN = 128  # tokens of an answer
LEARNING_RATE, MOST_STEPS = 1e-4, 10_000


@dataclass(frozen=True, slots=True)
class World:
    """A head and a target's matrices on a device; samples with best tokens, and their batch, on the
    CPU.
    """

    head: Head
    vocabulary: TargetVocabulary
    samples: list[Sample]
    batch: Batch


def target_config(args: argparse.Namespace) -> TargetConfig:
    """Its layers are not run."""
    return TargetConfig(
        family="llama",
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=32,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        vocab_size=args.vocab,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        rope=RopeConfig(theta=500000.0),
        tie_word_embeddings=True,
        attention_bias=False,
        attention_out_bias=False,
        mlp_bias=False,
        eos_token_ids=(),
        dtype="bfloat16",
    )


def sample(args: argparse.Namespace, length: int, answer_share: float, number: int) -> Sample:
    """A conversation of `length` tokens with answers of TURN tokens; features of bf16."""
    generator = torch.Generator().manual_seed(number)
    turn = max(TURN + 1, round(TURN / answer_share))
    mask_T = torch.arange(length) % turn >= (turn - TURN if answer_share < 1 else 0)
    tokens_T = torch.randint(args.vocab, (length,), generator=generator)
    aux, last = (
        torch.randn(length, width * args.hidden, generator=generator).bfloat16() for width in (3, 1)
    )
    return Sample(f"made-up-{number}", tokens_T.int(), mask_T, aux, last)


def world(args: argparse.Namespace, samples: list[Sample], device: str) -> World:
    """Embeddings and lm_head are tied; the draft vocabulary has all best tokens."""
    target = target_config(args)
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(args.vocab, args.hidden, generator=generator) * args.hidden**-0.5
    matrix = matrix.bfloat16().float()
    on_cpu = TargetVocabulary(target, matrix, matrix, "made up")
    vocabulary = on_cpu.to(device, torch.bfloat16)
    best = [vocabulary.best(one.last_hidden.to(device)).cpu() for one in samples]
    samples = [replace(one, argmax=of.int()) for one, of in zip(samples, best, strict=True)]
    options = HeadOptions(draft_vocab_size=args.draft_vocab, fc_norm=False, norm_output=False)
    head = Head(HeadConfig.for_target(target, options))
    counts_V = torch.bincount(torch.cat(best), minlength=args.vocab)
    head.set_vocabulary(*draft_vocabulary(counts_V, args.draft_vocab))
    initialise(head, on_cpu, 0)
    return World(head.to(device), vocabulary, samples, Batch.of(samples))


def our_step(made: World, device: str, config: ObjectiveConfig) -> Any:
    """A call that makes one step and returns its loss; a thread makes the batches."""
    dtype = quickest(device)
    state = TrainingState(made.head, optimizers_of(made.head), dtype)
    objective = LossModule(made.head, made.vocabulary, config, dtype)
    ranks = Ranks(device=device)

    def again() -> Generator[list[Sample]]:
        while True:
            yield made.samples

    steps = feed(again(), [1] * MOST_STEPS, 0, objective)

    def step() -> float:
        figures = training_step(state, objective, next(steps), ranks, LEARNING_RATE)
        return float(rows_of([figures], ranks, made.head.config)[0]["loss"])

    return step
