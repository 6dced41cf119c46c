"""Stage `generate`: the target answers every user turn, with its own answers as context.

Truncated, looping and empty answers end their conversation; these and refusals are marked and kept.
An answer with personal data that its prompt lacked is dropped and counted. The engine in this
process answers, or `servers`, which the identity tells apart; a killed run resumes (see answers).
Which servers, batch sizes and heads change no answer and are not in the identity.
"""

from __future__ import annotations

import datetime
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Annotated, Any

from pydantic import Field, model_validator

from eyas.artifact import Artifact, Manifest, identity
from eyas.chat import Chat
from eyas.engine.engine import Engine, EngineConfig
from eyas.errors import EmptyInputError, TemplateError
from eyas.features import marks
from eyas.features.answers import AnswerParts, hold_to
from eyas.features.backends import EngineBackend, TargetProof, TargetServer, probes
from eyas.features.conversation import Conversation, Sampling, TurnAnswer, TurnRequest, TurnRules
from eyas.features.fleet import ClientConfig, Fleet, server_urls
from eyas.hub import resolve_head, resolve_target
from eyas.log import Track, quiet
from eyas.model.config import TargetShape
from eyas.model.target import PAGE_SIZE, Dtype, resolve_dtype
from eyas.model.weights import fingerprint
from eyas.operators.shape import refuse_unnamed, target_shape
from eyas.privacy.detector import LeakDetector, recogniser_versions
from eyas.privacy.pii import ANSWER_POLICY, PrivacyConfig
from eyas.records import RECORD, Prompt
from eyas.settings import Flag, Settings

ROWS_PER_PART = 200  # prompts in a file of answers
PAGES_BESIDE = 64  # of the cache, for drafts
CACHE_TOKENS = 1024  # in the cache of the engine in this process, for each running request
PLACES = {"target", "head", "max_batch", "servers", "client"}  # no part of the identity


class GenerateConfig(Settings):
    """`answers_per_prompt`: conversations, spread evenly over the shares of `sampling`. The
    target's context bounds `max_length` too. `date` is fixed: some templates print today's
    (Granite, Llama 3). `personal`: types to find in answers; an answer with one that is not kept is
    dropped, unless its prompt had it.
    """

    target: str = Field(description="a folder, a GGUF file, or a name of a hub")
    head: Annotated[str | None, Flag()] = Field(
        None, description='head to draft with, or "smollm2": faster, same answers'
    )
    dtype: Dtype = Field("auto", description="of the weights; auto: the checkpoint's")
    max_tokens: int = Field(default=128, ge=1, description="tokens of an answer")
    sampling: tuple[Sampling, ...] = Field(
        default=(Sampling(),),
        min_length=1,
        description="shares of conversations and their sampling",
    )
    answers_per_prompt: int = Field(1, ge=1, description="conversations with each prompt")
    max_batch: int = Field(default=32, ge=1, description="samples that run concurrently")
    max_length: int = Field(
        default=32_768, ge=2, description="tokens of prompt and answer together"
    )
    date: datetime.date = Field(
        datetime.date(2026, 1, 1), description="the date that templates print as today"
    )
    personal: PrivacyConfig = ANSWER_POLICY
    servers: Annotated[tuple[str, ...], Flag("--server")] = Field(
        (), description="URL of an OpenAI-compatible server that answers"
    )
    client: ClientConfig = ClientConfig()

    @model_validator(mode="after")
    def _fits(self) -> GenerateConfig:
        total = sum(one.share for one in self.sampling)
        if abs(total - 1) > 1e-6:
            raise ValueError(f"sampling: the shares sum to {total:g}: let them sum to 1")
        greedy = [one.share for one in self.sampling if one.temperature == 0]
        of = self.answers_per_prompt
        if of > 1 and (len(greedy) > 1 or of * sum(greedy) > 1 + 1e-6):
            raise ValueError(
                f"answers_per_prompt: of {of} more than one would be greedy, and so the same: have "
                f"one share of temperature 0, of {math.floor(1e4 / of) / 1e4:g} at most"
            )
        if self.servers and self.head is not None:
            raise ValueError("head: servers have their own; give it to them, or leave it out")
        return self

    def on(self, shape: TargetShape) -> GenerateConfig:
        """With "auto" resolved for this machine."""
        if self.servers:
            return self
        return self.model_copy(update={"dtype": resolve_dtype(self.dtype, shape)})

    @property
    def sends_messages(self) -> bool:
        """Whether servers render the chat template."""
        return bool(self.servers) and self.client.send == "messages"


def settings_of(config: GenerateConfig, folder: str) -> dict[str, Any]:
    """What the answers depend on, for the identity; config: `on` the target's shape."""
    # keeps the identity of folders older than this setting
    as_before = {"answers_per_prompt"} if config.answers_per_prompt == 1 else set()
    return {
        **config.model_dump(mode="json", exclude=PLACES | as_before),
        "target_fingerprint": fingerprint(folder),
        # engine and server may differ in last bits, and a server that renders messages gets none
        # that spell a control token
        "answered_by": f"servers, sent {config.client.send}" if config.servers else "engine",
        "marks": marks.VERSION,
        "record": RECORD,
        "recognisers": recogniser_versions(config.personal),
    }


def generate(
    config: GenerateConfig,
    prompts: Artifact,
    output: Artifact,
    track: Track = quiet,
    serving: AbstractContextManager[object] | None = None,
) -> Manifest:
    """Answer all prompts into `output`; resumes. serving: a context in which the servers run,
    entered only for work.

    Raises EmptyInputError, TemplateError, and what loading a target or `Fleet` raises.
    """
    made = prompts.manifest("prompts")
    num_prompts = count_prompts(prompts)
    folder = resolve_target(config.target)
    chat, shape = Chat(folder, config.date), target_shape(folder)
    shape.refuse_few_layers()
    refuse_unnamed(folder, shape)  # capture would, once all is answered
    config = config.on(shape)
    settings = settings_of(config, folder)
    target, own = settings["target_fingerprint"], identity("generate", settings, {"prompts": made})
    if output.is_done_for(own) and not output.begin(own):
        return output.manifest()
    max_length = min(config.max_length, shape.max_position_embeddings)
    rules = TurnRules(
        chat,
        target,
        config.sampling,
        config.max_tokens,
        max_length,
        LeakDetector(config.personal),
        config.sends_messages,
        config.answers_per_prompt,
    )
    # the backend may refuse, and then the folder is not claimed
    with (
        serving or nullcontext(),
        closing(open_backend(config, chat, folder, max_length)) as backend,
        output.begun(own) as is_work,
    ):
        if not is_work:
            return output.manifest()
        with closing(AnswerParts(output)) as parts:
            hold_to(output, backend.computed_by())
            waiting = unfinished(prompts, parts, config.answers_per_prompt)
            answer_all(backend, rules, waiting, parts, num_prompts, track)
        facts = {"target": config.target, **backend.facts()}
        counts = _counts(prompts, output, config.answers_per_prompt)
        if counts["answers"] == 0:
            raise EmptyInputError(
                f"the target could answer none of the {num_prompts} prompts",
                f"see why in {output.url}/dropped-*.jsonl; a larger max_length or shorter prompts "
                "may help, into another folder",
            )
        return output.finish("generate", settings, {"prompts": made}, counts, facts)


def count_prompts(prompts: Artifact) -> int:
    """Raises EmptyInputError for none."""
    count = sum(1 for _ in prompts.read_rows("prompts"))
    if not count:
        raise EmptyInputError(
            f"{prompts.url} holds no prompts", "see its ledger for why every row was dropped"
        )
    return count


def open_backend(
    config: GenerateConfig, chat: Chat, folder: str, max_length: int
) -> EngineBackend | Fleet[TurnRequest, TurnAnswer]:
    """The engine, or the checked servers."""
    if not config.servers:
        head = resolve_head(config.head) if config.head is not None else None
        num_tokens = max(config.max_batch * min(max_length, CACHE_TOKENS), max_length)
        sizes = EngineConfig(
            max_batch=config.max_batch,
            max_length=max_length,
            num_pages=num_tokens // PAGE_SIZE + PAGES_BESIDE,
            max_pause_ms=1e9,  # nobody reads the stream
            # plain without a head: drafts from text pay for few requests at a time
            speculation="off" if head is None else "auto",
        )
        engine = Engine.load(folder, head, config.dtype, sizes)
        return EngineBackend(engine, config.head)
    if config.sends_messages and Chat(folder).needs_a_date:
        raise TemplateError(
            f"the chat template of {folder} prints today's date, and servers would print another "
            f"than {config.date}",
            "set client.send=tokens, or leave `servers` out",
        )
    asked = probes(chat, config.sampling)
    proof = TargetProof(fingerprint(folder), max_length, asked, chat.eos_token_ids)
    urls = server_urls(config.servers)
    return Fleet([TargetServer(url, config.client, proof) for url in urls], config.client)


def unfinished(prompts: Artifact, parts: AnswerParts, per_prompt: int) -> Iterator[Conversation]:
    """The conversations left to do, in order, each where an earlier run ended; reads by parts."""
    rows = map(Prompt.from_json, prompts.read_rows("prompts"))
    for part in itertools.count():
        each = list(itertools.product(itertools.islice(rows, ROWS_PER_PART), range(per_prompt)))
        if not each:
            return
        if parts.is_whole(part):
            parts.num_done += len(each)
            continue
        conversations = [
            Conversation(prompt, part, at, number) for at, (prompt, number) in enumerate(each)
        ]
        for entry in parts.open(part, len(conversations)):
            conversations[entry.at].restore(entry)
        for conversation in conversations:
            if conversation.is_over:
                parts.end(part)
        yield from (one for one in conversations if not one.is_over)


def answer_all(
    backend: EngineBackend | Fleet[TurnRequest, TurnAnswer],
    rules: TurnRules,
    waiting: Iterator[Conversation],
    parts: AnswerParts,
    num_prompts: int,
    track: Track = quiet,
) -> None:
    """Run as many conversations at once as the backend has room for."""
    running: dict[str, tuple[Conversation, TurnRequest]] = {}
    started, num_tokens = time.monotonic(), 0

    def ask(conversation: Conversation) -> None:
        request = rules.request(conversation)
        parts.add(conversation.part, conversation.take_entry())
        if request is not None:
            backend.add(request)
            running[request.id] = conversation, request
        else:
            parts.end(conversation.part)

    while True:
        while len(running) < backend.capacity and (conversation := next(waiting, None)) is not None:
            ask(conversation)
        if not running:
            return
        for reply in backend.wait():
            num_tokens += len(reply.answer_ids) if isinstance(reply, TurnAnswer) else 0
            conversation, request = running.pop(reply.id)
            rules.accept(conversation, request, reply)
            ask(conversation)
        speed = f"{num_tokens / (time.monotonic() - started):.0f} tokens/s"
        note = ", ".join(filter(None, (speed, backend.status())))
        track(parts.num_done, num_prompts * rules.answers_per_prompt, note)


def _counts(prompts: Artifact, output: Artifact, per_prompt: int) -> dict[str, int]:
    counts: Counter[str] = Counter(prompts=0, turns=0, answers=0, answer_tokens=0)
    for prompt in prompts.read_rows("prompts"):
        counts.update(prompts=1, turns=len(prompt["turns"]) * per_prompt)
    for answer in output.read_rows("answers"):
        counts.update(answers=1, answer_tokens=len(answer["answer_ids"]))
        if answer["marked"] is not None:
            counts[f"marked_{answer['marked']}"] += 1
    counts.update(f"dropped_{row['reason']}" for row in output.read_rows("dropped"))
    dropped = sum(count for name, count in counts.items() if name.startswith("dropped_"))
    assert counts["turns"] == counts["answers"] + dropped, f"turns do not balance: {dict(counts)}"
    return dict(counts)
