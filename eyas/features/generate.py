"""Stage `generate`: the target answers every user turn of every prompt, one row per assistant turn.

Knows the stage: what is asked of whom, and what was done already. Does not know how an engine
decodes, how servers are spoken to, how rows lie on disk (parts), nor what a role token is.

Conversations go on independently: as soon as a turn is answered the next one is asked, with the
target's own answers as its context, so whoever answers always has enough to do. An answer that was
cut, loops or is empty ends its conversation, since nobody would go on from it; after a refusal it
goes on. All of these are marked and kept. An answer that holds personal data or a secret that
nobody told the target is never written down: it is counted under its type, and ends its
conversation too.

A run that is killed, or whose servers have all died, goes on where it was: see parts. Which servers
answer, how many at once, and whether a head speculates changes no answer, and is not part of the
work's identity.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eyas.artifact import Artifact, Manifest, identity
from eyas.chat import Chat
from eyas.engine.engine import Engine, EngineConfig
from eyas.errors import ConfigError, EmptyInputError, TemplateError
from eyas.features import marks
from eyas.features.backend import Asked, Backend, EngineBackend, Replied
from eyas.features.conversation import Conversation, Questioner, Sampling, check_shares
from eyas.features.fleet import Fleet
from eyas.features.parts import AnswerParts, claimed
from eyas.features.servers import ClientConfig, Expected
from eyas.hub import resolve_head, resolve_target
from eyas.log import Track, quiet
from eyas.model.fingerprint import fingerprint
from eyas.model.foreign import target_shape
from eyas.privacy.leaks import OF_ANSWERS, Leaks
from eyas.privacy.policy import PrivacyConfig
from eyas.records import Message, Prompt

# Where the run takes place, and how fast it is. Nothing of it changes an answer.
PLACES = {"target", "head", "max_batch", "servers", "client"}
# What servers are asked before anything else: do they see as many tokens as the target's template
# gives?
PROBES: tuple[tuple[Message, ...], ...] = (
    ({"role": "user", "content": "Name a colour."},),
    (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Another one?"},
    ),
)


class GenerateConfig(BaseModel):
    """Settings of the stage.

    `max_length` bounds prompt and answer together, in tokens, as does the target's context.
    `sampling` is how conversations are sampled, a share of them each, assigned by a hash of what
    they say. `date` is the day that a chat template prints where it prints today's (Granite, Llama
    3): fixed, so that the same prompts have the same tokens on another day and in `capture`.
    `personal` says what is looked for in answers: an answer with a type that is not kept is left
    out, unless it stood in the prompt. `head` speeds up the engine in this process, which answers
    where no `servers` are given; `client` says how those are asked. `rows_per_part` counts prompts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    head: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_tokens: int = Field(default=128, ge=1)
    sampling: tuple[Sampling, ...] = Field(default=(Sampling(),), min_length=1)
    max_batch: int = Field(default=32, ge=1)
    max_length: int = Field(default=1024, ge=2)
    rows_per_part: int = Field(default=200, ge=1)
    date: datetime.date = datetime.date(2026, 1, 1)
    personal: PrivacyConfig = OF_ANSWERS
    servers: tuple[str, ...] = ()
    client: ClientConfig = ClientConfig()

    @model_validator(mode="after")
    def _fits(self) -> GenerateConfig:
        try:
            check_shares(self.sampling)
        except ConfigError as error:
            raise ValueError(f"{error.what}: {error.hint}") from error
        if self.servers and self.head is not None:
            raise ValueError(
                "head: servers have their own; give it to them, or leave `servers` out"
            )
        return self

    @property
    def answered_by(self) -> str:
        """Part of the identity: the engine and a server may differ in an answer's last bits, and
        messages that hold a control token's name are left out where a server renders them."""
        return f"servers, sent {self.client.send}" if self.servers else "engine"


def generate(
    config: GenerateConfig, prompts: Artifact, output: Artifact, track: Track = quiet
) -> Manifest:
    """Answer all prompts into `output`; resumes.

    Raises EmptyInputError, TemplateError, what loading a target raises, and what `Fleet` raises
    where there are servers.
    """
    made = prompts.manifest("prompts")
    num_prompts = sum(1 for _ in prompts.read_rows("prompts"))
    if not num_prompts:
        raise EmptyInputError(
            f"{prompts.url} holds no prompts", "see its ledger for why every row was dropped"
        )
    folder = resolve_target(config.target)
    chat, target = Chat(folder, config.date), fingerprint(folder)
    settings = {
        **config.model_dump(mode="json", exclude=PLACES),
        "target_fingerprint": target,
        "answered_by": config.answered_by,
        "marks": marks.VERSION,
    }
    if not output.begin(identity("generate", settings, {"prompts": made})):
        return output.manifest()
    max_length = min(config.max_length, target_shape(folder).max_position_embeddings)
    limits = (config.max_tokens, max_length)
    is_templated = bool(config.servers) and config.client.send == "messages"
    questioner = Questioner(
        chat, target, config.sampling, limits, Leaks(config.personal), is_templated
    )
    with claimed(output), closing(open_backend(config, chat, folder, max_length)) as backend:
        answer_all(
            backend,
            questioner,
            Conversations(prompts, output, config.rows_per_part),
            num_prompts,
            track,
        )
        facts = {"target": config.target, **backend.facts()}
    counts = _counts(prompts, output)
    if counts["answers"] == 0:
        raise EmptyInputError(
            f"the target could answer none of the {num_prompts} prompts",
            f"see why in {output.url}/dropped-*.jsonl; a larger max_length or shorter prompts may "
            "help",
        )
    return output.finish("generate", settings, {"prompts": made}, counts, facts)


def open_backend(config: GenerateConfig, chat: Chat, folder: str, max_length: int) -> Backend:
    """Who answers. Raises what loading the engine or looking at servers raises."""
    if not config.servers:
        head = resolve_head(config.head) if config.head is not None else None
        sizes = EngineConfig(max_batch=config.max_batch, max_length=max_length)
        return EngineBackend(Engine.load(folder, head, config.dtype, sizes), chat, config.head)
    if config.client.send == "messages" and Chat(folder).needs_a_date:
        raise TemplateError(
            f"the chat template of {folder} prints today's date, and servers would print another "
            f"than {config.date}",
            "set client.send=tokens where the servers take token ids (SGLang, vLLM, eyas), or "
            "leave `servers` out",
        )
    return Fleet(
        config.servers,
        config.client,
        Expected(fingerprint(folder), max_length, probes(chat, config.sampling)),
    )


def probes(chat: Chat, samplings: Sequence[Sampling]) -> tuple[Asked, ...]:
    """What servers are asked before anything else: every way of sampling, and a conversation that
    goes on.
    """
    found: list[Asked] = []
    for messages, sampling in [
        *((PROBES[0], one) for one in samplings),
        *((probe, samplings[0]) for probe in PROBES[1:]),
    ]:
        with contextlib.suppress(TemplateError):  # some take no system prompt
            ids = tuple(chat.prompt_ids(messages))
            found.append(Asked(f"probe-{len(found)}", messages, ids, sampling.params(1, 1)))
    return tuple(found)


class Conversations:
    """The conversations of an artifact that are not over, and the rows of those that go on."""

    def __init__(self, prompts: Artifact, output: Artifact, rows_per_part: int) -> None:
        self.num_done = 0
        self._prompts, self._rows_per_part = prompts, rows_per_part
        self._parts = AnswerParts(output)

    def __iter__(self) -> Iterator[Conversation]:
        """In the prompts' order, from where an earlier run left them; one part's prompts in memory."""
        rows = self._prompts.read_rows("prompts")
        for part in itertools.count():
            prompts = [Prompt.from_json(row) for row in itertools.islice(rows, self._rows_per_part)]
            if not prompts:
                return
            if self._parts.is_whole(part):
                self.num_done += len(prompts)
                continue
            conversations = [Conversation(prompt, part, at) for at, prompt in enumerate(prompts)]
            for entry in self._parts.open(part, len(prompts)):
                conversations[entry.at].restore(entry)
            for conversation in conversations:
                if conversation.is_over:
                    self._end(conversation)
            yield from (one for one in conversations if not one.is_over)

    def keep(self, conversation: Conversation) -> None:
        """Write down what has come of it since the last time."""
        self._parts.add(conversation.part, conversation.news())
        if conversation.is_over:
            self._end(conversation)

    def _end(self, conversation: Conversation) -> None:
        self.num_done += 1
        self._parts.end(conversation.part)


def answer_all(
    backend: Backend,
    questioner: Questioner,
    conversations: Conversations,
    num_prompts: int,
    track: Track = quiet,
) -> None:
    """Carry on as many conversations as are worth it, each at its own pace, until all are over."""
    waiting = iter(conversations)
    running: dict[str, tuple[Conversation, Asked]] = {}
    started, num_tokens = time.monotonic(), 0

    def go_on(conversation: Conversation) -> None:
        asked = questioner.ask(conversation)
        conversations.keep(conversation)
        if asked is not None:
            backend.add(asked)
            running[asked.id] = conversation, asked

    while True:
        while len(running) < backend.capacity and (conversation := next(waiting, None)) is not None:
            go_on(conversation)
        if not running:
            return
        for reply in backend.wait():
            num_tokens += reply.num_tokens if isinstance(reply, Replied) else 0
            conversation, asked = running.pop(reply.id)
            questioner.take(conversation, asked, reply)
            go_on(conversation)
        speed = f"{num_tokens / (time.monotonic() - started):.0f} tokens/s"
        track(
            conversations.num_done, num_prompts, ", ".join(filter(None, (speed, backend.status())))
        )


def _counts(prompts: Artifact, output: Artifact) -> dict[str, int]:
    """What the finished parts hold. Every turn is either an answer or a drop."""
    counts: Counter[str] = Counter(prompts=0, turns=0, answers=0, answer_tokens=0)
    for prompt in prompts.read_rows("prompts"):
        counts.update(prompts=1, turns=len(prompt["turns"]))
    for answer in output.read_rows("answers"):
        counts.update(answers=1, answer_tokens=answer["num_answer_tokens"])
        if answer["marked"] is not None:
            counts[f"marked_{answer['marked']}"] += 1
    counts.update(f"dropped_{row['reason']}" for row in output.read_rows("dropped"))
    dropped = sum(count for name, count in counts.items() if name.startswith("dropped_"))
    assert counts["turns"] == counts["answers"] + dropped, f"turns do not balance: {dict(counts)}"
    return dict(counts)
