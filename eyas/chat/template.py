"""The target's chat template: messages to text, as transformers renders it, on a day that can be
fixed; and what it must do to be trusted.

A template that prints today's date prints the given day, at midnight; without one the clock, as a
server does. Tools and default system prompts are the template's own: they are in the text as a
server has them.

A template is examined on made-up conversations before the first real one. It must not refuse one
question and one answer (several turns and a system prompt it may). An answer must follow the prompt
that the target continues, which ends where the target begins to write; it must stand there as
written and end with a token that ends the target's output, with nothing after it. Every message
must be there once, in its order, and no BOS doubled.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2

from eyas.chat.spans import Frame
from eyas.chat.tokenizer import TargetTokenizer, TemplateProblem
from eyas.chat.turn import Turn
from eyas.errors import TemplateError

_CLOCK = "strftime_now"
# of strftime that a day fixes
_CODES = (*"aAbBcCdDeFgGhHIjmMpPrRSTuUVwWxXyY", *(f"-{code}" for code in "dHIjmMSUwy"))
_FORMAT = re.compile(_CLOCK + r"""\(\s*(?:format\s*=\s*)?(["'])(?P<format>.*?)\1""")
_CODE = re.compile(r"%(-?.)")

_MARKER = "the-answer-goes-here"
_EARLIER = 'Earlier, I said: it\'s "4" & <b>2</b>'
_AWKWARD = 'It\'s "4" & <b>that</b>:\n\n1.  x > y'


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


PROBES = (
    [_user("What's 2 + 2 & <i>why</i>?"), _assistant(_AWKWARD)],
    [
        _user("First\nquestion"),
        _assistant(_EARLIER),
        _user("Second question"),
        _assistant(_AWKWARD),
    ],
    [{"role": "system", "content": "Be brief."}, _user("Hello"), _assistant(_AWKWARD)],
)


class TemplateRefusal(TemplateError):
    """The template itself refuses a conversation: roles that do not alternate, a system prompt that
    it has no place for.
    """


class Template:
    """The chat template of a tokenizer. date: printed for today; options: more variables for it.

    Raises TemplateError: there is none, or it prints the time in a way that a day does not fix.
    """

    def __init__(
        self, tokenizer: Any, folder: str, date: datetime.date | None, options: Mapping[str, Any]
    ) -> None:
        self._tokenizer, self._folder = tokenizer, folder
        self._date, self._options = date, dict(options)
        if tokenizer.chat_template is None:
            raise TemplateError(
                f"the tokenizer in {folder} has no chat template",
                "put the template that the target was trained with into chat_template.jinja in "
                "that folder; a base model without one cannot be used for chat",
            )
        self._plain, self._with_tools = self._source(None), self._source([{}])

    @property
    def needs_a_date(self) -> bool:
        """True when its output may depend on the day, and none is given."""
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
        """The conversation as text. Raises TemplateRefusal."""
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
            raise TemplateRefusal(
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


# The examination


def frame_of(template: Template, tokenizer: TargetTokenizer) -> tuple[Frame, set[str]]:
    """What the template puts around an answer, and the control tokens that it writes. Raises
    TemplateProblem, TemplateRefusal.
    """
    prompt = template.render([_user("Hello")], True, None)
    whole = template.render([_user("Hello"), _assistant(_MARKER)], False, None)
    if not whole.startswith(prompt):
        raise TemplateProblem("rewrites the prompt once an answer follows")
    if whole.count(_MARKER) != 1:
        raise TemplateProblem("does not render an answer as the target wrote it")
    opening, _, rest = whole[len(prompt) :].partition(_MARKER)
    is_prompted = prompt != template.render([_user("Hello")], False, None)
    if tokenizer.control.search(opening) or (opening.strip() and not is_prompted):
        raise TemplateProblem("opens an answer with a role token that its generation prompt lacks")
    if not opening.strip() and "\n" in opening:
        raise TemplateProblem(
            "breaks the line before an answer, and its generation prompt does not"
        )
    ends = tuple(tokenizer.ends.values())
    end = min((at for name in ends if (at := rest.find(name)) >= 0), default=None)
    if end is None or rest[:end].strip():
        raise TemplateProblem(
            "does not end an answer with a token that ends the target's output (eos_token_id)"
        )
    after = rest[end:]
    for name in ends:
        after = after.replace(name, "")
    if after.strip():
        raise TemplateProblem("writes more after the end of the last answer")
    return Frame(opening, rest[:end], ends), {
        found.group() for found in tokenizer.control.finditer(whole)
    }


def examine(turn: Callable[[Sequence[Mapping[str, Any]]], Turn], bos_id: int | None) -> None:
    """Try the template on made-up conversations. turn: the mask of an answer, both ways; raises
    TemplateProblem.
    """
    for probe in PROBES:
        try:
            made = turn(probe)
        except TemplateRefusal:
            if probe is PROBES[0]:
                raise
            # one question at a time, or no place for a system prompt: rows that have more are
            # refused one by one
            continue
        except TemplateProblem:
            if probe is not PROBES[2]:
                raise
            # the system prompt is lost, or stands in the last question (Mistral): rows that have
            # one are refused
            continue
        if bos_id is not None and made.ids[:2] == [bos_id, bos_id]:
            raise TemplateProblem("begins with two BOS tokens")
        if probe is PROBES[1] and _EARLIER not in made.encoded.text:
            raise TemplateProblem(
                "leaves out earlier answers, or does not render them as the target wrote them"
            )
