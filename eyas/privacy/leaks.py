"""What a model's answer holds that nobody told it: personal data and secrets that are not in the
conversation before it.

Knows texts, neither models nor rows. Values that were set aside (example.com, 555-01xx, cards for
tests) are nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence

from eyas.privacy.detector import Detector
from eyas.privacy.finding import Finding
from eyas.privacy.key import canonical
from eyas.privacy.policy import PrivacyConfig
from eyas.privacy.surrogates import is_fictional

# Answers speak of public people and places, as they should; an address or a number out of nowhere
# is somebody's.
OF_ANSWERS = PrivacyConfig(
    policy="drop", actions={"street_address": "keep", "person": "keep", "location": "keep"}
)


class Leaks:
    """Finds them; every type that the config does not keep counts, whatever its action."""

    def __init__(self, config: PrivacyConfig = OF_ANSWERS) -> None:
        self._detector = Detector(config)

    def __call__(self, before: Sequence[str], answer: str) -> list[Finding]:
        """By place in the answer, without hashes. before: all that was said to the model and by it."""
        found = [
            one
            for one in self._detector.find(answer)
            if not is_fictional(one.type, answer[one.start : one.end])
        ]
        if not found:
            return []
        said = "\n".join(before)
        known = {
            canonical(one.type, said[one.start : one.end]) for one in self._detector.find(said)
        }
        return [
            one
            for one in found
            if answer[one.start : one.end] not in said
            and canonical(one.type, answer[one.start : one.end]) not in known
        ]
