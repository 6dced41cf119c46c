"""Texts of one prompt cleaned as the stage `prompts` does by default: the same detector, policy and
key. Knows no file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from eyas.privacy.detector import Detector
from eyas.privacy.key import privacy_key
from eyas.privacy.policy import PrivacyConfig
from eyas.privacy.surrogates import clean as without_findings


def cleaner() -> Callable[[Sequence[str]], list[str] | str]:
    """A function from texts to texts without personal data and secrets, or to the type for which
    they are dropped.

    Raises ConfigError for the key.
    """
    config, key = PrivacyConfig(), privacy_key()
    detector = Detector(config, key)

    def clean(texts: Sequence[str]) -> list[str] | str:
        found = detector.find_all(texts)
        dropping = config.first_that_drops(one.type for findings in found for one in findings)
        return dropping or without_findings(texts, found, config, key)

    return clean
