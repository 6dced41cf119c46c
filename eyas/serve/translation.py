"""A client's request in the engine's terms, and how its answer is to be read and written. Knows no
HTTP.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eyas.chat import Chat
from eyas.engine.request import Request, SamplingParams
from eyas.errors import InputError
from eyas.serve.chat_request import ChatRequest
from eyas.serve.completion import Reading
from eyas.serve.fields import Grammar, SamplingFields, UsageIn
from eyas.serve.generate_request import GenerateRequest, renamed
from eyas.serve.generate_writer import GenerateWriter
from eyas.serve.refusal import ApiError, refused_by_engine, unsupported
from eyas.serve.text_request import TextRequest
from eyas.serve.tokenizer import Tokenizer
from eyas.serve.tools import CLOSING, DEMAND, call_schema
from eyas.serve.writer import ChatWriter, TextWriter, Writer


@dataclass(frozen=True, slots=True)
class Served:
    """What the server tells about itself: name for requests, precision, the room a request has, and
    which target it is, for clients that must not mistake it (`eyas generate`)."""

    model: str
    dtype: str
    has_head: bool
    max_length: int  # tokens of prompt and answer together
    target_fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """What the engine is to do for one HTTP request, and what becomes of it."""

    requests: list[Request]
    reading: Reading
    writer: Writer
    usage_in: UsageIn = "none"

    @property
    def num_samples(self) -> int:
        return sum(request.params.n for request in self.requests)


class Translator:
    """Knows what is served; everything else is in the request."""

    def __init__(self, chat: Chat, served: Served) -> None:
        self.tokenizer = Tokenizer(chat)
        self._served = served

    def chat(self, asked: ChatRequest) -> Work:
        """Raises ApiError for what this server, this target or its template cannot do."""
        self._check_model(asked)
        grammar, demanded = asked.grammar(), asked.demanded_tools
        if asked.offered_tools and grammar != Grammar():
            raise unsupported(
                "tools",
                "a tool cannot be called in an answer that must follow a grammar; ask for one of "
                "them",
            )
        if demanded:
            grammar = Grammar(json_schema=call_schema(demanded))
        prompt_ids = self._chat_prompt(asked)
        is_last_call = bool(asked.offered_tools) and not asked.parallel_tool_calls and not demanded
        params = self._params(asked, len(prompt_ids), grammar, (CLOSING,) if is_last_call else ())
        reading = Reading(bool(asked.offered_tools), bool(demanded), asked.tells_rounds)
        writer = ChatWriter(self._served.model, self.tokenizer, asked.usage_in != "none")
        return Work([self._request(asked, prompt_ids, params)], reading, writer, asked.usage_in)

    def text(self, asked: TextRequest) -> Work:
        """Raises ApiError for what this server or this target cannot do."""
        requests = self._texts(asked)
        echoed = (
            [self._shown(prompt) for prompt in asked.prompts for _ in range(asked.n)]
            if asked.echo
            else None
        )
        writer = TextWriter(self._served.model, self.tokenizer, asked.usage_in != "none", echoed)
        return Work(requests, Reading(tells_rounds=asked.tells_rounds), writer, asked.usage_in)

    def generate(self, asked: GenerateRequest) -> Work:
        """Raises ApiError for what this server or this target cannot do."""
        try:
            text = asked.as_text(self._served.model)
            requests = self._texts(text)
        except ApiError as error:
            raise renamed(error) from error
        lengths = [len(request.prompt_ids) for request in requests for _ in range(text.n)]
        writer = GenerateWriter(
            self.tokenizer,
            lengths,
            asked.is_many,
            asked.return_logprob,
            with_text=asked.return_text_in_logprobs,
            rid=asked.rid,
        )
        return Work(requests, Reading(), writer)

    def _texts(self, asked: TextRequest) -> list[Request]:
        self._check_model(asked)
        grammar = asked.grammar()
        requests = []
        for prompt in asked.prompts:
            prompt_ids = (
                self._encoded(prompt, asked.add_special_tokens)
                if isinstance(prompt, str)
                else prompt
            )
            params = self._params(asked, len(prompt_ids), grammar, ())
            requests.append(self._request(asked, prompt_ids, params))
        return requests

    def _shown(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    def _check_model(self, asked: SamplingFields) -> None:
        if asked.model != self._served.model:
            message = f"no model {asked.model[:128]!r} here, only {self._served.model!r}"
            raise ApiError(404, message, "model", "model_not_found")
        if asked.speculation and not self._served.has_head:
            raise unsupported("speculation", "needs a head, and this server has none")

    def _chat_prompt(self, asked: ChatRequest) -> list[int]:
        used = (
            "tools"
            if asked.offered_tools
            else "messages"
            if any(turn.uses_tools for turn in asked.messages)
            else None
        )
        if used is not None and not self.tokenizer.calls_tools_in_tags:
            raise unsupported(
                used,
                "this target's chat template has no tools, or none that are called in <tool_call> "
                "tags",
            )
        self._check_characters(sum(len(turn.text) for turn in asked.messages), "messages")
        chat = self._chat_with(asked.chat_template_kwargs)
        messages = [turn.for_template() for turn in asked.messages]
        try:
            if asked.offered_tools:
                prompt_ids = chat.prompt_ids(
                    messages, [tool.for_template() for tool in asked.offered_tools]
                )
            else:
                prompt_ids = chat.prompt_ids(messages)
        except InputError as error:
            raise ApiError(400, error.what, "messages") from error
        return prompt_ids + (self.tokenizer.encode(DEMAND) if asked.demanded_tools else [])

    def _chat_with(self, options: Mapping[str, bool]) -> Chat:
        for name in options:
            if not self.tokenizer.knows_option(name):
                raise unsupported(
                    "chat_template_kwargs",
                    f"this target's chat template has no option {name[:64]!r}",
                )
        try:
            return self.tokenizer.chat(options)
        except InputError as error:
            raise ApiError(400, error.what, "chat_template_kwargs") from error

    def _encoded(self, text: str, add_special_tokens: bool) -> list[int]:
        self._check_characters(len(text), "prompt")
        prompt_ids = self.tokenizer.encode(text, add_special_tokens)
        if not prompt_ids:
            raise ApiError(400, "prompt: the prompt has no tokens", "prompt")
        return prompt_ids

    def _check_characters(self, num_characters: int, param: str) -> None:
        """Refuse what is far too long before it is encoded, which takes its time."""
        least = self.tokenizer.least_tokens(num_characters)
        if least > self._served.max_length:
            raise self._too_long(f"{num_characters} characters are {least} tokens at least", param)

    def _params(
        self,
        asked: SamplingFields,
        num_prompt_tokens: int,
        grammar: Grammar,
        stops: tuple[str, ...],
    ) -> SamplingParams:
        max_tokens = self._token_limit(asked, num_prompt_tokens)
        try:
            return asked.params(max_tokens, grammar, stops)
        except InputError as error:
            raise refused_by_engine(error) from error

    def _token_limit(self, asked: SamplingFields, num_prompt_tokens: int) -> int:
        """Tokens an answer may have: what was asked for, which must fit, or the default, as much of
        it as fits.
        """
        room = self._served.max_length - num_prompt_tokens
        wanted = asked.token_limit or 1
        if wanted > room:
            what = f"the prompt has {num_prompt_tokens} tokens and the answer may have {wanted}"
            prompt = "messages" if isinstance(asked, ChatRequest) else "prompt"
            raise self._too_long(what, prompt if room < 1 else "max_tokens")
        return asked.token_limit or min(room, asked.default_tokens or room)

    def _too_long(self, what: str, param: str) -> ApiError:
        holds = f"this server holds {self._served.max_length} tokens a request"
        return ApiError(
            400,
            f"{holds}; {what}: shorten the prompt or lower max_tokens",
            param,
            "context_length_exceeded",
        )

    def _request(
        self, asked: SamplingFields, prompt_ids: Sequence[int], params: SamplingParams
    ) -> Request:
        speculates = self._served.has_head and asked.speculation is not False
        return Request(
            uuid.uuid4().hex,
            tuple(prompt_ids),
            params,
            speculates,
            asked.tells_rounds,
            asked.cache_salt,
        )
