"""The target's tokenizer: text to tokens, and tokens to text, streamed too.

A control token is one that the tokenizer marks as special. A user's `<end of turn>` must not become
one: before the template, a Unicode non-character breaks such names in messages (`shielded`). Whole
names are then the template's own: they get stand-ins, the only names that `_plain_backend` knows.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer

from eyas.chat.files import read_tokenizer

_SHIELDS = tuple(map(chr, range(0xFDD0, 0xFDEF)))
_STAND_IN = "\ufdef"  # a non-character, too
_PRIVATE = 0xF0000  # the first character of a plane for private use
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_UNCERTAIN = 4  # the last tokens may be the beginning of a character of at most so many bytes
LONG_TEXT = 16_384  # characters
_MANY_PENDING = 32  # tokens without a whole character: no longer a character's beginning


class TemplateProblem(Exception):
    """The end of a sentence that begins with "the chat template", and a hint. Chat raises it as a
    TemplateError.
    """

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class ShieldedText:
    """A text from the template. shield: the character that breaks control tokens' names of
    messages; None where they hold none.
    """

    text: str
    shield: str | None = None


def encoded(backend: Tokenizer, text: str, add_special_tokens: bool = False) -> Encoding:
    """The tokens of a text. A single text blocks all other threads (a second for 500 KB); a batch
    does not, but starts threads, so only long texts are batches.
    """
    if len(text) < LONG_TEXT:
        return backend.encode(text, add_special_tokens=add_special_tokens)
    (encoding,) = backend.encode_batch([text], add_special_tokens=add_special_tokens)
    return encoding


class TargetTokenizer:
    """The tokenizer in `folder`, with its templates. named: special tokens by their names in
    templates (bos_token, ...). Raises MissingInputError.
    """

    def __init__(self, folder: str) -> None:
        files = read_tokenizer(Path(folder))
        self.backend, self.named, self.templates = files.backend, files.named, files.templates
        special = {
            number: token.content
            for number, token in self.backend.get_added_tokens_decoder().items()
            if token.special
        }
        self.control_ids = frozenset(special)
        self.names = tuple(special.values())
        # the longest name first; nothing matches where there are none
        names = sorted(filter(None, self.names), key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self.end_ids = _end_tokens(Path(folder), self.id_of("eos_token"))
        # Turns end by control tokens, if any end the output; not by a recipe's stop token.
        closing = [number for number in self.end_ids if number in special] or self.end_ids
        self.ends = {number: str(self.backend.id_to_token(number)) for number in closing}

    def id_of(self, name: str) -> int | None:
        """The id of a special token by its name in templates."""
        return self.backend.token_to_id(self.named[name]) if name in self.named else None

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens without special ones."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def ids(self, rendered: ShieldedText) -> list[int]:
        """The tokens of a text without its shields. Raises TemplateProblem for control tokens that
        the text does not name, or that may come of the text between two.
        """
        ids = encoded(self.backend, rendered.text).ids
        if rendered.shield is None:
            found = sum(map(self.control_ids.__contains__, ids))
            if found > len(self.control.findall(rendered.text)):
                raise TemplateProblem("meets a tokenizer that makes control tokens of other text")
            return ids
        if _STAND_IN in rendered.text or self._standing_in(rendered.text) != ids:
            raise TemplateProblem("meets a tokenizer that takes no control token's name for text")
        return self._standing_in(rendered.text, rendered.shield)

    def _standing_in(self, text: str, without: str = "") -> list[int]:
        """The tokens of a text without a character; whole names are control tokens."""
        replaced = self.control.sub(lambda found: self._stand_ins[found.group()], text)
        ids = encoded(self._plain_backend, replaced.replace(without, "")).ids
        return [self._meant.get(number, number) for number in ids]

    @cached_property
    def _stand_ins(self) -> dict[str, str]:
        """For each control token's name one of the same length that no text holds."""
        return {
            name: _STAND_IN * (len(name) - 1) + chr(_PRIVATE + at)
            for at, name in enumerate(self.names)
        }

    @cached_property
    def _plain_backend(self) -> Tokenizer:
        plain = copy.deepcopy(self.backend)
        plain.encode_special_tokens = True
        plain.add_tokens(
            [AddedToken(one, special=False, normalized=False) for one in self._stand_ins.values()]
        )
        return plain

    @cached_property
    def _meant(self) -> dict[int, int]:
        """Control tokens by the ids of their stand-ins."""
        made, known = self._plain_backend.get_vocab(), self.backend.get_vocab()
        return {made[stand_in]: known[name] for name, stand_in in self._stand_ins.items()}


class TextStream:
    """Text as tokens arrive: `push` and `finish`, joined, are `decode` of all tokens.

    Bytes that never become a character are returned once later tokens cannot change them;
    `tokenizers`' own DecodeStream keeps them, and has no `finish`.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # the last tokens with text, then those without any yet
        self._num_returned = 0  # tokens of the window with text
        self._returned = ""
        self._try_at = _MANY_PENDING

    def push(self, ids: Iterable[int]) -> str:
        """The new text of these tokens; the bytes of an unfinished character wait."""
        ids = list(ids)
        self._window += ids
        text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._return(text) if len(text) > len(self._returned) else ""
        if len(ids) > 1:  # only the last character is unfinished
            del self._window[-len(ids) :]
            return "".join(self.push([token]) for token in ids)
        is_due = len(self._window) - self._num_returned >= self._try_at
        return self._settle_bytes(text) if is_due else ""

    def finish(self) -> str:
        """What still waits."""
        rest = self._decode(self._window)[len(self._returned) :]
        self._window, self._num_returned, self._returned = [], 0, ""
        return rest

    def _return(self, text: str) -> str:
        new = text[len(self._returned) :]
        del self._window[: self._num_returned]
        self._num_returned = len(self._window)
        self._returned, self._try_at = self._decode(self._window), _MANY_PENDING
        return new

    def _settle_bytes(self, text: str) -> str:
        """Text of all but the last tokens, if those do not change it; else try again later."""
        last = self._window[-_UNCERTAIN:]
        settled = self._decode(self._window[:-_UNCERTAIN])
        if len(settled) <= len(self._returned) or settled + self._decode(last) != text:
            self._try_at *= 2
            return ""
        new = settled[len(self._returned) :]
        self._window, self._num_returned, self._returned, self._try_at = last, 0, "", _MANY_PENDING
        return new


def strings(value: Any) -> Iterator[str]:
    """All strings in a value of JSON, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def shield_for(texts: Iterable[str]) -> str:
    """A non-character that none of the texts holds. Raises TemplateProblem."""
    used = set().union(*map(set, texts))
    free = next((shield for shield in _SHIELDS if shield not in used), None)
    if free is None:
        raise TemplateProblem("meets a text with every non-character of Unicode")
    return free


def shielded(value: Any, control: re.Pattern[str], shield: str) -> Any:
    """A copy of a value of JSON with each control token's name broken after its first character."""
    if isinstance(value, str):
        while found := control.findall(value):
            if min(map(len, found)) == 1:
                raise TemplateProblem("has a control token of one character, which a message holds")
            value = control.sub(lambda name: name.group()[0] + shield + name.group()[1:], value)
        return value
    if isinstance(value, Mapping):
        return dict(shielded(item, control, shield) for item in value.items())
    if isinstance(value, list | tuple):
        return [shielded(item, control, shield) for item in value]
    return value


def _end_tokens(folder: Path, fallback: int | None) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ends = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        if ends is not None:
            return tuple(ends) if isinstance(ends, list) else (ends,)
    return () if fallback is None else (fallback,)
