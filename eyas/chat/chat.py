"""The tokenizer and the chat template of a target, together."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from eyas.chat.template import Template
from eyas.chat.tokenizer import (
    ShieldedText,
    TargetTokenizer,
    TemplateProblem,
    shield_for,
    shielded,
    strings,
)
from eyas.errors import TemplateError

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
QUESTION = "Hello"


class Chat:
    """Tokenizer and chat template of the target in `folder` (Hugging Face's form, local files
    only).

    `date`: today's for templates; None is the clock. Data stages fix it: tomorrow the same
    conversation would have other tokens. `options`: variables of the template (enable_thinking).
    `tokens`: the folder's tokenizer, if it is loaded. Raises MissingInputError (no tokenizer),
    TemplateError (no chat template, or one that prints the time or does not render a question).
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
        self._template = Template(
            self._tokens.templates, self._tokens.named, self.folder, date, options or {}
        )
        # a template that cannot work fails before anything is done
        messages, tools = [{"role": "user", "content": QUESTION}], self._template.probe_tools
        with self._named_problems():
            if QUESTION not in self.render(messages, True, tools):
                raise TemplateProblem("leaves out a message, or changes it")
            bos = self._tokens.id_of("bos_token")
            if bos is not None and self.prompt_ids(messages, tools)[:2] == [bos, bos]:
                raise TemplateProblem("begins with two BOS tokens")

    def with_options(self, options: Mapping[str, Any]) -> Chat:
        """The same target with other options of the template. Raises TemplateError."""
        return Chat(self.folder, options=options, tokens=self._tokens)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokens.backend

    @property
    def options(self) -> frozenset[str]:
        """The variables that the template leaves to a client (enable_thinking)."""
        return self._template.options

    @property
    def needs_a_date(self) -> bool:
        """Whether the template may print today's date and no date is given."""
        return self._template.needs_a_date

    # Messages to tokens

    def render(
        self, messages: Messages, add_generation_prompt: bool = False, tools: Tools | None = None
    ) -> str:
        """The conversation as text. Raises TemplateError when the template refuses it."""
        return self._template.render(messages, add_generation_prompt, tools)

    def prompt_ids(
        self, messages: Messages, tools: Tools | None = None, continues: bool = False
    ) -> list[int]:
        """The tokens that the target continues: all messages and the opening of the assistant's
        turn; or, with `continues`, all up to the end of the last message's content.

        A control token's name in messages is text (`control_text`). Raises TemplateError: the
        template refuses the messages, or such a name cannot be kept apart.
        """
        with self._named_problems():
            opened = self._opened if continues else partial(self._rendered, is_open=True)
            return self._tokens.ids(opened(messages, tools))

    def _opened(self, messages: Messages, tools: Tools | None) -> ShieldedText:
        """The text up to the end of the last message's content, which a template may trim."""
        rendered = self._rendered(messages, tools)
        content = str(messages[-1]["content"])
        # the template may repeat the content after it: a mark says where it ends
        mark = shield_for([*strings([*messages, *(tools or ())]), rendered.shield or ""])
        marked = [*messages[:-1], {**messages[-1], "content": content + mark}]
        opened, found, _ = self._rendered(marked, tools).text.rpartition(mark)
        trimmed = opened[: len(opened) - len(content) + len(content.rstrip())]
        for text in (opened, trimmed):
            if found and rendered.text.startswith(text):
                return ShieldedText(text, rendered.shield)
        raise TemplateProblem("changes the message that is to be continued")

    def control_text(self, messages: Messages, tools: Tools | None = None) -> list[str]:
        """The control tokens whose names messages and tools hold as text, sorted. SGLang and vLLM
        take them for control tokens: they answer another prompt than `prompt_ids`.
        """
        texts = strings([*messages, *(tools or ())])
        return sorted({name for text in texts for name in self._tokens.control.findall(text)})

    def answered(
        self, messages: Messages, tools: Tools | None = None
    ) -> tuple[list[int], list[int]]:
        """Prompt and answer of a conversation that eyas did not generate: `prompt_ids` of the
        messages before the last, then that answer's tokens and the token that ends it.

        Raises TemplateError where the template does not render that prompt, the unchanged `content`
        and an end token, and where nothing says which tokens the target wrote: reasoning, calls, a
        control token's name.
        """
        with self._named_problems():
            return self._answered(messages, tools)

    def _answered(self, messages: Messages, tools: Tools | None) -> tuple[list[int], list[int]]:
        answer = messages[-1]
        assert answer["role"] == "assistant"
        if self.needs_a_date:
            raise TemplateProblem(
                "prints today's date: a row made with it has other tokens tomorrow",
                "give the day on which the target answered",
            )
        text = answer.get("content")
        if not isinstance(text, str) or set(answer) - {"role", "content"}:
            raise TemplateProblem(
                "gets an answer in several parts",
                "give the answer as the target wrote it, all of it in `content`",
            )
        if self._tokens.control.search(text):
            raise TemplateProblem("gets an answer that names a control token")
        prompt = self._rendered(messages[:-1], tools, is_open=True)
        rendered = self._rendered(messages, tools)
        if not rendered.text.startswith(prompt.text):
            raise TemplateProblem("rewrites the prompt once an answer follows")
        body = rendered.text[len(prompt.text) :]
        ends = {body.find(name): name for name in self._tokens.ends.values() if name in body}
        if not ends:
            raise TemplateProblem("does not end an answer with a token of eos_token_id")
        at = min(ends)
        rest = body[at:]
        for name in self._tokens.ends.values():
            rest = rest.replace(name, "")
        if body[:at] != text or rest.strip():
            raise TemplateProblem("does not render an answer as the target wrote it")
        prompt_ids = self._tokens.ids(prompt)
        ids = self._tokens.ids(ShieldedText(prompt.text + text + ends[at], prompt.shield))
        if ids[: len(prompt_ids)] != prompt_ids or ids[-1] not in self.eos_token_ids:
            raise TemplateProblem("joins the answer and what is beside it into one token")
        return prompt_ids, ids[len(prompt_ids) :]

    def _rendered(
        self, messages: Messages, tools: Tools | None, is_open: bool = False
    ) -> ShieldedText:
        """The text with every control token's name of a message broken. Raises TemplateError, and
        TemplateProblem where that changes what the template writes.
        """
        plain = self._template.render(messages, is_open, tools)
        if not self.control_text(messages, tools):
            return ShieldedText(plain)
        control, shield = self._tokens.control, shield_for(strings([*messages, *(tools or ())]))
        guarded, guarded_tools = (shielded(one, control, shield) for one in (messages, tools))
        text = self._template.render(guarded, is_open, guarded_tools)
        if text.replace(shield, "") != plain:
            raise TemplateProblem("changes a message that holds a control token's name")
        return ShieldedText(text, shield)

    @contextmanager
    def _named_problems(self) -> Iterator[None]:
        try:
            yield
        except TemplateProblem as problem:
            hint = "check chat_template in that folder, and eos_token_id in its "
            hint = problem.hint or f"{hint}generation_config.json or config.json"
            what = f"the chat template of {self.folder} {problem}"
            raise TemplateError(what, hint) from problem

    # Tokens to text

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens without special ones."""
        return self._tokens.decode(ids)

    def has_control(self, ids: Iterable[int]) -> bool:
        """Whether any of the tokens is a control token."""
        return not self._tokens.control_ids.isdisjoint(ids)
