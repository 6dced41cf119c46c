"""The target's chat template: messages to text, as transformers and servers render it, on a day
that can be fixed.

A template that prints today's date prints the given day, at midnight; without one the clock, as a
server does. Tools and default system prompts are the template's own: they are in the text as a
server has them.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import jinja2

from eyas.errors import TemplateError, template_hint

REASONING = ("reasoning_content", "reasoning", "thinking")  # its names in messages
_CLOCK = "strftime_now"
# of strftime that a day fixes
_CODES = (*"aAbBcCdDeFgGhHIjmMpPrRSTuUVwWxXyY", *(f"-{code}" for code in "dHIjmMSUwy"))
_FORMAT = re.compile(_CLOCK + r"""\(\s*(?:format\s*=\s*)?(["'])(?P<format>.*?)\1""")
_CODE = re.compile(r"%(-?.)")

_QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Find it.",
            "parameters": {
                "type": "object",
                "properties": {"what": {"type": "string", "description": "What."}},
                "required": ["what"],
            },
        },
    }
]


class TemplateRefusal(TemplateError):
    """The template itself refuses a conversation: roles that do not alternate, ..."""


class Template:
    """The chat template of a tokenizer. date: printed for today; options: more variables for it.

    probe_tools: to examine it with; None where it takes conversations without any. Raises
    TemplateError: there is none, or it prints the time in a way that a day does not fix.
    """

    probe_tools: list[dict[str, Any]] | None = None

    def __init__(
        self, tokenizer: Any, folder: str, date: datetime.date | None, options: Mapping[str, Any]
    ) -> None:
        self._tokenizer, self._folder = tokenizer, folder
        self._date, self._options = date, dict(options)
        if tokenizer.chat_template is None:
            raise TemplateError(
                f"the tokenizer in {folder} has no chat template",
                template_hint(f"{folder}/chat_template.jinja"),
            )
        self._plain, self._with_tools = self._source(None), self._source([{}])
        # servers give the first two; gpt-oss's template reads the third
        is_read = re.search(rf"\b{REASONING[2]}\b", self._plain + self._with_tools)
        self._reasoning_names = REASONING if is_read else REASONING[:2]
        self.probe_tools = self._probe_tools()

    @property
    def needs_a_date(self) -> bool:
        """True when its output may depend on the day, and none is given."""
        return self._date is None and _CLOCK in self._plain + self._with_tools

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        """The conversation as text, its messages as servers give them to a template. Raises
        TemplateRefusal.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                [as_served(message, self._reasoning_names) for message in messages],
                tools=list(tools) if tools else None,
                chat_template=self._with_tools if tools else self._plain,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._options,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise self._refusal(error, bool(tools)) from error
        return str(text)

    def _refusal(self, error: Exception, has_tools: bool) -> TemplateRefusal:
        where = f"the chat template of {self._folder}"
        if self.probe_tools and not has_tools:
            return TemplateRefusal(
                f"{where} refuses a conversation without tools: {error}",
                "give the conversation its tools, or put the model's template for conversations "
                "without tools into that folder",
            )
        hint = "check the conversation's roles and contents"
        if isinstance(error, jinja2.UndefinedError):
            hint += ", or give a variable that the template lacks a default in chat_template there"
        return TemplateRefusal(f"{where} refuses a conversation: {error}", hint)

    def _probe_tools(self) -> list[dict[str, Any]] | None:
        """Tools for a template that refuses every conversation without any (Hermes); None too for
        one that refuses both, of which Chat says why.
        """
        for tools in (None, _TOOLS):
            with suppress(TemplateRefusal):
                self.render(_QUESTION, True, tools)
                return tools
        return None

    def _source(self, tools: list[dict[str, Any]] | None) -> str:
        try:
            template = str(self._tokenizer.get_chat_template(tools=tools))
        except ValueError as error:
            raise TemplateError(
                f"the tokenizer in {self._folder} has several chat templates and none of them is "
                "named default",
                "name the one for conversations `default`",
            ) from error
        if self._date is None or _CLOCK not in template:
            return template
        return _on_a_day(template, self._date, self._folder)


def _on_a_day(template: str, date: datetime.date, folder: str) -> str:
    """Shadow the function `strftime_now` that templates get, by a macro: a function cannot be
    handed to a template.
    """
    formats = [found["format"] for found in _FORMAT.finditer(template)]
    unknown = sorted({code for form in formats for code in _CODE.findall(form)} - set(_CODES))
    if unknown or len(formats) != len(re.findall(_CLOCK + r"\s*\(", template)):
        codes = ", ".join(f"%{code}" for code in unknown) or "a format that it makes up"
        raise TemplateError(
            f"the chat template of {folder} prints the time ({codes}), which no day fixes",
            "take the time out of chat_template in that folder, or fix it there",
        )
    filled = "".join(f" | replace('%{code}', '{date.strftime('%' + code)}')" for code in _CODES)
    return (
        f"{{%- macro strftime_now(format) -%}}{{{{ format{filled} }}}}{{%- endmacro +%}}{template}"
    )


def as_served(message: Mapping[str, Any], reasoning_names: Sequence[str]) -> dict[str, Any]:
    """A message in OpenAI's form as servers (vLLM, SGLang) hand it to a chat template.

    A content that is null or absent, as beside tool calls, is an empty text; arguments of calls
    are objects; an empty list of calls or a null reasoning is not there; a reasoning is there
    under all of reasoning_names.
    """
    served = {name: value for name, value in message.items() if name not in REASONING}
    if served.get("content") is None:
        served["content"] = ""
    if calls := served.pop("tool_calls", None):
        served["tool_calls"] = [_call_as_served(call) for call in calls]
    reasoning = next((str(message[name]) for name in REASONING if message.get(name)), "")
    if reasoning:
        served |= dict.fromkeys(reasoning_names, reasoning)
    return served


def _call_as_served(call: Mapping[str, Any]) -> dict[str, Any]:
    called = call.get("function", call)
    function = {**called, "arguments": _as_object(called.get("arguments"))}
    return {**call, "function": function} if "function" in call else function


def _as_object(arguments: Any) -> Any:
    """Arguments of a call, which OpenAI's protocol writes as JSON; what is none stays a text."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments
