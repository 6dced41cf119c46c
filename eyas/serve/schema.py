"""What a client may ask of /v1/chat/completions, and the error it gets when it asks for more. Knows OpenAI's form, no engine.

Nothing is ignored: a field that eyas does not do is accepted only with a value that means "off" (`OFF`), and an unknown
field is an error. `top_k` and `speculation` are our additions to OpenAI's fields.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MAX_STOPS = 4

# Fields of OpenAI's (and min_p, repetition_penalty of other servers') that eyas does not do, with the values that ask for
# nothing. null asks for nothing in every field.
OFF: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "metadata": ({},),
    "store": (False,),
    "service_tier": ("auto", "default"),
}


class ApiError(Exception):
    """An answer that is an error: HTTP status and OpenAI's `message`, `type`, `param`, `code`."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """One turn; a content of several text parts is their concatenation."""

    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(_Strict):
    include_usage: bool = False


Stop = Annotated[str, Field(min_length=1)]
MaxTokens = Annotated[int, Field(ge=1)]


class ChatRequest(_Strict):
    """The body of a request, with OpenAI's defaults."""

    messages: list[ChatMessage] = Field(min_length=1)
    model: str
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)  # 0: off
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # names the end user; asks for nothing
    speculation: bool | None = None  # None: where the server has a head

    @model_validator(mode="before")
    @classmethod
    def _drop_what_is_off(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        asked = {name: value for name, value in body.items() if value is not None}
        for name in asked.keys() & OFF.keys():
            if asked[name] not in OFF[name]:
                off = " or ".join(json.dumps(value) for value in OFF[name])
                raise ApiError(400, f"{name} is not supported here; leave it out (or {off})", name, "unsupported_parameter")
            del asked[name]
        return asked

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError(400, "max_tokens and max_completion_tokens differ: give one of them", "max_tokens")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is for stream=true only", "stream_options")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


_FIELDS = {name for kind in (ChatRequest, ChatMessage, TextPart, StreamOptions) for name in kind.model_fields}


def parse_request(body: bytes) -> ChatRequest:
    """The request in a body of JSON. Raises ApiError 400 with the field that is wrong."""
    try:
        return ChatRequest.model_validate_json(body)
    except ValidationError as error:
        # Of a union's errors the deepest comes from the member that was meant. Members have names of their own in the
        # location ("messages.0.content.list[TextPart].0.type"), which the client never wrote.
        *_, wrong = sorted(
            error.errors(include_url=False, include_context=False, include_input=False), key=lambda e: len(e["loc"])
        )
        is_unknown = wrong["type"] == "extra_forbidden"
        named = _FIELDS | ({wrong["loc"][-1]} if is_unknown else set())
        parts = [str(part) for part in wrong["loc"] if isinstance(part, int) or part in named]
        param = ".".join(parts) or None
        if is_unknown:
            raise ApiError(400, f"unknown field {param}", param, "unknown_parameter") from error
        raise ApiError(400, f"{param or 'the body'}: {wrong['msg']}", param) from error
