"""A plain function as a recogniser of Presidio's. Knows no type of data.

All that is ours is a function from a text to the places in it, so that it can be read and tested
without an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from presidio_analyzer import LocalRecognizer, RecognizerResult

Place = tuple[str, int, int]  # type, and characters [start, end)
Search = Callable[[str], Iterable[Place]]

SURE = 1.0  # Presidio's score of what a function found: the function has decided


class Recognizer(LocalRecognizer):  # type: ignore[misc]
    """Presidio's interface to a function that finds values of these types."""

    def __init__(self, search: Search, *types: str) -> None:
        self._search = search
        super().__init__(
            supported_entities=list(types), name=getattr(search, "__name__", type(search).__name__)
        )

    def load(self) -> None:
        """Nothing to load."""

    def analyze(
        self, text: str, entities: list[str], nlp_artifacts: Any = None
    ) -> list[RecognizerResult]:
        return [
            RecognizerResult(type, start, end, SURE)
            for type, start, end in self._search(text)
            if type in entities
        ]
