"""Stop strings in a text that arrives in pieces. Pure text: knows no token and no server."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Lets text through up to the first stop string, holding back what may yet become one.

    All that `push` and `finish` return, joined, is the text before the stop string that is complete
    first (of two that end together, the longer), however the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string stops everything"
        self.hit = False
        self.rest = ""  # after a hit: what came behind the stop string with it
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is certain now; after a hit, nothing."""
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
        certain = len(self._held) - self._open_length()
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def finish(self) -> str:
        """What was held back, when the text ended without a stop string."""
        return "" if self.hit else self._held

    def _open_length(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = min(len(self._held), max(map(len, self._stops), default=1) - 1)
        return next(
            (
                n
                for n in range(longest, 0, -1)
                if any(stop.startswith(self._held[-n:]) for stop in self._stops)
            ),
            0,
        )
