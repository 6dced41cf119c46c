"""Chat: the tokenizer and the chat template of a target, and the exact mask of an answer or the
reason why there is none.

Stock templates carry no generation tag, so the answer is found in two ways that have only the
rendered text in common; they must agree token for token, on every answer. Knows no model and no
stage.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.chat.picture import MaskDisagreement
from eyas.chat.prefixes import FindAnswer, by_others, by_spelling, everything, mask_by_prefixes
from eyas.chat.spans import Thoughts, mask_by_spans
from eyas.chat.template import Template, examine, frame_of
from eyas.chat.tokenizer import (
    RenderedText,
    TargetTokenizer,
    TemplateProblem,
    TextStream,
    pattern_of,
    shield_for,
    shielded,
    strings,
)
from eyas.chat.turn import Turn, Wording
from eyas.errors import TemplateError

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
OF_CHANNELS = "give its thoughts as `reasoning_content` and its last channel as `content`"
OTHER_ANSWERS = ("Yes", "Don't know")  # nothing in common at their beginnings and ends
LOST_THOUGHTS = "begins the target's thoughts in its generation prompt, and this answer has none"
OF_THOUGHTS = (
    "give answers as the target wrote them, thoughts and closing tag in `content` (a server "
    "without a reasoning parser gives them so), or set the template's option that turns thoughts "
    "off"
)


@dataclass(frozen=True, slots=True)
class _TemplateInput:
    """What goes into the template. shield: the character that breaks control tokens' names in it,
    None where it holds none.
    """

    messages: Messages
    tools: Tools | None
    shield: str | None = None


class Chat:
    """Tokenizer and chat template of the target in `folder` (Hugging Face's form, local files
    only).

    `date`: what a template that prints today's date prints; None is the clock, as in a server. Data
    stages fix it, or the same conversation would have other tokens tomorrow. `options`: variables
    of the template (enable_thinking). `tokens`: the folder's tokenizer, where it is loaded already.

    Raises MissingInputError (no tokenizer), TemplateError (no chat template, or one that cannot be
    trusted: see `eyas.chat.template`) and MaskDisagreement.
    """

    def __init__(
        self,
        folder: str | Path,
        date: datetime.date | None = None,
        options: Mapping[str, Any] | None = None,
        tokens: TargetTokenizer | None = None,
    ) -> None:
        self.folder = str(folder)
        self._tokens = tokens or TargetTokenizer(self.folder)
        self.eos_token_ids = self._tokens.end_ids
        self._template = Template(self._tokens.tokenizer, self.folder, date, options or {})
        try:
            self._frame, own = frame_of(self._template, self._tokens)
            framing = {*own, *self._tokens.ends.values()}
            # A target may write control tokens of its own that its template knows of, one that
            # begins a tool call; others, and those that frame turns, are text in an answer too.
            targets = {name for name in self._tokens.names if self._template.names(name)} - framing
            self._not_the_targets = pattern_of({*self._tokens.names} - targets)
            tools = self._template.probe_tools
            examine(lambda messages: self._turn(messages, tools), self._frame, self._tokens.bos_id)
        except TemplateProblem as problem:
            raise self._error(problem) from problem

    def with_options(self, options: Mapping[str, Any]) -> Chat:
        """The same tokenizer, and its template with other options. Raises what Chat raises."""
        return Chat(self.folder, options=options, tokens=self._tokens)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer as transformers has it, so that nothing loads it a second time."""
        return self._tokens.tokenizer

    @property
    def needs_a_date(self) -> bool:
        """True when the template may print today's date and no date is fixed."""
        return self._template.needs_a_date

    # Messages to tokens

    def render(
        self, messages: Messages, add_generation_prompt: bool = False, tools: Tools | None = None
    ) -> str:
        """The conversation as text. Raises TemplateError when the template refuses it (roles that
        do not alternate, ...).
        """
        return self._template.render(messages, add_generation_prompt, tools)

    def prompt_ids(self, messages: Messages, tools: Tools | None = None) -> list[int]:
        """The tokens that the target continues: all messages and the opening of the assistant's
        turn.

        Messages are text: a control token's name in them is spelled, not obeyed (see
        `control_text`). Raises TemplateError: the template refuses the messages, or does not let
        such a name be kept apart from a token.
        """
        try:
            given = self._shielded(messages, tools)
            return self._tokens.ids(self._rendered(given, given.messages, True))
        except TemplateProblem as problem:
            raise self._error(problem) from problem

    def control_text(self, messages: Messages, tools: Tools | None = None) -> list[str]:
        """The control tokens whose names messages hold as text, sorted; nearly always none.

        SGLang and vLLM obey them: their answer to such messages is not an answer to these tokens.
        """
        of_tools = [
            name
            for tool in tools or ()
            for text in strings(tool)
            for name in self._tokens.control.findall(text)
        ]
        of_messages = [
            name
            for one in messages
            for text in strings(one)
            for name in self._names_that_are_text(one).findall(text)
        ]
        return sorted({*of_messages, *of_tools})

    def _names_that_are_text(self, message: Mapping[str, Any]) -> re.Pattern[str]:
        return self._not_the_targets if message["role"] == "assistant" else self._tokens.control

    def answered(
        self, messages: Messages, finish_reason: str = "stop", tools: Tools | None = None
    ) -> tuple[list[int], list[bool]]:
        """Tokens [T] and loss mask [T] of a conversation that ends with the target's answer; see
        `turn`.
        """
        turn = self.turn(messages, finish_reason, tools)
        return turn.ids, turn.mask

    def turn(
        self, messages: Messages, finish_reason: str = "stop", tools: Tools | None = None
    ) -> Turn:
        """A conversation that ends with the target's answer, as the server saw it.

        The mask is true on the answer's tokens and, with finish_reason "stop", on its end-of-turn
        token; what the template adds around them (a line break after the turn, an empty thinking
        block) is the server's, not the target's.

        Raises TemplateError when there is no exact mask: the rendered text does not hold the answer
        as written, or some turn before it; the tokens before it are not `prompt_ids`; the template
        prints today's date and none is fixed. Raises MaskDisagreement when the two ways give two
        masks: a bug, which stops a run.
        """
        if self._template.needs_a_date:
            raise TemplateError(
                f"the chat template of {self.folder} prints today's date: a row made with it has "
                "other tokens tomorrow",
                "give the day on which the target answered",
            )
        try:
            turn = self._turn(messages, tools, finish_reason)
        except TemplateProblem as problem:
            raise self._error(problem) from problem
        if finish_reason != "stop":
            turn.mask[len(turn.mask) - 1 - turn.mask[::-1].index(True)] = False
        return turn

    def _turn(
        self, messages: Messages, tools: Tools | None = None, finish_reason: str = "stop"
    ) -> Turn:
        assert messages[-1]["role"] == "assistant"
        if not isinstance(messages[-1].get("content") or "", str):
            raise TemplateProblem("has no one text for an answer in several parts")
        if self.has_channels and self.control_text(messages[-1:]):
            raise TemplateProblem("does not write the channels of this answer", OF_CHANNELS)
        given = self._shielded(messages, tools)
        wording = Wording.of(given.messages[-1])
        prompt = self._rendered(given, given.messages[:-1], True)
        _expect_every_turn(given.messages[:-1], prompt.text)
        thoughts = self._frame.thoughts
        if thoughts and thoughts.is_open and prompt.text.endswith(thoughts.text):
            wording = _inside(thoughts, wording, finish_reason == "stop")
        whole = self._whole(given, given.messages, prompt, wording)
        prompt_ids = self._tokens.encode(prompt).ids
        encoded = self._tokens.encode(whole)
        first = mask_by_spans(prompt, whole, encoded, wording, self._frame)
        find = self._finder(given, wording, prompt, prompt_ids)
        second = mask_by_prefixes(prompt_ids, encoded.ids, tuple(self._tokens.ends), find)
        if first != second:
            raise MaskDisagreement(self.folder, encoded, first, second)
        return Turn(encoded, first, len(prompt_ids))

    def _whole(
        self, given: _TemplateInput, messages: Messages, prompt: RenderedText, wording: Wording
    ) -> RenderedText:
        """The conversation with its answer behind the prompt that the server saw, also where the
        template renders something else before an answer than it gives the target.

        An answer in one text that begins inside of the prompt's thoughts follows the prompt as it
        is; elsewhere the rendered answer is put behind the prompt.
        """
        whole, thoughts = self._ended(given, messages).text, self._frame.thoughts
        if thoughts and not prompt.text.endswith(thoughts.text):
            thoughts = None
        if thoughts and thoughts.is_open:
            if wording.text is not None:
                whole = prompt.text + wording.text + self._frame.tail
            elif not whole.startswith(prompt.text):
                raise TemplateProblem("leaves out the reasoning of an answer", OF_THOUGHTS)
        elif thoughts:
            stem = prompt.text.removesuffix(thoughts.text) + thoughts.instead
            answer = whole.removeprefix(stem)
            if not whole.startswith(stem) or thoughts.end in answer:
                raise TemplateProblem("rewrites the prompt once this answer follows", OF_THOUGHTS)
            whole = prompt.text + answer
        elif not whole.startswith(prompt.text):
            whole = self._behind(prompt.text, whole, wording.text)
        return RenderedText(whole, given.shield)

    def _behind(self, prompt: str, whole: str, text: str | None) -> str:
        """The prompt and the rendered answer, where the template changes what is before an answer
        once that follows: words at the end, a system prompt in the last question (Mistral), a line
        break after a tool's result (Hermes). Any other rendering as it is.
        """
        frame = self._frame
        if frame.moved:
            words, header = frame.moved
            stem = prompt.removesuffix(words + header) + header
            if prompt.endswith(words + header) and whole.startswith(stem):
                return prompt + whole.removeprefix(stem).removesuffix(words)
            return whole
        if text is not None and not frame.opening and whole.endswith(text + frame.tail):
            return prompt + text + frame.tail
        return whole

    def _ended(self, given: _TemplateInput, messages: Messages) -> RenderedText:
        """The rendered conversation; with the next turn's first token where only that ends an
        answer: of a user's turn, or of a tool's result after calls.
        """
        whole, end = self._rendered(given, messages, False), self._frame.next_turn
        if end and (calls := messages[-1].get("tool_calls")):
            result = {"role": "tool", "content": "", "tool_call_id": calls[0].get("id", "")}
            after = self._rendered(given, [*messages, result], False).text
            rest = after.removeprefix(whole.text) if after.startswith(whole.text) else ""
            end = next((name for name in self._frame.ends if rest.startswith(name)), "")
        return RenderedText(whole.text + end, given.shield)

    def _finder(
        self,
        given: _TemplateInput,
        wording: Wording,
        prompt: RenderedText,
        prompt_ids: list[int],
    ) -> FindAnswer:
        """How the second way finds this answer among the tokens after the prompt."""
        if wording.text is not None:
            text = wording.text.replace(given.shield, "") if given.shield else wording.text
            return by_spelling((text, self._tokens.normalized(text)), self._tokens.spelled)
        if wording.has_reasoning:
            return everything
        last = prompt_ids[-1:]

        def spell(ids: list[int]) -> str:
            return self._tokens.spelled([*last, *ids]).removeprefix(self._tokens.spelled(last))

        def between(content: str) -> list[int]:
            other = [*given.messages[:-1], {"role": "assistant", "content": content}]
            ids = self._tokens.encode(self._whole(given, other, prompt, wording)).ids
            ids = ids[len(prompt_ids) :]
            ends = (at for at, token in enumerate(ids) if token in self._tokens.ends)
            return ids[: next(ends, len(ids))]

        return by_others([between(one) for one in OTHER_ANSWERS], spell)

    def _rendered(
        self, given: _TemplateInput, messages: Messages, add_generation_prompt: bool
    ) -> RenderedText:
        return RenderedText(
            self._template.render(messages, add_generation_prompt, given.tools), given.shield
        )

    def _shielded(self, messages: Messages, tools: Tools | None) -> _TemplateInput:
        """Messages and tools with no control token's name whole. Raises TemplateProblem when the
        template does more with a text than write it, so that the shield changes its output.
        """
        if not self.control_text(messages, tools):
            return _TemplateInput(messages, tools)
        shield = shield_for(
            text for value in (*messages, *(tools or ())) for text in strings(value)
        )
        guarded = [
            shielded(message, self._names_that_are_text(message), shield) for message in messages
        ]
        given = _TemplateInput(
            guarded, shielded(tools, self._tokens.control, shield) if tools else tools, shield
        )
        is_prompt = messages[-1]["role"] != "assistant"
        plain = self._template.render(messages, is_prompt, tools)
        if self._rendered(given, guarded, is_prompt).text.replace(shield, "") != plain:
            raise TemplateProblem("changes a message that holds a control token's name")
        return given

    def _error(self, problem: TemplateProblem) -> TemplateError:
        return TemplateError(
            f"the chat template of {self.folder} {problem}",
            problem.hint
            or "check chat_template in that folder, and eos_token_id in its "
            "generation_config.json or config.json",
        )

    # Answers

    @property
    def has_channels(self) -> bool:
        """True when the target opens its answers with control tokens, as gpt-oss does: their text
        is whole only with those tokens' names.
        """
        return self._frame.channels is not None

    def answer_text(self, ids: list[int]) -> str:
        """What the target wrote, of its tokens without the end token: what `message` takes."""
        return self._tokens.spelled(ids) if self.has_channels else self.decode(ids)

    def message(self, text: str) -> dict[str, Any]:
        """The message of an answer from its `answer_text`: thoughts in a channel of their own apart
        from the content, as servers take them back; `turn` of it has the text's own tokens.

        A text that the template writes in no such way stays in one: `turn` refuses it.
        """
        content, thoughts = text, {}
        if self._frame.channels is not None:
            first, between = self._frame.channels
            if first and text.startswith(first) and text.count(between) == 1:
                reasoning, _, content = text.removeprefix(first).partition(between)
                thoughts = {"reasoning_content": reasoning}
            elif not self._tokens.control.search(plain := text.removeprefix(self._frame.opening)):
                content = plain
        return {"role": "assistant", "content": content, **thoughts}

    # Tokens to text

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; special tokens are left out, everything else is kept as it is."""
        return self._tokens.decode(ids)

    def stream(self) -> TextStream:
        """A new incremental `decode`."""
        return TextStream(self.decode)


def _inside(thoughts: Thoughts, wording: Wording, is_whole: bool) -> Wording:
    """An answer that begins inside of the thoughts which the prompt leaves open, as the target
    wrote it: without the block's beginning, which some clients put back.

    Raises TemplateProblem where its thoughts are lost, or not closed though it is whole: the target
    wrote more than the message has.
    """
    if wording.text is None:
        if not wording.has_reasoning:
            raise TemplateProblem(LOST_THOUGHTS, OF_THOUGHTS)
        return wording
    text = wording.text.removeprefix(thoughts.text)
    inner, end, _ = text.partition(thoughts.end)
    if thoughts.begin in inner or (is_whole and not end):
        raise TemplateProblem(LOST_THOUGHTS, OF_THOUGHTS)
    return Wording(text, (), False)


def _expect_every_turn(messages: Messages, prompt: str) -> None:
    """Raise TemplateProblem unless the prompt holds the texts of users and tools, in their order,
    and every system prompt.

    White space around a text may go (Llama 3 trims), and a tool's result may be written as JSON.
    Answers of earlier turns may lose their reasoning: they are checked where they are last.
    """
    at = 0
    for message in messages:
        text = message.get("content")
        if message["role"] == "assistant" or not isinstance(text, str):
            continue
        written = (text.strip(), json.dumps(text, ensure_ascii=False)[1:-1])
        found = [
            (prompt.find(one, at if message["role"] != "system" else 0), len(one))
            for one in written
        ]
        begin, length = next(((begin, length) for begin, length in found if begin >= 0), (-1, 0))
        if begin < 0:
            raise TemplateProblem("leaves out a message, changes it, or moves it")
        if message["role"] != "system":
            at = begin + length
