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

One rewriting of the prompt is allowed, as nearly all models that reason have it: the prompt ends in
a block of thoughts, which rendered answers lack. The answer's place is known all the same.

    prompt    <turn>user\nHi<end><turn>assistant\n<think>\n
    rendered  <turn>user\nHi<end><turn>assistant\nHello!<end>
    the row   <turn>user\nHi<end><turn>assistant\n<think>\nA greeting.</think>\n\nHello!<end>
"""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2

from eyas.chat.spans import Frame, Thoughts
from eyas.chat.tokenizer import TargetTokenizer, TemplateProblem
from eyas.chat.turn import REASONING, Turn, as_served
from eyas.errors import TemplateError

_CLOCK = "strftime_now"
# of strftime that a day fixes
_CODES = (*"aAbBcCdDeFgGhHIjmMpPrRSTuUVwWxXyY", *(f"-{code}" for code in "dHIjmMSUwy"))
_FORMAT = re.compile(_CLOCK + r"""\(\s*(?:format\s*=\s*)?(["'])(?P<format>.*?)\1""")
_CODE = re.compile(r"%(-?.)")

# Tags around thoughts, as the reasoning parsers of servers know them.
_TAGS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
)

NO_END = "does not end an answer with a token that ends the target's output (eos_token_id)"

_QUESTION, _MARKER, _THOUGHT = "Hello", "the-answer-goes-here", "the-thoughts-go-here"
_EARLIER = 'Earlier, I said: it\'s "4" & <b>2</b>'
_AWKWARD = 'It\'s "4" & <b>that</b>:\n\n1.  x > y'


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


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
                "put the template that the target was trained with into chat_template.jinja in "
                "that folder; a base model without one cannot be used for chat",
            )
        self._plain, self._with_tools = self._source(None), self._source([{}])
        # servers give the first two; gpt-oss's template reads the third
        is_read = re.search(rf"\b{REASONING[2]}\b", self._plain + self._with_tools)
        self._reasoning_names = REASONING if is_read else REASONING[:2]
        self.probe_tools = self._tools_that_it_needs()

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

    def _tools_that_it_needs(self) -> list[dict[str, Any]] | None:
        """Tools for a template that refuses every conversation without any (Hermes)."""
        try:
            self.render([_user(_QUESTION)], True, None)
        except TemplateRefusal:
            try:
                self.render([_user(_QUESTION)], True, _TOOLS)
            except TemplateRefusal:
                return None  # the examination says why
            return _TOOLS
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
    question, tools = [_user(_QUESTION)], template.probe_tools
    prompt = template.render(question, True, tools)
    whole = template.render([*question, _assistant(_MARKER)], False, tools)
    if whole.count(_MARKER) != 1:
        raise TemplateProblem("does not render an answer as the target wrote it")
    before, _, rest = whole.partition(_MARKER)
    is_prompted = prompt != template.render(question, False, tools)
    thoughts = _thoughts(prompt, before) if is_prompted else None
    moved = _moved(prompt, before, rest) if is_prompted else None
    if moved is not None:
        rest = rest.removesuffix(moved[0])
    if thoughts is None and moved is None:
        opening = _opening(prompt, before, is_prompted, tokenizer)
    else:
        opening = ""
    closing, next_turn = _closing(prompt, rest, tokenizer), ""
    if closing is None:
        followed = template.render([*question, _assistant(_MARKER), *question], False, tools)
        closing, next_turn = _next_turn(prompt, followed.partition(_MARKER)[2], tokenizer)
    tail = rest + next_turn
    frame = Frame(opening, closing, tail, tuple(tokenizer.ends.values()), thoughts)
    if tokenizer.control.search(opening):
        thought = {**_assistant(_MARKER), "reasoning_content": _THOUGHT}
        answer = template.render([*question, thought], False, tools).removeprefix(prompt)
        first, found, rest = answer.partition(_THOUGHT)
        between, also_found, _ = rest.partition(_MARKER)
        channels = (first, between) if found and also_found else ("", "")
        frame = dataclasses.replace(frame, channels=channels)
    return dataclasses.replace(frame, moved=moved, next_turn=next_turn), {
        found.group() for found in tokenizer.control.finditer(whole)
    }


def _opening(prompt: str, before: str, is_prompted: bool, tokenizer: TargetTokenizer) -> str:
    """What stands between the prompt and an answer. Raises TemplateProblem."""
    if not before.startswith(prompt):
        raise TemplateProblem(
            "rewrites the prompt once an answer follows",
            "an answer must follow the prompt that a server gives the target: mend chat_template "
            "in that folder",
        )
    opening = before[len(prompt) :]
    # control tokens that the target writes itself (those of a channel), not another turn's end
    ends_a_turn = any(name in opening for name in tokenizer.ends.values())
    if (tokenizer.control.search(opening) or opening.strip()) and (not is_prompted or ends_a_turn):
        raise TemplateProblem("opens an answer with a role token that its generation prompt lacks")
    if not opening.strip() and "\n" in opening:
        raise TemplateProblem(
            "breaks the line before an answer, and its generation prompt does not",
            "add the line break to the generation prompt of chat_template in that folder, if "
            "servers of this target have it too",
        )
    return opening


def _closing(prompt: str, rest: str, tokenizer: TargetTokenizer) -> str | None:
    """What stands between an answer and the token that ends it, of the `rest` after the answer;
    None where that is nothing at all. Raises TemplateProblem.
    """
    if not rest:
        return None
    ends = tokenizer.ends.values()
    end = min((at for name in ends if (at := rest.find(name)) >= 0), default=None)
    if end is None or rest[:end].strip():
        raise TemplateProblem(NO_END)
    after = rest[end:]
    for name in ends:
        after = after.replace(name, "")
    if after.strip():
        raise TemplateProblem("writes more after the end of the last answer")
    return rest[:end]


def _next_turn(prompt: str, rest: str, tokenizer: TargetTokenizer) -> tuple[str, str]:
    """Of a template that ends no answer, as the next turn's first token does (GLM): what stands
    before that token, and the token, which must end the target's output and stand before a
    question. Raises TemplateProblem.
    """
    for name in tokenizer.ends.values():
        closing, found, _ = rest.partition(name)
        if found and not closing and name in prompt.partition(_QUESTION)[0]:
            return closing, name
    raise TemplateProblem(NO_END)


def _moved(prompt: str, before: str, rest: str) -> tuple[str, str] | None:
    """Words of the template's own that stand before the assistant's header in a prompt, and in a
    rendered conversation after its answer (Command-R+); with the header. None without.
    """
    length = len(prompt) - len(before)
    words = rest[-length:] if length > 0 else ""
    at = prompt.rfind(words) if words else -1
    is_moved = prompt[:at] + prompt[at + length :] == before and _QUESTION not in words
    return (words, before[at:]) if at >= 0 and is_moved else None


def _thoughts(prompt: str, before: str) -> Thoughts | None:
    """The block of thoughts at the end of a generation prompt, which need not be what stands
    before a rendered answer; None without one, and where it is closed and stands there too.
    """
    for begin, end in _TAGS:
        stem, found, inner = prompt.rpartition(begin)
        if not found or inner.replace(end, "", 1).strip():
            continue
        is_open = end not in inner
        instead = before[len(stem) :]
        is_block = not instead.replace(begin, "", 1).replace(end, "", 1).strip()
        if not before.startswith(stem) or not is_block:
            return None
        if before.startswith(prompt) and not is_open:
            return None
        return Thoughts(begin + inner, begin, end, is_open, instead)
    return None


def _as_written(probe: Sequence[Mapping[str, Any]], thoughts: Thoughts | None) -> list[Any]:
    """A probe whose answers begin inside of the thoughts that the prompt leaves open."""
    if thoughts is None or not thoughts.is_open:
        return list(probe)
    return [
        _assistant(f"Let me see.\n{thoughts.end}\n\n{one['content']}")
        if one["role"] == "assistant"
        else one
        for one in probe
    ]


def examine(
    turn: Callable[[Sequence[Mapping[str, Any]]], Turn], frame: Frame, bos_id: int | None
) -> None:
    """Try the template on made-up conversations. turn: the mask of an answer, both ways; raises
    TemplateProblem.
    """
    for probe in PROBES:
        try:
            made = turn(_as_written(probe, frame.thoughts))
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
