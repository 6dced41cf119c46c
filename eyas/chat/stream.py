"""Text as tokens arrive. Knows how tokens are decoded through a function only."""

from __future__ import annotations

from collections.abc import Callable, Iterable

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# the last tokens of a text may be the beginning of a character, of at most so many bytes
_UNCERTAIN = 4
_MANY_PENDING = 32  # tokens without a whole character: no longer a character's beginning


class TextStream:
    """Text as tokens arrive: what `push` and `finish` return, joined, is `decode` of all tokens.

    Only the tokens since the last text but one are decoded anew, so a long answer costs no more per
    token than a short one. Bytes that never become a character do not pile up: they are given out
    as soon as what follows them cannot change them, which is tried every so many tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # the last tokens that gave text, then those that have not yet
        self._num_told = 0  # how many of the window have given text
        self._told = ""
        self._try_at = _MANY_PENDING

    def push(self, ids: Iterable[int]) -> str:
        """The new text of these tokens; the bytes of an unfinished character wait for the next
        push.
        """
        ids = list(ids)
        self._window += ids
        text = self._decode(self._window)
        if not text.endswith(_REPLACEMENT):
            return self._tell(text) if len(text) > len(self._told) else ""
        if len(ids) > 1:  # only the last character is unfinished
            return self._push_one_by_one(ids)
        return (
            self._give_up_on_bytes(text)
            if len(self._window) - self._num_told >= self._try_at
            else ""
        )

    def finish(self) -> str:
        """What still waits, when no more tokens come."""
        rest = self._decode(self._window)[len(self._told) :]
        self._window, self._num_told, self._told = [], 0, ""
        return rest

    def _push_one_by_one(self, ids: list[int]) -> str:
        del self._window[-len(ids) :]
        return "".join(self.push([token]) for token in ids)

    def _tell(self, text: str) -> str:
        new = text[len(self._told) :]
        del self._window[: self._num_told]
        self._num_told = len(self._window)
        self._told, self._try_at = self._decode(self._window), _MANY_PENDING
        return new

    def _give_up_on_bytes(self, text: str) -> str:
        """Text of all but the last pending tokens, if it is the same with and without those; else
        try again later.
        """
        last = self._window[-_UNCERTAIN:]
        settled = self._decode(self._window[:-_UNCERTAIN])
        if len(settled) <= len(self._told) or settled + self._decode(last) != text:
            self._try_at *= 2
            return ""
        new = settled[len(self._told) :]
        self._window, self._num_told, self._told, self._try_at = last, 0, "", _MANY_PENDING
        return new
