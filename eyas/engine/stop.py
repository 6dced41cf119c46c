"""Stop strings: the token that completes one in the decoded text, and the text before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eyas.chat import TextStream


class StopFilter:
    """Passes text through up to the first stop string and holds back what may become one.

    The joined results of `push` and `finish` are the text before the stop string that is complete
    first (of two that end together, the longer), however the text was cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string stops everything"
        self.hit = False
        self.rest = ""  # after a hit: what came behind the stop string in the same piece
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> str:
        """The text that cannot become part of a stop string; after a hit, nothing."""
        if self.hit:
            return ""
        self._held += text
        ends = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        if ends:
            self.hit = True
            end, start = min(ends)
            self.rest = self._held[end:]
            return self._held[:start]
        # the longest end of the held text that begins a stop string
        longest = min(len(self._held), max(map(len, self._stops), default=1) - 1)
        ends_open = (
            n
            for n in range(longest, 0, -1)
            if any(stop.startswith(self._held[-n:]) for stop in self._stops)
        )
        certain = len(self._held) - next(ends_open, 0)
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def finish(self) -> str:
        """The held text, when the text ended without a stop string."""
        return "" if self.hit else self._held


class StopChecker:
    """Decodes a sample's tokens one by one and ends its text before the first stop string.

    An unfinished character is no text yet, so a stop string never matches half of one. The text of
    the first `min_tokens` tokens is not searched.
    """

    def __init__(
        self, stops: Sequence[str], decode: Callable[[list[int]], str], min_tokens: int = 0
    ) -> None:
        self._stream = TextStream(decode)
        self._filter = StopFilter(stops)
        self._text, self._left = "", min_tokens

    def push(self, token: int) -> bool:
        """Whether this token completes a stop string."""
        text = self._stream.push([token])
        if self._left > 0:
            self._left -= 1
            self._text += text
            return False
        self._text += self._filter.push(text)
        return self._filter.hit

    def finish(self) -> bool:
        """Whether the bytes that waited behind the last token complete a stop string."""
        self._text += self._filter.push(self._stream.finish()) + self._filter.finish()
        return self._filter.hit

    def take_text(self) -> str:
        """The certain text since the last call."""
        text, self._text = self._text, ""
        return text
