"""Texts with the values that are to be found between ⟨ and ⟩, and detectors for them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from eyas.privacy.detector import Detector
from eyas.privacy.pii import NAME_TYPES, PrivacyConfig

KEY = b"k" * 32
NO_NAMES = dict.fromkeys(NAME_TYPES, "keep")
PATTERNS = Detector(PrivacyConfig(policy="mask", actions=NO_NAMES), KEY)


def unmarked(text: str) -> str:
    return re.sub("[⟨⟩]", "", text)


def marked(text: str, find: Callable[[str], list[Any]] = PATTERNS.find) -> tuple[str, set[str]]:
    """A text with marks around what a search finds, and the types that it finds."""
    parts, end, findings = [], 0, find(text)
    for one in findings:
        parts += [text[end : one.start], "⟨", text[one.start : one.end], "⟩"]
        end = one.end
    return "".join([*parts, text[end:]]), {one.type for one in findings}
