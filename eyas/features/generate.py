"""Stage `generate`: the target answers every user turn of every prompt, one row per assistant turn.

Knows conversations and parts. Does not know how the engine decodes, nor what a role token is.

    answers-00000.jsonl    records.Answer of `rows_per_part` prompts, in the prompts' order; whole or absent
    dropped-00000.jsonl    the turns of the same prompts that got no answer, each with its reason

Conversations go on independently: as soon as a turn is answered the next one is asked, with the target's own answers
as its context, so the engine's batch stays full. An answer that was cut ends its conversation, since no server would go
on from it; so does one that holds personal data or a secret that nobody told the target: it is left out and counted
under its type, and nothing is trained on it. A killed run goes on with the parts that are missing.
"""

from __future__ import annotations

import datetime
import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from eyas.artifact import Artifact, Manifest, identity
from eyas.builtin import resolve_target
from eyas.chat import Chat
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import FinishReason, Request, SamplingParams
from eyas.errors import EmptyInputError, TemplateError
from eyas.log import Track, quiet
from eyas.model.fingerprint import fingerprint
from eyas.privacy.finding import Finding
from eyas.privacy.leaks import OF_ANSWERS, Leaks
from eyas.privacy.policy import RANK, PrivacyConfig
from eyas.records import Answer, Message, Prompt

# And "pii.<type>" for an answer with what was not in its prompt.
Reason = Literal["context_full", "template_refused", "earlier_turn_cut", "earlier_turn_dropped"]


class GenerateConfig(BaseModel):
    """Settings of the stage.

    `max_length` bounds prompt and answer together, in tokens, as does the target's context. `rows_per_part` counts
    prompts: so many at most are lost to a kill. `date` is the day that a chat template prints where it prints today's
    (Granite, Llama 3): fixed, so that the same prompts have the same tokens on another day and in `capture`. `personal`
    says what is looked for in answers: an answer with a type that is not kept is left out, unless it stood in the prompt.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.0, ge=0, le=100)
    max_batch: int = Field(default=32, ge=1)
    max_length: int = Field(default=1024, ge=2)
    rows_per_part: int = Field(default=200, ge=1)
    date: datetime.date = datetime.date(2026, 1, 1)
    personal: PrivacyConfig = OF_ANSWERS


class Conversation:
    """A prompt on its way: what has been said, and what came of its turns."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.messages: list[Message] = [{"role": "system", "content": prompt.system}] if prompt.system is not None else []
        self.answers: list[Answer] = []
        self.dropped: list[dict[str, Any]] = []
        self.tokens: list[int] = []  # of the answer that is being written

    @property
    def turn(self) -> int:
        return len(self.answers)

    def drop_rest(self, reason: Reason, detail: str = "") -> None:
        """Give up the turns that are left, each as a row of its own."""
        for turn in range(self.turn + len(self.dropped), len(self.prompt.turns)):
            self._drop(turn, reason, detail)

    def drop_answer(self, found: Sequence[Finding]) -> None:
        """Leave out the answer to this turn for what was found in it, told by type and place, and give up the rest."""
        gravest = min((one.type for one in found), key=RANK.__getitem__)
        places = ", ".join(f"{one.type} at {one.start}-{one.end}" for one in found)
        self._drop(self.turn, f"pii.{gravest.lower()}", places)
        self.drop_rest("earlier_turn_dropped")

    def _drop(self, turn: int, reason: str, detail: str) -> None:
        self.dropped.append({"prompt_id": self.prompt.id, "turn": turn, "reason": reason, "detail": detail})


class Questioner:
    """Turns conversations into requests and answered requests into rows."""

    def __init__(self, config: GenerateConfig, chat: Chat, target: str, max_length: int) -> None:
        """target: its fingerprint, part of each row's key. max_length: the engine's."""
        self._config, self._chat, self._target, self._max_length = config, chat, target, max_length
        self._leaks = Leaks(config.personal)

    def ask(self, conversation: Conversation) -> Request | None:
        """The request for the next turn; None when there is none, with what is left counted as dropped."""
        prompt = conversation.prompt
        if conversation.turn == len(prompt.turns):
            return None
        conversation.messages.append({"role": "user", "content": prompt.turns[conversation.turn]})
        try:
            prompt_ids = self._chat.prompt_ids(conversation.messages)
        except TemplateError as error:
            conversation.drop_rest("template_refused", error.what)
            return None
        if len(prompt_ids) >= self._max_length:
            conversation.drop_rest("context_full", f"{len(prompt_ids)} tokens, the limit is {self._max_length - 1}")
            return None
        config, key = self._config, self._key(prompt_ids)
        params = SamplingParams(temperature=config.temperature, max_tokens=config.max_tokens, seed=int(key[:15], 16))
        return Request(f"{prompt.id}/{conversation.turn}", tuple(prompt_ids), params)

    def take(self, conversation: Conversation, request: Request, finish_reason: FinishReason) -> Request | None:
        """Add the finished answer as a row, or drop it for what it holds; returns the next turn's request, if any."""
        prompt, written = conversation.prompt, conversation.tokens
        text = self._chat.decode(written[:-1] if finish_reason == "stop" else written)
        if leaked := self._leaks([message["content"] for message in conversation.messages], text):
            conversation.drop_answer(leaked)
            return None
        conversation.messages.append({"role": "assistant", "content": text})
        answer = Answer(
            key=self._key(list(request.prompt_ids)),
            prompt_id=prompt.id,
            source=prompt.source,
            licence=prompt.licence,
            turn=conversation.turn,
            messages=tuple(conversation.messages),
            finish_reason=finish_reason,
            temperature=self._config.temperature,
            num_prompt_tokens=len(request.prompt_ids),
            num_answer_tokens=len(written),
        )
        conversation.answers.append(answer)
        conversation.tokens = []
        if finish_reason == "length":
            conversation.drop_rest("earlier_turn_cut")
            return None
        return self.ask(conversation)

    def _key(self, prompt_ids: list[int]) -> str:
        """Equal keys are equal work: the same target, the same tokens before the answer, the same sampling."""
        what = (self._target, prompt_ids, self._config.temperature, self._config.max_tokens)
        return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def generate(config: GenerateConfig, prompts: Artifact, output: Artifact, track: Track = quiet) -> Manifest:
    """Answer all prompts into `output`; resumes. Raises EmptyInputError, TemplateError, and what loading a target raises."""
    made = prompts.manifest("prompts")
    rows = [Prompt.from_json(row) for row in prompts.read_rows("prompts")]
    if not rows:
        raise EmptyInputError(f"{prompts.url} holds no prompts", "see its ledger for why every row was dropped")
    folder = resolve_target(config.target)
    chat, target = Chat(folder, config.date), fingerprint(folder)
    settings = {**config.model_dump(mode="json", exclude={"target"}), "target_fingerprint": target}
    if not output.begin(identity("generate", settings, {"prompts": made})):
        return output.manifest()
    engine_config = EngineConfig(max_batch=config.max_batch, max_length=config.max_length)
    engine = Engine.load(folder, None, config.dtype, engine_config)
    questioner = Questioner(config, chat, target, engine.max_length)
    _answer_missing_parts(engine, questioner, _parts(rows, config.rows_per_part), output, track)
    counts = _counts(rows, output)
    if counts["answers"] == 0:
        raise EmptyInputError(
            f"the target could answer none of the {len(rows)} prompts",
            f"see why in {output.url}/dropped-*.jsonl; a larger max_length or shorter prompts may help",
        )
    return output.finish("generate", settings, {"prompts": made}, counts, {"target": config.target})


def converse(
    engine: Engine, questioner: Questioner, conversations: Iterable[Conversation], max_running: int
) -> Iterator[Conversation]:
    """Carry on up to max_running conversations at a time, each at its own pace; yields each when it is over."""
    waiting = iter(conversations)
    running: dict[str, tuple[Conversation, Request]] = {}
    more = True
    while more or running:
        while more and len(running) < max_running:
            conversation = next(waiting, None)
            if conversation is None:
                more = False
            elif request := questioner.ask(conversation):
                engine.add(request)
                running[request.id] = conversation, request
            else:
                yield conversation
        for update in engine.step():
            conversation, request = running[update.request_id]
            conversation.tokens += update.token_ids
            if update.finish_reason is None:
                continue
            del running[request.id]
            if following := questioner.take(conversation, request, update.finish_reason):
                engine.add(following)
                running[following.id] = conversation, following
            else:
                yield conversation


def _parts(prompts: list[Prompt], size: int) -> list[list[Conversation]]:
    return [[Conversation(prompt) for prompt in prompts[at : at + size]] for at in range(0, len(prompts), size)]


def _answer_missing_parts(
    engine: Engine, questioner: Questioner, parts: list[list[Conversation]], output: Artifact, track: Track
) -> None:
    """Write each part that is not there yet, when the last of its conversations is over."""
    missing = {number: part for number, part in enumerate(parts) if not output.exists(_answers_name(number))}
    total = sum(map(len, parts))
    done = total - sum(map(len, missing.values()))
    part_of = {conversation.prompt.id: number for number, part in missing.items() for conversation in part}
    left = {number: len(part) for number, part in missing.items()}
    started, num_tokens = time.monotonic(), 0
    track(done, total)
    conversations = (conversation for number in sorted(missing) for conversation in missing[number])
    for conversation in converse(engine, questioner, conversations, engine.config.max_batch):
        num_tokens += sum(answer.num_answer_tokens for answer in conversation.answers)
        done += 1
        track(done, total, f"{num_tokens / (time.monotonic() - started):.0f} tokens/s")
        number = part_of[conversation.prompt.id]
        left[number] -= 1
        if left[number] == 0:
            _write_part(output, number, missing.pop(number))


def _write_part(output: Artifact, number: int, conversations: list[Conversation]) -> None:
    """The dropped turns first: the answers' file is what says that the part is whole."""
    dropped = [row for conversation in conversations for row in conversation.dropped]
    output.delete(_dropped_name(number))
    if dropped:
        output.write_jsonl(_dropped_name(number), dropped)
    output.write_jsonl(_answers_name(number), [answer.to_json() for one in conversations for answer in one.answers])


def _counts(prompts: list[Prompt], output: Artifact) -> dict[str, int]:
    """What the finished parts hold. Every turn is either an answer or a drop."""
    counts: Counter[str] = Counter(prompts=len(prompts), turns=sum(len(prompt.turns) for prompt in prompts), answers=0)
    for name in output.names():
        if name.startswith("answers-"):
            for answer in output.read_jsonl(name):
                counts["answers"] += 1
                counts["answers_cut"] += answer["finish_reason"] == "length"
                counts["answer_tokens"] += answer["num_answer_tokens"]
        elif name.startswith("dropped-"):
            counts.update(f"dropped_{row['reason']}" for row in output.read_jsonl(name))
    dropped = sum(count for name, count in counts.items() if name.startswith("dropped_"))
    assert counts["turns"] == counts["answers"] + dropped, f"turns do not balance: {dict(counts)}"
    return dict(counts)


def _answers_name(part: int) -> str:
    return f"answers-{part:05d}.jsonl"


def _dropped_name(part: int) -> str:
    return f"dropped-{part:05d}.jsonl"


def read_answers(answers: Artifact) -> Iterator[Answer]:
    """All rows of a finished `generate` artifact, a conversation's turns one after the other."""
    for name in sorted(answers.manifest("generate").files):
        if name.startswith("answers-"):
            for row in answers.read_jsonl(name):
                yield Answer.from_json(row)
