"""The target's tokenizer and chat template: messages to tokens, the mask of an answer, tokens to text.

The only file that knows role tokens, and it learns them from the template. Knows no model and no stage.

    render(messages)   <turn>user\\nHi<end>\\n<turn>assistant\\nHello!<end>\\n
    prompt             `------------------------------------'
    answer (mask)                                          `----------'

Stock templates carry no generation tag (EAGLE3.md, section 3), so the answer is found by rendering the conversation
three times: without it, with a marker in its place, and with it. The three must agree character for character, and the
tokens before the answer must be those that the server saw; otherwise there is no mask but a TemplateError.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jinja2
from transformers import AutoTokenizer

from eyas.errors import MissingInputError, TemplateError
from eyas.records import Message

_MARKER = "the-answer-goes-here"
_PROBE: Message = {"role": "user", "content": "Hello"}
_DATE_CODES = (*"aAbBdejmyYxGguVwUHIMSp", "-d", "-m")  # of strftime; the hour of a fixed date is midnight
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Chat:
    """Tokenizer and chat template of the target in `folder` (Hugging Face's form, local files only).

    `date`: what a template that prints today's date is to print; None is the clock, as a server has it. Data stages fix
    it, or the same conversation would have other tokens tomorrow.

    Raises MissingInputError (no tokenizer) and TemplateError (no chat template, or one that cannot be trusted: it
    rewrites the prompt once an answer follows, or ends turns with a token that does not end the target's output).
    """

    def __init__(self, folder: str | Path, date: datetime.date | None = None) -> None:
        self.folder = str(folder)
        if not Path(folder).is_dir():
            raise MissingInputError(f"no folder at {folder}", "give a target's folder in Hugging Face's form")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        except (OSError, ValueError) as error:
            first_line = str(error).splitlines()[0]
            raise MissingInputError(
                f"{folder} has no tokenizer that can be read: {first_line}",
                "put the target's tokenizer files beside its weights",
            ) from error
        if not self._tokenizer.is_fast:
            raise MissingInputError(f"{folder} has no fast tokenizer", "add its tokenizer.json: character offsets need it")
        if self._tokenizer.chat_template is None:
            raise TemplateError(
                f"the tokenizer in {folder} has no chat template",
                "put the template that the target was trained with into chat_template.jinja in that folder; "
                "a base model without one cannot be used for chat",
            )
        self._template = _with_fixed_date(self._tokenizer.get_chat_template(), date)
        self._special_ids = {number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        self.eos_token_ids = _end_tokens(Path(folder), self._tokenizer.eos_token_id)
        self.answered([_PROBE, {"role": "assistant", "content": _MARKER}])

    # Messages to tokens

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The conversation as text. Raises TemplateError when the template refuses it (roles that do not alternate, ...)."""
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), chat_template=self._template, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise TemplateError(
                f"the chat template of {self.folder} refuses a conversation: {error}",
                "check the conversation's roles and contents",
            ) from error
        return str(text)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The tokens that the target goes on from: all messages and the opening of the assistant's turn."""
        return self._encode(self.render(messages, add_generation_prompt=True))

    def answered(self, messages: Sequence[Message], finish_reason: str = "stop") -> tuple[list[int], list[bool]]:
        """Tokens [T] and loss mask [T] of a conversation whose last message is the target's answer.

        The mask is true on the answer's tokens and, with finish_reason "stop", on its end-of-turn token; what the
        template adds around them (a line break after the turn, an empty thinking block) is the server's, not the
        target's. Raises TemplateError when the rendered text does not hold the answer as written, or when the tokens
        before it are not `prompt_ids` of the messages before it.
        """
        *before, answer = messages
        assert answer["role"] == "assistant"
        prompt = self.render(before, add_generation_prompt=True)
        marked, _, closing = self.render([*before, {"role": "assistant", "content": _MARKER}]).rpartition(_MARKER)
        whole = self.render(messages)
        # Right after the prompt, or after something that the template opens every answer with.
        opening = next((text for text in (prompt, marked) if whole == text + answer["content"] + closing), None)
        if opening is None or not opening.startswith(prompt):
            raise self._distrust("does not render an answer as the target wrote it")
        encoded = self._tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids, spans = list(encoded["input_ids"]), encoded["offset_mapping"]
        prompt_ids = self._encode(prompt)
        if ids[: len(prompt_ids)] != prompt_ids:
            raise self._distrust("joins the prompt and the answer into one token")
        start, stop = len(opening), len(whole) - len(closing)
        first, last = len(prompt_ids), len(ids)
        while opening != prompt and first < last and spans[first][1] <= start:
            if ids[first] in self._special_ids:
                raise self._distrust("opens an answer with a role token that its generation prompt lacks")
            first += 1
        end = next((at for at in range(first, last) if spans[at][0] >= stop and ids[at] in self.eos_token_ids), None)
        if end is None or whole[stop : spans[end][0]].strip():
            raise self._distrust("does not end an answer with a token that ends the target's output (eos_token_id)")
        mask = [first <= at < end and spans[at][0] < stop for at in range(last)]
        if any(spans[at][1] > stop for at in range(first, end) if mask[at]):
            raise self._distrust("joins the answer and the end of its turn into one token")
        mask[end] = finish_reason == "stop"
        return ids, mask

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _distrust(self, what: str) -> TemplateError:
        return TemplateError(
            f"the chat template of {self.folder} {what}",
            "check chat_template in that folder, and eos_token_id in its generation_config.json or config.json",
        )

    # Tokens to text

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; special tokens are left out, everything else is kept as it is."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def stream(self) -> TextStream:
        """A new incremental `decode`."""
        return TextStream(self.decode)


class TextStream:
    """Text as tokens arrive: what `push` and `finish` return, joined, is `decode` of all tokens.

    Only the tokens since the last text but one are decoded anew, so a long answer costs no more per token than a short one.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # the last tokens that gave text, then those that have not yet
        self._num_told = 0
        self._told = ""

    def push(self, ids: Iterable[int]) -> str:
        """The new text of these tokens; the bytes of an unfinished character wait for the next push."""
        return "".join(self._push_one(token) for token in ids)

    def finish(self) -> str:
        """What still waits, when no more tokens come."""
        rest = self._decode(self._window)[len(self._told) :]
        self._window, self._num_told, self._told = [], 0, ""
        return rest

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if len(text) <= len(self._told) or text.endswith(_REPLACEMENT):
            return ""
        new = text[len(self._told) :]
        self._window = self._window[self._num_told :]
        self._num_told = len(self._window)
        self._told = self._decode(self._window)
        return new


def _with_fixed_date(template: str, date: datetime.date | None) -> str:
    """Shadow the function `strftime_now` that templates get, by a macro: a function cannot be handed to a template."""
    if date is None or "strftime_now" not in template:
        return template
    filled = "".join(f" | replace('%{code}', '{date.strftime('%' + code)}')" for code in _DATE_CODES)
    return f"{{%- macro strftime_now(format) -%}}{{{{ format{filled} }}}}{{%- endmacro +%}}{template}"


def _end_tokens(folder: Path, fallback: int | None) -> tuple[int, ...]:
    """The tokens that end the target's output, where an engine looks for them: generation config, config, tokenizer."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ends = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if ends is not None:
            return tuple(ends) if isinstance(ends, list) else (ends,)
    return () if fallback is None else (fallback,)
