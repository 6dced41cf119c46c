"""Stage `memory`: answers -> what follows what in them, to draft from (`engine/memory.py`).

Knows the stage. Does not know how the counts are looked up. Only answers of `eyas generate` are
packed, whose prompts the stage `prompts` has let through, and which have left out answers with
personal data that was not in their prompt; and only what the answers say twice.
"""

from __future__ import annotations

import datetime
from collections import Counter

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from eyas.artifact import Artifact, Manifest, identity
from eyas.chat import Chat
from eyas.engine.memory import FILE, counted, packed, vocabulary_digest
from eyas.engine.text import LONGEST_CONTEXT
from eyas.errors import EmptyInputError, MismatchError
from eyas.features.samples import plan_samples
from eyas.hub import resolve_target
from eyas.log import Track, quiet
from eyas.model.vocab import target_shape
from eyas.model.weights import fingerprint
from eyas.records import read_answers


class MemoryConfig(BaseModel):
    """target: whose answers they are. max_contexts: kept of each length; 13 bytes each."""

    model_config = ConfigDict(extra="forbid")

    target: str
    max_contexts: int = Field(1_000_000, ge=1)


def pack(
    config: MemoryConfig, answers: Artifact, output: Artifact, track: Track = quiet
) -> Manifest:
    """Write the memory of all answers.

    Raises MismatchError for answers of another target, EmptyInputError where none can be used.
    """
    made, folder = answers.manifest("generate"), resolve_target(config.target)
    target_fingerprint = fingerprint(folder)
    if made.config["target_fingerprint"] != target_fingerprint:
        raise MismatchError(
            f"the answers in {answers.url} were written by another target than {config.target}",
            f"give the same target ({made.facts['target']}), or run `eyas generate` with this one",
        )
    settings = {
        **config.model_dump(mode="json", exclude={"target"}),
        "target_fingerprint": target_fingerprint,
    }
    inputs = {"answers": made}
    if not output.begin(identity("memory", settings, inputs)):
        return output.manifest("memory")
    shape = target_shape(folder)
    chat = Chat(folder, datetime.date.fromisoformat(made.config["date"]))
    # marked answers too: what the target repeats or refuses it will say again
    plan = plan_samples(read_answers(answers), chat, shape.max_position_embeddings, ())
    if not plan.samples:
        reasons = ", ".join(f"{reason} {count}" for reason, count in plan.reasons.items())
        raise EmptyInputError(
            f"none of the {plan.num_answers} answers can be used ({reasons})",
            "see the answers themselves",
        )
    runs: list[np.ndarray] = []
    tokens_of: Counter[str] = Counter()
    for number, sample in enumerate(plan.samples):
        track(number, len(plan.samples), sample.source)
        edges = np.flatnonzero(np.diff(sample.loss_mask)) + 1
        masks = np.split(sample.loss_mask, edges)
        runs += [
            run
            for run, mask in zip(np.split(sample.token_ids, edges), masks, strict=True)
            if mask[0]
        ]
        tokens_of[sample.source] += int(sample.loss_mask.sum())
    arrays = counted(runs, config.max_contexts)
    output.write(FILE, packed(arrays, shape.vocab_size, vocabulary_digest(chat.tokenizer)))
    return output.finish(
        "memory",
        settings,
        inputs,
        {
            "answers": plan.num_answers,
            "answer_tokens": sum(tokens_of.values()),
            "contexts": sum(len(arrays[f"keys_{n}"]) for n in range(1, LONGEST_CONTEXT + 1)),
            **{f"dropped_{reason}": count for reason, count in plan.reasons.items()},
        },
        {"target": made.facts["target"], "tokens_by_source": dict(tokens_of)},
    )
