"""OpenAI's Responses API without a store: a body of /v1/responses becomes a chat, and the answer's
words and calls become items (message, function_call).
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from eyas.engine.request import Request, TokenLogprob
from eyas.serve.fields import (
    IGNORED,
    MAX_SHOWN,
    RAW,
    Effort,
    JsonObject,
    NumLogprobs,
    RequestBody,
    Strict,
)
from eyas.serve.limits import ApiError
from eyas.serve.protocol import CACHE_HINTS, MAX_TOOLS, ChatRequest, Function, Part
from eyas.serve.tokenizer import Tokenizer
from eyas.serve.tools import Call
from eyas.serve.writers import Choice, CompletionWriter, Delta, Ending, chat_logprobs

log = logging.getLogger("eyas.serve")
MAX_ITEMS = 4096
MAX_PARTS = 1024
LOGPROBS = "message.output_text.logprobs"
HOSTED = re.compile(r"\w+_call(_output)?\..+")  # types of OpenAI's hosted tools
INCLUDED = rf"^(message\.output_text\.logprobs|reasoning\.encrypted_content|{HOSTED.pattern})$"
# Fields that have the same name in a chat; for errors, those of a chat that have another here.
SAME_NAMES = ("model", "temperature", "top_p", "parallel_tool_calls", "top_logprobs", "stream")
RESPONSE_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


# The body


class InputText(Part):
    """A part of an item's text; output_text in answers that are sent back."""

    ignored: ClassVar[frozenset[str]] = CACHE_HINTS | {"annotations", "logprobs"}
    kinds: ClassVar[tuple[str, ...]] = ("input_text", "output_text")

    type: Literal["input_text", "output_text"]


InputContent = str | Annotated[list[InputText], Field(max_length=MAX_PARTS, fail_fast=True)]
# fields of an item in the answer it came from
_OF_OUTPUT = frozenset({"id", "status", "phase"})


class InputMessage(Strict):
    ignored: ClassVar[frozenset[str]] = CACHE_HINTS | _OF_OUTPUT

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: InputContent


class FunctionCallItem(Strict):
    ignored: ClassVar[frozenset[str]] = _OF_OUTPUT

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(Strict):
    ignored: ClassVar[frozenset[str]] = _OF_OUTPUT

    type: Literal["function_call_output"]
    call_id: str
    output: InputContent


class ReasoningItem(BaseModel):
    """Thoughts of an earlier answer: the model gets none, as with most templates."""

    type: Literal["reasoning"]


def _kind_of(item: Any) -> str | None:
    if isinstance(item, dict):
        kind = item.get("type", "message")
        return kind if isinstance(kind, str) else None
    return getattr(item, "type", None)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind_of,
        custom_error_type="unsupported_item",
        custom_error_message=(
            "only items of the types message, function_call, function_call_output and reasoning "
            "are supported"
        ),
    ),
]


class FunctionTool(Function):
    ignored: ClassVar[frozenset[str]] = CACHE_HINTS

    type: Literal["function"]

    def for_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"})}


class HostedTool(BaseModel):
    """A tool of OpenAI's servers, which agents send unasked: the model does not see it."""

    type: str = Field(json_schema_extra={"not": {"const": "function"}})


class NamedFunctionTool(Strict):
    type: Literal["function"]
    name: str


class TextFormat(Strict):
    """response_format of a chat, with the schema on the same level."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None

    def for_chat(self) -> dict[str, Any]:
        if self.schema_ is None:
            return {"type": self.type}
        schema = {"name": self.name or "answer", "schema": self.schema_, "strict": self.strict}
        return {"type": self.type, "json_schema": schema}


class TextOptions(Strict):
    ignored: ClassVar[frozenset[str]] = frozenset({"verbosity"})

    format: TextFormat | None = None


class ReasoningOptions(Strict):
    """Answers have no items of reasoning, so there is nothing to summarise."""

    ignored: ClassVar[frozenset[str]] = frozenset({"context", "summary", "generate_summary"})

    effort: Effort | None = None
    mode: Literal["standard"] | None = None


class ObfuscationOptions(Strict):
    include_obfuscation: Literal[False] = False


class ResponsesRequest(RequestBody):
    """The body of /v1/responses, with OpenAI's defaults, but nothing is stored: fields that need a
    store are refused by name.
    """

    ignored: ClassVar[frozenset[str]] = (IGNORED - {"metadata"}) | {"max_tool_calls"}
    off: ClassVar[dict[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "truncation": ("disabled",),
    }
    num_answers: ClassVar[int] = 1

    model: str | None = None
    input: (
        str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    )
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    text: TextOptions = TextOptions()
    tools: list[
        Annotated[
            Annotated[FunctionTool, Tag("function")] | Annotated[HostedTool, Tag("hosted")],
            Discriminator(lambda tool: "function" if _kind_of(tool) == "function" else "hosted"),
        ]
    ] = Field(default=[], max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | HostedTool = "auto"
    parallel_tool_calls: bool = True
    include: list[Annotated[str, Field(pattern=INCLUDED, max_length=MAX_SHOWN)]] = Field(
        default=[], max_length=16, fail_fast=True
    )
    top_logprobs: NumLogprobs = Field(0, description=RAW)
    reasoning: ReasoningOptions = ReasoningOptions()
    metadata: dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] = (
        Field(default={}, max_length=16)
    )
    stream: bool = False
    stream_options: ObfuscationOptions | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        wants = LOGPROBS in self.include
        if self.top_logprobs and not wants:
            raise ApiError(400, f"top_logprobs is for include: [{LOGPROBS!r}] only", "top_logprobs")
        if wants and self.functions and self.tool_choice != "none":
            what = "logprobs stand in messages alone, and with tools an answer may be a call"
            raise ApiError(400, f"{what}: ask for one of them", "include")
        return self

    @property
    def functions(self) -> list[FunctionTool]:
        return [one for one in self.tools if isinstance(one, FunctionTool)]

    def as_chat(self) -> ChatRequest:
        """The same request as a body of /v1/chat/completions. Raises ApiError."""
        choice, wanted = self.tool_choice, self.text.format
        hosted = {one.type[:MAX_SHOWN] for one in self.tools if isinstance(one, HostedTool)}
        hosted |= {one for one in self.include if HOSTED.match(one)}
        if hosted:
            data = {"types": sorted(hosted)}
            log.warning("tools that are no functions are left out", extra={"data": data})
        if isinstance(choice, HostedTool):
            what = f"this server has no tool {choice.type[:MAX_SHOWN]!r}: name a function, or auto"
            raise ApiError(400, what, "tool_choice")
        called = None if isinstance(choice, str) else {"name": choice.name}
        return ChatRequest.model_validate(
            {name: getattr(self, name) for name in SAME_NAMES}
            | {
                "messages": self._turns(),
                "max_completion_tokens": self.max_output_tokens,
                "response_format": None if wanted is None else wanted.for_chat(),
                "tools": [one.for_chat() for one in self.functions],
                "tool_choice": {"type": "function", "function": called} if called else choice,
                "logprobs": LOGPROBS in self.include,
                "reasoning_effort": self.reasoning.effort,
            }
        )

    def _turns(self) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = []
        if self.instructions is not None:
            turns.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*turns, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, InputMessage):
                turns.append({"role": item.role, "content": _content(item.content)})
            elif isinstance(item, ReasoningItem):
                continue
            elif isinstance(item, FunctionOutputItem):
                turn = {"role": "tool", "content": _content(item.output)}
                turns.append({**turn, "tool_call_id": item.call_id})
            else:
                # calls belong to the assistant's message before them, as in the answer
                if not turns or turns[-1]["role"] != "assistant":
                    turns.append({"role": "assistant"})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "function": function}
                turns[-1].setdefault("tool_calls", []).append(call)
        if not turns:
            raise ApiError(400, "input holds no message", "input")
        return turns


def _content(content: str | list[InputText]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


# The answer


class ResponseWriter(CompletionWriter):
    """The answer of /v1/responses. A stream begins with the first token, as the others do."""

    def __init__(
        self,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        chat: ChatRequest,
        body: ResponsesRequest,
    ) -> None:
        super().__init__(requests, tokenizer, chat)
        # of every event and of the whole answer, which repeat the request
        left_out = {"input", "include", "stream", "stream_options"}
        self._shared: dict[str, Any] = {
            **body.model_dump(by_alias=True, exclude=left_out),
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "text": {
                "format": {"type": "text"},
                **body.text.model_dump(by_alias=True, exclude_none=True),
            },
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "tools": [one.model_dump(by_alias=True, exclude_none=True) for one in body.tools],
            **dict.fromkeys(("background", "store"), False),
            **dict.fromkeys(("error", "incomplete_details", "previous_response_id", "usage")),
            "truncation": "disabled",
        }
        self._streams = body.stream
        self._num_events = 0
        self._output: list[dict[str, Any]] = []
        self._open: _Item | None = None
        self._ending: Ending | None = None

    def write(self, choice: Choice, delta: Delta) -> str:
        begin = ""
        if delta.is_first:
            started = {**self._shared, "status": "in_progress", "output": []}
            begin = self._event("response.created", response=started)
            begin += self._event("response.in_progress", response=started)
        return begin + self._advance(delta)

    def end(self) -> str:
        answer = self._response()
        return self._event(f"response.{answer['status']}", response=answer)

    def whole(self) -> dict[str, Any]:
        self._advance(self.choices[0].whole())
        return self._response()

    def _response(self) -> dict[str, Any]:
        is_cut, usage = self._ending == "length", self.usage()
        return {
            **self._shared,
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
                "eyas": usage["eyas"],
            },
        }

    def _advance(self, delta: Delta) -> str:
        events = ""
        self._ending = delta.ending
        logprobs = delta.update.logprobs or []
        for part in delta.parts:
            if isinstance(part, Call):
                events += self._call(part)
            elif part:
                events += self._words(part, logprobs)
                logprobs = []
        if self._open is not None and self._open.call is None:
            self._open.logprobs += logprobs
        elif self._open is None and (logprobs or (delta.ending is not None and not self._output)):
            events += self._words("", logprobs)
        if delta.ending is None:
            return events
        return events + self._close("incomplete" if delta.ending == "length" else "completed")

    def _words(self, text: str, logprobs: list[TokenLogprob]) -> str:
        events, item = "", self._open
        if item is None or item.call is not None:
            item = _Item()
            events = self._begin(item)
            events += self._grown("content_part.added", content_index=0, part=item.part)
        item.text += text
        found = chat_logprobs(self.tokenizer, [*item.logprobs, *logprobs])
        item.logprobs = []
        item.written += found
        return events + self._grown(
            "output_text.delta", content_index=0, delta=text, logprobs=found
        )

    def _call(self, call: Call) -> str:
        events = self._begin(_Item(call)) if call.name is not None else ""
        assert self._open is not None, "a call begins with its name"
        assert self._open.call is not None, "a call begins with its name"
        if not call.arguments:
            return events
        self._open.text += call.arguments
        return events + self._grown("function_call_arguments.delta", delta=call.arguments)

    def _begin(self, item: _Item) -> str:
        events, self._open = self._close("completed"), item
        return events + self._event(
            "response.output_item.added",
            output_index=len(self._output),
            item=item.to_json("in_progress"),
        )

    def _close(self, status: str) -> str:
        if (item := self._open) is None:
            return ""
        if item.call is not None:
            events = self._grown(
                "function_call_arguments.done", name=item.call.name, arguments=item.text
            )
        else:
            item.written += chat_logprobs(self.tokenizer, item.logprobs)
            events = self._grown(
                "output_text.done", content_index=0, text=item.text, logprobs=item.written
            )
            events += self._grown("content_part.done", content_index=0, part=item.part)
        written = item.to_json(status)
        events += self._event(
            "response.output_item.done", output_index=len(self._output), item=written
        )
        self._output.append(written)
        self._open = None
        return events

    def _grown(self, kind: str, **fields: Any) -> str:
        """The event of a change of the open item."""
        assert self._open is not None
        place = {"item_id": self._open.id, "output_index": len(self._output)}
        return self._event(f"response.{kind}", **place, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        if not self._streams:
            return ""
        data = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: {json.dumps(data)}\n\n"


class _Item:
    """A message that still grows, or a call."""

    def __init__(self, call: Call | None = None) -> None:
        self.id = f"{'msg' if call is None else 'fc'}_{uuid.uuid4().hex}"
        self.call, self.text = call, ""
        self.logprobs: list[TokenLogprob] = []  # of tokens whose text is held back
        self.written: list[dict[str, Any]] = []

    @property
    def part(self) -> dict[str, Any]:
        text = {"type": "output_text", "text": self.text}
        return {**text, "annotations": [], "logprobs": self.written}

    def to_json(self, status: str) -> dict[str, Any]:
        if self.call is not None:
            call = {"call_id": self.call.id, "name": self.call.name, "arguments": self.text}
            return {"type": "function_call", "id": self.id, **call, "status": status}
        content = [] if status == "in_progress" else [self.part]
        message = {"role": "assistant", "status": status, "content": content}
        return {"type": "message", "id": self.id, **message}
