"""Where an answer ends by a stop string: the token that completes it in the decoded text. Knows no
server and no sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eyas.chat import TextStream


class StopChecker:
    """Fed with an answer's tokens, one by one; says after which of them a stop string is complete
    in their text.

    Only the new text and as much before it as a stop string may reach back is searched. The bytes
    of an unfinished character are no text yet, so a stop string never matches half a character.
    """

    def __init__(self, stops: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        assert all(stops), "an empty stop string stops everything"
        self._stops = tuple(stops)
        self._stream = TextStream(decode)
        self._reach = max(map(len, self._stops), default=1) - 1
        self._tail = ""

    def push(self, token: int) -> bool:
        """Whether this token completes a stop string. Not to be asked again after True."""
        text = self._tail + self._stream.push([token])
        self._tail = text[max(len(text) - self._reach, 0) :]
        return any(stop in text for stop in self._stops)
