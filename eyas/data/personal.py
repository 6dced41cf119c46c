"""The row filter for personal data and secrets: a row as the policy wants it, or the row dropped.

Knows which texts of a row are searched and how a drop is called. What is found and how it is
replaced is eyas.privacy's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from eyas.data.rows import Drop, Row
from eyas.privacy.cleaning import cleaned
from eyas.privacy.detector import Detector
from eyas.privacy.finding import Finding
from eyas.privacy.policy import PrivacyConfig


class PersonalData:
    """Masks and replaces what the policy says; drops a row that holds a type that the policy drops.

    A row's result depends on the row, the config and the key alone.
    """

    def __init__(self, config: PrivacyConfig, key: bytes) -> None:
        """key: of hashes and surrogates. Raises ConfigError for a backend or a recogniser that is
        not there.
        """
        self._config, self._key = config, key
        self._detector = Detector(config, key)

    def __call__(self, row: Row) -> Row | Drop:
        return self.many([row])[0]

    def many(self, rows: Sequence[Row]) -> list[Row | Drop]:
        """Each row's result; a service is asked about all of them at once."""
        texts = [_texts(row) for row in rows]
        found = iter(self._detector.find_all([text for of_row in texts for text in of_row]))
        return [
            self._result(row, of_row, [next(found) for _ in of_row])
            for row, of_row in zip(rows, texts, strict=True)
        ]

    def _result(self, row: Row, texts: list[str], found: list[list[Finding]]) -> Row | Drop:
        every = tuple(
            one for number, findings in enumerate(found) for one in _of_turn(findings, number)
        )
        if not every:
            return row
        if dropping := self._config.first_that_drops(one.type for one in every):
            return Drop(
                f"pii.{dropping.lower()}",
                note="the policy drops rows that hold this type",
                found=every,
            )
        system, *turns = cleaned(texts, found, self._config, self._key)
        return dataclasses.replace(
            row,
            system=system if row.system is not None else None,
            turns=tuple(turns),
            masked=row.masked + every,
        )


@functools.cache
def _default() -> Detector:
    return Detector(PrivacyConfig())


def find(text: str) -> list[Finding]:
    """Everything that is found in a text, all types, by place, without hashes: for what people are
    shown of it.
    """
    return _default().find_every(text)


def _texts(row: Row) -> list[str]:
    """The system prompt, empty where there is none, and the turns."""
    return [row.system or "", *row.turns]


def _of_turn(findings: list[Finding], number: int) -> list[Finding]:
    """The findings with their turn; text 0 is the system prompt."""
    return [dataclasses.replace(one, turn=number - 1 if number else None) for one in findings]
