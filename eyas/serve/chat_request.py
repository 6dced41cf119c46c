"""The body of /v1/chat/completions: messages, tools and what belongs to them. Knows OpenAI's form,
no template.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from eyas.serve.fields import NumLogprobs, SamplingFields, Strict
from eyas.serve.refusal import ApiError, unsupported

_MEANS_NOTHING: dict[str, Any] = {"annotations": [], "tool_calls": []}


class TextPart(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """arguments: JSON, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # in chunks, which clients put together


class ChatMessage(Strict):
    """One turn; a content of several text parts is their concatenation. Fields that are null are
    not there.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] = Field(default=[])
    tool_call_id: str | None = None
    name: str | None = None  # of the tool that answers

    @model_validator(mode="before")
    @classmethod
    def _drop_what_means_nothing(cls, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        return {
            name: value
            for name, value in message.items()
            if value is not None and _MEANS_NOTHING.get(name) != value
        }

    @model_validator(mode="after")
    def _belongs_to_its_role(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ApiError(400, f"a message of the {self.role} has no content", "messages")
        if self.tool_calls and self.role != "assistant":
            raise ApiError(
                400, f"tool_calls are the assistant's, not the {self.role}'s", "messages"
            )
        if (self.tool_call_id is not None or self.name is not None) and self.role != "tool":
            raise unsupported(
                "messages", f"tool_call_id and name are for the role tool, not for {self.role}"
            )
        return self

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)

    @property
    def uses_tools(self) -> bool:
        return self.role == "tool" or bool(self.tool_calls)

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it: arguments of calls are objects. Raises ApiError for arguments
        that are none.
        """
        turn: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.tool_calls:
            turn["tool_calls"] = [
                {
                    "type": "function",
                    "function": {"name": one.function.name, "arguments": _arguments(one.function)},
                }
                for one in self.tool_calls
            ]
        return turn if self.name is None else {**turn, "name": self.name}


def _arguments(called: CalledFunction) -> dict[str, Any]:
    try:
        arguments = json.loads(called.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, "the arguments of a tool call are no JSON object", "messages")
    return arguments


class Function(Strict):
    """strict asks for arguments that follow the schema: done where tool_choice names or requires a
    tool.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it."""
        return {
            "type": "function",
            "function": self.function.model_dump(exclude_none=True, exclude={"strict"}),
        }


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(SamplingFields):
    """The body of a request, with OpenAI's defaults."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs = 0
    tools: list[Tool] = Field(default=[], max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, bool] = Field(default={})

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if (
            None not in (self.max_tokens, self.max_completion_tokens)
            and self.max_tokens != self.max_completion_tokens
        ):
            raise ApiError(
                400, "max_tokens and max_completion_tokens differ: give one of them", "max_tokens"
            )
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs is for logprobs=true only", "top_logprobs")
        if not self.tools and self.tool_choice not in ("none", "auto"):
            raise ApiError(400, "tool_choice needs tools", "tool_choice")
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ApiError(400, "two tools have the same name", "tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ApiError(400, "tool_choice names none of the tools", "tool_choice")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call: with tool_choice none it does not hear of them."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def demanded_tools(self) -> list[Tool]:
        """The tools of which the model must call one; empty where it may answer in words."""
        if isinstance(self.tool_choice, NamedTool):
            return [
                tool for tool in self.tools if tool.function.name == self.tool_choice.function.name
            ]
        return self.tools if self.tool_choice == "required" else []
