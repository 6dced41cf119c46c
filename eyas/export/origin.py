"""What the card of a head that eyas did not train says: its licence, and what it was trained on.
Pure text.

Knows the fields of a Hugging Face card's front matter, and headings of Markdown. Believes nothing:
what is found is quoted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

LICENCE, TERMS = "license", ("license", "license_name", "license_link")
FRONT = re.compile(r"\A---\s*\n(.*?)\n---\s*$", re.S | re.M)
DATA = re.compile(r"^## +Data\b[^\n]*\n(.*?)(?=^##? |\Z)", re.S | re.M | re.I)


@dataclass(frozen=True, slots=True)
class Origin:
    """terms: the front matter's fields of a licence, if it names one. data: the text of the section
    "Data"; empty for none.
    """

    terms: Mapping[str, str] = field(default_factory=dict)
    data: str = ""

    @classmethod
    def of(cls, card: str) -> Origin:
        """What a README.md says; nothing where it has no front matter, or none that is YAML."""
        card = card.replace("\r\n", "\n")
        front, data = FRONT.match(card), DATA.search(card)
        fields = _fields(front[1]) if front else {}
        terms = (
            {name: str(fields[name]) for name in TERMS if fields.get(name)}
            if fields.get(LICENCE)
            else {}
        )
        return cls(terms, data[1].strip() if data else "")

    @property
    def licence(self) -> str | None:
        """The licence by its name; None where the card has none."""
        return self.terms.get(LICENCE)


def _fields(front: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(front)
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}
