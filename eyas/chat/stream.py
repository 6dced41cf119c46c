"""Text as tokens arrive. Knows how tokens are decoded through a function only."""

from __future__ import annotations

from collections.abc import Callable, Iterable

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


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
