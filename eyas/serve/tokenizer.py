"""The target's tokenizer as a server needs it: text as it is, text as it arrives, the bytes of a
token, what its template can.

Messages are Chat's affair; with options of the template a Chat of their own. Knows no role token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property

from eyas.chat import Chat, TextStream
from eyas.errors import InputError, TemplateError

_PROBE = "a-tool-that-nobody-calls"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SHRINKING = 4  # how many times shorter a tokenizer's normalization may make a text
_OURS = frozenset(
    {"add_generation_prompt", "continue_final_message", "documents", "messages", "tools"}
)
_MOST_CHATS = 8
Options = tuple[tuple[str, bool], ...]


class Tokenizer:
    """Tokens from and to text. One thread uses it at a time."""

    def __init__(self, chat: Chat) -> None:
        self._chats: dict[Options, Chat] = {(): chat}
        self._tokenizer = chat.tokenizer
        self._backend = self._tokenizer.backend_tokenizer
        self._longest_token = max(map(len, self._backend.get_vocab()))

    # Text to tokens

    def chat(self, options: Mapping[str, bool]) -> Chat:
        """The Chat whose template is given these options; the first time it is made, which takes
        its time.

        Raises TemplateError for a template that cannot be trusted with them, InputError for more
        than can be kept.
        """
        key = tuple(sorted(options.items()))
        if key not in self._chats:
            if len(self._chats) >= _MOST_CHATS:
                raise InputError(
                    "chat_template_kwargs were given in too many combinations",
                    "use those in use already",
                )
            self._chats[key] = self._chats[()].with_options(options)
        return self._chats[key]

    def knows_option(self, name: str) -> bool:
        """Whether the chat template looks at an option, which it would ignore otherwise."""
        template = str(self._tokenizer.get_chat_template())
        return name not in _OURS and re.search(rf"\b{re.escape(name)}\b", template) is not None

    @cached_property
    def calls_tools_in_tags(self) -> bool:
        """Whether the template shows tools to the target and has calls written as JSON between
        <tool_call> tags.
        """
        tool = {
            "type": "function",
            "function": {"name": _PROBE, "description": "", "parameters": {"type": "object"}},
        }
        try:
            shown = self._chats[()].render([{"role": "user", "content": "Hello"}], True, [tool])
        except TemplateError:
            return False
        tags = "<tool_call></tool_call>"
        return _PROBE in shown and "<tool_call>" in shown and self.decode(self.encode(tags)) == tags

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """A text as it is, with the tokens that the tokenizer puts around every text where they are
        asked for.
        """
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def least_tokens(self, num_characters: int) -> int:
        """Tokens that so much text has at least: what cannot fit need not be encoded to be refused."""
        return num_characters // (_SHRINKING * self._longest_token)

    # Tokens to text

    def decode(self, ids: list[int]) -> str:
        """The text of tokens; special tokens are left out. The same as Chat's, without its detours."""
        return str(self._backend.decode(ids, skip_special_tokens=True))

    def stream(self) -> TextStream:
        """A new incremental `decode`."""
        return TextStream(self.decode)

    def piece(self, token: int) -> bytes:
        """The bytes that a token stands for; of a special token, its name."""
        name = self._backend.id_to_token(token)
        if name is None or token in self._special_ids:
            return (name or "").encode()
        if self._is_byte_level:
            return b"".join(bytes([_BYTES[one]]) if one in _BYTES else one.encode() for one in name)
        byte = _BYTE.fullmatch(name)
        return (
            bytes([int(byte[1], 16)])
            if byte
            else name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
        )

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(
            number
            for number, token in self._tokenizer.added_tokens_decoder.items()
            if token.special
        )

    @cached_property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self._backend.to_str())["decoder"])


def _byte_characters() -> dict[str, int]:
    """The characters that byte-level tokenizers write bytes as: printable ones as themselves, the
    others from 256 on.
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }


_BYTES = _byte_characters()
