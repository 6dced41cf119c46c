"""The target's tokenizer for a server: text, tokens, bytes, and what the chat template supports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property, lru_cache, partial
from typing import Any, Literal

from eyas.chat import Chat, TextStream, encoded
from eyas.errors import TemplateError

_PROBE = "a-tool-to-look-for"
_QUESTION = {"role": "user", "content": "Hello"}
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SHRINKING = 4  # how many times shorter a tokenizer's normalization may make a text
MAX_CHATS = 8  # kept, one for each combination of template options
# Byte-level tokenizers write bytes as characters: visible ones as they are, the others from 256 on.
_SEEN = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_UNSEEN = [byte for byte in range(256) if byte not in _SEEN]
_BYTES = {chr(byte): byte for byte in _SEEN} | {
    chr(256 + at): byte for at, byte in enumerate(_UNSEEN)
}


class Tokenizer:
    """Tokens from and to text, for any thread."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._backend = chat.tokenizer
        self._with_options = lru_cache(MAX_CHATS)(lambda *options: chat.with_options(dict(options)))

    # Text to tokens

    def chat(self, options: Mapping[str, bool | str]) -> Chat:
        """The Chat with these template options. Raises TemplateError."""
        return self._with_options(*sorted(options.items())) if options else self._chat

    def knows_option(self, name: str) -> bool:
        """Whether the chat template leaves a variable of this name to the client."""
        return name in self._chat.options

    @cached_property
    def tool_form(self) -> Literal["template", "generic"] | None:
        """How the target gets tools, with calls as JSON between <tool_call> tags: from its
        template, or as text (tools.in_text). None: its template has another form of calls, or its
        tokenizer does not keep the tags.
        """
        function = {"name": _PROBE, "description": "", "parameters": {"type": "object"}}
        shown = self._shown([_QUESTION], [{"type": "function", "function": function}])
        tags = "<tool_call></tool_call>"
        if shown is None or self.decode(self.encode(tags)) != tags:
            return None
        if _PROBE not in shown:
            return "generic"
        return "template" if "<tool_call>" in shown else None

    @cached_property
    def takes_system(self) -> bool:
        """Whether the template shows a system message."""
        turns = [{"role": "system", "content": _PROBE}, _QUESTION]
        return _PROBE in (self._shown(turns) or "")

    def _shown(
        self, turns: list[dict[str, str]], tools: list[dict[str, Any]] | None = None
    ) -> str | None:
        try:
            return self._chat.render(turns, True, tools)
        except TemplateError:
            return None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The tokens of a text; add_special_tokens: also those around every text."""
        return list(encoded(self._backend, text, add_special_tokens).ids)

    def least_tokens(self, num_characters: int) -> int:
        """A lower bound of a text's tokens: refuses a far too long text before it is encoded."""
        return num_characters // (_SHRINKING * self._longest_token)

    # Tokens to text

    def decode(self, ids: list[int], skips_special: bool = True) -> str:
        """The text of tokens."""
        return self._backend.decode(ids, skip_special_tokens=skips_special)

    def stream(self, skips_special: bool = True) -> TextStream:
        """A new incremental `decode`."""
        return TextStream(partial(self.decode, skips_special=skips_special))

    def piece(self, token: int) -> bytes:
        """The bytes of a token; of a special token, its name."""
        name = self._backend.id_to_token(token)
        if name is None or token in self._special_ids:
            return (name or "").encode()
        if self._is_byte_level:
            return b"".join(bytes([_BYTES[one]]) if one in _BYTES else one.encode() for one in name)
        if byte := _BYTE.fullmatch(name):
            return bytes([int(byte[1], 16)])
        return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def knows(self, token: int) -> bool:
        return self._backend.id_to_token(token) is not None

    def num_characters(self, token: int) -> int:
        """Characters of a token's text: 0 if it is special."""
        return 0 if token in self._special_ids else len(self.piece(token).decode(errors="replace"))

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._backend.get_vocab()))

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(
            number
            for number, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        )

    @cached_property
    def _is_byte_level(self) -> bool:
        # the decoder's own state: that of a whole tokenizer is megabytes
        return b'"ByteLevel"' in self._backend.decoder.__getstate__()
