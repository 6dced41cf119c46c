"""Held-out prompts for tiny targets, and a head that has learned some of their answers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from eyas.artifact import Artifact
from eyas.chat import Chat
from eyas.engine.engine import Engine
from eyas.evaluate.trees import EvalPrompt, Models, ModelsConfig, PromptSet
from eyas.model.target import Target
from eyas.shards import Features
from eyas.train.trainer import TrainConfig, train
from tests.tiny_features import samples_of, write_features

SOURCES = ("numbers", "streets", "tables")
SAID = {
    "tables": "I would like a table for {} in San Jose.",
    "streets": "The address is {} North Street.",
    "numbers": "Gib mir bitte die Zahl {} zurück, und zwar sofort.",
}
TRAIN = TrainConfig(
    head={"draft_vocab_size": 200},
    objective={"num_ttt_steps": 4},
    epochs=30,
    batches={"tokens": 512},
    learning_rate=1e-2,
    dtype="float32",
)


def eval_prompts(count: int) -> list[EvalPrompt]:
    """So many different ones, of three sources in turn."""
    named = [(number, SOURCES[number % 3]) for number in range(count)]
    return [
        EvalPrompt(str(number), source, ({"role": "user", "content": SAID[source].format(number)},))
        for number, source in named
    ]


def prompts_file(folder: Path, count: int) -> Path:
    """The same as a file for `eyas eval --prompts`."""
    path = folder / "held_out.jsonl.gz"
    rows = [
        {"id": one.id, "source": one.source, "messages": list(one.messages)}
        for one in eval_prompts(count)
    ]
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def prompt_set(folder: Path, count: int) -> PromptSet:
    """The same, tokenized for the target in a folder."""
    return PromptSet.of(eval_prompts(count), Chat(folder), 150)


def learned_head(folder: Path, count: int, output: Path) -> Artifact:
    """A head that was trained, too long, on the target's greedy answers to so many prompts."""
    requests = prompt_set(folder, count).requests(24, 0.0, 0)
    answers = {result.request_id: result.token_ids for result in Engine.load(folder).run(requests)}
    conversations = [(list(request.prompt_ids), answers[request.id]) for request in requests]
    target = Target.load(folder)
    features = write_features(
        output / "features", target, samples_of(target, conversations, "seen"), []
    )
    head = Artifact(str(output / "head"))
    train(TRAIN, str(folder), Features(features), head)
    return head


def learned_models(folder: Path, head: Artifact, max_batch: int = 4) -> Models:
    """Both, for engines."""
    return Models.load(str(folder), head.url, ModelsConfig(max_batch=max_batch, max_length=200))
