"""A body -> the engine's requests, and the CompletionWriter of the answer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eyas.chat import Chat
from eyas.engine.request import Request, SamplingParams
from eyas.errors import InputError
from eyas.serve.fields import CompletionRequest, SamplingFields
from eyas.serve.limits import ApiError, refused_by_engine, unsupported
from eyas.serve.protocol import ChatRequest, DetokenizeRequest, TextRequest, TokenizeRequest
from eyas.serve.responses import RESPONSE_NAMES, ResponsesRequest, ResponseWriter
from eyas.serve.tokenizer import Tokenizer
from eyas.serve.tools import REQUIRED_OPENING, answer_grammar, call_schema, in_text
from eyas.serve.writers import ChatWriter, CompletionWriter, TextWriter

MAX_ECHOED = 1 << 16  # log-probabilities of prompts in an answer, each token's own included
MAX_LOGPROBS_WHOLE = 1 << 17  # in an answer that is not streamed; 100 bytes each
Body = ChatRequest | TextRequest | ResponsesRequest
THINKING = "enable_thinking"  # the switch of templates whose targets can think


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the server reports about its model: its name in requests (hub_id: another one), the most
    tokens of prompt and answer together (context: of the target), the hash of the target's files,
    which `eyas generate` compares with its own.
    """

    model: str
    dtype: str
    has_head: bool
    max_length: int
    target_fingerprint: str | None = None
    text_drafts: bool = False
    context: int | None = None
    hub_id: str | None = None

    @property
    def speculates(self) -> bool:
        return self.has_head or self.text_drafts


def check_logprobs(requests: Sequence[Request]) -> None:
    """Raise ApiError for a whole answer with too many log-probabilities to hold in memory."""
    params = [one.params for one in requests if one.params.logprobs is not None]
    count = sum(one.n * one.max_tokens * (1 + (one.logprobs or 0)) for one in params)
    if count > MAX_LOGPROBS_WHOLE:
        raise ApiError(
            400,
            f"the answer may have {count} log-probabilities, the limit is {MAX_LOGPROBS_WHOLE} "
            "without stream: lower max_tokens, n or top_logprobs, or stream it",
            "logprobs",
        )


class Translator:
    """Translates bodies for one model. Methods raise ApiError for what this server, this target or
    its template does not support.
    """

    def __init__(self, chat: Chat, info: ModelInfo) -> None:
        self.tokenizer = Tokenizer(chat)
        self._info = info

    def completion(self, body: Body) -> CompletionWriter:
        """The writer of a body's answer; its `requests` are the engine's work."""
        self.check_name(body.model)
        body = body.model_copy(update={"model": body.model or self._info.model})
        if isinstance(body, TextRequest):
            return TextWriter(self._text(body), self.tokenizer, body)
        if isinstance(body, ChatRequest):
            return ChatWriter([self._chat(body)], self.tokenizer, body)
        try:
            chat = body.as_chat()
            return ResponseWriter([self._chat(chat)], self.tokenizer, chat, body)
        except ApiError as error:
            error.param = RESPONSE_NAMES.get(error.param or "", error.param)
            raise

    def _chat(self, body: ChatRequest) -> Request:
        self._check_model(body)
        constraint, tools, required = body.constraint(), body.offered_tools, body.required_tools
        if tools and constraint and (required or "json_schema" not in constraint):
            what = "a call cannot be required in an answer that must follow a schema"
            if not required:
                what = "a tool cannot be called in an answer that must follow an expression"
            raise unsupported("tools", f"{what}; ask for one of them")
        if required:
            constraint = {"json_schema": call_schema(required)}
        elif tools and (constraint or self.tokenizer.tool_form == "generic"):
            schema = constraint.get("json_schema")
            constraint = {"grammar": answer_grammar(tools, body.parallel_tool_calls, schema)}
        return self._request(body, self._chat_prompt(body), constraint)

    def _text(self, body: TextRequest) -> list[Request]:
        self._check_model(body)
        constraint = body.constraint()
        requests = []
        for prompt in body.prompts:
            if isinstance(prompt, str):
                self._check_characters(len(prompt), "prompt")
                prompt_ids = self.tokenizer.encode(prompt, body.add_special_tokens)
                if not prompt_ids:
                    raise ApiError(400, "prompt: the prompt has no tokens", "prompt")
            else:
                prompt_ids = prompt
            requests.append(self._request(body, prompt_ids, constraint))
        if body.num_prompt_logprobs is not None:
            count = sum(len(one.prompt_ids) for one in requests) * body.n
            if count * (1 + body.num_prompt_logprobs) > MAX_ECHOED:
                what = f"echo of {count} tokens with {body.num_prompt_logprobs} logprobs each"
                raise ApiError(
                    400, f"{what} is over {MAX_ECHOED} numbers: send fewer prompts at once", "echo"
                )
        return requests

    def _request(
        self, body: CompletionRequest, prompt_ids: Sequence[int], constraint: dict[str, str]
    ) -> Request:
        room, max_tokens = self._info.max_length - len(prompt_ids), body.token_limit
        if room < (max_tokens != 0):
            prompt = "messages" if isinstance(body, ChatRequest) else "prompt"
            raise self._too_long(f"the prompt has {len(prompt_ids)} tokens", prompt)
        if max_tokens is None:
            max_tokens = body.default_tokens or room
            if body.num_logprobs is not None and not body.stream:  # as `check_logprobs`
                most = MAX_LOGPROBS_WHOLE // (body.n * (1 + body.num_logprobs))
                max_tokens = min(max_tokens, most)
        max_tokens = min(max_tokens, room)
        options = {name: getattr(body, name) for name in SamplingFields.model_fields}
        options |= {"max_tokens": max_tokens, **constraint}
        if body.repeat_penalty is not None:
            options["repetition_penalty"] = body.repeat_penalty
        options |= {"logprobs": body.num_logprobs, "prompt_logprobs": body.num_prompt_logprobs}
        try:
            params = SamplingParams(**options)
        except InputError as error:
            raise refused_by_engine(error) from error
        return Request(
            id=uuid.uuid4().hex,
            prompt_ids=tuple(prompt_ids),
            params=params,
            speculation=self._info.speculates and body.speculation is not False,
            text_drafts=body.text_drafts is not False,
            returns_trees=body.includes_rounds,
            cache_salt=body.cache_salt,
        )

    def counted(self, body: TokenizeRequest | DetokenizeRequest) -> dict[str, Any]:
        """The answer of /tokenize and /detokenize, under vLLM's and llama.cpp's names."""
        self.check_name(body.model)
        if isinstance(body, DetokenizeRequest):
            unknown = next((one for one in body.tokens if not self.tokenizer.knows(one)), None)
            if unknown is not None:
                raise ApiError(400, f"the tokenizer has no token {unknown}", "tokens")
            text = self.tokenizer.decode(body.tokens, skips_special=False)
            return {"prompt": text, "content": text}
        if body.messages is not None:
            chat = body.model_dump(include={"messages", "tools"}, exclude_none=True)
            token_ids = self._chat_prompt(ChatRequest(model=self._info.model, **chat))
        elif body.prompt is not None:
            token_ids = self.tokenizer.encode(body.prompt, body.add_special_tokens)
        else:
            token_ids = self.tokenizer.encode(body.content or "", body.add_special)
        count, most = len(token_ids), self._info.max_length
        answer = {"count": count, "max_model_len": most, "tokens": token_ids}
        if body.return_token_strs:
            pieces = map(self.tokenizer.piece, token_ids)
            answer["token_strs"] = [piece.decode(errors="replace") for piece in pieces]
        return answer

    def check_name(self, model: str | None) -> None:
        """Raise ApiError 404 for a model that is not served."""
        if model not in (None, self._info.model, self._info.hub_id):
            message = f"no model {str(model)[:128]!r} here, only {self._info.model!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def _check_model(self, body: CompletionRequest) -> None:
        if body.speculation and not self._info.speculates:
            raise unsupported("speculation", "needs a head, and this server has none")
        if body.text_drafts and not self._info.text_drafts:
            raise unsupported("text_drafts", "this server does not draft from text")

    def _chat_prompt(self, body: ChatRequest) -> list[int]:
        in_messages = any(turn.role == "tool" or turn.tool_calls for turn in body.messages)
        used = "tools" if body.offered_tools else "messages" if in_messages else None
        form = self.tokenizer.tool_form
        if used is not None and form is None:
            raise unsupported(
                used,
                "this target's chat template calls tools in a form of its own, not in <tool_call> "
                "tags, which this server does not read",
            )
        if len(body.messages) > self._info.max_length:  # each has tokens of its own
            raise self._too_long(f"{len(body.messages)} messages are more tokens", "messages")
        self._check_characters(sum(turn.num_characters for turn in body.messages), "messages")
        try:
            chat = self.tokenizer.chat(self._template_options(body))
        except InputError as error:
            raise ApiError(400, error.what, "chat_template_kwargs") from error
        messages = [turn.for_template() for turn in body.messages]
        last = body.messages[-1]
        is_open = last.role == "assistant" and last.text.strip() and not last.tool_calls
        if body.continue_final_message and not is_open:
            what = "the last message is no text of the assistant: there is nothing to continue"
            raise ApiError(400, what, "continue_final_message")
        tools = [tool.for_template() for tool in body.offered_tools] or None
        self._check_characters(len(json.dumps(tools)), "tools")
        if used is not None and form == "generic":
            messages = in_text(messages, body.offered_tools, self.tokenizer.takes_system)
            tools = None
        try:
            prompt_ids = chat.prompt_ids(messages, tools, body.continue_final_message)
        except InputError as error:
            raise ApiError(400, error.what, "messages") from error
        opening = self.tokenizer.encode(REQUIRED_OPENING) if body.required_tools else []
        return prompt_ids + opening

    def _template_options(self, body: ChatRequest) -> dict[str, bool | str]:
        options: dict[str, bool | str] = dict(body.chat_template_kwargs)
        effort = "reasoning_effort"
        if body.reasoning_effort is not None and self.tokenizer.knows_option(effort):
            options.setdefault(effort, body.reasoning_effort)
        for name in options:
            if not self.tokenizer.knows_option(name):
                what = f"this target's chat template has no option {name[:64]!r}"
                raise unsupported("chat_template_kwargs", what)
        is_off = body.reasoning_effort == "none" and self.tokenizer.knows_option(THINKING)
        if is_off and options.setdefault(THINKING, False):
            what = f"reasoning_effort none contradicts {THINKING} in chat_template_kwargs"
            raise ApiError(400, what, "reasoning_effort")
        return options

    def _check_characters(self, num_characters: int, param: str) -> None:
        if num_characters <= self._info.max_length:  # to know the longest token takes 50 ms, once
            return
        least = self.tokenizer.least_tokens(num_characters)
        if least > self._info.max_length:
            raise self._too_long(f"{num_characters} characters are {least} tokens at least", param)

    def _too_long(self, what: str, param: str) -> ApiError:
        holds, context = self._info.max_length, self._info.context or 0
        hint = "shorten the prompt"
        if holds < context:
            hint += f", or start the server with engine.max_length of up to {context}"
        return ApiError(
            400,
            f"this server holds {holds} tokens a request, prompt and answer together; {what}: "
            f"{hint}",
            param,
            "context_length_exceeded",
        )
