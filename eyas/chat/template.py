"""The target's chat template: messages to text, as transformers renders it, on a day that can be
fixed. Knows no tokens.

the template shows today's date     with a day given: that day, at midnight; else the clock, as a server has it
tools, default system prompts       the template's own affair: they are in the text as a server has them
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from eyas.errors import TemplateError

_CLOCK = "strftime_now"
# of strftime that a day fixes
_CODES = (*"aAbBcCdDeFgGhHIjmMpPrRSTuUVwWxXyY", *(f"-{code}" for code in "dHIjmMSUwy"))
_FORMAT = re.compile(_CLOCK + r"""\(\s*(?:format\s*=\s*)?(["'])(?P<format>.*?)\1""")
_CODE = re.compile(r"%(-?.)")


class Refused(TemplateError):
    """The template itself refuses a conversation: roles that do not alternate, a system prompt it
    has no place for.
    """


class Template:
    """The chat template of a tokenizer. date: what it prints for today; options: further variables
    that it looks at.

    Raises TemplateError: there is none, or it prints the time in a way that a day does not fix.
    """

    def __init__(
        self, tokenizer: Any, folder: str, date: datetime.date | None, options: Mapping[str, Any]
    ) -> None:
        self._tokenizer, self._folder, self._date, self._options = (
            tokenizer,
            folder,
            date,
            dict(options),
        )
        if tokenizer.chat_template is None:
            raise TemplateError(
                f"the tokenizer in {folder} has no chat template",
                "put the template that the target was trained with into chat_template.jinja in "
                "that folder; "
                "a base model without one cannot be used for chat",
            )
        self._plain, self._with_tools = self._source(None), self._source([{}])

    @property
    def needs_a_date(self) -> bool:
        """True when what it writes may depend on the day, and none is given."""
        return self._date is None and _CLOCK in self._plain + self._with_tools

    def names(self, token: str) -> bool:
        """True when a token's name is written in the template."""
        return token in self._plain + self._with_tools

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        """The conversation as text. Raises Refused."""
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                chat_template=self._with_tools if tools else self._plain,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._options,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise Refused(
                f"the chat template of {self._folder} refuses a conversation: {error}",
                "check the conversation's roles and contents",
            ) from error
        return str(text)

    def _source(self, tools: list[dict[str, Any]] | None) -> str:
        try:
            template = str(self._tokenizer.get_chat_template(tools=tools))
        except ValueError as error:
            raise TemplateError(
                f"the tokenizer in {self._folder} has several chat templates and none of them is "
                "named default",
                "name the one for conversations `default`",
            ) from error
        return (
            template
            if self._date is None or _CLOCK not in template
            else _on_a_day(template, self._date, self._folder)
        )


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
