"""The bodies of OpenAI's chat completions and text completions."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from eyas.engine.request import TokenId
from eyas.serve.fields import (
    MAX_SHOWN,
    RAW,
    CompletionRequest,
    Effort,
    JsonObject,
    NumLogprobs,
    RequestBody,
    Strict,
    few_keys,
)
from eyas.serve.limits import ApiError, unsupported

MAX_PROMPTS = 1024
MAX_NAME = 256  # characters of a participant's

# Fields of other servers' answers, which clients send back.
NOTES = frozenset({"id", "provider_specific_fields", "reasoning_details", "thinking_blocks"})
MAX_TOOLS = 128
MAX_OPTIONS = 16

TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
CACHE_HINTS = frozenset({"cache_control", "prompt_cache_breakpoint"})


# /v1/chat/completions


class Part(Strict):
    ignored: ClassVar[frozenset[str]] = CACHE_HINTS
    kinds: ClassVar[tuple[str, ...]] = ("text",)

    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in cls.kinds:
            raise PydanticCustomError(
                "not_text",
                "a part of the type {kind}: this server reads no images, sound or files, only "
                "{kinds}",
                {"kind": kind[:MAX_SHOWN], "kinds": " and ".join(cls.kinds)},
            )
        return part


class TextPart(Part):
    type: Literal["text"]


class CalledFunction(Strict):
    """arguments: JSON, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Strict):
    ignored: ClassVar[frozenset[str]] = CACHE_HINTS | (NOTES - {"id"})

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # in chunks, which clients put together


class ChatMessage(Strict):
    """One turn of a conversation. Templates get name and reasoning_content; most ignore them."""

    ignored: ClassVar[frozenset[str]] = CACHE_HINTS | NOTES | {"annotations"}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: list[ToolCall] = Field(default=[], fail_fast=True)
    tool_call_id: str | None = None
    # the participant, or the tool that answers
    name: str | None = Field(default=None, max_length=MAX_NAME)
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        given = {name: value for name, value in message.items() if value is not None}
        if "reasoning" in given:  # vLLM's newer name
            given.setdefault("reasoning_content", given.pop("reasoning"))
        return given

    @model_validator(mode="after")
    def _belongs_to_its_role(self) -> Self:
        if self.content is None and not self.tool_calls and self.reasoning_content is None:
            raise ApiError(400, f"a message of the {self.role} has no content", "messages")
        for name, role in (
            ("tool_calls", "assistant"),
            ("tool_call_id", "tool"),
            ("reasoning_content", "assistant"),
        ):
            if getattr(self, name) not in (None, []) and self.role != role:
                raise unsupported("messages", f"{name}: the {role}'s, not the {self.role}'s")
        return self

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)

    @property
    def num_characters(self) -> int:
        """Of all that the template gets."""
        functions = [one.function for one in self.tool_calls]
        calls = sum(len(one.name) + len(one.arguments) for one in functions)
        return len(self.text) + len(self.reasoning_content or "") + calls

    def for_template(self) -> dict[str, Any]:
        """The turn for a chat template, with the arguments of calls as objects. Raises ApiError for
        arguments that are no JSON object.
        """
        turn: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        for call in self.tool_calls:
            arguments, what = None, "are no JSON object"
            try:
                arguments = json.loads(call.function.arguments or "{}")
                json.dumps(arguments, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                arguments, what = None, "hold half a character (a lone surrogate)"
            except (ValueError, RecursionError):
                pass
            if not isinstance(arguments, dict):
                raise ApiError(400, f"the arguments of a tool call {what}", "messages")
            function = {"name": call.function.name, "arguments": arguments}
            calls = turn.setdefault("tool_calls", [])
            calls.append({"type": "function", "function": function})
        if self.reasoning_content is not None:
            turn["reasoning_content"] = self.reasoning_content
        if self.name is not None:
            turn["name"] = self.name
        return turn


class Function(Strict):
    """strict is accepted: calls follow the schema where tool_choice names or requires a tool."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Strict):
    ignored: ClassVar[frozenset[str]] = CACHE_HINTS

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": function}


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(CompletionRequest):
    """The body of /v1/chat/completions, with OpenAI's defaults."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool = Field(False, description=RAW)
    top_logprobs: NumLogprobs = 0
    tools: list[Tool] = Field(default=[], max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: Annotated[
        dict[str, bool], BeforeValidator(partial(few_keys, most=MAX_OPTIONS))
    ] = Field({}, description="vLLM's: options of the chat template")
    reasoning_effort: Effort | None = Field(
        None, description="for templates that have it; none also switches thinking off"
    )
    continue_final_message: bool = Field(
        False, description="vLLM's: the answer goes on with the last message, the assistant's"
    )
    add_generation_prompt: bool = Field(
        True, description="vLLM's: false is for continue_final_message"
    )

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        names, choice = [tool.function.name for tool in self.tools], self.tool_choice
        continues, required = self.continue_final_message, self.required_tools
        is_unknown = isinstance(choice, NamedTool) and not required
        for is_wrong, param, what in (
            (len(limits) > 1, "max_tokens", "max_completion_tokens differs: give one of them"),
            (self.top_logprobs and not self.logprobs, "top_logprobs", "for logprobs=true only"),
            (not names and choice not in ("none", "auto"), "tool_choice", "needs tools"),
            (continues and required, "continue_final_message", "not where a call is required"),
            (len(set(names)) < len(names), "tools", "two have the same name"),
            (is_unknown, "tool_choice", "names none of the tools"),
        ):
            if is_wrong:
                raise ApiError(400, f"{param}: {what}", param)
        if not self.add_generation_prompt and not continues:
            raise unsupported(
                "add_generation_prompt", "false is for continue_final_message only; leave it out"
            )
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call; none with tool_choice none."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def required_tools(self) -> list[Tool]:
        """The tools of which the model must call one; empty where it may answer in words."""
        if isinstance(self.tool_choice, NamedTool):
            return [
                tool for tool in self.tools if tool.function.name == self.tool_choice.function.name
            ]
        return self.tools if self.tool_choice == "required" else []


# /v1/completions


def _few_prompts(prompts: Any) -> Any:
    # a list of integers is one prompt
    if isinstance(prompts, list) and len(prompts) > MAX_PROMPTS and type(prompts[0]) is not int:
        raise PydanticCustomError(
            "too_many_prompts",
            "{count} prompts are too many: send {most} at most in one request",
            {"count": len(prompts), "most": MAX_PROMPTS},
        )
    return prompts


class TextRequest(CompletionRequest):
    """The body of /v1/completions, with OpenAI's defaults; add_special_tokens is vLLM's. With echo,
    logprobs cover the prompt too; max_tokens 0 answers nothing.
    """

    default_tokens: ClassVar[int | None] = 16  # OpenAI's

    prompt: Annotated[
        str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1, fail_fast=True)],
        BeforeValidator(_few_prompts),
    ]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: NumLogprobs | None = Field(
        None, description=f"of so many tokens at each place. {RAW}"
    )
    add_special_tokens: bool = True
    echo: bool = False

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each as text or as tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [one for one in self.prompt if isinstance(one, int)]
        return [tokens] if tokens else [one for one in self.prompt if not isinstance(one, int)]

    @property
    def num_answers(self) -> int:
        return self.n * len(self.prompts)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None


# /tokenize, /detokenize


class TokenizeRequest(RequestBody):
    """vLLM's body (prompt or messages), and llama.cpp's (content), with their own defaults of
    special tokens.
    """

    off: ClassVar[dict[str, tuple[Any, ...]]] = {
        "add_generation_prompt": (True,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "continue_final_message": (False,),
        "parse_special": (True,),
        "with_pieces": (False,),
    }

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, fail_fast=True)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    add_special_tokens: bool = Field(True, description="of a prompt")
    add_special: bool = Field(False, description="of a content")
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if sum(one is not None for one in (self.prompt, self.content, self.messages)) != 1:
            raise ApiError(400, "give one of prompt, content and messages", "prompt")
        return self


class HeadRequest(RequestBody):
    """The head that drafts from now on: the name of a folder in `limits.heads`."""

    head: str = Field(min_length=1, max_length=255)


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: list[TokenId] = Field(fail_fast=True)
