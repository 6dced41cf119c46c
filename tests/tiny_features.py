"""A finished `capture` artifact of a tiny target's own greedy answers, made in memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from eyas.artifact import Artifact
from eyas.engine.engine import Engine
from eyas.engine.request import Request, SamplingParams
from eyas.model.config import Taps
from eyas.model.target import Target
from eyas.shards import FeatureMeta, Sample, ShardWriter
from tests.oracle.target import features_of

Conversation = tuple[list[int], list[int]]  # prompt and answer


def greedy_answers(target: Path, count: int, max_tokens: int = 16) -> list[Conversation]:
    generator = torch.Generator().manual_seed(count)
    engine = Engine.load(target)
    prompts = [
        torch.randint(3, 320, (3 + number % 7,), generator=generator).tolist()
        for number in range(count)
    ]
    requests = [
        Request(str(number), tuple(prompt), SamplingParams(max_tokens=max_tokens))
        for number, prompt in enumerate(prompts)
    ]
    answers = {result.request_id: result.token_ids for result in engine.run(requests)}
    return [(prompt, answers[str(number)]) for number, prompt in enumerate(prompts)]


def samples_of(target: Target, conversations: Sequence[Conversation], name: str) -> list[Sample]:
    samples = []
    for number, (prompt, answer) in enumerate(conversations):
        tokens_T = torch.tensor(prompt + answer)
        aux_hidden, last_hidden = (
            features[0].clone() for features in features_of(target, tokens_T[None])
        )
        loss_mask = torch.arange(len(tokens_T)) >= len(prompt)
        source = f"source-{number % 2}"
        samples.append(
            Sample(f"{name}-{number}", tokens_T.int(), loss_mask, aux_hidden, last_hidden, source)
        )
    return samples


def write_features(
    folder: Path,
    target: Target,
    train: Sequence[Sample],
    held_out: Sequence[Sample],
    taps: Taps | None = None,
) -> Artifact:
    """taps: what the features are said to be of."""
    config = target.config
    meta = FeatureMeta(
        taps=taps or config.default_taps,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        lm_head_sha256=target.lm_head_sha256,
        dtype="float32",
    )
    return write_shards(str(folder), meta, train, held_out, 50)


def write_shards(
    url: str,
    meta: FeatureMeta,
    train: Sequence[Sample],
    held_out: Sequence[Sample] = (),
    samples_per_shard: int = 4,
) -> Artifact:
    artifact = Artifact(url)
    artifact.begin("made by a test")
    for split, samples in (("train", train), ("held_out", held_out)):
        writer = ShardWriter(artifact, split, meta, samples_per_shard)  # type: ignore[arg-type]
        for sample in samples:
            writer.add(sample)
        writer.close()
    artifact.finish("capture", {"folder": url}, {}, {"samples": len(train) + len(held_out)})
    return Artifact(url)
