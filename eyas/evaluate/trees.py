"""Held-out prompts by tree and temperature, decoded by the engine. No server and no clock."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from eyas.chat import Chat
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.engine.tree import Speculation
from eyas.errors import EmptyInputError, EyasError, TemplateError
from eyas.evaluate.breakdown import AnswerCounts, tree_entry
from eyas.language import language
from eyas.log import Track
from eyas.model.checkpoint import read_head
from eyas.model.target import Dtype, Target
from eyas.records import Message, mixed_seed
from eyas.settings import Settings
from eyas.tau import RoundCounts


class ModelsConfig(Settings):
    """How target and head run, as they will be served."""

    dtype: Dtype = Field("auto", description="of the weights; auto: the checkpoint's")
    threads: int | None = Field(None, ge=1, description="null: all that this process has")
    max_batch: int = Field(16, ge=1, description="samples that run concurrently")
    max_length: int = Field(1024, ge=2, description="tokens of prompt and answer together")


@dataclass(frozen=True, slots=True)
class Models:
    """A target and its head for several engines. t2d_V bool: in the draft vocabulary."""

    target: Target
    draft: Draft
    folder: str
    config: ModelsConfig
    t2d_V: np.ndarray

    @classmethod
    def load(cls, folder: str, head: str | Path, config: ModelsConfig) -> Models:
        """Raises MissingInputError, CorruptError, MismatchError (a head of another target)."""
        target = Target.load(folder, config.dtype)
        shape, tensors = read_head(head, target.config)
        return cls(target, Draft(shape, tensors, target), folder, config, tensors["t2d"])

    def engine(self, speculation: Speculation | str) -> Engine:
        """An engine with an empty cache."""
        config = EngineConfig(
            speculation=str(speculation),
            max_batch=self.config.max_batch,
            max_length=self.config.max_length,
            max_pause_ms=1e9,  # no reader waits
            text_drafts=False,  # only the head's drafts count
        )
        return Engine(self.target, self.draft, config)


@dataclass(frozen=True)
class EvalPrompt:
    """A held-out prompt. source: its domain."""

    id: str
    source: str
    messages: tuple[Message, ...]

    @cached_property
    def language(self) -> str:
        """Language of the user's messages."""
        return language(
            "\n".join(message["content"] for message in self.messages if message["role"] == "user")
        )


def prompts_digest(prompts: Sequence[EvalPrompt]) -> str:
    """16 hex digits over all prompts in order."""
    digest = hashlib.sha256()
    for one in prompts:
        row = json.dumps([one.id, one.source, one.messages], sort_keys=True)
        digest.update(row.encode() + b"\n")
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts with their tokens. num_left_out: those too long, or refused by the template."""

    prompts: list[EvalPrompt]
    prompt_ids: list[tuple[int, ...]]
    num_left_out: int

    @classmethod
    def of(cls, prompts: Sequence[EvalPrompt], chat: Chat, max_prompt_tokens: int) -> PromptSet:
        """Raises EmptyInputError when none is left."""
        kept, prompt_ids = [], []
        for prompt in prompts:
            try:
                ids = tuple(chat.prompt_ids(prompt.messages))
            except TemplateError:
                continue
            if len(ids) <= max_prompt_tokens:
                kept.append(prompt)
                prompt_ids.append(ids)
        if not kept:
            raise EmptyInputError(
                f"none of the {len(prompts)} held-out prompts can be asked: too long, or refused "
                "by the chat template",
                f"give prompts of {max_prompt_tokens} tokens or fewer, or a larger "
                "models.max_length",
            )
        return cls(kept, prompt_ids, len(prompts) - len(kept))

    def requests(self, max_tokens: int, temperature: float, seed: int) -> list[Request]:
        """A request for each, with its prompt's id and the seed that `eyas bench` gives it."""
        made = []
        for prompt, ids in zip(self.prompts, self.prompt_ids, strict=True):
            drawn = mixed_seed(seed, prompt.id)
            params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=drawn)
            made.append(Request(prompt.id, ids, params))
        return made


@dataclass(frozen=True, slots=True)
class DecodedAnswer:
    """Tokens of an answer, and the accepted drafts of its speculative rounds, in order."""

    token_ids: list[int]
    accepted: list[int]


def decode(engine: Engine, requests: Sequence[Request], track: Track) -> list[DecodedAnswer]:
    """All answers, in the order of the requests. Raises EyasError if the head fails, after which
    the engine would decode plainly.
    """
    answers = {request.id: DecodedAnswer([], []) for request in requests}
    for request in requests:
        engine.add(request)
    done = 0
    while engine.has_work:
        for update in engine.step():
            answer = answers[update.request_id]
            answer.token_ids.extend(update.token_ids)
            if update.num_accepted_drafts is not None:
                answer.accepted.append(update.num_accepted_drafts)
            if update.finish_reason is not None:
                done += 1
                track(done, len(requests))
        if engine.draft_failure is not None:
            raise EyasError(
                f"the head fails on the target's features: {engine.draft_failure}",
                "`eyas check` tells what is wrong with it; a larger models.dtype may hold its "
                "numbers",
            )
    return list(answers.values())


def measure_tree(
    models: Models, prompts: PromptSet, tree: Speculation, requests: Sequence[Request], track: Track
) -> tuple[dict[str, Any], list[AnswerCounts]]:
    """An entry of eval.json's `trees`, and the counts of each answer. Rounds without drafts (of
    auto) do not count.
    """
    answers = []
    decoded = decode(models.engine(tree), requests, track)
    for prompt, answer in zip(prompts.prompts, decoded, strict=True):
        counts = RoundCounts(tree.num_draft_steps)
        counts.add_rounds(answer.accepted)
        answers.append(AnswerCounts(prompt.id, prompt.source, prompt.language, counts))
    is_known = [models.t2d_V[one.token_ids].tolist() for one in decoded]
    drawn, facts = requests[0].params.temperature, {"language_of": "prompts", "by": "engine"}
    return tree_entry(tree, drawn, answers, is_known, **facts), answers
