"""The texts of one conversation with what was found in them masked or replaced, as the policy says.
Knows no row.
"""

from __future__ import annotations

from collections.abc import Sequence

from eyas.privacy.detector import mask, replaced
from eyas.privacy.finding import Finding
from eyas.privacy.policy import PrivacyConfig
from eyas.privacy.surrogates import Surrogates

BETWEEN = "\x1e"  # record separator


def cleaned(
    texts: Sequence[str], found: Sequence[Sequence[Finding]], config: PrivacyConfig, key: bytes
) -> list[str]:
    """Each text without its findings; none may be of a type that drops.

    A value has one surrogate in all the texts, drawn for the conversation as it reads with every
    value masked: conversations that differ in their values alone become the same one, and are found
    to be duplicates.
    """
    conversation = BETWEEN.join(
        mask(text, findings) for text, findings in zip(texts, found, strict=True)
    )
    values = [
        (one.type, text[one.start : one.end])
        for text, findings in zip(texts, found, strict=True)
        for one in findings
    ]
    surrogates = Surrogates(key, conversation, values)

    def instead(type: str, value: str) -> str:
        action = config.action(type)
        assert action in ("mask", "surrogate"), f"{type} is not to be replaced"
        return f"<{type}>" if action == "mask" else surrogates.of(type, value)

    return [
        replaced(text, findings, [instead(one.type, text[one.start : one.end]) for one in findings])
        for text, findings in zip(texts, found, strict=True)
    ]
