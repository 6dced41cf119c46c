"""The target's chat template: messages to text, as transformers and servers render it."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import jinja2

from eyas.chat.environment import TooMuch, rendered, unset_names
from eyas.errors import TemplateError, template_hint

FAULTS = (  # exceptions of templates
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, MemoryError, RecursionError),
)
REASONING = ("reasoning_content", "reasoning", "thinking")  # its names in messages
_CLOCK = "strftime_now"
# Variables of each rendering, here or in servers.
_GIVEN = {"add_generation_prompt", "continue_final_message", "documents", "messages", "tools"}
# Codes of strftime that depend on the day alone.
_CODES = {*"%aAbBcCdDeFgGhHIjmMpPrRSTuUVwWxXyY", *(f"-{code}" for code in "dHIjmMSUwy")}
_CODE = re.compile(r"%(-?.)")

_QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
_WHAT = {"what": {"type": "string", "description": "What."}}
_FIND = {"type": "object", "properties": _WHAT, "required": ["what"]}
_FUNCTION = {"name": "find", "description": "Find it.", "parameters": _FIND}
_TOOLS: list[dict[str, Any]] = [{"type": "function", "function": _FUNCTION}]


class TemplateRefusal(TemplateError):
    """The template itself refuses a conversation: roles that do not alternate, ..."""


class Template:
    """A target's chat template. Raises TemplateError: there is none.

    templates: sources by name, "default" (`plain`) and perhaps "tool_use". special_tokens, options:
    variables (bos_token, enable_thinking). date: today's, at midnight; None is the clock.

    options: names of the variables left to a client. probe_tools: to examine the template with;
    None where it takes conversations without any.
    """

    probe_tools: list[dict[str, Any]] | None = None

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        folder: str,
        date: datetime.date | None,
        options: Mapping[str, Any],
    ) -> None:
        self._folder, self._date = folder, date
        if not templates:
            raise TemplateError(
                f"the tokenizer in {folder} has no chat template",
                template_hint(f"{folder}/chat_template.jinja"),
            )
        if "default" not in templates:
            what = "has several chat templates and none of them is named default"
            hint = "name the one for conversations `default`"
            raise TemplateError(f"the tokenizer in {folder} {what}", hint)
        self.plain = templates["default"]
        self._with_tools = templates.get("tool_use", self.plain)
        own = {**special_tokens, _CLOCK: self._formatted_date}
        self._variables = {**options, **own}
        read = unset_names(self.plain) | unset_names(self._with_tools)
        read -= own.keys() | _GIVEN  # and special tokens that this tokenizer lacks
        self.options = frozenset(name for name in read if not name.endswith("_token"))
        self.probe_tools = self._probe_tools()

    @property
    def needs_a_date(self) -> bool:
        """Whether the output may depend on the day, and none is given."""
        return self._date is None and _CLOCK in self.plain + self._with_tools

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        """The conversation as text. Raises TemplateRefusal, and TemplateError for a template that
        prints more of the time than the day.
        """
        try:
            given = {
                "messages": [as_served(message) for message in messages],
                "tools": list(tools) if tools else None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            source = self._with_tools if tools else self.plain
            return rendered(source, self._variables | given)
        except TooMuch as error:
            what = f"the chat template of {self._folder} {error}"
            raise TemplateError(what, "give another template, or mend its loops") from error
        except FAULTS as error:
            raise self._refusal(error, bool(tools)) from error

    def _formatted_date(self, format: str) -> str:
        if self._date is None:
            return datetime.datetime.now().strftime(format)
        if unknown := sorted({*_CODE.findall(format)} - _CODES):
            raise TemplateError(
                f"the chat template of {self._folder} prints the time (%{', %'.join(unknown)}), "
                "which no day fixes",
                "take the time out of it",
            )
        return self._date.strftime(format)

    def _refusal(self, error: Exception, has_tools: bool) -> TemplateRefusal:
        where = f"the chat template of {self._folder}"
        if self.probe_tools and not has_tools:
            return TemplateRefusal(
                f"{where} refuses a conversation without tools: {error}",
                "give the conversation its tools, or that folder a template that needs none",
            )
        hint = "check the conversation's roles and contents"
        if isinstance(error, jinja2.UndefinedError):
            hint += ", or give a variable that the template lacks a default in chat_template there"
        return TemplateRefusal(f"{where} refuses a conversation: {error}", hint)

    def _probe_tools(self) -> list[dict[str, Any]] | None:
        # Hermes refuses every conversation without tools
        for tools in (None, _TOOLS):
            with suppress(TemplateRefusal):
                self.render(_QUESTION, True, tools)
                return tools
        return None


def as_served(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in OpenAI's form as vLLM and SGLang give it to a chat template: content null is an
    empty text, arguments of calls are objects, other nulls and an empty list of calls are left out,
    reasoning has all of its names.
    """
    content = message.get("content")
    filled = {**message, "content": "" if content is None else content}
    served = {
        name: value for name, value in filled.items() if name not in REASONING and value is not None
    }
    if calls := served.pop("tool_calls", None):
        served["tool_calls"] = []
        for call in calls:
            called = call.get("function", call)
            function = {**called, "arguments": _as_object(called.get("arguments"))}
            own = {**call, "function": function} if "function" in call else function
            served["tool_calls"].append(own)
    reasoning = next((str(message[name]) for name in REASONING if message.get(name)), "")
    if not reasoning:
        return served
    return {"thinking": reasoning, **served} | dict.fromkeys(REASONING[:2], reasoning)


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments
